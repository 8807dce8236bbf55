"""The table of `invariant` for torch.export, which records operators above the mode.

torch.export(f).run_decompositions(table)  has the operators of  invariant(f)
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from funcrec.core import tree_leaves
from funcrec.invariance import _extrema
from funcrec.invariance._mode import is_float, refuse
from funcrec.invariance._replaced import REPLACED
from funcrec.invariance._table import EXACT, EXACT_PRIMS, compositions, place_of

aten = torch.ops.aten
# What replacements are made of, besides exact operators: sums without a factor, elementwise products, moves of rows in
# order, and extrema.
SUMS = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar)
PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
MOVES = (aten.scatter_add.default, aten.index_put.default, *_extrema.REPLACED)
_inside: ContextVar[bool] = ContextVar("funcrec_inside_replacement", default=False)


def replacements() -> dict[Any, Callable]:
    """Return {operator: what replaces it or composes it} for `run_decompositions`."""
    known = [*compositions(), *(getattr(torch.ops.prims, n).default for n in EXACT | EXACT_PRIMS if is_prim(n))]
    composed = {op: f for op in known for how, f in [place_of(op)] if how == "composed" and returns_tensors(op)}
    return {**composed, **{op: outermost(f) for op, f in REPLACED.items()}}


def is_prim(name: str) -> bool:
    return hasattr(torch.ops.prims, name)


def returns_tensors(op: Any) -> bool:
    returns = op._schema.returns
    return bool(returns) and all(isinstance(r.type, torch.TensorType) for r in returns)


def outermost(replacement: Callable) -> Callable:
    """Return the replacement, whose own operators stay: they have a fixed order already."""

    @functools.wraps(replacement)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _inside.get():
            return NotImplemented
        before = _inside.set(True)
        try:
            return replacement(*args, **kwargs)
        finally:
            _inside.reset(before)

    return run


def check_operators(graph: torch.fx.Graph) -> None:
    """Raise if a float of the graph comes from an operator without a fixed order."""
    for node in graph.nodes:
        is_operator = isinstance(node.target, OpOverload | HigherOrderOperator)
        if any(isinstance(x, torch.Tensor) and x.is_complex() for x in tree_leaves(node.meta.get("val"))):
            refuse(node.target)
        if node.op == "call_function" and is_operator and any(map(is_float, tree_leaves(node.meta.get("val")))):
            has_factor = node.kwargs.get("alpha", 1) != 1 or len(node.args) == 3
            is_sum = node.target in SUMS and not has_factor
            is_root = node.target is aten.sqrt.default and node.meta["val"].dtype == torch.float64
            if not (is_sum or is_root or node.target in PRODUCTS + MOVES or place_of(node.target)[0] == "exact"):
                refuse(node.target)
