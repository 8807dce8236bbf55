"""The error function, its complement and its inverse as exact operations.

    erf x = 2/√π ∫₀ˣ e^-t² dt,   erfc x = 1 - erf x,   erfinv x = Φ⁻¹((x + 1) / 2) / √2

In f64, a quotient of polynomials for each of four ranges; far from zero it is the exponent of the complement. In f32,
two polynomials. Source: Sun's fdlibm, s_erf.c; Juffa, "A faster implementation of erff" (2018).
The inverse is AS 241: Wichura, "The percentage points of the normal distribution" (1988).
"""

import math

import torch
from torch import Tensor

from funcrec.invariance._circular import polynomial
from funcrec.invariance._functions import exp, log, sqrt
from funcrec.kernels.reference_draws import MIDDLE_OVER, MIDDLE_UNDER, TAIL_OVER, TAIL_UNDER

NEAR = (
    (
        1.28379167095512558561e-01, -3.25042107247001499370e-01, -2.84817495755985104766e-02,
        -5.77027029648944159157e-03, -2.37630166566501626084e-05,
    ),
    (
        1.0, 3.97917223959155352819e-01, 6.50222499887672944485e-02,
        5.08130628187576562776e-03, 1.32494738004321644526e-04, -3.96022827877536812320e-06,
    ),
)  # fmt: skip
AROUND_1 = (
    (
        -2.36211856075265944077e-03, 4.14856118683748331666e-01, -3.72207876035701323847e-01,
        3.18346619901161753674e-01, -1.10894694282396677476e-01, 3.54783043256182359371e-02,
        -2.16637559486879084300e-03,
    ),
    (
        1.0, 1.06420880400844228286e-01, 5.40397917702171048937e-01,
        7.18286544141962662868e-02, 1.26171219808761642112e-01, 1.36370839120290507362e-02,
        1.19844998467991074170e-02,
    ),
)  # fmt: skip
BEYOND = (
    (
        -9.86494403484714822705e-03, -6.93858572707181764372e-01, -1.05586262253232909814e01,
        -6.23753324503260060396e01, -1.62396669462573470355e02, -1.84605092906711035994e02,
        -8.12874355063065934246e01, -9.81432934416914548592e00,
    ),
    (
        1.0, 1.96512716674392571292e01, 1.37657754143519042600e02,
        4.34565877475229228821e02, 6.45387271733267880336e02, 4.29008140027567833386e02,
        1.08635005541779435134e02, 6.57024977031928170135e00, -6.04244152148580987438e-02,
    ),
)  # fmt: skip
FAR = (
    (
        -9.86494292470009928597e-03, -7.99283237680523006574e-01, -1.77579549177547519889e01,
        -1.60636384855821916062e02, -6.37566443368389627722e02, -1.02509513161107724954e03,
        -4.83519191608651397019e02,
    ),
    (
        1.0, 3.03380607434824582924e01, 3.25792512996573918826e02,
        1.53672958608443695994e03, 3.19985821950859553908e03, 2.55305040643316442583e03,
        4.74528541206955367215e02, -2.24409524465858183362e01,
    ),
)  # fmt: skip
AT_1 = 8.45062911510467529297e-01  # erf 1, to 24 bits
SMALL = (1.28379166e-01, -3.76125336e-01, 1.12819925e-01, -2.67681349e-02, 4.99119423e-03, -5.96761703e-04)
LARGE = (
    -1.28717512e-01, -6.34846687e-01, -1.06777877e-01, 2.42546219e-02, -3.88396438e-03, 3.83197126e-04, -1.72853470e-05,
)  # fmt: skip
# A quotient for probabilities below e^-25, after those of initial rows.
LAST = (
    (
        6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
        2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7,
    ),
    (
        1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
        7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15,
    ),
)  # fmt: skip


def quotient(z: Tensor, parts: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
    return polynomial(z, parts[0]) / polynomial(z, parts[1])


def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return |x|, (erf x - x) / x near zero, erf |x| - AT_1 around 1, and the complement of |x| beyond, in f64."""
    size = x.abs().clamp(max=30.0)
    square = 1 / (size * size)
    high = (size.view(torch.int64) & -(2**32)).view(torch.float64)  # its square is exact
    p = torch.where(size < 1 / 0.35, quotient(square, BEYOND), quotient(square, FAR))
    tail = exp(-high * high - 0.5625) * exp((high - size) * (high + size) + p) / size
    return quotient(x * x, NEAR), quotient(size - 1, AROUND_1), tail


def erf(x: Tensor) -> Tensor:
    """Return erf x, with an error below 1.2 ulp."""
    size = x.abs()
    if x.dtype == torch.float64:
        near, middle, tail = parts(x)
        far = torch.where(size < 1.25, middle + AT_1, 1 - tail)
        return torch.where(size < 0.84375, x + x * near, torch.copysign(far, x))
    s = size.clamp(max=4.0)
    far = 1 - exp(s * polynomial(s, LARGE) - s)
    return torch.where(size < 0.927734375, x + x * polynomial(x * x, SMALL), torch.copysign(far, x))


def erfc(x: Tensor) -> Tensor:
    """Return 1 - erf x, with an error below 0.6 ulp in f32, and below 3 ulp in f64."""
    y = x.double()
    near, middle, tail = parts(y)
    small = torch.where(y < 0.25, 1 - (y + y * near), 0.5 - ((y - 0.5) + y * near))
    around = torch.where(y > 0, (1 - AT_1) - middle, 1 + (AT_1 + middle))
    far = torch.where(y > 0, tail, 2 - tail)
    size = y.abs()
    return torch.where(size < 0.84375, small, torch.where(size < 1.25, around, far)).to(x.dtype)


def erfinv(x: Tensor) -> Tensor:
    """Return y where erf y = x, with an error below 0.6 ulp in f32, and below 5 ulp in f64."""
    wide = x.double()
    q, p = wide * 0.5, (1 - wide.abs()) * 0.5  # p is the lesser probability of a tail
    middle = q * quotient(0.180625 - q * q, (MIDDLE_OVER, MIDDLE_UNDER))
    r = sqrt(-log(torch.where((p > 0) & (p < 0.1), p, 0.01)))
    tail = torch.where(r <= 5, quotient(r - 1.6, (TAIL_OVER, TAIL_UNDER)), quotient(r - 5, LAST))
    out = torch.where(q.abs() <= 0.425, middle, torch.copysign(tail, q)) * math.sqrt(0.5)
    out = torch.where(p == 0, torch.copysign(torch.full_like(out, math.inf), wide), out)
    return torch.where(p >= 0, out, math.nan).to(x.dtype)
