"""A step whose tables are larger than memory: rows that its batch reads enter memory before, and others leave it.

    state, batch --fetched--> rows that leave are written  ─▶  rows that enter  ─▶  step  ─▶  state', metrics

A store changes, so it belongs to one state: the last. A step with any other state is refused.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funcrec.cached._fetched import CALL, Fetched, Waiting, entered, fetched, fresh_rows, write_evicted
from funcrec.cached._records import packed
from funcrec.cached._rows_read import ids_in, rows_read
from funcrec.cached._table_store import TableStore
from funcrec.compile import is_transformed, jit
from funcrec.core import (
    Count,
    Problem,
    any_tracked,
    check,
    describe,
    map_tensors,
    replace,
    reported,
    tree_leaves,
    typed,
)
from funcrec.data import prefetch
from funcrec.kernels.reference_vocabulary import LOWER, halves
from funcrec.kinds import Choice, DynamicTables, Vocabulary, settle
from funcrec.optim import RowOptimizer
from funcrec.tables import Params
from funcrec.train import TrainState, update_of

CHUNK = 1 << 16  # rows that a commit writes at once
SAMPLE = 1024  # rows that a rollback compares with the store


@typed
def cached_step(step: Callable, stores: Mapping[str, TableStore], *, depth: Count = 1) -> "CachedStep":
    """Return a step that trains `cached_tables`: (state, batch) -> (state, metrics).

    Rows that the batch reads are brought into memory, and rows that leave are written to their stores. Then `step`
    runs, and does not know of it.

    Args:
      step: `train_step(..., admit=False)`, plain or jitted, on no mesh. If it donates its state, caches change in
        place.
      stores: {name of the cache: its store}, as in `cached_tables`.
      depth: how many batches `ahead` reads before they are taken.

    Returns:
      A step `cached`: `cached(state, batch)`; `cached.init(params)`. metrics["vocabularies"] has for each cache the
        numbers of the batch's distinct ids: hits, admitted, evicted.
      `for batch in cached.ahead(state, batches): state, metrics = cached(state, batch)` reads the stores for the next
        batches in a thread while a step computes; `cached.run(state, batches)` yields the (state, metrics).
      `cached.read(params, batch)` returns params and a batch with all rows that the batch reads, from memory or from
        the stores, as plain tables: `evaluate(lambda params, batch: predict(*cached.read(params, batch)), ...)`. It
        changes no cache and no store.
      `cached.commit(state)` writes the rows that changed since the last commit, and commits the stores. Save the state
        afterwards. `cached.rollback(state)` returns the stores to the commit of a loaded state: that of the last
        commit, or of the one before.

    Raises:
      IndexError: an id is not a row of its store. Nothing is written.
      ValueError: a state is not the one that the stores belong to, or a cache has no room for the ids of a step.
        Nothing is written.
      TypeError: a state is tracked by a transform.

    Law: any capacity, policy and depth give the losses, rows and slots of training with whole tables in memory, bit for
      bit. (Not with `stochastic_rounding`, which draws by the row in memory, nor with `clip(max_norm=)`, whose norm
      sums the rows in their order.) If a process is killed, the stores and the last saved state go on as if it had not
      been, after `rollback`.

    Cost: `commit` and evictions write the rows that changed, each once; a step reads the rows that enter. A cache takes
      17 bytes of memory for a row besides the row and its slots; `ahead` takes them twice.

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
    check(CALL, step_problems(step), store_problems(stores))
    check(CALL, sparse_problems(update_of(step).recipe.sparse, stores))
    return CachedStep(step, dict(stores), depth)


class CachedStep:
    """The result of `cached_step`."""

    def __init__(self, step: Callable, stores: dict[str, TableStore], depth: int):
        self.step, self.stores, self.depth = step, stores, depth
        donates = bool(getattr(step, "donate", ()))
        self.enter = jit(entered, donate=("state",)) if donates else entered
        self.waiting: Waiting = {}  # that of the open `ahead`; any other step ends it
        self.lock = threading.Lock()

    @property
    def init(self) -> Callable:
        """Return the step's `init`."""
        return self.step.init

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict]:
        is_ahead = isinstance(batch, Fetched)
        check(CALL, tracked_problems({"batch": batch}))
        self._check(state)
        one = batch if is_ahead else fetched(state.tables, self.stores, batch)
        check(CALL, batch_problems(one, self.stores, is_ahead and one.waiting is not self.waiting))
        if not is_ahead:
            self.waiting = {}  # batches that were read ahead know nothing of this step
        write_evicted(state, self.stores, one.caches)
        if is_ahead:
            with self.lock:
                self.waiting.pop(number_of(one), None)  # a step that failed is taken again
        fresh = fresh_rows(self.stores, one.caches, state.step.device)
        state, metrics = self.step(self.enter(state, {n: x.choice for n, x in one.caches.items()}, fresh), one.batch)
        for name, own in one.caches.items():
            self.stores[name].progress.now = own.before + 1
        return state, metrics | {"vocabularies": {n: counts_of(x.choice) for n, x in one.caches.items()}}

    def ahead(self, state: TrainState, batches: Iterable) -> Iterator[Fetched]:
        """Return an iterator over batches with what their steps read, which a thread reads `depth` batches ahead.

        state: that of the first step; each following step takes the state of the step before.
        """
        self._check(state)
        self.waiting = waiting = {}
        return prefetch(self._fetch_all(state.tables, batches, waiting), depth=self.depth)

    def _fetch_all(self, dynamic: DynamicTables, batches: Iterable, waiting: Waiting) -> Iterator[Fetched]:
        leaving = functools.partial(self._leave, waiting)
        vocabularies = map_tensors(Tensor.clone, dynamic.vocabularies)
        for batch in batches:
            one = fetched(replace(dynamic, vocabularies=vocabularies), self.stores, batch, leaving)
            one = one._replace(waiting=waiting)
            with self.lock:
                waiting[number_of(one)] = {n: x.old_ids for n, x in one.caches.items()}
            vocabularies = {n: settle(vocabularies[n], x.choice) for n, x in one.caches.items()}
            yield one

    def _leave(self, waiting: Waiting, name: str, ids: Tensor) -> Tensor:
        """Return whether each id leaves memory in a step that was not taken yet."""
        with self.lock:
            others = [x[name] for x in waiting.values()]
        return torch.isin(ids, torch.cat(others)) if others else torch.zeros(len(ids), dtype=torch.bool)

    def run(self, state: TrainState, batches: Iterable) -> Iterator[tuple[TrainState, dict]]:
        """Yield (state, metrics) after each batch."""
        for batch in self.ahead(state, batches):
            state, metrics = self(state, batch)
            yield state, metrics

    def read(self, params: Params, batch: Any) -> tuple[Params, Any]:
        """Return (params with plain tables of the rows that the batch reads, the batch with rows of these tables)."""
        check(CALL, tracked_problems({"params.tables": params.tables, "ids": ids_in(batch)}), level_problems())
        check(CALL, tables_problems(params.tables, self.stores), owner_problems(params.tables, self.stores))
        tables, of_rows = rows_read(params.tables, self.stores, batch)
        return replace(params, tables=tables), of_rows

    def commit(self, state: TrainState) -> None:
        """Write the rows that changed since the last commit, and commit the stores.

        The save of the state at the commit before must be whole by now: a store returns by one commit at most.
        """
        self._check(state)
        for name, store in self.stores.items():
            vocabulary, progress = state.tables.vocabularies[name], store.progress
            for rows in seen_after(vocabulary, progress.committed).split(CHUNK):
                records = packed(store.fields, state.tables, state.slots, rows)
                store.store.write(vocabulary.entries[rows, 0].cpu(), records.cpu())
            store.store.commit(progress.now)
            progress.committed = progress.now

    def rollback(self, state: TrainState) -> None:
        """Return the stores to the commit of a state, which was saved after it."""
        check(CALL, state_problems(state, self.stores))
        self.waiting = {}
        for name, store in self.stores.items():
            last = store.store.rollback(int(state.tables.vocabularies[name].now))
            store.progress.now = store.progress.committed = last
            store.progress.is_known = False
            check(CALL, sample_problems(name, store, state))
            store.progress.is_known = True

    def _check(self, state: TrainState) -> None:
        check(CALL, tracked_problems({"state": state}), level_problems())
        check(CALL, state_problems(state, self.stores))
        check(CALL, owner_problems(state.tables, self.stores))
        for name, store in self.stores.items():
            if not store.progress.is_known:
                check(CALL, sample_problems(name, store, state))
                store.progress.is_known = True

    def __repr__(self) -> str:
        return f"<funcrec.cached_step of {self.step!r}, {', '.join(self.stores)}>"


def counts_of(choice: Choice) -> dict[str, Tensor]:
    """Return the numbers of distinct ids of a step, i64[], by the names that a step with vocabularies gives them."""
    return dict(zip(("admitted", "evicted", "hits", "refused"), choice.numbers.unbind(), strict=True))


def number_of(one: Fetched) -> int:
    """Return the number of the step of a batch."""
    return next(iter(one.caches.values())).before + 1


def seen_after(vocabulary: Vocabulary, step: int) -> Tensor:
    """Return the rows whose ids were seen after a step, i64[M]."""
    age = (vocabulary.now - halves(vocabulary.entries[:, 1])[0]) & LOWER
    return ((vocabulary.tags != 0) & (age < vocabulary.now - step)).nonzero().flatten()


# -- validators --------------------------------------------------------------------------------------------------


def step_problems(step: Callable) -> Iterator[Problem]:
    own = update_of(step)
    if own is None:
        need = "the result of fr.train_step, or jit of it"
        yield Problem("`step` is not a step of `train_step`.", describe(step), need, kind=TypeError)
    elif own.recipe.admits:
        got, need = "admit=True, which draws the rows of new ids", "a step that admits no ids"
        yield Problem("`step` admits ids itself.", got, need, "fr.train_step(..., admit=False)")
    elif own.where.mesh is not None:
        yield Problem("`step` runs on a mesh.", describe(own.where.mesh), "a step in one process", "mesh=None")


def store_problems(stores: Mapping[str, TableStore]) -> Iterator[Problem]:
    if not stores:
        yield Problem("`stores` are empty.", "{}", "a store for each cache", '{"users": fr.table_store(...)}')


def tracked_problems(trees: Mapping[str, Any]) -> Iterator[Problem]:
    """Report trees that a transform follows: stores hold plain values."""
    for name, tree in trees.items():
        if any_tracked(tree_leaves(tree)):
            got, hint = "a value that requires grad, or that a transform wraps", "the step itself, on whole tables"
            yield Problem(f"`{name}` is tracked by a transform.", got, "plain values", hint, TypeError)


def level_problems() -> Iterator[Problem]:
    if is_transformed():
        what, need = "rows are read under a transform.", "a call outside of grad, vmap and jit"
        hint = "params, batch = cached.read(params, batch), and then the transform"
        yield Problem(what, "torch.func, or a mode of torch", need, hint, TypeError)


def tables_problems(tables: Any, stores: Mapping[str, TableStore]) -> Iterator[Problem]:
    """Report tables that are not those of the stores."""
    need = f"cached tables of {list(stores)}"
    if not isinstance(tables, DynamicTables):
        yield Problem("`state.tables` are not cached.", describe(tables), need, "fr.cached_tables", TypeError)
    elif set(tables.vocabularies) != set(stores):
        yield Problem("`stores` are not those of the tables.", f"{list(stores)}", f"{list(tables.vocabularies)}")
    else:
        names = {c.name for store in stores.values() for c in store.configs}
        if missing := names - set(tables):
            yield Problem("`state.tables` are not those of the stores.", f"{list(tables)}", f"also {sorted(missing)}")


def state_problems(state: Any, stores: Mapping[str, TableStore]) -> Iterator[Problem]:
    if not isinstance(state, TrainState):
        yield Problem("`state` is not a state.", describe(state), "a TrainState", "cached.init(params)", TypeError)
    else:
        if (yield from reported(tables_problems(state.tables, stores))):
            return
        for name in stores:
            # a plain step changes rows, and leaves no stamp by which a commit finds them
            if (at := int(state.tables.vocabularies[name].now)) != int(state.step):
                got, need = f"{int(state.step)} steps, {at} of them by `cached_step`", "one step for all"
                yield Problem("another step trained `state`.", got, need, "cached(state, batch) alone")


def sample_problems(name: str, store: TableStore, state: TrainState) -> Iterator[Problem]:
    """Report a store whose records differ from the rows in memory: it was committed with another state."""
    vocabulary = state.tables.vocabularies[name]
    rows = seen_after(vocabulary, 0)
    rows = rows[:: -(-len(rows) // SAMPLE) or 1]
    found = store.store.read(vocabulary.entries[rows, 0].cpu())
    if not torch.equal(found, packed(store.fields, state.tables, state.slots, rows).cpu()):
        got, need = "other records than the rows in memory", "the state that was saved after the commit"
        yield Problem(f"store {name!r} was committed with another state.", got, need, "that state, or a new store")


def owner_problems(tables: DynamicTables, stores: Mapping[str, TableStore]) -> Iterator[Problem]:
    """Report a state to which a store does not belong."""
    for name, store in stores.items():
        at, now = int(tables.vocabularies[name].now), store.progress.now
        if at != now:
            need = f"the state after step {now}, or a store that was rolled back"
            hint = f"cached.rollback(state), if the store has a commit of step {at}"
            yield Problem(f"`state` is not the one that store {name!r} belongs to.", f"step {at}", need, hint)


def sparse_problems(sparse: RowOptimizer, stores: Mapping[str, TableStore]) -> Iterator[Problem]:
    """Report stores whose records have other slots, or other first slots, than the optimizer of the step."""
    for name, store in stores.items():
        rows = {c.name: torch.ones(2, c.embedding_dim, dtype=c.dtype) for c in store.configs}
        own, other = sparse.init(rows), store.sparse.init(rows)
        slots = lambda x: {(t, s): v for t, each in x.items() for s, v in each.items()}
        a, b = slots(own), slots(other)
        is_same = lambda x, y: x.dtype == y.dtype and torch.equal(x, y)
        if a.keys() != b.keys() or not all(is_same(a[k], b[k]) for k in a):
            got, need = f"slots {sorted(a)}", f"slots {sorted(b)} with the same first numbers, those of the store"
            hint = "one optimizer for fr.table_store and fr.train_step"
            yield Problem(f"`step` has another optimizer than store {name!r}.", got, need, hint)


def batch_problems(one: Fetched, stores: Mapping[str, TableStore], is_ended: bool) -> Iterator[Problem]:
    if is_ended:
        what, need = "a batch was read ahead by a loop that ended.", "a batch of the last `ahead`, without other steps"
        yield Problem(what, "a later `ahead`, a step or a rollback", need, "cached.ahead(state, ...)")
        return
    for name, own in one.caches.items():
        if own.before != stores[name].progress.now:
            got, need = f"a batch for step {own.before + 1}", f"the batch for step {stores[name].progress.now + 1}"
            yield Problem(
                "a batch that was read ahead is taken out of its order.", got, need, "cached.ahead(state, ...)"
            )
