"""Strides of index expressions, without sympy's general simplification.

Inductor asks for each load and store of a loop by how much its index grows with a variable: d(64 x0 + x1)/dx0 = 64. It
simplifies the index twice to find out, 30 ms each time. Nearly all indices are sums of numbers and of variables times
numbers, and the stride is the variable's factor.
"""

from collections.abc import Callable
from typing import Any, cast


def of_sums(general: Callable[..., Any]) -> Callable[..., Any]:
    """Return Inductor's `stride_at_vec_range` with a short way for sums of variables times integers."""

    def stride_at_vec_range(index: Any, var: Any, vec_length: int | None = None) -> Any:
        import sympy

        stride = cast(Any, sympy.S.Zero)
        for term in sympy.Add.make_args(index):
            factor, variable = (term.args if len(term.args) == 2 else (None, None)) if term.is_Mul else (1, term)
            if term.is_Integer:
                continue
            if variable is None or not variable.is_Symbol or not sympy.sympify(factor).is_Integer:
                return general(index, var, vec_length)
            stride += factor if variable == var else 0
        return stride

    return stride_at_vec_range
