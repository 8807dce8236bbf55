"""bag_filter and drop_ids against a list comprehension, under every transform, and before every kind of lookup."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.refused import assert_refused
from torch.func import grad, jacfwd, jacrev, vmap

import funcrec as fr
from funcrec.testing import assert_trees_close, garbage_padding
from funcrec.testing import strategies as frs

JT, KJT = fr.JaggedTensor, fr.KeyedJaggedTensor
OFFSETS = torch.tensor([0, 2, 2, 5])
X = torch.tensor([0.5, -1.0, 3.0, 2.0, 0.25, 9.0], dtype=torch.float64)
MASK = torch.tensor([True, False, True, True, False, True])
KEPT = [0, 2, 3]  # the last place is padding


def lists_of(bags, values):
    return [values[a:b].tolist() for a, b in zip(bags.offsets.tolist(), bags.offsets.tolist()[1:], strict=False)]


@given(data=st.data(), dtype=st.sampled_from([torch.int64, torch.int32, torch.float16, torch.float64, torch.bool]))
def test_what_is_kept_is_a_comprehension(data, dtype):
    """Each bag keeps the values and weights whose mask is true, in order; the mask of the padding is not read."""
    bags = data.draw(frs.jagged_tensors(dtypes=(dtype,)))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=bags.capacity, max_size=bags.capacity))).bool()
    got = fr.bag_filter(garbage_padding(bags), mask)
    want = lambda x: [[v for v, m in zip(*b, strict=True) if m] for b in zip(lists_of(bags, x), lists_of(bags, mask))]
    assert got.values.dtype == dtype and got.offsets.dtype == bags.offsets.dtype and got.capacity == bags.capacity
    assert got.to_lists() == want(bags.values)
    assert not got.values[int(got.offsets[-1]) :].any()
    if bags.weights is not None:
        assert lists_of(got, got.weights) == want(bags.weights)


@given(ids=frs.keyed_jagged_tensors(same_bags=False), padding=st.integers(-1, 9), some=st.booleans())
def test_ids_are_dropped_from_all_keys_or_some(ids, padding, some):
    """No other id is removed, keys and numbers of bags stay, and each weight stays with its id."""
    own = {k: padding + i for i, k in enumerate(ids.keys[:2])} if some else dict.fromkeys(ids.keys, padding)
    got = fr.drop_ids(garbage_padding(ids), own if some else padding)
    assert (got.keys, got.strides, got.unweighted) == (ids.keys, ids.strides, ids.unweighted)
    for k, bags in ids.items():
        want = fr.bag_filter(bags, bags.values != own.get(k, 77)) if k in own else bags
        assert got[k].to_lists() == want.to_lists()
        if bags.weights is not None:
            assert lists_of(got[k], got[k].weights) == lists_of(want, want.weights)


def test_values_of_more_dimensions_are_kept_whole():
    """A value is a row of any shape."""
    x = torch.arange(12.0).view(6, 2)
    assert fr.bag_filter(JT(x, OFFSETS), MASK).values[:3].tolist() == x[KEPT].tolist()


@pytest.mark.parametrize("part", ["values", "weights"])
def test_derivatives_are_those_of_the_kept_places(part):
    """First and second derivatives in values and weights are torch's of x[kept]; a dropped place and padding get 0."""
    one = torch.ones_like(X)
    f = lambda x: getattr(fr.bag_filter(JT(x, OFFSETS, one) if part == "values" else JT(one, OFFSETS, x), MASK), part)
    total, want = lambda x: (f(x).sin() * X).sum(), lambda x: (x[KEPT].sin() * X[:3]).sum()
    torch.testing.assert_close(grad(total)(X), grad(want)(X))
    torch.testing.assert_close(jacfwd(grad(total))(X), jacfwd(grad(want))(X))
    torch.testing.assert_close(jacrev(jacrev(total))(X), jacrev(jacrev(want))(X))


def test_transforms_compose():
    """vmap over values, over masks and over both, and jit, have the numbers of single calls, also for size 0."""
    f = lambda x, m: fr.bag_filter(JT(x, OFFSETS), m)
    xs, masks = torch.stack([X, X * 2, -X]), torch.stack([MASK, ~MASK, MASK.flip(0)])
    pairs = {(0, None): (xs, MASK), (None, 0): (X, masks), (0, 0): (xs, masks)}
    for dims, args in pairs.items():
        got = vmap(f, dims)(*args)
        for i in range(3):
            one = f(*(a if d is None else a[i] for a, d in zip(args, dims, strict=True)))
            assert torch.equal(got.values[i], one.values) and torch.equal(got.offsets[i], one.offsets)
    assert_trees_close(fr.jit(f)(X, MASK), f(X, MASK))
    assert fr.bag_filter(JT(X[:0], OFFSETS[:1]), MASK[:0]).num_bags == 0
    assert fr.bag_filter(JT(X[:0], OFFSETS * 0), MASK[:0]).to_lists() == [[], [], []]


@given(it=frs.lookups(poolings=("sum", "mean", "none"), max_lengths=(None, 2)), padding=st.integers(0, 3))
def test_a_lookup_after_it_is_one_of_the_rest(it, padding):
    """With any features, hashes and max_length, lookups of the ids equal those of lists without the padding id."""
    lists = {k: [[i for i in bag if i != padding] for bag in bags] for k, bags in it.ids.to_lists().items()}
    given_ = fr.drop_ids(it.ids, padding)
    assert given_.to_lists() == lists
    for f in it.features:
        call = fr.lookup_sequence if f.pooling == "none" else fr.lookup
        got = call(it.tables, given_, [f])
        want = call(it.tables, fr.drop_ids(it.ids.unpad(), padding).unpad(), [f])
        assert_trees_close(*(x[f.name].unpad() if f.pooling == "none" else x[f.name] for x in (got, want)), rtol=1e-6)


def test_sharded_tables_read_the_rest():
    """Dropped ids inside shard_map give the values and the gradients of one process."""
    ids = KJT.from_lists({"a": [[1, 0, 3], [0], [2, 2], [0, 5]]})
    features, table = [fr.FeatureConfig("a", table="t", pooling="mean")], torch.arange(12.0).view(6, 2)
    loss = lambda t, x: fr.lookup(t, fr.drop_ids(x, 0), features).values
    mesh = fr.Mesh.emulated(x=2)
    sharded = fr.shard_tables({"t": table}, fr.Plan({"t": fr.row_wise("x")}), mesh)
    on_ranks = fr.shard_map(loss, mesh=mesh, in_specs=(sharded.specs(), fr.P("x")), out_specs=fr.P("x"))
    assert_trees_close(on_ranks(sharded, ids), loss({"t": table}, ids), rtol=1e-6)


BAD = {
    "a mask of other length": (lambda: fr.bag_filter(JT(X, OFFSETS), MASK[:3]), "`mask` does not match the values"),
    "a mask of numbers": (lambda: fr.bag_filter(JT(X, OFFSETS), X), "`mask` is not"),
    "floats": (lambda: fr.drop_ids(JT(X, OFFSETS), 0), "`ids.values` are not ids"),
    "keys of no keys": (lambda: fr.drop_ids(JT(X.long(), OFFSETS), {"a": 0}), "`padding` names keys"),
    "a key that is not there": (lambda: fr.drop_ids(KJT.from_lists({"a": [[1]]}), {"b": 0}), "names unknown keys"),
    "beyond i64": (lambda: fr.drop_ids(JT(X.long(), OFFSETS), 2**63), "`padding` is not an id"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name):
    """The error has got and need."""
    call, text = BAD[name]
    assert_refused(call, (TypeError, ValueError, KeyError), text)
