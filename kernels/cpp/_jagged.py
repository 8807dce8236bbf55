"""Operations on jagged buffers in C++ (csrc/jagged.h), which move elements of any dtype and trailing shape as bytes."""

import torch
from funcrec.kernels.cpp._native import bounds, call, empty, fail, ints, matrix
from funcrec.kernels.forms import accumulation_dtype
from torch import Tensor


def take_ranges(values: Tensor, starts: Tensor, lengths: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return (values [C, ...], offsets i64[B + 1]): the ranges values[starts[b] : starts[b] + lengths[b]] end to end.

    Zeros follow the last range.
    """
    values, starts, lengths = values.contiguous(), starts.contiguous(), lengths.contiguous()
    _same("take_ranges", "lengths", lengths.shape[:1], starts.shape[:1])
    described = (*ints(starts), *ints(lengths))
    out = empty((capacity, *values.shape[1:]), values.dtype)
    offsets = torch.empty(lengths.shape[0] + 1, dtype=torch.int64)
    call(
        "take_ranges",
        [values.data_ptr(), values.shape[0], _bytes(values), *described, out.data_ptr(), capacity, offsets.data_ptr()],
    )  # fmt: skip
    return out, offsets


def take_ranges_transpose(d: Tensor, starts: Tensor, lengths: Tensor, num_values: int) -> Tensor:
    """Return the sums of the cotangents of the ranges that hold each position, in order, [num_values, ...]."""
    if not d.is_floating_point():
        raise TypeError(
            f"funcrec.kernels.cpp.take_ranges_transpose: the cotangents cannot be summed.\n  got   {d.dtype}\n"
            "  need  f16, bf16, f32 or f64"
        )
    wide, starts, lengths = d.to(accumulation_dtype(d.dtype)).contiguous(), starts.contiguous(), lengths.contiguous()
    _same("take_ranges_transpose", "lengths", lengths.shape[:1], starts.shape[:1])
    described = (*ints(starts), *ints(lengths))
    out = empty((num_values, *d.shape[1:]), wide.dtype)
    call(
        "take_ranges_transpose",
        [*matrix(wide.flatten(1) if d.dim() > 1 else wide[:, None]), *described, out.data_ptr(), num_values],
    )
    return out.to(d.dtype)


def to_padded(values: Tensor, offsets: Tensor, max_length: int, fill: float | int) -> Tensor:
    """Return the bags, cut to L = max_length and filled up with `fill`, [B, L, ...]."""
    values, offsets = values.contiguous(), offsets.contiguous()
    described = bounds(offsets)
    out = empty((offsets.shape[0] - 1, max_length, *values.shape[1:]), values.dtype)
    one = torch.full(values.shape[1:], fill, dtype=values.dtype)
    call(
        "to_padded",
        [values.data_ptr(), values.shape[0], _bytes(values), *described, max_length, one.data_ptr(), out.data_ptr()],
    )
    return out


def from_padded(padded: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """Return the transpose of `to_padded`: the places of [B, L, ...] inside their bags, end to end, [C, ...]."""
    padded, offsets = padded.contiguous(), offsets.contiguous()
    described = bounds(offsets)
    _same("from_padded", "offsets", offsets.shape[0] - 1, padded.shape[0])
    out = empty((capacity, *padded.shape[2:]), padded.dtype)
    call("from_padded", [padded.data_ptr(), padded.shape[1], _bytes(padded, 2), *described, out.data_ptr(), capacity])
    return out


def bucketize(
    rows: Tensor, offsets: Tensor, weights: Tensor | None, num_shards: int, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids as rows of the shard row // block, grouped by (shard, bag).

    Returns:
      rows i[N], lengths i64[S * B], weights f[N] (f32[0] without weights), and positions i64[N], each id's new
        position, or -1.
    """
    if block < 1:
        raise ValueError(f"funcrec.kernels.cpp.bucketize: block is {block}\n  need  at least one row per shard")
    rows, offsets = rows.contiguous(), offsets.contiguous()
    weights = None if weights is None else weights.contiguous()
    described = (*ints(rows), *bounds(offsets))
    _same("bucketize", "weights", rows.shape if weights is None else weights.shape, rows.shape)
    out, positions = torch.empty_like(rows), torch.empty(rows.shape[0], dtype=torch.int64)
    lengths = torch.empty(num_shards * (offsets.shape[0] - 1), dtype=torch.int64)
    moved = torch.empty(0, dtype=torch.float32) if weights is None else torch.empty_like(weights)
    call(
        "bucketize",
        [*described, num_shards, block, out.data_ptr(), 0 if weights is None else weights.data_ptr(),
         moved.itemsize, lengths.data_ptr(), positions.data_ptr(), moved.data_ptr()],
    )  # fmt: skip
    return out, lengths, moved, positions


def owner_blocks(
    ids: Tensor,
    offsets: Tensor,
    lanes: list[int],
    slots: list[int],
    num_bags: int,
    num_ranks: int,
    room: int,
    wide: bool,
    placed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block for each rank, i[n, C + K * B], the number of ids that it owns, i64[n], and id places, i64[N].

    csrc/owners.h describes the three tensors.
    """
    ids, offsets = ids.contiguous(), offsets.contiguous()
    described = (*ints(ids), *bounds(offsets))
    columns = room + len(slots) // max(num_ranks, 1) * num_bags
    blocks = empty((num_ranks, columns), torch.int64 if wide else torch.int32)
    counts = torch.empty(num_ranks, dtype=torch.int64)
    places = torch.empty(ids.shape[0] if placed else 0, dtype=torch.int64)
    call(
        "owner_blocks",
        [*described, len(lanes), *lanes, len(slots), *slots, num_bags, num_ranks, room,
         *matrix(blocks), counts.data_ptr(), placed, places.data_ptr()],
    )  # fmt: skip
    return blocks, counts, places


def _same(call: str, what: str, got: object, need: object) -> None:
    if got != need:
        fail(
            call, f"`{what}` does not match.", f"{what} for {got}", f"{need}", "one for each bag, a weight for each id"
        )


def _bytes(x: Tensor, dims: int = 1) -> int:
    """Return the number of bytes of one position of x, whose first `dims` dimensions count positions."""
    if not x.is_cpu:
        fail("call", "a tensor is on another device.", x.device, "cpu", "x.cpu()", TypeError)
    return x.itemsize * x.shape[dims:].numel()
