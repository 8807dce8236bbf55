"""Steps that can be undone. Such a step takes and returns a log of the changes, together with the state.

rewind(logged_k+n, n) = logged_k        bit for bit, at the cost of the rows that n steps touched
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funcrec.compile import jit
from funcrec.core import (
    Count,
    Movable,
    Problem,
    Size,
    absent_problems,
    any_tracked,
    check,
    describe,
    kind_of,
    pytree,
    remade,
    sure,
    tree_leaves,
    typed,
    unknown_problems,
    value_below,
)
from funcrec.history._ids import dynamic_log_problems, followed, id_rows
from funcrec.history._log import begin_log, form_of, log_specs, recorded, rows_and_whole, stamp_of, undone
from funcrec.kinds import NewRows
from funcrec.mesh import Mesh, P, pmin, shard_map
from funcrec.optim import RowOptimizer
from funcrec.tables import Params, layout_in
from funcrec.train import (
    Gathered,
    Recipe,
    Stages,
    TrainState,
    TrainStep,
    Update,
    mesh_problems,
    own_memory,
    run_recipe,
    state_problems,
    state_specs,
)


@pytree(static=("waiting",))
class Logged(Movable):
    """A training state and the log of its last steps. A `logged` step takes and returns it.

    Args:
      state: the state of the step without a log, to evaluate, gather or move to another plan.
      log: the log of this state only. The log recognises its state by a stamp of step, key and dense parameters. The
        stamp does not notice tables, slots and vocabularies that are changed by hand between two steps. Nor does it
        distinguish states that differ only there (without dense parameters, two trainings of one key). For such a
        state, begin a log: `logged.init(state)`. A step from a state with another stamp, such as a restored state,
        starts a new log. `log.version` is the number of changes so far, which are steps and calls of `rewind`.
      waiting: `RowOptimizer.waiting` of the row optimizer.

    Example:
      >>> import torch, funcrec as fr
      >>> step = fr.train_step(lambda p, b: p.dense.square(), sparse=fr.optim.sgd(),
      ...                      dense=fr.optim.dense(torch.optim.SGD, lr=0.5))
      >>> step = fr.logged(step, steps=2, rows=8)
      >>> step.init(fr.Params({}, torch.tensor(2.0)))
      Logged(TrainState(step=0, tables={}, slots=0 tensors, dense=1 tensor, dense_opt=0 tensors), 2 steps at most)
    """

    state: TrainState
    log: Any
    waiting: tuple[str, ...] = ()

    @property
    def params(self) -> Params:
        return self.state.params

    def __repr__(self) -> str:
        return f"Logged({self.state!r}, {self.log.num_steps} steps at most)"


@remade
@typed
def logged(
    step: TrainStep[Any], *, steps: Size = 50, rows: Count | Mapping[str, Count] | None = None
) -> "TrainStep[Logged]":
    """Return the same step with a log next to its state.

    `rewind` undoes its last steps from the log, and `delta` reads the changed rows.

    Args:
      step: the step that `train_step` returned, not yet jitted. Its plan has no `replicas`, because `sync_replicas`
        would change rows that no step names.
      steps: K, the number of steps that can be undone; 0 for `delta` alone.
      rows: the largest number of distinct rows of a table that a step touches, for all tables or {table: n}. On a mesh,
        it is the number of any single rank. A step that touches more rows is not held, and a `rewind` over it raises.
        In a table that follows a vocabulary, a step touches the rows of all ids of its columns. With steps=0 pass None.

    Returns:
      TrainStep over `Logged`. `init` takes either Params, as `step.init` does, or a TrainState to begin a log with.
      `fr.jit(logged, donate=("state",))` is one compiled call, which takes state and log together. `scan`, `fit`,
      `retry_overflow`, vmap and meshes accept it in place of `step`.

    Raises:
      ValueError: the plan has replicas.
      KeyError: a table has no entry in `rows`.
      TypeError: the state is differentiated: a log keeps bits, which have no derivative.
      ValueError: the tables follow vocabularies, and the step has admit=False.

    Law: the states and metrics are those of `step`, bit for bit. The log of tables that follow vocabularies keeps the
      entries of their ids, so `rewind` also brings evicted ids back, and `delta` has the new ids.

    Cost: each step sorts N ids, reads and writes C rows and their slots once more (C = Σ `rows`), and copies the dense
    parts with their optimizer's state. Memory: K times these rows and parts, and 8 bytes for each row of the tables
    and of the vocabularies.

    Example: two steps are taken, and the second is undone.
      >>> import torch, funcrec as fr
      >>> loss_fn = lambda p, ids: fr.lookup(p.tables, ids, [fr.FeatureConfig("clicked", table="item")]).values.sum()
      >>> kind = {"sparse": fr.optim.sgd(1.0), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
      >>> step = fr.logged(fr.train_step(loss_fn, **kind), steps=8, rows=2)
      >>> run = step.init(fr.Params({"item": torch.zeros(3, 1)}, {}))
      >>> for ids in ([[0, 0]], [[2]]):
      ...     run, metrics = step(run, fr.KeyedJaggedTensor.from_lists({"clicked": ids}))
      >>> run.state.tables["item"].flatten()
      tensor([-2.,  0., -1.])
      >>> fr.rewind(run, 1).state.tables["item"].flatten()
      tensor([-2.,  0.,  0.])
    """
    call = "funcrec.logged"
    check(call, step_problems(step), room_problems(steps, rows))
    recipe, where = step.update.recipe, step.update.where

    def init(params: Params | TrainState, key: Tensor | None = None) -> Logged:
        if isinstance(params, TrainState):
            check(call, state_problems(params), laid_out_problems(params, where.mesh))
        state = params if isinstance(params, TrainState) else step.init(params, key)
        check(call, dynamic_log_problems(state, recipe.admits))
        check(call, log_problems(state, recipe.sparse, steps, rows), tracked_problems(state))
        begin = functools.partial(
            begin_log, waiting=recipe.sparse.waiting, num_steps=steps, room=room_of(state, sure(rows) if steps else 1)
        )
        if where.mesh is not None:
            specs, begin = log_specs(where.mesh, steps), functools.partial(begin, axes=where.mesh.axis_names)
            begin = shard_map(begin, mesh=where.mesh, in_specs=(state_specs(state),), out_specs=specs)
        return own_memory(Logged(state, begin(state), recipe.sparse.waiting))

    def update(state: Logged, batch: Any) -> tuple[Logged, dict]:
        check(call, LOGGED.find("state", state))
        check(call, state_problems(state.state), tracked_problems(state.state))
        check(call, laid_out_problems(state.state, where.mesh), form_problems(state))
        return where.run(
            functools.partial(run_logged, recipe, where.mesh.axis_names if where.mesh else ()),
            lambda x: specs_of(x, where.mesh),
            state,
            batch,
        )

    return TrainStep(init, update)


def run_logged(recipe: Recipe, axes: tuple[str, ...], place: Stages, logged: Logged, batch: Any) -> tuple[Logged, dict]:
    """Return (logged state after a step, metrics of the step). The log records what the step changes."""
    seen, new = [], []

    def admitted(sparse: RowOptimizer, state: TrainState, batch: Any) -> tuple[TrainState, dict, NewRows | None]:
        out = place.admitted(sparse, state, batch)
        new.extend([(out[0], out[2])] if out[2] is not None else [])
        return out

    def update(sparse: RowOptimizer, gathered: Gathered, state: TrainState) -> tuple[Any, Any]:
        seen.append(gathered.rows)
        return place.update(sparse, gathered, state)

    stages = place._replace(update=update, admitted=admitted)
    state, metrics = run_recipe(recipe, stages, logged.state, batch)
    log = recorded(logged.log, recipe.sparse.waiting, seen[0], logged.state, state, axes, *new)
    return Logged(state, log, logged.waiting), metrics


@typed
def rewind(logged: Logged, k: Size = 1, *, mesh: Mesh | None = None, donate: bool = False) -> Logged:
    """Return the state as it was k steps ago, with a log of the steps before.

    Args:
      logged: what the step returned.
      k: the number of steps to undo.
      mesh: the mesh of a sharded state. Every rank calls `rewind` with the same k.
      donate: whether `logged` may be used up, as by `fr.jit(donate=...)`. A program that is compiled once then writes
        the rows into the memory of `logged`. Otherwise the tables are copied once.

    Raises:
      ValueError: the log holds fewer steps (the error says how many, and why); one of the steps touched more rows than
        were kept; the log belongs to another state; or `mesh` is missing.
      TypeError: the state is differentiated.

    Law: every bit of the state equals its bit k steps ago, and training continues from there to the same bits.
      `log.version` continues to count: for `delta`, the rows that were put back have changed.

    Cost: with `donate`, it reads and writes what k steps touched. Without `donate`, it also copies all tables once.

    Example:
      >>> import torch, funcrec as fr
      >>> step = fr.train_step(lambda p, b: (p.dense * b).sum(), sparse=fr.optim.sgd(),
      ...                      dense=fr.optim.dense(torch.optim.SGD, lr=1.0))
      >>> step = fr.logged(step, steps=2, rows=8)
      >>> run = step.init(fr.Params({}, torch.zeros(1)))
      >>> for x in (1.0, 2.0, 4.0):
      ...     run, _ = step(run, x)
      >>> run.state.dense, fr.rewind(run, 2).state.dense
      (tensor([-7.]), tensor([-1.]))
    """
    call = "funcrec.rewind"
    state = logged.state
    check(call, ensemble_problems(logged))
    check(call, laid_out_problems(state, mesh), tracked_problems(state), form_problems(logged))
    check(call, held_problems(logged, k, mesh))
    if k == 0:
        return logged
    if not donate:
        return undo(logged, k, mesh)
    for _ in range(k):
        logged = undo_donated(logged, mesh)
    return logged


def undo(logged: Logged, k: int, mesh: Mesh | None) -> Logged:
    one_rank = lambda x: Logged(*undone(x.state, x.log, x.waiting, k), x.waiting)
    if mesh is None:
        return one_rank(logged)
    specs = specs_of(logged, mesh)
    # Each rank puts back its part. Where several ranks hold copies, their logs are equal.
    return shard_map(one_rank, mesh=mesh, in_specs=(specs,), out_specs=specs, check=False)(logged)


def _undo_one(logged: Logged, mesh: Mesh | None) -> Logged:
    return undo(logged, 1, mesh)


undo_donated = jit(_undo_one, donate=("logged",))


def specs_of(logged: Logged, mesh: Mesh) -> Logged:
    specs = log_specs(mesh, logged.log.num_steps, has_origin=logged.log.origin is not None)
    return Logged(state_specs(logged.state), specs, logged.waiting)


def room_of(state: TrainState, rows: int | Mapping[str, int]) -> dict[str, int]:
    """Return {table or bank: the number of its rows that a step may touch}."""
    of = lambda n: rows[n] if isinstance(rows, Mapping) else rows
    layout = layout_in(state.tables)
    num_ranks = 1 if layout is None else math.prod(size for _, size in layout.mesh_shape)  # a vocabulary sees all ids
    of_ids = {n: num_ranks * max(map(of, own), default=1) for n, own in followed(state.tables).items()}
    if layout is None:
        return {n: of(n) for n in state.tables} | of_ids
    return of_ids | {b.name: sum(of(s.table) for s in layout.shards if s.bank == i) for i, b in enumerate(layout.banks)}


def table_names(state: TrainState) -> list[str]:
    layout = layout_in(state.tables)
    return list(state.tables) if layout is None else [n for n, _ in layout.shapes]


def facts_of(logged: Logged, k: int, mesh: Mesh | None) -> list[int]:
    """Return [steps held, minus the rows of the last k steps that found no place, whether the stamp is the state's].

    Each number is the least over all ranks and members."""
    log = logged.log

    def one_rank(x: Logged) -> Tensor:
        log, own = x.log, stamp_of(x.state)
        least = [log.kept, (log.stamp == own).all().long()]
        if k:
            at = (log.place - 1 - torch.arange(k, device=own.device)) % log.num_steps
            least += [-t.over[at].sum() for t in log.touched]
        out = torch.stack([*least[:2], torch.stack([torch.zeros_like(least[0]), *least[2:]]).amin()])
        return out if mesh is None else pmin(out, mesh.axis_names)

    k = min(k, log.num_steps)
    with torch.no_grad():
        if mesh is None:
            found = one_rank(logged)
        else:
            found = shard_map(one_rank, mesh=mesh, in_specs=(specs_of(logged, mesh),), out_specs=P())(logged)
    return value_below(found).reshape(-1, 3).amin(0).tolist()


# -- validators --------------------------------------------------------------------------------------------------


def step_problems(step: TrainStep[Any]) -> Iterator[Problem]:
    if not isinstance(step.update, Update):
        hint = "fr.jit(fr.logged(fr.train_step(...)), donate=('state',))"
        what = "`step` does not come from `train_step`."
        yield Problem(what, describe(step.update), "a step that train_step made", hint, TypeError)


def room_problems(steps: int, rows: Any) -> Iterator[Problem]:
    if steps and rows is None:
        need = "the most rows that a step touches"
        yield Problem("`rows` is missing.", f"steps={steps}", need, "rows=4096", TypeError)
    if not steps and rows is not None:
        yield Problem("`rows` requires steps that are kept.", "steps=0", "rows=None, or steps=50")


def log_problems(state: TrainState, sparse: RowOptimizer, steps: int, rows: Any) -> Iterator[Problem]:
    layout = layout_in(state.tables)
    if layout is not None and layout.replicas:
        hint = "a plan without `replicas`; fr.copy(state), or fr.save, to go back to"
        what = "copies that train apart have no log: `sync_replicas` changes rows that no step names."
        yield Problem(what, f"replicas={layout.replicas}", "tables that exist once", hint)
    if both := [n for n in id_rows(state.tables) if n in state.tables]:
        yield Problem("a table has the name of a vocabulary's entries.", f"{both}", "another name for the table")
    if isinstance(rows, Mapping):
        names = table_names(state)
        yield from absent_problems("`rows[{}]` is missing.", rows, names if steps else (), "one for each table")
        yield from unknown_problems("`rows` names no table.", rows, names, kind=KeyError)
    for n, own in state.slots.items():
        for k, s in own.items():
            if k not in sparse.waiting and (s.dim() == 0 or s.shape[0] != state.tables[n].shape[0]):
                need = f"[{state.tables[n].shape[0]}, ...], or a name in `RowOptimizer.waiting`"
                yield Problem(f"slot {k!r} of {n!r} has no rows of its table.", describe(s), need)


def tracked_problems(state: TrainState) -> Iterator[Problem]:
    if any_tracked([x for x in tree_leaves(state) if isinstance(x, Tensor)]):
        what, got = "the state is differentiated.", "a tensor that autograd or torch.func follows"
        yield Problem(what, got, "plain tensors: a log keeps bits", "the step without `logged`", TypeError)


LOGGED = kind_of(Logged)


def laid_out_problems(state: TrainState, mesh: Mesh | None) -> Iterator[Problem]:
    layout = layout_in(state.tables)
    if layout is not None and mesh is None:
        got = f"axes {dict(layout.mesh_shape)}, and no `mesh`"
        yield Problem("the state lies on a mesh.", got, "that mesh", "mesh=mesh", TypeError)
    elif layout is None and mesh is not None:
        yield Problem("the state lies on no mesh.", f"{mesh!r}", "mesh=None, or a sharded state", kind=TypeError)
    elif layout is not None and mesh is not None:
        yield from mesh_problems(layout, mesh)


def form_problems(logged: Logged) -> Iterator[Problem]:
    """Yield problems if the log does not fit the rows and bits of the tables. A layout states the rows of a shard."""
    of_rows, _ = rows_and_whole(logged.state, logged.waiting)
    is_whole = layout_in(logged.state.tables) is None
    hint = "the `Logged` that the step gave; logged.init(state) to begin a log"
    for own in logged.log.touched:
        for n, num_rows, _ in own.tables:
            parts, form = of_rows.get(n, {}), [(x.dtype, x.shape[-1]) for x in own.old]
            narrow = [x for x in parts.values() if not x.dim() or (is_whole and x.shape[0] != num_rows)]
            if not parts or narrow or form_of(parts) != form:
                got = ", ".join(map(describe, parts.values())) or f"no {n!r} among {list(of_rows)}"
                need = f"{num_rows} rows of {', '.join(f'{w} x {str(d)[6:]}' for d, w in form)} each"
                yield Problem(f"the log belongs to another table {n!r}, or has other slots.", got, need, hint)


def ensemble_problems(logged: Logged) -> Iterator[Problem]:
    if logged.log.version.dim():
        what, hint = "there are several states.", "torch.func.vmap(lambda run: fr.rewind(run, k))(logged)"
        yield Problem(what, f"`version` {describe(logged.log.version)}", "one, or a vmap over them", hint, TypeError)


ANOTHER = Problem(
    "the log belongs to another state.",
    "its stamp is not this state's",
    "state and log of one step",
    "the `Logged` that the step gave; logged.init(state) to begin a log",
)


def stamp_problems(logged: Logged, mesh: Mesh | None) -> Iterator[Problem]:
    if not facts_of(logged, 0, mesh)[1]:
        yield ANOTHER


def held_problems(logged: Logged, k: int, mesh: Mesh | None) -> Iterator[Problem]:
    kept, is_own, over = facts_of(logged, k, mesh)
    if not is_own:
        yield ANOTHER
    elif k > kept:
        got = f"{kept} steps held, of {logged.log.num_steps} at most"
        yield Problem(f"{k} steps cannot be undone.", got, f"k <= {kept}", f"steps={k} or more of fr.logged")
    elif over:
        got = f"{-over} rows more than `rows` among the last {k}"
        yield Problem("a step touched more rows than were kept.", got, "fewer steps", "larger `rows` of fr.logged")
