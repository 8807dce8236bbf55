"""Replacements of the operators that torch 2.13's Inductor compiles to wrong code. Staging puts them into the graph.

compiled(op(x)) = op(x) in eager mode: the same values, dtype and rounding
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing


def add_with_product(x: torch.Tensor, y: Any, *, alpha: Any = 1) -> torch.Tensor:
    """Return x + alpha · y without the argument `alpha`.

    Inductor drops `alpha` if y is a matrix product (sum and product become addmm). As in eager mode, x and y are
    promoted first, and the function computes 16-bit floats in 32 bits.
    """
    if alpha == 1:
        return NotImplemented
    dtype = torch.result_type(x, y)
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    y = y.to(wide) if isinstance(y, torch.Tensor) else torch.full((), y, dtype=wide, device=x.device)
    return (x.to(wide) + (y * alpha).to(wide)).to(dtype)


def zeros_with_memory(size, *, dtype=None, layout=None, device=None, pin_memory=None):
    """Return zeros with memory, in place of zeros without memory.

    Forward derivatives make zeros without memory, for which loops would read address 0.
    """
    return aten.zeros.default(size, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory)


def assertion(condition: torch.Tensor) -> None:
    """Assert the condition with a message, because Inductor drops an assertion without a message."""
    aten._assert_async.msg(condition, "Expected Tensor with single nonzero value, but got zero")


def power(x: torch.Tensor, exponent: Any) -> Any:
    """Raise RuntimeError for integers to a negative power, as eager mode does."""
    is_whole = not (x.is_floating_point() or x.is_complex()) and isinstance(exponent, int)
    if is_whole and exponent < 0:
        raise RuntimeError("Integers to negative integer powers are not allowed.")
    return NotImplemented


def power_of_number(base: Any, exponent: torch.Tensor) -> torch.Tensor:
    """Return a number to the power of integers.

    Inductor expects wrong strides if the exponent is transposed.
    """
    dtype = torch.result_type(base, exponent)
    if exponent.is_floating_point() or exponent.is_complex():
        return NotImplemented
    return torch.pow(torch.full((), base, dtype=dtype, device=exponent.device), exponent)


def ldexp(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Return x · 2^exponent, computed as in eager mode: add an int32 to the exponent of a float, and round once.

    Inductor returns x's dtype even if the exponent's dtype is wider. It returns an infinite result if only the power is
    infinite.
    """
    if exponent.is_floating_point() or not x.is_floating_point():
        dtype = x.dtype if x.is_floating_point() else torch.float32
        return x * torch.pow(torch.full((), 2.0, dtype=dtype, device=x.device), exponent)
    rest, y = exponent.to(torch.int32).to(torch.int64), x.to(torch.float64)
    for _ in range(3):  # The least and the greatest number are 2098 powers of two apart.
        part = rest.clamp(-1000, 1000)
        y, rest = y * ((part + 1023) << 52).view(torch.float64), rest - part
    return y.to(x.dtype)


def shifted(op: Callable) -> Callable:
    """Return a shift that takes bools together with integers, as eager mode does. Its meta function refuses all
    bools."""

    def instead(x: Any, y: Any) -> Any:
        dtype = torch.result_type(x, y)
        is_bool = [isinstance(a, torch.Tensor) and a.dtype == torch.bool for a in (x, y)]
        if dtype == torch.bool or not any(is_bool):
            return NotImplemented
        return op(*(a.to(dtype) if isinstance(a, torch.Tensor) else a for a in (x, y)))

    return instead


def in_more_bits(op: Callable) -> Callable:
    """Return a replacement of a reduction, which reduces 8-bit integers in 64 bits.

    A vector of 8-bit integers has more lanes than the rest of a loop has elements, and Inductor also reduces the other
    lanes. The replacement also widens bools. Inductor's argmin of bools returns wrong places. Its masks of bools do
    not compile if two vectors have different sizes.
    """

    def reduced(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if "dtype" in {a.name for a in op._schema.arguments}:
            dtype = kwargs.get("dtype")
            if dtype is torch.bool:
                return op(x.to(dtype), *args, **kwargs | {"dtype": torch.int64}).to(dtype)
            return op(x, *args, **kwargs | {"dtype": torch.int64}).to(dtype) if dtype in NARROW else NotImplemented
        if x.dtype not in {*NARROW, torch.bool}:
            return NotImplemented
        found = op(x.to(torch.int64), *args, **kwargs)
        if op in (aten.argmax.default, aten.argmin.default):
            return found
        return (found[0].to(x.dtype), found[1]) if isinstance(found, tuple) else found.to(x.dtype)

    return reduced


def is_known(condition: Any) -> bool:
    """Return whether a condition on sizes holds for all sizes that a package leaves open."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def vectors_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x[B, N, K] @ y[B, K, P] for N = 1 or P = 1.

    For a CPU, Inductor writes this product as a sum of products. Then integers become int64, and each product of 16-bit
    floats is rounded.
    """
    is_vector = is_known(x.shape[1] == 1) or is_known(y.shape[2] == 1)
    if not is_vector or x.device.type != "cpu" or x.dtype in (torch.float32, torch.float64) or x.is_complex():
        return NotImplemented
    wide = torch.float32 if x.is_floating_point() else x.dtype
    return (x.to(wide).unsqueeze(-1) * y.to(wide).unsqueeze(1)).sum(2, dtype=wide).to(x.dtype)


def floored(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ⌊x / y⌋, computed from the remainder, as in eager mode.

    The quotient x / y itself may be rounded up to the next whole number.
    """
    exact, rest = x / y, torch.fmod(x, y)
    quotient = (x - rest) / y
    quotient = torch.where((rest != 0) & ((rest < 0) != (y < 0)), quotient - 1, quotient)
    whole = quotient.floor()
    whole = torch.where(quotient - whole > 0.5, whole + 1, whole)
    whole = torch.where(quotient != 0, whole, torch.copysign(torch.zeros_like(whole), exact))
    is_too_large = exact.isinf() & x.isfinite()  # Vectors compute no remainder of such quotients.
    return torch.where((y == 0) | is_too_large, exact, whole)


def remainder(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x mod y with the sign of y, which Inductor would write as x - ⌊x / y⌋ y."""
    rest = torch.fmod(x, y)
    return torch.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


def rounded_once(fn: Callable) -> Callable:
    """Return a replacement of an operator on floats, which computes fn, and 16-bit floats in 32 bits.

    Inductor's own form rounds after each step.
    """

    def instead(x: Any, y: Any, *rest: Any, rounding_mode: str = "floor") -> Any:
        dtype = torch.result_type(x, y)
        wide = torch.promote_types(dtype, torch.float32)
        is_eager = wide == dtype and (fn is torch.lerp or rounding_mode == "trunc")
        if not dtype.is_floating_point or rounding_mode is None or is_eager:
            return NotImplemented
        device = next(a.device for a in (x, y) if isinstance(a, torch.Tensor))
        as_wide = lambda a: a.to(wide) if isinstance(a, torch.Tensor) else torch.full((), a, dtype=wide, device=device)
        if rounding_mode == "trunc":
            return (as_wide(x) / as_wide(y)).trunc().to(dtype)
        return fn(as_wide(x), as_wide(y), *map(as_wide, rest)).to(dtype)

    return instead


def moments(spread: Callable) -> Callable:
    """Return a replacement of var_mean or std_mean, whose mean of no elements is NaN, as the variance is.

    Inductor's mean of no elements is 0.
    """

    def instead(x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        over = [d % x.dim() for d in dim] if dim else range(x.dim())
        if not any(is_known(x.shape[d] == 0) for d in over):
            return NotImplemented
        return spread(x, dim, correction=correction, keepdim=keepdim), x.mean(dim, keepdim=keepdim)

    return instead


def of_bools(fn: Callable) -> Callable:
    """Return a replacement of a comparison, which compares two bools by their bits.

    Inductor compares masks of vectors. If the bools come from values of two sizes, the types of the masks differ, and
    the code does not compile.
    """

    def compared(x: torch.Tensor, y: Any) -> Any:
        if x.dtype != torch.bool or (y.dtype if isinstance(y, torch.Tensor) else type(y)) not in (torch.bool, bool):
            return NotImplemented
        return fn(x, y if isinstance(y, torch.Tensor) else torch.full((), y, dtype=torch.bool, device=x.device))

    return compared


def whole_linspace(start, end, steps, *, dtype=None, layout=None, device=None, pin_memory=None):
    """Return whole numbers between two numbers as a constant.

    Eager mode rounds product and sum once if the processor fuses both, and then truncates to a whole number.
    """
    is_whole = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    if not is_whole or not isinstance(steps, int) or (device is not None and torch.device(device).type != "cpu"):
        return NotImplemented
    with disable_proxy_modes_tracing(), unset_fake_temporarily():
        return torch.linspace(start, end, steps, dtype=dtype)


def taken(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the elements of x at places in the flattened x. A 0-dimensional `index` stays on its device."""
    return aten.index.Tensor(x.reshape(-1), [index])


aten = torch.ops.aten
NARROW = {torch.int8, torch.uint8}
COMPARISONS = {
    "lt": lambda x, y: ~x & y,
    "le": lambda x, y: ~x | y,
    "gt": lambda x, y: x & ~y,
    "ge": lambda x, y: x | ~y,
    "eq": lambda x, y: ~(x ^ y),
}
REDUCTIONS = (
    aten.sum.default, aten.sum.dim_IntList, aten.prod.default, aten.prod.dim_int, aten.amax.default, aten.amin.default,
    aten.max.default, aten.min.default, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default,
)  # fmt: skip
ROUNDED = {
    floored: (aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default, aten.floor_divide.Scalar),
    remainder: (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor),
    torch.lerp: (aten.lerp.Scalar, aten.lerp.Tensor),
}
SHIFTS = {  # for the first trace, whose meta functions would refuse the bools
    getattr(op, form): shifted(getattr(op, form))
    for op in (aten.__lshift__, aten.__rshift__, aten.bitwise_left_shift, aten.bitwise_right_shift)
    for form in op.overloads()
    if not form.endswith("out")
}
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: add_with_product,
    aten._efficientzerotensor.default: zeros_with_memory,
    aten._assert_async.default: assertion,
    aten.pow.Tensor_Scalar: power,
    aten.pow.Scalar: power_of_number,
    aten.ldexp.Tensor: ldexp,
    aten.bmm.default: vectors_product,
    aten.linspace.default: whole_linspace,
    aten.take.default: taken,
    aten.var_mean.correction: moments(torch.var),
    aten.std_mean.correction: moments(torch.std),
    **{op: in_more_bits(op) for op in REDUCTIONS},
    **{op: rounded_once(fn) for fn, ops in ROUNDED.items() for op in ops},
    **{getattr(getattr(aten, k), form): of_bools(fn) for k, fn in COMPARISONS.items() for form in ("Tensor", "Scalar")},
}
