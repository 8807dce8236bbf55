"""Reductions of bags against torch's of each bag alone, in every dtype, under every transform."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.as_staged import staged_only
from programs.refused import assert_refused
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import funcrec as fr
from funcrec.jagged import _primitives as primitives
from funcrec.testing import garbage_padding
from funcrec.testing import strategies as frs

HOW = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0) if len(x) else x.sum(0),
    "max": lambda x: x.amax(0) if len(x) else torch.full(x.shape[1:], -torch.inf),
    "min": lambda x: x.amin(0) if len(x) else torch.full(x.shape[1:], torch.inf),
    "prod": lambda x: x.prod(0),
    "logsumexp": lambda x: x.logsumexp(0),
}
each_reduction = pytest.mark.parametrize("how", HOW)
OFFSETS = torch.tensor([0, 2, 2, 5])
X = torch.tensor([[0.5, -1.0], [0.5, 2.0], [0.0, 1.0], [3.0, 0.0], [-2.0, 0.0], [9.0, 9.0]], dtype=torch.float64)


def parts(bags):
    return [bags.values[a:b] for a, b in zip(bags.offsets.tolist(), bags.offsets.tolist()[1:], strict=False)]


def floats(dtypes=(torch.float32, torch.float64, torch.float16, torch.bfloat16)):
    return frs.jagged_tensors(weighted=False, dtypes=dtypes)


@each_reduction
@given(bags=floats())
def test_a_reduction_is_torchs_of_each_bag(how, bags):
    """Values and dtype are right, with garbage in the padding. Floats of 16 bits are computed in f32 and rounded
    once."""
    wide = lambda x: x.to(torch.promote_types(x.dtype, torch.float32))
    want = [HOW[how](wide(x)).to(x.dtype) for x in parts(bags)]
    got = fr.bag_reduce(garbage_padding(bags, fr.key(0)), how)
    assert got.dtype == bags.values.dtype and len(got) == bags.num_bags
    close = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(got.dtype, 1e-5)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y.to(got.dtype), rtol=close, atol=close, equal_nan=True)


@given(bags=floats(), shift=st.floats(-3, 3))
def test_a_softmax_sums_to_one_in_each_bag(bags, shift):
    """bag_softmax is torch's softmax of each bag, has zeros as padding, and does not change when a number is added to a
    bag."""
    got = fr.bag_softmax(garbage_padding(bags, fr.key(0)))
    close = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(bags.values.dtype, 1e-5)
    for x, y in zip(parts(got), parts(bags), strict=True):
        torch.testing.assert_close(x, y.float().softmax(0).to(x.dtype), rtol=close, atol=close)
    assert not got.values[int(got.offsets[-1]) :].any()
    if bags.values.dtype == torch.float64:
        moved = fr.bag_softmax(fr.JaggedTensor(bags.values + shift, bags.offsets))
        torch.testing.assert_close(moved.values, got.values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
@pytest.mark.parametrize("how", ["sum", "max", "min", "prod"])
def test_integers_keep_every_bit(how, dtype):
    """Sums and products are i64; extrema keep the dtype, and an empty bag has the dtype's limit."""
    values = torch.tensor([100, 100, 3, 7, 2, 55], dtype=dtype)
    got = fr.bag_reduce(fr.JaggedTensor(values, OFFSETS), how).tolist()
    info = torch.iinfo(dtype)
    want = {"sum": [200, 0, 12], "max": [100, info.min, 7], "min": [100, info.max, 2], "prod": [10000, 1, 42]}[how]
    assert got == want
    assert fr.bag_reduce(fr.JaggedTensor(values, OFFSETS), how).dtype == (
        torch.int64 if how in ("sum", "prod") else dtype
    )


@pytest.mark.parametrize("how", ["max", "min", "sum", "mean", "prod", "logsumexp"])
def test_what_is_no_number_stays_in_its_bag(how):
    """A NaN or an infinity changes only the result of its own bag, to the result of torch."""
    for odd in (torch.nan, torch.inf, -torch.inf):
        values = X.clone()
        values[3, 0] = odd
        bags = fr.JaggedTensor(values, OFFSETS)
        got = fr.bag_reduce(bags, how)
        torch.testing.assert_close(got[2], HOW[how](values[2:5]), equal_nan=True)
        assert torch.equal(got[0], fr.bag_reduce(fr.JaggedTensor(X, OFFSETS), how)[0])


def dense(how):
    """The reduction of the two bags that are not empty, by torch."""
    return lambda x: torch.stack([HOW[how](x[0:2]), HOW[how](x[2:5])])


def ours(how):
    return lambda x: fr.bag_reduce(fr.JaggedTensor(x, OFFSETS), how)[torch.tensor([0, 2])]


@each_reduction
def test_derivatives_are_torchs(how):
    """First and second derivatives are right, forward and reverse, and 0 in the padding. Of equal extrema, the first
    gets the whole derivative."""
    x = X.clone()
    if how in ("max", "min"):
        x[1, 0] = 0.25  # torch shares a derivative among equal values
        x[4, 1] = -1.0
    f, g = ours(how), dense(how)
    torch.testing.assert_close(jacrev(f)(x), jacrev(g)(x))
    torch.testing.assert_close(jacfwd(f)(x), jacfwd(g)(x))
    total = lambda h: lambda x: h(x).sin().sum()
    torch.testing.assert_close(jacfwd(grad(total(f)))(x), jacfwd(grad(total(g)))(x))
    torch.testing.assert_close(jacrev(jacrev(total(f)))(x), jacrev(jacrev(total(g)))(x))
    assert not grad(total(f))(x)[5].any()
    if how in ("max", "min"):
        tied = grad(lambda x: ours(how)(x).sum())(torch.ones_like(X))
        assert tied[:, 0].tolist() == [1, 0, 1, 0, 0, 0]


@given(bags=frs.jagged_tensors(weighted=False, dtypes=(torch.float64,), row_shape=(2,)), dtype=st.sampled_from([4, 8]))
def test_sums_and_spreads_are_transposes(bags, dtype):
    """⟨sums(x), y⟩ = ⟨x, spread(y)⟩; each is the vjp of the other. Neither reads the padding; spread writes 0 there."""
    x = garbage_padding(bags, fr.key(0)).values
    x, offsets = x.double() if dtype == 8 else x.float(), bags.offsets
    y = torch.arange(2.0 * bags.num_bags, dtype=x.dtype).view(-1, 2) - 1
    spread = primitives.bag_spread(y, offsets, len(x))
    sums, pull = torch.func.vjp(lambda x: primitives.bag_sums(x, offsets), x)
    assert torch.equal(pull(y)[0], spread) and not spread[int(offsets[-1]) :].any()
    back = torch.func.vjp(lambda y: primitives.bag_spread(y, offsets, len(x)), y)[1]
    assert torch.equal(back(x)[0], sums)
    torch.testing.assert_close((sums * y).sum(), (x[: int(offsets[-1])] * spread[: int(offsets[-1])]).sum())
    assert primitives.bag_sums(torch.ones(5, 3, 0), OFFSETS).shape == (3, 3, 0)


def test_an_empty_bag_has_no_derivative_and_no_nan():
    """If one bag is empty, the gradients of every reduction by the values are finite."""
    for how in HOW:
        total = lambda x, how=how: fr.bag_reduce(fr.JaggedTensor(x, OFFSETS), how).nan_to_num(0, 0, 0).sum()
        assert grad(total)(X).isfinite().all(), how
    first = lambda x: (fr.bag_softmax(fr.JaggedTensor(x, OFFSETS)).values * X).sum()
    want = lambda x: sum((x[a:b].softmax(0) * X[a:b]).sum() for a, b in ((0, 2), (2, 5)))
    torch.testing.assert_close(grad(first)(X), grad(want)(X))
    torch.testing.assert_close(jacfwd(grad(first))(X), jacfwd(grad(want))(X))


EVERY = {how: (lambda x, how=how: fr.bag_reduce(x, how)) for how in HOW}
EVERY["softmax"] = lambda x: fr.bag_softmax(x).values
STACK = torch.stack([X, X * 2 - 1, X.flip(0)])


def test_compiled_reductions():
    """jit, and jit of vmap, have the numbers of single calls."""
    every = lambda x: {how: reduce(fr.JaggedTensor(x, OFFSETS)) for how, reduce in EVERY.items()}
    torch.testing.assert_close(fr.jit(every)(X), every(X))
    with staged_only():
        torch.testing.assert_close(fr.jit(vmap(every))(STACK), vmap(every)(STACK))


@pytest.mark.parametrize("how", EVERY)
def test_transforms_compose(how):
    """vmap, and a jvp inside, have the numbers of single calls, also for 0 bags and 0 values."""
    reduce, stack = EVERY[how], STACK
    f = lambda x: reduce(fr.JaggedTensor(x, OFFSETS))
    want = torch.stack([f(x) for x in stack])
    torch.testing.assert_close(vmap(f)(stack), want)
    slope = lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(vmap(slope)(stack), torch.stack([slope(x) for x in stack]))
    assert reduce(fr.JaggedTensor(X[:0], torch.zeros(1, dtype=torch.int64))).shape == (0, 2)
    assert reduce(fr.JaggedTensor(X[:0], torch.zeros(4, dtype=torch.int64))).shape == (
        (0, 2) if how == "softmax" else (3, 2)
    )


BAD = {
    "bools": (lambda: fr.bag_reduce(fr.JaggedTensor(X > 0, OFFSETS)), "are not floats or integers"),
    "a mean of integers": (lambda: fr.bag_reduce(fr.JaggedTensor(X.long(), OFFSETS), "mean"), "are not floats"),
    "a softmax of integers": (lambda: fr.bag_softmax(fr.JaggedTensor(X.long(), OFFSETS)), "need  f[N, ...]"),
    "floats of 8 bits": (
        lambda: fr.bag_reduce(fr.JaggedTensor(X.to(torch.float8_e4m3fn), OFFSETS), "max"),
        "are not floats or integers",
    ),
    "unsigned integers": (
        lambda: fr.bag_reduce(fr.JaggedTensor(X.abs().to(torch.uint16), OFFSETS)),
        "are not floats or integers",
    ),
    "weights": (lambda: fr.bag_reduce(fr.JaggedTensor(X, OFFSETS, X[:, 0])), "`bags` have weights"),
    "no bags": (lambda: fr.bag_reduce(X), "`bags`"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_reduced_is_refused(name):
    """The error is a TypeError with got and need."""
    call, text = BAD[name]
    assert_refused(call, TypeError, text)
