"""Elementwise functions as sums, products and quotients, which every processor rounds alike.

    e^x = 2^n (1 + r + r² p(r)),   n = round(x / log 2),   r = x - n log 2
    log x = e log 2 + log(1 + f),  x = 2^e (1 + f),        √½ ≤ 1 + f < √2

torch's own functions differ by processor, by library, and between a vector and its last elements. Each function here
is one expression of exact operations, and has the same bits anywhere. A compiler fuses it; eager calls run the same
expression as one loop in C++ (kernels/csrc/functions.h). Coefficients are those of the series, and of fdlibm for the
logarithm. Errors are in units of the last place (ulp) of a result.
Source: Muller, "Elementary Functions" (2016), chapter 3 and 11; Sun's fdlibm, e_log.c and e_logf.c.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode as _recorder

from funcrec.kernels import library, ops
from funcrec.kernels.invariant import FUNCTIONS

LOG_2 = math.log(2)
REALS, PLAIN = (torch.float32, torch.float64), (Tensor, torch.nn.Parameter)


class Form(NamedTuple):
    """What the functions need to know of a dtype.

    high, low: log 2 as a sum; n · high is exact for every exponent n. terms: the terms of the series of e^x.
    series: the coefficients of the logarithm. bits, bias: the mantissa and the exponent of 1. least, most: where e^x is
    0 and inf.
    """

    ints: torch.dtype
    high: float
    low: float
    terms: int
    series: tuple[float, ...]
    bits: int
    bias: int
    least: float
    most: float


F32 = Form(
    torch.int32, 0.693359375, -2.12194440e-4, 8, (0.66666662693, 0.40000972152, 0.28498786688, 0.24279078841), 23, 127,
    -104.0, 89.0,
)  # fmt: skip
F64 = Form(
    torch.int64, 6.93147180369123816490e-01, 1.90821492927058770002e-10, 14,
    (
        6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
        1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01,
    ),
    52, 1023, -746.0, 710.0,
)  # fmt: skip


def form_of(x: Tensor) -> Form:
    return F64 if x.dtype == torch.float64 else F32


def power_of_two(n: Tensor, form: Form) -> Tensor:
    """Return 2^n for whole numbers n of the normal exponents, as a float."""
    dtype = torch.float64 if form is F64 else torch.float32
    return ((n.to(form.ints) + form.bias) << form.bits).view(dtype)


def scaled(x: Tensor, n: Tensor, form: Form) -> Tensor:
    """Return x 2^n, rounded once if it is below the normal numbers: two factors, as 2^n alone may overflow."""
    half = torch.floor(n * 0.5)
    return x * power_of_two(half, form) * power_of_two(n - half, form)


def reduced(x: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return n and e^r - 1, where x = n log 2 + r."""
    n = torch.round(x * (1 / math.log(2)))
    r = (x - n * form.high) - n * form.low
    p = torch.full_like(r, 1 / math.factorial(form.terms))
    for k in range(form.terms - 1, 1, -1):
        p = p * r + 1 / math.factorial(k)
    return n, r + r * r * p


def exp(x: Tensor) -> Tensor:
    """Return e^x, with an error below 1.1 ulp."""
    form = form_of(x)
    n, rest = reduced(x.clamp(form.least, form.most), form)  # NaN stays NaN
    return scaled(rest + 1, n, form)


def expm1(x: Tensor) -> Tensor:
    """Return e^x - 1, with an error below 2 ulp."""
    form = form_of(x)
    n, rest = reduced(x.clamp(form.least, form.most), form)
    many = n.clamp(max=form.bias + 1)  # 2^many - 1 is 2^many at the top; e^x is inf beyond
    half = power_of_two(torch.clamp(many - 1, min=1 - form.bias), form)
    tall = torch.where(n > form.bias, scaled(rest + 1, n, form), (rest * half + (half - 0.5)) * 2)
    return torch.where(x == 0, x, torch.where(n == 0, rest, tall))


def log(x: Tensor) -> Tensor:
    """Return log x, with an error below 1 ulp."""
    form = form_of(x)
    tiny = 2.0 ** (1 - form.bias)
    small = x < tiny
    y = torch.where(small, x * 2.0**form.bits, x)
    root = torch.full((), math.sqrt(0.5), dtype=x.dtype, device=x.device).view(form.ints)
    bits = y.view(form.ints) - root
    e = bits >> form.bits
    f = ((bits - (e << form.bits)) + root).view(x.dtype) - 1
    k = e.to(x.dtype) - torch.where(small, float(form.bits), 0.0).to(x.dtype)
    s = f / (f + 2)
    z = s * s
    p = torch.full_like(z, form.series[-1])
    for c in reversed(form.series[:-1]):
        p = p * z + c
    square = f * f * 0.5
    out = k * form.high - ((square - (s * (square + p * z) + k * form.low)) - f)
    out = torch.where(x == math.inf, x, out)
    return torch.where(x > 0, out, torch.where(x == 0, -math.inf, math.nan).to(x.dtype))


def log1p(x: Tensor) -> Tensor:
    """Return log(1 + x), with an error below 2 ulp: the logarithm of the rounded sum, and what the rounding left."""
    u = x + 1
    left = torch.where(x.abs() < 2.0 ** (form_of(x).bits + 1), (x - (u - 1)) / u, 0.0)
    out = log(u) + left
    return torch.where((x == -1) | (x == math.inf), log(u), torch.where(x == 0, x, out))  # the zero keeps its sign


def log2(x: Tensor) -> Tensor:
    """Return the logarithm to base 2, with an error below 0.6 ulp in f32, and below 3 ulp in f64."""
    return (log(x.double()) / math.log(2)).to(x.dtype)


def log10(x: Tensor) -> Tensor:
    """Return the logarithm to base 10, with an error below 0.6 ulp in f32, and below 3 ulp in f64."""
    return (log(x.double()) / math.log(10)).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x), with an error below 3 ulp."""
    e = exp(-x.abs())
    return torch.where(x < 0, e, 1.0) / (e + 1)


def tanh(x: Tensor) -> Tensor:
    """Return tanh x, with an error below 3 ulp."""
    t = expm1(x.abs().clamp(max=form_of(x).bits * 1.0) * 2)
    return torch.copysign(t / (t + 2), x)


def sinh(x: Tensor) -> Tensor:
    """Return sinh x, with an error below 0.6 ulp in f32, and below 4 ulp in f64."""
    size = x.double().abs()
    t, half = expm1(size), exp(size * 0.5)  # its square does not overflow before it is halved
    return torch.copysign(torch.where(size < 30, (t + t / (t + 1)) * 0.5, half * 0.5 * half).to(x.dtype), x)


def cosh(x: Tensor) -> Tensor:
    """Return cosh x, with an error below 0.6 ulp in f32, and below 4 ulp in f64."""
    size = x.double().abs()
    half = exp(size * 0.5)
    square = half * 0.5 * half
    return (square + 0.25 / square).to(x.dtype)


def asinh(x: Tensor) -> Tensor:
    """Return asinh x, with an error below 0.6 ulp in f32, and below 4 ulp in f64."""
    size = x.double().abs()
    large, small = size > 2.0**30, size.clamp(max=2.0**30)
    square = small * small
    out = log1p(torch.where(large, size - 1, small + square / (1 + sqrt(square + 1)))) + large.to(size.dtype) * LOG_2
    return torch.copysign(out.to(x.dtype), x)


def acosh(x: Tensor) -> Tensor:
    """Return acosh x, with an error below 0.6 ulp in f32, and below 4 ulp in f64."""
    size = x.double()
    large = size > 2.0**30
    t = torch.where(size < 1, math.nan, size.clamp(max=2.0**30) - 1)
    return (log1p(torch.where(large, size - 1, t + sqrt(t * (t + 2)))) + large.to(t.dtype) * LOG_2).to(x.dtype)


def atanh(x: Tensor) -> Tensor:
    """Return atanh x, with an error below 0.6 ulp in f32, and below 4 ulp in f64."""
    size = x.double().abs()
    return torch.copysign((log1p(size * 2 / (1 - size)) * 0.5).to(x.dtype), x)


def remainder(x: Tensor, root: Tensor) -> Tensor:
    """Return x - root², which is exact for a root that is next to √x or nearer, in f64."""
    high = root * 134217729.0 - (root * 134217729.0 - root)
    low, square = root - high, root * root
    return (((x - square) - (high * high - square)) - high * low * 2) - low * low


def sqrt(x: Tensor) -> Tensor:
    """Return √x, correctly rounded. Some libraries miss the last bit of a root.

    A root in f64 has more than twice the digits of f32, so its error moves no rounding to f32. In f64, a step of
    Newton's corrects the root of x 4^k, where nothing overflows or is subnormal. The step is never too short, so that
    the number below is the result if √x is nearer to it: x < (root - u / 2)², whose whole numbers of u² are those of
    x - root² ≤ -root u.
    """
    if x.dtype != torch.float64:
        return torch.sqrt(x.double()).to(x.dtype)
    is_small, is_large = x < 2.0**-900, x > 2.0**900
    y = torch.where(is_small, x * 2.0**200, torch.where(is_large, x * 2.0**-200, x))
    is_usual = (y > 0) & (y < math.inf)
    y = torch.where(is_usual, y, 1.0)
    near = torch.sqrt(y)
    above = near + remainder(y, near) / (near * 2)
    below = (above.view(torch.int64) - 1).view(torch.float64)
    root = torch.where(remainder(y, above) <= above * (below - above), below, above)
    root = root * torch.where(is_small, 2.0**-100, torch.where(is_large, 2.0**100, 1.0))
    return torch.where(is_usual, root, torch.sqrt(x))


def rsqrt(x: Tensor) -> Tensor:
    """Return 1 / √x, with an error below 1.5 ulp."""
    return torch.reciprocal(sqrt(x))


def power(x: Tensor, y: Tensor) -> Tensor:
    """Return x^y, e^(y log |x|) in f64. Its error is below 1 ulp in f32, and below 2 (1 + |y log x|) ulp in f64."""
    a, b = x.double(), y.double()
    size = exp(b * log(a.abs()))
    is_whole = torch.floor(b) == b
    is_odd = is_whole & (torch.floor(b * 0.5) != b * 0.5)
    out = torch.where(
        (a < 0) & (a > -math.inf) & ~is_whole, math.nan, torch.where(is_odd & torch.signbit(a), -size, size)
    )
    out = torch.where((b == 0) | (a == 1) | ((a == -1) & b.isinf()), 1.0, out)
    return out.to(torch.result_type(x, y))


def whole_power(x: Tensor, n: int) -> Tensor:
    """Return x^n by repeated squaring, for a small whole n."""
    if n < 0:
        return torch.reciprocal(whole_power(x, -n))
    if n == 1:
        return x.clone()
    out = None
    while n:
        out = (x if out is None else out * x) if n & 1 else out
        x, n = x * x, n >> 1
    return torch.ones_like(x) if out is None else out


def is_at_hand(x: Tensor) -> bool:
    """Return whether one loop in C++ can compute x now: a plain tensor with memory, and no program is being recorded.

    A program keeps the operations, which its compiler fuses. So does a call for which `ops.using` names "reference".
    """
    is_plain = type(x) in PLAIN and x.is_cpu and x.layout is torch.strided
    return is_plain and not _recorder() and ops.ambient() in (None, "cpp")


def widened(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return f with 16-bit floats computed in f32, and whole numbers as the default dtype.

    One of FUNCTIONS is computed in C++ to the same bits, if the tensor is at hand.
    """
    name = f.__name__ if f.__name__ in FUNCTIONS else None

    def compute(x: Tensor) -> Tensor:
        return cast(Any, library.load("cpp")).invariant_function(name, x) if name and is_at_hand(x) else f(x)

    def run(*xs: Tensor) -> Tensor:
        if len(xs) == 1 and xs[0].dtype in REALS:
            return compute(xs[0])
        call = compute if len(xs) == 1 else f
        dtype = torch.result_type(*xs) if len(xs) == 2 else xs[0].dtype
        if dtype in REALS:
            return call(*(x.to(dtype) for x in xs))
        if not dtype.is_floating_point:
            return call(*(x.to(torch.get_default_dtype()) for x in xs))
        return call(*(x.to(dtype).float() for x in xs)).to(dtype)

    return run
