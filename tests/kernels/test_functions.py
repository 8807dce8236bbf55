"""Elementwise functions in one loop of C++ have the bits of their compositions of exact operations.

A composition is in `funcrec.invariance`: a chain of torch's operations, which every processor rounds alike.
"""

import math

import numpy as np
import pytest
import torch
from funcrec.kernels import cpp, ops
from funcrec.kernels.invariant import FUNCTIONS
from programs.surroundings import on_threads
from torch import Tensor

import funcrec as fr
from funcrec.invariance import _functions, _replaced

F32, F64 = torch.float32, torch.float64
INTS = {F32: torch.int32, F64: torch.int64}
COMPOSED = {n: getattr(module, n) for module, names in _replaced.FUNCTIONS.items() for n in names.split()}
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 1000, 100_003)


def specials(dtype: torch.dtype) -> Tensor:
    """Return zeros, infinities, NaN, subnormal numbers, and the neighbours of where a function changes its formula."""
    around = [0.25, 0.35, 0.425, 0.4375, 0.5, 0.84375, 0.85, 0.927734375, 1.0, 1.25, 1 + math.sqrt(2), 1 / 0.35, 4.0,
              20.0, 23.0, 30.0, 88.72, 89.0, 104.0, 709.78, 710.0, 746.0, 2.0**-126, 2.0**-27, 2.0**24, 2.0**30,
              2.0**80]  # fmt: skip
    x = torch.tensor(around, dtype=dtype)
    near = [x, torch.nextafter(x, x + 1), torch.nextafter(x, x - 1), x * (math.log(2) / 2), x * (math.pi / 2)]
    least = torch.tensor([0.0, math.inf, math.nan, 1.0], dtype=dtype).nextafter(torch.tensor(0.5, dtype=dtype))
    numbers = torch.cat([*near, least, torch.tensor([0.0, math.inf, math.nan, 1e-40, 1e-310], dtype=dtype)])
    return torch.cat([numbers, -numbers])


def numbers(dtype: torch.dtype, step: int) -> Tensor:
    """Return bit patterns of all exponents, and ordinary numbers: in f32 each step-th of all, in f64 random ones."""
    if dtype == F32:
        return torch.cat([torch.arange(-(2**31), 2**31, step).to(torch.int32).view(F32), specials(F32)])
    drawn = torch.randint(-(2**63), 2**63 - 1, (2**32 // step,), generator=torch.Generator().manual_seed(1)).view(F64)
    return torch.cat([drawn, *(torch.linspace(-n, n, 20_001, dtype=F64) for n in (1.5, 40, 750)), specials(F64)])


def composed(name: str, x: Tensor) -> Tensor:
    return torch.cat([COMPOSED[name](piece) for piece in x.split(1 << 14)])


def assert_bits(got: Tensor, want: Tensor) -> None:
    """Assert that two tensors have the same bits; a NaN may be another NaN."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    kept, as_int = ~want.isnan(), INTS[want.dtype]
    assert torch.equal(got[kept].view(as_int), want[kept].view(as_int))


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_instruction_set_has_the_bits_of_the_composition(name, dtype, on_every_level):
    """Numbers of all exponents and signs, subnormal ones, and those around each change of a formula."""
    x = numbers(dtype, 9973)
    want = composed(name, x)
    found = on_every_level(lambda: cpp.invariant_function(name, x))
    assert found
    for got in found.values():
        assert_bits(got, want)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_number_depends_on_its_place(name):
    """Any length, any offset from a vector's address, and one, two and four threads give the bits of the whole."""
    for dtype in INTS:
        x = torch.linspace(-3, 5, 100_040, dtype=dtype)
        want = cpp.invariant_function(name, x)
        for offset in (0, 1, 3, 13):
            for n in LENGTHS:
                assert_bits(cpp.invariant_function(name, x[offset : offset + n]), want[offset : offset + n])
        for threads in (1, 2, 4):
            with on_threads(threads):
                assert_bits(cpp.invariant_function(name, x), want)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_views_have_the_values_and_strides_that_torch_gives(name):
    """Rows, columns, steps, expanded rows, no dims and no numbers: values are the numbers' own, strides those of
    torch's function; the argument keeps its numbers."""
    x = torch.linspace(-3, 5, 7 * 6 * 4).reshape(7, 6, 4)
    views = [x, x.mT, x.permute(2, 0, 1), x[::2], x[:, 1::2, 1], x[:1].expand(5, 6, 4), x[0, 0, 0], x[:0], x[:, :0],
             x.reshape(1, 1, -1), x.unsqueeze(1).expand(7, 2, 6, 4)]  # fmt: skip
    for view in views:
        got, like = cpp.invariant_function(name, view), getattr(torch, name)(view)
        assert_bits(got, composed(name, view.reshape(-1)).reshape(view.shape))
        assert got.stride() == like.stride() or not view.numel()
    assert torch.equal(x, torch.linspace(-3, 5, 7 * 6 * 4).reshape(7, 6, 4))


def test_roots_are_rounded_correctly():
    """√x of f64 is numpy's, which the processor rounds, for the composition too: over all sizes, around powers of two,
    and where √x is nearest to the middle of two numbers."""
    drawn = torch.randint(0, 0x7FF0 << 48, (300_000,), generator=torch.Generator().manual_seed(1)).view(F64)
    steps = torch.arange(2000, dtype=F64) * 2.0**-53
    whole = torch.randint(2**52, 2**53, (100_000,), generator=torch.Generator().manual_seed(2)).tolist()
    middles = torch.tensor([math.ldexp(float((2 * n + 1) ** 2 // 4), -104) for n in whole], dtype=F64)
    x = torch.cat([drawn, 1 - steps, 1 + 2 * steps, 4 - 4 * steps, middles, specials(F64).abs()])
    want = torch.from_numpy(np.sqrt(x.numpy()))
    assert_bits(_functions.sqrt(x), want)
    assert_bits(cpp.invariant_function("sqrt", x), want)


def test_the_composition_runs_where_a_program_is_recorded(monkeypatch):
    """Eager calls run the loop; compiled and recorded programs, and calls with the reference, the operations. All have
    the same bits, with derivatives of each order and under vmap."""
    calls, kernel = [], cpp.invariant_function
    monkeypatch.setattr(cpp, "invariant_function", lambda name, x: calls.append(name) or kernel(name, x))
    x = torch.linspace(-4, 4, 101)
    f = lambda x: torch.tanh(x) * torch.sigmoid(x) + torch.erf(x)
    slope = torch.func.vmap(torch.func.grad(f))
    bend = torch.func.vmap(torch.func.grad(torch.func.grad(f)))
    push = lambda x: torch.func.jvp(f, (x,), (x * 2,))[1]
    for g in (f, slope, bend, push):
        run = fr.invariant(g)
        calls.clear()
        eager = run(x)
        assert {"tanh", "sigmoid", "erf"} <= set(calls)
        calls.clear()
        with ops.using("reference"):
            assert_bits(run(x), eager)
        assert_bits(fr.jit(run)(x), eager)
        assert calls == []
        assert_bits(torch.stack([run(v.reshape(1))[0] for v in x]), eager)


def test_short_and_whole_numbers_are_widened():
    """16-bit floats are computed in f32, whole numbers as the default dtype, parameters as tensors."""
    x = torch.linspace(-4, 4, 51)
    for name in ("exp", "sigmoid", "sin", "erf"):
        f = _replaced.functions[name]
        for dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(f(x.to(dtype)), f(x.to(dtype).float()).to(dtype))
        assert_bits(f(torch.arange(-3, 4)), f(torch.arange(-3.0, 4.0)))
        assert_bits(fr.invariant(getattr(torch, name))(torch.nn.Parameter(x, requires_grad=False)), f(x))


@pytest.mark.parametrize(
    ("name", "x", "error", "words"),
    [
        ("exp10", torch.ones(2), ValueError, "the function is unknown[\\s\\S]*'exp10'[\\s\\S]*one of"),
        (3, torch.ones(2), ValueError, "the function is unknown"),
        ("exp", torch.ones(2, dtype=torch.float16), TypeError, "of another kind[\\s\\S]*float16"),
        ("exp", torch.ones(2, dtype=torch.int64), TypeError, "of another kind"),
        ("exp", torch.ones(2, device="meta"), TypeError, "of another kind[\\s\\S]*meta"),
        ("exp", [1.0], TypeError, "not a tensor[\\s\\S]*got[\\s\\S]*list"),
    ],
)
def test_other_arguments_are_refused(name, x, error, words):
    """Unknown names, other dtypes, other devices and values that are no tensors raise, with what to give instead."""
    with pytest.raises(error, match=words):
        cpp.invariant_function(name, x)


def test_memory_that_was_given_away_is_refused():
    """A tensor whose storage was resized to nothing raises."""
    x = torch.ones(3)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="memory was given away"):
        cpp.invariant_function("exp", x)
