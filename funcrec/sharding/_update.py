"""Updates tables on a mesh. The values that an optimizer reads decide how a table that is cut by columns is updated.

    single elements          each owner updates its columns as a table
    the row's gradient       each owner gets cotangents of all columns, and updates its own columns (`RowGrads.first`)
    the whole row            every owner receives gradients, rows and slots of the touched rows, updates whole rows, and
                             keeps its columns

A slot with one number per row gets the same value on all owners of the row.
Shapes: n ranks, M touched rows, w columns of a bank, D of a table.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import fail, replace, sure
from funcrec.kernels import ops
from funcrec.kernels.reference_jagged import place_among
from funcrec.kinds import HALF, DynamicTables, ids_of_rows, origins_of, touched_rows
from funcrec.mesh import Mesh, axis_index, gather_as_one
from funcrec.optim import RowOptimizer
from funcrec.sharding._tables import ShardedTables
from funcrec.sharding.placement._layout import Layout, own_ranks
from funcrec.tables import BEHIND, RowGrads, origin_of


def check_whole_rows(call: str, sparse: RowOptimizer, layout: Layout) -> None:
    """Raise for an optimizer with a norm over all rows if a table is cut by columns: it needs whole rows."""
    columns = column_banks(sparse, layout)
    if columns and sparse.is_joint:
        hint = "row_wise or table_wise for it, or an optimizer of single elements, such as adam"
        what = "a norm of all gradients and rows cut by columns do not go together."
        fail(call, what, got=f"tables {list(columns)} by columns", need="whole rows", hint=hint)


def column_banks(sparse: RowOptimizer, layout: Layout) -> dict[str, list[str]]:
    """Return {table: its banks}, for tables cut by columns that the optimizer must see as tables.

    Such an optimizer reads more than single elements, or labels tables by name.
    """
    shapes = dict(layout.shapes)
    if sparse.is_elementwise and all(sparse.label(n) is None for n in shapes):
        return {}
    out: dict[str, list[str]] = {}
    for s in layout.shards:
        if s.last - s.first < shapes[s.table][1] and layout.banks[s.bank].name not in out.setdefault(s.table, []):
            out[s.table].append(layout.banks[s.bank].name)
    return out


def blocks_held(layout: Layout) -> Counter[tuple[int, int]]:
    """Return {(bank, rank): the number of shards of the bank that the rank holds}, counting a rank once in a shard."""
    return Counter((s.bank, r) for s in layout.shards for r in set(s.ranks))


def tables_in_place(sparse: RowOptimizer, columns: Mapping[str, list[str]], layout: Layout) -> list[str]:
    """Return the tables of `columns` that each owner updates in place.

    For an optimizer that reads the gradients of rows, a rank may hold only one block of columns in a bank, because one
    number, `RowGrads.first`, locates the columns of a bank. (A placement that names a rank twice gives it two blocks.)
    """
    if sparse.is_elementwise:
        return list(columns)
    full = {bank for (bank, _), count in blocks_held(layout).items() if count > 1}
    crowded = {s.table for s in layout.shards if s.table in columns and s.bank in full}
    return [t for t in columns if sparse.is_gradient_wise and t not in crowded]


def whole_banks(sparse: RowOptimizer, layout: Layout) -> tuple[str, ...]:
    """Return the banks whose owners get cotangents of all columns of a row. All ranks return the same banks."""
    columns = column_banks(sparse, layout)
    tables = () if sparse.is_elementwise else tables_in_place(sparse, columns, layout)
    return tuple(b for t in tables for b in columns[t])


def first_columns(layout: Layout) -> dict[str, list[int]]:
    """Return {bank: for each rank the first column that it holds of the bank's table, 0 if it holds none}."""
    out = {b.name: [0] * b.num_ranks for b in layout.banks}
    for s in reversed(layout.shards):  # the first shard of a rank is written last
        for r in s.ranks:
            out[layout.banks[s.bank].name][r] = s.first
    return out


@functools.lru_cache(maxsize=256)
def _origins(layout: Layout, bank: int) -> list:
    """Return for each rank of the bank the segments of `RowGrads.origin`, padded to one number on all ranks."""
    dims = {n: dim for n, (_, dim) in layout.shapes}
    own: list[list] = [[] for _ in range(layout.banks[bank].num_ranks)]
    for s in layout.shards:
        for i, (r, start) in enumerate(zip(s.ranks, s.starts, strict=True)) if s.bank == bank else ():
            own[r].append(origin_of(s.table, dims[s.table], i * s.part, s.first, start))
    most = max(map(len, own)) + 1
    return [sorted(x, key=lambda o: o[2]) + [BEHIND] * (most - len(x)) for x in own]


def with_origin(sparse: RowOptimizer, grads: RowGrads | None, tables: ShardedTables, bank: str) -> RowGrads | None:
    """Return the gradient with the table of each row, and its id if a vocabulary says it.

    Only gradients of banks in 16 bits need the table, because such banks may be rounded at random.
    """
    layout, table = tables.layout, tables.banks[bank]
    if grads is None or table.dtype not in HALF or sparse.ignores_origin:
        return grads
    number = next(i for i, b in enumerate(layout.banks) if b.name == bank)
    axes = layout.banks[number].axes
    own = {s.table for s in layout.shards if s.bank == number}
    if tables.of is DynamicTables and any(x[0] in own for x in tables.rest.first):
        return replace(grads, origin=_id_origin(grads, tables, number))
    origins = torch.tensor(_origins(layout, number), device=table.device)
    return replace(grads, origin=origins[axis_index(axes)[None]][0] if axes else origins[0])


def ids_on_ranks(tables: ShardedTables, table: str, rows: Tensor) -> Tensor:
    """Return the ids of these rows of a table, or the rows if it follows no vocabulary."""
    return ids_of_rows(tables.rest, table, rows) if tables.of is DynamicTables else rows


def _id_origin(grads: RowGrads, tables: ShardedTables, bank: int) -> Tensor:
    """Return `RowGrads.origin` with a segment for each touched row of this rank's bank."""
    layout, (touched,) = tables.layout, touched_rows([grads])
    dims, shards = dict(layout.shapes), [s for s in layout.shards if s.bank == bank]
    axes = layout.banks[bank].axes
    which, rows = table_rows(touched, shards, axis_index(axes) if axes else touched.new_zeros(()))
    out = torch.tensor([BEHIND], device=touched.device).expand(len(touched) + 1, -1)
    at = torch.cat([which, which.new_full((1,), -1)])[:, None]
    for k, s in enumerate(shards):
        ids = ids_on_ranks(tables, s.table, rows)
        own = origins_of([(s.table, dims[s.table][1], s.first)], touched[None], ids[None])[0]
        out = torch.where(at == k, own, out)
    return out


def as_tables(banks: Mapping[str, Any], columns: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return {name: bank} with the optimizer's names.

    A table cut by columns has its own name, for the first of its banks.
    """
    apart = {b for own in columns.values() for b in own}
    return {n: x for n, x in banks.items() if n not in apart} | {
        t: banks[own[0]] for t, own in columns.items() if own[0] in banks
    }


def init_slots(sparse: RowOptimizer, tables: ShardedTables, mesh: Mesh) -> dict[Any, Any]:
    """Return {bank: slots}, the first slots of the optimizer for each bank."""
    columns = column_banks(sparse, tables.layout)
    base = as_tables(tables.banks, columns)
    first = sparse.init(base)  # by the names that the optimizer knows
    out = {n: first[n] for n in tables.banks if n in first}
    for table, own in columns.items():
        out |= {b: sparse.init({**base, table: tables.banks[b]})[table] for b in own}
    given = tables.layout.with_whole_rows(whole_banks(sparse, tables.layout))
    return {b.name: of_ranks(out[b.name], sparse.waiting, b.dim, len(own_ranks(b, mesh))) for b in given.banks}


def of_ranks(slots: Mapping[str, Tensor], waiting: Sequence[str], dim: int, num_ranks: int) -> dict[str, Tensor]:
    """Return a bank's slots, with the slots of waiting gradients repeated for each rank, and as wide as gradients.

    For k steps with C places i64[k, C] and f[k, C, w] become i64[n · k, C] and f[n · k, C, dim]. Other slots stay.
    """
    wide = lambda x: x if x.dim() < 3 else x[..., :1].expand(*x.shape[:-1], dim)
    each = lambda x: wide(x).repeat(num_ranks, *[1] * (x.dim() - 1))
    return {k: each(x) if k in waiting else x for k, x in slots.items()}


def update_banks(
    sparse: RowOptimizer,
    grads: Mapping[str, RowGrads],
    slots: Mapping[Any, Any],
    tables: ShardedTables,
    step: Tensor,
    takes: Tensor | None = None,
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return (banks, slots) after the update.

    One call updates all banks of whole rows. Tables cut by columns are updated bank by bank.

    takes: bool[], whether the step counts; None if it does. The gradient of a step that does not count has no entries.
    """
    update = sure(sparse.due) if sparse.waiting else sparse.update
    kept = {n: {k: s for k, s in own.items() if k in sparse.waiting} for n, own in slots.items()}
    if sparse.waiting:
        grads, kept = hold(sparse, grads, kept, tables, step, takes)
        slots = {n: {k: s for k, s in own.items() if k not in sparse.waiting} for n, own in slots.items()}
    views = views_of(sparse, grads, slots, tables)
    new_banks, new_slots = dict(tables.banks), dict(slots)
    for turn in range(max([1, *map(len, views.values())])):
        # An optimizer may read the names of all tables: a table whose turn is over appears without a gradient.
        shown = {n: own[min(turn, len(own) - 1)] for n, own in views.items()}
        now = {n: v for n, v in shown.items() if turn < len(views[n])}
        given = {n: v.grads for n, v in now.items() if v.grads is not None}
        own_slots, own_tables = ({n: getattr(v, part) for n, v in shown.items()} for part in ("slots", "table"))
        moved, made = update(given, own_slots, own_tables, step)
        for n, v in now.items():
            new_banks[v.bank] = v.put(tables.banks[v.bank], moved[n])
            new_slots[v.bank] = {k: v.put(s, made[n][k]) for k, s in slots[v.bank].items()}
    return new_banks, {n: {**own, **kept[n]} for n, own in new_slots.items()}


def hold(
    sparse: RowOptimizer,
    grads: Mapping[str, RowGrads],
    waiting: Mapping[str, Mapping[str, Tensor]],
    tables: ShardedTables,
    step: Tensor,
    takes: Tensor | None,
) -> tuple[dict[str, RowGrads], dict[str, dict[str, Tensor]]]:
    """Return (the gradients of the banks that are due, the gradients that now wait in each bank).

    Gradients wait on the rank that received them.
    """
    layout, columns = tables.layout, column_banks(sparse, tables.layout)
    firsts = first_columns(layout)
    own = {n: _of_own_columns(g, n, tables, firsts) for n, g in grads.items()}
    due, kept = {}, {}
    for turn in range(max([1, *map(len, columns.values())])):
        shown = {t: names[min(turn, len(names) - 1)] for t, names in columns.items()}
        apart = {b for names in columns.values() for b in names}
        shown = {b: b for b in tables.banks if b not in apart} | shown
        of = lambda x: {n: x[b] for n, b in shown.items() if b in x}  # noqa: B023
        given, held = sure(sparse.hold)(of(own), of(waiting), of(tables.banks), step, takes=takes)
        due |= {shown[n]: g for n, g in given.items() if shown[n] not in due}
        kept |= {shown[n]: x for n, x in held.items() if shown[n] not in kept}
    axes = {b.name: b.axes for b in layout.banks}
    return {n: replace(g, axes=axes[n], first=None) for n, g in due.items()}, kept


class View(NamedTuple):
    """An optimizer's view of a bank: a table, or the bank's touched rows with all columns of their table.

    put: (the bank or a slot of it, the optimizer's new value of `table` or of that slot) -> the new bank or slot.
    """

    bank: str
    grads: RowGrads | None
    table: Tensor
    slots: Mapping[str, Tensor]
    put: Callable[[Tensor, Tensor], Tensor] = lambda old, new: new


def views_of(
    sparse: RowOptimizer, grads: Mapping[str, RowGrads], slots: Mapping, tables: ShardedTables
) -> dict[str, list[View]]:
    """Return {name: the views that the optimizer gets in turn}.

    A name stands for a bank of whole rows, or for the banks of a cut table.
    """
    layout, banks = tables.layout, tables.banks
    columns = column_banks(sparse, layout)
    in_place = tables_in_place(sparse, columns, layout)
    together = {t: own for t, own in columns.items() if t not in in_place}
    apart = {b for own in columns.values() for b in own}
    drawn = {b: with_origin(sparse, grads.get(b), tables, b) for b in banks}
    plain = {b: View(b, drawn[b], banks[b], slots[b]) for b in banks}
    firsts = first_columns(layout) if in_place else {}
    own_of = lambda b: plain[b]._replace(grads=_of_own_columns(drawn[b], b, tables, firsts))
    own = {b: own_of(b) for t in in_place for b in columns[t]}
    own |= {b: plain[b]._replace(grads=None) for names in together.values() for b in names}  # where no row is touched
    own |= rows_together(together, grads, slots, tables)
    return {b: [plain[b]] for b in banks if b not in apart} | {t: [own[b] for b in columns[t]] for t in columns}


def _of_own_columns(
    grads: RowGrads | None, bank: str, tables: ShardedTables, firsts: Mapping[str, list[int]]
) -> RowGrads | None:
    """Return the gradient with the first column of this rank, i64[]. firsts: of `first_columns`.

    Only a gradient with all columns of its table needs it.
    """
    if grads is None or grads.dim == tables.banks[bank].shape[1]:
        return grads
    axes = next(b.axes for b in tables.layout.banks if b.name == bank)
    rank = axis_index(axes)[None]  # an index that is a scalar tensor would be read on the host
    return replace(grads, first=torch.tensor(firsts[bank], device=rank.device)[rank][0])


def rows_together(
    columns: Mapping[str, list[str]], grads: Mapping[str, RowGrads], slots: Mapping, tables: ShardedTables
) -> dict[str, View]:
    """Return {bank: its touched rows as a table of M whole rows}, for tables cut by columns.

    The touched rows of all ranks travel together. The result lacks banks without touched rows.
    """
    layout, banks = tables.layout, tables.banks
    own = [b for b in layout.banks if b.name in {n for names in columns.values() for n in names} and b.name in grads]
    touched = {b.name: grads[b.name].coalesce() for b in own if grads[b.name].capacity > 0}
    taken = {n: _take(g, banks[n], slots[n]) for n, g in touched.items()}
    gathered: dict[str, dict[str, Tensor]] = {}
    for axes in dict.fromkeys(b.axes for b in own):
        gathered |= gather_as_one({b.name: taken[b.name] for b in own if b.axes == axes and b.name in taken}, axes)
    out = {}
    for table in columns:
        shards = [layout.shards[k] for k in layout.shards_of(table)]
        for n in (n for n in dict.fromkeys(layout.banks[s.bank].name for s in shards) if n in touched):
            mine = [s for s in shards if layout.banks[s.bank].name == n]
            known = torch.where(touched[n].valid, touched[n].rows, -1)
            which, rows = table_rows(known, mine, axis_index(layout.banks[shards[0].bank].axes))
            found = [_find(rows, s, gathered[layout.banks[s.bank].name]) for s in shards]
            whole = {k: torch.cat([x[k] for x in found], 1) if own.dim() > 1 else own for k, own in taken[n].items()}
            row_slots = {k.removeprefix("slot "): x for k, x in whole.items() if k.startswith("slot ")}
            # these rows are the optimizer's table: row i has number i, or no number
            places = torch.where(rows >= 0, torch.arange(rows.shape[0], device=rows.device), -1)
            how = {"num_embeddings": rows.shape[0], "repeats": touched[n].repeats}
            entries = RowGrads.from_entries(places, whole["grads"], **how)
            ids, every = ids_on_ranks(tables, table, rows), torch.arange(rows.shape[0], device=rows.device)
            origins = origins_of([(table, whole["table"].shape[1], 0)], every[None], ids[None])
            entries = replace(entries, origin=origins[0])
            put = functools.partial(_put_rows, touched[n], which, mine)
            out[n] = View(n, entries, whole["table"], row_slots, put)
    return out


def _put_rows(grads: RowGrads, which: Tensor, shards: Sequence, old: Tensor, new: Tensor) -> Tensor:
    """Return the bank, or a slot of it, with the touched rows of `new`, [M, D] or [M], in the bank's columns.

    which: the number of each row's shard.
    """
    flat = lambda x: x if x.dim() > 1 else x[:, None]
    own = flat(new)
    if new.dim() > 1:
        own = new[:, shards[0].first : shards[0].last]
        for k, s in enumerate(shards[1:], 1):
            own = torch.where((which == k)[:, None], new[:, s.first : s.last], own)
    return ops.scatter_rows(flat(old), rows=grads.rows, count=grads.count, new=own).reshape(old.shape)


def _take(grads: RowGrads, bank: Tensor, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the numbers, gradients, values and slots of the touched rows on this rank."""
    rows = torch.where(grads.valid, grads.rows, -1)
    take = lambda x: ops.gather_rows(x if x.dim() > 1 else x[:, None], rows).reshape(-1, *x.shape[1:])
    return {"rows": rows, "grads": grads.grads, "table": take(bank).to(bank.dtype)} | {
        f"slot {k}": take(s) for k, s in slots.items()
    }


def table_rows(touched: Tensor, shards: Sequence, rank: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the shard's number, the row in the table) of each touched row of this rank's bank; -1 for no row."""
    which = rows = torch.full_like(touched, -1)
    for k, s in enumerate(shards):
        for i, (r, start) in enumerate(zip(s.ranks, s.starts, strict=True)):
            inside = (rank == r) & (touched >= max(start, 0)) & (touched < start + s.part)
            rows = torch.where(inside, touched - start + i * s.part, rows)
            which = torch.where(inside, k, which)
    return which, rows


def _find(rows: Tensor, shard, gathered: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the shard's columns of these rows of the table, from the gathered touched rows of all ranks."""
    # row = part · (rows of a part) + rest lies on ranks[part], at row starts[part] + rest of the bank
    part = torch.div(rows.clamp(min=0), shard.part, rounding_mode="floor")
    owner = torch.tensor(shard.ranks, device=rows.device)[part]
    row = rows.clamp(min=0) - part * shard.part + torch.tensor(shard.starts, device=rows.device)[part]
    known = gathered["rows"]  # row numbers ascend on each rank; then -1 follows
    known = torch.where(known < 0, torch.iinfo(known.dtype).max, known)
    most = known.shape[1]
    # All owners of a row's columns received the same ids, so each owner has the
    # row. -1 was clamped to row 0, and no entry reads that row (`places`).
    place = place_among(known, row.expand(known.shape[0], -1).contiguous(), right=False)  # [n, M]: on each rank
    place = place.gather(0, owner[None])[0].clamp(max=most - 1)
    return {k: x[owner, place] for k, x in gathered.items()}
