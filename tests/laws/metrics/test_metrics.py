"""Every metric passes every law."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec import metrics
from funcrec.core._tree import tree_leaves, tree_map

METRICS = {
    "auc": metrics.auc(512),
    "auc_logits": metrics.auc(512, from_logits=True),
    "log_loss": metrics.log_loss(),
    "log_loss_logits": metrics.log_loss(from_logits=True),
    "normalized_entropy": metrics.normalized_entropy(),
    "calibration": metrics.calibration(),
    "ctr": metrics.ctr(),
    "accuracy": metrics.accuracy(0.4),
    "mse": metrics.mse(),
    "mae": metrics.mae(),
    "average_precision": metrics.average_precision(512),
    "recall_at_precision": metrics.recall_at_precision(0.5, 512),
    "positive_normalized_entropy": metrics.positive_normalized_entropy(),
    "binary_precision": metrics.binary_precision(0.4),
    "binary_recall": metrics.binary_recall(0.4),
    "mean_prediction": metrics.mean_prediction(),
    "r2": metrics.r2(),
    "nmse": metrics.nmse(),
    "log_loss_bits": metrics.log_loss(unit="bits"),
    "cali_free_ne": metrics.cali_free_ne(),
    "cali_free_ne_logits": metrics.cali_free_ne(from_logits=True),
    "nrmse": metrics.nrmse(),
    "hindsight_target_pr": metrics.hindsight_target_pr(0.5, 512),
    "weighted_avg": metrics.weighted_avg(),
    "mean_label": metrics.mean_label(),
    "labelled": metrics.labelled(metrics.normalized_entropy()),
    "recalibrated": metrics.recalibrated(metrics.calibration(), 0.3),
    "collect": metrics.collect({"auc": metrics.auc(64), "ne": metrics.normalized_entropy()}),
}
COUNTS = {
    "sum_weights": metrics.sum_weights(),
    "num_missing_labels": metrics.num_missing_labels(),
    "num_positive_samples": metrics.num_positive_samples(),
    "weighted_sum_predictions": metrics.weighted_sum_predictions(),
}
METRICS |= COUNTS
each_metric = pytest.mark.parametrize("name", METRICS)


@st.composite
def examples(draw):
    """Return random (predictions, labels, weights) of 1 to 40 examples. Shrinks towards few examples."""
    n, seed = draw(st.integers(1, 40)), draw(st.integers(0, 2**31))
    g = torch.Generator().manual_seed(seed)
    # predictions with ties, zeros and ones
    predictions = (torch.rand(n, generator=g) * 10).round() / 10
    labels = torch.randint(0, 2, (n,), generator=g).float()
    return predictions, labels, torch.randint(0, 4, (n,), generator=g).double()


def state_of(metric, rows):
    return metric.update(metric.init(), *rows)


def assert_close(a, b):
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, equal_nan=True)


@each_metric
@given(rows=examples(), at=st.integers(0, 40))
def test_split(name, rows, at):
    """Any split into batches gives the same state, updated in sequence or merged."""
    metric = METRICS[name]
    head, tail = [x[:at] for x in rows], [x[at:] for x in rows]
    whole = state_of(metric, rows)
    assert_close(metric.update(state_of(metric, head), *tail), whole)
    assert_close(metrics.merge(state_of(metric, head), state_of(metric, tail)), whole)


@each_metric
@given(a=examples(), b=examples(), c=examples())
def test_merge(name, a, b, c):
    """merge is commutative and associative. Its zero is init()."""
    metric = METRICS[name]
    a, b, c = (state_of(metric, rows) for rows in (a, b, c))
    merge = metrics.merge
    assert_close(merge(a, b), merge(b, a))
    assert_close(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_close(merge(a, metric.init()), a)


@each_metric
@given(rows=examples(), seed=st.integers(0, 99))
def test_order(name, rows, seed):
    """The order of the examples does not matter."""
    order = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(seed))
    assert_close(state_of(METRICS[name], [x[order] for x in rows]), state_of(METRICS[name], rows))


@each_metric
@given(rows=examples(), junk=st.integers(1, 5))
def test_padding(name, rows, junk):
    """Examples of weight 0 are padding, and NaN in these examples is not read."""
    grown = [torch.cat([x, x.new_full((junk,), torch.nan)]) for x in rows]
    grown[2] = torch.cat([rows[2], rows[2].new_zeros(junk)])
    assert_close(state_of(METRICS[name], grown), state_of(METRICS[name], rows))


@each_metric
@given(rows=examples())
def test_weights(name, rows):
    """An example of weight 2 equals two examples. Without weights, each example counts 1."""
    metric = METRICS[name]
    doubled = [torch.cat([x, x]) for x in rows]
    assert_close(state_of(metric, doubled), state_of(metric, [*rows[:2], rows[2] * 2]))
    assert_close(state_of(metric, rows[:2]), state_of(metric, [*rows[:2], torch.ones_like(rows[2])]))


@each_metric
def test_traced(name):
    """Traced update and compute give the same numbers as eager calls, without data-dependent operations."""
    metric = METRICS[name]
    rows = torch.rand(12), torch.randint(0, 2, (12,)).float(), torch.rand(12)
    step = lambda state, *rows: (metric.update(state, *rows), metric.compute(state))
    traced = make_fx(step, tracing_mode="fake")(metric.init(), *rows)
    again = state_of(metric, rows)
    assert_close(traced(again, *rows), step(again, *rows))


@each_metric
def test_vmap(name):
    """vmap over tasks is a loop over tasks."""
    metric = METRICS[name]
    p, y, w = torch.rand(3, 9), torch.randint(0, 2, (3, 9)), torch.rand(3, 9)
    zero = tree_map(lambda x: torch.stack([x] * 3), metric.init())
    states = torch.func.vmap(metric.update)(zero, p, y, w)
    for task in range(3):
        alone = state_of(metric, (p[task], y[task], w[task]))
        assert_close(tree_map(lambda x: x[task], states), alone)  # noqa: B023


@each_metric
def test_purity(name):
    """update changes none of its arguments. Before the first example a sum is 0, and any other metric is NaN."""
    metric, rows = METRICS[name], (torch.rand(5), torch.ones(5), torch.ones(5))
    before = metric.init()
    copies = tree_map(torch.clone, (before, rows))
    metric.update(before, *rows)
    assert_close((before, rows), copies)
    first = tree_leaves(metric.compute(metric.init()))
    assert all(x == 0 if name in COUNTS else x.isnan() for x in first)


@given(rows=examples())
def test_auc_bound(rows):
    """The AUC of a histogram is within auc_error of the exact AUC. If the scores fall into separate bins, the AUC is
    exact."""
    p, y, w = rows
    for bins in (4, 2**16):
        metric = metrics.auc(bins)
        state = state_of(metric, rows)
        exact, bound = metrics.exact_auc(p, y, w), metrics.auc_error(state)
        assert bool((metric.compute(state) - exact).abs() <= bound + 1e-12) or exact.isnan()
    torch.testing.assert_close(metric.compute(state), exact, rtol=0, atol=1e-12, equal_nan=True)


@given(rows=examples())
def test_exact_auc_order(rows):
    """exact_auc equals the pairwise definition. Increasing maps keep the AUC. Negated scores give 1 - AUC."""
    p, y, w = rows
    found = metrics.exact_auc(p, y, w)
    wins = (p[:, None] > p).double() + (p[:, None] == p).double() / 2
    pairs = (w * y)[:, None] * (w * (1 - y))
    torch.testing.assert_close(found, (wins * pairs).sum() / pairs.sum(), rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(metrics.exact_auc(p * 2 - 5, y, w), found, equal_nan=True)
    torch.testing.assert_close(metrics.exact_auc(-p, y, w), 1 - found, equal_nan=True)


def test_logits_are_probabilities():
    """A metric with from_logits of z equals the metric of sigmoid(z)."""
    z, y = torch.randn(200, generator=torch.Generator().manual_seed(0)).double(), torch.arange(200) % 2
    for make in (metrics.log_loss, metrics.normalized_entropy, metrics.calibration, metrics.accuracy, metrics.auc):
        of = lambda m, x: m.compute(state_of(m, (x, y)))
        torch.testing.assert_close(of(make(from_logits=True), z), of(make(), z.sigmoid()), rtol=1e-12, atol=1e-12)


def test_log_loss_far_logits():
    """A logit of 200 costs 200 when wrong and nothing when right."""
    m = metrics.log_loss(from_logits=True)
    loss = lambda y: float(m.compute(state_of(m, (torch.tensor([200.0]), torch.tensor([y])))))
    assert loss(0) == 200.0 and loss(1) < 1e-80


def test_base_rate_is_one():
    """A constant prediction of the base rate has normalized entropy 1 and calibration 1."""
    rows = torch.full((8,), 0.25, dtype=torch.float64), torch.tensor([1, 0, 0, 0, 0, 1, 0, 0])
    for m in (metrics.normalized_entropy(), metrics.calibration()):
        torch.testing.assert_close(m.compute(state_of(m, rows)), torch.tensor(1.0, dtype=torch.float64))


def test_nan_shows_when_traced():
    """Where values cannot be checked, a NaN prediction makes the result NaN."""
    for name in ("auc", "log_loss", "mse"):
        m = METRICS[name]
        run = torch.func.vmap(lambda p, y: m.compute(m.update(m.init(), p, y)))  # noqa: B023
        assert run(torch.tensor([[0.3, torch.nan]]), torch.tensor([[0, 1]])).isnan().all(), name


def test_jit():
    """fr.jit of an update gives the same state."""
    m = METRICS["collect"]
    rows = torch.rand(32), (torch.arange(32) % 2).float()
    assert_close(fr.jit(m.update)(m.init(), *rows), state_of(m, rows))
