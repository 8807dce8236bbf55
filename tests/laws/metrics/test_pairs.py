"""RAUC and XAUC equal brute force over all pairs, Somers' D of scipy, and AUC where labels are 0 and 1."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.as_staged import staged_only
from scipy.stats import kendalltau, somersd
from torch.func import hessian, jacrev, vmap

import funcrec as fr
from funcrec import metrics

near = lambda x: pytest.approx(float(x), rel=1e-11, abs=1e-12, nan_ok=True)


@st.composite
def examples(draw, least=0, most=40, levels=6):
    """Return random (predictions f64[B] with ties, numbers as labels, weights 0 to 2, groups), B from `least`."""
    n, g = draw(st.integers(least, most)), torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    p, y = (torch.randint(-levels, levels, (n,), generator=g).double() for _ in range(2))
    return p, y, torch.randint(0, 3, (n,), generator=g).double(), torch.randint(-2, 3, (n,), generator=g)


def pairs_in_order(p, y, w):
    """Return (the weight of pairs in order, ties of predictions half; the weight of pairs of different labels)."""
    pairs = (y[:, None] > y) * w[:, None] * w
    return (pairs * ((p[:, None] > p).double() + (p[:, None] == p).double() / 2)).sum(), pairs.sum()


def rauc(p, y, w):
    agreeing, pairs = pairs_in_order(p, y, w)
    return float(agreeing / pairs)


@given(rows=examples())
def test_rauc_is_that_of_all_pairs(rows):
    """exact_rauc sums over all pairs of different labels. Increasing maps keep it, and negated scores give 1 - RAUC.
    The order of the examples does not matter."""
    p, y, w, _ = rows
    got = float(metrics.exact_rauc(p, y, w))
    assert got == near(rauc(p, y, w))
    assert float(metrics.exact_rauc(p * 3 - 1, y.exp(), w)) == near(got)
    assert float(metrics.exact_rauc(-p, y, w)) == near(1 - got)
    order = torch.randperm(len(p), generator=torch.Generator().manual_seed(1))
    assert float(metrics.exact_rauc(p[order], y[order], w[order])) == near(got)


@given(rows=examples(least=2))
def test_rauc_is_scipys(rows):
    """RAUC is (1 + D) / 2 for Somers' D of the labels, which scipy computes unless one side is constant. Without ties
    it is (1 + Kendall's tau) / 2."""
    p, y, _, _ = rows
    if len(y.unique()) > 1 and len(p.unique()) > 1:
        assert float(metrics.exact_rauc(p, y)) == near((1 + somersd(y.numpy(), p.numpy()).statistic) / 2)
    elif len(y.unique()) > 1:
        assert metrics.exact_rauc(p, y) == 0.5
    p, y = (x + torch.linspace(0, 0.5, len(x)).double() for x in (p, y))
    assert float(metrics.exact_rauc(p, y)) == near((1 + kendalltau(p.numpy(), y.numpy()).statistic) / 2)


@given(rows=examples())
def test_rauc_of_clicks_is_auc(rows):
    """With labels 0 and 1 RAUC is AUC, with ties and weights, and within groups too."""
    p, y, w, groups = rows
    y = (y > 0).double()
    assert float(metrics.exact_rauc(p, y, w)) == near(metrics.exact_auc(p, y, w))
    for equal in (False, True):
        want = metrics.grouped_auc(p, (y, groups), w, equal=equal)
        assert float(metrics.grouped_rauc(p, (y, groups), w, equal=equal)) == near(want)


@given(rows=examples())
def test_means_over_groups(rows):
    """Each mean over groups is that of the function of a whole set, of each group alone. A group without a value is
    left out, and groups count by their weights or alike."""
    p, y, w, groups = rows
    clicks = (y > 0).double()
    for whole, of_groups, labels in (
        (metrics.exact_rauc, metrics.grouped_rauc, y), (metrics.exact_auc, metrics.grouped_auc, clicks),
        (metrics.exact_average_precision, metrics.grouped_average_precision, clicks),
    ):  # fmt: skip
        each = [(whole(p[g], labels[g], w[g]), w[g].sum()) for g in (groups == i for i in groups.unique())]
        judged = [(float(x), float(n)) for x, n in each if not x.isnan()]
        for equal in (False, True):
            counts = [1.0 if equal else n for _, n in judged]
            want = sum(x * n for (x, _), n in zip(judged, counts, strict=True)) / sum(counts) if counts else math.nan
            assert float(of_groups(p, (labels, groups), w, equal=equal)) == near(want)
        assert float(of_groups(p, (labels, groups * 0), w)) == near(whole(p, labels, w))


@given(rows=examples())
def test_an_example_of_weight_2_is_two(rows):
    """Weights count examples: an example of weight n is n examples, in RAUC, XAUC and the means over groups. A pair of
    an example and its copy has equal labels, and does not count."""
    p, y, w, groups = rows
    each = [x.repeat_interleave(w.long()) for x in (p, y, groups)]
    assert float(metrics.exact_rauc(p, y, w)) == near(metrics.exact_rauc(*each[:2]))
    m = metrics.xauc()
    assert float(m.compute(m.update(m.init(), p, y, w))) == near(m.compute(m.update(m.init(), *each[:2])))
    p_all, y_all, g_all = each
    assert float(metrics.grouped_rauc(p, (y, groups), w)) == near(metrics.grouped_rauc(p_all, (y_all, g_all)))
    clicks = (y > 0).double(), (y_all > 0).double()
    for f in (metrics.grouped_auc, metrics.grouped_average_precision):
        assert float(f(p, (clicks[0], groups), w, equal=True)) == near(f(p_all, (clicks[1], g_all), equal=True))


@given(batches=st.lists(examples(), min_size=1, max_size=4))
def test_xauc_is_that_of_the_pairs_within_batches(batches):
    """xauc adds the pairs of each batch, and no pair of two batches. States of batches add up."""
    m = metrics.xauc()
    states = [m.update(m.init(), p, y, w) for p, y, w, _ in batches]
    agreeing, pairs = (sum(x) for x in zip(*(pairs_in_order(*b[:3]) for b in batches), strict=True))
    state = m.init()
    for p, y, w, _ in batches:
        state = m.update(state, p, y, w)
    assert float(m.compute(state)) == near(agreeing / pairs)
    merged = m.init()
    for s in states:
        merged = metrics.merge(merged, s)
    assert float(m.compute(merged)) == near(agreeing / pairs)


@given(rows=examples(), junk=st.sampled_from([math.nan, math.inf, -7.0]))
def test_padding_is_never_read(rows, junk):
    """Examples of weight 0 change nothing, whatever they hold."""
    p, y, w, groups = rows
    kept = w > 0
    filled = [torch.where(kept, x, junk) for x in (p, y)]
    assert float(metrics.exact_rauc(*filled, w)) == near(metrics.exact_rauc(p[kept], y[kept], w[kept]))
    want = metrics.grouped_rauc(p[kept], (y[kept], groups[kept]), w[kept])
    assert float(metrics.grouped_rauc(filled[0], (filled[1], groups), w)) == near(want)


FUNCTIONS = {
    "exact_rauc": metrics.exact_rauc,
    "exact_average_precision": metrics.exact_average_precision,
    "grouped_rauc": lambda p, y, w: metrics.grouped_rauc(p, (y, torch.arange(len(y)) % 2), w, equal=True),
    "grouped_average_precision": lambda p, y, w: metrics.grouped_average_precision(p, (y, torch.arange(len(y)) % 2), w),
    "xauc": lambda p, y, w: metrics.xauc().compute(metrics.xauc().update(metrics.xauc().init(), p, y, w)),
}


def test_compiled_calls_are_single_calls():
    """Staged calls have the numbers of single calls, and so does a compiled one."""
    g = torch.Generator().manual_seed(0)
    rows = {n: [(torch.rand(9, generator=g) * 5).round() / 5 for _ in range(3)] for n in FUNCTIONS}
    rows = {n: (p, (y > 0.4).double(), w.double() + 0.1) for n, (p, y, w) in rows.items()}
    every = lambda rows: {n: f(*rows[n]) for n, f in FUNCTIONS.items()}
    with staged_only():
        torch.testing.assert_close(fr.jit(every)(rows), every(rows))
    one = "grouped_rauc"
    torch.testing.assert_close(fr.jit(FUNCTIONS[one])(*rows[one]), FUNCTIONS[one](*rows[one]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_compose_with_transforms(name):
    """Mapped calls have the numbers of single calls, of every dtype of predictions. Derivatives by the weights equal
    differences, and so do the second ones; those by the scores are 0, since only their order counts."""
    f, g = FUNCTIONS[name], torch.Generator().manual_seed(0)
    p = (torch.rand(2, 9, generator=g) * 5).round() / 5
    y, w = torch.randint(0, 2, (2, 9), generator=g).double(), torch.rand(2, 9, generator=g).double()
    want = torch.stack([f(*rows) for rows in zip(p, y, w, strict=True)])
    torch.testing.assert_close(vmap(f)(p, y, w), want)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        rounded = p[0].to(dtype)
        torch.testing.assert_close(f(rounded, y[0], w[0]), f(rounded.double(), y[0], w[0]))
    of = lambda w: f(p[0], y[0], w)
    step = 1e-4 * torch.eye(9, dtype=torch.float64)
    differences = torch.stack([(of(w[0] + e) - of(w[0] - e)) / 2e-4 for e in step])
    torch.testing.assert_close(jacrev(of)(w[0]), differences, rtol=1e-6, atol=1e-7)
    slopes = torch.stack([(jacrev(of)(w[0] + e) - jacrev(of)(w[0] - e)) / 2e-4 for e in step])
    torch.testing.assert_close(hessian(of)(w[0]), slopes, rtol=1e-5, atol=1e-6)
    assert (jacrev(lambda p: f(p, y[0], w[0]))(p[0]) == 0).all()
    nothing = torch.zeros(0, dtype=torch.float64)
    assert f(nothing, nothing, nothing).isnan() and f(p[0], y[0] * 0, w[0]).isnan()
    assert vmap(f)(p.masked_fill(p > 0.7, torch.nan), y, w).isnan().all()
