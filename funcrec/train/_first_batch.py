"""Runs the loss of a step on the first batch of a run, and checks the batch by value, before the first step.

checked(loss)(params, batch);      batch.weight is None, or some operation of the loss reads it
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcrec.core import check, checked, fail, own_errors, tree_leaves
from funcrec.tables import Batch, Params
from funcrec.train._recipe import Recipe, with_key
from funcrec.train._state import TrainState
from funcrec.train._step import state_problems, update_of

ABOUT = tuple(getattr(torch.Tensor, n).__get__ for n in ("shape", "dtype", "device", "ndim", "requires_grad"))


class Readers(TorchFunctionMode):
    """A mode that records whether an operation takes x.

    To read x.shape, x.dtype or x.device does not count. x.size(0) counts, because `vmap` calls it.
    """

    def __init__(self, x: Tensor):
        super().__init__()
        self.x, self.found = x, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        self.found |= func not in ABOUT and any(x is self.x for x in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def trial_of(step: Any) -> Callable[..., None] | None:
    """Return a function (state, batch) -> None that raises for a bad first batch.

    Return None unless `step` is a `train_step` in one process, or `jit` of such a step.
    """
    update = update_of(step)
    if update is None or update.where.mesh is not None:
        return None
    return functools.partial(try_first_batch, update.recipe)


def error_of_loss(step: Any, state: TrainState, batch: Any) -> ValueError | None:
    """Return the error of this library that the loss of a `train_step` raises for a batch; None if there is none.

    A compiled loss is NaN where the same loss raises for a label or a weight that it can read. The function returns
    None unless `step` is a `train_step` in one process, or `jit` of such a step.
    """
    update = update_of(step)
    if update is None or update.where.mesh is not None or not isinstance(state, TrainState):
        return None
    try:
        update.recipe.loss_fn(state.params, batch, **with_key(update.recipe, state))
    except ValueError as error:
        return error if "\n  need  " in str(error) else None
    return None


def try_first_batch(recipe: Recipe, state: TrainState, batch: Any, by_value: bool = True) -> None:
    """Raise for ids outside their table, or for batch weights that the loss does not read.

    With `by_value` it checks ids as `checked` does. Without `by_value` it does not check ids.
    """
    if isinstance(state, Params):
        check("funcrec.fit", state_problems(state))
    loss, extra = recipe.loss_fn, with_key(recipe, state)
    run = lambda: (checked(loss) if by_value else loss)(state.params, batch, **extra)
    with own_errors("funcrec.train_step", loss, state.params, batch, need="the batch that it reads"):
        if not isinstance(batch, Batch) or not isinstance(batch.weight, Tensor):
            run()
            return
        with Readers(batch.weight) as weight:
            run()
    if not weight.found:
        fail(
            "funcrec.fit", "the loss reads no `batch.weight`: what fills up a last batch would count in it.",
            got=f"{getattr(loss, '__name__', type(loss).__name__)}, and a batch with weights",
            need="Σ w l / Σ w over the batch, or batches without weights",
            hint="fr.losses.bce(logits, batch.label, batch.weight); validate=lambda batch: None to train without them",
        )  # fmt: skip
