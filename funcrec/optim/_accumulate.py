"""accumulate: one update from the gradients of several steps.

step k, 2k, ...:  update with (g₁ + ... + g_k) / k;      other steps: store g, change no row

The gradients wait in static buffers among the slots, as entries and not as whole tables.
Shapes: k = every, C capacity, R rows, D dim.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from funcrec.core import (
    Count,
    Problem,
    absent_problems,
    check,
    describe,
    fail,
    remade,
    replace,
    typed,
    unknown_problems,
)
from funcrec.kernels import ops
from funcrec.optim._checks import check_update, tables_problems
from funcrec.optim._row import RowOptimizer, step_tensor
from funcrec.tables import WAITING, RowGrads

ROWS, GRADS = WAITING


@remade
@typed
def accumulate(optimizer: RowOptimizer, *, every: Count, capacity: Count | Mapping[str, Count]) -> RowOptimizer:
    """Return an optimizer that sums row gradients over `every` steps and updates on the last of these steps.

    Args:
      every: k, the number of steps. An update with the mean happens at steps k - 1, 2k - 1, ... (`step` starts at 0).
      capacity: C, the most entries that a step may have, for all tables or {table: C}. An entry is one looked-up id.

    Returns:
      RowOptimizer. Its slots are those of `optimizer` and, for each table, pending_rows i64[k, C] and pending_grads
      f[k, C, D]. The step of the inner optimizer is the number of updates, step // every. So bias corrections and
      schedules count updates.

    Raises:
      ValueError: a gradient has more entries than the capacity of its table.
      KeyError: a table has no capacity.
      TypeError: an entry stands for several ids, and the optimizer may count ids, but their number is not stored. Such
        entries come from a coalesced gradient, from a `clip` to a norm around this optimizer, and from tables with
        `dedup`.

    On a mesh each gradient waits with the owner of its row, which receives the entries of all ranks, with padding.
      So the capacity counts all entries that one owner receives. If these are more, the first step raises an error that
      states the number. Tables share no bank. A state that is gathered, saved, or laid out by another plan has larger
      buffers where the entries of several owners come together. Training from this state ends with the same bits.

    Law: k steps equal one update with the mean of their gradients, bit for bit. Between updates no row or inner slot
      changes a bit.

    Cost: every step coalesces the k · C entries of a table, even if it does not update: shapes are static.

    Example:
      >>> import torch, funcrec as fr
      >>> sparse = fr.optim.accumulate(fr.optim.sgd(lr=1.0), every=2, capacity=4)
      >>> tables = {"t": torch.zeros(2, 1)}
      >>> slots, g = sparse.init(tables), fr.RowGrads.from_entries(torch.tensor([1]), torch.ones(1, 1),
      ...     num_embeddings=2)
      >>> for step in range(2):
      ...     tables, slots = sparse.update({"t": g}, slots, tables, step)
      ...     print(tables["t"].flatten())
      tensor([0., 0.])
      tensor([ 0., -1.])
    """
    call = "funcrec.optim.accumulate"
    if optimizer.waiting:
        need, hint = "an optimizer whose gradients do not wait", "one accumulate, with the product of their `every`"
        fail(call, "`optimizer` accumulates already.", got="accumulate within accumulate", need=need, hint=hint)
    capacity_of = lambda n: capacity[n] if isinstance(capacity, Mapping) else capacity

    def init(tables):
        check(f"{call}.init", tables_problems(tables))
        check(f"{call}.init", missing_problems(capacity, tables))
        made = optimizer.init(tables)
        return {n: {**made[n], **_empty(t, every, capacity_of(n))} for n, t in tables.items()}

    def update(row_grads, slots, tables, step, **kernel):
        check_update(f"{call}.update", row_grads, slots, tables, step)
        check(f"{call}.update", missing_problems(capacity, tables))
        return due(*hold(row_grads, slots, tables, step), tables, step, **kernel)

    def hold(row_grads, slots, tables, step, takes=None):
        # On a mesh, a gradient may have all columns of a table while the bank has some of them.
        widths = {n: row_grads[n].dim if n in row_grads else None for n in tables}
        check(f"{call}.update", buffer_problems(slots, widths, every, capacity_of))
        check(f"{call}.update", size_problems(row_grads, slots))
        check(f"{call}.update", repeat_problems(row_grads) if optimizer.counts_entries else ())
        summed, kept = {}, {}
        for n, t in tables.items():
            taken = step_tensor(step, t.device)
            counts = torch.ones_like(taken, dtype=torch.bool) if takes is None else takes
            is_last = counts & (taken % every == every - 1)
            rows, grads = _put(slots[n], taken % every, row_grads.get(n))
            entries = torch.where(is_last, rows, -1).flatten(), grads.flatten(0, 1)
            made = RowGrads.from_entries(*entries, num_embeddings=t.shape[0])
            if n in row_grads:
                made = replace(made, axes=row_grads[n].axes, first=row_grads[n].first)
            summed[n] = made.coalesce().scale(1 / every)
            kept[n] = {ROWS: torch.where(is_last, -1, rows), GRADS: grads}
            if takes is not None:
                kept[n] = {k: torch.where(takes, s, slots[n][k]) for k, s in kept[n].items()}
        return summed, {n: {**slots[n], **kept[n]} for n in tables}

    def due(row_grads, slots, tables, step, **kernel):
        kept = {n: {k: slots[n][k] for k in (ROWS, GRADS) if k in slots[n]} for n in tables}
        inner = {n: {k: s for k, s in slots[n].items() if k not in (ROWS, GRADS)} for n in tables}
        tables, inner = optimizer.update(row_grads, inner, tables, step // every, **kernel)
        return tables, {n: {**inner[n], **kept[n]} for n in tables}

    # The label names the table, so no other table shares it: a table has its own capacity and owners.
    label = lambda table: (table, optimizer.label(table))
    return optimizer._replace(init=init, update=update, label=label, waiting=(ROWS, GRADS), hold=hold, due=due)


def _empty(table: Tensor, every: int, capacity: int) -> dict[str, Tensor]:
    rows = torch.full((every, capacity), -1, dtype=torch.int64, device=table.device)
    dtype = ops.accumulation_dtype(table.dtype)
    return {ROWS: rows, GRADS: torch.zeros(every, capacity, table.shape[1], dtype=dtype, device=table.device)}


def _put(slots: dict[str, Tensor], place: Tensor, grads: RowGrads | None) -> tuple[Tensor, Tensor]:
    """Return the buffers with the entries of a step at `place`, padded to the capacity. None means no entries."""
    rows, held = slots[ROWS], slots[GRADS]
    new_rows, new_grads = torch.full_like(rows[:1], -1), torch.zeros_like(held[:1])
    if grads is not None:
        pad = rows.shape[1] - grads.rows.shape[0]
        mine = torch.where(grads.valid, grads.rows, -1).to(rows.dtype)
        new_rows = torch.nn.functional.pad(mine, (0, pad), value=-1)[None]
        own = torch.where(grads.valid[:, None], grads.grads, 0)  # padding has the same bits in eager and compiled steps
        new_grads = torch.nn.functional.pad(own.to(held.dtype), (0, 0, 0, pad))[None]
    at = place[None]
    return rows.index_copy(0, at, new_rows), held.index_copy(0, at, new_grads)


# -- validators --------------------------------------------------------------------------------------------------


def missing_problems(capacity: int | Mapping[str, int], tables: Mapping) -> Iterator[Problem]:
    if isinstance(capacity, Mapping):
        yield from absent_problems("`capacity[{}]` is missing.", capacity, tables, f"one for each of {list(tables)}")
        yield from unknown_problems("`capacity` names no table.", capacity, tables, kind=KeyError)


def buffer_problems(slots: Mapping, widths: Mapping[str, int | None], every: int, capacity_of) -> Iterator[Problem]:
    hint = "the slots that this optimizer's `init` made of these tables"
    for n, width in widths.items():
        held = slots[n].get(ROWS) if isinstance(slots[n], Mapping) else None
        room = held.shape[1] if isinstance(held, Tensor) and held.dim() == 2 else 0
        for name in (ROWS, GRADS):
            got = slots[n].get(name) if isinstance(slots[n], Mapping) else None
            own = got.shape[2:] if width is None and isinstance(got, Tensor) else [width]
            shape = (every, max(capacity_of(n), room), *(own if name == GRADS else ()))
            if not isinstance(got, Tensor) or tuple(got.shape) != shape:
                what = f"`slots[{n!r}][{name!r}]` " + ("is missing." if got is None else "does not match.")
                yield Problem(what, describe(got), f"{list(shape)}", hint)


def size_problems(row_grads: Mapping[str, RowGrads], slots: Mapping) -> Iterator[Problem]:
    for n, g in row_grads.items():
        room = slots[n][ROWS].shape[1]
        if g.rows.shape[0] > room:
            got, hint = f"{g.rows.shape[0]} entries", "`capacity` as large as the ids of a padded batch"
            yield Problem(f"`row_grads[{n!r}]` is over its capacity.", got, f"at most {room}", hint)


def repeat_problems(row_grads: Mapping[str, RowGrads]) -> Iterator[Problem]:
    for n, g in row_grads.items():
        if g.has_repeats:
            need, hint = "an entry for each id", "`clip` inside of accumulate, tables without `dedup`"
            what = f"`row_grads[{n!r}]` has entries that stand for several ids, which the optimizer may count."
            yield Problem(what, repr(g), need, hint, TypeError)
