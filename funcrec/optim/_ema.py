"""ema: the moving average of parameters, kept in the state of their optimizer.

ema' = decay · ema + (1 - decay) · params',      ema_0 = params_0
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from funcrec.core import (
    Problem,
    Share,
    check,
    describe,
    float_leaf_problems,
    paths,
    remade,
    tree_flatten,
    tree_structure,
    tree_unflatten,
    typed,
)
from funcrec.kernels import ops
from funcrec.optim._by_path import held_problems
from funcrec.optim._checks import Scalar
from funcrec.optim._dense import DenseOptimizer, State, leaf_problems

NAME = "ema"  # the key of the average in a parameter's state


@remade
@typed
def ema(optimizer: DenseOptimizer, *, decay: Share | Scalar = 0.999) -> DenseOptimizer:
    """Return a dense optimizer that also keeps the moving average of the parameters, for `averaged` to read.

    ema' = decay · ema + (1 - decay) · params', from the first parameters on. The average is a part of the state: it is
    saved, donated and sharded with it. It is in f32 for parameters in 16 bits. Values that `train_step(merge=...)`
    puts into the parameters enter the average one step later.

    Law: the parameters are those of `optimizer`, bit for bit.

    Example:
      >>> import torch, funcrec as fr
      >>> opt = fr.optim.ema(fr.optim.dense(torch.optim.SGD, lr=1.0), decay=0.75)
      >>> params = {"w": torch.ones(1)}
      >>> state = opt.init(params)
      >>> params, state = opt.update({"w": torch.ones(1)}, state, params, step=0)
      >>> params, fr.optim.averaged(params, state)
      ({'w': tensor([0.])}, {'w': tensor([0.7500])})

    Source: torch.optim.swa_utils.AveragedModel; optax.incremental_update.
    """
    call = "funcrec.optim.ema"

    def init(params: Any) -> State:
        check(f"{call}.init", leaf_problems("dense", params))
        leaves, structure = tree_flatten(params)
        own = structure.flatten_up_to(optimizer.init(params))
        check(f"{call}.init", taken_problems(own))
        first = [x.to(ops.accumulation_dtype(x.dtype), copy=True) for x in leaves]
        return tree_unflatten([{**s, NAME: x} for s, x in zip(own, first, strict=True)], structure)

    def update(grads: Any, state: State, params: Any, step: int | Tensor) -> tuple[Any, State]:
        check(f"{call}.update", leaf_problems("dense", params), held_problems(state, params))
        structure = tree_structure(params)
        held = structure.flatten_up_to(state)
        check(f"{call}.update", average_problems(held, params))
        own = tree_unflatten([{k: x for k, x in s.items() if k != NAME} for s in held], structure)
        moved, made = optimizer.update(grads, own, params, step)
        new = [
            s[NAME] * decay + x.to(s[NAME].dtype) * (1 - decay)
            for s, x in zip(held, tree_flatten(moved)[0], strict=True)
        ]
        states = [{**s, NAME: x} for s, x in zip(structure.flatten_up_to(made), new, strict=True)]
        return moved, tree_unflatten(states, structure)

    return DenseOptimizer(init, update, (optimizer,))


@typed
def averaged(params: Any, state: Any) -> Any:
    """Return the moving averages that `ema` keeps, as a tree like the parameters and in their dtypes -> f[...] each.

    A parameter that is not averaged (a frozen one, one of another group) is returned as it is.

    Args:
      params: the dense parameters, f[...] each: `state.dense` of a TrainState.
      state: the state of their optimizer: `state.dense_opt`.

    Raises:
      ValueError: no parameter has an average, or the state belongs to other parameters.

    Example: a model evaluated at its averages.
      >>> import torch, funcrec as fr
      >>> dense = fr.optim.ema(fr.optim.dense(torch.optim.SGD, lr=1.0), decay=0.5)
      >>> step = fr.train_step(lambda params, batch: params.dense.square(), dense=dense)
      >>> state, _ = step(step.init(fr.Params({}, torch.tensor(1.0))), None)
      >>> fr.Params(state.tables, fr.optim.averaged(state.dense, state.dense_opt)).dense
      tensor(0.)
    """
    call = "funcrec.optim.averaged"
    check(call, float_leaf_problems("`params{}` has no average.", params, "`state.dense` of a TrainState"))
    check(call, held_problems(state, params))
    leaves, structure = tree_flatten(params)
    held = structure.flatten_up_to(state)
    check(call, no_average_problems(held), average_problems(held, params, is_needed=False))
    return tree_unflatten(
        [s[NAME].to(x.dtype) if NAME in s else x for s, x in zip(held, leaves, strict=True)], structure
    )


# -- validators --------------------------------------------------------------------------------------------------


def taken_problems(states: list) -> Iterator[Problem]:
    if any(NAME in s for s in states):
        got, need = f"a state with {NAME!r}", "an optimizer without an average"
        yield Problem("the optimizer keeps an average already.", got, need, "one `ema`, outside of the others")


def average_problems(states: list, params: Any, is_needed: bool = True) -> Iterator[Problem]:
    """Yield a problem for each average that does not fit its parameter. If `is_needed`, each parameter has one."""
    hint = "the state that this optimizer's `init` made of these parameters"
    for (path, p), s in zip(paths(params), states, strict=True):
        x, dtype = s.get(NAME), ops.accumulation_dtype(p.dtype)
        fits = isinstance(x, Tensor) and x.shape == p.shape and x.dtype == dtype
        if not fits and (is_needed or NAME in s):
            need = describe(torch.empty((), dtype=dtype).expand(p.shape))
            yield Problem(f"`state{path}[{NAME!r}]` is not the average of its parameter.", describe(x), need, hint)


def no_average_problems(states: list) -> Iterator[Problem]:
    if not any(NAME in s for s in states):
        hint = "dense=fr.optim.ema(fr.optim.dense(...), decay=0.999)"
        yield Problem("`state` holds no average.", f"{len(states)} states without {NAME!r}", "a state of `ema`", hint)
