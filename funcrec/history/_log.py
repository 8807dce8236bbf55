"""A log of what each step is about to change, kept next to the state. It can undo steps, and knows which rows changed.

log[t mod K] = (rows, tables[rows], slots[rows], dense, dense_opt)      as they are before step t
undo:  tables[rows], slots[rows], dense, dense_opt = log[t mod K]        last[row] = number of its last change

The log stores all values as bits. So a restored value equals the old value, even in the payload of a NaN. No shape
depends on an id. Shapes: K steps that can be undone, T tables of one form, R rows of a table, S rows of all tables of
the form, C rows kept for a step, W integers of a row and its slots, N ids, E integers of the dense parts.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from funcrec.core import mix, pytree, ravel, replace, tree_flatten, tree_leaves, tree_unflatten
from funcrec.history._ids import id_rows, ids_named, latest, vocabularies_in, with_id_rows
from funcrec.kinds import NewRows
from funcrec.mesh import Mesh, P, bits_of, pmin, psum
from funcrec.tables import RowGrads, with_parts
from funcrec.train import TrainState


@pytree(static=("tables",))
class Touched:
    """The part of a log for the tables of one form (dim, dtype, slots). Row numbers run through all these tables.

    rows: i64[K, C], the rows of each table in its places, -1 in free places. old: bits [K, C, W], one buffer for each
    width of integers. over: i64[K], how many rows found no place. last: i64[S + 1], the number of the last change of
    each row, 0 for none; its last element stands for no row. tables: (name, R, number of the table's places in C).
    """

    rows: Tensor
    old: tuple[Tensor, ...]
    over: Tensor
    last: Tensor
    tables: tuple[tuple[str, int, int], ...]

    @property
    def starts(self) -> list[int]:
        """Return the first row of each table, and S."""
        return [0, *itertools.accumulate(rows for _, rows, _ in self.tables)]

    @property
    def seats(self) -> list[slice]:
        """Return for each table the slice of its places among the C places."""
        ends = [0, *itertools.accumulate(room for _, _, room in self.tables)]
        return list(itertools.starmap(slice, itertools.pairwise(ends)))


@pytree(static=("num_steps",), optional=("origin",))
class DeltaLog:
    """The last K steps of a state, and the last change of each of its rows. A `Logged` holds it.

    version: i64[], the number of changes, which are steps and rewinds. kept: i64[], the number of steps in the log.
    place: i64[], where the next step is written. begun: i64[], the first version of these tables; for earlier versions
    the log does not know which rows changed. stamp: i64[1], a hash of the state that the log belongs to. touched: one
    part for each form of tables. whole: bits [K, E] of the parts that change whole in every step. num_steps: K.
    origin: i64[], a hash of all bits of the first state, equal on all ranks. It distinguishes versions of two logs.
    A log from an older checkpoint has None.
    """

    version: Tensor
    kept: Tensor
    place: Tensor
    begun: Tensor
    stamp: Tensor
    touched: tuple[Touched, ...]
    whole: tuple[Tensor, ...]
    num_steps: int
    origin: Tensor | None = None


def rows_and_whole(state: TrainState, waiting: Sequence[str]) -> tuple[dict[str, dict[str, Tensor]], Any]:
    """Return ({table: {"": the table, slot: its tensor}}, a tree of all other parts that a step may change).

    Vocabularies are among the tables."""
    of_rows = {
        n: {"": t} | {k: s for k, s in state.slots.get(n, {}).items() if k not in waiting}
        for n, t in state.tables.items()
    }
    others = {n: {k: s for k, s in own.items() if k in waiting} for n, own in state.slots.items()}
    nows = {n: v.now for n, v in vocabularies_in(state.tables).items()}
    return of_rows | id_rows(state.tables), (state.dense, state.dense_opt, others, nows)


def with_rows_and_whole(state: TrainState, of_rows: Mapping[str, Mapping[str, Tensor]], whole: Any) -> TrainState:
    dense, dense_opt, others, nows = whole
    tables = {n: of_rows[n][""] for n in state.tables}
    slots = {n: {k: others[n][k] if k in others[n] else of_rows[n][k] for k in own} for n, own in state.slots.items()}
    made = with_id_rows(with_parts(state.tables, tables), of_rows, nows)
    return replace(state, tables=made, slots=slots, dense=dense, dense_opt=dense_opt)


def flat_bits(tree: Any) -> list[Tensor]:
    """Return all tensors of the tree as one buffer of integers for each width."""
    return ravel([bits_of(x).flatten() for x in tree_leaves(tree) if isinstance(x, Tensor)])[0]


def of_bits(buffers: Sequence[Tensor], like: Any) -> Any:
    """Return the tree that the buffers hold. It has the shapes and dtypes of `like`."""
    leaves, structure = tree_flatten(like)
    flat = iter(ravel([bits_of(x).flatten() for x in leaves if isinstance(x, Tensor)])[1](buffers))
    return tree_unflatten([typed_bits(next(flat), x) if isinstance(x, Tensor) else x for x in leaves], structure)


def typed_bits(bits: Tensor, like: Tensor) -> Tensor:
    """Return bits as numbers with the dtype and shape of `like`."""
    return (bits if bits.dtype == like.dtype else bits.view(like.dtype)).reshape(like.shape)


def row_bits(own: Mapping[str, Tensor], rows: Tensor) -> tuple[list[Tensor], Any]:
    """Return buffers [C, W] of rows of a table and its slots, and the function that splits the buffers again."""
    return ravel({k: bits_of(x)[rows].reshape(rows.shape[0], x.shape[1:].numel()) for k, x in own.items()}, 1)


def form_of(own: Mapping[str, Tensor]) -> list[tuple[torch.dtype, int]]:
    """Return (dtype, W) of each buffer that holds rows of a table and its slots."""
    one = {k: torch.empty((1, *x.shape[1:]), dtype=x.dtype, device="meta") for k, x in own.items()}
    return [(x.dtype, x.shape[1]) for x in row_bits(one, torch.zeros(1, dtype=torch.int64, device="meta"))[0]]


def begin_log(
    state: TrainState, waiting: Sequence[str], num_steps: int, room: Mapping[str, int], axes: Sequence[str] = ()
) -> DeltaLog:
    """Return a log without steps. room: {table: C}, the rows that the log keeps for one step."""
    of_rows, whole = rows_and_whole(state, waiting)
    forms: dict[tuple, list[str]] = {}
    for n, own in of_rows.items():
        if own[""].shape[0]:
            forms.setdefault(tuple((k, x.dtype, tuple(x.shape[1:])) for k, x in own.items()), []).append(n)
    zeros = lambda *shape, dtype=torch.int64: torch.zeros(shape, dtype=dtype, device=state.step.device)
    touched = []
    for names in forms.values():
        heights = [of_rows[n][""].shape[0] for n in names]
        tables = tuple((n, r, min(room[n], r)) for n, r in zip(names, heights, strict=True))
        places, like = sum(c for _, _, c in tables), row_bits(of_rows[names[0]], zeros(1))[0]
        old = tuple(zeros(num_steps, places, x.shape[1], dtype=x.dtype) for x in like)
        rows, over, last = zeros(num_steps, places) - 1, zeros(num_steps), zeros(sum(heights) + 1)
        touched.append(Touched(rows, old, over, last, tables))
    kept = [zeros(num_steps, x.shape[0], dtype=x.dtype) for x in flat_bits((state.step, whole))]
    stamp, parts = stamp_of(state), (tuple(touched), tuple(kept))
    return DeltaLog(zeros(), zeros(), zeros(), zeros(), stamp, *parts, num_steps, origin_of(state, axes))


def origin_of(state: TrainState, axes: Sequence[str]) -> Tensor:
    """Return a hash, i64[], of the step, the key, the dense parameters and all rows.

    It draws no random number, so a run that is repeated has the same hash."""
    out = stamp_of(state)[0]
    for x in state.tables.values():
        rows = bits_of(x).sum(1, dtype=torch.int64)
        out = mix(out ^ (mix(rows) * (torch.arange(rows.shape[0], device=x.device) * 2 + 1)).sum())
    return psum(out, tuple(axes)) if axes else out


def stamp_of(state: TrainState) -> Tensor:
    """Return a hash, i64[1], of the step, the key and the dense parameters. It is cheap compared with a step."""
    out = mix(state.key ^ mix(state.step))
    for x in flat_bits(state.dense):
        places = torch.arange(x.shape[0], device=x.device) * 2 + 1
        out = mix(out ^ (x.to(torch.int64) * places).sum())
    return out.reshape(1)


def recorded(
    log: DeltaLog,
    waiting: Sequence[str],
    grads: Mapping[str, RowGrads],
    old: TrainState,
    new: TrainState,
    axes: Sequence[str] = (),
    admitted: tuple[TrainState, NewRows] | None = None,
) -> DeltaLog:
    """Return the log with the step from `old` to `new`, whose rows are in `grads`.

    admitted: the state after the ids of the batch were admitted, and the new rows, if the tables follow vocabularies.

    A step that did nothing is not recorded. If the log belongs to another state than `old`, it forgets its steps and
    starts again with this step."""
    took = (new.step != old.step).to(torch.int64)
    is_own = belongs(log, old, axes)
    version = log.version + took
    begun = torch.where(is_own | (took == 0), log.begun, version)
    stamp = torch.where(took == 0, log.stamp, stamp_of(new))
    of_rows, whole = rows_and_whole(old, waiting)
    named = rows_named(grads, old.slots, waiting)
    at, drawn = log.place[None], {}
    if admitted is not None:
        after, new_rows = admitted
        changed, fresh = ids_named(old.tables, new_rows)
        drawn = {n: (rows, row_bits(of_rows[n], rows.clamp(min=0))[0]) for n, rows in fresh.items()}
        named = named | changed | {n: torch.cat([named[n], fresh[n]]) if n in named else fresh[n] for n in fresh}
        # A new row is read before it is drawn, and any other row afterwards: then a compiled step writes in place.
        of_rows = rows_and_whole(after, waiting)[0] | id_rows(old.tables)
    touched = tuple(recorded_rows(t, of_rows, named, drawn, version, at, log.num_steps) for t in log.touched)
    if log.num_steps == 0:
        return replace(log, version=version, begun=begun, stamp=stamp, touched=touched)
    now = flat_bits((old.step, whole))
    held = tuple(x.index_put((at,), y[None]) for x, y in zip(log.whole, now, strict=True))
    # A full log overwrites its oldest step in any case.
    kept = torch.where(is_own, log.kept.clamp(max=log.num_steps - 1), 0) + took
    place = (log.place + took) % log.num_steps
    return DeltaLog(version, kept, place, begun, stamp, touched, held, log.num_steps, log.origin)


def belongs(log: DeltaLog, state: TrainState, axes: Sequence[str]) -> Tensor:
    """Return whether the log belongs to the state on every rank of the axes, bool[]. Each rank stamps its part."""
    is_own = (log.stamp == stamp_of(state)).all()
    return pmin(is_own.long(), tuple(axes)) > 0 if axes else is_own


def rows_named(grads: Mapping[str, RowGrads], slots: Mapping, waiting: Sequence[str]) -> dict[str, Tensor]:
    """Return {table: i64[N]}, the rows that an update may write to. These include rows of waiting gradients."""
    out: dict[str, list[Tensor]] = {}
    for n, g in grads.items():
        if g.capacity:
            entries = g.entries()
            out.setdefault(n, []).append(entries.marked().long())
    for n, own in slots.items():
        held = [s.flatten() for k, s in own.items() if k in waiting and not s.is_floating_point()]
        out.setdefault(n, []).extend(held)
    return {n: torch.cat(own) for n, own in out.items() if own}


def recorded_rows(
    own: Touched,
    of_rows: Mapping,
    named: Mapping[str, Tensor],
    drawn: Mapping[str, tuple[Tensor, list[Tensor]]],
    version: Tensor,
    at: Tensor,
    num_steps: int,
) -> Touched:
    """Return the log's part after this step. It records each changed row once, in a place of the row's table.

    drawn: {table: (rows that were drawn, their bits before)}.
    """
    starts, total = own.starts, own.starts[-1]
    known = {t: named[n] for t, (n, _, _) in enumerate(own.tables) if n in named}
    if not known:
        none = lambda x, value: x.index_put((at,), torch.full_like(x[:1], value))
        return replace(own, rows=none(own.rows, -1), over=none(own.over, 0)) if num_steps else own
    ids = torch.cat([torch.where((r >= 0) & (r < own.tables[t][1]), r + starts[t], total) for t, r in known.items()])
    last = own.last.index_put((ids,), version)
    if num_steps == 0:
        return replace(own, last=last)
    table = torch.cat([torch.full(r.shape, t, device=ids.device) for t, r in known.items()])
    rows, over = places_of(ids, table, own)
    taken = [row_bits(of_rows[n], rows[seat].clamp(min=0))[0] for (n, _, _), seat in zip(own.tables, own.seats)]
    for i, ((n, _, _), seat) in enumerate(zip(own.tables, own.seats)):
        taken[i] = latest(rows[seat], taken[i], *drawn[n]) if n in drawn else taken[i]
    old = tuple(x.index_put((at,), torch.cat(b)[None]) for x, b in zip(own.old, zip(*taken, strict=True), strict=True))
    return replace(
        own, rows=own.rows.index_put((at,), rows[None]), old=old, over=own.over.index_put((at,), over[None]), last=last
    )


def places_of(ids: Tensor, table: Tensor, own: Touched) -> tuple[Tensor, Tensor]:
    """Return (distinct rows i64[C], each in a place of its table, -1 elsewhere; how many found no place, i64[]).

    ids: i64[N], numbers of rows, S for none; table: i64[N], the table of each id.
    """
    starts, room, seats = own.starts, own.rows.shape[1], own.seats
    on = lambda xs: torch.tensor(xs, dtype=torch.int64, device=ids.device)
    ordered, order = torch.sort(ids)
    table, is_first = table[order], (ordered < starts[-1]) & begins(ordered)
    counts = torch.zeros(len(seats), dtype=torch.int64, device=ids.device).scatter_add(0, table, is_first.long())
    # The number of distinct rows of the same table before each row.
    inner = is_first.cumsum(0) - 1 - (counts.cumsum(0) - counts)[table]
    fits = is_first & (inner < on([s.stop - s.start for s in seats])[table])
    place = torch.where(fits, on([s.start for s in seats])[table] + inner, room)
    rows = torch.full((room + 1,), -1, device=ids.device).scatter(0, place, ordered - on(starts)[table])
    return rows[:-1], (is_first & ~fits).sum()


def undone(state: TrainState, log: DeltaLog, waiting: Sequence[str], k: int) -> tuple[TrainState, DeltaLog]:
    """Return state and log as they were k steps ago. The log's `version` and `last` continue to count."""
    at = (log.place - 1 - torch.arange(k, device=log.place.device)) % log.num_steps  # the newest step first
    of_rows, whole = rows_and_whole(state, waiting)
    version, touched = log.version + 1, []
    new, now = dict(of_rows), rows_and_whole(state, waiting)[0]  # A write in place needs views that nothing reads.
    for own in log.touched:
        marked = [own.last]
        for (n, _, _), seat, start in zip(own.tables, own.seats, own.starts, strict=False):
            new[n], rows = put_back(of_rows[n], now[n], own.rows[at][:, seat], [x[at][:, seat] for x in own.old])
            marked.append(torch.where(rows < 0, own.starts[-1], rows + start))
        last, *numbers = marked
        touched.append(replace(own, last=last.index_put((torch.cat(numbers),), version)))
    step, kept = of_bits([x[at[-1:]][0] for x in log.whole], (state.step, whole))
    made = with_rows_and_whole(replace(state, step=step), new, kept)
    log = replace(
        log, version=version, kept=log.kept - k, place=at[-1], stamp=stamp_of(made), touched=tuple(touched)
    )  # fmt: skip
    return made, log


def put_back(
    own: Mapping[str, Tensor], now: Mapping[str, Tensor], rows: Tensor, old: Sequence[Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return (a table and its slots with rows i64[k, C] put back to their oldest records, these rows).

    now: other views of the same table and slots, which are read."""
    if rows.shape[1] == 0:
        return dict(own), rows[0]
    flat = rows.flatten()
    # Sorting puts the records of a row next to each other, the oldest first. All of them put back the oldest values.
    ordered, order = torch.sort(torch.where(flat < 0, torch.iinfo(flat.dtype).max, flat).flip(0), stable=True)
    order = flat.shape[0] - 1 - order
    number = torch.arange(flat.shape[0], device=flat.device)
    first = torch.where(begins(ordered), number, 0).cummax(0)[0]
    first = torch.where(flat[order] < 0, 0, first)  # padding repeats the first entry
    is_any = flat[order[:1]] >= 0
    source, row = order[first], torch.where(is_any, ordered[first], 0)
    present, back = row_bits(now, row)
    taken = [torch.where(is_any[:, None], x.flatten(0, 1)[source], y) for x, y in zip(old, present, strict=True)]
    values = back(taken)
    put = {k: x.index_put((row,), typed_bits(values[k], now[k][row])) for k, x in own.items()}
    return put, torch.where(is_any, row, -1)


def begins(ordered: Tensor) -> Tensor:
    """Return whether each number differs from the number before it, bool[N]."""
    return torch.cat([torch.ones_like(ordered[:1], dtype=torch.bool), ordered[1:] != ordered[:-1]])


def log_specs(mesh: Mesh, num_steps: int, *, has_origin: bool = True) -> DeltaLog:
    """Return the specs of a log: each rank has its rows; counts, version and origin are equal on all ranks."""
    own = P(mesh.axis_names)
    log = cast(Any, DeltaLog)  # with a spec in place of each tensor
    return log(P(), P(), P(), P(), own, own, own, num_steps, P() if has_origin else None)
