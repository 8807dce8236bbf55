"""Operations on jagged and keyed values, under every transform, equal the same operations on slices in plain torch.

    T(op)(values, weights) = T(op on [values[a:b], ...])
    T: identity, grad, jvp, second order, vmap, jit, and nestings

Values have any dtype, the padding holds NaN, and batches and keys may be empty.
"""

import itertools

import pytest
import torch
from programs.refused import assert_refused
from torch.func import grad, jvp, vmap

import funcrec as fr
from funcrec.testing import assert_trees_close

JT, KJT, KT = fr.JaggedTensor, fr.KeyedJaggedTensor, fr.KeyedTensor
F16, BF16, F32, F64, I32, I64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64
KEYS = ("a", "b", "c")
OFFSETS = {  # offsets of three keys in a buffer of seven positions
    "some": [0, 2, 2, 3, 5, 5, 6],
    "strides": [0, 2, 2, 3, 5, 5, 6],
    "one bag": [0, 2, 2, 6],
    "empty bags": [0, 0, 0, 0, 0, 0, 0],
    "no bags": [0],
}
STRIDES = (1, 3, 2)
CAPACITY = 7

on_keys = lambda keys: lambda d: [(k, d[k]) for k in keys]
on_bags = lambda pick: lambda d: [(k, pick(bags)) for k, bags in d.items()]
same = lambda d: list(d.items())
KEYED = {  # the operation, and the same operation on {key: [bag, ...]}
    "permute": (lambda x: x.permute(["c", "a", "b"]), on_keys("cab")),
    "permute some": (lambda x: x.permute(["b"]), on_keys("b")),
    "permute none": (lambda x: x.permute([]), on_keys("")),
    "permute twice": (lambda x: x.permute(["b", "a", "b"]), on_keys("bab")),
    "split": (lambda x: x.split([1, 0, 2])[2], on_keys("bc")),
    "split, concat": (lambda x: KJT.concat(x.split([1, 2])), same),
    "to_dict, from_jagged": (lambda x: KJT.from_jagged(x.to_dict()), same),
    "concat of others": (lambda x: KJT.concat([x.permute(["c"]).pad_to(9), x.permute(["a"])]), on_keys("ca")),
    "a key": (lambda x: x["b"], on_keys("b")),
    "a key's bags": (lambda x: x["b"][::-1], lambda d: [("b", d["b"][::-1])]),
    "select": (lambda x: x["b"].select(torch.arange(x.bags_of("b")).repeat(2), capacity=14),
        lambda d: [("b", d["b"] * 2)]),
    "pad_to": (lambda x: x.pad_to(9), same),
    "unpad": (lambda x: x.unpad(), same),
    "pad_to_bucket": (lambda x: fr.pad_to_bucket(x), same),
    "padded and back": (
        lambda x: JT.from_padded(x["b"].to_padded(3), x["b"].lengths,
            weights=JT(x["b"].weights, x["b"].offsets).to_padded(3)),
        on_keys("b"),
    ),
    "lists and back": (
        lambda x: JT.from_lists(*[[t[a:b] for a, b in itertools.pairwise(x.offsets.tolist())] for t in (x.values,)],
                                weights=[x.weights[a:b] for a, b in itertools.pairwise(x.offsets.tolist())]),
        same,
    ),
}  # fmt: skip
SAME_BAGS = {
    "slice": (lambda x: x[1:], on_bags(lambda bags: bags[1:])),
    "reversed": (lambda x: x[::-1], on_bags(lambda bags: bags[::-1])),
    "none": (lambda x: x[0:0], on_bags(lambda bags: [])),
    "list": (lambda x: x[[-1, 0, -1]], on_bags(lambda bags: [bags[-1], bags[0], bags[-1]])),
}
OPS = KEYED | SAME_BAGS
CASES = [(n, o) for n in OPS for o in OFFSETS if n in KEYED or (o != "strides" and (o != "no bags" or n != "list"))]
# an empty list has no dtype to keep
CASES.remove(("lists and back", "no bags"))


def keyed(values, weights, name, offsets=None):
    offsets = torch.tensor(OFFSETS[name]) if offsets is None else offsets
    return KJT(values, offsets, weights, None, KEYS, STRIDES if name == "strides" else None)


def counts_of(name):
    return STRIDES if name == "strides" else (len(OFFSETS[name]) // 3,) * 3


def slices(x, bounds, counts):
    """Return {key: [bag, ...]} of a buffer, cut by Python's slices."""
    bags = [x[a:b] for a, b in itertools.pairwise(bounds)]
    ends = [0, *itertools.accumulate(counts)]
    return {k: bags[a:b] for k, (a, b) in zip(KEYS, itertools.pairwise(ends), strict=True)}


def plain_of(op, name):
    """Return a function (values, weights) -> (values, weights) of the result's bags, joined, by slices alone."""
    flat = lambda x: [bag for _, bags in OPS[op][1](slices(x, OFFSETS[name], counts_of(name))) for bag in bags]
    joined = lambda x: torch.cat([x[:0], *flat(x)])
    return lambda values, weights: (joined(values), joined(weights))


def ours_of(op, name):
    used = plain_of(op, name)(torch.zeros(CAPACITY), torch.zeros(CAPACITY))[0].shape[0]

    def run(values, weights):
        out = OPS[op][0](keyed(values, weights, name))
        return out.values[:used], out.weights[:used]

    return run


def buffers(dtype=F64, name="some"):
    """Return values [7, 2] and weights [7] with NaN in the padding."""
    g = torch.Generator().manual_seed(0)
    values, weights = torch.randn(CAPACITY, 2, generator=g, dtype=F64), torch.randn(CAPACITY, generator=g, dtype=F64)
    inside = torch.arange(CAPACITY) < OFFSETS[name][-1]
    return torch.where(inside[:, None], values, torch.nan).to(dtype), torch.where(inside, weights, torch.nan).to(dtype)


def scalar(fn):
    """Return a function whose value is a number that mixes values and weights, with derivatives of every order."""
    return lambda v, w: (lambda out: (out[0].sin() * out[0].cos() * out[1].exp()[:, None]).sum())(fn(v, w))


TRANSFORMS = {
    "value": lambda f, v, w: f(v, w),
    "grad": lambda f, v, w: grad(scalar(f), (0, 1))(v, w),
    "jvp": lambda f, v, w: jvp(f, (v, w), (v.cos(), w.sin())),
    "grad of grad": lambda f, v,
    w: grad(lambda x, y: sum((g * g.detach()).nansum() for g in grad(scalar(f), (0, 1))(x, y)), (0, 1))(v, w),
    "jvp of grad": lambda f, v, w: jvp(grad(scalar(f), (0, 1)), (v, w), (v.cos(), w.sin())),
    "vmap": lambda f, v, w: vmap(f)(torch.stack([v, v * 2]), torch.stack([w, w * 3])),
    "vmap of values": lambda f, v, w: vmap(f, (1, None), (1, 0))(v[:, None].repeat(1, 3, 1), w)[0],
    "vmap of grad": lambda f, v, w: vmap(grad(scalar(f), (0, 1)))(torch.stack([v, v * 2]), torch.stack([w, w * 3])),
    "grad of vmap": lambda f, v,
    w: grad(lambda x, y: vmap(scalar(f))(torch.stack([x, x * 2]), torch.stack([y, y])).sum(), (0, 1))(v, w),
}  # fmt: skip


@pytest.mark.parametrize("op, name", CASES)
def test_an_operation_under_transforms(op, name):
    """Every transform of an operation, by values and weights, equals that of slices. NaN in the padding reaches no
    derivative. The derivative of the padding itself is 0."""
    v, w = buffers(name=name)
    for transform, apply in TRANSFORMS.items():
        got, want = apply(ours_of(op, name), v, w), apply(plain_of(op, name), v, w)
        try:
            assert_trees_close(got, want)
        except AssertionError as error:
            raise AssertionError(f"{transform}: {error}") from error


@pytest.mark.parametrize("op, name", CASES)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, I32, I64, torch.bool])
def test_an_operation_of_every_dtype(op, name, dtype):
    """Values keep their dtype and bits, and so do weights. A gradient has the dtype of its argument."""
    v, w = buffers(name=name)
    v, w = torch.nan_to_num(v * 8).to(dtype), w.to(dtype if dtype.is_floating_point else F32)
    got, want = ours_of(op, name)(v, w), plain_of(op, name)(v, w)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))
    if dtype.is_floating_point:
        of = lambda f: grad(lambda x, y: sum((t.float() * 2).sum() for t in f(x, y)), (0, 1))(v, w)
        got, want = of(ours_of(op, name)), of(plain_of(op, name))
        assert all(a.dtype == b.dtype == dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


# these operations read offsets on the host
HOST = ("unpad", "pad_to_bucket", "lists and back")


@pytest.mark.parametrize("op, name", [(o, n) for o, n in CASES if o not in HOST and n not in ("no bags", "one bag")])
def test_an_operation_maps_over_offsets(op, name):
    """vmap over offsets equals a loop over offsets, with weights and values mapped or not, i32 or i64."""
    v, w = buffers(name="some")
    v, w = torch.nan_to_num(v), torch.nan_to_num(w)
    for dtype in (I32, I64):
        offsets = torch.tensor([OFFSETS[name], [0, 0, 1, 1, 4, 7, 7], [0] * 6 + [7]], dtype=dtype)
        run = lambda o, x, y: (lambda out: (out.values, out.offsets, out.weights))(OPS[op][0](keyed(x, y, name, o)))
        for stacked in (True, False):
            x, y = (torch.stack([t, t + 1, t * 2]) if stacked else t for t in (v, w))
            got = vmap(run, (0, 0, 0) if stacked else (0, None, None))(offsets, x, y)
            each = [run(o, x[i] if stacked else x, y[i] if stacked else y) for i, o in enumerate(offsets)]
            assert_trees_close(list(got), [torch.stack(parts) for parts in zip(*each, strict=True)])


def test_operations_compiled():
    """Compiled operations and their gradients equal the eager operations and gradients, even with NaN in the
    padding."""
    v, w = buffers()
    ops = ["permute twice", "split, concat", "list", "padded and back"]
    total = lambda of: lambda v, w: sum(scalar(of(op, "some"))(v, w) for op in ops)
    run = lambda of: lambda v, w: ([of(op, "some")(v, w) for op in ops], grad(total(of), (0, 1))(v, w))
    assert_trees_close(fr.jit(run(ours_of))(v, w), run(plain_of)(v, w), rtol=1e-14)


# -- pooled features ------------------------------------------------------------------------------------------------

DIMS = {"a": 2, "b": 1, "c": 2}
of_parts = lambda x: KT(x, tuple(DIMS), tuple(DIMS.values()))
cut = lambda x: dict(zip(DIMS, (x[..., :2], x[..., 2:3], x[..., 3:]), strict=True))
POOLED = {
    "a key": (lambda x: of_parts(x)["b"], lambda x: cut(x)["b"]),
    "to_dict": (lambda x: list(of_parts(x).to_dict().values()), lambda x: list(cut(x).values())),
    "stack": (lambda x: KT(x[..., :4], ("a", "c"), (2, 2)).stack(), lambda x: x[..., :4].unflatten(-1, (2, 2))),
    "from_dict": (lambda x: KT.from_dict(dict(reversed(cut(x).items()))).values,
        lambda x: torch.cat([x[..., 3:], x[..., 2:3], x[..., :2]], -1)),
    "concat": (lambda x: KT.concat([of_parts(x), KT.from_dict({"d": x})]).values, lambda x: torch.cat([x, x], -1)),
    "regroup": (lambda x: fr.regroup([of_parts(x)], [["c", "a"], ["b", "c"]]),
        lambda x: [torch.cat([x[..., 3:], x[..., :2]], -1), x[..., 2:]]),
}  # fmt: skip


@pytest.mark.parametrize("name", POOLED)
@pytest.mark.parametrize("num_bags", [0, 1, 3])
def test_pooled_features_under_transforms(name, num_bags):
    """Operations on a KeyedTensor equal cuts of the KeyedTensor's columns, under every transform, for every dtype and
    an empty batch."""
    ours, plain = POOLED[name]
    x = torch.randn(num_bags, 5, generator=torch.Generator().manual_seed(1), dtype=F64)
    total = lambda f: lambda x: sum(t.sin().sum() for t in (lambda out: out if isinstance(out, list) else [out])(f(x)))
    for apply in (
        lambda f: f(x), lambda f: grad(total(f))(x), lambda f: jvp(grad(total(f)), (x,), (x.cos(),)),
        lambda f: jvp(f, (x,), (x.cos(),)),
        lambda f: vmap(f)(torch.stack([x, x * 2])), lambda f: vmap(grad(total(f)))(torch.stack([x, x * 2])),
        lambda f: fr.jit(f)(x) if num_bags == 3 and name == "regroup" else None,
    ):  # fmt: skip
        assert_trees_close(apply(ours), apply(plain))
    for dtype in (F16, BF16, F32, I64):
        assert_trees_close(ours(x.to(dtype)), plain(x.to(dtype)))


# -- what would be silently wrong -------------------------------------------------------------------------------------

ONE = JT.from_lists([[1, 2], [3]])
IDS = KJT.from_lists({"a": [[1, 2], [3]], "b": [[4], []]})
REFUSED = {
    "a mask of bags": (lambda: ONE[[True, False]], IndexError, "are not positions"),
    "a boolean bag": (lambda: IDS[True], IndexError, "are not positions"),
    "a mask of keys": (lambda: IDS.permute([True, False]), (IndexError, TypeError), "`keys"),
    "select by a mask": (lambda: ONE.select(torch.tensor([True, False]), capacity=3), TypeError, "`bags`"),
    "select bag -1": (lambda: ONE.select(torch.tensor([-1]), capacity=3), ValueError,
        "`bags` has a bag that does not exist"),
    "select bag 2": (lambda: ONE.select(torch.tensor([2]), capacity=3), ValueError,
        "`bags` has a bag that does not exist"),
    "select into too little": (lambda: ONE.select(torch.tensor([0, 0]), capacity=3), ValueError,
        "`capacity` does not hold the bags"),
    "select into -1": (lambda: ONE.select(torch.tensor([0]), capacity=-1), ValueError, "`capacity` is"),
    "a fraction behind integers": (lambda: ONE.to_padded(2, 0.5), TypeError, "`fill` is not of i64"),
    "NaN behind integers": (lambda: ONE.to_padded(2, float("nan")), TypeError, "`fill` is not of i64"),
    "a fill beyond i32": (lambda: JT.from_lists([[1]], dtype=I32).to_padded(2, 2**40), ValueError,
        "`fill` is not of i32"),
    "a fill in words": (lambda: ONE.to_padded(2, "x"), TypeError, "`fill` is no"),
    "a length of 2.5": (lambda: ONE.to_padded(2.5), TypeError, "`length` is not an integer"),
    "weights of integers": (lambda: JT.from_padded(torch.ones(1, 2), torch.tensor([1]),
            weights=torch.ones(1, 2).long()), TypeError, "`weights` is not a tensor of this dtype"),
    "weights of lists": (lambda: JT.from_padded(torch.ones(1, 2), torch.tensor([1]), weights=[[1, 1]]), TypeError,
        "`weights` is not a tensor"),
    "integers among vectors": (lambda: KT.from_dict({"a": torch.ones(1, 2), "b": torch.ones(1, 2).long()}), TypeError,
        "differ in dtype"),
    "concat of dtypes": (lambda: KT.concat([KT.from_dict({"a": torch.ones(1, 2)}),
                KT.from_dict({"b": torch.ones(1, 2, dtype=F64)})]), TypeError, "differ in dtype"),
    "regroup of dtypes": (lambda: fr.regroup([KT.from_dict({"a": torch.ones(1, 2)}),
                KT.from_dict({"b": torch.ones(1, 2).long()})], [["a", "b"]]), TypeError, "differ in dtype"),
    "dims of other columns": (lambda: KT(torch.ones(1, 5), ("a", "b"), (2, 2)), ValueError, "does not match its dims"),
    "dims of other keys": (lambda: KT(torch.ones(1, 4), ("a",), (2, 2)), ValueError, "does not match its dims"),
    "a key twice": (lambda: KT(torch.ones(1, 4), ("a", "a"), (2, 2)), ValueError, "`keys` names a feature twice"),
    "strides of fractions": (lambda: KJT.from_lengths(["a", "b"], torch.ones(2).long(), torch.ones(2).long(),
            strides=(0.5, 1.5)), TypeError, "`strides"),
    "segments of fractions": (lambda: IDS.split([0.5, 1.5]), TypeError, "`segments"),
    "a key that is not a name": (lambda: KJT.from_jagged({1: ONE}), TypeError, "a name in `features` is not a string"),
    "values of other shapes": (lambda: KJT.from_jagged({"a": JT(torch.ones(2), torch.tensor([0, 2])),
                "b": JT(torch.ones(2, 3), torch.tensor([0, 2]))}), ValueError, "different shapes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_invented(name):
    """Masks given as positions, bags that do not exist, buffers that are too small, and fills outside the dtype each
    raise."""
    assert_refused(*REFUSED[name])
