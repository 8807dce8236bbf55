"""Make blocks of ids for the ranks that own the rows: `ops.owner_blocks`, by take_ranges, bucketize and plain torch.

Shapes: N ids, L lanes, B bags of a lane, n ranks, K slots of each rank, C rows that a block can hold.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from funcrec.kernels.forms import Owners, owners_of
from funcrec.kernels.reference_jagged import place_among
from torch import Tensor

NOWHERE = 1 << 40  # more than the rows of any rank, so that owner · NOWHERE + row identifies owner and row


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def blocks_by(take_ranges: Callable, bucketize: Callable, integers: Callable = integers) -> Callable:
    """Return `owner_blocks` with flat arguments, built from an implementation's `take_ranges` and `bucketize`.

    integers: a function (values, device) that returns an i64 tensor of values >= 0.
    """

    def owner_blocks(ids: Any, offsets: Any, lanes, slots, num_bags, num_ranks, room, wide, placed):
        lanes, num_ids = owners_of(lanes), ids.shape[0]
        taken, bounds = _lane_bags(ids, offsets, lanes, num_bags, take_ranges, integers)
        rows = owned_rows(ids if taken is None else ids[taken], bounds, lanes, integers)
        grouped, lengths, _, positions = bucketize(rows, bounds, None, num_ranks, NOWHERE)
        lengths = lengths.unflatten(0, (num_ranks, len(lanes), num_bags))
        counts = lengths.flatten(1).sum(1)
        before = counts.cumsum(0) - counts
        within = torch.arange(room, device=ids.device)
        place = torch.where(within < counts[:, None], before[:, None] + within, grouped.shape[0])
        blocks = torch.cat([grouped, grouped.new_full((1,), -1)])[place]
        told = torch.cat([lengths, lengths.new_zeros(num_ranks, 1, num_bags)], 1)
        slots = integers([k if k >= 0 else len(lanes) for k in slots], ids.device)  # -1 reads the zeros at the end
        told = told[torch.arange(num_ranks, device=ids.device)[:, None], slots.view(num_ranks, len(slots) // num_ranks)]
        blocks = torch.cat([blocks, told.flatten(1)], 1).to(torch.int64 if wide else torch.int32)
        if not placed:
            return blocks, counts, counts.new_empty(0)
        # An id at position p of the grouped ids is at (owner, p - before[owner]) in the blocks.
        owner = torch.div(rows, NOWHERE, rounding_mode="floor").clamp(min=0)
        inner = positions - before[owner]
        sent = torch.where((positions >= 0) & (inner < room), owner * room + inner, -1)
        if taken is not None:  # The places return to the original order of the ids.
            taken = torch.where(positions >= 0, taken, num_ids)
            sent = sent.new_full((num_ids + 1,), -1).scatter(0, taken, sent)[:-1]
        return blocks, counts, sent

    return owner_blocks


def _lane_bags(
    ids: Tensor, offsets: Tensor, lanes: Sequence[Owners], num_bags: int, take_ranges: Callable, integers: Callable
) -> tuple[Tensor | None, Tensor]:
    """Return the positions of the ids that the lanes read, lane by lane, and the bounds i64[L · B + 1] of the bags.

    The positions are None if the lanes read all ids in order.
    """
    if all(x.first_bag == i * num_bags and x.max_length == 0 for i, x in enumerate(lanes)):
        return None, offsets[: len(lanes) * num_bags + 1].long()
    bounds = offsets.long()
    starts = torch.cat([bounds[x.first_bag : x.first_bag + num_bags] for x in lanes])
    ends = torch.cat([bounds[x.first_bag + 1 : x.first_bag + num_bags + 1] for x in lanes])
    most = integers([x.max_length or ids.shape[0] for x in lanes], ids.device)
    lengths = torch.minimum((ends - starts).clamp(min=0), most.repeat_interleave(num_bags))
    capacity = ids.shape[0] * max(sum(y.first_bag == x.first_bag for y in lanes) for x in lanes)
    return take_ranges(torch.arange(ids.shape[0], device=ids.device), starts, lengths, capacity)


def owned_rows(ids: Tensor, bounds: Tensor, lanes: Sequence[Owners], integers: Callable = integers) -> Tensor:
    """Return owner · NOWHERE + the row's number on that owner, i64[N], for each id in the bags of the lanes.

    bounds: i64[L · B + 1]. An id without a row gets -1.
    """
    most = max(len(x.ranks) for x in lanes)
    of_parts = lambda parts: integers([n for xs in parts for n in (*xs, *[0] * (most - len(xs)))], ids.device)
    lane = lane_of(bounds, ids.shape[0], len(lanes))
    of_lane = lambda numbers: integers(numbers, ids.device)[lane]
    rows = ids.long()
    is_row = (rows >= 0) & (rows < of_lane([min(x.num_rows, x.part * len(x.ranks)) for x in lanes]))
    rows = torch.where(is_row, rows, 0)
    part = of_lane([max(x.part, 1) for x in lanes])
    which = torch.div(rows, part, rounding_mode="floor")
    flat = lane * most + which
    owner, start = of_parts([x.ranks for x in lanes])[flat], of_parts([x.starts for x in lanes])[flat]
    return torch.where(is_row, owner * NOWHERE + rows - which * part + start, -1)


def lane_of(bounds: Tensor, num_ids: int, num_lanes: int) -> Tensor:
    """Return the lane of each id, i64[N]. Padding belongs to the last lane."""
    ends = bounds[:: max((bounds.shape[0] - 1) // num_lanes, 1)][1:num_lanes]
    return place_among(ends.contiguous(), torch.arange(num_ids, device=ends.device))
