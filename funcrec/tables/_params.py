"""What a loss takes: tables and dense parameters, and a batch of examples."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from funcrec.core import PARTS, Problem, describe, fail, pytree, tree_leaves
from funcrec.jagged import KeyedJaggedTensor, keyed_hint, keyed_parts
from funcrec.mesh import P


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
        return f"Params(tables={show_tables(self.tables)}, dense={show_dense(self.dense)})"


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


def _is_spec(x: object) -> bool:
    """What stands for all tables in the arguments of a transform:
    Params(0, 0) of vmap, Params(P(), P()) of shard_map."""
    return x is None or isinstance(x, P) or (isinstance(x, int) and not isinstance(x, bool))


def show_tables(tables: Any) -> str:
    if not isinstance(tables, dict):
        return describe(tables)
    return "{" + ", ".join(f"{name}: {describe(t)}" for name, t in tables.items()) + "}"


def show_dense(dense: Any) -> str:
    count = len([x for x in tree_leaves(dense) if isinstance(x, Tensor)])
    return f"{count} tensor{'s' * (count != 1)}"


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


PARTS[Batch] = batch_parts
