"""The recipe of a step, which is the same everywhere, and its stages, which differ between one process and ranks.

    batch --admitted--> rows for its ids;  key, params --loss, grad--> loss_r, grads_r --gathered--> grads --update-->
    tables', slots', dense', dense_opt' --settled--> state'

In one process each stage is the identity, or the optimizer's update; on ranks it is an exchange, or one rank's part of
the work.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from funcrec.core import Problem, check, describe, random
from funcrec.grad import over_micro_batches, value_grad_and_overflows
from funcrec.invariance import invariant
from funcrec.kinds import known, with_ids
from funcrec.optim import DenseOptimizer, RowOptimizer
from funcrec.sharding import dense_terms
from funcrec.tables import Params, RowGrads, clip_factor, norm_over, scaled_leaves, with_parts
from funcrec.train._admission import admitted
from funcrec.train._state import TrainState


class Recipe(NamedTuple):
    """The arguments of `train_step` that do not depend on a mesh."""

    loss_fn: Callable
    sparse: RowOptimizer
    dense: DenseOptimizer
    has_aux: bool
    merge: Callable | None
    takes_key: bool  # whether the loss has a parameter `key`
    micro_batches: int = 1
    admits: bool = True  # whether the step admits the ids of its batch
    grad: Callable | None = None  # the transform that gives the gradients; None for `value_and_grad`
    max_norm: float | Tensor | None = None  # the bound on the norm over all gradients
    is_invariant: bool = False  # whether bits depend on the numbers alone

    def differentiated(self, loss_fn: Callable) -> Callable:
        """Return the function (params, batch, **extra) -> (value, gradients, overflows) of the loss."""
        if self.grad is not None:
            fn = self.grad(loss_fn, has_aux=True) if self.has_aux else self.grad(loss_fn)
            return functools.partial(own_gradients, fn)
        if self.micro_batches == 1:
            return value_grad_and_overflows(loss_fn, self.has_aux)
        return over_micro_batches(loss_fn, self.micro_batches, self.has_aux)


def own_gradients(fn: Callable, params: Any, *args, **kwargs) -> tuple[Any, Any, list]:
    """Return (value, gradients, no overflows) of a user's transform of the loss, after a check of their form."""
    out = fn(params, *args, **kwargs)
    check("funcrec.train_step", gradient_form_problems(out, params))
    return *out, []


def gradient_form_problems(out: Any, params: Any) -> Iterator[Problem]:
    need, hint = (
        "(loss, Params of gradients), as fr.value_and_grad returns",
        "grad=lambda loss: fr.value_and_grad(loss)",
    )
    if not isinstance(out, tuple) or len(out) != 2 or not isinstance(out[1], Params):
        yield Problem("the function of `grad` gave no gradients.", describe(out), need, hint, TypeError)
    elif set(out[1].tables) != set(params.tables):
        got, need = f"gradients of {sorted(out[1].tables)}", f"those of {sorted(params.tables)}"
        yield Problem("the function of `grad` gave gradients of other tables.", got, need, hint)


def with_key(recipe: Recipe, state: TrainState, of_bags: Callable = lambda key: key) -> dict[str, Tensor]:
    """Return the keyword arguments of the loss besides params and batch."""
    return {"key": of_bags(random.fold_in(state.key, state.step))} if recipe.takes_key else {}


class Gathered(NamedTuple):
    """The gradients of the global batch.

    rows: gradients of the tables.
    dense: () -> (the gradients of the dense parameters, the loss). It is called after the update of rows, because on
      ranks it may be an exchange of its own.
    metrics: the metrics of the exchange.
    fits: bool[], whether every id found room; None if buffers have room for all ids.
    """

    rows: Mapping[str, RowGrads]
    dense: Callable[[], tuple[Any, Tensor]]
    metrics: Mapping[str, Tensor] = {}
    fits: Tensor | None = None


def clipped(gathered: Gathered, max_norm: float | Tensor) -> Gathered:
    """Return the gradients scaled to a norm of at most `max_norm`, over tables and dense parameters of all ranks."""
    d_dense, loss = gathered.dense()
    rows = {n: g.coalesce() for n, g in gathered.rows.items()}
    factor = clip_factor(norm_over(rows, dense_terms(d_dense)), max_norm)
    scaled = scaled_leaves(d_dense, factor)
    return gathered._replace(rows={n: g.scale(factor) for n, g in rows.items()}, dense=lambda: (scaled, loss))


def update_tables(sparse: RowOptimizer, gathered: Gathered, state: TrainState) -> tuple[Any, Any]:
    """Return (tables, slots) after the update, in one process."""
    rows = gathered.rows if sparse.ignores_origin else with_ids(gathered.rows, state.tables)
    tables, slots = sparse.update(rows, state.slots, state.tables, state.step)
    return with_parts(state.tables, tables), slots


class Stages(NamedTuple):
    """The stages of a step that differ between one process and ranks. The defaults are for one process.

    admitted: (sparse, state, batch) -> (state, metrics, NewRows or None); the state has a row for each admitted id of
      the batch.
    loss_fn: recipe -> the function to differentiate.
    key: the step's key -> the key for this rank's bags.
    params: state -> Params, as the loss takes them.
    gathered: (loss, gradients, overflows, state) -> Gathered.
    update: (sparse, Gathered, state) -> (tables, slots).
    mean: aux -> the global batch's aux.
    merged: (merge, dense, aux) -> the dense parameters that `merge` returns.
    settled: (fits, old state, new state, metrics) -> (state, metrics); the old state if some id found no room.
    """

    admitted: Callable = admitted
    loss_fn: Callable = lambda recipe: recipe.loss_fn
    key: Callable = lambda key: key
    params: Callable[..., Any] = lambda state: state.params
    gathered: Callable = lambda loss, grads, overflows, state: Gathered(grads.tables, lambda: (grads.dense, loss))
    update: Callable = update_tables
    mean: Callable = lambda aux: aux
    merged: Callable[..., Any] = lambda merge, dense, aux: merge(dense, aux)
    settled: Callable = lambda fits, old, new, metrics: (new, metrics)


def run_recipe(recipe: Recipe, place: Stages, state: TrainState, batch: Any) -> tuple[TrainState, dict[Any, Any]]:
    """Return (state', metrics) after one step."""
    if recipe.is_invariant:
        return invariant(run_recipe)(recipe._replace(is_invariant=False), place, state, batch)
    old = state
    state, of_ids, new = place.admitted(recipe.sparse, old, batch) if recipe.admits else (old, {}, None)
    extra = with_key(recipe, state, place.key)
    with known(new.seen if new is not None else None):
        value, grads, overflows = recipe.differentiated(place.loss_fn(recipe))(place.params(state), batch, **extra)
    loss, aux = value if recipe.has_aux else (value, None)
    gathered = place.gathered(loss, grads, overflows, state)
    gathered = gathered if recipe.max_norm is None else clipped(gathered, recipe.max_norm)
    tables, slots = place.update(recipe.sparse, gathered, state)
    d_dense, loss = gathered.dense()
    dense, dense_opt = recipe.dense.update(d_dense, state.dense_opt, state.dense, state.step)
    aux = place.mean(aux)
    if recipe.merge is not None:
        dense = place.merged(recipe.merge, dense, aux)
    metrics = {**gathered.metrics, **of_ids, "loss": loss, **({"aux": aux} if recipe.has_aux else {})}
    new = TrainState(state.step + 1, tables, slots, dense, dense_opt, state.key)
    return place.settled(gathered.fits, old, new, metrics)
