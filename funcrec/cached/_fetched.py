"""What a step with a batch changes in the caches, chosen and read before anything is written.

    vocabularies, batch --fetched--> which rows leave, which enter, and the records of those that enter

Shapes: N ids of a vocabulary's columns, n of which enter; W bytes of a record.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.cached._records import packed, unpacked
from funcrec.cached._table_store import TableStore, stray_problems
from funcrec.core import Problem, check, replace, reported
from funcrec.kernels import ops
from funcrec.kinds import Choice, DynamicTables, Vocabulary, choose, ids_of_batch, matrix_of, settled
from funcrec.train import TrainState

CALL = "funcrec.cached_step"


class Entering(NamedTuple):
    """The change of one cache.

    choice: which ids get which rows. before: the number of the last step.
    new_ids: i64[n], the rows of the store that enter. records: u8[n, W]; those of `late` are not read yet.
    late: i64[L], places in `new_ids` of rows that leave in an earlier step that was not taken yet.
    evicted, old_ids: i64[m], the rows of memory that other rows of the store leave, and those rows of the store.
    """

    choice: Choice
    before: int
    new_ids: Tensor
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
    leaving: Callable[[str, Tensor], Tensor] = lambda name, ids: torch.zeros(len(ids), dtype=torch.bool),
) -> Fetched:
    """Return what a step with the batch changes. It reads the stores, and writes nothing.

    leaving: (vocabulary, ids i64[n]) -> b[n], whether the store's record of an id is not the last one yet.
    """
    caches = {}
    for name, ids in ids_of_batch(dynamic, batch).items():
        vocabulary, store = dynamic.vocabularies[name], stores[name].store
        choice = choose(vocabulary, ids)
        count, _, _, refused = choice.numbers.tolist()
        new_ids = choice.new_ids[:count].cpu()
        check(CALL, entering_problems(name, stores[name], vocabulary, new_ids, refused))
        evicted = choice.evicted[:count]
        is_late = leaving(name, new_ids)
        late, early = is_late.nonzero().flatten(), (~is_late).nonzero().flatten()
        records = store.read(new_ids[early])
        if len(late):
            records = records.new_zeros(count, store.width).index_copy_(0, early, records)
        leave = choice.changed[:count][evicted], choice.old_ids[:count][evicted].cpu()
        caches[name] = Entering(choice, int(vocabulary.now), new_ids, records, late, *leave)
    return Fetched(batch, caches)


def write_evicted(state: TrainState, stores: Mapping[str, TableStore], caches: Mapping[str, Entering]) -> None:
    """Write the records of rows that leave memory."""
    for name, own in caches.items():
        if len(own.old_ids):
            records = packed(stores[name].fields, state.tables, state.slots, own.evicted)
            stores[name].store.write(own.old_ids, records.cpu())


def fresh_rows(stores: Mapping[str, TableStore], caches: Mapping[str, Entering], device: torch.device) -> dict:
    """Return {vocabulary: (tables, slots)}, the rows that enter memory, padded to the N places of the choice."""
    out = {}
    for name, own in caches.items():
        records = own.records
        if len(own.late):
            records.index_copy_(0, own.late, stores[name].store.read(own.new_ids[own.late]))
        padded = records.new_zeros(own.choice.changed.shape[0], records.shape[1])
        padded[: len(records)] = records
        out[name] = unpacked(stores[name].fields, padded.to(device))
    return out


def entered(state: TrainState, choices: Mapping[str, Choice], fresh: Mapping[str, Any]) -> TrainState:
    """Return the state whose caches hold the rows of a batch.

    fresh: {vocabulary: (tables, slots)} with N rows each, as `fresh_rows` returns it.
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
