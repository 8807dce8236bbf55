"""Pooled lookup, the gradient of its weights, and reads and writes of rows by row number.

    out[b, f] = Σ_{i in bag (f, b)} s_i · table_f[rows_f[i]]

One program holds a tile of bags × columns and goes through the places 0, 1, ... of all its bags together. Each step
loads one table row per bag, and the program sums every bag in the order of positions. Features of one dim and dtype
share a launch. A small tensor on the device holds the addresses and options of the features.
Shapes: B bags, N ids, K rows to read, R rows of a table, D dim.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from funcrec.kernels.forms import Feature, accumulation_dtype, features_of, in_blocks, width_of
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.device import bag_bounds, divide, kernel, lanes, larger, rounded, rows_at, sum_columns
from torch import Tensor

FIELDS = 10  # numbers per feature in the packed tensor; even, so that each feature begins at a multiple of 16 bytes


def pooled_lookup(
    tables: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: Sequence[int],
    num_bags: int,
    blocks: int = 1,
) -> Tensor:
    """Return the pooled rows, f32|f64[n · B, C / n]. `features` holds 7 integers for each `forms.Feature`.

    Cost: reads N rows, N ids and B offsets per feature, and writes B · C numbers.
    """
    on.check_tables("funcrec.kernels.triton.pooled_lookup", tables)
    rows, offsets, weights = (
        on.contiguous(rows),
        offsets.contiguous(),
        weights if weights is None else weights.contiguous(),
    )
    parts = checked_features(features, offsets, num_bags)
    used = [tables[f.table].dtype for f in parts]
    dtype = torch.float64 if torch.float64 in used else torch.float32
    width = width_of(parts, tables)
    out = torch.empty(blocks * num_bags, width // blocks, dtype=dtype, device=offsets.device)
    groups: dict = {}
    for f in features_of(in_blocks(features, num_bags, width, blocks)):
        table = tables[f.table]
        groups.setdefault((table.dtype, table.shape[1], rows[f.rows].dtype), []).append(f)
    run_groups(_pool, groups, tables, rows, offsets, weights, weights, out, out.stride(0), num_bags)
    return out


def pooled_lookup_weights(
    d_out: Tensor,
    tables: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Tensor,
    weights: Tensor,
    features: Sequence[int],
) -> Tensor:
    """Return the gradient of the weights, f[N] in the dtype of the weights.

    It is d_weights[i] = Σ ⟨table[row_i], d_out[b]⟩ over the weighted features that read id i. Features that read the
    same positions run one after the other, in order.
    """
    on.check_tables("funcrec.kernels.triton.pooled_lookup_weights", tables)
    rows, offsets = on.contiguous(rows), offsets.contiguous()
    num_bags = d_out.shape[0]
    parts = [f for f in checked_features(features, offsets, num_bags) if f.weighted]
    used = [tables[f.table].dtype for f in parts]
    dtype = torch.float64 if torch.float64 in used else torch.float32
    out = torch.zeros(weights.shape[0], dtype=dtype, device=weights.device)
    d_out = on.with_rows(d_out, dtype)
    waves: dict = {}
    taken: list[tuple[int, int, int]] = []  # (first bag, end of the bags, wave) of each feature so far
    for f in parts:
        table, end = tables[f.table], f.first_bag + num_bags
        wave = 1 + max((w for a, b, w in taken if f.first_bag < b and a < end), default=-1)
        taken.append((f.first_bag, end, wave))
        waves.setdefault(wave, {}).setdefault((table.dtype, table.shape[1], rows[f.rows].dtype), []).append(f)
    for wave in sorted(waves):
        run_groups(
            _pool_weights, waves[wave], tables, rows, offsets, weights, d_out, out, d_out.stride(0), num_bags,
            whole_rows=True
        )  # fmt: skip
    return out.to(weights.dtype)


def checked_features(features: Sequence[int], offsets: Tensor, num_bags: int) -> list[Feature]:
    """Return the features. Raise if the bags of a feature end after the last offset."""
    parts = features_of(features)
    last = max((f.first_bag for f in parts), default=-1) + num_bags
    if parts and num_bags and last >= offsets.shape[0]:
        got = f"offsets i[{offsets.shape[0]}]; a feature's bags end at offsets[{last}]"
        on.fail(
            "the offsets do not reach the last bag.", got, f"{last + 1} offsets", "first_bag + num_bags + 1 offsets"
        )
    return parts


def run_groups(
    kernel, groups, tables, rows, offsets, weights, other, out, stride, num_bags, *, whole_rows=False
) -> None:
    """Launch the kernel once for each group of features.

    other: the float argument of the kernel. stride: the distance between the rows of [B, C].
    """
    numbers = []
    for f in (f for group in groups.values() for f in group):
        table, ids = tables[f.table], rows[f.rows]
        num_ids = min(ids.shape[0], weights.shape[0]) if f.weighted else ids.shape[0]
        numbers += [table.data_ptr(), table.shape[0], ids.data_ptr(), num_ids, *f[2:], 0]
    if not num_bags or not numbers:
        return
    packed, at = on.pack(numbers, offsets.device), 0
    for (dtype, dim, ids_dtype), group in groups.items():
        t = on.tile(dim, whole_rows=whole_rows)
        weighted = any(f.weighted for f in group)
        on.launch(
            kernel, (t.over(num_bags), len(group), 1 if whole_rows else on.cdiv(dim, t.columns)), packed[at:], offsets,
            other if weighted else out, out, num_bags, stride, TABLE=on.DTYPES[dtype], ROWS=on.DTYPES[ids_dtype],
            ACC=on.DTYPES[accumulation_dtype(dtype)], WEIGHTED=weighted, DIM=dim, TILE_ROWS=t.rows,
            TILE_COLUMNS=t.columns, FIELDS=FIELDS, num_warps=t.num_warps,
            ALIGN=on.alignment([dim * dtype.itemsize, *(tables[f.table].data_ptr() for f in group)]),
        )  # fmt: skip
        at += FIELDS * len(group)


@triton.jit
def feature_at(packed, ROWS: tl.constexpr, FIELDS: tl.constexpr):
    """Return the numbers that `run_groups` packed for this program's feature."""
    field = packed + tl.program_id(1) * FIELDS
    ids = tl.load(field + 2).to(tl.pointer_type(ROWS))
    table, num_rows, num_ids = tl.load(field), tl.load(field + 1), tl.load(field + 3)
    first_bag, max_length, mean = tl.load(field + 4), tl.load(field + 5), tl.load(field + 6)
    return table, num_rows, ids, num_ids, first_bag, max_length, mean, tl.load(field + 7), tl.load(field + 8)


@kernel()
def _pool(
    packed, offsets, weights, out, num_bags, stride, TABLE: tl.constexpr, ROWS: tl.constexpr,
    ACC: tl.constexpr, WEIGHTED: tl.constexpr, DIM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    table, num_rows, ids, num_ids, first_bag, max_length, mean, weighted, out_column = feature_at(packed, ROWS, FIELDS)
    bag = lanes(TILE_ROWS)
    inside = bag < num_bags
    column = tl.program_id(2) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    has_column = column < DIM
    begin, length = bag_bounds(offsets, first_bag + bag, inside, num_ids, max_length)
    sums = tl.full((TILE_ROWS, TILE_COLUMNS), 0, ACC)
    row = tl.load(ids + begin, mask=length > 0, other=-1).to(tl.int64)
    for place in range(0, tl.reduce(length, 0, larger)):
        following = tl.load(ids + begin + place + 1, mask=place + 1 < length, other=-1).to(tl.int64)
        read = (row >= 0) & (row < num_rows)
        at = rows_at(table, row, DIM, TABLE, ALIGN) + column[None, :]
        x = tl.load(at, mask=read[:, None] & has_column[None, :], other=0).to(ACC)
        if WEIGHTED:
            x = x * tl.load(weights + begin + place, mask=read & (weighted != 0), other=1).to(ACC)[:, None]
        sums += x
        row = following
    divisor = tl.where(mean != 0, tl.maximum(length, 1), 1).to(ACC)
    out_at = out + bag[:, None] * stride + (out_column + column)[None, :]
    tl.store(out_at, divide(sums, divisor[:, None]), mask=inside[:, None] & has_column[None, :])


@kernel()
def _pool_weights(
    packed, offsets, d_out, out, num_bags, stride, TABLE: tl.constexpr, ROWS: tl.constexpr,
    ACC: tl.constexpr, WEIGHTED: tl.constexpr, DIM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    table, num_rows, ids, num_ids, first_bag, max_length, mean, _weighted, d_column = feature_at(packed, ROWS, FIELDS)
    bag = lanes(TILE_ROWS)
    inside = bag < num_bags
    column = tl.arange(0, TILE_COLUMNS).to(tl.int64)
    has_column = column < DIM
    begin, length = bag_bounds(offsets, first_bag + bag, inside, num_ids, max_length)
    d_at = d_out + bag[:, None] * stride + (d_column + column)[None, :]
    d = tl.load(d_at, mask=inside[:, None] & has_column[None, :], other=0).to(ACC)
    divisor = tl.where(mean != 0, tl.maximum(length, 1), 1).to(ACC)
    for place in range(0, tl.reduce(length, 0, larger)):
        row = tl.load(ids + begin + place, mask=place < length, other=-1).to(tl.int64)
        read = (row >= 0) & (row < num_rows)
        at = rows_at(table, row, DIM, TABLE, ALIGN) + column[None, :]
        x = tl.load(at, mask=read[:, None] & has_column[None, :], other=0).to(ACC)
        product = divide(sum_columns(x * d), divisor)
        here = out + begin + place
        tl.store(here, tl.load(here, mask=read, other=0) + product, mask=read)


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Return table[rows], f32|f64[K, D], with zeros for rows outside the table."""
    on.check_tables("funcrec.kernels.triton.gather_rows", [table])
    dim, size = table.shape[1], rows.shape[0]
    out = torch.empty(size, dim, dtype=accumulation_dtype(table.dtype), device=table.device)
    t, rows = on.tile(dim), rows.contiguous()
    on.launch(
        _gather, (t.over(size), on.cdiv(dim, t.columns)), out, table, rows, size, table.shape[0],
        DIM=dim, TILE_ROWS=t.rows, TILE_COLUMNS=t.columns, num_warps=t.num_warps,
    )  # fmt: skip
    return out


@kernel()
def _gather(out, table, rows, size, num_rows, DIM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    i = lanes(TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    written = (i < size)[:, None] & (column < DIM)[None, :]
    row = tl.load(rows + i, mask=i < size, other=-1).to(tl.int64)
    read = (row >= 0) & (row < num_rows)
    x = tl.load(table + row[:, None] * DIM + column[None, :], mask=written & read[:, None], other=0)
    tl.store(out + i[:, None] * DIM + column[None, :], x.to(out.dtype.element_ty), mask=written)


def scatter_rows_(table: Tensor, rows: Tensor, count: Tensor, new: Tensor) -> None:
    """Write table[rows[i]] = new[i], rounded to nearest, for i < count, except for rows outside the table."""
    on.check_tables("funcrec.kernels.triton.scatter_rows_", [table])
    dim, size = table.shape[1], rows.shape[0]
    t, new = on.tile(dim), on.with_rows(new, accumulation_dtype(table.dtype))
    on.launch(
        _scatter, (t.over(size), on.cdiv(dim, t.columns)), table, rows.contiguous(), count, new, new.stride(0), size,
        table.shape[0], DIM=dim, TILE_ROWS=t.rows, TILE_COLUMNS=t.columns, num_warps=t.num_warps,
    )  # fmt: skip


@kernel()
def _scatter(
    table, rows, count, new, stride, size, num_rows, DIM: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    i = lanes(TILE_ROWS)
    counted = (i < size) & (i < tl.load(count))
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    row = tl.load(rows + i, mask=counted, other=-1).to(tl.int64)
    written = ((row >= 0) & (row < num_rows))[:, None] & (column < DIM)[None, :]
    x = tl.load(new + i[:, None] * stride + column[None, :], mask=written, other=0)
    tl.store(table + row[:, None] * DIM + column[None, :], rounded(x, table.dtype.element_ty), mask=written)
