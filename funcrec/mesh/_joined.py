"""Exchanges of many tensors in few collectives: tensors of one dtype travel together, small ones of any dtype too.

    gather(x), gather(y)  =  split(gather([x | y]))
    Σ_s x[s], part by part: each rank adds up one part, and the parts are gathered

An exchange costs about 0.2 ms on gloo, however small it is. Shapes: n ranks on some axes, N elements of a buffer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.core import in_parts, ravel
from funcrec.mesh._collectives import all_gather, all_to_all, axis_size

MOST_JOINED = 1 << 16  # bytes of all ranks together: moving fewer takes less time than one more exchange
BITS = {torch.int32: torch.float32, torch.int64: torch.float64}


def is_small(xs: Sequence[Tensor], num_ranks: int) -> bool:
    """Whether these tensors are sent together with others of their dtype."""
    return sum(x.nbytes for x in xs) * num_ranks <= MOST_JOINED


def gather_each(
    xs: Sequence[Tensor], axes: tuple[str, ...], narrow: Mapping[int, Tensor]
) -> dict[int, tuple[Tensor, ...]]:
    """{id of x: the values of x on each rank of the axes}, for each tensor x.

    narrow: {id of x: the tensor to send in its place}.
    """
    n, apart = axis_size(axes), {id(x): x for x in xs}
    sent = {i: narrow.get(i, x) for i, x in apart.items()}
    large = {i: x for i, x in sent.items() if not is_small([x], n)}
    small = carried({i: x for i, x in sent.items() if i not in large})
    joined, unravel = ravel(small)
    # unbind by rank: of a value read like this, each of two ranks sends only the other's part (`compile._passes`)
    got = [x.unbind(0) for x in all_gather((*large.values(), *joined), axes)]
    of_rank = [unravel(buffers) for buffers in zip(*got[len(large) :], strict=True)]
    form = lambda x, like: as_bits(x, like.dtype).reshape(like.shape)
    of_all = dict(zip(large, got, strict=False)) | {i: tuple(form(own[i], sent[i]) for own in of_rank) for i in small}
    return {i: tuple(y.to(apart[i].dtype) for y in ys) for i, ys in of_all.items()}


def carried(xs: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return each tensor as it travels, [N].

    Integers travel as the bits of floats of their size, if there are such floats: these have derivatives.
    """
    dtypes = {x.dtype for x in xs.values()}
    carrier = lambda dtype: BITS[dtype] if BITS.get(dtype) in dtypes else dtype
    return {i: as_bits(x.flatten(), carrier(x.dtype)) for i, x in xs.items()}


def as_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x viewed as another dtype of its size.

    x itself if it has that dtype: `view` to a dtype has no derivative.
    """
    return x if x.dtype == dtype else x.view(dtype)


def gather_as_one(tree: Any, axes: Sequence[str]) -> Any:
    """all_gather of every leaf, [n, ...]; all leaves of a dtype travel together."""
    buffers, unravel = ravel(tree)
    return unravel([all_gather(x, tuple(axes)) for x in buffers])


def ordered_sum(tree: Any, axes: Sequence[str]) -> Any:
    """Return the sum over ranks of every leaf, in the order of the ranks.

    So it has the same bits on any mesh and in one process. All leaves of a dtype travel together. Two ranks send each
    other their whole leaves: as many bytes as part by part, in one exchange.
    """
    buffers, unravel = ravel(tree)
    if axis_size(tuple(axes)) <= 2:
        return unravel([added(all_gather(x, tuple(axes)).unbind(0)) for x in buffers])
    return unravel([part_by_part(lambda copies: added(copies.unbind(0)), x, tuple(axes)) for x in buffers])


def part_by_part(fold: Callable[[Tensor], Tensor], flat: Tensor, axes: tuple[str, ...]) -> Tensor:
    """fold([n, N]) of all ranks' flat [N], element by element, on each of them.

    It sends as many bytes as a ring's all-reduce.
    """
    copies = all_to_all(in_parts(flat, axis_size(axes)), axes)  # [n, C]: all ranks' values of this rank's part
    return all_gather(fold(copies), axes, tiled=True)[: flat.shape[0]]


def added(parts: Sequence[Tensor]) -> Tensor:
    """Add the parts, one after the other."""
    first, *others = parts
    for x in others:
        first = first + x
    return first
