"""The operations on jagged buffers in plain torch: out of place, static shapes, no host read.

Shapes: B bags, N buffer length, C capacity of an output, L places of a padded bag, S shards.
"""

import torch
from funcrec.kernels.forms import accumulation_dtype
from funcrec.kernels.tracked import is_transforming
from torch import Tensor


def ascending(offsets: Tensor) -> Tensor:
    """Return the running maximum of offsets, which every operation reads in place of the offsets."""
    return offsets.cummax(0).values


def place_among(bounds: Tensor, position: Tensor, right: bool = True) -> Tensor:
    """Return the number of ascending bounds that are at most the position (less than it, if not `right`).

    Under vmap the function copies both tensors, because torch requires that each tensor has its own memory.
    """
    if is_transforming():
        none = sum((x[..., :1] > x[..., :1]).sum() for x in (bounds, position))  # 0, for NaN and infinity too
        bounds, position = (bounds + none).contiguous(), (position + none).contiguous()
    return torch.searchsorted(bounds, position, right=right)


def take_ranges(values: Tensor, starts: Tensor, lengths: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    offsets = _offsets_of(lengths)
    if values.shape[0] == 0 or starts.shape[0] == 0 or capacity == 0:
        return values.new_zeros((capacity, *values.shape[1:])), offsets
    source, inside = _sources(starts, offsets, capacity, values.shape[0])
    taken = values.index_select(0, torch.where(inside, source, 0))
    return torch.where(_like(inside, values), taken, values.new_zeros(())), offsets


def take_ranges_transpose(d: Tensor, starts: Tensor, lengths: Tensor, num_values: int) -> Tensor:
    wide = d.to(accumulation_dtype(d.dtype))
    sums = wide.new_zeros(
        (num_values + 1, *d.shape[1:])
    )  # Positions outside all ranges go to the last place, which is cut off.
    if starts.shape[0]:
        source, inside = _sources(starts, _offsets_of(lengths), d.shape[0], num_values)
        place = _like(torch.where(inside, source, num_values), wide).expand(wide.shape)
        sums = sums.scatter_add(0, place, torch.where(_like(inside, wide), wide, 0))
    return sums[:-1].to(d.dtype)


def _sources(starts: Tensor, offsets: Tensor, capacity: int, num_values: int) -> tuple[Tensor, Tensor]:
    """Return for each place of take_ranges' output its source position in the buffer, i64[C], and a mask of the places
    that have one."""
    place, bounds = torch.arange(capacity, device=offsets.device), ascending(offsets).clamp(0, capacity)
    bag = place_among(bounds, place) - 1
    inside = (bag >= 0) & (bag < starts.shape[0])
    bag = bag.clamp(0, starts.shape[0] - 1)
    source = starts.long().index_select(0, bag) + (place - bounds.index_select(0, bag))
    return source, inside & (source >= 0) & (source < num_values)


def to_padded(values: Tensor, offsets: Tensor, max_length: int, fill: float | int) -> Tensor:
    bounds = ascending(offsets).clamp(0, values.shape[0]).long()
    position = bounds[:-1, None] + torch.arange(max_length, device=offsets.device)
    inside = position < bounds[1:, None]
    if values.shape[0] == 0:
        return values.new_full((*position.shape, *values.shape[1:]), fill)
    taken = values.index_select(0, position.clamp(0, values.shape[0] - 1).flatten()).unflatten(0, position.shape)
    return torch.where(_like(inside, taken), taken, torch.full((), fill, dtype=values.dtype, device=values.device))


def from_padded(padded: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    num_bags, max_length = padded.shape[:2]
    if num_bags * max_length == 0:
        return padded.new_zeros((capacity, *padded.shape[2:]))
    place, offsets = torch.arange(capacity, device=offsets.device), ascending(offsets).clamp(0, capacity).long()
    bag = place_among(offsets, place) - 1
    inside = (bag >= 0) & (bag < num_bags)
    bag = bag.clamp(0, num_bags - 1)
    column = place - offsets.index_select(0, bag)
    inside = inside & (column < max_length)
    taken = padded.flatten(0, 1).index_select(0, bag * max_length + column.clamp(0, max_length - 1))
    return torch.where(_like(inside, taken), taken, padded.new_zeros(()))


def bucketize(
    rows: Tensor, offsets: Tensor, weights: Tensor | None, num_shards: int, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_bags, num_ids = offsets.shape[0] - 1, rows.shape[0]
    place = torch.arange(num_ids, device=rows.device)
    bag = place_among(ascending(offsets).long(), place) - 1
    owner = torch.div(rows.long(), block, rounding_mode="floor")
    counts = (bag >= 0) & (bag < num_bags) & (owner >= 0) & (owner < num_shards)
    bucket = torch.where(counts, owner * num_bags + bag, num_shards * num_bags)
    order = torch.sort(bucket, stable=True).indices
    lengths = torch.zeros(num_shards * num_bags + 1, dtype=torch.int64, device=rows.device)
    lengths = lengths.scatter_add(0, bucket, counts.long())[:-1]
    kept = counts.index_select(0, order)
    local = torch.where(kept, (rows.long() - owner * block).to(rows.dtype).index_select(0, order), 0)
    moved = rows.new_zeros(0, dtype=torch.float32)
    if weights is not None:
        moved = torch.where(kept, weights.index_select(0, order), weights.new_zeros(()))
    positions = torch.where(counts, torch.zeros_like(place).scatter(0, order, place), -1)
    return local, lengths, moved, positions


def _offsets_of(lengths: Tensor) -> Tensor:
    """Return offsets i64[B + 1] from lengths i[B]."""
    return torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def _like(mask: Tensor, x: Tensor) -> Tensor:
    """Return the mask with as many dimensions as x."""
    return mask.reshape(mask.shape + (1,) * (x.dim() - mask.dim()))
