"""Lookups of quantised tables u8[R, S] (forms.row_bytes), and of tables of 16- and 32-bit floats beside them.

    x = code · scale + bias

A product of a code and a scale is exact in f32, so a number is rounded once, and has the bits of the reference.
Shapes: B bags, N ids, R rows, D dim, S bytes.
"""

from collections.abc import Sequence

import torch
import triton.language as tl
from funcrec.kernels.forms import CODE_BITS, check_coded, check_tables
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.device import decoded, kernel, lanes
from funcrec.kernels.triton.lookup import check_bags, forms_of, gather_rows, plan_of, run_pool
from torch import Tensor


def quantized_lookup(
    tables: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: Sequence[int],
    num_bags: int,
    bits: Sequence[int],
    dims: Sequence[int],
) -> Tensor:
    """Return the pooled numbers of the rows, f32[B, C]. Terms of a bag are added in order, as in `pooled_lookup`.

    Cost: reads N rows of S bytes, N ids and B offsets per feature, and writes B · C numbers.
    """
    check_tables("quantized_lookup", tables, bits, dims)
    on.check_tables("funcrec.kernels.triton.quantized_lookup", tables)
    rows, offsets = on.contiguous(rows), offsets.contiguous()
    weights = weights if weights is None else weights.contiguous()
    check_bags(features, offsets, num_bags)
    codes = tuple(zip(bits, dims, strict=True))
    plan = plan_of(tuple(features), num_bags, 1, forms_of(tables), tuple(r.dtype for r in rows), codes)
    return run_pool(plan, tables, rows, offsets, weights, num_bags)


def quantized_rows(table: Tensor, rows: Tensor, bits: int, dim: int) -> Tensor:
    """Return the numbers of the rows, f32[N, D], with zeros for rows outside the table."""
    check_coded("quantized_rows", table, bits, dim)
    if bits not in CODE_BITS:
        return gather_rows(table, rows)
    on.check_tables("funcrec.kernels.triton.quantized_rows", [table])
    rows, size = rows.contiguous(), rows.shape[0]
    out, t = torch.empty(size, dim, dtype=torch.float32, device=table.device), on.tile(dim)
    on.launch(
        _decode, (t.over(size), on.cdiv(dim, t.columns)), out, table, rows, size, table.shape[0], BITS=bits, DIM=dim,
        ROW_BYTES=table.shape[1], TILE_ROWS=t.rows, TILE_COLUMNS=t.columns, num_warps=t.num_warps,
    )  # fmt: skip
    return out


@kernel()
def _decode(
    out, table, rows, size, num_rows, BITS: tl.constexpr, DIM: tl.constexpr, ROW_BYTES: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    i = lanes(TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    written = (i < size)[:, None] & (column < DIM)[None, :]
    row = tl.load(rows + i, mask=i < size, other=-1).to(tl.int64)
    read = (row >= 0) & (row < num_rows)
    x = decoded(table.to(tl.int64) + row * ROW_BYTES, column, written & read[:, None], BITS)
    tl.store(out + i[:, None] * DIM + column[None, :], x, mask=written)
