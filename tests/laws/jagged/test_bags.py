"""Bags as tensors, values without keys, counts of keys, bags of a KeyedTensor, and equality of values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.refused import assert_refused
from torch.func import grad, vmap

import funcrec as fr
from funcrec.testing import assert_trees_close, garbage_padding
from funcrec.testing import strategies as frs

JT, KJT, KT = fr.JaggedTensor, fr.KeyedJaggedTensor, fr.KeyedTensor
ANY = (torch.int64, torch.int32, torch.float16, torch.float64, torch.bool)


@given(bags=frs.jagged_tensors(dtypes=ANY, weighted=False, row_shape=(2,)))
def test_bags_as_tensors_and_back(bags):
    """to_tensors gives a view of each bag, and from_lists of these views has the same bags and dtype."""
    tensors = garbage_padding(bags).to_tensors()
    assert [x.tolist() for x in tensors] == bags.to_lists() and {x.dtype for x in tensors} <= {bags.values.dtype}
    if any(len(x) for x in tensors):
        assert fr.tree.equal(JT.from_lists(tensors).values, bags.unpad().values)


def test_bags_as_tensors_keep_the_derivative():
    """The gradient of a function of the bags is that of the buffer, and 0 in the padding."""
    offsets, x = torch.tensor([0, 2, 2, 3]), torch.tensor([1.0, 2.0, 3.0, 9.0])
    f = lambda x: sum((i + 1) * b.square().sum() for i, b in enumerate(JT(x, offsets).to_tensors()))
    assert grad(f)(x).tolist() == [2.0, 4.0, 18.0, 0.0]
    back = lambda x: JT.from_lists(JT(x, offsets).to_tensors()).values.square().sum()
    assert grad(back)(x).tolist() == [2.0, 4.0, 6.0, 0.0]
    assert torch.equal(vmap(f)(torch.stack([x, 2 * x])), torch.stack([f(x), f(2 * x)]))


@given(ids=frs.keyed_jagged_tensors(same_bags=False))
def test_counts_and_places_of_keys(ids):
    """length_per_key counts each key's ids, and offset_per_key is where they begin in the buffer."""
    sizes = [sum(map(len, bags)) for bags in ids.to_lists().values()]
    assert ids.length_per_key.tolist() == sizes
    assert ids.offset_per_key.tolist() == [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    assert ids.offset_per_key.dtype == ids.offsets.dtype


@given(ids=frs.keyed_jagged_tensors(min_bags=1))
def test_a_value_without_keys_keeps_its_bags(ids):
    """An empty part of a split has B bags, also after a choice of bags, and can be joined with the other parts."""
    none, rest = ids.split([0, len(ids.keys)])
    assert none.keys == () and none.num_bags == ids.num_bags and none.to_lists() == {}
    assert ids.permute([]).num_bags == ids.num_bags == none.unpad().num_bags
    assert none[[0, 0]].num_bags == 2 and none[:0].num_bags == 0
    assert fr.tree.equal(KJT.concat([none, rest]), ids)
    assert KJT.concat([none, none]).num_bags == ids.num_bags
    assert fr.lookup({}, none, []).values.shape == (ids.num_bags, 0)
    assert fr.tree.copy(none).num_bags == fr.jit(lambda x: x)(none).num_bags == ids.num_bags
    with pytest.raises(ValueError, match="there are bags of no key"):
        KJT.from_lengths([], ids.values[:0], torch.zeros(2, dtype=torch.int64))


def test_empty_values():
    """Values without bags, and bags without ids, need no constructor of their own."""
    assert JT.from_lists([]).num_bags == KJT.from_lists({}).num_bags == 0
    ids = KJT.from_lists({"a": [[], []], "b": [[], []]}, dtype=torch.int32)
    assert (ids.num_bags, ids.capacity, ids.values.dtype) == (2, 0, torch.int32)


@given(x=frs.keyed_tensors(), data=st.data())
def test_bags_of_a_keyed_tensor(x, data):
    """Positions, slices and select choose bags of every key, and concat along bags joins them again."""
    count = len(x.values)
    at = data.draw(st.lists(st.integers(-count, count - 1), max_size=4)) if count else []
    for which in (at, slice(0, 2), slice(None, None, -1), slice(1, None)):
        got = x[which]
        assert (got.keys, got.dims) == (x.keys, x.dims)
        rows = torch.arange(count)[::1].tolist()[which] if isinstance(which, slice) else at
        assert_trees_close(got.values, x.values[torch.tensor(rows, dtype=torch.int64)])
    if count:
        assert_trees_close(x[-1].values, x.values[-1:])
        assert_trees_close(x.select(torch.tensor([count - 1, 0])).values, x.values[[count - 1, 0]])
    cut = data.draw(st.integers(0, count))
    assert_trees_close(KT.concat([x[:cut], x[cut:]], along="bags"), x)


def test_bags_of_an_ensemble_and_under_transforms():
    """The batch is the dimension before the columns; grad and vmap pass through a choice of bags."""
    x = KT(torch.randn(3, 4, 5), ("a", "b"), (2, 3))
    assert torch.equal(x[1:3].values, x.values[:, 1:3]) and torch.equal(x[[2, 2]].values, x.values[:, [2, 2]])
    f = lambda v: KT.concat([KT(v, x.keys, x.dims)[[1, 1]], KT(v, x.keys, x.dims)[:1]], along="bags").values
    assert torch.equal(vmap(f)(x.values), f(x.values))
    assert grad(lambda v: f(v).sum())(x.values[0]).sum(1).tolist() == [5.0, 10.0, 0.0, 0.0]
    assert torch.equal(fr.jit(f)(x.values), f(x.values))


def test_features_without_columns():
    """A dim may be 0: its key reads [B, 0], and groups, bags and concat keep the key."""
    x = KT.from_dict({"a": torch.ones(2, 0), "b": torch.ones(2, 3)})
    assert x["a"].shape == (2, 0) and x[:1]["a"].shape == (1, 0)
    assert [g.shape for g in fr.regroup([x], [["a"], ["a", "b"]])] == [(2, 0), (2, 3)]
    assert KT.concat([x, KT.from_dict({"c": torch.ones(2, 0)})]).dims == (0, 3, 0)
    assert KT.from_dict({"a": torch.ones(2, 0), "b": torch.ones(2, 0)}).stack().shape == (2, 2, 0)


def test_groups_with_names():
    """regroup of {name: keys} is a dict of the groups."""
    x = KT.from_dict({"a": torch.ones(2, 1), "b": torch.zeros(2, 2)})
    named, plain = fr.regroup([x], {"wide": ["b", "a"], "deep": ["a"]}), fr.regroup([x], [["b", "a"], ["a"]])
    assert list(named) == ["wide", "deep"]
    assert_trees_close(list(named.values()), plain)


@given(ids=frs.keyed_jagged_tensors(), more=st.integers(0, 3))
def test_values_are_equal_if_their_bags_are(ids, more):
    """Equality ignores padding and weights that nothing reads. It compares ids, weights, keys, dtypes and bags."""
    other = garbage_padding(ids.pad_to(ids.capacity + more))
    assert fr.tree.equal(ids, other) and fr.tree.equal({"x": [ids, 1]}, {"x": [other, 1]})
    assert not fr.tree.equal(ids, KJT.concat([ids, KJT.from_lists({"z": [[]] * ids.num_bags}, dtype=ids.values.dtype)]))
    if int(ids.offsets[-1]):
        changed = ids.values.clone()
        changed[0] += 1
        assert not fr.tree.equal(ids, KJT(changed, ids.offsets, ids.weights, None, ids.keys, None, ids.unweighted))
        if ids.weights is not None:
            bare = KJT(ids.values, ids.offsets, None, None, ids.keys)
            assert not fr.tree.equal(ids, bare)
    assert not fr.tree.equal(ids, None) and not fr.tree.equal(ids, ids.to_dict())
    nan = torch.tensor([torch.nan, 1.0])
    assert fr.tree.equal(JT.from_lists([nan]), JT.from_lists([nan])) and not fr.tree.equal(nan, nan.double())


@given(it=frs.lookups(poolings=("none",)))
def test_the_ids_of_sequences_are_those_of_their_rows(it):
    """sequence_ids has the bags and capacity of the rows, and the table's rows of these ids are the rows."""
    rows, ids = fr.lookup_sequence(*it), fr.sequence_ids(garbage_padding(it.ids), it.features)
    assert list(rows) == list(ids)
    for f in it.features:
        x, table = ids[f.name], it.tables[f.table]
        assert x.capacity == rows[f.name].capacity and torch.equal(x.offsets, rows[f.name].offsets)
        assert (x.weights is not None) == f.weighted
        flat = fr.KeyedJaggedTensor.from_jagged({"x": JT(x.values, x.offsets, x.weights)})
        again = fr.FeatureConfig("x", f.table, "none", weighted=f.weighted, hash=f.hash)
        want = fr.lookup_sequence({f.table: table}, flat, [again])["x"]
        assert_trees_close(want.unpad().values, rows[f.name].unpad().values)


def test_the_ids_of_examples_and_of_distinct_bags():
    """With inverse indices the ids are those of the examples, like the rows; without expansion they are those of the
    distinct bags."""
    lists, weights = [[1, 2], [3], [1, 2]], [[0.5, 2.0], [1.0], [0.5, 2.0]]
    ids = fr.dedup_bags(KJT.from_lists({"a": lists}, weights={"a": weights}))
    features = [fr.FeatureConfig("a", table="t", pooling="none", weighted=True, max_length=2)]
    got = fr.sequence_ids(ids, features)["a"]
    rows = fr.lookup_sequence({"t": torch.eye(4)}, ids, features)["a"]
    assert got.to_lists() == lists and got.capacity == rows.capacity and torch.equal(got.offsets, rows.offsets)
    assert [w.tolist() for w in JT(got.weights, got.offsets).to_tensors()] == weights
    assert fr.sequence_ids(ids, features, expand=False)["a"].num_bags == 2


BAD = {
    "weights of two dimensions": (
        lambda: fr.bag_softmax(JT(torch.ones(3), torch.tensor([0, 3]), torch.ones(3, 2))),
        "several numbers for a value"),
    "bags of other columns": (
        lambda: KT.concat([KT.from_dict({"a": torch.ones(1, 1)}), KT.from_dict({"a": torch.ones(1, 2)})], along="bags"),
        "differ in more than their bags"),
    "no parts": (lambda: KT.concat([], along="bags"), "differ in more than their bags"),
    "a bag that is not there": (lambda: KT.from_dict({"a": torch.ones(2, 1)})[2], "are not positions of bags"),
    "a bag of select": (
        lambda: KT.from_dict({"a": torch.ones(2, 1)}).select(torch.tensor([2])), "has a bag that does not exist"),
    "no batch": (lambda: KT(torch.ones(3), ("a",), (3,))[0], "the value has no bags"),
    "no sequence": (
        lambda: fr.sequence_ids(KJT.from_lists({"a": [[1]]}), [fr.FeatureConfig("a", table="t")]),
        "no feature is for this lookup"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name):
    """The error has got and need."""
    call, text = BAD[name]
    assert_refused(call, (TypeError, ValueError, IndexError), text)
