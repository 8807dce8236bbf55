"""Jagged values equal JaggedTensor, KeyedJaggedTensor and KeyedTensor of TorchRec."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

pytest.importorskip("torchrec")
from torchrec.sparse import jagged_tensor as tr

FLOATS = (torch.float32,)
UNEVEN = pytest.mark.parametrize("same_bags", [True, False], ids=["one_stride", "strides"])


def kjt(x):
    """Return our ids as those of TorchRec, which have no padding."""
    x = x.unpad()
    strides = {} if x.strides is None else {"stride_per_key_per_rank": [[s] for s in x.strides]}
    return tr.KeyedJaggedTensor(list(x.keys), x.values, x.weights, lengths=x.lengths, **strides)


def jt(x):
    x = x.unpad()
    return tr.JaggedTensor(x.values, x.weights, offsets=x.offsets)


def keyed(**options):
    """Return random ids with weights for all keys or for no key, because TorchRec has no other ids."""
    return st.booleans().flatmap(lambda w: frs.keyed_jagged_tensors(weighted=w, **options))


def parts(x):
    """Return (keys, bags per key, values, weights, offsets) of the ids of either library. `()` stands for no
    weights."""
    if isinstance(x, fr.KeyedJaggedTensor):
        x = x.unpad()
        counts = x.strides or (x.num_bags,) * len(x.keys)
        return x.keys, tuple(counts), x.values, () if x.weights is None else x.weights, x.offsets.long()
    weights = x.weights_or_none()
    return (
        tuple(x.keys()),
        tuple(x.stride_per_key()),
        x.values(),
        () if weights is None else weights,
        x.offsets().long(),
    )


def bags(x):
    """Return (values, weights, offsets) of a JaggedTensor of either library."""
    if isinstance(x, fr.JaggedTensor):
        x = x.unpad()
        return x.values, () if x.weights is None else x.weights, x.offsets.long()
    weights = x.weights_or_none()
    return x.values(), () if weights is None else weights, x.offsets().long()


# -- KeyedJaggedTensor -------------------------------------------------------------------------------------------


@given(keyed(min_bags=1))
def test_constructors_agree(x):
    """from_lengths and from_offsets give the values of from_lengths_sync and from_offsets_sync. to_lists agrees."""
    x = x.unpad()
    args = list(x.keys), x.values
    theirs = tr.KeyedJaggedTensor.from_lengths_sync(*args, x.lengths, x.weights)
    assert_trees_close(parts(fr.KeyedJaggedTensor.from_lengths(*args, x.lengths, weights=x.weights)), parts(theirs))
    also = tr.KeyedJaggedTensor.from_offsets_sync(*args, x.offsets, x.weights)
    assert_trees_close(parts(fr.KeyedJaggedTensor.from_offsets(*args, x.offsets, weights=x.weights)), parts(also))
    assert x.to_lists() == {k: [bag.tolist() for bag in f.to_dense()] for k, f in theirs.to_dict().items()}


@UNEVEN
@given(data=st.data())
def test_one_key_is_theirs(same_bags, data):
    """ids[key] and to_dict give the bags of each key, weights included."""
    x = data.draw(keyed(min_bags=1, same_bags=same_bags))
    ours, theirs = x.to_dict(), kjt(x).to_dict()
    assert list(ours) == list(theirs) == list(x.keys)
    for k in x.keys:
        assert_trees_close(bags(x[k]), bags(kjt(x)[k]))
        assert_trees_close(bags(ours[k]), bags(theirs[k]))


@UNEVEN
@given(data=st.data())
def test_permute_is_theirs(same_bags, data):
    """permute reorders, drops and repeats keys in the same way as permute of TorchRec."""
    x = data.draw(keyed(min_bags=1, same_bags=same_bags))
    order = data.draw(st.lists(st.integers(0, len(x.keys) - 1), min_size=1, max_size=5))
    assert_trees_close(parts(x.permute(order)), parts(kjt(x).permute(order)))
    assert_trees_close(parts(x.permute([x.keys[i] for i in order])), parts(kjt(x).permute(order)))


@UNEVEN
@given(data=st.data())
def test_split_is_theirs(same_bags, data):
    """split cuts the keys into runs. Each run is a value, as in TorchRec."""
    x = data.draw(keyed(keys=("a", "b", "c", "d"), min_bags=1, same_bags=same_bags))
    cuts = data.draw(st.sampled_from([[4], [1, 3], [2, 2], [3, 1], [1, 2, 1], [1, 1, 1, 1]]))
    for mine, theirs in zip(x.split(cuts), kjt(x).split(cuts), strict=True):
        assert_trees_close(parts(mine), parts(theirs))


@UNEVEN
@given(data=st.data())
def test_concat_is_theirs(same_bags, data):
    """concat joins the keys of several values, as in TorchRec."""
    count = data.draw(st.integers(1, 3))
    alike = {"dtypes": (torch.int64,), "offset_dtypes": (torch.int64,), "weighted": data.draw(st.booleans())}
    size = {"min_bags": count, "max_bags": count} if same_bags else {"min_bags": 1}
    draw = lambda keys: data.draw(frs.keyed_jagged_tensors(keys=keys, same_bags=same_bags, **size, **alike))
    pieces = [draw(("a", "b")), draw(("c",))]
    got, want = fr.KeyedJaggedTensor.concat(pieces), tr.KeyedJaggedTensor.concat([kjt(p) for p in pieces])
    assert_trees_close(parts(got), parts(want))


@UNEVEN
@given(data=st.data())
def test_from_jagged_is_from_jt_dict(same_bags, data):
    """from_jagged makes the ids of from_jt_dict from one JaggedTensor per key, with equal or different numbers of
    bags."""
    x = data.draw(keyed(min_bags=1, same_bags=same_bags))
    theirs = tr.KeyedJaggedTensor.from_jt_dict({k: jt(x[k]) for k in x.keys})
    assert_trees_close(parts(fr.KeyedJaggedTensor.from_jagged(x.to_dict())), parts(theirs))


# -- JaggedTensor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_shape", [(), (3,)], ids=["numbers", "vectors"])
@given(data=st.data())
def test_to_padded_is_to_padded_dense(row_shape, data):
    """to_padded cuts and fills values as to_padded_dense does, and weights as to_padded_dense_weights does."""
    x = data.draw(frs.jagged_tensors(dtypes=FLOATS, weighted=True, row_shape=row_shape, min_bags=1))
    length, fill = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([0.0, -1.5]))
    assert_trees_close(x.to_padded(length, fill), jt(x).to_padded_dense(length, fill))
    weights = fr.JaggedTensor(x.weights, x.offsets)
    assert_trees_close(weights.to_padded(length, fill), jt(x).to_padded_dense_weights(length, fill))


@given(frs.jagged_tensors(dtypes=(torch.int64,), min_bags=1))
def test_the_longest_bag_is_their_default(x):
    """to_padded at the length of the longest bag equals to_padded_dense without a length."""
    assert_trees_close(x.to_padded(int(x.lengths.max())), jt(x).to_padded_dense())


@given(data=st.data())
def test_from_padded_is_from_dense_lengths(data):
    """from_padded takes the first lengths[b] values and weights of each row, as from_dense_lengths does."""
    count, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, length), min_size=count, max_size=count)))
    padded, weights = (data.draw(frs.tensors((count, length))) for _ in range(2))
    got = fr.JaggedTensor.from_padded(padded, lengths, weights=weights)
    assert_trees_close(bags(got), bags(tr.JaggedTensor.from_dense_lengths(padded, lengths, weights)))


@given(frs.jagged_tensors(dtypes=FLOATS, weighted=True, min_bags=1))
def test_lists_are_their_dense(x):
    """from_lists equals from_dense of the bags as tensors. to_lists equals to_dense."""
    weights = fr.JaggedTensor(x.weights, x.offsets).to_lists()
    theirs = tr.JaggedTensor.from_dense(*([torch.tensor(bag) for bag in side] for side in (x.to_lists(), weights)))
    got = fr.JaggedTensor.from_lists(x.to_lists(), weights=weights, dtype=torch.float32)
    assert_trees_close(bags(got), bags(theirs))
    assert x.to_lists() == [bag.tolist() for bag in jt(x).to_dense()]


# -- KeyedTensor -------------------------------------------------------------------------------------------------


@given(frs.keyed_tensors(dtypes=FLOATS))
def test_keyed_tensor_is_theirs(x):
    """from_dict, [key] and to_dict equal from_tensor_list, [key] and to_dict."""
    theirs = tr.KeyedTensor.from_tensor_list(list(x.keys), list(x.to_dict().values()))
    ours = fr.KeyedTensor.from_dict(x.to_dict())
    assert_trees_close(ours.values, theirs.values())
    assert (list(ours.keys), list(ours.dims)) == (theirs.keys(), theirs.length_per_key())
    assert_trees_close(ours.to_dict(), theirs.to_dict())
    assert_trees_close({k: ours[k] for k in ours}, {k: theirs[k] for k in theirs.keys()})  # noqa: SIM118 (no __iter__)


GROUPINGS = {
    "each_once": [["d", "a"], ["c", "b"]],
    "some_left_out": [["d"], ["b", "a"]],
    "some_repeated": [["a", "c"], ["c", "b", "d"], ["c"]],
}


@pytest.mark.parametrize("groups", GROUPINGS.values(), ids=GROUPINGS)
@given(data=st.data())
def test_regroup_is_theirs(groups, data):
    """regroup and its transpose gather the features of two values into groups. The groups equal those of both ways of
    KeyedTensor.regroup."""
    num_rows = data.draw(st.integers(1, 4))
    pieces = [data.draw(frs.keyed_tensors(keys=k, num_rows=num_rows, dtypes=FLOATS)) for k in ("ab", "cd")]
    values = [x.values.clone().requires_grad_() for x in pieces]
    theirs = [tr.KeyedTensor(list(x.keys), list(x.dims), v) for x, v in zip(pieces, values)]
    want = tr.KeyedTensor.regroup(theirs, groups)
    regroup = lambda *vs: fr.regroup([fr.KeyedTensor(v, x.keys, x.dims) for v, x in zip(vs, pieces)], groups)
    got, transpose = torch.func.vjp(regroup, *(x.values for x in pieces))
    assert_trees_close(got, [x.detach() for x in want])
    d_groups = [data.draw(frs.tensors(x.shape)) for x in got]
    d_want = torch.autograd.grad(list(want), values, d_groups)
    assert_trees_close(transpose(d_groups), d_want)
