"""Lookups of quantised tables u8[R, S] (forms.row_bytes), and of tables of 16- and 32-bit floats beside them.

    x = code · scale + bias        code = round((x - bias) / scale), as `reference_quantized` defines it

A product of a code and a scale is exact in f32, so a number is rounded once. Numbers and codes have the bits of the
reference.
Shapes: B bags, N ids, R rows, D dim, S bytes.
"""

from collections.abc import Sequence

import torch
import triton.language as tl
from funcrec.kernels.forms import CODE_BITS, HEAD_BYTES, check_codable, check_coded, check_tables, row_bytes
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.device import GAMMA, constexpr, decoded, divide, jit, kernel, lanes, larger, mix, smaller
from funcrec.kernels.triton.lookup import check_bags, forms_of, gather_rows, plan_of, run_pool
from torch import Tensor

FIRST = tl.constexpr(HEAD_BYTES)


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


def quantize_rows(table: Tensor, bits: int, key: Tensor | None = None) -> Tensor:
    """Return the quantised rows of f[R, D], u8[R, S]. The table may have any strides.

    key: i64[], or i64[R] with a key for each row.

    Cost: reads each number twice, the second time from a cache if a row fits, and writes R · S bytes.
    """
    check_codable(table, bits, key)
    (num_rows, dim), row_size = table.shape, row_bytes(bits, table.shape[1])
    out, t = torch.empty(num_rows, row_size, dtype=torch.uint8, device=table.device), on.tile(dim)
    own_keys = key is not None and key.dim() == 1
    key = torch.empty(0, dtype=torch.int64) if key is None else key.contiguous()
    is_random = key.numel() > 0
    on.launch(
        _encode, (t.over(num_rows),), table, out, key.to(table.device), num_rows, *table.stride(), BITS=bits, DIM=dim,
        RANDOM=is_random, OWN_KEYS=own_keys, ROW_BYTES=row_size, TILE_ROWS=t.rows, TILE_COLUMNS=t.columns,
        num_warps=t.num_warps,
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


@kernel()
def _encode(
    table, out, key, num_rows, row_step, column_step, BITS: constexpr, DIM: tl.constexpr, RANDOM: tl.constexpr,
    OWN_KEYS: tl.constexpr, ROW_BYTES: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 8 // BITS  # codes of a byte
    TILE_BYTES: tl.constexpr = TILE_COLUMNS // EACH if TILE_COLUMNS > EACH else 1  # pyright: ignore
    MOST: tl.constexpr = (1 << BITS) - 1
    row = lanes(TILE_ROWS)
    inside = row < num_rows
    first = table + row[:, None] * row_step
    low, high, lost = extent(first, inside, column_step, DIM, TILE_ROWS, TILE_COLUMNS)
    bias = half_bits(low, True, RANDOM)
    scale = half_bits(divide(high - float_of(bias), tl.full(high.shape, MOST, tl.float32)), False, RANDOM)
    scale = tl.where((scale & 0x7FFF) == 0, 0x3C00, scale)  # 1
    lost = lost | ((bias & 0x7C00) == 0x7C00) | ((scale & 0x7C00) == 0x7C00)
    bias_of, scale_of = float_of(bias)[:, None], float_of(scale)[:, None]
    to = out + row * ROW_BYTES
    store_half(to, tl.where(lost, 0x7E00, scale), inside)
    store_half(to + 2, tl.where(lost, 0x7E00, bias), inside)
    for at in range(0, ROW_BYTES - FIRST, TILE_BYTES):
        byte = at + tl.arange(0, TILE_BYTES).to(tl.int64)
        codes = tl.full((TILE_ROWS, TILE_BYTES), 0, tl.int32)
        for k in tl.static_range(EACH):  # pyright: ignore[reportGeneralTypeIssues]  # Triton unrolls it
            column = byte * EACH + k
            read = inside[:, None] & (column < DIM)[None, :]
            place = tl.load(first + column[None, :] * column_step, mask=read, other=0).to(tl.float32) - bias_of
            if RANDOM:
                x = at_random(cut(divide(place, scale_of + place * 0), MOST), key, row, column, inside, DIM, OWN_KEYS)
            else:
                x = place * divide(1.0, scale_of)
            # Cut before the rounding, which uses the last place of a large number: to nearest, ties to even.
            code = (cut(x, MOST) + 12582912.0).to(tl.int32, bitcast=True) & MOST
            codes |= tl.where(read & (lost == 0)[:, None], code, 0) << (k * BITS)
        written = inside[:, None] & (byte < ROW_BYTES - FIRST)[None, :]
        tl.store(to[:, None] + FIRST + byte[None, :], codes.to(tl.uint8), mask=written)


@jit
def extent(first, inside, step, DIM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Return (least, greatest) of each row, f32[rows], without -0 for the least, and whether it holds NaN or inf."""
    low = tl.full((TILE_ROWS, TILE_COLUMNS), float("inf"), tl.float32)
    high, lost = -low, tl.full((TILE_ROWS, TILE_COLUMNS), 0, tl.int32)
    for at in range(0, DIM, TILE_COLUMNS):
        column = at + tl.arange(0, TILE_COLUMNS).to(tl.int64)
        read = inside[:, None] & (column < DIM)[None, :]
        x = tl.load(first + column[None, :] * step, mask=read, other=0).to(tl.float32)
        is_wild = (x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
        lost |= (is_wild & read).to(tl.int32)
        x = tl.where(is_wild, 0.0, x)
        low, high = tl.where(read, tl.minimum(low, x), low), tl.where(read, tl.maximum(high, x), high)
    least, most = tl.reduce(low, 1, smaller), tl.reduce(high, 1, larger)
    has_some = inside & (DIM > 0)
    least, most = tl.where(has_some, least, 0.0), tl.where(has_some, most, 0.0)
    return tl.where(least == 0, 0.0, least), most, tl.reduce(lost, 1, larger) != 0


@jit
def half_bits(x, DOWN: tl.constexpr, DIRECTED: tl.constexpr):
    """Return the bits of x in f16, i32: of the nearest number, or of the next one below or above x."""
    near = x.to(tl.float16)
    bits, wide = near.to(tl.int16, bitcast=True).to(tl.int32), near.to(tl.float32)
    if DIRECTED:
        beyond = (wide > x if DOWN else wide < x) & ((bits & 0x7C00) != 0x7C00)
        away = tl.where((bits < 0) == DOWN, 1, -1)
        bits = tl.where(beyond, bits + away, bits)
    return bits & 0xFFFF


@jit
def float_of(bits):
    """Return f32 numbers of the bits of f16 numbers, i32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def store_half(to, bits, inside):
    """Store 16 bits, i32, at pointers to bytes that may be odd."""
    tl.store(to, (bits & 0xFF).to(tl.uint8), mask=inside)
    tl.store(to + 1, ((bits >> 8) & 0xFF).to(tl.uint8), mask=inside)


@jit
def cut(x, MOST: tl.constexpr):
    return tl.minimum(tl.maximum(x, 0.0), tl.full(x.shape, MOST, tl.float32))


@jit
def at_random(x, key, row, column, inside, DIM: tl.constexpr, OWN_KEYS: tl.constexpr):
    """Return x f32[rows, columns] >= 0 rounded up with a probability equal to its fraction, else down."""
    counter = (column // 4 + 1)[None, :]
    if OWN_KEYS:
        own = tl.load(key + row, mask=inside, other=0)[:, None]
    else:
        own, counter = tl.load(key), counter + (row * ((DIM + 3) // 4))[:, None]
    bits = (mix(own + counter * GAMMA) >> (16 * (column % 4))[None, :]) & 0xFFFF
    whole = x.to(tl.int32).to(tl.float32)
    return whole + ((bits.to(tl.float32) + 0.5) * (1.0 / 65536) < x - whole).to(tl.float32)
