"""The record of a model's functions, and the loss that trains the model.

    loss = Σ_b w_b l(z_b, y_b) / Σ_b w_b + penalty,   z = train_apply(params, batch, key)

A model is a value that holds functions. Its parameters are outside of it, in `Params`. Shapes: B batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from funcrec import losses
from funcrec.core import (
    Problem,
    check,
    describe,
    fail,
    html_table,
    is_tracked,
    kind_of,
    map_tensors,
    random,
    reduced,
    reported,
    shown,
    sure,
    tree_leaves,
    tree_structure,
    typed,
    typed_fields,
)
from funcrec.grad import params_problems
from funcrec.jagged import bag_ids
from funcrec.tables import (
    HEAD,
    Batch,
    FeatureConfig,
    Params,
    TableConfig,
    blank_padding,
    feature_list_problems,
    feature_table_problems,
    jump_problems,
    table_lines,
    table_list_problems,
)
from funcrec.tables import init as init_tables

R = TypeVar("R", covariant=True)


class TrainingLoss(Protocol[R]):
    """A loss that draws by a key."""

    __module__ = "funcrec.models"  # what `help` shows

    def __call__(self, params: Params, batch: Batch, *, key: Tensor) -> R: ...


@typed_fields
class Model(NamedTuple):
    """A model with one logit per example.

    tables: every table of `params.tables`.
    features: every feature for which a batch's ids must have a column.
    init: (key) -> Params. Its dense tree is plain dicts and lists of f32. With batch norm, dense["stats"] holds running
      statistics, which get zero gradients and are updated by `merge_stats`.
    apply: (params, batch) -> f32[B], as in evaluation: without dropout, with running statistics.
    train_apply: (params, batch, key) -> (f32[B], stats), as in training. stats is {} or the new dense["stats"].
    penalty: (dense) -> f[], which the training loss adds; or None.

    Example:
      >>> import torch, funcrec as fr
      >>> tables, features = (fr.TableConfig("item", 10, 1),), (fr.FeatureConfig("item", table="item"),)
      >>> model = fr.models.lr(tables, features)
      >>> batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"item": [[1], [2]]}), torch.tensor([0.0, 1.0]))
      >>> model.apply(model.init(fr.key(0)), batch).shape
      torch.Size([2])
    """

    tables: tuple[TableConfig, ...]
    features: tuple[FeatureConfig, ...]
    init: Callable[[Tensor], Params]
    apply: Callable[[Params, Batch], Tensor]
    train_apply: Callable[[Params, Batch, Tensor], tuple[Tensor, Any]]
    penalty: Callable[[Any], Tensor] | None = None

    def _repr_html_(self) -> str:
        """Return the tables of the model in HTML, for a notebook."""
        return html_table(HEAD, table_lines(self.tables, self.features))

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    def __repr__(self) -> str:
        return shown(self)

    if not TYPE_CHECKING:  # an editor marks the call

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            what, need = "a model is a record of functions, not a function.", "one of them"
            hint = "model.apply(params, batch), with params = model.init(key); model.train_apply(params, batch, key)"
            fail("funcrec.models.Model", what, got="model(...)", need=need, hint=hint, kind=TypeError)


@typed
def loss(model: Model, loss: Callable[..., Tensor] = losses.bce) -> TrainingLoss[tuple[Tensor, dict[str, Any]]]:
    """Return the training loss: the mean of `loss` over the batch, weighted by `batch.weight`, plus the penalty.

    Args:
      loss: (f[B] of model.train_apply, batch.label, batch.weight) -> f[]. It is binary cross entropy with logits,
        another loss of `fr.losses`, or your own.

    Returns:
      loss_fn(params, batch, *, key) -> (f[], {"logits": f[B], "stats": ...}), for `value_and_grad(has_aux=True)` and
      for `train_step(has_aux=True, merge=merge_stats)`.

    Raises:
      ValueError: from loss_fn, if the batch has no label. loss_fn also raises what `loss` raises for labels that are
        not f[B] in [0, 1]. If no value can be read (under `jit`, on a GPU), such a label makes the loss NaN.

    Law: an example of weight 0 changes neither loss, gradients nor running statistics, whatever its numbers are.

    Example:
      >>> import torch, funcrec as fr
      >>> model = fr.models.lr((fr.TableConfig("item", 10, 1),), (fr.FeatureConfig("item", table="item"),))
      >>> batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"item": [[1], [2]]}), torch.tensor([0.0, 1.0]))
      >>> grad_fn = fr.value_and_grad(fr.models.loss(model), has_aux=True)
      >>> (loss, aux), grads = grad_fn(model.init(fr.key(0)), batch, key=fr.key(1))
      >>> aux["logits"].shape, grads.tables["item"].rows
      (torch.Size([2]), tensor([1, 2]))
    """

    def loss_fn(params: Params, batch: Batch, *, key: Tensor | None = None):  # a missing key is an error of four parts
        key = random.check_key("funcrec.models.loss", key)
        logits, stats = model.train_apply(params, batch, key)
        check("funcrec.models.loss", label_problems(batch.label))
        value = loss(logits, batch.label, batch.weight)
        if model.penalty is not None:
            value = value + model.penalty(params.dense)
        return value, {"logits": logits, "stats": stats}

    return loss_fn


def merge_stats(dense: dict[str, Any], aux: dict[str, Any]) -> dict[str, Any]:
    """Return `dense` with the running statistics from the `aux` of the loss. A step calls it after its dense optimizer.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.models.merge_stats({"bias": 1, "stats": "old"}, {"stats": "new"})
      {'bias': 1, 'stats': 'new'}
      >>> fr.models.merge_stats({"bias": 1}, {"stats": {}})
      {'bias': 1}
    """
    call, hint = "funcrec.models.merge_stats", "a loss of `fr.models.loss(model)`, or of model.train_apply"
    if not isinstance(aux, Mapping) or "stats" not in aux:
        fail(call, "`aux` has no statistics.", got=describe(aux), need='{"stats": ...}', hint=hint, kind=TypeError)
    if not isinstance(dense, Mapping):
        need = "the dense parameters of a model, {name: ...}"
        fail(call, "`dense` is not a mapping.", got=describe(dense), need=need, hint="state.dense", kind=TypeError)
    new, old = aux["stats"], dense.get("stats")
    is_none = lambda x: x is None or (isinstance(x, Mapping | list | tuple) and not x)
    if is_none(new) and not is_none(old):
        fail(call, "the loss gave no statistics for those of `dense`.", got="{}", need="the new ones", hint=hint)
    if is_none(new):
        return dense
    if is_none(old) or tree_structure(new) != tree_structure(old):
        got, need = describe(new), "statistics like those of `dense`" if not is_none(old) else "none: `dense` has none"
        fail(call, "`aux['stats']` are not those of `dense`.", got=got, need=need, hint=hint, kind=TypeError)
    return {**dense, "stats": new}


@typed
def num_parameters(params: Params) -> int:
    """Return how many numbers training changes, which are all of `params` except the running statistics.

    Example:
      >>> import funcrec as fr
      >>> fr.models.num_parameters(fr.models.ml1m("deepfm").init(fr.key(0)))
      331773
    """
    dense = params.dense
    check("funcrec.models.num_parameters", params_problems(params))
    trained = {k: v for k, v in dense.items() if k != "stats"} if isinstance(dense, dict) else dense
    return sum(x.numel() for x in tree_leaves((dict(params.tables), trained)) if isinstance(x, Tensor))


@typed
def linear_twins(
    tables: Sequence[TableConfig], features: Sequence[FeatureConfig]
) -> tuple[tuple[TableConfig, ...], tuple[FeatureConfig, ...]]:
    """Return first-order weights: a table of dim 1 for each table, and a feature on the same column for each feature.

    Example:
      >>> import funcrec as fr
      >>> tables, features = (fr.TableConfig("item", 10, 16),), (fr.FeatureConfig("item", table="item"),)
      >>> wide_tables, wide = fr.models.linear_twins(tables, features)
      >>> wide_tables[0].shape, wide[0].name, wide[0].key
      ((10, 1), 'item_linear', 'item')
    """
    call = "funcrec.models.linear_twins"
    check(call, table_list_problems(tables), feature_list_problems(features))
    return (
        tuple(replace(t, name=f"{t.name}_linear", embedding_dim=1) for t in tables),
        tuple(replace(f, name=f"{f.name}_linear", table=f"{f.table}_linear", column=f.key) for f in features),
    )


def part(dense: Any, name: str, shape: tuple[int, ...] | None = None) -> Any:
    """Return dense[name], the parameters of one part of a model. Pass `shape` for a part that is one tensor."""
    own = dense.get(name) if isinstance(dense, Mapping) else None
    need = f"{name!r}: parameters of its own" if shape is None else f"{name!r}: f{list(shape)}"
    fits = own is not None if shape is None else isinstance(own, Tensor) and own.shape == shape
    if not fits:
        got = (
            (f"names {list(dense)}" if own is None else describe(own))
            if isinstance(dense, Mapping)
            else describe(dense)
        )
        kind = ValueError if isinstance(own, Tensor) else TypeError
        hint = "model.init(key)"
        fail("funcrec.models", "`params.dense` is not this model's.", got=got, need=need, hint=hint, kind=kind)
    return own


def build(
    call: str,
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    num_dense: int | None,
    init_dense: Callable[[Tensor], dict[str, Any]],
    forward: Callable[[Params, Batch, Tensor | None], tuple[Tensor, Any]],
    penalty: Callable[[Any], Tensor] | None = None,
) -> Model:
    """Return a Model from `forward(params, batch, key)`, where key None means evaluation.

    num_dense: the number of dense inputs; None for a model that cannot have any.
    """
    tables = tuple(tables)

    def init(key: Tensor) -> Params:
        random.check_key(f"{call}.init", key)
        for_tables, for_dense = random.split(key)
        dense = map_tensors(lambda x: x.to(key.device), init_dense(for_dense))
        return Params(init_tables(for_tables, tables), dense)

    def apply(params: Params, batch: Batch) -> Tensor:
        check(f"{call}.apply", input_problems(params, batch, num_dense))
        return forward(params, without_padding(batch), None)[0]

    def train_apply(params: Params, batch: Batch, key: Tensor) -> tuple[Tensor, Any]:
        check(f"{call}.train_apply", input_problems(params, batch, num_dense))
        random.check_key(f"{call}.train_apply", key)
        logits, stats = forward(params, without_padding(batch), key)
        if stats and batch.weight is not None and is_tracked(batch.weight):
            check(f"{call}.train_apply", jump_problems(batch.weight, "batch norm"))
            logits = torch.where((batch.weight == 0).any(), torch.nan, logits)  # a weight that cannot be read may be 0
        return logits, stats or {}

    return Model(tables, tuple(features), init, apply, train_apply, penalty)


def used(batch: Batch) -> Tensor | None:
    """Return which examples are not padding, bool[B]; None if no example is padding."""
    return None if batch.weight is None else batch.weight != 0


def without_padding(batch: Batch) -> Batch:
    """Return the batch with zeros for the numbers of examples of weight 0.

    In a gradient, zero times a number need not be zero. If the weights are differentiated, no example is padding."""
    if batch.weight is None or is_tracked(batch.weight):
        return batch
    ids, dense = batch.ids, None if batch.dense is None else blank_padding(batch.dense, batch.weight)
    if ids.weights is not None and ids.strides is None and ids.inverse is None and ids.num_bags:
        bags = bag_ids(ids.offsets, ids.capacity).clamp(max=len(ids.keys) * ids.num_bags - 1)
        inside = sure(used(batch)).index_select(0, bags % ids.num_bags)
        ids = replace(ids, weights=torch.where(inside, ids.weights, 0))
    return replace(batch, ids=ids, dense=dense)


# -- validators --------------------------------------------------------------------------------------------------


def check_configs(call: str, tables: Any, features: Any, linear: Any = ()) -> None:
    """Raise unless the configs are pooled features of known tables, and first-order features of dim 1."""
    check(call, table_list_problems(tables), feature_list_problems(features), feature_list_problems(linear))
    every = (*features, *linear)
    check(call, feature_table_problems(every, tables), pooling_problems(every))
    check(call, dim_problems(linear, tables, 1, "`linear_twins(tables, features)` makes them"))


def pooling_problems(features: Sequence[FeatureConfig]) -> Iterator[Problem]:
    if not features:
        yield Problem("`features` are empty.", "no feature", "at least one pooled feature")
    for f in features:
        if f.pooling == "none":
            need = "pooling 'sum', 'mean' or 'max'"
            yield Problem(f"`features[{f.name!r}]` is a sequence.", "pooling 'none'", need)


def sequence_problems(name: str, features: Sequence[FeatureConfig]) -> Iterator[Problem]:
    if not features:
        yield Problem(f"`{name}` is empty.", "no feature", "at least one feature with pooling 'none'")
    for f in features:
        if f.pooling != "none":
            what, got = f"`{name}[{f.name!r}]` is not a sequence.", f"pooling {f.pooling!r}"
            yield Problem(what, got, "pooling 'none'")


def equal_bag_problems(is_equal: bool) -> Iterator[Problem]:
    if not is_equal:
        need, hint = "bags of the same lengths", "one max_length for all of the sequences"
        yield Problem("the sequences differ in their bags.", "other offsets", need, hint)


def dim_problems(features, tables, dim: int, hint: str) -> Iterator[Problem]:
    dims = {t.name: t.embedding_dim for t in tables}
    wrong = {f.name: dims[f.table] for f in features if dims[f.table] != dim}
    if wrong:
        yield Problem("the features' tables have another dim.", f"{wrong}", f"embedding_dim {dim} for all", hint)


def equal_dim_problems(features: Sequence[FeatureConfig], tables: Sequence[TableConfig]) -> Iterator[Problem]:
    dims = {t.name: t.embedding_dim for t in tables}
    got = {f.name: dims[f.table] for f in features}
    if len(set(got.values())) > 1:
        hint = "one embedding_dim for the tables of these features, or a model that concatenates (wide_deep, dcnv2)"
        yield Problem("the interacting features differ in width.", f"dims {got}", "one dim for all", hint)


PARAMS, BATCH = kind_of(Params), kind_of(Batch)


def input_problems(params: object, batch: Any, num_dense: int | None) -> Iterator[Problem]:
    yield from PARAMS.find("params", params)
    if (yield from reported(BATCH.find("batch", batch))):
        return
    if batch.dense is None and num_dense:
        hint = "a model with num_dense=0 needs none"
        yield Problem("`batch.dense` is missing.", "None", f"f[B, {num_dense}]", hint)
    elif batch.dense is not None and num_dense is None:
        hint = "Batch(ids, label); fr.data.bucketize makes ids of a column of numbers"
        yield Problem("`batch.dense` would not be read.", describe(batch.dense), "None: this model reads ids", hint)
    elif batch.dense is not None and not num_dense:
        hint = "Batch(ids, label), or a model with num_dense"
        yield Problem("`batch.dense` would not be read.", describe(batch.dense), "None: num_dense is 0", hint)
    elif batch.dense is not None and (batch.dense.dim() != 2 or batch.dense.shape[1] != num_dense):
        yield Problem("`batch.dense` does not match the model.", describe(batch.dense), f"f[B, {num_dense}]")
    elif batch.dense is not None and not batch.dense.is_floating_point():
        yield Problem("`batch.dense` is not a float tensor.", describe(batch.dense), "floats", kind=TypeError)
    has_rows = batch.ids.strides is None or batch.ids.inverse is not None
    rows = batch.ids.num_examples if has_rows else None
    weight = batch.weight
    if weight is not None and (weight.dim() != 1 or rows not in (None, weight.shape[0])):
        yield Problem("`batch.weight` does not match its ids.", describe(weight), f"f[{rows or 'B'}]")
    elif weight is not None and not weight.is_floating_point():
        yield Problem("`batch.weight` is not a float tensor.", describe(weight), "f[B]", "weight.float()", TypeError)


def label_problems(label: object) -> Iterator[Problem]:
    if label is None:
        need, hint = "f32[B]", "fr.Batch(ids, label, dense); model.apply(params, batch) needs none"
        yield Problem("`batch.label` is missing: there is nothing to learn from.", "None", need, hint)
