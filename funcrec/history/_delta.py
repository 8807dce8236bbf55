"""The rows of tables that changed. With these rows, the tables of a server become equal to those of the training.

    apply_delta(tables_then, delta(logged_now, since=then)) = tables_now        bit for bit

Shapes: M changed rows of a table, w columns of a part of it, D columns of the table, R rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Annotated, Any, cast

import torch
from torch import Tensor

from funcrec.core import Form, Movable, Problem, Size, check, describe, is_wrapped, plain, pytree, replace, sure, typed
from funcrec.history._ids import ChangedIds, changed_ids, dynamic_in, entries_of, id_rows, sketch_of, vocabularies_in
from funcrec.history._log import Touched
from funcrec.history._logged import Logged, form_problems, laid_out_problems, stamp_problems
from funcrec.kernels.vocabulary import SLOTS
from funcrec.kinds import DynamicTables, Vocabulary, VocabularyShard, is_shard, vocabulary_problems
from funcrec.mesh import Mesh, coordinates, rank_at
from funcrec.sharding import own_ranks
from funcrec.tables import layout_in, table_tensor_problems
from funcrec.train import TrainState


@pytree(static=("first", "shape"))
class ChangedRows:
    """Rows of a table that changed. rows: i64[M], ascending. values: f[M, w], the columns from `first` on.

    shape: the shape (R, D) of the table."""

    rows: Tensor
    values: Tensor
    first: int
    shape: tuple[int, int]


@pytree(optional=("origin", "vocabularies"))
class Delta(Movable):
    """The rows that changed, with their values. `delta` returns it, `apply_delta` applies it, and `fr.save` saves it.

    Args:
      tables: {table: its parts}. A part has M `rows`, which are integers, and `values` of w columns. The values begin
        at column `first` of the table. A table that is not sharded has one part.
      version: i64[], the version of the log. The next `delta` takes this version as `since`.
      origin: i64[], the origin of the log, or None in a Delta made by hand. A `delta` since a Delta checks that both
        have the same origin.
      vocabularies: {vocabulary: the entries that changed}, if the tables follow vocabularies: rows that passed to new
        ids, and ids that the steps saw. The rows of new ids are among `tables`.

    Example: a Delta without tables.
      >>> import torch, funcrec as fr
      >>> fr.Delta({}, version=torch.tensor(3)).version
      tensor(3)
    """

    tables: dict[str, tuple[Any, ...]]
    version: Tensor
    origin: Tensor | None = None
    vocabularies: dict[str, ChangedIds] | None = None

    def __repr__(self) -> str:
        counts = [f"{n}: {sum(x.rows.shape[0] for x in own)} rows" for n, own in self.tables.items()]
        counts += [f"{n}: {x.rows.shape[0]} entries" for n, x in (self.vocabularies or {}).items()]
        return f"Delta({', '.join(counts)}; version {describe(self.version)})"


@typed
def delta(
    logged: Logged, since: Size | Annotated[Tensor, Form("i[]")] | Delta = 0, *, mesh: Mesh | None = None
) -> Delta:
    """Return a Delta: the rows of all tables that changed since a version, with their present values.

    Args:
      logged: what a step of `fr.logged` returned. Its `steps` may be 0.
      since: the last Delta; or a version of this log, such as `logged.log.version` at a checkpoint; or 0 for the
        beginning of the log. The rows that `rewind` puts back count as changed. If a step after this version started
        from another state, such as a restored state, all rows count as changed. A version counts the changes of one
        log, along one sequence of steps. A Delta of another log raises. A plain version of another log is not noticed.
        Steps that were taken a second time from the same value are not noticed either.
      mesh: the mesh of a sharded state. On real ranks, each rank returns the rows that it holds, or its columns of
        tables that are cut by columns. The ranks return all changed rows together,
        and all entries of vocabularies that are cut by buckets.

    Raises:
      ValueError: the version is greater than the version of the log; the Delta belongs to another log; the log belongs
        to another state; or `mesh` is missing.
      TypeError: the state is an ensemble, whose members have deltas of different sizes.

    Law: `apply_delta` applies the Delta to the tables of version `since` and returns the present tables.

    Cost: it reads 8 bytes for each row of the tables, and the rows that changed.

    Example:
      >>> import torch, funcrec as fr
      >>> loss_fn = lambda p, ids: fr.lookup(p.tables, ids, [fr.FeatureConfig("clicked", table="item")]).values.sum()
      >>> kind = {"sparse": fr.optim.sgd(1.0), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
      >>> step = fr.logged(fr.train_step(loss_fn, **kind), steps=0)
      >>> run = step.init(fr.Params({"item": torch.zeros(3, 1)}, {}))
      >>> run, _ = step(run, fr.KeyedJaggedTensor.from_lists({"clicked": [[0, 0], [2]]}))
      >>> changed = fr.delta(run)
      >>> changed, fr.apply_delta({"item": torch.zeros(3, 1)}, changed)["item"].flatten()
      (Delta(item: 2 rows; version i64[]), tensor([-2.,  0., -1.]))
    """
    call = "funcrec.delta"
    check(call, member_problems(logged), origin_problems(since, logged))
    since = since.version if isinstance(since, Delta) else since
    check(call, laid_out_problems(logged.state, mesh), form_problems(logged))
    check(call, stamp_problems(logged, mesh))
    since = int(since)
    check(call, since_problems(since, logged))
    since = since if since >= int(logged.log.begun) else -1  # -1 is before the last change of every row
    state, out = logged.state, {}
    for n, found in (pair for own in logged.log.touched for pair in parts_of(own, state, since, mesh)):
        out.setdefault(n, []).append(found)
    found = dynamic_in(state.tables)
    shards = {} if found is None else {n: v for n, v in found.vocabularies.items() if is_shard(v)}
    slots = {n: x for own in logged.log.touched for n, x in slots_of(own, state, since, parts_here(shards, mesh))}
    found_ids = {
        n: changed_ids(shards.get(n, v), slots[entries_of(n)], slots.get(sketch_of(n)), first_row(shards, n, mesh))
        for n, v in vocabularies_in(state.tables).items()
    }
    whole = [n for n, _ in state.tables.layout.shapes] if mesh is not None else state.tables
    origin = None if logged.log.origin is None else logged.log.origin.clone()
    tables = {n: tuple(out.get(n, ())) for n in whole}
    return Delta(tables, logged.log.version.clone(), origin, found_ids or None)


def slots_of(
    own: Touched, state: TrainState, since: int, parts: Mapping[str, tuple[int, Sequence[tuple[int, int]]]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, rows that changed, i64[M]) of the entries and sketches of vocabularies.

    parts: those of cut vocabularies, as `parts_here` returns them. All ranks have the others.
    """
    for (n, num_rows, _), start in zip(own.tables, own.starts, strict=False):
        if n not in id_rows(state.tables):
            continue
        whole, each = parts.get(n, (num_rows, [(0, 0)]))  # the first rank's come first
        lasts, found = own.last.unflatten(0, (-1, own.starts[-1] + 1)), []
        for log, place in each:
            rows = (lasts[log][start : start + num_rows] > since).nonzero()[:, 0] + place * num_rows
            found.append(rows[rows < whole])
        yield n, torch.cat(found)


def parts_here(
    shards: Mapping[str, VocabularyShard], mesh: Mesh | None
) -> dict[str, tuple[int, list[tuple[int, int]]]]:
    """Return {name in a log: (rows of the whole, the parts in this process)} of vocabularies that are cut.

    A part is (the number of its log in this process, its number); the first of several ranks that have it has the log.
    """
    out = {}
    for n, v in shards.items():
        mesh = sure(mesh)
        num_parts = prod(mesh.shape[a] for a in v.axes)
        if mesh.is_emulated:
            first = dict.fromkeys(mesh.axis_names, 0)
            at = [first | coordinates(k, v.axes, mesh.shape) for k in range(num_parts)]
            own = [(rank_at(place, mesh.axis_names, mesh.shape), k) for k, place in enumerate(at)]
        else:
            own = [(0, rank_at(mesh.coordinates, v.axes, mesh.shape))]
        out[entries_of(n)], out[sketch_of(n)] = (v.num_rows, own), (v.num_rows // SLOTS, own)
    return out


def first_row(shards: Mapping[str, VocabularyShard], vocabulary: str, mesh: Mesh | None) -> int:
    """Return the first row of the whole vocabulary that this process has."""
    if vocabulary not in shards or sure(mesh).is_emulated:
        return 0
    mesh, shard = sure(mesh), shards[vocabulary]
    return rank_at(mesh.coordinates, shard.axes, mesh.shape) * shard.own.capacity


def parts_of(own: Touched, state: TrainState, since: int, mesh: Mesh | None) -> Iterator[tuple[str, ChangedRows]]:
    """Yield (table, its changed rows) for each part of a table that lies in this process."""
    ids = id_rows(state.tables)
    for (n, num_rows, _), start in zip(own.tables, own.starts, strict=False):
        if n in ids:
            continue
        x = state.tables[n]
        layout = layout_in(state.tables)
        if layout is None:
            rows = (own.last[start : start + num_rows] > since).nonzero()[:, 0]
            yield n, ChangedRows(rows, x[rows], 0, tuple(x.shape))
            continue
        mesh, number = sure(mesh), next(i for i, b in enumerate(layout.banks) if b.name == n)
        bank, lasts = layout.banks[number], own.last.unflatten(0, (-1, own.starts[-1] + 1))
        for s in (s for s in layout.shards if s.bank == number):
            for i, (rank, first) in enumerate(zip(s.ranks, s.starts, strict=True)):
                if rank not in own_ranks(bank, mesh):
                    continue
                # If several ranks hold the same rows, read the log of the first of these ranks.
                at = coordinates(rank, bank.axes, mesh.shape)
                place = rank_at(dict.fromkeys(mesh.axis_names, 0) | at, mesh.axis_names, mesh.shape)
                last = lasts[place if mesh.is_emulated else 0][start + first :][: s.part]
                shape = dict(layout.shapes)[s.table]
                height = min(s.part, max(0, shape[0] - i * s.part))
                rows = (last[:height] > since).nonzero()[:, 0]
                above = rank * bank.rows if mesh.is_emulated else 0
                yield s.table, ChangedRows(rows + i * s.part, x[above + first + rows], s.first, shape)


@typed
def apply_delta(tables: Mapping[str, Tensor], delta: Delta) -> dict[str, Tensor] | DynamicTables:
    """Return the tables with the rows of a Delta in place of the old rows. Other tables stay as they are.

    Args:
      tables: {table: f[R, D]}, whole, such as `params.tables` of a checkpoint. Or DynamicTables, whose vocabularies
        also take the entries of the Delta: new ids are then found, and evicted ids are unknown.
      delta: the result of `fr.delta`. Apply the Deltas of real ranks one after the other, in any order.

    Raises:
      KeyError: the Delta names a table or a vocabulary that `tables` lacks.
      ValueError: a table has another shape.
      TypeError: a table has another dtype. For tables in 16 bits, pass `delta.to(torch.float16)`.

    Cost: `fr.jit(fr.apply_delta, donate=("tables",))` writes the rows in place. Without donation, tables are copied.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.apply_delta({"item": torch.zeros(2, 1)}, fr.Delta({}, torch.tensor(3)))
      {'item': tensor([[0.],
              [0.]])}
    """
    call = "funcrec.apply_delta"
    own_ids = vocabularies_in(tables)
    check(call, table_tensor_problems(tables), delta_problems(tables, delta), ids_problems(own_ids, delta))
    out = dict(tables)
    for n, own in delta.tables.items():
        for part in own:
            first, last = part.first, part.first + part.values.shape[1]
            whole = last - first == out[n].shape[1]
            columns = () if whole else (torch.arange(first, last, device=part.rows.device),)
            rows = part.rows if whole else part.rows[:, None]
            out[n] = out[n].index_put((rows, *columns), part.values)
    if not own_ids:
        return out
    changed = {n: x.put(own_ids[n]) for n, x in (delta.vocabularies or {}).items()}
    return replace(cast(DynamicTables, tables), tables=out, vocabularies=own_ids | changed)


# -- validators --------------------------------------------------------------------------------------------------


def member_problems(logged: Logged) -> Iterator[Problem]:
    version = logged.log.version
    if version.dim() or is_wrapped(version):
        what, need = "there are several states.", "one: the rows that changed are not equally many in all"
        yield Problem(what, describe(version), need, "fr.tree.map(lambda x: x[0], logged)", TypeError)


def origin_problems(since: int | Tensor | Delta, logged: Logged) -> Iterator[Problem]:
    if isinstance(since, Delta) and since.origin is not None and logged.log.origin is not None:
        got, need = int(since.origin), int(logged.log.origin)
        if got != need:
            hint = "whole tables, and from then on the Deltas of this log"
            yield Problem("`since` belongs to another log.", f"origin {got}", f"a Delta of this one, {need}", hint)


def since_problems(since: int, logged: Logged) -> Iterator[Problem]:
    now = int(logged.log.version)
    if since < 0:
        yield Problem("`since` is negative.", f"{since}", ">= 0", "0, for all since the log was begun")
    if since > now:
        hint = "the `version` of a Delta of this log; 0, for all since it was begun"
        yield Problem("`since` is later than the log's version.", f"{since}", f"at most {now}, the log's version", hint)


def delta_problems(tables: Mapping[str, Tensor], delta: Delta) -> Iterator[Problem]:
    for n, own in delta.tables.items():
        if n not in tables:
            need = f"all of {list(delta.tables)}"
            yield Problem(f"table {n!r} does not exist.", f"{list(tables)}", need, kind=KeyError)
            continue
        if not isinstance(own, tuple | list) or not all(isinstance(part, ChangedRows) for part in own):
            got, need = describe(own), "a tuple of parts, as fr.delta makes them"
            yield Problem(f"`delta.tables[{n!r}]` has no rows.", got, need, "fr.delta(logged)", TypeError)
            continue
        for part in own:
            yield from part_problems(n, tables[n], part)


def ids_problems(own: Mapping[str, Vocabulary], delta: Delta) -> Iterator[Problem]:
    """Yield problems of the entries of a Delta with the vocabularies that take them."""
    given = delta.vocabularies or {}
    for n, x in given.items():
        if found := [*entry_problems(f"`delta.vocabularies[{n!r}]`", x)]:
            yield from found
            continue
        if n not in own:
            need, hint = f"all of {list(given)}", "the DynamicTables that were trained"
            yield Problem(f"vocabulary {n!r} does not exist.", f"{list(own)}", need, hint, KeyError)
            continue
        v = own[n]
        yield from vocabulary_problems(v)
        if (x.capacity, x.seed, x.misses is None) != (v.capacity, v.seed, v.sketch is None):
            got, need = f"{v!r}", f"{x.capacity} rows, seed={x.seed}{'' if x.misses is None else ', admit=k'}"
            yield Problem(f"the entries of {n!r} are not its vocabulary's.", got, need, "the same fr.vocabulary(...)")
        for place, most in ((x.rows, x.capacity), (x.buckets, x.capacity // SLOTS)):
            if (
                place is not None
                and place.numel()
                and plain(place) is not None
                and not 0 <= place.min() <= place.max() < most
            ):
                yield Problem(f"the entries of {n!r} are not among its vocabulary's.",
                              f"{int(place.min())} to {int(place.max())}", f"0 to {most - 1}")  # fmt: skip


def entry_problems(at: str, x: object) -> Iterator[Problem]:
    """Report entries that `fr.delta` does not make."""
    if not isinstance(x, ChangedIds):
        yield Problem(f"{at} has no entries.", describe(x), "ChangedIds", "fr.delta(logged)", TypeError)
        return
    forms = [("rows", torch.int64, ()), ("tags", torch.uint8, ()), ("entries", torch.int64, (2,))]
    sketch = [("buckets", torch.int64, ()), ("misses", torch.uint8, (SLOTS,))]
    for own in [forms, sketch] if x.misses is not None or x.buckets is not None else [forms]:
        count = getattr(getattr(x, own[0][0]), "shape", ())[:1]
        for name, dtype, rest in own:
            y = getattr(x, name)
            if not isinstance(y, Tensor) or not count or (y.dtype, y.shape) != (dtype, (*count, *rest)):
                need = f"{dtype}{[*count, *rest]}"
                yield Problem(f"{at}.{name} does not fit.", describe(y), need, "fr.delta(logged)", TypeError)


def part_problems(n: str, t: Tensor, part: ChangedRows) -> Iterator[Problem]:
    """Yield problems of a part with its table. While a program is staged, row numbers are unknown and not checked."""
    x, rows = part.values, part.rows
    if t.dtype != x.dtype or t.device != x.device:
        what, hint = f"the rows of {n!r} are not of its table's dtype and device.", f"delta.to(device, {t.dtype})"
        yield Problem(what, f"{describe(x)} on {x.device}", f"{describe(t)} on {t.device}", hint, TypeError)
    elif part.shape != tuple(t.shape):
        what, need = f"the rows of {n!r} are not its table's.", f"{list(part.shape)}, as it was trained"
        yield Problem(what, describe(t), need, "tables of the same configs")
    elif rows.dtype != torch.int64:
        yield Problem(f"the rows of {n!r} have no numbers.", describe(rows), "i64[M]", "rows.long()", TypeError)
    elif rows.dim() != 1 or x.dim() != 2 or x.shape[0] != rows.shape[0]:
        got = f"rows {describe(rows)}, values {describe(x)}"
        yield Problem(f"the rows of {n!r} are not as many as their values.", got, "i64[M] and f[M, w]")
    elif not 0 <= part.first <= t.shape[1] - x.shape[1]:
        got, need = f"{x.shape[1]} columns from {part.first} on", f"among {t.shape[1]}"
        yield Problem(f"the rows of {n!r} have columns that their table lacks.", got, need)
    elif rows.numel() and plain(rows) is not None and (rows.min() < 0 or rows.max() >= t.shape[0]):
        got, need = f"{int(rows.min())} to {int(rows.max())}", f"0 to {t.shape[0] - 1}"
        yield Problem(f"the rows of {n!r} are not among its table's.", got, need)
