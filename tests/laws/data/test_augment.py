"""Augmented histories: crop, mask and reorder against lists, drawn by a key."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

import funcrec as fr
from funcrec.data import crop, mask, reorder
from funcrec.testing import check_grads
from funcrec.testing import strategies as frs

VIEWS = {"crop": crop, "mask": lambda bags, key, **how: mask(bags, key, item=77, **how), "reorder": reorder}
EACH = pytest.mark.parametrize("name", VIEWS)
SHARES = st.sampled_from([0.0, 0.2, 0.29, 0.5, 0.6, 1.0]) | st.floats(0, 1)
SEEDS = st.integers(-(2**62), 2**62)
BAGS = fr.JaggedTensor.from_lists([[1, 2, 3, 4, 5], [], [6, 7]])


def pairs(bags):
    """Return each bag's (value, weight) as lists."""
    weights = torch.zeros(bags.capacity) if bags.weights is None else bags.weights
    return [
        list(zip(bags.values[a:b].tolist(), weights[a:b].tolist(), strict=True))
        for a, b in itertools.pairwise(bags.offsets.tolist())
    ]


@settings(max_examples=100, deadline=None)
@given(frs.jagged_tensors(max_length=9), SEEDS, SHARES)
def test_crop_keeps_a_run(bags, seed, share):
    """Each bag becomes a run of ⌊share · n⌋ of its values with their weights, but of at least one value if it is not
    empty."""
    for own, got in zip(pairs(bags), pairs(crop(bags, fr.key(seed), share=share)), strict=True):
        size = max(math.floor(share * len(own)), 1) if own else 0
        assert got in [own[a : a + size] for a in range(len(own) - size + 1)]


@settings(max_examples=100, deadline=None)
@given(frs.jagged_tensors(max_length=9, elements=st.integers(0, 9)), SEEDS, SHARES)
def test_mask_replaces_its_share(bags, seed, share):
    """⌊share · n⌋ ids of each bag become the item, and nothing else changes, neither offsets nor weights."""
    view = VIEWS["mask"](bags, fr.key(seed), share=share)
    assert view.offsets.equal(bags.offsets) and view.values.dtype == bags.values.dtype
    for own, got in zip(pairs(bags), pairs(view), strict=True):
        assert all(x[1] == y[1] and y[0] in (x[0], 77) for x, y in zip(own, got, strict=True))
        assert sum(y[0] == 77 for y in got) == math.floor(share * len(own))


@settings(max_examples=100, deadline=None)
@given(frs.jagged_tensors(max_length=9), SEEDS, SHARES)
def test_reorder_shuffles_a_run(bags, seed, share):
    """Each bag keeps its values with their weights. Only the values in a run of ⌊share · n⌋ change their places."""
    for own, got in zip(pairs(bags), pairs(reorder(bags, fr.key(seed), share=share)), strict=True):
        size = math.floor(share * len(own))
        assert sorted(got) == sorted(own)
        assert any(got[:a] == own[:a] and got[a + size :] == own[a + size :] for a in range(len(own) - size + 1)), (
            own,
            got,
        )


def chances(name):
    """Return the probability of each view of [1, 2, 3, 4, 5] with m = 3, or 2 for mask, by listing all draws."""
    bag, size = [1, 2, 3, 4, 5], 2 if name == "mask" else 3
    runs = [bag[a : a + size] for a in range(6 - size)]
    if name == "crop":
        draws = [(*run, 0, 0) for run in runs]
    elif name == "mask":
        draws = [tuple(77 if x in chosen else x for x in bag) for chosen in itertools.combinations(bag, size)]
    else:
        draws = [
            (*bag[:a], *order, *bag[a + size :]) for a, run in enumerate(runs) for order in itertools.permutations(run)
        ]
    return {view: n / len(draws) for view, n in Counter(draws).items()}


@EACH
def test_all_draws_are_equally_likely(name):
    """Over many keys, all runs, all choices of places and all orders are drawn equally often."""
    bags, count = fr.JaggedTensor.from_lists([[1, 2, 3, 4, 5]]), 6000
    share = 0.4 if name == "mask" else 0.6
    drawn = vmap(lambda key: VIEWS[name](bags, key, share=share).values)(fr.split(fr.key(3), count))
    seen, want = Counter(map(tuple, drawn.tolist())), chances(name)
    assert set(seen) == set(want)
    assert all(abs(seen[x] - count * p) < 4 * (count * p) ** 0.5 for x, p in want.items())


@EACH
def test_a_bag_draws_alone(name):
    """The same key gives the same view, and another key gives another view. The view of a bag does not depend on the
    other bags, on the padding or on the dtype of the offsets."""
    view = lambda bags, seed=5: VIEWS[name](bags, fr.key(seed), share=0.8)
    long = [list(range(20)), list(range(20, 50))]
    assert view(fr.JaggedTensor.from_lists(long)).to_lists() == view(fr.JaggedTensor.from_lists(long)).to_lists()
    assert view(fr.JaggedTensor.from_lists(long)).to_lists() != view(fr.JaggedTensor.from_lists(long), 6).to_lists()
    alone = view(fr.JaggedTensor.from_lists([[], long[1]])).to_lists()[1]
    assert view(fr.JaggedTensor.from_lists(long)).to_lists()[1] == alone
    values = torch.cat([torch.tensor([*long[0], *long[1]]), torch.tensor([-5, 10**9])])
    garbage = fr.JaggedTensor(values, torch.tensor([0, 20, 50], dtype=torch.int32))
    assert view(garbage).to_lists()[1] == alone


def viewed(values, key, **how):
    return {name: view(values, key, **how) for name, view in VIEWS.items()}


@EACH
def test_vmap(name):
    """vmap over keys and over bags is a loop."""
    view = lambda key, values: VIEWS[name](fr.JaggedTensor(values, BAGS.offsets), key, share=0.5).values
    keys, values = fr.split(fr.key(0), 3), torch.stack([BAGS.values, BAGS.values + 10, BAGS.values + 20])
    assert vmap(view)(keys, values).equal(torch.stack([view(k, v) for k, v in zip(keys, values, strict=True)]))


def test_jit(interpreted):
    """A staged call has the bits of the plain one."""
    jitted, keys = fr.jit(viewed), fr.split(fr.key(0), 3)
    few = fr.JaggedTensor.from_lists([[3, 4], [8]])
    for bags, key, how in ((BAGS, keys[0], {}), (BAGS, keys[1], {"share": 0.5}), (few, keys[0], {})):
        got, want = jitted(bags, key, **how), viewed(bags, key, **how)
        assert {n: x.to_lists() for n, x in got.items()} == {n: x.to_lists() for n, x in want.items()}


@pytest.mark.parametrize("view", [crop, reorder])
def test_views_of_vectors_are_linear(view):
    """Vectors are cropped and reordered as ids are, and so are their cotangents back. NaN in the padding stays
    there."""
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    offsets = torch.tensor([0, 5, 5, 8])
    move = lambda x: view(fr.JaggedTensor(x, offsets), fr.key(1)).values
    check_grads(move, (x,), order=2)
    poisoned = torch.cat([x[:8], torch.full((1, 2), torch.nan, dtype=torch.float64)])
    bags = view(fr.JaggedTensor(poisoned, offsets), fr.key(1))
    assert bags.unpad().values.isfinite().all()
    ids = view(fr.JaggedTensor(torch.arange(9), offsets), fr.key(1)).unpad()
    assert bags.unpad().values.equal(x[ids.values])


@EACH
def test_empty_histories(name):
    """A value without bags, with empty bags or with an empty buffer does not change."""
    for lists in ([], [[], []]):
        none = fr.JaggedTensor.from_lists(lists, dtype=torch.int64)
        assert VIEWS[name](none, fr.key(0)).to_lists() == lists


def test_bad_input():
    """Values that are no ids, an item that the dtype cannot hold, shares outside [0, 1], and dtypes that torch cannot
    move raise."""
    for view in (crop, reorder):
        for dtype in (torch.complex64, torch.uint16):
            with pytest.raises(TypeError, match="neither integers nor floats"):
                view(fr.JaggedTensor(torch.ones(2).to(dtype), torch.tensor([0, 2])), fr.key(0))
    with pytest.raises(TypeError, match=r"`bags.values` are not ids"):
        mask(fr.JaggedTensor.from_lists([[1.0]]), fr.key(0), item=0)
    with pytest.raises(ValueError, match="`item` does not fit"):
        mask(fr.JaggedTensor.from_lists([[1]], dtype=torch.int32), fr.key(0), item=2**40)
    with pytest.raises(ValueError, match="share"):
        crop(BAGS, fr.key(0), share=1.5)
    with pytest.raises(TypeError, match="key"):
        reorder(BAGS, 3)
