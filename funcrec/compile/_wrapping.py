"""Integers of compiled code wrap as torch's do: i64 modulo 2⁶⁴, u8 modulo 2⁸.

    compiled(x * y) = x · y mod 2ᵇ, for every integer dtype of b bits

Inductor computes what follows from `arange` as an expression of unbounded integers, and C++ leaves an overflow of
signed integers undefined: g++ then drops a loop's end, and the loop writes past its arrays.
Upstream: https://github.com/pytorch/pytorch/pull/191132, which leaves out expressions and vectors.
"""

import platform
from collections.abc import Callable
from typing import Any

import torch

LARGEST_SIZE = 1 << 48  # no tensor has more elements: x86-64 and aarch64 address 2⁴⁸ bytes
DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # of integers that are exact
WRAP = "fwrapv"
QUOTIENTS = {"floordiv", "mod", "remainder"}
ENDS = {"maximum", "minimum"}  # torch 2.13 cannot simplify an index that has them: "vr must not be None for symbol q0"
OF_SIGNED_ZEROS = {"neg", "mul"}  # of floats: -0 is no integer


def wrapping() -> list[tuple[Any, str, Callable]]:
    """(owner, name, make): Inductor's functions f, and what puts make(f) in their place so that its integers wrap."""
    from torch._inductor import cpp_builder
    from torch._inductor.bounds import BoundVars
    from torch._inductor.codegen.cpp import CppOverrides, CppScheduling, CppVecKernel
    from torch._inductor.index_propagation import IndexPropagation

    return [
        (cpp_builder, "_get_optimization_cflags", with_flags),
        (IndexPropagation, "propagate_sympy", within_dtype),
        # Ranges of computed indices hold for unbounded integers. Checks of an index that they would leave out stay.
        (BoundVars, "get_bounds", lambda get_bounds: lambda loop: {}),
        (CppVecKernel, "arange", with_wide_steps),
        (CppScheduling, "try_loop_split", of_whole_parts),
        (CppVecKernel, "store", with_index_vectors),
        (CppVecKernel, "load", within_memory),
        (CppOverrides, "truncdiv", in_own_type),
        (CppOverrides, "abs", in_own_type),
    ]


# -- the compiler's flags ----------------------------------------------------------------------------------------------


def with_flags(cflags: Callable) -> Callable:
    """The compiler's flags, signed overflow defined, and no instructions beyond the capability that was asked for."""

    def flags(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        own, links = cflags(*args, **kwargs)
        return [*own, WRAP, *narrower()], links

    return flags


def narrower() -> list[str]:
    """Flags that keep 512-bit registers from loops of shorter vectors.

    g++ 12 gets AVX2's blends of i64 wrong where it may use AVX-512: `-march=native` on such a processor, and
    ATEN_CPU_CAPABILITY=avx2. `torch.where(v >= 0, v, 12)` was 12 in every full vector.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    isa = pick_vec_isa()
    return [] if isa and isa.bit_width() == 512 else ["mno-avx512f"]


# -- expressions -------------------------------------------------------------------------------------------------------


def within_dtype(propagate: Callable) -> Callable:
    """Expressions of a loop's counters, where no value leaves its dtype; other ones are computed as written."""

    def propagated(self: Any, name: str, args: Any, kwargs: Any) -> Any:
        found = propagate(self, name, args, kwargs)
        if not found.is_symbolic:
            return found
        if name in ENDS or (name in OF_SIGNED_ZEROS and found.value.dtype.is_floating_point):
            return self.fallback(name, args, kwargs)
        is_plain = name not in QUOTIENTS or is_quotient(*(x.value.expr for x in args), self)
        return found if is_plain and is_exact(found.value, self) else self.fallback(name, args, kwargs)

    return propagated


def is_exact(value: Any, loop: Any) -> bool:
    """Whether the value's dtype holds every value that its expression takes in the loop."""
    expr, dtype = value.expr, value.dtype
    if value.is_constant():  # of integers they are wrapped already
        return not dtype.is_floating_point or torch.tensor(float(expr), dtype=dtype).item() == float(expr)
    if dtype.is_floating_point:
        least, most = -(1 << DIGITS.get(dtype, 0)), 1 << DIGITS.get(dtype, 0)
    elif dtype == torch.bool or dtype.is_complex:
        return False
    else:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    found = bounds(expr, loop)
    return bool(found.lower >= least and found.upper <= most)


def is_quotient(over: Any, under: Any, loop: Any) -> bool:
    """Whether Inductor's rules for quotients hold: a dividend of at least 0, and a positive number under it."""
    import sympy

    over, under = sympy.sympify(over), sympy.sympify(under)
    return bool(under.is_Integer and under > 0 and bounds(over, loop).lower >= 0)


def bounds(expr: Any, loop: Any) -> Any:
    """The least and the largest value of the expression in the loop."""
    import sympy
    from torch._inductor.index_propagation import upper_bound
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    sizes = {k: ValueRanges(0, upper_bound(v) - 1) for k, v in loop.indirect_var_ranges.items()}
    addressed = ValueRanges(-LARGEST_SIZE, LARGEST_SIZE)
    known = {k: v & addressed for k, v in (*loop.var_to_range, *sizes.items())}
    return bound_sympy(sympy.sympify(expr), known)


# -- loops -------------------------------------------------------------------------------------------------------------


def with_wide_steps(arange: Callable) -> Callable:
    """A vector of a counter's values, its step an i64; narrow ones are converted from i64.

    In C++ a literal below 2³¹ is an int, and seven times it wraps at 32 bits. A vector of i8 has more lanes than the
    loop has steps: `torch.arange(31).to(torch.int8).amax()` was 47.
    """

    def counted(kernel: Any, index: Any, stride: Any) -> Any:
        from torch._inductor.virtualized import ops

        step, dtype = f"static_cast<int64_t>({stride})", index.dtype
        if dtype.itemsize >= 4:
            return arange(kernel, index, step)
        plain = lambda x: getattr(x, "value", x)
        return plain(ops.to_dtype(arange(kernel, plain(ops.to_dtype(index, torch.int64)), step), dtype))

    return counted


def in_own_type(op: Callable) -> Callable:
    """A scalar's operation in its operand's type, as torch's: C++ computes with i16 and i8 as ints."""
    return lambda x, *rest: f"decltype({x})({op(x, *rest)})"


def of_whole_parts(split: Callable) -> Callable:
    """Loops over `x // n` split into n steps each, where n divides the loop's size: a rest would never be written."""

    def instead(self: Any, nodes: list) -> list:
        from torch._inductor.virtualized import V
        from torch.utils._sympy.functions import FloorDiv

        for node in nodes:
            _, body, _ = node.node.get_default_sizes_body()
            quotients = {x.args for expr in body.indexing_exprs.values() for x in expr.find(FloorDiv)}
            of_counters = [(body.var_ranges[x], n) for x, n in quotients if x in body.var_ranges]
            if not all(V.graph.sizevars.statically_known_multiple_of(size, n) for size, n in of_counters):
                return nodes
        return split(self, nodes)

    return instead


def with_index_vectors(store: Callable) -> Callable:
    """Stores of vectors. Where several threads add to one place, each lane is given its index, as Inductor asserts."""

    def instead(kernel: Any, name: str, index: Any, value: Any, mode: Any = None) -> Any:
        from torch._inductor.ops_handler import WrapperHandler
        from torch._inductor.virtualized import V

        if mode != "atomic_add":
            return store(kernel, name, index, value, mode)
        inner, to_lanes = V.get_ops_handler(), kernel.broadcast

        def of_lanes(expr: Any, dtype: torch.dtype) -> Any:
            found = inner.index_expr(expr, dtype)
            return found if found.is_vec else to_lanes(found)

        handler = WrapperHandler(inner)
        handler.index_expr = of_lanes
        with V.set_ops_handler(handler):
            return store(kernel, name, index, value, mode)

    return instead


def within_memory(load: Callable) -> Callable:
    """A masked vector of a loop's rest, and one of bools, is loaded lane by lane: Inductor loads the lanes after the
    rest, and bools whatever the mask says, which may lie outside the tensor's memory."""

    def loaded(self: Any, name: str, index: Any) -> Any:
        from torch._inductor.virtualized import V

        dtype = V.graph.get_dtype(name)
        if self._load_mask is None or not (self.tail_size or dtype == torch.bool):
            return load(self, name, index)
        renamed = self.rename_indexing(index)
        if self._try_get_const_stride(renamed, self.itervars[self.tiling_idx]) != 1:
            return load(self, name, index)
        return self._load_or_store_non_contiguous(self.args.input(name), renamed, dtype)

    return loaded
