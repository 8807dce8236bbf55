"""train_step on a mesh: every rank takes its bags, its rows and the sum of all dense gradients.

    grads = Σ_r d(loss_r / n);   tables: each row's owner has all its terms, in the order of the global batch;   dense: the same sum everywhere

Of a plan with replicas n and Σ are, for the tables, over the ranks of one group; for the dense parameters always over all.

Shapes: n ranks.
"""

import inspect
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import describe, fail, random, replace, tree_map
from funcrec.mesh import Codec, Mesh, P, added, all_gather, axis_index, is_small, ordered_sum, pmean, shard_map
from funcrec.optim import DenseOptimizer, RowOptimizer
from funcrec.sharding import (
    Plan,
    check_whole_rows,
    column_banks,
    cut_dense,
    dense_specs,
    gather_dense,
    init_slots,
    joined_overflow,
    own_dense,
    shard_tables,
    sum_dense,
    sync_grads,
    update_banks,
    whole_banks,
    whole_leaves,
)
from funcrec.tables import Params, value_grad_and_overflows
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
    """The first state: tables as the plan places them, slots like their rows, the rest on every rank, or cut. how: of `shard_tables`."""
    labels = {n: sparse.label(n) for n in params.tables}
    tables = shard_tables(params.tables, plan, mesh, labels=labels, **how)
    check_whole_rows("funcrec.train_step", sparse, tables.layout)
    columns = column_banks(sparse, tables.layout)
    slots = init_slots(sparse, tables, columns)
    for n, own in slots.items():
        for k, s in own.items():
            if s.shape[0] != tables.banks[n].shape[0]:
                hint = "an optimizer whose slots have the rows of their table"
                fail(
                    "funcrec.train_step",
                    f"slot {k!r} of bank {n!r} cannot be sharded.",
                    got=describe(s),
                    need=f"{tables.banks[n].shape[0]} rows",
                    hint=hint,
                )
    step = torch.zeros((), dtype=torch.int64, device=key.device)
    kept = cut_dense(params.dense, mesh, dense_axes) if dense_axes else params.dense
    return TrainState(step, tables, slots, kept, dense.init(kept), key.clone())


class Recipe(NamedTuple):
    """What a step does, wherever it runs: the arguments of `train_step` that know of no mesh."""

    loss_fn: Callable
    sparse: RowOptimizer
    dense: DenseOptimizer
    has_aux: bool
    merge: Callable | None

    @property
    def takes_key(self) -> bool:
        try:
            return "key" in inspect.signature(self.loss_fn).parameters
        except ValueError:  # a builtin tells none
            return False


def sharded_update(
    recipe: Recipe,
    mesh: Mesh,
    batch_axes: tuple[str, ...],
    replicas: tuple[str, ...],
    capacity: int | None,
    codec: Codec | None,
) -> Callable[[TrainState, Any], tuple[TrainState, dict]]:
    """(state, batch) -> (state, metrics) on a mesh; each rank differentiates its own loss over the number of ranks that train one copy."""
    copies = prod(mesh.shape[a] for a in replicas)
    loss_fn, sparse, dense, has_aux, merge = recipe
    takes_key = recipe.takes_key

    def local(params, batch, **extra):
        out = loss_fn(params, batch, **extra)
        loss, aux = out if has_aux else (out, ())
        return loss / (mesh.size // copies), aux

    def one_rank(state: TrainState, batch: Any):
        at_step = lambda: random.fold_in(random.fold_in(state.key, state.step), axis_index(batch_axes))
        extra = {"key": at_step()} if takes_key else {}
        held = state.tables.transport
        transport = held._replace(capacity=capacity, codec=held.codec if codec is None else codec)
        tables = replace(state.tables, transport=transport, whole=whole_banks(sparse, state.tables.layout))
        params = Params(tables, gather_dense(state.dense))
        (loss, aux), grads, overflows = value_grad_and_overflows(local, has_aux=True)(params, batch, **extra)
        metrics = overflow_metrics(overflows, mesh.axis_names, state.step) if capacity is not None else {}
        fits = metrics["overflow"] == 0 if metrics else None
        kept = grads.tables if fits is None else {n: g.where(fits) for n, g in grads.tables.items()}
        own = [*whole_leaves(grads.dense, state.dense), loss]
        along = own if is_small(own, mesh.size) else []
        row_grads, of_all = sync_grads(kept, state.tables.layout, along)
        banks, slots = update_banks(sparse, row_grads, state.slots, state.tables, state.step)
        *summed, total = list(map(added, of_all)) if along else ordered_sum(own, mesh.axis_names)
        d_dense = sum_dense(grads.dense, summed, state.dense, mesh.shape)
        if copies > 1:  # dense parameters follow the bags of all groups
            d_dense, total = tree_map(lambda x: x / copies, (d_dense, total))
        new_dense, dense_opt = dense.update(d_dense, state.dense_opt, state.dense, state.step)
        aux = tree_map(
            lambda x: pmean(x, mesh.axis_names) if isinstance(x, Tensor) and x.is_floating_point() else x, aux
        )
        if merge is not None:
            new_dense = own_dense(merge(gather_dense(new_dense), aux if has_aux else None), new_dense)
        loss, step = total, state.step + 1
        if fits is not None:
            choose = lambda new, old: tree_map(lambda a, b: torch.where(fits, a, b), new, old)
            new_dense, dense_opt = choose(new_dense, state.dense), choose(dense_opt, state.dense_opt)
            loss, step = torch.where(fits, loss, torch.nan), torch.where(fits, step, state.step)
        metrics |= {"loss": loss, **({"aux": aux} if has_aux else {})}
        tables = replace(state.tables, banks=banks)
        return TrainState(step, tables, slots, new_dense, dense_opt, state.key), metrics

    def update(state: TrainState, batch: Any) -> tuple[TrainState, dict]:
        specs = state_specs(state)
        mapped = shard_map(one_rank, mesh=mesh, in_specs=(specs, P(batch_axes)), out_specs=(specs, P()))
        return mapped(state, batch)

    return update


def overflow_metrics(overflows: Sequence[Tensor], axes: Sequence[str], like: Tensor) -> dict[str, Tensor]:
    """How many ids of all ranks found no place, and the capacity with which all would have one."""
    own = joined_overflow(overflows)
    counts = all_gather(torch.zeros(2, dtype=torch.int64, device=like.device) if own is None else own, tuple(axes))
    return {"overflow": counts[:, 0].sum(), "needed": counts[:, 1].amax()}


def state_specs(state: TrainState) -> TrainState:
    """A P for each part of a sharded state: banks, slots and cut parameters by their axes, the rest whole."""
    banks = state.tables.layout.specs()
    slots = {n: dict.fromkeys(own, banks[n]) for n, own in state.slots.items()}
    return TrainState(P(), state.tables.specs(), slots, dense_specs(state.dense), dense_specs(state.dense_opt), P())
