"""Bags of several values, joined bag by bag.

    out bag b = [first bag b, second bag b, ...]

Shapes: B bags, N capacity of a part, M sum of the capacities.
"""

from collections.abc import Sequence

import torch

from funcrec.jagged._jagged import JaggedTensor, bag_ids


def joined_bags(parts: Sequence[JaggedTensor]) -> JaggedTensor:
    """Return bags that hold the values [N, ...] of all parts, one part after the other, [M, ...]. Padding is zero.

    The parts have as many bags as each other, and no weights. It is linear in the values, by torch's operations."""
    offsets = torch.stack([x.offsets.long() for x in parts]).sum(0)
    first, capacities = parts[0], [x.capacity for x in parts]
    capacity = sum(capacities)
    bag = bag_ids(offsets, capacity)
    inside = bag < first.num_bags
    own = torch.where(inside, bag, 0)
    place = torch.arange(capacity, device=offsets.device) - offsets.index_select(0, own)
    source, begin, found = torch.full_like(place, capacity), 0, ~inside
    for x, size in zip(parts, capacities, strict=True):
        none = x.offsets.new_zeros(1)  # for the padding of a value without bags
        start, length = (torch.cat([y, none]).long().index_select(0, own) for y in (x.offsets[:-1], x.lengths))
        is_own = ~found & (place < length)
        source = torch.where(is_own, begin + start + place, source)
        found, place, begin = found | is_own, place - length, begin + size
    zero = first.values.new_zeros((1, *first.values.shape[1:]))
    values = torch.cat([*(x.values for x in parts), zero]).index_select(0, source)
    return JaggedTensor(values, offsets.to(first.offsets.dtype))
