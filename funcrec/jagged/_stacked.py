"""Parts of equal numbers of bags, stacked: member p has the bags of part p of every key, in a buffer of its own.

    stack_bags(x, n, C)[p] = x[p · m : (p + 1) · m]        m = B / n bags of each key

One copy of ranges makes all parts, so that a part may be one example.
Shapes: F keys, B bags of each key, n parts, C capacity of a part.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.jagged._jagged import JaggedTensor
from funcrec.jagged._keyed_jagged import KeyedJaggedTensor
from funcrec.jagged._primitives import take_ranges


class Ranges(NamedTuple):
    """Where the ids of the parts lie: starts and lengths i64[n, F], and the offsets i[n, F * m + 1] of each part."""

    starts: Tensor
    lengths: Tensor
    offsets: Tensor


def ranges_of_parts(x: Any, n: int) -> Ranges:
    """Return where n parts of a jagged value lie. n divides the number of bags of a key.

    With inverse indices, n is the number of examples: a part has the bag of its example, which others may have, too.
    """
    keys = len(x.keys) if isinstance(x, KeyedJaggedTensor) else 1
    starts, lengths = x.offsets[:-1], x.lengths
    if isinstance(x, KeyedJaggedTensor) and x.inverse is not None:
        first = torch.tensor([x.bag_range(k)[0] for k in x.keys], device=x.offsets.device)
        counts = torch.tensor([x.bags_of(k) for k in x.keys], device=x.offsets.device)
        is_bag = (x.inverse >= 0) & (x.inverse < counts[:, None])
        bags = torch.where(is_bag, first[:, None] + x.inverse, starts.shape[0]).flatten()
        grown = lambda t: torch.cat([t, t.new_zeros(1)]).index_select(0, bags)  # an index of no bag: an empty bag
        starts, lengths = grown(starts), grown(lengths)
    shape = (keys, n, lengths.shape[0] // max(keys * n, 1))
    starts, lengths = starts.reshape(shape), lengths.reshape(shape)
    first = starts[:, :, 0] if shape[2] else starts.new_zeros(shape[:2])
    ends = torch.cumsum(lengths.permute(1, 0, 2).reshape(n, keys * shape[2]), 1, dtype=x.offsets.dtype)
    offsets = torch.cat([ends.new_zeros(n, 1), ends], 1)
    return Ranges(first.T.long(), lengths.sum(2).T.long(), offsets)


def stack_bags(x: Any, ranges: Ranges, capacity: int) -> Any:
    """Return the parts of a jagged value at `ranges`, stacked: each of its leaves has a leading dimension n.

    A part with more than C = `capacity` ids loses the last ones.
    """
    n, ends = ranges.starts.shape[0], ranges.lengths.cumsum(1).clamp(max=capacity)
    lengths = torch.diff(ends, dim=1, prepend=ends.new_zeros(n, 1))
    fill = capacity - ends[:, -1:] if ends.shape[1] else ends.new_full((n, 1), capacity)
    # The last range of a part fills its buffer from the beginning of the value: padding, which nothing reads.
    starts = torch.cat([ranges.starts, torch.zeros_like(fill)], 1).flatten()
    lengths = torch.cat([lengths, fill], 1).flatten()
    take = lambda t: take_ranges(t, starts, lengths, n * capacity)[0].reshape(n, capacity, *t.shape[1:])
    weights = None if x.weights is None else take(x.weights)
    offsets = ranges.offsets.clamp(max=capacity)
    if isinstance(x, JaggedTensor):
        return JaggedTensor(take(x.values), offsets, weights)
    return KeyedJaggedTensor(take(x.values), offsets, weights, None, x.keys, None, x.unweighted)
