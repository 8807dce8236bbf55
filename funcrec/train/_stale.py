"""A train step that reads tables of an earlier state, as a stale pipeline runs it on each batch.

update(state, tables, batch):   loss and gradients at (tables, state.dense);   then the update of `state`
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from funcrec.core import check, replace
from funcrec.train._admission import dynamic_problems
from funcrec.train._rank_step import state_specs
from funcrec.train._recipe import Recipe, Stages, run_recipe
from funcrec.train._state import TrainState
from funcrec.train._step import update_of


class StaleStep(NamedTuple):
    """A step on tables of an earlier state. check: (state, batch) -> None; raises for bad arguments.

    update: (state, tables, batch) -> (state, metrics); `tables` are the `state.tables` of an earlier state.
    """

    check: Callable[[TrainState, Any], None]
    update: Callable[[TrainState, Any, Any], tuple[TrainState, dict]]


def stale_of(step: Any) -> StaleStep | None:
    """Return the StaleStep of a `train_step`, or of `jit` of it; None for any other step."""
    own = update_of(step)
    if own is None:
        return None

    def update(state: TrainState, tables: Any, batch: Any) -> tuple[TrainState, dict]:
        own.check(state, batch)
        check("funcrec.train_step", dynamic_problems(state.tables, "a stale pipeline would train rows of other ids."))
        specs = lambda both: (state_specs(both[0]), both[0].tables.specs())
        (state, _), metrics = own.where.run(functools.partial(run_stale, own.recipe), specs, (state, tables), batch)
        return state, metrics

    return StaleStep(own.check, update)


def run_stale(recipe: Recipe, place: Stages, both: tuple, batch: Any) -> tuple[tuple, dict]:
    state, tables = both
    read_then = place._replace(params=lambda state: place.params(replace(state, tables=tables)))
    state, metrics = run_recipe(recipe, read_then, state, batch)
    return (state, tables), metrics
