"""A step whose tables are larger than memory: rows that its batch reads enter memory before, and others leave it.

    state, batch --fetched--> rows that leave are written  ─▶  rows that enter  ─▶  step  ─▶  state', metrics

A store changes, so it belongs to one state: the last. A step with any other state is refused.
"""

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor

from funcrec.cached._checks import (
    batch_problems,
    level_problems,
    owner_problems,
    policy_problems,
    sample_problems,
    sparse_problems,
    state_problems,
    step_problems,
    store_problems,
    tables_problems,
    tracked_problems,
)
from funcrec.cached._fetched import Fetched, Waiting, entered, exchanged, fetched
from funcrec.cached._look_ahead import keeping, windowed
from funcrec.cached._place import CALL, Place, dynamic_of, entered_on_ranks, joined_ids, own_ids, records_at, seen_after
from funcrec.cached._rows_read import ids_in, rows_read
from funcrec.cached._table_store import TableStore, write_own
from funcrec.cached._whole_tables import whole_tables
from funcrec.compile import jit
from funcrec.core import Count, Size, check, map_tensors, replace, sure, typed
from funcrec.data import prefetch
from funcrec.jagged import JaggedTensor
from funcrec.kinds import Choice, DynamicTables, settle
from funcrec.sharding import gather_tables
from funcrec.tables import Params
from funcrec.train import TrainState, update_of

CHUNK = 1 << 16  # rows that a commit writes at once
SAMPLE = 1024  # rows that a rollback compares with the store


@typed
def cached_step(
    step: Callable[..., Any], stores: Mapping[str, TableStore], *, depth: Count = 1, look_ahead: Size = 0
) -> "CachedStep":
    """Return a step that trains `cached_tables`: (state, batch) -> (state, metrics).

    Rows that the batch reads are brought into memory, and rows that leave are written to their stores. Then `step`
    runs, and does not know of it.

    Args:
      step: `train_step(..., admit=False)`, plain or jitted. If it donates its state, caches change in place. On a mesh
        its plan places the rows in memory, and each rank has a part of every store.
      stores: {name of the cache: its store}, as in `cached_tables`.
      depth: how many batches `ahead` reads before they are taken.
      look_ahead: the number of later batches whose rows a cache keeps: Belady's rule. `ahead` takes these batches from
        their iterator first, so an error of the iterator comes earlier. It raises the hit rate, and costs a search of
        all their ids in each step. The caches' policy must be "lru".

    Returns:
      A step `cached`: `cached(state, batch)`; `cached.init(params)`. metrics["vocabularies"] has for each cache the
        numbers of the batch's distinct ids: hits, admitted, evicted.
      `for batch in cached.ahead(state, batches): state, metrics = cached(state, batch)` reads the stores for the next
        batches in a thread while a step computes; `cached.run(state, batches)` yields the (state, metrics).
      `cached.read(params, batch)` returns params and a batch with all rows that the batch reads, from memory or from
        the stores: `evaluate(lambda params, batch: predict(*cached.read(params, batch)), ...)`. It changes no cache and
        no store. The tables have the rows of this batch alone: ids of another batch read NaN, and other columns,
        losses over all items, exports and `shard_tables` refuse them. On real ranks all call it.
      `cached.commit(state)` writes the rows that changed since the last commit, and commits the stores. Save the state
        afterwards. `cached.rollback(state)` returns the stores to the commit of a loaded state: that of the last
        commit, or of the one before.
      `cached.gather(params, path)` returns params with plain tables of all rows, mapped from new files if there is a
        path: for `export`. On real ranks each needs a path of its own.

    Raises:
      IndexError: an id is not a row of its store. Nothing is written.
      ValueError: a state is not the one that the stores belong to, or a cache has no room for the ids of a step.
        Nothing is written.
      TypeError: a state is tracked by a transform.

    Law: any capacity, policy and depth give the losses, rows and slots of training with whole tables in memory, bit for
      bit, also with `stochastic_rounding` and `clip`. If a process is killed, the stores and the last saved state go on
      as if it had not been, after `rollback`.

      On a mesh, by one plan and with `exact=True`, they are those of whole tables on the mesh; stores do not depend on
      the plan.

    Cost: `commit` and evictions write the rows that changed, each once; a step reads the rows that enter. A cache takes
      17 bytes of memory for a row besides the row and its slots; `ahead` takes them twice. On a mesh every rank has the
      whole vocabulary, gets the ids of all ranks, and the records that enter or leave; `read` gathers all tables, once
      for each state.

    Example:
      >>> import torch, funcrec as fr
      >>> users, read = fr.TableConfig("user", 10_000, 2), [fr.FeatureConfig("user", table="user")]
      >>> sparse = fr.optim.sgd(0.5)
      >>> store = fr.table_store([users], sparse, key=fr.key(0))
      >>> tables = fr.cached_tables({}, {"users": fr.CacheConfig(store, capacity=128, features=read)})
      >>> loss = lambda params, ids: (fr.lookup(params.tables, ids, read).values - 1).square().mean()
      >>> cached = fr.cached_step(fr.train_step(loss, sparse=sparse, admit=False), {"users": store})
      >>> state = cached.init(fr.Params(tables, {}))
      >>> for first in (0, 5000, 0):
      ...     ids = fr.KeyedJaggedTensor.from_lists({"user": [[first + i] for i in range(100)]})
      ...     state, metrics = cached(state, ids)
      >>> cached.commit(state)
      >>> state.tables, store.progress.committed
      (DynamicTables({user: f32[129, 2] of users}, {users: Vocabulary(128 rows, policy='lru', unknown=1)}), 3)
    """
    check(CALL, step_problems(step))
    check(CALL, store_problems(stores, place_of(step)))
    check(CALL, sparse_problems(sure(update_of(step)).recipe.sparse, stores))
    return CachedStep(step, dict(stores), depth, look_ahead)


class CachedStep:
    """The result of `cached_step`."""

    step: Callable[..., Any]
    stores: dict[str, TableStore]
    depth: int
    look_ahead: int
    place: Any
    enter: Callable[..., Any]
    lock: Any

    def __init__(self, step: Callable[..., Any], stores: dict[str, TableStore], depth: int, look_ahead: int):
        self.step, self.stores, self.depth, self.look_ahead = step, stores, depth, look_ahead
        self.place = place_of(step)
        own = entered if self.place.mesh is None else functools.partial(entered_on_ranks, self.place)

        def cached_step(state: TrainState, choices: Any, fresh: Any) -> TrainState:  # the name that errors tell
            return own(state, choices, fresh)

        self.enter = jit(cached_step, donate=("state",)) if getattr(step, "donate", ()) else own
        self.waiting: Waiting = {}  # that of the open `ahead`; any other step ends it
        self.whole: tuple[Any, DynamicTables] | None = None  # sharded tables that were read, and the same gathered
        self.lock = threading.Lock()

    @property
    def init(self) -> Callable[..., TrainState]:
        """Return the step's `init`."""
        return self.step.init

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[Any, Any]]:
        is_ahead = isinstance(batch, Fetched)

        def taken() -> Any:
            check(CALL, tracked_problems({"batch": batch}))
            if is_ahead:
                return check(CALL, batch_problems(batch, self.stores, batch.waiting is not self.waiting))
            return own_ids(self.place, dynamic_of(state.tables), batch)

        found = self._checked(state, taken)
        one = batch if is_ahead else self._fetched(state, batch, found)
        if not is_ahead:
            self.waiting = {}  # batches that were read ahead know nothing of this step
        self.whole = None
        fresh = exchanged(self.place, state, self.stores, one.caches)
        with self.lock:  # not before: the thread would read records that are still to be written
            self.waiting.pop(number_of(one), None)  # a step that failed is taken again
        state, metrics = self.step(self.enter(state, {n: x.choice for n, x in one.caches.items()}, fresh), one.batch)
        for name, own in one.caches.items():
            self.stores[name].progress.now = own.before + 1
        return state, metrics | {"vocabularies": {n: counts_of(x.choice) for n, x in one.caches.items()}}

    def _fetched(self, state: TrainState, batch: Any, of_ranks: Sequence[Any]) -> Fetched:
        ids, found = joined_ids(self.place, of_ranks, state.step.device), []
        read = lambda: found.append(fetched(dynamic_of(state.tables), self.stores, batch, ids))
        self.place.together("read its store", read)
        return found[0]

    def ahead(self, state: TrainState, batches: Iterable[Any]) -> Iterator[Fetched]:
        """Return an iterator over batches with what their steps read, which a thread reads `depth` batches ahead.

        state: that of the first step; each following step takes the state of the step before.
        """
        self._checked(state, lambda: check(CALL, policy_problems(state.tables, self.look_ahead)), "read ahead")
        self.waiting = waiting = {}
        dynamic, place = dynamic_of(state.tables), self.place
        fetch = self._fetcher(dynamic, waiting)
        if place.ranks.size > 1:
            pairs = windowed(ids_of_ranks(place, dynamic, batches, state.step.device), self.look_ahead)
            return read_ahead(place, fetch, pairs, self.depth)
        pairs = windowed(((x, own_ids(place, dynamic, x)) for x in batches), self.look_ahead)
        return prefetch((fetch(*pair, later) for pair, later in pairs), depth=self.depth)

    def _fetcher(self, dynamic: DynamicTables, waiting: Waiting) -> Callable[..., Fetched]:
        """Return a function (batch, ids, [(batch, ids) of later steps]) -> Fetched, for calls in the order of the
        steps."""
        leaving, held = functools.partial(self._leave, waiting), map_tensors(Tensor.clone, dynamic.vocabularies)

        def fetch(batch: Any, ids: Mapping[str, JaggedTensor], later: Sequence[tuple[Any, ...]]) -> Fetched:
            kept = {n: keeping(v, [x[n] for _, x in later]) for n, v in held.items()}
            one = fetched(replace(dynamic, vocabularies=kept), self.stores, batch, ids, leaving)
            with self.lock:
                waiting[number_of(one)] = {n: x.old_ids for n, x in one.caches.items()}
            held.update({n: settle(held[n], x.choice) for n, x in one.caches.items()})
            return one._replace(waiting=waiting)

        return fetch

    def _leave(self, waiting: Waiting, name: str, ids: Tensor) -> Tensor:
        """Return whether each id leaves memory in a step that was not taken yet."""
        with self.lock:
            others = [x[name] for x in waiting.values()]
        return torch.isin(ids, torch.cat(others)) if others else torch.zeros(len(ids), dtype=torch.bool)

    def run(self, state: TrainState, batches: Iterable[Any]) -> Iterator[tuple[TrainState, dict[Any, Any]]]:
        """Yield (state, metrics) after each batch."""
        for batch in self.ahead(state, batches):
            state, metrics = self(state, batch)
            yield state, metrics

    def read(self, params: Params, batch: Any) -> tuple[Params, Any]:
        """Return (params with tables of the rows that the batch reads, the batch with rows of these tables)."""

        def taken() -> None:
            check(CALL, tracked_problems({"params.tables": params.tables, "ids": ids_in(batch)}), level_problems())
            check(
                CALL,
                tables_problems(params.tables, self.stores, self.place),
                owner_problems(params.tables, self.stores),
            )

        self.place.together("read rows", taken)
        tables, of_rows = rows_read(self.place, self._gathered(params.tables), self.stores, batch)
        return replace(params, tables=tables), of_rows

    def gather(self, params: Params, path: str | os.PathLike[str] | None = None) -> Params:
        """Return params with plain tables of all rows, in memory or mapped from new files in the folder `path`.

        They are for `export`, `save_safetensors` or an evaluation over all items. The files must stay while the tables
        are used, and nobody may write to them.
        """

        def taken() -> None:
            check(CALL, tracked_problems({"params.tables": params.tables}), level_problems())
            check(CALL, tables_problems(params.tables, self.stores, self.place))
            check(CALL, owner_problems(params.tables, self.stores))

        self.place.together("gather rows", taken)
        return replace(params, tables=whole_tables(self.place, self._gathered(params.tables), self.stores, path))

    def _gathered(self, tables: Any) -> DynamicTables:
        """Return the tables, gathered if they lie on a mesh; those of one state are gathered once."""
        if self.place.mesh is None:
            return tables
        if self.whole is None or self.whole[0] is not tables:
            self.whole = tables, cast(DynamicTables, gather_tables(tables, self.place.mesh))
        return sure(self.whole)[1]

    def commit(self, state: TrainState) -> None:
        """Write the rows that changed since the last commit, and commit the stores.

        The save of the state at the commit before must be whole by now: a store returns by one commit at most.
        """
        self._checked(state, doing="commit")
        for name, store in self.stores.items():
            vocabulary, progress = dynamic_of(state.tables).vocabularies[name], store.progress
            for rows in seen_after(vocabulary, progress.committed).split(CHUNK):
                ids, records = vocabulary.entries[rows, 0].cpu(), records_at(self.place, store, state, rows)
                self.place.together("write to its store", functools.partial(write_own, store, ids, records))
        self.place.together("commit its store", self._commit)

    def _commit(self) -> None:
        for store in self.stores.values():
            store.store.commit(store.progress.now)
            store.progress.committed = store.progress.now

    def rollback(self, state: TrainState) -> None:
        """Return the stores to the commit of a state, which was saved after it."""

        def on_one_rank() -> None:
            check(CALL, state_problems(state, self.stores, self.place))
            self.waiting = {}
            for name, store in self.stores.items():
                last = store.store.rollback(int(dynamic_of(state.tables).vocabularies[name].now))
                store.progress.now = store.progress.committed = last
                store.progress.is_known = False

        self.place.together("return to a commit", on_one_rank)
        self._compare(state)

    def _checked(
        self, state: TrainState, more: Callable[[], Any] = lambda: None, doing: str = "take a step"
    ) -> list[Any]:
        """Return the results of more() of all ranks, after checks of the state."""

        def on_one_rank() -> Any:
            check(CALL, tracked_problems({"state": state}), level_problems())
            check(CALL, state_problems(state, self.stores, self.place))
            check(CALL, owner_problems(state.tables, self.stores))
            return more()

        found = self.place.together(doing, on_one_rank)
        self._compare(state)
        return found

    def _compare(self, state: TrainState) -> None:
        """Compare the rows in memory with the stores that no state was compared with yet."""
        for name, store in self.stores.items():
            if store.progress.is_known:
                continue
            vocabulary = dynamic_of(state.tables).vocabularies[name]
            rows = seen_after(vocabulary, 0)
            rows = rows[:: -(-len(rows) // SAMPLE) or 1]
            ids, records = vocabulary.entries[rows, 0].cpu(), records_at(self.place, store, state, rows)
            compare = lambda: check(CALL, sample_problems(name, store, ids, records))  # noqa: B023
            self.place.together("compare its store", compare)
            store.progress.is_known = True

    def __repr__(self) -> str:
        return f"<funcrec.cached_step of {self.step!r}, {', '.join(self.stores)}>"


def ids_of_ranks(
    place: Place, dynamic: DynamicTables, batches: Iterable, device: torch.device
) -> Iterator[tuple[Any, dict[str, JaggedTensor]]]:
    """Yield (batch, ids of all ranks' batches)."""
    for batch in batches:
        of_ranks = place.together("read its batch", functools.partial(own_ids, place, dynamic, batch))
        yield batch, joined_ids(place, of_ranks, device)


def read_ahead(
    place: Place, fetch: Callable[..., Any], pairs: Iterable[tuple[Any, ...]], depth: int
) -> Iterator[Fetched]:
    """Yield what fetch(batch, ids, later) returns. A thread calls it, and this one exchanges the ids: ranks send in one
    order."""
    with ThreadPoolExecutor(1) as thread:
        begun: deque[Future] = deque()

        def done() -> Fetched:
            found: list[Fetched] = []
            place.together("read its store", lambda: found.append(begun.popleft().result()))
            return found[0]

        for pair, later in pairs:
            begun.append(thread.submit(fetch, *pair, later))
            if len(begun) > depth:
                yield done()
        while begun:
            yield done()


def place_of(step: Callable) -> Place:
    """Return the place where a step of `train_step` runs."""
    where = sure(update_of(step)).where
    return Place(where.mesh, where.batch_axes)


def counts_of(choice: Choice) -> dict[str, Tensor]:
    """Return the numbers of distinct ids of a step, i64[], by the names that a step with vocabularies gives them."""
    return dict(zip(("admitted", "evicted", "hits", "refused"), choice.numbers.unbind(), strict=True))


def number_of(one: Fetched) -> int:
    """Return the number of the step of a batch."""
    return next(iter(one.caches.values())).before + 1
