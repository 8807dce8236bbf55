"""Initial rows of tables in plain torch.

    row `id` of a table of D columns: elements id · D to id · D + D - 1 of its key, for 0 <= id < 2^40; else mix(id) is
      the first, because id · D would wrap at 64 bits
    element e of a key: the upper 24 bits u of mix(key + (e + 1) · GAMMA), which stand for p = (u + 1/2) / 2^24
    uniform: (2 · u / 2^24 - 1) · scale        normal: Φ⁻¹(p) · scale

Φ⁻¹ is the rational approximation AS 241 (PPND16) with fdlibm's logarithm. It uses +, -, *, / and square roots of f64
alone, which IEEE 754 rounds in one way. So any implementation that rounds each of them has the same bits.
Shapes: M rows, D dim.

Source: Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics 37 (1988);
  fdlibm, e_log.c.
"""

from typing import cast

import torch
from funcrec.kernels.draws import CONSTANT, GIVEN, UNIFORM, fresh_of
from funcrec.kernels.forms import accumulation_dtype
from funcrec.kernels.reference_quantized import GAMMA, GAMMA_INVERSE, mix, shift_right
from torch import Tensor

DIGITS = 24  # random bits of an element
PLAIN = 1 << 40  # ids below are places of rows
MIDDLE_OVER = (
    3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
    4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3,
)  # fmt: skip
MIDDLE_UNDER = (
    1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3, 2.1213794301586595867e4,
    3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3,
)  # fmt: skip
TAIL_OVER = (
    1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
    1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4,
)  # fmt: skip
TAIL_UNDER = (
    1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1, 1.48103976427480074590e-1,
    1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9,
)  # fmt: skip
LOG_EVEN = (0.0, 3.999999999940941908e-1, 2.222219843214978396e-1, 1.531383769920937332e-1)
LOG_ODD = (6.666666666666735130e-1, 2.857142874366239149e-1, 1.818357216161805012e-1, 1.479819860511658591e-1)
LOG2_HIGH, LOG2_LOW = 6.93147180369123816490e-1, 1.90821492927058770002e-10
HALF_ROOT, ONE, FRACTION = 0x3FE6A09E667F3BCD, 0x3FF0000000000000, 0x000FFFFFFFFFFFFF  # bits of √½ and 1, and a mask


def initial_rows(key: Tensor, starts: Tensor, dim: int, kind: int, scale: float, dtype: torch.dtype) -> Tensor:
    counter = starts.long()[:, None] + torch.arange(1, dim + 1, device=starts.device)
    return _drawn(key, counter, kind, scale).to(dtype)


def starts_of(ids: Tensor, dim: int) -> Tensor:
    """Return the first element of each row, i64[M]."""
    return torch.where((ids >= 0) & (ids < PLAIN), ids * dim, mix(ids))


def draw_rows(
    tables: list[Tensor],
    given: list[Tensor],
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    keys: Tensor,
    fresh: list[int],
    scales: list[float],
) -> list[Tensor]:
    out = list(tables)
    for f, scale in zip(fresh_of(fresh), scales, strict=True):
        table, at = out[f.table], rows[f.rows : f.rows + f.places].long()
        place = torch.arange(f.places, device=at.device)
        is_new = (place < counts[f.number]) & (at >= 0) & (at < table.shape[0])
        if f.kind == GIVEN:
            new = given[f.given].expand(f.places, -1).to(accumulation_dtype(table.dtype))
        elif f.kind == CONSTANT:
            new = table.new_full((f.places, table.shape[1]), scale, dtype=torch.float32)
        else:
            starts = starts_of(ids[f.ids : f.ids + f.places].long(), f.dim) + f.first
            new = initial_rows(keys[f.key], starts, table.shape[1], f.kind, scale, torch.float32)
        at = torch.where(is_new, at, table.shape[0])  # a row after the last one takes what is not new
        longer = torch.cat([table, table.new_zeros(1, table.shape[1])])
        out[f.table] = longer.index_put((at,), new.to(table.dtype))[:-1]
    return out


def _drawn(key: Tensor, counter: Tensor, kind: int, scale: float) -> Tensor:
    """Return the elements before each number of `counter`, f32."""
    if kind == CONSTANT:
        return torch.full(counter.shape, scale, device=counter.device)
    u = shift_right(mix((counter + key * GAMMA_INVERSE) * GAMMA), 64 - DIGITS)
    if kind == UNIFORM:
        return (u.to(torch.float32) * 2.0 ** (1 - DIGITS) - 1) * scale
    return quantiles((u.to(torch.float64) + 0.5) * 2.0**-DIGITS).to(torch.float32) * scale


def quantiles(p: Tensor) -> Tensor:
    """Return Φ⁻¹(p), f64, for p from e⁻²⁵ to 1 - e⁻²⁵."""
    q = p - 0.5
    r = 0.180625 - q * q
    middle = q * _polynomial(MIDDLE_OVER, r) / _polynomial(MIDDLE_UNDER, r)
    r = (-_log(torch.minimum(p, 1 - p))).sqrt() - 1.6
    tail = _polynomial(TAIL_OVER, r) / _polynomial(TAIL_UNDER, r)
    return torch.where(q.abs() <= 0.425, middle, torch.where(q < 0, -tail, tail))


def _log(x: Tensor) -> Tensor:
    """Return the logarithm of normal positive numbers."""
    bits = x.view(torch.int64) + (ONE - HALF_ROOT)
    k, f = ((bits >> 52) - 1023).to(torch.float64), ((bits & FRACTION) + HALF_ROOT).view(torch.float64) - 1.0
    half, s = 0.5 * f * f, f / (f + 2.0)
    z = s * s
    w = z * z
    rest = _polynomial(LOG_EVEN, w) + z * _polynomial(LOG_ODD, w)
    return s * (half + rest) + k * LOG2_LOW - half + f + k * LOG2_HIGH


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    *rest, y = coefficients
    for c in reversed(rest):
        y = y * x + c
    return cast(Tensor, y)
