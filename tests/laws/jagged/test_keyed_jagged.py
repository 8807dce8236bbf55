"""KeyedJaggedTensor: operations equal those on a dict of Python's lists, and read no padding."""

import dataclasses
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.jagged._buckets import bucket
from funcrec.testing import assert_trees_close, garbage_padding, zero_padding
from funcrec.testing import strategies as frs

KEYS = ("a", "b", "c")


def each(fn):
    return lambda lists: {k: bags and fn(bags) for k, bags in lists.items()}


# name: (the operation, the same on {key: lists}). Every operation must run without a read of a value on the host.
ON_KEYS = {
    "permute": (lambda x: x.permute(["c", "a", "b"]), lambda d: {k: d[k] for k in "cab"}),
    "permute some": (lambda x: x.permute(["b"]), lambda d: {"b": d["b"]}),
    "permute none": (lambda x: x.permute([]), lambda d: {}),
    "permute by position": (lambda x: x.permute([2, 0]), lambda d: {"c": d["c"], "a": d["a"]}),
    "split": (lambda x: x.split([1, 0, 2])[2], lambda d: {"b": d["b"], "c": d["c"]}),
    "split and concat": (lambda x: fr.KeyedJaggedTensor.concat(x.split([1, 0, 2])), lambda d: d),
    "to_dict and from_jagged": (lambda x: fr.KeyedJaggedTensor.from_jagged(x.to_dict()), lambda d: d),
    "pad_to": (lambda x: x.pad_to(x.capacity + 3), lambda d: d),
}
ON_BAGS = {
    "int": (lambda x: x[1], each(lambda bags: [bags[1]])),
    "slice": (lambda x: x[1:], each(lambda bags: bags[1:])),
    "none": (lambda x: x[0:0], each(lambda bags: [])),
    "list": (lambda x: x[[1, 0, 1]], each(lambda bags: [bags[1], bags[0], bags[1]])),
    "padded and back": (
        lambda x: fr.KeyedJaggedTensor.from_padded(
            {k: j.to_padded(4) for k, j in x.to_dict().items()}, {k: j.lengths for k, j in x.to_dict().items()}
        ),
        lambda d: d,
    ),
}
OPS = ON_KEYS | ON_BAGS


def batches(name, **options):
    same = st.just(True) if name in ON_BAGS else st.booleans()
    return same.flatmap(lambda s: frs.keyed_jagged_tensors(keys=KEYS, same_bags=s, min_bags=2, **options))


@pytest.mark.parametrize("name", OPS)
@given(data=st.data())
def test_an_operation_is_that_of_lists(name, data):
    """op(x).to_lists() == op(x.to_lists()), with keys in order. Dtypes stay."""
    op, on_lists = OPS[name]
    x = data.draw(batches(name, weighted=False))
    out, want = op(x), on_lists(x.to_lists())
    assert out.to_lists() == want and out.keys == tuple(want)
    assert (out.values.dtype, out.offsets.dtype) == (x.values.dtype, x.offsets.dtype)


def weights_of(x):
    """Return {key: the weights of the key's bags, or None}."""
    bags = {k: x[k] for k in x.keys}
    return {
        k: b.weights if b.weights is None else fr.JaggedTensor(b.weights, b.offsets).to_lists() for k, b in bags.items()
    }


@pytest.mark.parametrize("name", [n for n in OPS if n != "padded and back"])
@given(data=st.data())
def test_weights_go_with_their_values(name, data):
    """The weights of op(x) are op of the weights, key by key. A key without weights has no weights in the result."""
    op, on_lists = OPS[name]
    x = data.draw(batches(name))
    full = on_lists(weights_of(dataclasses.replace(x, unweighted=())))
    bare = x.keys if x.weights is None else x.unweighted
    assert weights_of(op(x)) == {k: None if k in bare else full[k] for k in op(x).keys}


@pytest.mark.parametrize("name", OPS)
@given(data=st.data())
def test_padding_is_never_read(name, data):
    """op(x with garbage in its padding) == op(x)."""
    op, _ = OPS[name]
    x = data.draw(batches(name))
    assert_trees_close(zero_padding(op(garbage_padding(x, fr.key(2)))), zero_padding(op(x)))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("strides", [None, (2, 3, 1)])
def test_an_operation_reads_nothing_on_the_host(name, strides):
    """op traces with fake tensors, whose values cannot be read. The traced op gives the same result."""
    if strides and name in ON_BAGS:
        return
    op, _ = OPS[name]
    offsets = torch.tensor([0, 1, 1, 3, 3, 4, 5])
    x = fr.KeyedJaggedTensor(torch.arange(7), offsets, torch.ones(7), None, KEYS, strides)
    assert_trees_close(make_fx(op, tracing_mode="fake")(x)(x), op(x))


@pytest.mark.parametrize("name", OPS)
@given(data=st.data())
def test_inputs_are_unchanged(name, data):
    """op(x) does not change x."""
    x = data.draw(batches(name))
    before = torch.utils._pytree.tree_map(torch.clone, x)
    OPS[name][0](x)
    assert_trees_close(x, before)


@given(frs.keyed_jagged_tensors(weighted=False), st.booleans())
def test_a_feature_is_its_bags(x, weighted):
    """x[key].to_lists() == x.to_lists()[key] == x.to_dict()[key].to_lists(), in a buffer of the capacity of x."""
    for key, bags in x.to_lists().items():
        assert x[key].to_lists() == bags == x.to_dict()[key].to_lists()
        assert x[key].capacity == x.capacity and x[key].num_bags == x.bags_of(key) == len(bags)


@given(frs.keyed_jagged_tensors(same_bags=False))
def test_ids_are_read_as_a_dict_is(x):
    """len, in, iteration and items use the keys in order, as to_dict() does. The len of a JaggedTensor is its number of
    bags."""
    assert list(x) == list(x.to_dict()) == list(x.keys) and len(x) == len(x.keys)
    assert all(k in x for k in x.keys) and "z" not in x and 0 not in x
    assert {k: bags.to_lists() for k, bags in x.items()} == x.to_lists()
    assert [len(bags) for _, bags in x.items()] == [x.bags_of(k) for k in x]


def test_what_is_shown_is_short():
    """repr of large values is short. repr gives the numbers of bags, values and keys, and the contents of small
    tensors."""
    ids = fr.KeyedJaggedTensor.from_lists({f"k{i}": [list(range(30))] * 20 for i in range(30)})
    text = repr(fr.Batch(ids, torch.ones(20), torch.ones(20, 3)))
    assert "7, ... 30 values]" in text and "... 20 bags]" in text and "... 30 keys}" in text and len(text) < 4000
    assert text.endswith("values=i64[18000]), label=f32[20], dense=f32[20, 3])")
    assert repr(fr.Batch(None, 0)) == "Batch(ids=None, label=int 0)"
    kinds = {"sparse": fr.optim.sgd(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
    mesh = {"mesh": fr.Mesh.emulated(m=2), "plan": fr.Plan({"t": fr.row_wise("m")})}
    params = fr.Params({"t": torch.zeros(4, 2)}, {"w": torch.ones(2)})
    for options in ({}, mesh):
        state = fr.train_step(lambda params, batch: params.dense["w"].sum(), **kinds, **options).init(params)
        assert repr(state).startswith("TrainState(step=0, tables={t: f32[4, 2]}, slots=0 tensors, dense=1 tensor")


@given(frs.keyed_jagged_tensors(same_bags=False))
def test_strides_cut_the_bags(x):
    """With strides, the bags of key f are the next strides[f] bags of the buffer."""
    bags = fr.JaggedTensor(x.values, x.offsets).to_lists()
    for key, stride in zip(x.keys, x.strides, strict=True):
        mine, bags = bags[:stride], bags[stride:]
        assert x[key].to_lists() == mine and x.bags_of(key) == stride
    assert not bags


@given(frs.keyed_jagged_tensors(dtypes=(torch.int64,), offset_dtypes=(torch.int64,)))
def test_lists_round_trip(x):
    """from_lists(x.to_lists()) == x.unpad(), with weights."""
    weights = None if x.weights is None else weights_of(x)
    assert_trees_close(
        zero_padding(fr.KeyedJaggedTensor.from_lists(x.to_lists(), weights=weights)), zero_padding(x.unpad())
    )


@given(frs.keyed_jagged_tensors(keys=("a", "b")), st.lists(st.sampled_from("ab"), max_size=4))
def test_permute_repeats_and_drops(x, keys):
    """permute(keys) has the bags of each key as often as the key is named, in a buffer that holds all these bags;
    without keys, it has B empty ones."""
    out = x.permute(keys)
    bags = x.to_lists()
    assert fr.JaggedTensor(out.values, out.offsets).to_lists() == (
        [bag for k in keys for bag in bags[k]] or [[]] * (not keys) * x.num_bags
    )
    assert out.keys == tuple(keys)


@given(frs.keyed_jagged_tensors(keys=("a", "b"), min_bags=1))
def test_permute_takes_inverse_indices_along(x):
    """The element inverse[f] moves with its key."""
    inverse = torch.arange(6).reshape(2, 3)
    x = fr.KeyedJaggedTensor(x.values, x.offsets, x.weights, inverse, x.keys, x.strides)
    assert x.permute(["b", "a"]).inverse.tolist() == [[3, 4, 5], [0, 1, 2]]
    assert x.split([1, 1])[1].inverse.tolist() == [[3, 4, 5]]
    assert x.pad_to(x.capacity + 1).inverse is inverse and x.unpad().inverse is inverse


@given(frs.keyed_jagged_tensors(same_bags=False), st.integers(1, 20))
def test_pad_to_bucket_keeps_the_ids(x, minimum):
    """pad_to_bucket(x).to_lists() == x.to_lists(), in the bucket of the number of ids."""
    out = fr.pad_to_bucket(x, minimum=minimum)
    assert out.to_lists() == x.to_lists()
    assert out.capacity == bucket(x.unpad().capacity, minimum=minimum)


def test_buckets_are_few_and_tight():
    """bucket(n) >= n. bucket ascends with n, wastes less than half of itself above the minimum, and has few distinct
    values."""
    sizes = [bucket(n) for n in range(1, 5000)]
    assert all(n <= b and (b == 16 or b - n < b / 2) for n, b in zip(range(1, 5000), sizes))
    assert sizes == sorted(sizes) and sorted(set(sizes))[:6] == [16, 24, 32, 48, 64, 96] and len(set(sizes)) < 20
    assert [bucket(n, minimum=1) for n in range(1, 9)] == [1, 2, 3, 4, 6, 6, 8, 8]


def test_no_keys_and_no_bags():
    """Values without keys, or without bags, are valid."""
    empty = fr.KeyedJaggedTensor.from_lists({})
    assert empty.to_lists() == {} and empty.num_bags == 0 and fr.pad_to_bucket(empty).capacity == 16
    assert fr.KeyedJaggedTensor.concat([]).to_lists() == {}
    bare = fr.KeyedJaggedTensor.from_lists({"a": [], "b": []})
    assert bare.num_bags == 0 and bare["b"].to_lists() == [] and bare.permute(["b", "a"]).keys == ("b", "a")


def test_a_value_without_keys_keeps_its_bags_and_its_room():
    """Without keys, a value with bags is permuted, split and joined as any other, in its own capacity."""
    x = fr.KeyedJaggedTensor.from_lists({"a": [[1, 2], [3]]}).permute([])
    for same in (x, x.permute([]), x.split([0, 0])[1], fr.KeyedJaggedTensor.concat(x.split([0])), x.pad_to(3)):
        assert (same.keys, same.num_bags, same.capacity) == ((), 2, 3)


def test_a_key_that_stands_twice_has_two_places():
    """Where a key stands twice, split and pad_to_bucket take each place, even if the places differ."""
    x = fr.KeyedJaggedTensor.from_lists({"a": [[1, 2]]}).permute(["a", "a"])
    x = fr.bag_filter(x, torch.tensor([True, True, False, True]))
    assert [[*bags.to_lists().values()] for bags in x.split([1, 1])] == [[[[1, 2]]], [[[2]]]]
    once = fr.dedup_bags(fr.KeyedJaggedTensor.from_lists({"a": [[1, 2], [3]]})).permute(["a", "a"])
    padded = fr.pad_to_bucket(once, minimum=1)
    assert padded.lengths.tolist() == [2, 1, 2, 1] and padded.unpad().values.tolist() == [1, 2, 3, 1, 2, 3]


def test_work_on_keys_is_linear_in_the_bags():
    """Twenty-six keys of 4096 bags are permuted and sliced in less than a second."""
    x = fr.KeyedJaggedTensor.from_lengths(
        [f"f{i}" for i in range(26)],
        torch.zeros(26 * 4096, dtype=torch.int64),
        torch.ones(26 * 4096, dtype=torch.int64),
    )
    started = time.perf_counter()
    x.permute(x.keys[::-1])[:4000]
    assert time.perf_counter() - started < 1.0
