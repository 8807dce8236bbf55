"""Initial rows of tables: a program draws a tile of numbers, with the reference's bits.

`reference_draws` has the equations. They are +, -, *, / and square roots of f64, which the compiler neither contracts
nor approximates (`launch`). Both branches of Φ⁻¹ are computed for each number.
Shapes: M rows, R rows of a table, D dim, E entries.
"""

import ctypes
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from funcrec.kernels import reference_draws as known
from funcrec.kernels.draws import CONSTANT, GIVEN, NORMAL, UNIFORM, Fresh, fresh_of
from funcrec.kernels.forms import accumulation_dtype
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.device import GAMMA, kernel, lanes, mix, root, rounded, upper_bound
from torch import Tensor

CALL = "funcrec.kernels.triton"
TILE_ROWS, TILE_COLUMNS = 8, 128
MIDDLE_OVER, MIDDLE_UNDER = tl.constexpr(known.MIDDLE_OVER), tl.constexpr(known.MIDDLE_UNDER)
TAIL_OVER, TAIL_UNDER = tl.constexpr(known.TAIL_OVER), tl.constexpr(known.TAIL_UNDER)
LOG_EVEN, LOG_ODD = tl.constexpr(known.LOG_EVEN), tl.constexpr(known.LOG_ODD)
LOG2_HIGH, LOG2_LOW = tl.constexpr(known.LOG2_HIGH), tl.constexpr(known.LOG2_LOW)
HALF_ROOT, ONE, FRACTION = (tl.constexpr(x) for x in (known.HALF_ROOT, known.ONE, known.FRACTION))
IS_UNIFORM, IS_CONSTANT, IS_GIVEN = tl.constexpr(UNIFORM), tl.constexpr(CONSTANT), tl.constexpr(GIVEN)
PLAIN = tl.constexpr(known.PLAIN)
FIELDS = tl.constexpr(12)  # of an entry in the packed numbers, of which these are the places:
TABLE, ROWS, DIM, FIRST, STRIDE, ROW_AT, ID_AT, NUMBER, KEY, SCALE, GIVEN_AT, GIVEN_STEP = (
    tl.constexpr(i) for i in range(12)
)


def initial_rows(key: Tensor, starts: Tensor, dim: int, kind: int, scale: float, dtype: torch.dtype) -> Tensor:
    """Return rows of the elements from `starts` on, [M, D] in `dtype`."""
    if not 0 <= kind < GIVEN or dim < 0:
        need = f"a kind in [0, {GIVEN}), and dim >= 0"
        on.fail("there are no such rows.", f"{kind}, {dim}", need, "see ops", f"{CALL}.initial_rows")
    size, starts = starts.shape[0], starts.contiguous()
    out = torch.empty(size, dim, dtype=dtype, device=starts.device)
    if kind == CONSTANT:
        return out.fill_(ctypes.c_float(scale).value)
    numbers = on.pack([_bits(scale)], starts.device)
    on.launch(
        _initial, (on.cdiv(size, TILE_ROWS), on.cdiv(dim, TILE_COLUMNS)), key, starts, numbers, out, size, dim,
        KIND=kind, TILE_ROWS=TILE_ROWS, TILE_COLUMNS=TILE_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def draw_rows_(
    tables: Sequence[Tensor],
    given: Sequence[Tensor],
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    keys: Tensor,
    fresh: Sequence[int],
    scales: Sequence[float],
) -> None:
    """Write the new rows of each entry of `fresh` to its table. Rows outside of the table are left out."""
    call, entries = f"{CALL}.draw_rows_", fresh_of(list(fresh))
    _check(call, entries, tables, given, rows, ids, counts, keys, scales)
    rows, ids, counts, keys = (x.to(torch.int64).contiguous() for x in (rows, ids, counts, keys))
    given = [x.to(accumulation_dtype(x.dtype)).contiguous() for x in given]
    launches: dict[tuple, list[tuple[Fresh, float]]] = {}
    for f, scale in zip(entries, scales, strict=True):
        own = given[f.given].dtype if f.kind == GIVEN else torch.float32
        launches.setdefault((f.kind, tables[f.table].dtype, own), []).append((f, scale))
    for (kind, dtype, own), mine in launches.items():
        _draw(kind, dtype, own, mine, tables, given, (rows, ids, counts, keys))


def _draw(kind: int, dtype, own, mine: list[tuple[Fresh, float]], tables, given, vectors: tuple[Tensor, ...]) -> None:
    """Write the new rows of entries of one kind, in tables of one dtype, from given rows of the dtype `own`."""
    tiles, numbers, widest = [0], [], 0
    for f, scale in mine:
        table, x = tables[f.table], given[f.given] if kind == GIVEN else None
        tiles.append(tiles[-1] + on.cdiv(f.places, TILE_ROWS))
        widest = max(widest, table.shape[1])
        numbers += [table.data_ptr(), table.shape[0], table.shape[1], f.first, f.dim, f.rows, f.ids, f.number, f.key]
        numbers += [_bits(scale), 0 if x is None else x.data_ptr()]
        numbers.append(0 if x is None or x.shape[0] == 1 else x.shape[1])
    places = [f.places for f, _ in mine]
    packed, n = on.pack([*tiles, *places, *numbers], vectors[0].device), len(mine)
    on.launch(
        _new_rows, (tiles[-1], on.cdiv(widest, TILE_COLUMNS)), packed, packed[n + 1 :], packed[2 * n + 1 :], *vectors,
        n, on.steps(n), KIND=kind, TABLE_DTYPE=on.DTYPES[dtype], GIVEN_DTYPE=on.DTYPES[own], TILE_ROWS=TILE_ROWS,
        TILE_COLUMNS=TILE_COLUMNS, num_warps=4,
    )  # fmt: skip


def _check(call: str, entries: list[Fresh], tables, given, rows, ids, counts, keys, scales) -> None:
    on.check_tables(call, tables)
    if len(entries) != len(scales):
        on.fail("`fresh` does not fit `scales`.", f"{len(entries)}, {len(scales)}", "one scale each", "see ops", call)
    is_in = lambda begin, size, x: begin >= 0 and size >= 0 and begin + size <= len(x)
    for i, f in enumerate(entries):
        fits = 0 <= f.kind <= GIVEN and is_in(f.table, 1, tables) and is_in(f.number, 1, counts)
        fits = fits and is_in(f.rows, f.places, rows)
        if f.kind in (UNIFORM, NORMAL):
            fits = fits and is_in(f.ids, f.places, ids) and is_in(f.key, 1, keys)
        if f.kind == GIVEN and fits:
            columns = tables[f.table].shape[1]
            fits = is_in(f.given, 1, given) and given[f.given].shape in ((1, columns), (f.places, columns))
        if not fits:
            on.fail(
                f"entry {i} does not fit.", f"{f}", "tables, rows, ids, counts and keys that exist", "see ops", call
            )


def _bits(scale: float) -> int:
    """Return the bits of the nearest f32."""
    return int.from_bytes(ctypes.c_float(scale), "little")


# -- device functions --------------------------------------------------------------------------------------------


@triton.jit
def polynomial(x, C: tl.constexpr):
    """Return C[0] + C[1] x + C[2] x² + ..."""
    y = tl.full(x.shape, C.value[len(C.value) - 1], x.dtype)
    for i in tl.static_range(1, len(C.value)):  # pyright: ignore[reportGeneralTypeIssues]  # Triton unrolls it
        y = y * x + C.value[len(C.value) - 1 - i]
    return y


@triton.jit
def log_of(x):
    """Return the logarithm of normal positive numbers f64, as fdlibm does."""
    bits = x.to(tl.int64, bitcast=True) + (ONE - HALF_ROOT)
    k = ((bits >> 52) - 1023).to(tl.float64)
    f = ((bits & FRACTION) + HALF_ROOT).to(tl.float64, bitcast=True) - 1.0
    half, s = 0.5 * f * f, f / (f + 2.0)
    z = s * s
    w = z * z
    rest = polynomial(w, LOG_EVEN) + z * polynomial(w, LOG_ODD)
    return s * (half + rest) + k * LOG2_LOW - half + f + k * LOG2_HIGH


@triton.jit
def quantile(p):
    """Return Φ⁻¹(p), f64."""
    q = p - 0.5
    near = 0.180625 - q * q
    middle = q * polynomial(near, MIDDLE_OVER) / polynomial(near, MIDDLE_UNDER)
    far = root(-log_of(tl.minimum(p, 1.0 - p))) - 1.6
    tail = polynomial(far, TAIL_OVER) / polynomial(far, TAIL_UNDER)
    edge = tl.full(q.shape, 0.425, q.dtype)  # a number that is compared would be rounded to f32
    return tl.where(tl.abs(q) <= edge, middle, tl.where(q < 0, -tail, tail))


@triton.jit
def drawn(key, element, scale, KIND: tl.constexpr):
    """Return the elements of the key's sequence, f32."""
    u = (mix(key + (element + 1) * GAMMA) >> 40) & 0xFFFFFF
    if KIND == IS_UNIFORM:
        return (u.to(tl.float32) * (2.0 / 16777216) - 1.0) * scale
    else:
        p = (u.to(tl.float64) + 0.5) * (1.0 / 16777216)
        return quantile(p).to(tl.float32) * scale


@triton.jit
def f32_of(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@kernel()
def _initial(
    key, starts, numbers, out, size, dim, KIND: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = lanes(TILE_ROWS)
    column = tl.program_id(1).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    start = tl.load(starts + row, mask=row < size, other=0).to(tl.int64)
    x = drawn(tl.load(key), start[:, None] + column[None, :], f32_of(tl.load(numbers)), KIND)
    mask = (row < size)[:, None] & (column < dim)[None, :]
    tl.store(out + row[:, None] * dim + column[None, :], rounded(x, out.dtype.element_ty), mask=mask)


@triton.jit
def field(entries, entry, NTH: tl.constexpr):
    return tl.load(entries + entry * FIELDS + NTH)


@kernel()
def _new_rows(
    tiles, places, entries, rows, ids, counts, keys, count, steps, KIND: tl.constexpr, TABLE_DTYPE: tl.constexpr,
    GIVEN_DTYPE: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    entry = upper_bound(tiles, tile * 0, tile * 0 + count, tile, steps) - 1
    place = (tile - tl.load(tiles + entry)) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    number = tl.minimum(tl.load(counts + field(entries, entry, NUMBER)), tl.load(places + entry))
    dim, column = field(entries, entry, DIM), tl.program_id(1).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    used = place < number
    row = tl.load(rows + field(entries, entry, ROW_AT) + place, mask=used, other=-1)
    used = used & (row >= 0) & (row < field(entries, entry, ROWS))
    mask = used[:, None] & (column < dim)[None, :]
    if KIND == IS_GIVEN:
        first = field(entries, entry, GIVEN_AT).to(tl.pointer_type(GIVEN_DTYPE))
        x = tl.load(first + (place * field(entries, entry, GIVEN_STEP))[:, None] + column[None, :], mask=mask, other=0)
        if tl.float64 != TABLE_DTYPE:
            x = x.to(tl.float32)
    else:
        scale = f32_of(field(entries, entry, SCALE))
        if KIND < IS_CONSTANT:
            id = tl.load(ids + field(entries, entry, ID_AT) + place, mask=used, other=0)
            start = tl.where((id >= 0) & (id < PLAIN), id * field(entries, entry, STRIDE), mix(id))
            element = (start + field(entries, entry, FIRST))[:, None] + column[None, :]
            key = tl.load(keys + field(entries, entry, KEY))
            x = drawn(key, element, scale, KIND)
        else:
            x = tl.full((TILE_ROWS, TILE_COLUMNS), scale, tl.float32)
    out = field(entries, entry, TABLE).to(tl.pointer_type(TABLE_DTYPE)) + row[:, None] * dim + column[None, :]
    tl.store(out, rounded(x, TABLE_DTYPE), mask=mask)
