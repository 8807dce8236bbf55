"""Pooled lookup, the gradient of its weights, and reads and writes of rows by row number.

    out[b, f] = Σ_{i in bag (f, b)} s_i · table_f[rows_f[i]]

One program holds a tile of bags × columns and goes through the places 0, 1, ... of all its bags together. Each step
loads one table row per bag, and the program sums every bag in the order of positions. Features of one dim and dtype
share a launch. A small tensor on the device holds the addresses and options of the features. All but the addresses
and the numbers of ids stands in a plan, which the next call with the same forms finds again.
Shapes: B bags, N ids, K rows to read, R rows of a table, D dim.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from funcrec.kernels.forms import Feature, accumulation_dtype, features_of, in_blocks
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.device import (
    bag_bounds,
    constexpr,
    decoded,
    divide,
    jit,
    kernel,
    lanes,
    larger,
    rounded,
    rows_at,
    sum_columns,
)
from torch import Tensor

FIELDS = 10  # numbers per feature in the packed tensor; even, so that each feature begins at a multiple of 16 bytes


class Group(NamedTuple):
    """Features of one dim, dtype of table and dtype of ids, which share a launch.

    options: the kernel's constants except the alignment, which the tables' addresses decide.
    """

    tables: tuple[int, ...]
    is_weighted: bool
    tile: on.Tile
    row_bytes: int
    programs: int  # along the columns
    options: dict[str, Any]


class Plan(NamedTuple):
    """A lookup without its tensors.

    numbers: FIELDS for each feature, group after group, with 0 for addresses and numbers of ids.
    sources: (table, buffer of rows, whether weighted) of each feature. shape, dtype: of a pooled output.
    """

    groups: tuple[Group, ...]
    numbers: tuple[int, ...]
    sources: tuple[tuple[int, int, bool], ...]
    shape: tuple[int, int]
    dtype: torch.dtype


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
    rows, offsets = on.contiguous(rows), offsets.contiguous()
    weights = weights if weights is None else weights.contiguous()
    check_bags(features, offsets, num_bags)
    plan = plan_of(tuple(features), num_bags, blocks, forms_of(tables), tuple(r.dtype for r in rows))
    return run_pool(plan, tables, rows, offsets, weights, num_bags)


def run_pool(plan: Plan, tables, rows, offsets: Tensor, weights: Tensor | None, num_bags: int) -> Tensor:
    """Return the pooled rows of contiguous arguments."""
    out = torch.empty(plan.shape, dtype=plan.dtype, device=offsets.device)
    run_plan(_pool, plan, tables, rows, offsets, weights, weights, out, out.stride(0), num_bags)
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
    check_bags(features, offsets, num_bags)
    plans = waves_of(tuple(features), num_bags, forms_of(tables), tuple(r.dtype for r in rows))
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in plans) else torch.float32
    out = torch.zeros(weights.shape[0], dtype=dtype, device=weights.device)
    d_out = on.with_rows(d_out, dtype)
    for plan in plans:
        run_plan(_pool_weights, plan, tables, rows, offsets, weights, d_out, out, d_out.stride(0), num_bags)
    return out.to(weights.dtype)


def check_bags(features: Sequence[int], offsets: Tensor, num_bags: int) -> None:
    """Raise if the bags of a feature end after the last offset."""
    last = max(features[2::7], default=-1) + num_bags
    if features and num_bags and last >= offsets.shape[0]:
        got = f"offsets i[{offsets.shape[0]}]; a feature's bags end at offsets[{last}]"
        on.fail(
            "the offsets do not reach the last bag.", got, f"{last + 1} offsets", "first_bag + num_bags + 1 offsets"
        )


def forms_of(tables: Sequence[Tensor]) -> tuple[tuple[torch.dtype, torch.Size], ...]:
    return tuple((t.dtype, t.shape) for t in tables)


@functools.lru_cache(maxsize=1024)
def plan_of(
    features: tuple[int, ...], num_bags: int, blocks: int, tables: tuple, rows: tuple, codes: tuple = ()
) -> Plan:
    """Return the plan of a pooled lookup.

    tables: (dtype, shape) of each table. rows: the dtype of each buffer of rows. codes: (bits, dim) of each table, of
    which tables of bytes hold codes.
    """
    dims = [dim for _, dim in codes] or [shape[1] for _, shape in tables]
    width = max((f.column + dims[f.table] for f in features_of(features)), default=0)
    parts = features_of(in_blocks(features, num_bags, width, blocks))
    return planned(parts, tables, rows, codes, (blocks * num_bags, width // blocks), whole_rows=False)


@functools.lru_cache(maxsize=1024)
def waves_of(features: tuple[int, ...], num_bags: int, tables: tuple, rows: tuple) -> tuple[Plan, ...]:
    """Return the plans of a gradient of weights, one after the other. No plan reads a position twice."""
    waves: dict[int, list[Feature]] = {}
    taken: list[tuple[int, int, int]] = []  # (first bag, end of the bags, wave) of each feature so far
    for f in features_of(features):
        if not f.weighted:
            continue
        end = f.first_bag + num_bags
        wave = 1 + max((w for a, b, w in taken if f.first_bag < b and a < end), default=-1)
        taken.append((f.first_bag, end, wave))
        waves.setdefault(wave, []).append(f)
    return tuple(planned(waves[w], tables, rows, (), (num_bags, 0), whole_rows=True) for w in sorted(waves))


def planned(
    parts: list[Feature], tables: tuple, rows: tuple, codes: tuple, shape: tuple[int, int], *, whole_rows: bool
) -> Plan:
    """Return a plan of features. With `whole_rows`, one program holds all columns of a row."""
    alike: dict[tuple, list[Feature]] = {}
    for f in parts:
        dtype, size = tables[f.table]
        bits, dim = codes[f.table] if dtype == torch.uint8 else (0, size[1])
        alike.setdefault((dtype, bits, dim, size[1] * dtype.itemsize, rows[f.rows]), []).append(f)
    groups = []
    for (dtype, bits, dim, row_bytes, ids), group in alike.items():
        t, is_weighted = on.tile(dim, whole_rows=whole_rows), any(f.weighted for f in group)
        options = {
            "TABLE": tl.uint8 if bits else on.DTYPES[dtype], "ROWS": on.DTYPES[ids], "WEIGHTED": is_weighted,
            "ACC": tl.float32 if bits else on.DTYPES[accumulation_dtype(dtype)], "DIM": dim, "TILE_ROWS": t.rows,
            "TILE_COLUMNS": t.columns, "FIELDS": FIELDS, "num_warps": t.num_warps,
        } | ({} if whole_rows else {"BITS": bits, "ROW_BYTES": row_bytes})  # fmt: skip
        programs = 1 if whole_rows else on.cdiv(dim, t.columns)
        of_group = tuple(f.table for f in group)
        groups.append(Group(of_group, is_weighted, t, row_bytes, programs, options))
    ordered = [f for group in alike.values() for f in group]
    numbers = tuple(n for f in ordered for n in (0, tables[f.table][1][0], 0, 0, *map(int, f[2:]), 0))
    sources = tuple((f.table, f.rows, f.weighted) for f in ordered)
    dtype = torch.float64 if any(tables[f.table][0] == torch.float64 for f in parts) else torch.float32
    return Plan(tuple(groups), numbers, sources, shape, dtype)


def run_plan(kernel, plan: Plan, tables, rows, offsets, weights, other, out, stride, num_bags) -> None:
    """Launch the kernel once for each group of features.

    other: the float argument of the kernel. stride: the distance between the rows of [B, C].
    """
    if not num_bags or not plan.sources:
        return
    addresses = [t.data_ptr() for t in tables]
    ids = [(r.data_ptr(), r.shape[0]) for r in rows]
    numbers, most = list(plan.numbers), 0 if weights is None else weights.shape[0]
    for at, (table, buffer, weighted) in zip(range(0, len(numbers), FIELDS), plan.sources, strict=True):
        numbers[at], (numbers[at + 2], size) = addresses[table], ids[buffer]
        numbers[at + 3] = min(size, most) if weighted else size
    packed, at = on.pack(numbers, offsets.device), 0
    for g in plan.groups:
        on.launch(
            kernel, (g.tile.over(num_bags), len(g.tables), g.programs), packed[at:], offsets,
            other if g.is_weighted else out, out, num_bags, stride,
            ALIGN=on.alignment([g.row_bytes, *(addresses[t] for t in g.tables)]), **g.options,
        )  # fmt: skip
        at += FIELDS * len(g.tables)


@jit
def feature_at(packed, ROWS: constexpr, FIELDS: constexpr):
    """Return the numbers that `run_plan` packed for this program's feature."""
    field = packed + tl.program_id(1) * FIELDS
    ids = tl.load(field + 2).to(tl.pointer_type(ROWS))
    table, num_rows, num_ids = tl.load(field), tl.load(field + 1), tl.load(field + 3)
    first_bag, max_length, mean = tl.load(field + 4), tl.load(field + 5), tl.load(field + 6)
    return table, num_rows, ids, num_ids, first_bag, max_length, mean, tl.load(field + 7), tl.load(field + 8)


@kernel()
def _pool(
    packed, offsets, weights, out, num_bags, stride, TABLE: tl.constexpr, ROWS: tl.constexpr,
    ACC: tl.constexpr, WEIGHTED: tl.constexpr, DIM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr, FIELDS: tl.constexpr, BITS: tl.constexpr, ROW_BYTES: tl.constexpr,
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
        if BITS == 0:
            at = rows_at(table, row, DIM, TABLE, ALIGN) + column[None, :]
            x = tl.load(at, mask=read[:, None] & has_column[None, :], other=0).to(ACC)
        else:
            x = decoded(table + row * ROW_BYTES, column, read[:, None] & has_column[None, :], BITS)
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
