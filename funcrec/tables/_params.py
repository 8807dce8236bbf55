"""The arguments of a loss: parameters, which are tables and dense leaves, and a batch of examples."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from funcrec.core import PARTS, Movable, Problem, check, describe, fail, is_tracked, pytree, tree_leaves, value_below
from funcrec.jagged import KeyedJaggedTensor, keyed_hint, keyed_parts
from funcrec.mesh import P, is_readable

if TYPE_CHECKING:  # A loss that reads what its batch lacks raises. Editors show it as a tensor.
    Given = Tensor
else:
    Given = Tensor | None


@pytree
class Params(Movable):
    """The parameters of a loss. `tables` {name: f[R, D]} get row gradients; `dense`, a tree of floats, gets dense
    gradients.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.Params(tables={"item": torch.zeros(10, 4)}, dense={"w": torch.zeros(4)})
      Params(tables={item: f32[10, 4]}, dense=1 tensor)
    """

    tables: Any  # a dict of tensors, or of their row gradients; another kind of tables; a number for vmap
    dense: Any

    def __post_init__(self) -> None:
        if not isinstance(self.tables, Mapping) and not _is_spec(self.tables):
            got, need, hint = describe(self.tables), "{name: f[R, D]}", "fr.init(key, table_configs); {} for no tables"
            fail("funcrec.Params", "`tables` is not a dict of tables.", got=got, need=need, hint=hint, kind=TypeError)

    def __repr__(self) -> str:
        return f"Params(tables={show_tables(self.tables)}, dense={show_dense(self.dense)})"


@pytree(optional=("label", "dense", "weight"))
class Batch(Movable):
    """One batch of examples. The loaders of `funcrec.data` make batches, and the models of `funcrec.models` read them.

    Args:
      ids: B bags per key.
      label: f32[B], or f32[B, T] for T tasks; None if there is nothing to learn: `model.apply` needs no label.
      dense: f32[B, num_dense], or None.
      weight: f32[B] >= 0, how much each example counts in a loss or a metric; None counts all alike. A loss of your own
        must read the weights: `fr.losses.bce(logits, batch.label, batch.weight)`. An example of weight 0 is padding:
        neither its label nor its dense inputs are read. (The rows of its ids get gradients of zeros, and optimizers
        with momentum move every row that occurs. Padding of empty bags has no rows.)

    Law: a loss of `funcrec.models` equals Σ w l / Σ w, with l the losses and w the weights of the batch's examples. On
      a mesh, the sums run over the batches of all ranks.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.Batch(fr.KeyedJaggedTensor.from_lists({"item": [[1], [2]]}), torch.tensor([0.0, 1.0]))
      Batch(ids=KeyedJaggedTensor({'item': [[1], [2]]}, values=i64[2]), label=f32[2])
    """

    ids: KeyedJaggedTensor
    label: Given = cast(Tensor, None)
    dense: Given = cast(Tensor, None)
    weight: Tensor | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            ids: KeyedJaggedTensor,
            label: Tensor | None = None,
            dense: Tensor | None = None,
            weight: Tensor | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if type(self.ids) in _DATA or any(type(x) in _DATA for x in (self.label, self.dense, self.weight)):
            check("funcrec.Batch", data_problems(self))

    def __repr__(self) -> str:
        named = {n: getattr(self, n) for n in ("label", "dense", "weight")}
        return "".join(
            [f"Batch(ids={self.ids!r}", *(f", {n}={describe(x)}" for n, x in named.items() if x is not None), ")"]
        )


def blank_padding(x: Tensor, weight: Tensor | None) -> Tensor:
    """Return x [B, ...] with zeros for the examples of weight 0.

    So the values of these examples enter no sum and no derivative, although 0 · NaN is NaN. If the weights are
    differentiated, no example is padding: the derivative by a weight of 0 depends on that example.
    """
    if weight is None or is_tracked(weight):
        return x
    return torch.where((weight == 0).reshape(-1, *(1,) * (x.dim() - 1)), 0, x)


def jump_problems(weight: Tensor | None, what: str) -> Iterator[Problem]:
    """Yield a problem if weights are differentiated and one of them is 0.

    `blank_padding` leaves out an example of weight 0, which has no derivative by the weight.
    """
    if weight is not None and is_tracked(weight) and holds_somewhere(weight == 0):
        got, need = "a derivative by weights of which some are 0", "weights > 0, or none that a derivative follows"
        yield Problem(
            f"{what} is discontinuous where a weight is 0.", got, need, "weight.detach(), if these are padding"
        )


def holds_somewhere(x: Tensor) -> bool:
    """Return whether x bool[...] is true anywhere, in any member of a vmap, or False if no value can be read."""
    return is_readable(x) and bool(value_below(x).any())


def _is_spec(x: object) -> bool:
    """Return whether x stands for all tables in the arguments of a transform.

    Examples are Params(0, 0) for vmap, and Params(P(), P()) for shard_map.
    """
    return x is None or isinstance(x, P) or (isinstance(x, int) and not isinstance(x, bool))


def show_tables(tables: Any) -> str:
    if not isinstance(tables, Mapping):
        return describe(tables)
    return "{" + ", ".join(f"{name}: {describe(t)}" for name, t in tables.items()) + "}"


def show_dense(dense: Any) -> str:
    count = len([x for x in tree_leaves(dense) if isinstance(x, Tensor)])
    return f"{count} tensor{'s' * (count != 1)}"


_DATA = {list, dict, str, float, np.ndarray}  # types of data that is not yet a tensor; placeholders have other types


def data_problems(batch: Batch) -> Iterator[Problem]:
    if type(batch.ids) in _DATA:
        hint = 'fr.KeyedJaggedTensor.from_lists({"item": [[1], [2]]})'
        yield Problem("`ids` are not ids.", describe(batch.ids), "a KeyedJaggedTensor", hint, TypeError)
    for name in ("label", "dense", "weight"):
        x = getattr(batch, name)
        if type(x) in _DATA:
            hint = f"torch.tensor({name}, dtype=torch.float32), a number for each example"
            yield Problem(f"`{name}` is not a tensor.", describe(x), "f[B], or None", hint, TypeError)


def batch_parts(x: Batch, path: str) -> Iterator[Problem]:
    """Yield the problems of the fields of a Batch that code made by hand or took out of a tree."""
    hint = "fr.Batch(ids, label, dense, weight)"
    if not isinstance(x.ids, KeyedJaggedTensor):
        got, need, how = describe(x.ids), "a KeyedJaggedTensor", keyed_hint(x.ids, "ids")
        yield Problem(f"`{path}.ids` is not a KeyedJaggedTensor.", got, need, how, TypeError)
    else:
        yield from keyed_parts(x.ids, f"{path}.ids")
    for name, need in (("label", "[B, ...]"), ("dense", "[B, ...]"), ("weight", "f[B]")):
        t = getattr(x, name)
        if t is not None and not isinstance(t, Tensor):
            need = f"a tensor {need}, or None"
            yield Problem(f"`{path}.{name}` is not a tensor.", describe(t), need, hint, TypeError)


PARTS[Batch] = batch_parts
