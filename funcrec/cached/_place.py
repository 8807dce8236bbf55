"""Where the part in memory is: in this process, or on the ranks of a mesh, each of which has a part of every store.

    own ids, checks --together--> ids of all ranks          own records --together--> records of all ranks

On real ranks every function here is called by all ranks. An error of one rank is raised on all of them.
Shapes: M rows, W bytes of a record, n ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.cached._records import packed
from funcrec.cached._table_store import TableStore, has, read_own
from funcrec.core import map_tensors, replace, sure
from funcrec.jagged import JaggedTensor
from funcrec.kernels.reference_vocabulary import LOWER, halves
from funcrec.kinds import Choice, DynamicTables, Vocabulary, ids_of_batch, settled
from funcrec.mesh import Mesh, P, Ranks, bind, coordinates, mapped, psum, together
from funcrec.sharding import put_chosen, read_chosen
from funcrec.tables import layout_in
from funcrec.train import TrainState, state_specs

CALL = "funcrec.cached_step"


class Place(NamedTuple):
    """The mesh on which a step runs, or None, and the axes that cut its batch."""

    mesh: Mesh | None = None
    batch_axes: tuple[str, ...] | None = ()

    @property
    def ranks(self) -> Ranks:
        """Return the processes that have a part of each store."""
        return Ranks.of(self.mesh)

    def together(self, doing: str, work: Callable[[], Any]) -> list[Any]:
        """Return the results of work() of all ranks."""
        return together(self.ranks, CALL, doing, work)


def dynamic_of(tables: Any) -> DynamicTables:
    """Return the vocabularies and columns of cached tables; of sharded ones without the tables."""
    return tables if layout_in(tables) is None else tables.rest


def with_vocabularies(tables: Any, vocabularies: Mapping[str, Any]) -> Any:
    changed = replace(dynamic_of(tables), vocabularies=vocabularies)
    return changed if layout_in(tables) is None else replace(tables, rest=changed)


# -- ids -------------------------------------------------------------------------------------------------------------


def own_ids(place: Place, dynamic: DynamicTables, batch: Any) -> dict[str, Any]:
    """Return {cache: the ids of this process's batch, in one bag}; on real ranks (the ids, the room of the bag)."""
    ids = ids_of_batch(dynamic, batch)
    if place.ranks.size == 1:
        return ids
    return {n: (bag.values[: int(bag.offsets[-1])].cpu(), bag.capacity) for n, bag in ids.items()}


def joined_ids(place: Place, of_ranks: Sequence[Mapping[str, Any]], device: Any) -> dict[str, JaggedTensor]:
    """Return {cache: the ids of the global batch, in one bag}. of_ranks: `own_ids` of each rank."""
    if place.ranks.size == 1:
        return dict(of_ranks[0])
    # ranks that differ on other axes alone have the same batch
    mesh, axes = sure(place.mesh), sure(place.batch_axes)
    is_first = lambda r: all(i == 0 for a, i in coordinates(r, mesh.axis_names, mesh.shape).items() if a not in axes)
    each, out = [x for r, x in enumerate(of_ranks) if is_first(r)], {}
    for name in each[0]:
        values = torch.cat([x[name][0] for x in each])
        rest = sum(x[name][1] for x in each) - len(values)  # padding, so that all steps have one form
        padded = torch.cat([values, values.new_zeros(rest)])
        out[name] = JaggedTensor(padded.to(device), torch.tensor([0, len(values)], device=device))
    return out


# -- rows ------------------------------------------------------------------------------------------------------------


def records_at(place: Place, store: TableStore, state: TrainState, rows: Tensor) -> Tensor:
    """Return the records of some rows of memory on every rank, u8[M, W] on the CPU."""
    if place.mesh is None:
        return packed(store.fields, state.tables, state.slots, rows).cpu()
    layout, mesh = state.tables.layout, place.mesh
    tables: dict[str, Tensor] = {}
    slots: dict[str, dict[str, Tensor]] = {}
    for f in store.fields:
        if f.slot is None:
            tables[f.table] = read_chosen(layout, state.tables.banks, f.table, mesh, rows)
        else:
            leaves = {bank: own[f.slot] for bank, own in state.slots.items() if f.slot in own}
            slots.setdefault(f.table, {})[f.slot] = read_chosen(layout, leaves, f.table, mesh, rows)
    records = packed(store.fields, tables, slots)
    if place.ranks.size > 1 and len(rows):
        with bind(mesh.bound_axes(mesh.axis_names, records.device)):  # bytes of which all but one are zero
            records = psum(records.view(torch.int8), mesh.axis_names).view(torch.uint8)
    return records.cpu()


def read_records(place: Place, store: TableStore, rows: Tensor) -> Tensor:
    """Return the records of rows of the store, u8[M, W], read by the ranks that have them."""
    of_ranks = place.together("read its store", lambda: read_own(store, rows))
    return joined_records(store, rows, of_ranks)


def joined_records(store: TableStore, rows: Tensor, of_ranks: Sequence[Tensor]) -> Tensor:
    """Return the records of rows of the store, u8[M, W]. of_ranks: the records that each rank has, in their order."""
    if len(of_ranks) == 1:
        return of_ranks[0]
    records = torch.empty(len(rows), store.store.width, dtype=torch.uint8)
    for rank, own in enumerate(of_ranks):
        records[has(replace(store, part=(rank, len(of_ranks))), rows)] = own
    return records


def seen_after(vocabulary: Vocabulary, step: int) -> Tensor:
    """Return the rows whose ids were seen after a step, i64[M]."""
    age = (vocabulary.now - halves(vocabulary.entries[:, 1])[0]) & LOWER
    return ((vocabulary.tags != 0) & (age < vocabulary.now - step)).nonzero().flatten()


def entered_on_ranks(
    place: Place, state: TrainState, choices: Mapping[str, Choice], fresh: Mapping[str, Any]
) -> TrainState:
    """Return the state on a mesh whose caches hold the rows of a batch.

    fresh: {vocabulary: (tables, slots)} with N rows each, as `exchanged` returns it.
    """

    def one_rank(state: TrainState, given: tuple) -> TrainState:
        choices, fresh = given
        tables, slots, vocabularies = state.tables, state.slots, dict(state.tables.rest.vocabularies)
        for name, choice in choices.items():
            vocabularies[name] = settled(vocabularies[name], choice)
            banks, slots = put_chosen(tables, slots, choice.changed, choice.numbers[0], *fresh[name])
            tables = replace(tables, banks=banks)
        return replace(state, tables=with_vocabularies(tables, vocabularies), slots=slots)

    specs = state_specs(state)
    given = dict(choices), dict(fresh)
    run = mapped(one_rank, place.mesh, (specs, map_tensors(lambda x: P(), given)), specs, check=False)
    return run(state, given)
