"""scan: k steps in one call.

    state_k, [m_1 ... m_k] = scan(step, state_0, [b_1 ... b_k])

Floor 5.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcrec._errors import describe, fail
from funcrec._tree import map_tensors, tree_leaves, tree_map


def scan(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batches: Any) -> tuple[Any, Any]:
    """Run a step over stacked batches, without waiting for the device in between.

    Args:
      step: (state, batch) -> (state, metrics), such as `train_step(...)` or `jit` of it; a donating one takes `state`.
      batches: a pytree whose tensors have a leading dimension k: k batches of one shape, stacked.

    Returns: the last state, and the metrics stacked, each f[k, ...].

    Raises: ValueError when the tensors of `batches` have no common leading dimension, or k is 0.

    Law: the same bits as k calls of `step`.

    Example:
      >>> import torch, funcrec as fr
      >>> add = lambda total, x: (total + x, {"total": total + x})
      >>> fr.scan(add, torch.tensor(0), torch.tensor([1, 2, 3]))
      (tensor(6), {'total': tensor([1, 3, 6])})

    Source: jax.lax.scan, with the carry first.
    """
    tensors = [x for x in tree_leaves(batches) if isinstance(x, Tensor)]
    sizes = {x.shape[0] if x.dim() else None for x in tensors}
    if len(sizes) != 1 or sizes & {None, 0}:
        got, need = f"{sorted({describe(x) for x in tensors})}", "tensors [k, ...] of one k >= 1"
        fail("funcrec.scan", "`batches` is not a stack of batches.", got=got, need=need, hint="torch.stack each leaf")
    collected = []
    for k in range(sizes.pop()):
        state, metrics = step(state, map_tensors(lambda x: x[k], batches))  # noqa: B023
        collected.append(metrics)
    return state, tree_map(lambda *xs: torch.stack(xs) if isinstance(xs[0], Tensor) else xs[0], *collected)
