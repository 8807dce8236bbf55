"""A tree as one buffer for each dtype, and back: what is to travel, or to be added up, together.

    ravel({"w": f32[2, 3], "n": i64[], "b": f32[3]})  =  [f32[9], i64[1]], unravel        unravel(buffers) = the tree

Source: jax.flatten_util.ravel_pytree, whose one buffer has the dtype that all leaves promote to.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as torch_tree
from torch import Tensor

Unravel = Callable[[Sequence[Tensor]], Any]


def ravel(tree: Any, lead: int = 0) -> tuple[list[Tensor], Unravel]:
    """(the leaves of each dtype one after the other, how such buffers are a tree again).

    Args:
      tree: of tensors [*first, *shape], whose first `lead` sizes are the
        same in all; `shape` has a dimension if `lead` is not 0.

    Returns:
      buffers [*first, N], in the order in which the dtypes come; and unravel(buffers [..., N]), a tree of leaves [...,
      *shape]: a buffer may have lost or gained leading dimensions meanwhile.

    Law: unravel(ravel(tree)) = tree, bit by bit. Both are linear.
    """
    leaves, structure = torch_tree.tree_flatten(tree)
    of_dtype: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(leaves):
        of_dtype.setdefault(x.dtype, []).append(i)
    shapes = [x.shape[lead:] for x in leaves]

    def unravel(buffers: Sequence[Tensor]) -> Any:
        out: list[Any] = [None] * len(shapes)
        for at, whole in zip(of_dtype.values(), buffers, strict=True):
            for i, x in zip(at, whole.split([shapes[i].numel() for i in at], whole.dim() - 1), strict=True):
                out[i] = x if len(shapes[i]) == 1 else x.reshape((*x.shape[:-1], *shapes[i]))
        return torch_tree.tree_unflatten(out, structure)

    return [torch.cat([leaves[i].flatten(lead) for i in at], lead) for at in of_dtype.values()], unravel


def in_parts(x: Tensor, n: int) -> Tensor:
    """[n, C]: all elements of x in n equal parts, zeros after the last."""
    flat = x.flatten()
    return torch.cat([flat, flat.new_zeros(-flat.shape[0] % n)]).unflatten(0, (n, -1))
