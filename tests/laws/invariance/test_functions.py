"""Elementwise functions of exact operations: near to the function in f64 everywhere, with IEEE's special values."""

import math

import mpmath
import pytest
import torch
from torch import Tensor

import funcrec as fr
from funcrec.invariance import _functions
from funcrec.invariance._replaced import functions
from funcrec.testing import assert_trees_close

BOUNDS = {
    "exp": 1.1, "expm1": 2, "log": 1, "log2": 0.6, "log10": 0.6, "log1p": 2, "sigmoid": 3, "tanh": 3, "sqrt": 0.5,
    "rsqrt": 1.5, "erf": 1.2, "erfc": 0.6, "sin": 0.6, "cos": 0.6, "tan": 0.6, "asin": 0.6, "acos": 0.6, "atan": 0.6,
    "sinh": 0.6, "cosh": 0.6, "asinh": 0.6, "acosh": 0.6, "atanh": 0.6,
}  # fmt: skip
INF, NAN = math.inf, math.nan


def units(y: Tensor, truth: Tensor) -> Tensor:
    """Return the distance of f32 from the truth in f64, in units of the last place of the truth."""
    exponent = torch.floor(torch.log2(truth.abs().clamp(min=2.0**-126)))
    return (y.double() - truth).abs() / torch.exp2(exponent - 23)


@pytest.mark.parametrize("name", BOUNDS)
def test_the_stated_bound_holds_over_all_floats(name):
    """Every 40,009th of all f32 numbers, of both signs, with the subnormal ones: the error in units of the last place
    is below the bound that the docstring states; NaN, infinities and the signs of zeros are those of torch in f64."""
    x = torch.arange(-(2**31), 2**31, 40_009).to(torch.int32).view(torch.float32)
    y, truth = functions[name](x), getattr(torch, name)(x.double())
    assert torch.equal(y.isnan(), truth.isnan())
    assert torch.equal(y.isinf(), truth.float().isinf())
    known = y.isfinite()
    assert units(y[known], truth[known]).max() <= BOUNDS[name]
    assert torch.equal(torch.signbit(y[y == 0]), torch.signbit(truth.float()[y == 0]))


@pytest.mark.parametrize("name", BOUNDS)
def test_in_f64_they_are_near_to_torch(name):
    """In f64 each function is within six units of torch's, over ordinary numbers of all sizes."""
    exponents = torch.linspace(-300, 300, 4001, dtype=torch.float64)
    x = torch.cat([torch.exp2(exponents), -torch.exp2(exponents), torch.linspace(-40, 40, 4001, dtype=torch.float64)])
    if name in ("sin", "cos", "tan"):
        x = x[x.abs() < 2.0**80]
    y, truth = functions[name](x), getattr(torch, name)(x)
    torch.testing.assert_close(y, truth, rtol=6 * 2.0**-52, atol=2.0**-1000, equal_nan=True)


def test_special_values():
    """Zeros, infinities and NaN go where IEEE 754 says."""
    x = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1.0])
    known = {"exp": [1, 1, INF, 0, NAN, math.e], "expm1": [0, -0.0, INF, -1, NAN, math.e - 1],
             "log": [-INF, -INF, INF, NAN, NAN, 0], "log2": [-INF, -INF, INF, NAN, NAN, 0],
             "log10": [-INF, -INF, INF, NAN, NAN, 0], "log1p": [0, -0.0, INF, NAN, NAN, math.log(2)],
             "sigmoid": [0.5, 0.5, 1, 0, NAN, 1 / (1 + math.exp(-1))], "tanh": [0, -0.0, 1, -1, NAN, math.tanh(1)],
             "sqrt": [0, -0.0, INF, NAN, NAN, 1], "rsqrt": [INF, -INF, 0, NAN, NAN, 1]}  # fmt: skip
    for name, values in known.items():
        got = functions[name](x)
        torch.testing.assert_close(got, torch.tensor(values), rtol=2e-7, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(got[:2]), torch.signbit(torch.tensor(values[:2]))), name


def test_waves_are_those_of_the_exact_angle():
    """Sine, cosine and tangent in f64 are within the bounds that they state of the exact values, for angles near to
    whole quarters of a turn, and for large ones; from 2^80 on they are NaN."""
    near = torch.arange(1, 400, dtype=torch.float64) * (math.pi / 2)
    large = torch.exp2(torch.linspace(20, 79.9, 400, dtype=torch.float64))
    x = torch.cat([near, -near, large])
    with mpmath.workprec(300):
        for name, bound in (("sin", 3), ("cos", 3), ("tan", 5)):
            truth = [getattr(mpmath, name)(mpmath.mpf(v)) for v in x.tolist()]
            off = [abs((mpmath.mpf(y) - t) / t) for y, t in zip(functions[name](x).tolist(), truth, strict=True)]
            assert max(off) <= bound * 2.0**-52, name
            assert functions[name](torch.tensor([2.0**80, -INF], dtype=torch.float64)).isnan().all()


def test_angles_of_points():
    """atan2 is the angle in f64, rounded to f32, for signs, zeros, infinities, NaN, and sizes far apart."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.3, 1e-30, -3e38, 7e5, INF, -INF, NAN])
    y, x = (v.reshape(-1) for v in torch.meshgrid(values, values, indexing="ij"))
    got, truth = functions["atan2"](y, x), torch.atan2(y.double(), x.double()).float()
    torch.testing.assert_close(got, truth, rtol=1.2e-7, atol=1.5e-45, equal_nan=True)
    known = ~got.isnan()
    assert torch.equal(torch.signbit(got[known]), torch.signbit(truth[known]))


def test_powers_are_those_of_f64():
    """x^y is the power in f64, rounded to f32, for every sign of x and every kind of exponent."""
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e-30, 3e38, INF, -INF, NAN])
    for y in (0.0, 1.0, 2.0, -3.0, 0.3, -0.7, 31.0, 200.0, INF, -INF):
        got = _functions.power(x, torch.tensor(y))
        truth = torch.pow(x.double(), torch.tensor(y).double()).float()
        torch.testing.assert_close(got, truth, rtol=1.2e-7, atol=1.5e-45, equal_nan=True)
        assert torch.equal(torch.signbit(got[~got.isnan()]), torch.signbit(truth[~got.isnan()])), y
    for n in (0, 1, 2, 3, 7, -2):
        torch.testing.assert_close(_functions.whole_power(x, n), torch.pow(x, n), rtol=4e-7, atol=1e-45, equal_nan=True)


def test_a_slice_has_the_bits_of_the_whole():
    """No number's result depends on its place: lengths around the vectors' give the bits of single numbers."""
    x = torch.linspace(-9, 9, 67)
    for name in BOUNDS:
        f = functions[name]
        whole = f(x)
        for n in (1, 7, 16, 33):
            same = torch.equal(f(x[3 : 3 + n]).view(torch.int32), whole[3 : 3 + n].view(torch.int32))
            assert same, (name, n)


def test_large_tensors_have_the_bits_of_their_parts():
    """A large tensor has the bits of a few of its numbers alone, with its shape and derivative; a recorded program has
    each function once."""
    x = torch.linspace(-9, 9, 50_005).reshape(-1, 1)
    f, slope = fr.invariant(torch.tanh), fr.invariant(torch.func.grad(lambda x: torch.tanh(x).sum()))
    assert torch.equal(f(x)[40_000:40_007], f(x[40_000:40_007]))
    assert torch.equal(slope(x)[40_000:40_007], slope(x[40_000:40_007]))
    assert torch.equal(fr.invariant(torch.func.vmap(torch.tanh))(x), f(x))
    assert len(fr.jit(f).lower(x).graph.graph.nodes) == len(fr.jit(f).lower(x[:9]).graph.graph.nodes)


def test_compiled_functions_have_the_bits_of_eager_ones():
    """One program of the functions with the most branches has the bits of the eager calls, over f32 of all sizes."""
    run = fr.invariant(lambda x: [functions[n](x) for n in ("erf", "sin")])
    x = torch.arange(-(2**31), 2**31, 9_040_009).to(torch.int32).view(torch.float32)
    assert_trees_close(fr.jit(run)(x), run(x), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_normal_distribution_keeps_its_digits_where_it_is_small(dtype):
    """ndtr has an error below 2 (4 + x²) units down to the last normal numbers, also for 16 bits and whole numbers; its
    slope is the density."""
    x = torch.linspace(-12 if dtype == torch.float32 else -36, 9, 1001, dtype=dtype)
    f, wide = fr.invariant(torch.special.ndtr), x.double()
    truth = torch.tensor([float(mpmath.ncdf(mpmath.mpf(v))) for v in x.tolist()], dtype=torch.float64)
    is_near = lambda y, truth: ((y.double() - truth).abs() <= torch.finfo(dtype).eps * 2 * (4 + wide**2) * truth).all()
    assert is_near(f(x), truth)
    assert torch.equal(f(torch.tensor([INF, -INF, 0.0], dtype=dtype)), torch.tensor([1, 0, 0.5], dtype=dtype))
    slope = fr.invariant(torch.func.grad(lambda x: torch.special.ndtr(x).sum()))(x)
    density = (-wide * wide / 2).exp() / math.sqrt(2 * math.pi)
    assert is_near(slope, density)
    few = x[::100].bfloat16()
    assert torch.equal(f(few), f(few.float()).bfloat16())
    assert torch.equal(f(torch.arange(-3, 3)), f(torch.arange(-3.0, 3.0)))
