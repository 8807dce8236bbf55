"""What a step with a batch changes in the caches, chosen and read before anything is written.

    vocabularies, batch --fetched--> which rows leave, which enter, and the records of those that enter

Shapes: N ids of a vocabulary's columns, n of which enter; W bytes of a record.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.cached._place import CALL, Place, joined_records, records_at
from funcrec.cached._records import unpacked
from funcrec.cached._table_store import TableStore, has, read_own, stray_problems, write_own
from funcrec.core import Problem, check, replace, reported
from funcrec.jagged import JaggedTensor
from funcrec.kernels import ops
from funcrec.kinds import Choice, DynamicTables, Vocabulary, choose, matrix_of, settled
from funcrec.train import TrainState


class Entering(NamedTuple):
    """The change of one cache.

    choice: which ids get which rows. before: the number of the last step.
    new_ids: i64[n], the rows of the store that enter. own: i64[p], places in `new_ids` of rows that this process has.
    records: u8[p, W], their records; those of `late` are not read yet.
    late: i64[L], places in `own` of rows that leave in an earlier step that was not taken yet.
    evicted, old_ids: i64[m], the rows of memory that other rows of the store leave, and those rows of the store.
    """

    choice: Choice
    before: int
    new_ids: Tensor
    own: Tensor
    records: Tensor
    late: Tensor
    evicted: Tensor
    old_ids: Tensor


Waiting = dict[int, dict[str, Tensor]]  # {number of a step that was not taken yet: the ids that leave in it}


class Fetched(NamedTuple):
    """A batch, and what its step changes in each cache. waiting: that of the `ahead` that read it."""

    batch: Any
    caches: dict[str, Entering]
    waiting: Waiting | None = None


def fetched(
    dynamic: DynamicTables,
    stores: Mapping[str, TableStore],
    batch: Any,
    ids: Mapping[str, JaggedTensor],
    leaving: Callable[[str, Tensor], Tensor] = lambda name, ids: torch.zeros(len(ids), dtype=torch.bool),
) -> Fetched:
    """Return what a step with the batch changes. It reads the stores, and writes nothing.

    ids: {cache: the ids of the batch, or of all ranks' batches, in one bag}.
    leaving: (vocabulary, ids i64[n]) -> b[n], whether the store's record of an id is not the last one yet.
    """
    caches = {}
    for name, of_cache in ids.items():
        vocabulary, store = dynamic.vocabularies[name], stores[name]
        choice = choose(vocabulary, of_cache)
        count, _, _, refused = choice.numbers.tolist()
        new_ids = choice.new_ids[:count].cpu()
        check(CALL, entering_problems(name, store, vocabulary, new_ids, refused))
        evicted, own = choice.evicted[:count], has(store, new_ids).nonzero().flatten()
        is_late = leaving(name, new_ids[own])
        late, early = is_late.nonzero().flatten(), (~is_late).nonzero().flatten()
        records = read_own(store, new_ids[own[early]])
        if len(late):
            records = records.new_zeros(len(own), store.store.width).index_copy_(0, early, records)
        leave = choice.changed[:count][evicted], choice.old_ids[:count][evicted].cpu()
        caches[name] = Entering(choice, int(vocabulary.now), new_ids, own, records, late, *leave)
    return Fetched(batch, caches)


def exchanged(
    place: Place, state: TrainState, stores: Mapping[str, TableStore], caches: Mapping[str, Entering]
) -> dict[str, Any]:
    """Write the records of rows that leave memory. Return {cache: (tables, slots)}, the rows that enter memory, padded
    to the N places of the choice."""
    old = {n: records_at(place, stores[n], state, x.evicted) for n, x in caches.items() if len(x.old_ids)}

    def on_one_rank() -> dict[str, Tensor]:
        for name, own in caches.items():
            if name in old:
                write_own(stores[name], own.old_ids, old[name])
            if len(own.late):  # they were written by now
                own.records.index_copy_(0, own.late, read_own(stores[name], own.new_ids[own.own[own.late]]))
        return {n: x.records for n, x in caches.items()}

    of_ranks, out = place.together("exchange rows with its store", on_one_rank), {}
    for name, own in caches.items():
        records = joined_records(stores[name], own.new_ids, [x[name] for x in of_ranks])
        padded = records.new_zeros(own.choice.changed.shape[0], records.shape[1])
        padded[: len(records)] = records
        out[name] = unpacked(stores[name].fields, padded.to(state.step.device))
    return out


def entered(state: TrainState, choices: Mapping[str, Choice], fresh: Mapping[str, Any]) -> TrainState:
    """Return the state whose caches hold the rows of a batch.

    fresh: {vocabulary: (tables, slots)} with N rows each, as `exchanged` returns it.
    """
    dynamic = state.tables
    tables, slots = dict(dynamic.tables), {n: dict(own) for n, own in state.slots.items()}
    vocabularies = dict(dynamic.vocabularies)
    for name, choice in choices.items():
        vocabularies[name] = settled(vocabularies[name], choice)
        new_tables, new_slots = fresh[name]
        put = lambda x, new, rows=choice.changed, count=choice.numbers[0]: ops.scatter_rows(x, rows, count, new)
        for table, rows in new_tables.items():
            wide = rows.to(ops.accumulation_dtype(rows.dtype))
            tables[table] = put(tables[table], wide)
            for slot, x in new_slots[table].items():
                old = slots[table][slot]
                slots[table][slot] = put(matrix_of(old), matrix_of(x)).reshape(old.shape)
    return replace(state, tables=replace(dynamic, tables=tables, vocabularies=vocabularies), slots=slots)


# -- validators --------------------------------------------------------------------------------------------------


def entering_problems(
    name: str, store: TableStore, vocabulary: Vocabulary, new_ids: Tensor, refused: int
) -> Iterator[Problem]:
    if (yield from reported(stray_problems(name, store, new_ids))):
        return
    if refused:
        got = f"{vocabulary.capacity} rows in memory, of which the step needs {refused} more in some bucket"
        hint = f"capacity={4 * (vocabulary.capacity + refused)}"
        yield Problem(f"cache {name!r} has no room for the ids of a step.", got, "room for all its ids", hint)
