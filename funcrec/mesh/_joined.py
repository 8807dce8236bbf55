"""Exchanges of many tensors in few collectives: tensors of one dtype travel together, and so do small tensors.

    gather(x), gather(y)  =  split(gather([x | y]))
    Σ_s x[s], part by part: each rank adds up one part, and then all ranks gather the parts

An exchange costs about 0.2 ms on gloo, however small it is. Shapes: n ranks on some axes, N elements of a buffer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.core import in_parts, is_by_tree, ravel
from funcrec.mesh._by_tree import tree_sum
from funcrec.mesh._collectives import all_gather, all_to_all, axis_size
from funcrec.mesh._exchange import MOST_JOINED

MOST_APART = 8  # ranks whose small tensors are split one rank after the other
BITS = {torch.int32: torch.float32, torch.int64: torch.float64}


def is_small(xs: Sequence[Tensor], num_ranks: int) -> bool:
    """Return whether these tensors are small enough to travel together with other small tensors."""
    return sum(x.nbytes for x in xs) * num_ranks <= MOST_JOINED


def gather_each(
    xs: Sequence[Tensor], axes: tuple[str, ...], narrow: Mapping[int, Tensor]
) -> dict[int, tuple[Tensor, ...]]:
    """Return {id of x: the values of x on each rank of the axes}, for each tensor x.

    narrow: {id of x: the tensor to send in place of x}.
    """
    n, apart = axis_size(axes), {id(x): x for x in xs}
    sent = {i: narrow.get(i, x) for i, x in apart.items()}
    large = {i: x for i, x in sent.items() if not is_small([x], n)}
    small = carried({i: x for i, x in sent.items() if i not in large})
    joined, unravel = ravel(small)
    # Unbind by rank: of such a value each of two ranks sends only the part of the other rank (`compile._passes`). For
    # many ranks all values are split at once, because a split for each rank would be as many operations.
    gathered = all_gather((*large.values(), *joined), axes)
    form = lambda x, like, *lead: as_bits(x, like.dtype).reshape((*lead, *like.shape))
    of_all = {i: x.unbind(0) for i, x in zip(large, gathered, strict=False)}
    if n > MOST_APART:
        stacked = unravel(gathered[len(large) :])
        of_all |= {i: form(stacked[i], sent[i], n).unbind(0) for i in small}
    else:
        of_rank = [unravel(buffers) for buffers in zip(*(x.unbind(0) for x in gathered[len(large) :]), strict=True)]
        of_all |= {i: tuple(form(own[i], sent[i]) for own in of_rank) for i in small}
    return {i: tuple(y.to(apart[i].dtype) for y in ys) for i, ys in of_all.items()}


def carried(xs: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return each tensor as it travels, [N].

    Integers travel as the bits of floats of the same size, if there are such floats among the tensors.
    """
    dtypes = {x.dtype for x in xs.values()}
    carrier = lambda dtype: BITS[dtype] if BITS.get(dtype) in dtypes else dtype
    return {i: as_bits(x.flatten(), carrier(x.dtype)) for i, x in xs.items()}


def as_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x viewed as another dtype of the same size.

    If x has that dtype it returns x itself, because `view` to a dtype has no derivative.
    """
    return x if x.dtype == dtype else x.view(dtype)


def gather_as_one(tree: Any, axes: Sequence[str]) -> Any:
    """Return the values of every leaf on all ranks, [n, ...]. All leaves of a dtype travel together."""
    buffers, unravel = ravel(tree)
    return unravel([all_gather(x, tuple(axes)) for x in buffers])


def ordered_sum(tree: Any, axes: Sequence[str]) -> Any:
    """Return the sum over the ranks for every leaf, added in the order of the ranks (`added`).

    So the sum has the same bits on any mesh and in one process. All leaves of a dtype travel together. Two ranks send
    each other their whole leaves. This takes one exchange, and the bytes are those of an exchange part by part.
    """
    buffers, unravel = ravel(tree)
    if axis_size(tuple(axes)) <= 2:
        return unravel([added(all_gather(x, tuple(axes)).unbind(0)) for x in buffers])
    return unravel([part_by_part(lambda copies: added(copies.unbind(0)), x, tuple(axes)) for x in buffers])


def part_by_part(fold: Callable[[Tensor], Tensor], flat: Tensor, axes: tuple[str, ...]) -> Tensor:
    """Return on each rank fold([n, N]) of the flat [N] of all ranks, element by element.

    It sends as many bytes as a ring's all-reduce.
    """
    copies = all_to_all(in_parts(flat, axis_size(axes)), axes)  # [n, C]: all ranks' values of this rank's part
    return all_gather(fold(copies), axes, tiled=True)[: flat.shape[0]]


def added(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the parts, added one after the other; inside of `invariant` as a tree of neighbours."""
    if is_by_tree():
        return tree_sum(parts)
    first, *others = parts
    for x in others:
        first = first + x
    return first
