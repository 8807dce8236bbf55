"""Average pools, padding, running sums of exponentials, shrinks and gates under invariant, in every transform."""

import functools
import math

import pytest
import torch
from programs.invariant_models import noise
from torch.nn import functional as F

import funcrec as fr
from funcrec.invariance import check_operators, replacements
from funcrec.testing import assert_trees_close, check_invariant

equal = functools.partial(assert_trees_close, rtol=0, atol=0)
grad, jvp, vmap = torch.func.grad, torch.func.jvp, torch.func.vmap
X = noise(5, 3, 2, 7, 6)  # [B, C, depth, height, width]
flat = lambda f: lambda x: f(x[:, :, 0])  # of images
line = lambda f: lambda x: f(x[:, :, 0, 0])

FUNCTIONS = {
    "avg_pool1d": line(lambda x: F.avg_pool1d(x, 3, 2, 1)),
    "avg_pool2d": flat(lambda x: F.avg_pool2d(x, 3, 2, 1)),
    "windows with gaps": flat(lambda x: F.avg_pool2d(x, (2, 1), (3, 2))),
    "windows beyond the end": flat(lambda x: F.avg_pool2d(x, 2, 3, 1, ceil_mode=True)),
    "without padding": flat(lambda x: F.avg_pool2d(x, 4, 3, 2, ceil_mode=True, count_include_pad=False)),
    "a divisor": flat(lambda x: F.avg_pool2d(x, 3, 1, divisor_override=7)),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 2, (1, 2, 3), (1, 0, 1), count_include_pad=False),
    "lp_pool2d": flat(lambda x: F.lp_pool2d(x.abs() + 0.1, 3, 2)),
    "adaptive 1": line(lambda x: F.adaptive_avg_pool1d(x, 4)),
    "adaptive 2": flat(lambda x: F.adaptive_avg_pool2d(x, (3, 8)) + F.adaptive_avg_pool2d(x, (3, 1))),
    "adaptive 3": lambda x: F.adaptive_avg_pool3d(x, (1, 3, 4)),
    "replicate 1": line(lambda x: F.pad(x, (3, 1), mode="replicate")),
    "replicate 2": flat(lambda x: F.pad(x, (2, -1, -2, 9), mode="replicate")),
    "replicate 3": lambda x: F.pad(x, (1, 2, 0, 1, 1, 1), mode="replicate"),
    "reflect 1": line(lambda x: F.pad(x, (3, 1), mode="reflect")),
    "reflect 2": flat(lambda x: F.pad(x, (2, 3, 4, 1), mode="reflect")),
    "reflect 3": lambda x: F.pad(x, (1, 2, 0, 1, 1, 1), mode="reflect"),
    "logcumsumexp": lambda x: torch.logcumsumexp(3 * x, -2),
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "glu": lambda x: F.glu(x, -1),
}
transposed = lambda f: grad(lambda x: (f(x) * 0.5).square().sum())
TRANSFORMS = {
    "value": lambda f: f,
    "transpose": transposed,
    "twice": lambda f: grad(lambda x: transposed(f)(x).square().sum()),
    "tangent": lambda f: lambda x: jvp(f, (x,), (x.flip(-1),))[1],
    "tangent of the transpose": lambda f: lambda x: jvp(transposed(f), (x,), (x.flip(-1),))[1],
}


def assert_near(f, x, got):
    """Raise unless the result's error is below twice what torch loses in the dtype of x, and one rounding."""
    truth, eps = f(x.double()), torch.finfo(x.dtype).eps
    try:
        lost = (f(x).double() - truth).abs().max()
    except NotImplementedError:  # torch has no avg_pool3d and no tangent of glu of 16 bits
        lost = 2 * eps * truth.abs().max()
    bound = 2 * lost + 2 * eps * (1 + truth.abs().max())
    assert got.dtype == x.dtype and got.shape == truth.shape
    assert (got.double() - truth).abs().max() <= (
        bound if x.dtype != torch.float64 else 1e-12 * (1 + truth.abs().max())
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_example_has_its_own_bits_near_to_torchs(name):
    """Values and derivatives of first and second order are near to torch's in f64; an example has them alone, in any
    batch, and as a member of vmap, in f32, f64 and bf16; a batch without examples gives none."""
    for transform in TRANSFORMS.values():
        f = transform(FUNCTIONS[name])
        for x in (X, X.double(), X.bfloat16()):
            want = fr.invariant(f)(x)
            assert_near(f, x, want)
            equal(fr.invariant(vmap(lambda x: f(x[None])[0]))(x), want)  # noqa: B023
            equal(fr.invariant(vmap(f))(torch.stack([x.flip(0), x]))[1], want)
            equal(fr.invariant(f)(x[2:3]), want[2:3])
        check_invariant(fr.invariant(f), X)
        assert fr.invariant(f)(X[:0]).shape == f(X[:0]).shape


def test_programs_have_the_eager_bits():
    """One program of values, transposes and tangents has the eager bits."""
    short, x = X[:2].bfloat16(), X[:2]
    parts = [transposed(FUNCTIONS[n]) for n in ("without padding", "adaptive 2", "replicate 2")]
    every = fr.invariant(lambda short, x: [f(short) for f in parts] + [
        FUNCTIONS["logcumsumexp"](x), TRANSFORMS["tangent"](FUNCTIONS["glu"])(x), transposed(FUNCTIONS["hardshrink"])(x)
    ])  # fmt: skip
    equal(fr.jit(every)(short, x), every(short, x))


@pytest.mark.parametrize("name", ["without padding", "adaptive 3", "logcumsumexp"])
def test_an_exported_program_has_the_same_bits_for_other_batches(name):
    """The program of torch.export, with the table's operators in it, has the eager bits for other numbers of rows."""
    module, rows = torch.nn.Module(), torch.export.Dim("B", min=1, max=100)
    module.forward = FUNCTIONS[name]
    program = torch.export.export(module, (X,), dynamic_shapes=({0: rows},), strict=False)
    changed = program.run_decompositions(replacements())
    check_operators(changed.graph)
    for x in (X, X[:1], X.repeat(3, 1, 1, 1, 1)):
        equal(changed.module()(x), fr.invariant(FUNCTIONS[name])(x))


def test_a_long_running_sum_keeps_its_digits():
    """logcumsumexp of 5,000 elements is the sum in f64 within two units, where torch's recurrence loses more; its
    first elements are those of a shorter vector; infinities and NaN go where torch's go."""
    x = noise(5000) * 4
    got = fr.invariant(torch.logcumsumexp)(x, 0)
    torch.testing.assert_close(got.double(), torch.logcumsumexp(x.double(), 0), rtol=2.4e-7, atol=0)
    equal(fr.invariant(torch.logcumsumexp)(x[:77], 0), got[:77])
    inf, nan = math.inf, math.nan
    rows = torch.tensor([[-inf, -inf, 1.0, inf, 2.0], [inf, inf, -inf, nan, 0.0], [-inf, nan, inf, 3e38, -1e-40],
                         [3e38, 3e38, -3e38, -inf, -0.0], [nan, 1.0, -inf, inf, 1.0]])  # fmt: skip
    for f in (lambda x: torch.logcumsumexp(x, 1), lambda x: torch.logcumsumexp(x, 0)):
        torch.testing.assert_close(fr.invariant(f)(rows), f(rows), equal_nan=True, rtol=1e-6, atol=0)
    equal(fr.invariant(torch.logcumsumexp)(rows[0, 0], 0), rows[0, 0])
    assert fr.invariant(torch.logcumsumexp)(x[:0], 0).shape == (0,)


@pytest.mark.parametrize(
    "f",
    [lambda x: F.max_pool1d(x[:, :, 0, 0], 2), lambda x: F.max_pool2d(x[:, :, 0], 2), lambda x: F.mse_loss(x, x.neg()),
     lambda x: F.smooth_l1_loss(x, x.neg()), lambda x: F.huber_loss(x, x.neg())],
)  # fmt: skip
def test_no_examples_have_torchs_results(f):
    """Extrema of windows and means of errors are torch's where there is no example: no numbers, or NaN."""
    x = torch.zeros(0, 3, 4, 4, 6)
    values = [f, lambda x: F.max_pool3d(x, 2), lambda x: F.adaptive_max_pool1d(x[:, :, 0, 0], 2)]
    tangent = lambda x: torch.func.jvp(f, (x,), (x,))[1]
    for h in (*values, lambda x: torch.func.grad(lambda x: f(x).sum())(x), tangent):
        torch.testing.assert_close(fr.invariant(h)(x), h(x), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    "f",
    [lambda x: F.avg_pool2d(x[0], 9), lambda x: F.avg_pool2d(x[0], 2, 1, 2), lambda x: F.avg_pool2d(x[0, 0, 0], 2),
     lambda x: F.avg_pool2d(x[0], 2, divisor_override=0), lambda x: F.adaptive_avg_pool2d(x[0, 0, 0], (2, 2))],
)  # fmt: skip
def test_an_invalid_pool_has_torchs_words(f):
    """A pool that torch refuses is refused in torch's words."""
    with pytest.raises(Exception, match=r"\w") as torchs:
        f(X)
    with pytest.raises(type(torchs.value)) as own:
        fr.invariant(f)(X)
    assert str(torchs.value).splitlines()[0] in str(own.value)
