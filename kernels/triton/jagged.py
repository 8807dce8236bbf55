"""Operations on jagged buffers: ranges, shards, padding. They copy values of any dtype as bits.

Bag b of a buffer is [offsets[b], offsets[b + 1]). A binary search finds the bag of a position.
Shapes: B bags, N capacity of the buffer, L places per bag, S shards, W numbers per value.
"""

import math

import torch
import triton.language as tl
from funcrec.kernels.forms import Segment, accumulation_dtype, flatten
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.device import bag_bounds, kernel, lanes, upper_bound
from funcrec.kernels.triton.lookup import scatter_rows_
from funcrec.kernels.triton.segments import coalesce
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def take_ranges(values: Tensor, starts: Tensor, lengths: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return (values [capacity, ...], offsets i64[B + 1]): values[starts[b] : starts[b] + lengths[b]] end to end.

    A position outside the values gives zeros. The padding is zeros. A negative length counts as 0.
    """
    offsets = _offsets_of(lengths)
    out = torch.empty(capacity, *values.shape[1:], dtype=values.dtype, device=values.device)
    bits, copy = _as_integers(values.contiguous()), _as_integers(out)
    width, num_bags = copy.shape[1], starts.shape[0]
    t = on.tile(width)
    on.launch(
        _take_ranges, (t.over(capacity), on.cdiv(width, t.columns)), bits, bits.shape[0], starts.contiguous(), offsets,
        num_bags, copy, capacity, width, on.steps(num_bags + 1), TILE_ROWS=t.rows, TILE_COLUMNS=t.columns,
        num_warps=t.num_warps,
    )  # fmt: skip
    return out, offsets


def _offsets_of(lengths: Tensor) -> Tensor:
    """Return offsets i64[B + 1] from lengths i[B]."""
    return torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.clamp(min=0).cumsum(0, dtype=torch.int64)])


def _as_integers(values: Tensor) -> Tensor:
    """Return the bits of contiguous values, of any dtype and trailing shape, as i[N, W]."""
    flat = values.reshape(values.shape[0], math.prod(values.shape[1:]))
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).flatten(1)
    return flat.view(INTEGERS[flat.element_size()])


@kernel()
def _take_ranges(
    values, num_values, starts, offsets, num_bags, out, capacity, width, steps, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    place = lanes(TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    bag = upper_bound(offsets, place * 0, place * 0 + num_bags + 1, place, steps) - 1
    inside = (place < capacity) & (bag < num_bags)
    within = place - tl.load(offsets + bag, mask=inside, other=0)
    source = tl.load(starts + bag, mask=inside, other=-1).to(tl.int64) + within
    read = inside & (source >= 0) & (source < num_values)
    written = (place < capacity)[:, None] & (column < width)[None, :]
    x = tl.load(values + source[:, None] * width + column[None, :], mask=written & read[:, None], other=0)
    tl.store(out + place[:, None] * width + column[None, :], x, mask=written)


def take_ranges_transpose(d: Tensor, starts: Tensor, lengths: Tensor, num_values: int) -> Tensor:
    """Return the ordered sums of d [C, ...] over the ranges that hold each position, [num_values, ...] in d's dtype.

    Cost: one stable sort of C positions; `coalesce` sums equal positions.
    """
    size, width = d.shape[0], math.prod(d.shape[1:])
    wide = d.to(accumulation_dtype(d.dtype)).reshape(size, width)
    numbers = torch.arange(1, num_values + 1, device=d.device)
    source = take_ranges(numbers, starts, lengths, size)[0] - 1  # source position of each place, -1 for padding
    entries = Segment(
        table=0, d=0, column=0, rows=0, offsets=-1, first_bag=0, num_bags=size, max_length=0, mean=False, weights=-1
    )
    rows, sums, count, _ = coalesce([wide], [source], [], [], flatten([entries]), [num_values, width])
    out = torch.zeros(num_values, width, dtype=wide.dtype, device=d.device)
    scatter_rows_(out, rows, count, sums)
    return out.to(d.dtype).reshape(num_values, *d.shape[1:])


def bucketize(
    rows: Tensor, offsets: Tensor, weights: Tensor | None, num_shards: int, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids grouped by (shard, bag): (rows i[N], lengths i64[S · B], weights f[N] | f[0], positions i64[N]).

    The owner of a row is row // block, and the row becomes row - owner · block. A row without a shard is left out.
    positions[i] is the new position of id i, or -1 if that id is left out. Zeros follow the last id.

    Cost: one stable sort of N owners. The owners suffice as keys, because positions ascend with bags.
    """
    size, num_bags = rows.shape[0], offsets.shape[0] - 1
    narrow = torch.uint8 if num_shards < 255 else torch.int16 if num_shards < 2**15 - 1 else torch.int64
    owners = torch.empty(size, dtype=narrow, device=rows.device)
    lengths = torch.zeros(num_shards * num_bags, dtype=torch.int64, device=rows.device)
    rows, offsets, grid = rows.contiguous(), offsets.contiguous(), (on.cdiv(size, on.BLOCK),)
    on.launch(
        _owners,
        grid,
        rows,
        offsets,
        owners,
        lengths,
        size,
        num_bags,
        num_shards,
        block,
        on.steps(num_bags + 1),
        LANES=on.BLOCK,
    )
    owners, order = torch.sort(owners, stable=True)
    out, positions = torch.empty_like(rows), torch.empty(size, dtype=torch.int64, device=rows.device)
    scale = rows if weights is None else weights.contiguous()
    out_scale = scale.new_empty(0 if weights is None else size, dtype=torch.float32 if weights is None else None)
    on.launch(
        _to_owners, grid, rows, owners, order, scale, out, out if weights is None else out_scale, positions, size,
        num_shards,
        block, WEIGHTED=weights is not None, LANES=on.BLOCK,
    )  # fmt: skip
    return out, lengths, out_scale, positions


@kernel()
def _owners(rows, offsets, owners, lengths, size, num_bags, num_shards, block, steps, LANES: tl.constexpr):
    """Write the owner of each id (num_shards for none), and add each id to the count of its (shard, bag).

    The counts are integers, so any order of additions gives the same counts.
    """
    i = lanes(LANES)
    bag = upper_bound(offsets, i * 0, i * 0 + num_bags + 1, i, steps) - 1
    inside = (i < size) & (bag >= 0) & (bag < num_bags)
    begin, length = bag_bounds(offsets, bag, inside, size, 0)
    inside = inside & (i >= begin) & (i < begin + length)
    row = tl.load(rows + i, mask=inside, other=-1).to(tl.int64)
    inside = inside & (row >= 0) & (row // block < num_shards)
    owner = tl.where(inside, row // block, num_shards)
    tl.store(owners + i, owner, mask=i < size)
    tl.atomic_add(
        lengths + owner * num_bags + bag, (i * 0 + 1).to(lengths.dtype.element_ty), mask=inside, sem="relaxed"
    )


@kernel()
def _to_owners(
    rows, owners, order, weights, out, out_weights, positions, size, num_shards, block, WEIGHTED: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    i = lanes(LANES)
    stored = i < size
    owner = tl.load(owners + i, mask=stored, other=0).to(tl.int64)
    source = tl.load(order + i, mask=stored, other=0)
    owned = stored & (owner < num_shards)
    row = tl.load(rows + source, mask=owned, other=0).to(tl.int64)
    tl.store(out + i, tl.where(owned, row - owner * block, 0), mask=stored)
    tl.store(positions + source, tl.where(owned, i, -1), mask=stored)
    if WEIGHTED:
        tl.store(out_weights + i, tl.load(weights + source, mask=owned, other=0), mask=stored)


def to_padded(values: Tensor, offsets: Tensor, max_length: int, fill: float | int) -> Tensor:
    """Return the bags, cut to L = max_length and filled up with `fill`, [B, L, ...]."""
    num_bags, dim = offsets.shape[0] - 1, math.prod(values.shape[1:])
    out = torch.empty(num_bags, max_length, *values.shape[1:], dtype=values.dtype, device=values.device)
    size, t = num_bags * max_length, on.tile(dim)
    filling = torch.full((1,), fill, dtype=values.dtype, device=values.device)
    on.launch(
        _to_padded, (t.over(size), on.cdiv(dim, t.columns)), values.contiguous(), values.shape[0], offsets.contiguous(),
        out, size, max_length, dim, filling, TILE_ROWS=t.rows, TILE_COLUMNS=t.columns, num_warps=t.num_warps,
    )  # fmt: skip
    return out


@kernel()
def _to_padded(
    values,
    num_values,
    offsets,
    out,
    size,
    max_length,
    dim,
    filling,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    place = lanes(TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    bag, nth = place // max_length, place % max_length
    begin, length = bag_bounds(offsets, bag, place < size, num_values, 0)
    written = (place < size)[:, None] & (column < dim)[None, :]
    read = written & (nth < length)[:, None]
    x = tl.load(values + (begin + nth)[:, None] * dim + column[None, :], mask=read, other=0)
    x = tl.where((nth < length)[:, None], x, tl.load(filling))
    tl.store(out + place[:, None] * dim + column[None, :], x, mask=written)


def from_padded(padded: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """Return the transpose of to_padded, [capacity, ...], in which place p of bag b is padded[b, p].

    Places from L on in a bag, and places after the last bag, are zeros.
    """
    num_bags, max_length, *trailing = padded.shape
    dim = math.prod(trailing)
    out = torch.empty(capacity, *trailing, dtype=padded.dtype, device=padded.device)
    t = on.tile(dim)
    on.launch(
        _from_padded, (t.over(capacity), on.cdiv(dim, t.columns)), padded.contiguous(), offsets.contiguous(), num_bags,
        out, capacity, max_length, dim, on.steps(num_bags + 1), TILE_ROWS=t.rows, TILE_COLUMNS=t.columns,
        num_warps=t.num_warps,
    )  # fmt: skip
    return out


@kernel()
def _from_padded(
    padded,
    offsets,
    num_bags,
    out,
    capacity,
    max_length,
    dim,
    steps,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    place = lanes(TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    bag = upper_bound(offsets, place * 0, place * 0 + num_bags + 1, place, steps) - 1
    inside = (place < capacity) & (bag >= 0) & (bag < num_bags)
    begin, length = bag_bounds(offsets, bag, inside, capacity, 0)
    nth = place - begin
    read = inside & (nth >= 0) & (nth < length) & (nth < max_length)
    written = (place < capacity)[:, None] & (column < dim)[None, :]
    at = padded + (bag * max_length + nth)[:, None] * dim + column[None, :]
    tl.store(
        out + place[:, None] * dim + column[None, :], tl.load(at, mask=written & read[:, None], other=0), mask=written
    )
