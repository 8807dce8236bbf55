"""Metrics of sessions, of tasks and without missing labels equal the inner metric on the examples that they name."""

import math

import pytest
import sklearn.metrics as sklearn
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.as_staged import staged_only
from torch.func import grad, vmap

import funcrec as fr
from funcrec import metrics
from funcrec.core._tree import tree_leaves

near = lambda x: pytest.approx(float(x), rel=1e-10, abs=1e-12, nan_ok=True)


@st.composite
def examples(draw, most=24):
    """Return random (predictions f64[B] with ties, labels 0 to 3, weights 0 to 2, sessions), with B from 0."""
    n, g = draw(st.integers(0, most)), torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    p, y = torch.randint(0, 5, (n,), generator=g).double() / 4, torch.randint(0, 4, (n,), generator=g).double()
    return p, y, torch.randint(0, 3, (n,), generator=g).double(), torch.randint(-2, 3, (n,), generator=g)


def value(metric, *rows):
    return metric.compute(metric.update(metric.init(), *rows))


def sessions_of(p, y, w, sessions):
    """Return the examples of each session that has any of weight above 0."""
    kept = w > 0
    return [tuple(x[kept & (sessions == s)] for x in (p, y, w)) for s in sessions[kept].unique()]


def mean_of(pairs):
    """Return Σ ω x / Σ ω over (x, ω) whose x is a number."""
    pairs = [(float(x), float(w)) for x, w in pairs if not math.isnan(x)]
    return sum(x * w for x, w in pairs) / sum(w for _, w in pairs) if pairs else math.nan


@pytest.mark.parametrize("metric", [metrics.auc(8), metrics.normalized_entropy(), metrics.accuracy()])
@given(rows=examples())
def test_a_mean_over_sessions(metric, rows):
    """by_session is the mean of the metric of each session's examples, by the session's greatest weight. A session
    without a value is left out. A session of weight 2 is that session twice."""
    p, y, w, sessions = rows
    y = (y > 1).double()
    want = mean_of([(value(metric, *rows), rows[2].max()) for rows in sessions_of(p, y, w, sessions)])
    m = metrics.by_session(metric)
    assert float(value(m, p, (y, sessions), w)) == near(want)
    twice = [torch.cat([x, x]) for x in (p, y)]
    apart = torch.cat([sessions, sessions + 9])
    doubled = m.update(m.init(), p, (y, sessions), 2 * (w > 0))
    again = m.update(m.init(), twice[0], (twice[1], apart), (w > 0).repeat(2))
    assert [float(x) for x in tree_leaves(again)] == pytest.approx(
        [float(x) for x in tree_leaves(doubled)], nan_ok=True
    )


@given(rows=examples(), k=st.integers(1, 4), rank_labels=st.booleans())
def test_the_first_k_of_a_session(rows, k, rank_labels):
    """An example is among the k if fewer than k of its session are above it. Precision and recall count these
    examples, and padding is in no session."""
    p, y, w, sessions = rows
    y = y if rank_labels else (y > 1).double()
    found = {"said": 0.0, "positive": 0.0, "right": 0.0}
    for p_s, y_s, w_s in sessions_of(p, y, w, sessions):
        is_top = (p_s > p_s[:, None]).sum(1) < k
        is_positive = (y_s > y_s[:, None]).sum(1) < k if rank_labels else y_s == 1
        for n, x in (("said", is_top), ("positive", is_positive), ("right", is_top & is_positive)):
            found[n] += float((w_s * x).sum())
    over = lambda n: found["right"] / found[n] if found[n] else math.nan
    labels = (y, sessions)
    recall = metrics.recall_session_level(k, rank_labels=rank_labels)
    assert float(value(recall, p, labels, w)) == near(over("positive"))
    assert float(value(metrics.precision_session_level(k, rank_labels=rank_labels), p, labels, w)) == near(over("said"))


@given(rows=examples(), k=st.none() | st.integers(1, 4), exponential=st.booleans())
def test_ndcg_is_scikit_learns(rows, k, exponential):
    """The NDCG of a session is that of scikit-learn, also with ties. Sessions without a gain, for which scikit-learn
    gives 0, are left out. A session of one example, which scikit-learn refuses, has 1."""
    p, y, w, sessions = rows
    each = []
    for p_s, y_s, w_s in sessions_of(p, y, w, sessions):
        gains = y_s.exp2() - 1 if exponential else y_s
        if gains.sum():
            one = len(p_s) == 1
            each.append((1.0 if one else sklearn.ndcg_score(gains[None].numpy(), p_s[None].numpy(), k=k), w_s.max()))
    assert float(value(metrics.session_ndcg(k, exponential=exponential), p, (y, sessions), w)) == near(mean_of(each))


OF_SESSIONS = {
    "by_session": (metrics.by_session(metrics.normalized_entropy()), 1.0),
    "recall_session_level": (metrics.recall_session_level(2), 1.0),
    "precision_session_level": (metrics.precision_session_level(2, rank_labels=True), 3.0),
    "session_ndcg": (metrics.session_ndcg(2), 3.0),
    "session_ndcg of exponential gains": (metrics.session_ndcg(exponential=True), 3.0),
}
each_session = pytest.mark.parametrize("name", OF_SESSIONS)


@each_session
@given(a=examples(), b=examples(), junk=st.sampled_from([math.nan, math.inf, -3.0]))
def test_whole_sessions_add_up(name, a, b, junk):
    """Batches of whole sessions add up to one batch of all, in any order. Examples of weight 0 are not read."""
    metric, top = OF_SESSIONS[name]
    p, y, w, s = (torch.cat(xs) for xs in zip(a, b, strict=True))
    y = y.clamp(max=top)
    s = torch.cat([a[3], b[3] + 9])
    part = torch.arange(len(p)) < len(a[0])
    parts = [metric.update(metric.init(), p[i], (y[i], s[i]), w[i]) for i in (part, ~part)]
    want = [float(x) for x in tree_leaves(metric.update(metric.init(), p, (y, s), w))]
    assert [float(x) for x in tree_leaves(metrics.merge(*parts))] == pytest.approx(want, rel=1e-10, abs=1e-12)
    order = torch.randperm(len(p), generator=torch.Generator().manual_seed(2))
    filled = [torch.where(w > 0, x, junk)[order] for x in (p, y)]
    again = metric.update(metric.init(), filled[0], (filled[1], s[order]), w[order])
    assert [float(x) for x in tree_leaves(again)] == pytest.approx(want, rel=1e-10, abs=1e-12)


def two_batches(name, seed=0):
    """Return (predictions, labels, weights, sessions) of two batches of 12 examples."""
    g, top = torch.Generator().manual_seed(seed), OF_SESSIONS[name][1]
    p, y = torch.rand(2, 12, generator=g).round(decimals=1), torch.randint(0, 4, (2, 12), generator=g).clamp(max=top)
    return p, y, torch.randint(1, 3, (2, 12), generator=g).double(), torch.randint(0, 4, (2, 12), generator=g)


def test_compiled_calls_are_single_calls():
    """Staged calls have the numbers of single calls, and so does a compiled one."""
    rows = {n: [x[1] for x in two_batches(n, seed)] for seed, n in enumerate(OF_SESSIONS)}
    every = lambda rows: {n: value(OF_SESSIONS[n][0], p, (y, s), w) for n, (p, y, w, s) in rows.items()}
    with staged_only():
        torch.testing.assert_close(fr.jit(every)(rows), every(rows))
    one = {"session_ndcg": rows["session_ndcg"]}
    torch.testing.assert_close(fr.jit(every)(one), every(one))


@each_session
def test_sessions_compose_with_transforms(name):
    """Mapped calls have the numbers of single calls, of every dtype. Derivatives by the weights are numbers. A NaN that
    cannot be read makes the result NaN, and no example gives NaN."""
    metric, (p, y, w, s) = OF_SESSIONS[name][0], two_batches(name)
    f = lambda p, y, w, s: value(metric, p, (y, s), w)
    want = torch.stack([f(*rows) for rows in zip(p, y, w, s, strict=True)])
    torch.testing.assert_close(vmap(f)(p, y, w, s), want)
    for dtype in (torch.float16, torch.bfloat16):
        torch.testing.assert_close(f(p[0].to(dtype), y[0], w[0], s[0]), f(p[0].to(dtype).double(), y[0], w[0], s[0]))
    assert grad(lambda w: f(p[0], y[0], w, s[0]))(w[0]).isfinite().all()
    assert vmap(f)(p.masked_fill(p > 0.8, torch.nan), y, w, s).isnan().all()
    assert f(p[0, :0], y[0, :0], w[0, :0], s[0, :0]).isnan()


@given(rows=examples(), lost=st.floats(0, 1))
def test_missing_labels_are_left_out(rows, lost):
    """labelled is the metric of the examples that have a label. num_missing_labels is the weight of the others."""
    p, y, w, _ = rows
    y = torch.where(torch.linspace(0, 1, len(p)) < lost, torch.nan, (y > 1).double())
    has = ~y.isnan()
    for metric in (metrics.normalized_entropy(), metrics.num_positive_samples(), metrics.auc(8)):
        assert float(value(metrics.labelled(metric), p, y, w)) == near(value(metric, p[has], y[has], w[has]))
        assert float(value(metrics.labelled(metric), p, y)) == near(value(metric, p[has], y[has]))
    assert value(metrics.num_missing_labels(), p, y, w) == w[~has].sum()
    assert value(metrics.sum_weights(), p, y, w) == w.sum()


@pytest.mark.parametrize("weights", ["none", "of examples", "of tasks"])
def test_each_task_has_its_column(weights, interpreted):
    """per_task has the metric of each column, mapped and staged too."""
    g = torch.Generator().manual_seed(0)
    p, y = torch.rand(20, 3, generator=g), torch.randint(0, 2, (20, 3), generator=g)
    w = {"none": None, "of examples": torch.rand(20, generator=g), "of tasks": torch.rand(20, 3, generator=g)}[weights]
    rows = (p, y) if w is None else (p, y, w)
    every = [metrics.per_task(metric, 3) for metric in (metrics.auc(64), metrics.calibration())]
    compiled = fr.jit(lambda *rows: [value(m, *rows) for m in every])(*rows)
    for metric, m, got in zip((metrics.auc(64), metrics.calibration()), every, compiled, strict=True):
        of = lambda x, t: x[:, t] if x is not None and x.dim() == 2 else x
        want = torch.stack([value(metric, p[:, t], y[:, t], of(w, t)) for t in range(3)])
        f = lambda *rows: value(m, *rows)  # noqa: B023
        torch.testing.assert_close(f(*rows), want)
        torch.testing.assert_close(vmap(f)(*(x[None] for x in rows))[0], want)
        torch.testing.assert_close(got, want)


@given(rows=examples(), k=st.integers(1, 4))
def test_the_top_of_a_session_as_logits(rows, k):
    """top_k_of_session of a metric of logits equals that of the metric of probabilities. Metrics of both kinds, joined
    by collect, raise."""
    p, y, w, sessions = rows
    y = (y > 1).double()
    for metric in (metrics.binary_precision, metrics.accuracy, metrics.binary_recall):
        got, want = (
            value(metrics.top_k_of_session(metric(from_logits=is_logit), k), p, (y, sessions), w)
            for is_logit in (True, False)
        )
        assert float(got) == near(want)
    both = metrics.collect({"a": metrics.accuracy(), "b": metrics.accuracy(from_logits=True)})
    with pytest.raises(ValueError, match="logits and of probabilities"):
        metrics.top_k_of_session(both, k)
