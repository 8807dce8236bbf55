"""Sums of numbers that are not negative, whose bits depend on the numbers alone.

    Σ x = u · (Σ ⌊y⌋ + 2⁻³¹ · Σ round(2³¹ · (y - ⌊y⌋)))        y = x / u, 2³¹ · u is the power of 2 in the largest x

Both sums are sums of integers, which have the same bits in any order, with zeros among them, and on any ranks. Of each
of up to 2³¹ numbers, they drop less than 2⁻⁶² of the largest one.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from funcrec.core import any_tracked
from funcrec.mesh import pmax, psum

SCALE = 2.0**31
EXPONENT = 0x7FF << 52  # the bits of f64 that hold the exponent


def exact_sum(terms: Sequence[tuple[Tensor, tuple[str, ...]]]) -> Tensor:
    """Return the sum of all numbers, f[].

    terms: (numbers f[M], the mesh axes whose ranks hold other numbers of the same term). If a number is NaN or inf, so
      is the sum. The derivative is 1.
    """
    of_axes: dict[tuple[str, ...], list[Tensor]] = {}
    for x, axes in terms:
        of_axes.setdefault(axes, []).append(x.flatten())
    joined = {axes: torch.cat(xs) if sum(map(len, xs)) else xs[0].new_zeros(1) for axes, xs in of_axes.items()}
    wide = {axes: x.detach().to(torch.float64) for axes, x in joined.items()}
    most = torch.stack([pmax(x.amax(), axes) if axes else x.amax() for axes, x in wide.items()]).amax()
    unit = (most.view(torch.int64) & EXPONENT).view(torch.float64)
    is_usual = torch.isfinite(most) & (unit > 0)
    unit = torch.where(is_usual, unit, 1.0) / SCALE
    sums = [psum(parts_of(x, unit), axes) if axes else parts_of(x, unit) for axes, x in wide.items()]
    high, low = torch.stack(sums).sum(0).to(torch.float64).unbind()
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in joined.values()])
    total = torch.where(is_usual, (high + low / SCALE) * unit, most).to(dtype)
    if not any_tracked(list(joined.values())):
        return total
    near = torch.stack([psum(x.sum(), axes) if axes else x.sum() for axes, x in joined.items()]).sum()
    return torch.where(torch.isfinite(near), total + (near - near.detach()), near)


def parts_of(x: Tensor, unit: Tensor) -> Tensor:
    """Return (Σ ⌊y⌋, Σ round(2³¹ · (y - ⌊y⌋))) for y = x / unit, i64[2]."""
    y = x / unit
    high = y.floor()
    return torch.stack([high.to(torch.int64).sum(), ((y - high) * SCALE).round().to(torch.int64).sum()])


def root(x: Tensor) -> Tensor:
    """Return √x with derivative 0 at 0, where the derivative of torch.sqrt is not finite.

    0 is the central difference of ‖v‖ = √(v · v) at v = 0.
    """
    is_zero = x == 0
    return torch.where(is_zero, 0, torch.where(is_zero, 1, x).sqrt())
