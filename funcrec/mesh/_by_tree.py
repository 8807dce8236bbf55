"""Sums of parts as a tree of neighbours, in the order of the parts: the order of `invariant`.

    ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + ...)        a sum without a neighbour goes up as it is

`invariant` sums a batch of more than 256 terms as the sum of its two halves. If the parts are a power of two of equal
parts, of more than 128 terms each, the sum of a part is a node of that tree. The tree over the parts is the rest of it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.core import is_by_tree, tree_map


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the parts as a tree of neighbours. 16-bit floats are added in f32, and rounded once."""
    parts, dtype = list(parts), parts[0].dtype
    if len(parts) > 1 and dtype.is_floating_point:
        parts = [x.to(torch.promote_types(dtype, torch.float32)) for x in parts]
    while len(parts) > 1:
        pairs = [x + y for x, y in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0].to(dtype)


def pushed(kept: Sequence[Any], part: Any, place: int) -> list[Any]:
    """Return the partial sums after the part number `place`, trees of tensors.

    Outside of `invariant` it is one sum, in order. Inside, sums of as many parts join at once, as the digits of a
    binary counter: log2 n sums wait.
    """
    kept = [*kept, part]
    while len(kept) > 1 and (place & 1 or not is_by_tree()):
        right, left = kept.pop(), kept.pop()
        kept.append(tree_map(torch.add, left, right))
        place >>= 1
    return kept


def sum_of_kept(kept: Sequence[Any]) -> Any:
    """Return the sum of the partial sums: the small ones, which came last, join first."""
    kept = list(kept)
    while len(kept) > 1:
        right, left = kept.pop(), kept.pop()
        kept.append(tree_map(torch.add, left, right))
    return kept[0]
