"""What a loss reads and what training changes: two plain pytrees. Floor 2."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funcrec._arguments import PARTS
from funcrec._errors import Problem, describe, fail
from funcrec._keyed_jagged import KeyedJaggedTensor
from funcrec._keyed_problems import keyed_hint, keyed_parts
from funcrec._mesh import P
from funcrec._tree import pytree, tree_leaves


@pytree
class Params:
    """What a loss takes: `tables` {name: f[R, D]} get row gradients, `dense` (any tree of floats) dense ones.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.Params(tables={"item": torch.zeros(10, 4)}, dense={"w": torch.zeros(4)})
      Params(tables={item: f32[10, 4]}, dense=1 tensor)
    """

    tables: dict[str, Tensor]
    dense: Any

    def __post_init__(self):
        if not isinstance(self.tables, Mapping) and not _is_spec(self.tables):
            got, need, hint = describe(self.tables), "{name: f[R, D]}", "fr.init(key, table_configs); {} for no tables"
            fail("funcrec.Params", "`tables` is not a dict of tables.", got=got, need=need, hint=hint, kind=TypeError)

    def __repr__(self) -> str:
        return f"Params(tables={_show_tables(self.tables)}, dense={_show_dense(self.dense)})"


@pytree(optional=("dense",))
class Batch:
    """One batch of examples, as the models of `funcrec.models` and the loaders of `funcrec.data` have it.

    Args:
      ids: B bags per key.
      label: f32[B].
      dense: f32[B, num_dense], or None.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.Batch(fr.KeyedJaggedTensor.from_lists({"item": [[1], [2]]}), torch.tensor([0.0, 1.0])).label
      tensor([0., 1.])
    """

    ids: KeyedJaggedTensor
    label: Tensor
    dense: Tensor | None = None


@pytree
class TrainState:
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
      >>> step.init(fr.Params(tables={}, dense={"w": torch.ones(2)})).step
      tensor(0)
    """

    step: Tensor
    tables: dict[str, Tensor]
    slots: Any
    dense: Any
    dense_opt: Any
    key: Tensor

    @property
    def params(self) -> Params:
        return Params(self.tables, self.dense)

    def __repr__(self) -> str:
        shown = f"tables={_show_tables(self.tables)}, dense={_show_dense(self.dense)}"
        return f"TrainState(step={describe(self.step)}, {shown})"


def _is_spec(x: object) -> bool:
    """What stands for all tables in the arguments of a transform: Params(0, 0) of vmap, Params(P(), P()) of shard_map."""
    return x is None or isinstance(x, P) or (isinstance(x, int) and not isinstance(x, bool))


def _show_tables(tables: Any) -> str:
    if not isinstance(tables, dict):
        return describe(tables)
    return "{" + ", ".join(f"{name}: {describe(t)}" for name, t in tables.items()) + "}"


def _show_dense(dense: Any) -> str:
    count = len([x for x in tree_leaves(dense) if isinstance(x, Tensor)])
    return f"{count} tensor{'s' * (count != 1)}"


def state_parts(x: TrainState, path: str) -> Iterator[Problem]:
    """What is wrong with the fields that every step reads."""
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
            yield Problem(
                f"`{path}.slots[{n!r}]` is not a mapping.", describe(own), "{slot: f[R, ...]}", hint, TypeError
            )


def batch_parts(x: Batch, path: str) -> Iterator[Problem]:
    """What is wrong with the fields of one that was made by hand, or came out of a tree."""
    hint = "fr.Batch(ids, label, dense)"
    if not isinstance(x.ids, KeyedJaggedTensor):
        need = "a KeyedJaggedTensor"
        yield Problem(
            f"`{path}.ids` is not a KeyedJaggedTensor.", describe(x.ids), need, keyed_hint(x.ids, "ids"), TypeError
        )
    else:
        yield from keyed_parts(x.ids, f"{path}.ids")
    for name in ("label", "dense"):
        t = getattr(x, name)
        if not isinstance(t, Tensor) and not (name == "dense" and t is None):
            yield Problem(f"`{path}.{name}` is not a tensor.", describe(t), "a tensor [B, ...]", hint, TypeError)


PARTS[TrainState] = state_parts
PARTS[Batch] = batch_parts
