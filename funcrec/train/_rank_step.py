"""train_step on a mesh: every rank reads its bags, updates its rows, and adds up all dense gradients.

    grads = Σ_r d(loss_r / n);   tables: the owner of a row has all terms of the row, in the order of the global batch;
    dense: all ranks have the same sum

If the plan has replicas, n and Σ cover, for tables, the ranks of one group; for dense parameters they cover all ranks.

Shapes: n ranks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from funcrec.core import check, describe, fail, is_checking, random, replace, tree_map, value_below
from funcrec.grad import check_gradients, loss_and_aux
from funcrec.kinds import NewRows, admit_batch, batch_axes_problems, configs_of, is_cut
from funcrec.mesh import Codec, Mesh, P, added, all_gather, axis_index, is_small, ordered_sum, pmean
from funcrec.optim import DenseOptimizer, RowOptimizer
from funcrec.sharding import (
    Plan,
    beside_buckets,
    check_whole_rows,
    cut_dense,
    dense_specs,
    gather_dense,
    gather_terms,
    init_slots,
    joined_overflow,
    own_dense,
    renew_banks,
    shard_tables,
    sum_dense,
    update_banks,
    whole_banks,
    whole_leaves,
)
from funcrec.tables import Params
from funcrec.train._admission import admission_problems, counts_of, is_dynamic, unserved_problems
from funcrec.train._recipe import Gathered, Recipe, Stages
from funcrec.train._state import TrainState


def shard_state(
    params: Params,
    key: Tensor,
    mesh: Mesh,
    plan: Plan,
    sparse: RowOptimizer,
    dense: DenseOptimizer,
    dense_axes: tuple[str, ...],
    **how: Any,
) -> TrainState:
    """Return the first state.

    The plan places tables and slots. Every rank has all other parts whole, or, over `dense_axes`, a part of them.

    how: keywords of `shard_tables`.
    """
    labels = {n: sparse.label(n) for n in params.tables}
    tables = shard_tables(params.tables, plan, mesh, labels=labels, **how)
    check_whole_rows("funcrec.train_step", sparse, tables.layout)
    slots = init_slots(sparse, tables, mesh)
    for n, own in slots.items():
        for k, s in own.items():
            if k not in sparse.waiting and s.shape[0] != tables.banks[n].shape[0]:
                hint = "an optimizer whose slots have the rows of their table"
                what = f"slot {k!r} of bank {n!r} cannot be sharded."
                fail("funcrec.train_step", what, got=describe(s), need=f"{tables.banks[n].shape[0]} rows", hint=hint)
    step = torch.zeros((), dtype=torch.int64, device=key.device)
    kept = cut_dense(params.dense, mesh, dense_axes) if dense_axes else params.dense
    return TrainState(step, tables, slots, kept, dense.init(kept), key.clone())


def rank_of(
    sparse: RowOptimizer,
    mesh: Mesh,
    batch_axes: tuple[str, ...],
    copies: int,
    capacity: int | None,
    codec: Codec | None,
    micro_batches: int = 1,
) -> Stages:
    """Return the stages of a step on each rank of a mesh.

    A rank differentiates its own loss divided by the number of ranks that train one copy.
    """

    def loss_fn(recipe: Recipe) -> Callable:
        @functools.wraps(recipe.loss_fn)
        def own_share(params, batch, **extra):
            out = recipe.loss_fn(params, batch, **extra)
            loss, aux = loss_and_aux("funcrec.train_step", out) if recipe.has_aux else (out, None)
            loss = loss / (mesh.size // copies)
            return (loss, aux) if recipe.has_aux else loss

        return own_share

    def params(state: TrainState) -> Params:
        held = state.tables.transport
        transport = held._replace(capacity=capacity, codec=held.codec if codec is None else codec)
        tables = replace(state.tables, transport=transport, whole=whole_banks(sparse, state.tables.layout))
        return Params(tables, gather_dense(state.dense))

    def gathered(loss: Tensor, grads: Params, overflows: Sequence[Tensor], state: TrainState) -> Gathered:
        metrics = overflow_metrics(overflows, mesh.axis_names, state.step) if capacity is not None else {}
        fits = metrics["overflow"] == 0 if metrics else None
        if fits is not None and is_checking() and bool(value_below(fits).all()):
            check_gradients(loss, grads)
        kept = grads.tables if fits is None else {n: g.where(fits) for n, g in grads.tables.items()}
        own = [*whole_leaves(grads.dense, state.dense), loss]
        along = own if is_small(own, mesh.size) else []  # small tensors join the rows' exchange
        rows, of_all = gather_terms(kept, state.tables.layout, along, micro_batches)

        def dense() -> tuple[Any, Tensor]:
            *of_whole, total = list(map(added, of_all)) if along else ordered_sum(own, mesh.axis_names)
            d_dense = sum_dense(grads.dense, of_whole, state.dense, mesh.shape)
            # the loss of a group is the group's mean, but dense parameters use the bags of all groups
            return tree_map(lambda x: x / copies, (d_dense, total)) if copies > 1 else (d_dense, total)

        return Gathered(rows, dense, metrics, fits)

    def update(sparse: RowOptimizer, gathered: Gathered, state: TrainState) -> tuple[Any, Any]:
        banks, slots = update_banks(sparse, gathered.rows, state.slots, state.tables, state.step, gathered.fits)
        return replace(state.tables, banks=banks), slots

    is_mean = lambda x: isinstance(x, Tensor) and x.is_floating_point()
    return Stages(
        admitted=functools.partial(admitted, batch_axes=batch_axes, capacity=capacity),
        loss_fn=loss_fn,
        key=lambda key: random.fold_in(key, axis_index(batch_axes)),
        params=params,
        gathered=gathered,
        update=update,
        mean=lambda aux: tree_map(lambda x: pmean(x, mesh.axis_names) if is_mean(x) else x, aux),
        merged=lambda merge, dense, aux: own_dense(merge(gather_dense(dense), aux), dense),
        settled=settled,
    )


def admitted(
    sparse: RowOptimizer, state: TrainState, batch: Any, *, batch_axes: tuple[str, ...], capacity: int | None
) -> tuple[TrainState, dict, NewRows | None]:
    """Return (the state with a row for each admitted id of all ranks' batches, metrics, the new rows)."""
    if not is_dynamic(state.tables):
        return state, {}, None
    check("funcrec.train_step", admission_problems(sparse, capacity), unserved_problems(state.tables.rest))
    of_all = (lambda x: all_gather(x, batch_axes).flatten(0, 1)) if batch_axes else None
    followed = ()
    if is_cut(state.tables.rest.vocabularies.values()):
        check("funcrec.train_step", batch_axes_problems(list(state.tables.rest.vocabularies.values()), batch_axes))
        followed = beside_buckets(state.tables)
    dynamic, new, numbers = admit_batch(state.tables.rest, batch, of_all, followed)
    tables, slots, layout = state.tables, state.slots, state.tables.layout
    if new is not None:
        forms = {s.table: (dict(layout.shapes)[s.table], layout.banks[s.bank].dtype) for s in layout.shards}
        configs = [(i, c) for i, n in enumerate(dynamic.vocabularies) for c in configs_of(dynamic, n, forms)]
        banks, slots = renew_banks(sparse, tables, slots, new, dynamic.first_key, configs)
        tables = replace(tables, banks=banks)
    return replace(state, tables=replace(tables, rest=dynamic), slots=slots), counts_of(dynamic, numbers), new


def settled(fits: Tensor | None, old: TrainState, new: TrainState, metrics: dict) -> tuple[TrainState, dict]:
    """Return (the state after the step, metrics).

    If some id found no room, the function returns the old state, and metrics with a loss of NaN. Rows need no choice
    between the
    states: if an id found no room, gradients of rows were empty, and rows kept their bits.
    """
    if fits is None:
        return new, metrics
    choose = lambda new, old: tree_map(lambda a, b: torch.where(fits, a, b), new, old)
    dense, dense_opt = choose(new.dense, old.dense), choose(new.dense_opt, old.dense_opt)
    metrics = {**metrics, "loss": torch.where(fits, metrics["loss"], torch.nan)}
    return replace(new, step=torch.where(fits, new.step, old.step), dense=dense, dense_opt=dense_opt), metrics


def overflow_metrics(overflows: Sequence[Tensor], axes: Sequence[str], like: Tensor) -> dict[str, Tensor]:
    """Return {"overflow": the number of ids of all ranks without room, "needed": the capacity that holds all ids}."""
    own = joined_overflow(overflows)
    counts = all_gather(torch.zeros(2, dtype=torch.int64, device=like.device) if own is None else own, tuple(axes))
    return {"overflow": counts[:, 0].sum(), "needed": counts[:, 1].amax()}


def state_specs(state: TrainState) -> TrainState:
    """Return a P for each part of a sharded state.

    Banks, slots and cut parameters are cut over their axes. Other parts are whole.
    """
    banks = state.tables.layout.specs()
    slots = {n: dict.fromkeys(own, banks[n]) for n, own in state.slots.items()}
    made = cast(Any, TrainState)  # with a spec in place of each tensor
    return made(P(), state.tables.specs(), slots, dense_specs(state.dense), dense_specs(state.dense_opt), P())
