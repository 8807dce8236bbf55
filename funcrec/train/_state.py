"""The state that training changes: a plain pytree."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funcrec.core import PARTS, Movable, Problem, describe, pytree
from funcrec.jagged import is_concrete
from funcrec.tables import Params, show_dense, show_tables


@pytree
class TrainState(Movable):
    """Everything that a training step changes.

    Args:
      step: i64[], the steps taken.
      tables: {name: f[R, D]}.
      slots: the row optimizer's state, as its `init` made it.
      dense: the dense parameters.
      dense_opt: the dense optimizer's state.
      key: i64[], the random key; step t draws from fold_in(key, t).

    Example:
      >>> import torch, funcrec as fr
      >>> step = fr.train_step(lambda p, b: p.dense["w"].sum(), sparse=fr.optim.sgd(0.1),
      ...                      dense=fr.optim.dense(torch.optim.SGD, lr=0.1))
      >>> step.init(fr.Params(tables={"item": torch.zeros(10, 4)}, dense={"w": torch.ones(2)}))
      TrainState(step=0, tables={item: f32[10, 4]}, slots=0 tensors, dense=1 tensor, dense_opt=0 tensors)
    """

    step: Tensor
    tables: Any
    slots: Any
    dense: Any
    dense_opt: Any
    key: Tensor

    @property
    def params(self) -> Params:
        return Params(self.tables, self.dense)

    def __repr__(self) -> str:
        is_one = isinstance(self.step, Tensor) and is_concrete(self.step) and not self.step.dim()
        step = int(self.step) if is_one else describe(self.step)
        trees = {n: show_dense(getattr(self, n)) for n in ("slots", "dense", "dense_opt")}
        shown = ", ".join([f"tables={show_tables(self.tables)}", *(f"{n}={x}" for n, x in trees.items())])
        return f"TrainState(step={step}, {shown})"


def state_parts(x: TrainState, path: str) -> Iterator[Problem]:
    """Report wrong fields of the state among the fields that every step reads."""
    hint = "step.init(params) makes them"
    for name in ("step", "key"):
        t = getattr(x, name)
        if not isinstance(t, Tensor) or t.is_floating_point() or t.is_complex() or t.dtype == torch.bool or t.dim():
            yield Problem(f"`{path}.{name}` is not an integer tensor.", describe(t), "i64[]", hint, TypeError)
    for name, words in (("tables", "{name: f[R, D]}"), ("slots", "{table: {slot: f[R, ...]}}")):
        if not isinstance(getattr(x, name), Mapping):
            yield Problem(f"`{path}.{name}` is not a mapping.", describe(getattr(x, name)), words, hint, TypeError)
    for n, own in x.slots.items() if isinstance(x.slots, Mapping) else ():
        if not isinstance(own, Mapping):
            need = "{slot: f[R, ...]}"
            yield Problem(f"`{path}.slots[{n!r}]` is not a mapping.", describe(own), need, hint, TypeError)


PARTS[TrainState] = state_parts
