"""Windows, groups, recalibration and equal weights: each equals the inner metric on its own examples."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

import funcrec as fr
from funcrec import metrics
from funcrec.core._tree import tree_leaves

METRICS = {"auc": metrics.auc(64), "ne": metrics.normalized_entropy(), "mse": metrics.mse()}
each_metric = pytest.mark.parametrize("name", METRICS)


@st.composite
def examples(draw, most=20):
    """Return random (probabilities f64[B], labels, weights, groups below 3), with B from 1 to `most` and some weights
    0."""
    n, g = draw(st.integers(1, most)), torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    p = torch.randint(1, 10, (n,), generator=g).double() / 10
    y, w = torch.randint(0, 2, (n,), generator=g).double(), torch.randint(0, 3, (n,), generator=g).double()
    return p, y, w, torch.randint(0, 3, (n,), generator=g)


def state_of(metric, *rows):
    return metric.update(metric.init(), *rows)


def assert_close(a, b):
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, equal_nan=True)


@each_metric
@given(batches=st.lists(examples(), min_size=1, max_size=6), n=st.integers(1, 4))
def test_a_window_has_its_last_updates(name, batches, n):
    """The number of a window is that of the last n batches as one batch, however many batches came before."""
    metric, window = METRICS[name], metrics.windowed(METRICS[name], n)
    state = window.init()
    for p, y, w, _ in batches:
        state = window.update(state, p, y, w)
    last = [torch.cat(xs) for xs in zip(*batches[-n:], strict=True)][:3]
    assert_close(window.compute(state), metric.compute(state_of(metric, *last)))


@given(a=examples(), b=examples(), c=examples())
def test_windows_of_ranks_add_up(a, b, c):
    """The sum of two ranks' states, as `psum` gives it, is the window of the examples of both ranks."""
    window = metrics.windowed(METRICS["ne"], 2)
    whole = state_of(window, *(torch.cat(xs) for xs in zip(a[:3], b[:3], strict=True)))
    assert_close(metrics.merge(state_of(window, *a[:3]), state_of(window, *b[:3])), whole)
    assert_close(window.update(whole, *c[:3])["loss"][0], whole["loss"][1])


@each_metric
@given(rows=examples())
def test_a_group_has_its_examples(name, rows):
    """The number of each group is the metric of the group's examples. The states of the groups add up to that of all
    examples."""
    p, y, w, groups = rows
    metric, each = METRICS[name], metrics.grouped(METRICS[name], 3)
    state = state_of(each, p, (y, groups), w)
    found = each.compute(state)
    for g in range(3):
        own = groups == g
        assert_close(found[g], metric.compute(state_of(metric, p[own], y[own], w[own])))
    assert_close(metric.compute(fr.tree.map(lambda x: x.sum(0), state)), metric.compute(state_of(metric, p, y, w)))


def test_a_group_that_is_not_there():
    """An unknown group raises where values can be read. In padding the group is not read. A traced call gives NaN for
    all groups."""
    each, p, y = metrics.grouped(metrics.ctr(), 2), torch.full((2,), 0.5), torch.tensor([1.0, 0.0])
    wrong = torch.tensor([0, 2])
    with pytest.raises(ValueError, match=r"labels\[1\]\[1\] = 2"):
        state_of(each, p, (y, wrong))
    padded = each.compute(state_of(each, p, (y, wrong), torch.tensor([1.0, 0.0])))
    assert padded[0] == 1 and padded[1].isnan()
    traced = fr.jit(lambda p, y, g: each.compute(state_of(each, p, (y, g))))
    assert traced(p, y, wrong).isnan().all()
    right = torch.tensor([0, 1])
    assert_close(traced(p, y, right), each.compute(state_of(each, p, (y, right))))


@given(rows=examples(), coefficient=st.sampled_from([0.1, 0.5, 1.0, 3.0]))
def test_recalibration_maps_probabilities(rows, coefficient):
    """The metric sees p / (p + (1 - p) / c). With c = 1 the result is that of the metric itself."""
    p, y, w, _ = rows
    for metric in METRICS.values():
        got = state_of(metrics.recalibrated(metric, coefficient), p, y, w)
        assert_close(got, state_of(metric, p / (p + (1 - p) / coefficient), y, w))


@given(rows=examples())
def test_equal_weights_leave_padding_out(rows):
    """A weight of any size above 0 counts once. A weight of 0 does not count."""
    p, y, w, _ = rows
    for metric in METRICS.values():
        got = metrics.unweighted(metric)
        assert_close(state_of(got, p, y, w), state_of(metric, p[w > 0], y[w > 0]))
        assert_close(state_of(got, p, y), state_of(metric, p, y))


COMBINED = {
    "windowed": (metrics.windowed(METRICS["ne"], 3), False),
    "grouped": (metrics.grouped(METRICS["ne"], 3), True),
    "recalibrated": (metrics.recalibrated(METRICS["auc"], 0.5), False),
    "unweighted": (metrics.unweighted(METRICS["auc"]), False),
    "a window of groups": (metrics.windowed(metrics.grouped(METRICS["mse"], 3), 2), True),
}


def combined(name, p, y, w, groups):
    """Return the combined metric of two updates by these examples."""
    metric, takes_groups = COMBINED[name]
    state = state_of(metric, p, (y, groups) if takes_groups else y, w)
    return metric.compute(metric.update(state, p, (y, groups) if takes_groups else y, w))


def two_of(seed=0):
    """Return (predictions, labels, weights, groups) of two members of 30 examples."""
    g = torch.Generator().manual_seed(seed)
    p, y = torch.rand(2, 30, generator=g).double(), torch.randint(0, 2, (2, 30), generator=g).double()
    return p, y, torch.randint(0, 3, (2, 30), generator=g).double(), torch.randint(0, 3, (2, 30), generator=g)


@pytest.mark.parametrize("name", COMBINED)
def test_they_are_mapped(name):
    """Calls mapped over a dimension of members have the numbers of a call for each member."""
    run, rows = functools.partial(combined, name), two_of()
    assert_close(vmap(run)(*rows), torch.stack([run(*own) for own in zip(*rows, strict=True)]))


def test_they_are_staged(interpreted):
    """Staged calls have the numbers of plain calls."""
    every = lambda rows: {name: combined(name, *own) for name, own in rows.items()}
    rows = {name: [x[0] for x in two_of(seed)] for seed, name in enumerate(COMBINED)}
    for name, got in fr.jit(every)(rows).items():
        assert_close(got, combined(name, *rows[name]))
