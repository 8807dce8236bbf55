"""Vocabularies in a log: the entry of an id is a row, and so is the sketch of a bucket.

    rows[v] = (entries, tags) of R rows        rows[v's sketch] = R / 128 rows of 128 counts

So the log of a vocabulary is that of a table, and a Delta has the entries that changed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Problem, pytree, replace, sure
from funcrec.kernels.vocabulary import SLOTS
from funcrec.kinds import (
    DynamicTables,
    NewRows,
    Vocabulary,
    VocabularyShard,
    changed_slots,
    here,
    is_shard,
    stored_problems,
)
from funcrec.sharding import in_banks
from funcrec.tables import layout_in
from funcrec.train import TrainState

Rows = Mapping[str, Mapping[str, Tensor]]  # {table: {"": its rows, slot: rows}}


@pytree(static=("capacity", "seed"), optional=("buckets", "misses"))
class ChangedIds:
    """The entries of a vocabulary of `capacity` rows that changed. `seed` is the vocabulary's.

    rows: i64[M], ascending. tags: u8[M]. entries: i64[M, 2]. now: i64[]. buckets: i64[m], ascending, and misses:
    u8[m, 128], the sketches of these buckets; None for a vocabulary without a sketch."""

    rows: Tensor
    tags: Tensor
    entries: Tensor
    now: Tensor
    buckets: Tensor | None
    misses: Tensor | None
    capacity: int
    seed: int

    def put(self, v: Vocabulary) -> Vocabulary:
        """Return the vocabulary with these entries."""
        sketch = v.sketch
        if self.misses is not None:
            sketch = sure(sketch).view(-1, SLOTS).index_put((self.buckets,), self.misses).view(-1)
        put = lambda x, new: x.index_put((self.rows,), new)
        tags, entries = put(v.tags, self.tags), put(v.entries, self.entries)
        return replace(v, tags=tags, entries=entries, now=self.now, sketch=sketch)


def dynamic_in(tables: Any) -> DynamicTables | None:
    """Return the tables with vocabularies, or None. On a mesh they have no rows."""
    found = tables if layout_in(tables) is None else tables.rest
    return found if isinstance(found, DynamicTables) else None


def vocabularies_in(tables: Any) -> dict[str, Vocabulary]:
    """Return {name: the vocabulary, or the part of it that this rank has}."""
    found = dynamic_in(tables)
    return {} if found is None else {n: here(v) for n, v in found.vocabularies.items()}


def entries_of(vocabulary: str) -> str:
    """Return the name of a vocabulary's entries among the tables of a log."""
    return f"vocabularies[{vocabulary!r}]"


def sketch_of(vocabulary: str) -> str:
    return f"{entries_of(vocabulary)}.sketch"


def id_rows(tables: Any) -> dict[str, dict[str, Tensor]]:
    """Return the rows of all vocabularies, as those of tables."""
    out = {}
    for n, v in vocabularies_in(tables).items():
        out[entries_of(n)] = {"": v.entries, "tags": v.tags}
        if v.sketch is not None:
            out[sketch_of(n)] = {"": v.sketch.view(-1, SLOTS)}
    return out


def with_id_rows(tables: Any, rows: Rows, nows: Mapping[str, Tensor]) -> Any:
    """Return the tables with the rows of their vocabularies, and with the numbers of their last steps."""
    found, made = dynamic_in(tables), {}
    if found is None:
        return tables
    for n, v in found.vocabularies.items():
        sketch = None if here(v).sketch is None else rows[sketch_of(n)][""].view(-1)
        at = rows[entries_of(n)]
        changed = replace(here(v), tags=at["tags"], entries=at[""], now=nows[n], sketch=sketch)
        made[n] = replace(v, own=changed) if is_shard(v) else changed
    found = replace(found, vocabularies=made)
    return found if layout_in(tables) is None else replace(tables, rest=found)


def ids_named(tables: Any, new: NewRows) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return ({vocabulary's name in the log: the rows that a step changes}, {table or bank: its new rows}).

    Places without a row have -1. new: what the step drew."""
    own, changed = vocabularies_in(tables), {}
    for (n, v), (rows, buckets) in zip(own.items(), changed_slots(list(own.values()), new.seen), strict=True):
        changed[entries_of(n)] = rows
        if v.sketch is not None:
            changed[sketch_of(n)] = buckets
    drawn = {x[0]: new.used(list(own).index(x[1])) for x in sure(dynamic_in(tables)).first}
    return changed, drawn if layout_in(tables) is None else in_banks(tables, drawn)


def followed(tables: Any) -> dict[str, list[str]]:
    """Return {vocabulary's name in the log: the tables that follow it}."""
    out = {}
    for n in vocabularies_in(tables):
        out[entries_of(n)] = [x[0] for x in sure(dynamic_in(tables)).first if x[1] == n]
        out[sketch_of(n)] = out[entries_of(n)]
    return out


def changed_ids(v: Vocabulary | VocabularyShard, rows: Tensor, buckets: Tensor | None, first: int = 0) -> ChangedIds:
    """Return these entries of a vocabulary, and the sketches of these buckets.

    first: the row of the whole vocabulary with which the rows that this process has begin.
    """
    own, at = here(v), rows - first
    misses = None if buckets is None else sure(own.sketch).view(-1, SLOTS)[buckets - first // SLOTS]
    return ChangedIds(rows, own.tags[at], own.entries[at], own.now.clone(), buckets, misses, v.capacity, own.seed)


def latest(rows: Tensor, old: list[Tensor], new_rows: Tensor, before: list[Tensor]) -> list[Tensor]:
    """Return records of rows i64[C], with those of new rows i64[P] as they were `before` the rows were drawn.

    old: bits [C, W] after that, of each width; before: bits [P, W]."""
    if not new_rows.shape[0]:
        return old
    ordered, order = new_rows.sort()  # a slice under vmap is not contiguous, and its clone is
    at = torch.searchsorted(ordered, rows.clone()).clamp(max=new_rows.shape[0] - 1)
    is_new = (ordered[at] == rows) & (rows >= 0)
    return [torch.where(is_new[:, None], y[order[at]], x) for x, y in zip(old, before, strict=True)]


# -- validators --------------------------------------------------------------------------------------------------


def dynamic_log_problems(state: TrainState, admits: bool) -> Iterator[Problem]:
    """Report vocabularies whose changes the log would not see. admits: whether the step admits ids."""
    found = dynamic_in(state.tables)
    if found is not None and not admits:
        what, got = "the step admits no ids, and a log does not see those of `admission`.", "admit=False"
        yield Problem(what, got, "a step that admits the ids of its batch", "fr.train_step(..., admit=True)")
    yield from stored_problems(found) if found is not None else ()
