"""Make integers in compiled code wrap as torch's integers do: i64 modulo 2⁶⁴, u8 modulo 2⁸.

    compiled(x * y) = x · y mod 2ᵇ, for every integer dtype of b bits

Inductor computes functions of `arange` as expressions of unbounded integers. C++ leaves an overflow of signed integers
undefined: g++ then drops the end of a loop, and the loop writes past its arrays.
Upstream: https://github.com/pytorch/pytorch/pull/191132, which does not cover expressions and vectors.
"""

import platform
from collections.abc import Callable
from typing import Any

import torch

LARGEST_SIZE = 1 << 48  # bound on a tensor's elements: x86-64 and aarch64 address 2⁴⁸ bytes
DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # {dtype: bits of exact integers}
WRAP = "fwrapv"
QUOTIENTS = {"floordiv", "mod", "remainder"}
ENDS = {"maximum", "minimum"}  # torch 2.13 fails on these in an index: "vr must not be None for symbol q0"
OF_SIGNED_ZEROS = {"neg", "mul"}  # operations on floats that may give -0, which no integer expression holds


def wrapping() -> list[tuple[Any, str, Callable]]:
    """Return (owner, name, make) for functions f of Inductor. With make(f) in place of each f, integers wrap."""
    from torch._inductor import cpp_builder
    from torch._inductor.bounds import BoundVars
    from torch._inductor.codegen.cpp import CppOverrides, CppScheduling, CppVecKernel
    from torch._inductor.index_propagation import IndexPropagation

    return [
        (cpp_builder, "_get_optimization_cflags", with_flags),
        (IndexPropagation, "propagate_sympy", within_dtype),
        # Ranges of computed indices hold for unbounded integers only. Without ranges, Inductor keeps all index checks.
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
    """Return a `cflags` whose flags define signed overflow, and exclude instructions above the wanted capability."""

    def flags(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        own, links = cflags(*args, **kwargs)
        return [*own, WRAP, *narrower()], links

    return flags


def narrower() -> list[str]:
    """Return flags that keep 512-bit registers out of loops with shorter vectors.

    g++ 12 gets AVX2's blends of i64 wrong if it may use AVX-512. This happens with `-march=native` on a processor with
    AVX-512 and ATEN_CPU_CAPABILITY=avx2. Without the flags, `torch.where(v >= 0, v, 12)` is 12 in every full vector.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    isa = pick_vec_isa()
    return [] if isa and isa.bit_width() == 512 else ["mno-avx512f"]


# -- expressions -------------------------------------------------------------------------------------------------------


def within_dtype(propagate: Callable) -> Callable:
    """Return a `propagate` that keeps an expression of a loop's counters only if no value leaves its dtype.

    The code computes any other expression step by step.
    """

    def propagated(self: Any, name: str, args: Any, kwargs: Any) -> Any:
        found = propagate(self, name, args, kwargs)
        if not found.is_symbolic:
            return found
        if name in ENDS or (name in OF_SIGNED_ZEROS and found.value.dtype.is_floating_point):
            return self.fallback(name, args, kwargs)
        is_plain = name not in QUOTIENTS or is_quotient(args[0].value.expr, args[1].value.expr, self)
        return found if is_plain and is_exact(found.value, self) else self.fallback(name, args, kwargs)

    return propagated


def is_exact(value: Any, loop: Any) -> bool:
    """Return whether the dtype of `value` holds every number that its expression takes in the loop."""
    expr, dtype = value.expr, value.dtype
    if value.is_constant():  # A constant integer has wrapped already.
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
    """Return whether Inductor's rules for quotients hold: a dividend >= 0, and a constant divisor > 0."""
    import sympy

    over, under = sympy.sympify(over), sympy.sympify(under)
    return bool(under.is_Integer and under > 0 and bounds(over, loop).lower >= 0)


def bounds(expr: Any, loop: Any) -> Any:
    """Return the range of the expression in the loop, from its least to its largest value."""
    import sympy
    from torch._inductor.index_propagation import upper_bound
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    sizes = {k: ValueRanges(0, upper_bound(v) - 1) for k, v in loop.indirect_var_ranges.items()}
    addressed = ValueRanges(-LARGEST_SIZE, LARGEST_SIZE)
    known = {k: v & addressed for k, v in (*loop.var_to_range, *sizes.items())}
    return bound_sympy(sympy.sympify(expr), known)


# -- loops -------------------------------------------------------------------------------------------------------------


def with_wide_steps(arange: Callable) -> Callable:
    """Return an `arange` that computes a vector of a counter's values with a step in i64.

    Narrow dtypes are converted from i64. In C++ a literal below 2³¹ is an int, and seven times such a literal wraps at
    32 bits. A vector of i8 has more lanes than the loop has steps: Inductor's `torch.arange(31).to(torch.int8).amax()`
    is 47.
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
    """Return an `op` that computes a scalar's operation in the operand's type, as torch does.

    C++ computes i16 and i8 as ints.
    """
    return lambda x, *rest: f"decltype({x})({op(x, *rest)})"


def of_whole_parts(split: Callable) -> Callable:
    """Return a `split` that splits loops over `x // n` into n steps only if n divides the loop's size.

    Otherwise the loop would never write the rest.
    """

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
    """Return a `store` of vectors that gives each lane an index if several threads add to one place.

    Inductor asserts these indices.
    """

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
    """Return a `load` that loads masked vectors lane by lane, if they are the rest of a loop or vectors of bools.

    Inductor would load the lanes after the rest, and bools regardless of the mask. These lanes may lie outside the
    tensor's memory.
    """

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
