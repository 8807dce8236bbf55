"""Extrema, remainders and orders whose bits depend on the numbers alone.

torch's own agree up to the sign of zero, and to the order of equal numbers. A processor's max(0, -0) is its second
operand, and a vectorised fmod fails where the quotient overflows. So these bits would follow the place in memory.
"""

import math
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
FAR = 2.0**900  # a quotient of f64 whose remainder takes more than one step


def are_floats(*xs: Any) -> bool:
    """Return whether an operation of these numbers and tensors is one of floats."""
    return any(isinstance(x, float) or (isinstance(x, Tensor) and x.is_floating_point()) for x in xs)


def maximum(x: Tensor, y: Tensor) -> Tensor:
    """Return the greater number, the second of equal ones, NaN if one is NaN."""
    return torch.where((x > y) | (x != x), x, y) if are_floats(x, y) else aten.maximum(x, y)


def minimum(x: Tensor, y: Tensor) -> Tensor:
    """Return the smaller number, the second of equal ones, NaN if one is NaN."""
    return torch.where((x < y) | (x != x), x, y) if are_floats(x, y) else aten.minimum(x, y)


def fmax(x: Tensor, y: Tensor) -> Tensor:
    """Return the greater number, the first of equal ones, the other one if one is NaN."""
    return torch.where((y > x) | (x != x), y, x) if are_floats(x, y) else aten.fmax(x, y)


def fmin(x: Tensor, y: Tensor) -> Tensor:
    """Return the smaller number, the first of equal ones, the other one if one is NaN."""
    return torch.where((y < x) | (x != x), y, x) if are_floats(x, y) else aten.fmin(x, y)


def clamp(x: Tensor, least: Any = None, most: Any = None) -> Tensor:
    """Return x within its bounds. A number that equals a bound stays as it is."""
    if not are_floats(x):
        return aten.clamp(x, least, most)
    if least is not None:
        x = torch.where((x < least) | (least != least), least, x)
    return x if most is None else torch.where((x > most) | (most != most), most, x)


def clamp_max(x: Tensor, most: Any) -> Tensor:
    return clamp(x, None, most)


def hardtanh(x: Tensor, least: float = -1, most: float = 1) -> Tensor:
    return clamp(x, least, most)


def hardtanh_backward(d: Tensor, x: Tensor, least: float, most: float) -> Tensor:
    """Return d within the bounds. It is 0 at NaN, where torch's vectors have 0 and the last elements d."""
    return torch.where((x > least) & (x < most), d, 0)


def unsigned(x: Tensor) -> Tensor:
    """Return x, in which each zero is the positive one."""
    return torch.where(x == 0, 0.0, x) if x.is_floating_point() else x


def with_unsigned(operator: Any) -> Any:
    """Return an operator whose results have positive zeros only.

    Extrema need this, and a batch norm without scale and shift: a vmap multiplies it by 1 and adds 0.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        out = operator(*args, **kwargs)
        return unsigned(out) if isinstance(out, Tensor) else tuple(map(unsigned, out))

    return run


def pair(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Return two numbers or tensors as tensors of their common dtype."""
    dtype, like = torch.result_type(x, y), x if isinstance(x, Tensor) else y
    as_tensor = lambda z: z.to(dtype) if isinstance(z, Tensor) else torch.full((), z, dtype=dtype, device=like.device)
    return as_tensor(x), as_tensor(y)


def fmod(x: Any, y: Any) -> Tensor:
    """Return x - n y for the whole n = x / y towards 0, which is exact. f32 has room for its quotients in f64."""
    a, b = pair(x, y)
    if not a.is_floating_point():
        return aten.fmod(a, b)
    if a.dtype != torch.float64:
        return aten.fmod(a.double(), b.double()).to(a.dtype)
    is_number = (b != 0) & ~a.isinf()
    for far in (FAR, 1.0):  # then a multiple of FAR · far · b is one of b, too
        is_far = (a.abs() / FAR / far >= b.abs()) & is_number
        a = torch.where(is_far, aten.fmod(a, torch.where(is_far, b * FAR * far, 1.0)), a)
    return torch.where(is_number, aten.fmod(a, b), math.nan)


def remainder(x: Any, y: Any) -> Tensor:
    """Return x - n y for the whole n = x / y towards -inf, with the sign of y."""
    a, b = pair(x, y)
    if not a.is_floating_point():
        return aten.remainder(a, b)
    left = fmod(a, b)
    return torch.where((left != 0) & ((b < 0) != (left < 0)), left + b, left)


def floor_divide(x: Any, y: Any) -> Tensor:
    """Return the greatest whole number that is not above x / y. 16-bit floats are divided in f32."""
    a, b = pair(x, y)
    if not a.is_floating_point():
        return aten.div(a, b, rounding_mode="floor")
    dtype, wide = a.dtype, torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    left = fmod(a, b)
    n = (a - left) / b
    n = torch.where((left != 0) & ((b < 0) != (left < 0)), n - 1, n)
    whole = torch.floor(n)
    whole = torch.where(n - whole > 0.5, whole + 1, whole)
    whole = torch.where(n != 0, whole, torch.copysign(torch.zeros_like(n), a / b))
    return torch.where(b == 0, a / b, whole).to(dtype)


def divided(x: Any, y: Any, *, rounding_mode: str | None = None) -> Tensor:
    return floor_divide(x, y) if rounding_mode == "floor" else aten.div(x, y, rounding_mode=rounding_mode)


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> Any:
    """Return the sorted numbers and their places. Equal numbers stay in their order, which no processor chooses."""
    return aten.sort.stable(x, stable=True, dim=dim, descending=descending)


def stable_sort(x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    return sort(x, dim, descending)


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Return the extrema of numbers at places. Products and means have no order here."""
    if reduce not in ("amax", "amin") and x.is_floating_point():
        return NotImplemented
    out = aten.scatter_reduce(x, dim, index, source, reduce, include_self=include_self)
    return unsigned(out)


REPLACED: dict[Any, Any] = {
    **{getattr(aten, n).default: f for n, f in (("maximum", maximum), ("minimum", minimum))},
    **{getattr(aten, n).default: f for n, f in (("fmax", fmax), ("fmin", fmin))},
    aten.clamp.default: clamp,
    aten.clamp.Tensor: clamp,
    aten.clamp_min.default: clamp,
    aten.clamp_min.Tensor: clamp,
    aten.clamp_max.default: clamp_max,
    aten.clamp_max.Tensor: clamp_max,
    aten.hardtanh.default: hardtanh,
    aten.hardtanh_backward.default: hardtanh_backward,
    **{op: with_unsigned(op) for op in (
        aten.amax.default, aten.amin.default, aten.aminmax.default, aten.max.default, aten.max.dim, aten.min.default,
        aten.min.dim,
    )},
    **dict.fromkeys((aten.fmod.Tensor, aten.fmod.Scalar), fmod),
    **dict.fromkeys((aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor), remainder),
    **dict.fromkeys((aten.div.Tensor_mode, aten.div.Scalar_mode), divided),
    **dict.fromkeys((aten.floor_divide.default, aten.floor_divide.Scalar), floor_divide),
    aten.sort.default: sort,
    aten.sort.stable: stable_sort,
    aten.argsort.default: lambda x, dim=-1, descending=False: sort(x, dim, descending)[1],
    aten.argsort.stable: lambda x, *, stable, dim=-1, descending=False: sort(x, dim, descending)[1],
    aten.scatter_reduce.two: scatter_reduce,
}  # fmt: skip
