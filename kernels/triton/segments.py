"""Write out the cotangents of tables as entries, or as one gradient per distinct row.

The dtype of a cotangent d shows whether the table is f64: the result is f64 if d is, else f32.
Shapes: K entries, R rows, D dim, T tables.
"""

from collections.abc import Sequence

import torch
import triton.language as tl
from funcrec.kernels.forms import Segment, accumulation_dtype, capacities, capacity_of, segments_of
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.device import bag_bounds, divide, kernel, lanes
from funcrec.kernels.triton.group import (
    CHUNK,
    Groups,
    align_of,
    check_segments,
    chunk_sums,
    group_entries,
    kind_of,
    locate,
    sum_entries,
)
from torch import Tensor


def expand(
    d: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Sequence[Tensor],
    weights: Sequence[Tensor],
    segments: Sequence[int],
    shapes: Sequence[int],
) -> list[Tensor]:
    """Return (rows i64[K], grads f[K, D]), the entries of each table in order. Empty places have row -1 and zeros."""
    rows, offsets, weights = on.contiguous(rows), on.contiguous(offsets), on.contiguous(weights)
    parts, out = segments_of(segments), []
    check_segments(parts, d, rows, offsets, weights)
    for t, (num_rows, dim) in enumerate(zip(shapes[::2], shapes[1::2], strict=True)):
        mine = [s for s in parts if s.table == t]
        sizes = [capacity_of(s, rows[s.rows].shape[0]) for s in mine]
        out_rows = torch.empty(sum(sizes), dtype=torch.int64, device=rows_device(rows, d))
        grads = torch.empty(sum(sizes), dim, dtype=dtype_of(mine, d), device=out_rows.device)
        at = 0
        for s, size in zip(mine, sizes, strict=True):
            _expand_segment(s, d, rows, offsets, weights, num_rows, out_rows[at : at + size], grads[at : at + size])
            at += size
        out += [out_rows, grads]
    return out


def rows_device(rows: Sequence[Tensor], d: Sequence[Tensor]) -> torch.device:
    return (rows[0] if rows else d[0] if d else torch.empty(0)).device


def dtype_of(parts: Sequence[Segment], d: Sequence[Tensor]) -> torch.dtype:
    used = [d[s.d] for s in parts] or list(d[:1])
    return torch.float64 if any(accumulation_dtype(x.dtype) == torch.float64 for x in used) else torch.float32


def _expand_segment(s: Segment, d, rows, offsets, weights, num_rows: int, out_rows: Tensor, grads: Tensor) -> None:
    ids, x = rows[s.rows], on.with_rows(d[s.d], grads.dtype)
    bounds = offsets[s.offsets] if s.offsets >= 0 else ids
    scale = weights[s.weights] if s.weights >= 0 else ids
    size, dim = grads.shape
    t = on.tile(dim)
    on.launch(
        _expand, (t.over(size), on.cdiv(dim, t.columns)), out_rows, grads, x[:, s.column :], x.stride(0), ids,
        min(ids.shape[0], scale.shape[0]), bounds, scale, size, num_rows, s.first_bag, s.num_bags, s.max_length,
        int(s.mean),
        on.steps(bounds.shape[0]), KIND=kind_of(s, ids.shape[0]), WEIGHTED=s.weights >= 0, DIM=dim, TILE_ROWS=t.rows,
        TILE_COLUMNS=t.columns, num_warps=t.num_warps,
    )  # fmt: skip


@kernel()
def _expand(
    out_rows, grads, d, stride, rows, num_ids, offsets, weights, size, num_rows, first_bag, num_bags, max_length, mean,
    steps, KIND: tl.constexpr, WEIGHTED: tl.constexpr, DIM: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    place = lanes(TILE_ROWS)
    behind = first_bag + num_bags
    bag, position = locate(place, offsets, first_bag, behind, num_bags, max_length, num_ids, steps, KIND)
    valid = (place < size) & (bag >= 0) & (bag < num_bags)
    if KIND != 0:
        begin, length = bag_bounds(offsets, first_bag + bag, valid, num_ids, max_length)
        valid = valid & (position - begin < length)
    row = tl.load(rows + position, mask=valid, other=-1).to(tl.int64)
    valid = valid & (row >= 0) & (row < num_rows)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    written = (place < size)[:, None] & (column < DIM)[None, :]
    x = tl.load(d + bag[:, None] * stride + column[None, :], mask=written & valid[:, None], other=0)
    ACC: tl.constexpr = grads.dtype.element_ty
    scale = tl.full((TILE_ROWS,), 1, ACC)
    if WEIGHTED:
        scale = tl.load(weights + position, mask=valid, other=1).to(ACC)
    if KIND != 0:
        scale = divide(scale, tl.where(mean != 0, tl.maximum(length, 1), 1).to(ACC))
    tl.store(grads + place[:, None] * DIM + column[None, :], x * scale[:, None], mask=written)
    if tl.program_id(1) == 0:
        tl.store(out_rows + place, tl.where(valid, row, -1), mask=place < size)


def coalesce(
    d: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Sequence[Tensor],
    weights: Sequence[Tensor],
    segments: Sequence[int],
    shapes: Sequence[int],
) -> list[Tensor]:
    """Return (rows i64[K'] ascending, grads f[K', D], count i64[], repeats i64[K']) of each table.

    Places from `count` on are padding. One sort serves all tables of one dtype.
    """
    rows, offsets, weights = on.contiguous(rows), on.contiguous(offsets), on.contiguous(weights)
    parts, sizes = segments_of(segments), list(shapes[::2])
    device = rows_device(rows, d)
    dtypes = [dtype_of([s for s in parts if s.table == t], d) for t in range(len(sizes))]
    groups = {}
    for dtype in set(dtypes):
        mine = [s for s in parts if dtypes[s.table] == dtype]
        x = [on.with_rows(each, dtype) for each in d]
        groups[dtype] = group_entries(mine, x, rows, offsets, weights, sizes, dtype)
    out, most = [], capacities(parts, rows, len(sizes))
    for t, (num_rows, dim) in enumerate(zip(sizes, shapes[1::2], strict=True)):
        out += _coalesce_table(groups[dtypes[t]], t, min(most[t], num_rows), dim, dtypes[t], device)
    return out


def _coalesce_table(g: Groups | None, t: int, size: int, dim: int, dtype: torch.dtype, device) -> list[Tensor]:
    new = lambda *shape, dtype=torch.int64: torch.empty(*shape, dtype=dtype, device=device)
    rows, grads, repeats = new(size), new(size, dim, dtype=dtype), new(size)
    if g is None or size == 0:
        return [rows.fill_(-1), grads.zero_(), torch.zeros((), dtype=torch.int64, device=device), repeats.zero_()]
    chunks = chunk_sums(g, g.bases[t], g.bases[t + 1], dim, dtype)
    shape = on.tile(dim)
    on.launch(
        _coalesce, (shape.over(size), on.cdiv(dim, shape.columns)), rows, grads, repeats, size, g.keys, g.addresses,
        grads if g.scales is None else g.scales, g.starts, g.firsts[t:], g.packed[t:], chunks,
        SCALED=g.scales is not None,
        DIM=dim, CHUNK=CHUNK, TILE_ROWS=shape.rows, TILE_COLUMNS=shape.columns, ALIGN=align_of(g, dim, dtype),
        num_warps=shape.num_warps,
    )  # fmt: skip
    return [rows, grads, g.firsts[t + 1] - g.firsts[t], repeats]


@kernel()
def _coalesce(
    rows, grads, repeats, size, keys, addresses, scales, starts, firsts, bases, chunks, SCALED: tl.constexpr,
    DIM: tl.constexpr, CHUNK: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    i = lanes(TILE_ROWS)
    u = tl.load(firsts) + i
    counted = (i < size) & (u < tl.load(firsts + 1))
    start = tl.load(starts + u, mask=counted, other=0)
    length = tl.load(starts + u + 1, mask=counted, other=0) - start
    row = tl.load(keys + start, mask=counted, other=0).to(tl.int64) - tl.load(bases)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    sums = sum_entries(
        addresses, scales, chunks, start, length, column, SCALED, DIM, CHUNK, TILE_ROWS, TILE_COLUMNS, ALIGN
    )
    tl.store(grads + i[:, None] * DIM + column[None, :], sums, mask=(i < size)[:, None] & (column < DIM)[None, :])
    if tl.program_id(1) == 0:
        tl.store(rows + i, tl.where(counted, row, -1), mask=i < size)
        tl.store(repeats + i, length, mask=i < size)
