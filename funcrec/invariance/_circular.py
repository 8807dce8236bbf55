"""sine, cosine, tangent and their inverses as exact operations, for angles of every size.

    sin x = ± sin r  or  ± cos r,   x · 2/π = n + t,  |t| ≤ ½,  r = t π/2

2/π is a sum of pieces of 24 bits, so that a product of x, or of half of its digits, with a piece is exact, and only its
remainder by 4 counts. Coefficients are those of fdlibm.
Source: Payne and Hanek, "Radian reduction for trigonometric functions" (1983); Sun's fdlibm, k_sin.c and k_cos.c.
"""

import math

import torch
from torch import Tensor

from funcrec.invariance._functions import sqrt

# The digits of 2/π, 24 bits in each.
DIGITS = (10680707, 7228996, 1387004, 2578385, 16069853, 12639074, 9804092, 4427841)
PIECES = tuple(d * 2.0 ** (-24 * (k + 1)) for k, d in enumerate(DIGITS))
SINE = (
    -1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04, 2.75573137070700676789e-06,
    -2.50507602534068634195e-08, 1.58969099521155010221e-10,
)  # fmt: skip
COSINE = (
    4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05, -2.75573143513906633035e-07,
    2.08757232129817482790e-09, -1.13596475577881948265e-11,
)  # fmt: skip

ARC = (
    3.33333333333329318027e-01, -1.99999999998764832476e-01, 1.42857142725034663711e-01, -1.11111104054623557880e-01,
    9.09088713343650656196e-02, -7.69187620504482999495e-02, 6.66107313738753120669e-02, -5.83357013379057348645e-02,
    4.97687799461593236017e-02, -3.65315727442169155270e-02, 1.62858201153657823623e-02,
)  # fmt: skip


def polynomial(z: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    out = torch.full_like(z, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        out = out * z + c
    return out


def modulo_4(x: Tensor) -> Tensor:
    """Return x - 4 round(x / 4), which is exact."""
    return x - torch.round(x * 0.25) * 4


def turns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return n modulo 4 and t, where x · 2/π = n + t. NaN if x is infinite, or beyond 2^80 in f64."""
    if x.dtype != torch.float64:  # Sums are exact wherever the result is near to a whole number.
        total = modulo_4(x.double() * PIECES[0])
        for piece in PIECES[1:]:
            total = modulo_4(total + x.double() * piece)
        n = torch.round(total)
        return n, total - n
    high = (x.view(torch.int64) & ~0x7FFFFFF).view(torch.float64)  # 26 digits, and 27 others
    total, rest = torch.zeros_like(x), torch.zeros_like(x)
    for piece in PIECES:
        for part in (high, x - high):
            term = modulo_4(part * piece)
            before = total
            total = before + term
            back = total - before
            rest = rest + ((before - (total - back)) + (term - back))
            total = modulo_4(total)
    n = torch.round(total)
    return n, torch.where(x.abs() < 2.0**80, (total - n) + rest, math.nan)


def waves(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return n, sin r and cos r in f64."""
    n, t = turns(x)
    r = t * (math.pi / 2)
    z = r * r
    half = z * 0.5
    near = 1 - half
    return n, r + r * z * polynomial(z, SINE), near + (((1 - near) - half) + z * z * polynomial(z, COSINE))


def after(n: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the value after n quarters of a turn: first, second, -first, -second."""
    is_odd = torch.round(n * 0.5) * 2 != n
    is_back = torch.floor(n * 0.5) != 2 * torch.floor(n * 0.25)
    out = torch.where(is_odd, second, first)
    return torch.where(is_back, -out, out)


def sin(x: Tensor) -> Tensor:
    """Return sin x, with an error below 0.6 ulp in f32, and below 3 ulp in f64. It is NaN in f64 from 2^80 on."""
    n, sine, cosine = waves(x)
    return torch.where(x.abs() < 2.0**-27, x, after(n, sine, cosine).to(x.dtype))


def cos(x: Tensor) -> Tensor:
    """Return cos x, with the errors of `sin`."""
    n, sine, cosine = waves(x)
    return after(n + 1, sine, cosine).to(x.dtype)


def tan(x: Tensor) -> Tensor:
    """Return tan x, with an error below 0.6 ulp in f32, and below 5 ulp in f64."""
    n, sine, cosine = waves(x)
    is_odd = torch.round(n * 0.5) * 2 != n
    out = torch.where(is_odd, -cosine, sine) / torch.where(is_odd, sine, cosine)
    return torch.where(x.abs() < 2.0**-27, x, out.to(x.dtype))


def atan(x: Tensor) -> Tensor:
    """Return atan x, with an error below 0.6 ulp in f32, and below 3 ulp in f64."""
    size = x.double().abs()
    is_near, is_far = size < 0.4375, size > 1 + math.sqrt(2)
    y = torch.where(is_near, size, torch.where(is_far, -1 / size, (size - 1) / (size + 1)))
    base = torch.where(is_far, torch.full_like(size, math.pi / 2), math.pi / 4)
    z = y * y
    angle = y - y * z * polynomial(z, ARC)
    out = torch.where(is_near, angle, base + angle)
    return torch.copysign(out.to(x.dtype), x)


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """Return the angle of the point (x, y), with the errors of `atan`, and 1 ulp more in f64."""
    a, b = y.double().abs(), x.double().abs()
    is_steep = a > b
    ratio = torch.where(is_steep, b, a) / torch.where(is_steep, a, b)
    ratio = torch.where(a == b, (a != 0).to(ratio.dtype), ratio)  # both are 0, or both inf
    ratio = torch.where(a.isnan() | b.isnan(), math.nan, ratio)
    angle = atan(ratio)
    angle = torch.where(is_steep, math.pi / 2 - angle, angle)
    angle = torch.where(torch.signbit(x), math.pi - angle, angle)
    return torch.copysign(angle.to(torch.result_type(x, y)), y)


def asin(x: Tensor) -> Tensor:
    """Return asin x, with the errors of `atan2`."""
    y = x.double()
    return torch.copysign(atan2(y, sqrt((1 - y) * (1 + y))).to(x.dtype), x)


def acos(x: Tensor) -> Tensor:
    """Return acos x, with the errors of `atan2`."""
    y = x.double()
    return (atan2(sqrt(1 - y), sqrt(1 + y)) * 2).to(x.dtype)
