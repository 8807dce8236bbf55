"""What `cached_step` refuses: steps, stores, states and batches that do not belong together.

Shapes: M rows, W bytes of a record.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funcrec.cached._fetched import Fetched
from funcrec.cached._place import Place, dynamic_of
from funcrec.cached._table_store import TableStore, has, read_own
from funcrec.compile import is_transformed
from funcrec.core import Problem, any_tracked, describe, reported, tree_leaves
from funcrec.kinds import DynamicTables
from funcrec.optim import RowOptimizer
from funcrec.tables import layout_in, table_shapes
from funcrec.train import TrainState, update_of


def step_problems(step: Callable) -> Iterator[Problem]:
    own = update_of(step)
    if own is None:
        need = "the result of fr.train_step, or jit of it"
        yield Problem("`step` is not a step of `train_step`.", describe(step), need, kind=TypeError)
    elif own.recipe.admits:
        got, need = "admit=True, which draws the rows of new ids", "a step that admits no ids"
        yield Problem("`step` admits ids itself.", got, need, "fr.train_step(..., admit=False)")
    elif own.where.capacity is not None:
        what, need = "`capacity` does not go with caches: rows would enter for a step without room.", "capacity=None"
        yield Problem(what, f"{own.where.capacity}", need, "dedup=False, capacity=None")


def store_problems(stores: Mapping[str, TableStore], place: Place) -> Iterator[Problem]:
    if not stores:
        yield Problem("`stores` are empty.", "{}", "a store for each cache", '{"users": fr.table_store(...)}')
    own = place.ranks
    for name, store in stores.items():
        if store.part != (own.rank, own.size):
            got, need = f"part {store.part} (number, of how many)", f"part {(own.rank, own.size)}, that of this rank"
            yield Problem(f"store {name!r} is that of another rank.", got, need, "fr.table_store(..., mesh=mesh)")


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


def tables_problems(tables: Any, stores: Mapping[str, TableStore], place: Place) -> Iterator[Problem]:
    """Report tables that are not those of the stores, or do not lie on the mesh."""
    need = f"cached tables of {list(stores)}"
    layout = layout_in(tables)
    dynamic = tables if layout is None else tables.rest
    if not isinstance(dynamic, DynamicTables):
        yield Problem("`state.tables` are not cached.", describe(tables), need, "fr.cached_tables", TypeError)
    elif set(dynamic.vocabularies) != set(stores):
        yield Problem("`stores` are not those of the tables.", f"{list(stores)}", f"{list(dynamic.vocabularies)}")
    elif place.mesh is not None and (layout is None or layout.mesh_shape != place.mesh.axes):
        got, need = "whole tables" if layout is None else f"axes {dict(layout.mesh_shape)}", f"axes {place.mesh.shape}"
        yield Problem("`state` does not lie on the mesh of the step.", got, need, "cached.init(params)")
    elif place.mesh is None and layout is not None:
        got, need = f"axes {dict(layout.mesh_shape)}", "whole tables, as `step` has no mesh"
        yield Problem("`state` lies on a mesh.", got, need, "fr.gather_state(state, mesh)")
    elif layout is not None and layout.replicas:
        what, got = "copies of `state.tables` train apart, and a store has one row.", f"replicas={layout.replicas}"
        yield Problem(what, got, "a plan without replicas", "fr.Plan({...})")
    else:
        names, held = {c.name for x in stores.values() for c in x.configs}, list(table_shapes(tables))
        if missing := names - set(held):
            yield Problem("`state.tables` are not those of the stores.", f"{held}", f"also {sorted(missing)}")


def state_problems(state: Any, stores: Mapping[str, TableStore], place: Place) -> Iterator[Problem]:
    if not isinstance(state, TrainState):
        yield Problem("`state` is not a state.", describe(state), "a TrainState", "cached.init(params)", TypeError)
    else:
        if (yield from reported(tables_problems(state.tables, stores, place))):
            return
        for name in stores:
            # a plain step changes rows, and leaves no stamp by which a commit finds them
            if (at := int(dynamic_of(state.tables).vocabularies[name].now)) != int(state.step):
                got, need = f"{int(state.step)} steps, {at} of them by `cached_step`", "one step for all"
                yield Problem("another step trained `state`.", got, need, "cached(state, batch) alone")


def policy_problems(tables: Any, look_ahead: int) -> Iterator[Problem]:
    """Report caches with a policy of their own, which `look_ahead` would replace."""
    for name, own in dynamic_of(tables).vocabularies.items():
        if look_ahead and own.policy != "lru":
            got, need = f"policy={own.policy!r}, look_ahead={look_ahead}", 'policy="lru"'
            yield Problem(f"cache {name!r} has a policy besides `look_ahead`.", got, need, "look_ahead=0")


def sample_problems(name: str, store: TableStore, ids: Tensor, records: Tensor) -> Iterator[Problem]:
    """Report a store whose records differ from the rows in memory: it was committed with another state."""
    if not torch.equal(read_own(store, ids), records[has(store, ids)]):
        got, need = "other records than the rows in memory", "the state that was saved after the commit"
        yield Problem(f"store {name!r} was committed with another state.", got, need, "that state, or a new store")


def owner_problems(tables: Any, stores: Mapping[str, TableStore]) -> Iterator[Problem]:
    """Report a state to which a store does not belong."""
    for name, store in stores.items():
        at, now = int(dynamic_of(tables).vocabularies[name].now), store.progress.now
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
