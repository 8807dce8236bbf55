"""The norm of all gradients of a loss, those of tables and dense ones together, and clipping by it.

‖g‖² = Σ_tables ‖rows‖² + Σ_leaves ‖dense‖²,      clip(g) = min(1, c / ‖g‖) · g
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from funcrec.core import (
    Form,
    Positive,
    Problem,
    Scalar,
    check,
    describe,
    device_problems,
    float_leaf_problems,
    is_by_tree,
    tree_leaves,
    tree_map,
    typed,
)
from funcrec.kernels import ops
from funcrec.tables._exact_sum import exact_sum, root
from funcrec.tables._params import Params
from funcrec.tables._rowgrads import RowGrads, row_squares

CLIP_EPS = 1e-6  # the constant of torch.nn.utils.clip_grad_norm_
Rows = Mapping[Any, RowGrads]


@typed
def global_norm(grads: Rows | Params, *more: Annotated[Tensor, Form("f[...]")]) -> Tensor:
    """Return the norm over the gradients of all tables and over the dense gradients -> f[].

    Args:
      grads: {table: RowGrads}, or the gradients of `value_and_grad`, whose dense leaves count.
      more: dense gradients that count, too.

    Law: its bits depend on the gradients of rows alone, not on the order of rows, their tables, or their ranks. Squares
      are in the dtype of the sums: of f32 gradients, elements above 1.8e19 give inf, and those below 1e-23 give 0.

    Example:
      >>> import torch, funcrec as fr
      >>> g = fr.RowGrads.from_entries(torch.tensor([1]), torch.tensor([[3.0]]), num_embeddings=2)
      >>> fr.global_norm({"item": g}, torch.tensor([4.0])), fr.global_norm(fr.Params({"item": g}, torch.tensor(4.0)))
      (tensor(5.), tensor(5.))
    """
    rows, dense = rows_and_leaves("funcrec.global_norm", grads)
    named = {f"grads[{n!r}]": g.grads for n, g in rows.items()} | {f"dense[{i}]": g for i, g in enumerate(dense)}
    check("funcrec.global_norm", device_problems(**named, **{f"more[{i}]": g for i, g in enumerate(more)}))
    return norm_over(rows, [(g, ()) for g in (*dense, *more)])


@typed
def clip_by_global_norm(grads: Rows | Params, max_norm: Positive | Scalar) -> Rows | Params:
    """Return the gradients, those of tables coalesced, all scaled by min(1, max_norm / (global norm + 1e-6)).

    Args:
      grads: {table: RowGrads}, or the gradients of `value_and_grad`: then one norm is over tables and dense leaves.
      max_norm: a number > 0, or f[], whose value is not checked.

    Example:
      >>> import torch, funcrec as fr
      >>> g = fr.RowGrads.from_entries(torch.tensor([0]), torch.tensor([[3.0]]), num_embeddings=1)
      >>> clipped = fr.clip_by_global_norm(fr.Params({"t": g}, torch.tensor(4.0)), 1.0)
      >>> clipped.tables["t"].to_dense(), clipped.dense
      (tensor([[0.6000]]), tensor(0.8000))
    """
    rows, dense = rows_and_leaves("funcrec.clip_by_global_norm", grads)
    coalesced = {name: g.coalesce() for name, g in rows.items()}
    factor = clip_factor(global_norm(coalesced, *dense), max_norm)
    scaled = {name: g.scale(factor) for name, g in coalesced.items()}
    return Params(scaled, scaled_leaves(grads.dense, factor)) if isinstance(grads, Params) else scaled


def norm_over(rows: Rows, dense: Iterable[tuple[Tensor, tuple[str, ...]]]) -> Tensor:
    """Return the norm of gradients of rows and of dense gradients, each with the mesh axes whose ranks have others."""
    squares = [row_squares(g) for g in rows.values()] + [(squares_of(g), axes) for g, axes in dense]
    return root(exact_sum(squares)) if squares else torch.zeros(())


def squares_of(grad: Tensor) -> Tensor:
    """Return what to add up for the squared norm of a dense gradient.

    Inside of `invariant` it is every square, whose exact sum does not depend on how ranks cut the gradient.
    """
    squares = wide(grad).square()
    return squares if is_by_tree() else squares.sum()


def clip_factor(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Return min(1, max_norm / (norm + 1e-6)) -> f[], as torch.nn.utils.clip_grad_norm_."""
    return (max_norm / (norm + CLIP_EPS)).clamp(max=1)


def scaled_leaves(tree: Any, factor: Tensor) -> Any:
    """Return the tree with its tensors multiplied by the factor, in their dtypes."""
    return tree_map(lambda g: (wide(g) * factor).to(g.dtype), tree)


def wide(x: Tensor) -> Tensor:
    """Return x in the dtype of sums: the squares of 16-bit numbers overflow, and small factors vanish."""
    return x.to(ops.accumulation_dtype(x.dtype))


def rows_and_leaves(call: str, grads: Rows | Params) -> tuple[Rows, list[Tensor]]:
    """Return the gradients of the tables, and the dense ones in order."""
    if not isinstance(grads, Params):
        return grads, []
    hint = "the gradients that fr.value_and_grad returns"
    wrong = [(n, g) for n, g in grads.tables.items() if not isinstance(g, RowGrads)]
    check(
        call,
        (
            Problem(f"`grads.tables[{n!r}]` is not a RowGrads.", describe(g), "RowGrads", hint, TypeError)
            for n, g in wrong
        ),
        float_leaf_problems("`grads.dense{}` is not a gradient.", grads.dense, hint),
    )
    return grads.tables, tree_leaves(grads.dense)
