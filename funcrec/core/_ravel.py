"""Make one buffer for each dtype of a tree, and the tree of such buffers. One call can then send or add all tensors.

    ravel({"w": f32[2, 3], "n": i64[], "b": f32[3]})  =  [f32[9], i64[1]], unravel        unravel(buffers) = the tree

Source: jax.flatten_util.ravel_pytree, which makes one buffer in the dtype to which all leaves promote.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as torch_tree
from torch import Tensor

Unravel = Callable[[Sequence[Tensor]], Any]


def ravel(tree: Any, lead: int = 0) -> tuple[list[Tensor], Unravel]:
    """Return one buffer of all leaves for each dtype, and the function that turns such buffers back into a tree.

    Args:
      tree: tensors [*first, *shape]. `first` are the first `lead` sizes, which are the same in all tensors. `shape` has
        a dimension if `lead` is not 0.

    Returns:
      buffers [*first, N], in the order in which the dtypes first occur; and unravel(buffers [..., N]), which returns a
      tree of leaves [..., *shape]. Before `unravel`, a buffer may lose or gain leading dimensions.

    Law: unravel(ravel(tree)) equals tree, bit by bit. Both functions are linear.
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
    """Return n equal parts [n, C] of all elements of x, with zeros after the last element."""
    flat = x.flatten()
    return torch.cat([flat, flat.new_zeros(-flat.shape[0] % n)]).unflatten(0, (n, -1))
