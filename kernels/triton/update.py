"""The fused update: one program sums the gradients of a tile of rows and applies the optimizer's rule, in place.

    (table[row], slots[row]) <- rule(table[row], Σ of the row's entries, slots[row])

Tables of one dim and dtype share a launch. A program holds a tile of distinct rows, and programs after the last row
return at once. So shapes bound the grid: min(entries, rows).
Cost: reads and writes the touched rows and the slots of these rows once, reads each entry's gradient once, and sorts
the entries.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from funcrec.kernels.forms import accumulation_dtype, capacities, segments_of
from funcrec.kernels.rules import RULES
from funcrec.kernels.triton import formulas
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.device import (
    constexpr,
    kernel,
    lanes,
    random_bits,
    round_stochastically,
    rounded,
    rows_at,
    upper_bound,
)
from funcrec.kernels.triton.group import CHUNK, Groups, align_of, chunk_sums, group_entries, sum_entries
from torch import Tensor

CALL = "funcrec.kernels.triton.fused_update_"


def fused_update_(
    tables: Sequence[Tensor],
    slots: Sequence[Tensor],
    d: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Sequence[Tensor],
    weights: Sequence[Tensor],
    segments: Sequence[int],
    lr: Tensor,
    step: Tensor,
    key: Tensor | None,
    rule: str,
    hyper: Sequence[float],
    first: Tensor | None = None,
    dims: Sequence[int] = (),
) -> None:
    """Update the rows that the segments name. All other rows, and the slots of these rows, keep every bit.

    Args:
      slots: the rule's slots of table 0, of table 1, ...; f32 (f64 for f64 tables), [R] or [R, D].
      lr: f64[]. step: i64[], the number of earlier steps.
      key: i64[T, S + 1, 4], which rounds 16-bit tables at random, as in `ops.fused_update`. None rounds to nearest.
      hyper: the rule's numbers, in the order of `RULES`; each set of numbers is compiled once.
      first, dims: i64[T], and the number of columns of each table's gradients, as in `ops.fused_update`; None and ()
        for tables of whole rows.

    `group` describes the order of sums.
    """
    num_slots = _check(tables, slots, rule, hyper)
    wide = _wide(tables, first, dims)
    first = first.to(torch.int64).contiguous() if dims and first is not None else None
    draws = None if key is None else (key.contiguous(), key[..., 1].contiguous())
    rows, offsets, weights = on.contiguous(rows), on.contiguous(offsets), on.contiguous(weights)
    parts = segments_of(segments)
    for acc in (torch.float32, torch.float64):
        mine = [s for s in parts if accumulation_dtype(tables[s.table].dtype) == acc]
        if not mine:
            continue
        # Tables of one launch get neighbouring keys.
        kinds = {t: (str(tables[t].dtype), tables[t].shape[1], wide[t]) for t in {s.table for s in mine}}
        numbers = sorted(kinds, key=lambda t: (*kinds[t], t))
        local = [s._replace(table=numbers.index(s.table)) for s in mine]
        x = {s.d: on.with_rows(d[s.d], acc) for s in mine}
        x = [x.get(i, d[i]) for i in range(len(d))]
        g = group_entries(local, x, rows, offsets, weights, [tables[t].shape[0] for t in numbers], acc)
        scalars, entries = _scalars(lr, step, acc, rule, hyper), capacities(local, rows, len(numbers))
        begin = 0
        while g is not None and begin < len(numbers):
            end = begin + sum(kinds[t] == kinds[numbers[begin]] for t in numbers)
            own = [(tables[t], slots[t * num_slots : (t + 1) * num_slots], t) for t in numbers[begin:end]]
            bounds = (min(entries[i], tables[numbers[i]].shape[0]) for i in range(begin, end))
            capacity = min(sum(bounds), g.keys.shape[0])
            window = wide[numbers[begin]], first
            _update_tables(g, own, range(begin, end), capacity, scalars, draws, rule, tuple(hyper), window)
            begin = end


def _check(tables: Sequence[Tensor], slots: Sequence[Tensor], rule: str, hyper: Sequence[float]) -> int:
    """Return the number of slots of each table. Raise if slots or rule do not fit."""
    on.check_tables(CALL, tables)
    on.check_tables(CALL, slots)
    if rule not in RULES:
        names = ", ".join(sorted(RULES))
        on.fail("`rule` is unknown.", repr(rule), f"one of {names}", 'implementation="reference"', CALL)
    count = len(RULES[rule].slots_with(hyper))
    if len(slots) != count * len(tables):
        on.fail("`slots` has another length.", f"{len(slots)}", f"{count} for each table", "the rule's slots", CALL)
    for i, s in enumerate(slots):
        table = tables[i // count]
        if s.dtype != accumulation_dtype(table.dtype) or s.shape not in (table.shape[:1], table.shape):
            got = f"{s.dtype}{list(s.shape)} for a table {table.dtype}{list(table.shape)}"
            on.fail(
                f"slot {i} does not fit its table.", got, "f32 (f64 for f64), [R] or [R, D]", "the rule's init", CALL
            )
    return count


def _wide(tables: Sequence[Tensor], first: Tensor | None, dims: Sequence[int]) -> list[int]:
    """Return the number of columns of each table's gradients."""
    own = [t.shape[1] for t in tables]
    if not dims:
        return own
    if len(dims) != len(own) or first is None or first.shape != (len(own),) or any(a < b for a, b in zip(dims, own)):
        got = f"{list(dims)} columns, first {None if first is None else list(first.shape)}, for tables of {own}"
        on.fail(
            "the windows do not match the tables.", got, "one for each table, inside its gradients", "dims=()", CALL
        )
    return list(dims)


def _scalars(lr: Tensor, step: Tensor, acc: torch.dtype, rule: str, hyper: Sequence[float]) -> Tensor:
    """Return lr, t, and the rule's numbers that depend on t, computed in f64, as f[2 + ...] on the device."""
    t = (step + 1).to(torch.float64)
    more = formulas.SCALARS[rule](hyper, t) if rule in formulas.SCALARS else []
    return torch.stack([lr.to(torch.float64), t, *more]).to(acc)


def _update_tables(
    g: Groups, own, numbers: range, capacity: int, scalars: Tensor, draws, rule: str, hyper, window
) -> None:
    """Launch the update of tables `numbers`, which have one dim and dtype.

    own: (table, slots, number in the call) of each table. window: the number of columns of the gradients, and the first
    column of each table among these columns.
    """
    table, (dim, first) = own[0][0], window
    width, acc = table.shape[1], scalars.dtype
    layout = tuple(s.dim() == 1 for s in own[0][1])
    addresses = [table.data_ptr() for table, _, _ in own]
    for i in range(len(layout)):
        addresses += [each[i].data_ptr() for _, each, _ in own]
    packed = on.pack([*addresses, *(t for _, _, t in own)], table.device)
    chunks = chunk_sums(g, g.bases[numbers[0]], g.bases[numbers[-1] + 1], dim, acc)
    t = on.tile(dim, whole_rows=True)
    rounds = draws is not None and table.dtype in (torch.float16, torch.bfloat16)
    drawn = (*draws, draws[1].shape[1]) if draws is not None and rounds else (packed, packed, 0)
    on.launch(
        _update, (t.over(capacity),), packed, len(own), g.packed[numbers[0] :], g.firsts[numbers[0] :], g.keys,
        g.addresses,
        g.scales if g.scales is not None else chunks, g.starts, chunks, scalars, *drawn,
        on.steps(drawn[2]), first if dim > width else packed, on.steps(len(own)), RULE=rule, HYPER=hyper, BY_ROW=layout,
        TABLE=on.DTYPES[table.dtype], ROUND=rounds, SCALED=g.scales is not None, DIM=dim, WIDTH=width, CHUNK=CHUNK,
        TILE_ROWS=t.rows, TILE_COLUMNS=t.columns,
        ALIGN=on.alignment([align_of(g, dim, acc), width * table.element_size(), *addresses]), num_warps=t.num_warps,
    )  # fmt: skip


@kernel()
def _update(
    packed, num_tables, bases, firsts, keys, addresses, scales, starts, chunks, scalars, draws, draw_begins, num_draws,
    draw_steps, begins, steps, RULE: tl.constexpr, HYPER: tl.constexpr, BY_ROW: tl.constexpr, TABLE: tl.constexpr,
    ROUND: tl.constexpr, SCALED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = chunks.dtype.element_ty
    u = tl.load(firsts) + lanes(TILE_ROWS)
    end = tl.load(firsts + num_tables)
    if tl.load(firsts) + tl.program_id(0).to(tl.int64) * TILE_ROWS >= end:
        return
    used = u < end
    start = tl.load(starts + u, mask=used, other=0)
    length = tl.load(starts + u + 1, mask=used, other=0) - start
    number = tl.load(keys + start, mask=used, other=0).to(tl.int64)
    which = tl.maximum(upper_bound(bases, u * 0, u * 0 + num_tables, number, steps) - 1, 0)
    row = number - tl.load(bases + which)
    column = tl.arange(0, TILE_COLUMNS).to(tl.int64)
    numbers = packed + (1 + len(BY_ROW)) * num_tables + which
    own = column[None, :]  # the column in the table
    mask = used[:, None] & (column < DIM)[None, :]
    if WIDTH < DIM:
        own = own - tl.load(begins + tl.load(numbers))[:, None]
        mask = mask & (own >= 0) & (own < WIDTH)
    w_at = rows_at(tl.load(packed + which), row, WIDTH, TABLE, ALIGN) + own
    w = tl.load(w_at, mask=mask, other=0).to(ACC)
    g = sum_entries(
        addresses, scales, chunks, start, length, column, SCALED, DIM, CHUNK, TILE_ROWS, TILE_COLUMNS, ALIGN
    )
    at_0 = slot_at(packed, which, num_tables, row, own, 0, BY_ROW, ACC, WIDTH, ALIGN)
    at_1 = slot_at(packed, which, num_tables, row, own, 1, BY_ROW, ACC, WIDTH, ALIGN)
    at_2 = slot_at(packed, which, num_tables, row, own, 2, BY_ROW, ACC, WIDTH, ALIGN)
    s_0 = load_slot(at_0, g, used, mask, 0, BY_ROW)
    s_1 = load_slot(at_1, g, used, mask, 1, BY_ROW)
    s_2 = load_slot(at_2, g, used, mask, 2, BY_ROW)
    repeats = length.to(ACC)[:, None]
    w, s_0, s_1, s_2 = formulas.apply_rule(w, g, s_0, s_1, s_2, repeats, scalars, column, RULE, HYPER, DIM)
    if ROUND:
        first_draw = tl.load(numbers) * num_draws
        draw = upper_bound(draw_begins, first_draw, first_draw + num_draws, row, draw_steps) - 1
        drawn = draws + 4 * tl.maximum(draw, first_draw)  # A lane without a row may read any segment.
        new = round_stochastically(w, random_bits(drawn, row, tl.maximum(own, 0)), TABLE)
    else:
        new = rounded(w, TABLE)
    tl.store(w_at, new, mask=mask)
    store_slot(at_0, s_0, used, mask, 0, BY_ROW)
    store_slot(at_1, s_1, used, mask, 1, BY_ROW)
    store_slot(at_2, s_2, used, mask, 2, BY_ROW)


@triton.jit
def slot_at(
    packed, which, num_tables, row, own, NTH: constexpr, BY_ROW: constexpr, ACC: constexpr, WIDTH: constexpr,
    ALIGN: constexpr,
):  # fmt: skip
    """Return pointers to slot NTH of rows, or any value if the rule has no such slot."""
    if len(BY_ROW) <= NTH:
        return row
    else:
        address = tl.load(packed + (1 + NTH) * num_tables + which)
        if BY_ROW[NTH]:
            return rows_at(address, row, 1, ACC, 1)
        else:
            return rows_at(address, row, WIDTH, ACC, ALIGN) + own


@triton.jit
def load_slot(at, nothing, used, mask, NTH: constexpr, BY_ROW: constexpr):
    if len(BY_ROW) <= NTH:
        return nothing
    elif BY_ROW[NTH]:
        return tl.load(at, mask=used[:, None], other=0)
    else:
        return tl.load(at, mask=mask, other=0)


@triton.jit
def store_slot(at, x, used, mask, NTH: constexpr, BY_ROW: constexpr):
    if len(BY_ROW) > NTH:
        if BY_ROW[NTH]:
            tl.store(at, x, mask=used[:, None])
        else:
            tl.store(at, x, mask=mask)
