"""A split KeyedJaggedTensor, joined again, has the same bags and capacity.

Lists, arrays and tensors convert to jagged values."""

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.testing import assert_trees_close, garbage_padding, zero_padding
from funcrec.testing import strategies as frs

JT, KJT = fr.JaggedTensor, fr.KeyedJaggedTensor
KEYS = ("a", "b", "c")


# ways to split and join, whose results have the capacity of the whole
WAYS = {
    "split": lambda x: KJT.concat(x.split([1, 0, 2])),
    "to_dict": lambda x: KJT.from_jagged(x.to_dict()),
    "keys": lambda x: KJT.from_jagged({k: x[k] for k in x.keys}),
    "permute": lambda x: KJT.concat([x.permute(["a"]), x.permute(["b", "c"])]),
    "parts of parts": lambda x: KJT.from_jagged({k: p[k] for p in x.split([2, 1]) for k in p.keys}),
    "alone": lambda x: KJT.concat([x]),
}


@pytest.mark.parametrize("way", WAYS)
@given(frs.keyed_jagged_tensors(keys=KEYS))
def test_parts_take_the_room_of_the_whole(way, x):
    """concat(split(x)) and from_jagged(to_dict(x)) have the bags, weights, dtypes and capacity of x, whatever the
    padding holds."""
    out = WAYS[way](garbage_padding(x, fr.key(1)))
    assert out.capacity == x.capacity and out.strides == x.strides
    assert_trees_close(zero_padding(out), zero_padding(x))


@given(frs.keyed_jagged_tensors(keys=KEYS, min_bags=1, same_bags=True, weighted=False))
def test_room_is_never_too_small(x):
    """A feature that is joined twice takes its capacity twice. Selected, padded or mapped features count as separate
    values."""
    mapped = torch.utils._pytree.tree_map(lambda t: t, x["a"])
    sources = [
        {"p": x["a"], "q": x["a"]},
        {"p": x["a"], "q": x["a"][::-1]},
        {"p": x["a"].pad_to(x.capacity), "q": mapped},
    ]
    for features in sources:
        out = KJT.from_jagged(features)
        assert out.to_lists() == {k: f.to_lists() for k, f in features.items()} and out.capacity == 2 * x.capacity


@given(frs.keyed_jagged_tensors(keys=("a", "b")), frs.keyed_jagged_tensors(keys=("c",)))
def test_capacities_add_up(x, y):
    """concat([x, y]) and from_jagged of the features of x and y have the sum of the two capacities, and the bags of
    both."""
    if (x.weights is None) != (y.weights is None) or x.values.dtype != y.values.dtype:
        return
    if x.strides is None and y.strides is None and x.num_bags != y.num_bags:
        return
    for out in (KJT.concat([x, y]), KJT.from_jagged({**x.to_dict(), **y.to_dict()})):
        assert out.to_lists() == {**x.to_lists(), **y.to_lists()} and out.capacity == x.capacity + y.capacity


def test_twenty_six_keys():
    """26 keys of 512 ids have 13,312 positions before and after."""
    x = KJT.from_lengths([f"f{i}" for i in range(26)], torch.arange(26 * 512), torch.ones(26 * 512, dtype=torch.int64))
    for out in (KJT.concat([x]), KJT.concat(x.split([13, 13])), KJT.from_jagged(x.to_dict())):
        assert out.capacity == 13_312 and out.values.equal(x.values)


def scores(fn, x):
    """Return a function of the values alone that depends on the position of each value."""
    of = lambda values: fn(KJT(values, x.offsets, None, None, x.keys, x.strides))
    return lambda values: torch.sin(of(values).values * torch.arange(1.0, x.capacity + 1)).sum()


@pytest.mark.parametrize("way", WAYS)
def test_parts_transformed(way):
    """A split and a join equal the identity when they are compiled, vmapped and differentiated (forward, reverse and
    twice)."""
    fn = WAYS[way]
    x = KJT(torch.linspace(-1, 1, 7), torch.tensor([0, 1, 1, 3, 3, 4, 5]), None, None, KEYS)
    ids = KJT(torch.arange(7), x.offsets, None, None, KEYS)
    if way in ("split", "to_dict"):
        out = fr.jit(fn)(ids)
        assert out.capacity == 7 and out.to_lists() == ids.to_lists()
    traced = make_fx(fn, tracing_mode="fake")(ids)(ids)
    assert_trees_close(zero_padding(traced), zero_padding(ids))
    stack = torch.stack([x.values, x.values * 2])
    got = vmap(lambda v: fn(KJT(v, x.offsets, None, None, KEYS)).values)(stack)
    assert got.shape == (2, 7) and got[:, :5].equal(stack[:, :5])
    offsets = torch.stack([x.offsets, torch.tensor([0, 0, 2, 2, 2, 6, 7])])
    each = vmap(lambda o: fn(KJT(x.values, o, None, None, KEYS)).offsets)(offsets)
    assert each.equal(offsets)
    plain = lambda v: torch.sin(v[:5] * torch.arange(1.0, 6)).sum()
    of, tangent = scores(fn, x), torch.linspace(2, 3, 7)
    pairs = [
        (of, plain),
        (grad(of), grad(plain)),
        (lambda v: jvp(of, (v,), (tangent,)), lambda v: jvp(plain, (v,), (tangent,))),
    ]
    pairs.append((lambda v: jvp(grad(of), (v,), (tangent,)), lambda v: jvp(grad(plain), (v,), (tangent,))))
    for ours, theirs in pairs:
        assert_trees_close(ours(x.values), theirs(x.values))


def test_offsets_of_large_buffers():
    """Parts with i32 offsets that together need more than 2³¹ positions get i64 offsets."""
    big = lambda: JT(
        torch.empty(2**30, dtype=torch.int8, device="meta"), torch.zeros(3, dtype=torch.int32, device="meta")
    )
    assert KJT.from_jagged({"a": big(), "b": big()}).offsets.dtype == torch.int64
    assert KJT.from_jagged({"a": big()}).offsets.dtype == torch.int32


# -- lists, arrays and tensors ------------------------------------------------------------------------------------

F16, BF16, F32, F64, I32, I64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64
DTYPES = (F16, BF16, F32, F64, I32, I64, torch.int16, torch.int8, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_keep_their_dtype(dtype):
    """Bags of tensors, lists of scalars and NumPy arrays become a buffer with their dtype and values."""
    bags = [torch.tensor([1, 0]).to(dtype), torch.tensor([]).to(dtype), torch.tensor([1]).to(dtype)]
    forms = [bags, [list(b) for b in bags], [bags[0], [], bags[2]], [bags[0], torch.zeros(0), bags[2]]]
    if dtype != BF16:
        arrays = [b.numpy() for b in bags]
        forms += [arrays, [list(a) for a in arrays], [arrays[0], bags[1], arrays[2]]]
    for form in forms:
        for out in (JT.from_lists(form), KJT.from_lists({"k": form})["k"]):
            assert out.values.dtype == dtype and out.values.tolist() == [1, 0, 1] and out.lengths.tolist() == [2, 0, 1]
    assert JT.from_lists([bags[1]]).values.dtype == dtype


def test_lists_of_numbers():
    """Python's numbers become i64, f32 or bool, and weights become f32. `dtype`, if given, holds for all lists. Empty
    lists become i64."""
    kinds = [
        ([[1, 2], []], I64),
        ([[1.5], [2]], F32),
        ([[True]], torch.bool),
        ([[], []], I64),
        ([[[1, 2], [3, 4]]], I64),
    ]
    for lists, dtype in kinds:
        out = JT.from_lists(lists)
        assert out.values.dtype == dtype and out.values.tolist() == [v for bag in lists for v in bag]
        assert JT.from_lists(lists, dtype=F64).values.dtype == F64
    assert JT.from_lists([[1]], weights=[[2]]).weights.dtype == F32
    assert JT.from_lists([[1]], weights=[torch.tensor([2.0], dtype=F64)]).weights.dtype == F64
    assert (
        JT.from_lists(np.array([[1, 2], [3, 4]])).to_lists() == JT.from_lists(torch.tensor([[1, 2], [3, 4]])).to_lists()
    )
    assert JT.from_lists([[2**62 + 1]]).values.tolist() == [2**62 + 1]
    beside = {"arrays": [np.array([1, 2]), []], "lists": [[3], [2**62 + 1]], "tensors": [torch.tensor([4]), []]}
    assert KJT.from_lists(beside).to_lists() == {"arrays": [[1, 2], []], "lists": beside["lists"], "tensors": [[4], []]}
    weights = {"arrays": [np.array([1, 2], np.float32), []], "lists": [[0.5], [3]], "tensors": None}
    assert KJT.from_lists(beside, weights=weights).weights.tolist() == [1.0, 2.0, 0.5, 3.0, 1.0]


def test_from_lists_is_differentiable():
    """Derivatives with respect to tensors in the bags, and to weights, pass through from_lists, even under vmap and
    compiled."""
    of = lambda x, w: (lambda j: (j.values.sin() * j.weights).sum())(
        JT.from_lists([x[:1], [x[1], x[2]]], weights=[w[:1], w[1:]])
    )
    plain = lambda x, w: (x.sin() * w).sum()
    x, w = torch.tensor([0.1, 0.2, 0.3], dtype=F64), torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    assert_trees_close(grad(of, (0, 1))(x, w), grad(plain, (0, 1))(x, w))
    assert_trees_close(grad(lambda v: grad(of)(v, w).sum())(x), -x.sin() * w)
    assert_trees_close(vmap(of)(torch.stack([x, w]), torch.stack([w, x])), torch.stack([plain(x, w), plain(w, x)]))
    leaf = x.clone().requires_grad_()
    of(leaf, w).backward()
    assert_trees_close(leaf.grad, x.cos() * w)
    assert_trees_close(fr.jit(of)(x, w), plain(x, w))


REFUSED = {
    "f32 and f64": ([torch.zeros(1), torch.zeros(1, dtype=F64)], {}, TypeError),
    "i32 and i64": ([torch.zeros(1, dtype=I32), torch.zeros(1, dtype=I64)], {}, TypeError),
    "i32 and i64 in a bag": ([[torch.tensor(1, dtype=I32), torch.tensor(1)]], {}, TypeError),
    "array and numbers": ([np.zeros(1, np.int32), [1]], {}, TypeError),
    "f64 array and numbers": ([np.zeros(1), [1.5]], {}, TypeError),
    "scalar and number": ([[np.int32(1), 1]], {}, TypeError),
    "uint64": ([np.array([2**63 + 1], np.uint64)], {}, TypeError),
    "strings": ([["a"]], {}, TypeError),
    "None": ([[None]], {}, TypeError),
    "bytes": ([b"ab"], {}, TypeError),
    "a set": ([{1, 2}], {}, TypeError),
    "a dict": ([{1: 2}], {}, TypeError),
    "booleans and numbers": ([[True, 2]], {}, TypeError),
    "beyond i64": ([[2**63]], {}, ValueError),
    "ragged vectors": ([[[1], [1, 2]]], {}, ValueError),
    "vectors of tensors": ([torch.zeros(1, 2), torch.zeros(1, 3)], {}, ValueError),
    "a large integer beside floats": ([[2**24 + 1, 0.5]], {}, ValueError),
    "2.5 as an integer": ([[2.5]], {"dtype": I64}, ValueError),
    "NaN as an integer": ([[float("nan")]], {"dtype": I64}, ValueError),
    "300 as u8": ([[300]], {"dtype": torch.uint8}, ValueError),
    "a long id as i32": ([torch.tensor([2**40])], {"dtype": I32}, ValueError),
    "2²⁴ + 1 as f32": ([[2**24 + 1]], {"dtype": F32}, ValueError),
    "1e39 as f32": ([[1e39]], {}, ValueError),
    "no dtype": ([[1]], {"dtype": "i64"}, TypeError),
    "weights of integers": ([[1]], {"weights": [torch.tensor([1])]}, TypeError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_buffer_keeps_is_refused(name):
    """Values that no single dtype can hold unchanged raise, in a JaggedTensor and with keys."""
    lists, options, kind = REFUSED[name]
    with pytest.raises(kind, match=r"funcrec\.JaggedTensor\.from_l(.|\n)*  got "):
        JT.from_lists(lists, **options)
    keyed = {k: {"k": v} if k == "weights" else v for k, v in options.items()}
    with pytest.raises(kind, match=r"funcrec\.KeyedJaggedTensor\.from_l(.|\n)*  got "):
        KJT.from_lists({"k": lists}, **keyed)


@pytest.mark.parametrize("bad", [[0, 5, -(2**63)], [0, 2**63 - 1, -(2**63)], [0, -5, 2], [1, 2], [0, 4]])
def test_offsets_are_compared(bad):
    """Descending offsets raise even where their difference overflows. So do lengths whose sum overflows."""
    values = torch.zeros(3)
    with pytest.raises(ValueError, match="`offsets`"):
        JT.from_offsets(values, torch.tensor(bad))
    with pytest.raises(ValueError, match="`offsets`"):
        KJT.from_offsets(["a"], values, torch.tensor(bad))
    lengths = torch.tensor([2**63 - 1, 2**63 - 1, 5])
    with pytest.raises(ValueError, match="does not sum"):
        JT.from_lengths(values, lengths)
    with pytest.raises(ValueError, match="does not sum"):
        KJT.from_lengths(["a"], values, lengths)
    tables, features = [fr.TableConfig("a", 5, 2)], [fr.FeatureConfig("a", table="a")]
    with pytest.raises(fr.CheckError, match="offsets"):
        fr.validate(KJT(torch.zeros(3, dtype=I64), torch.tensor(bad), keys=("a",)), features, tables)
