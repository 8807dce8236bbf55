"""Models with a first-order term and a deep network.

    wide_deep: z = lr + mlp([e_1 ... e_F, dense])          deepfm: z = lr + fm(e) + mlp([e_1 ... e_F, dense])

Shapes: B batch, F features, D dim.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec import nn
from funcrec.core import Share, Size, Sizes, check, random, remade, sure, typed
from funcrec.models._model import Model, build, check_configs, equal_dim_problems, part, used
from funcrec.models._shallow import first_order
from funcrec.nn import Layer
from funcrec.tables import Batch, FeatureConfig, Params, TableConfig, lookup


@remade
@typed
def wide_deep(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    *,
    linear: Sequence[FeatureConfig] = (),
    num_dense: Size = 0,
    sizes: Sizes = (256, 256, 256),
    dropout: Share = 0.0,
    batch_norm: bool = False,
) -> Model:
    """Return Wide & Deep: a first-order term of `linear` and dense inputs, plus an MLP of embeddings and dense inputs.

    Args:
      sizes: the hidden layers, each with ReLU. An output layer follows them.
      dropout: the rate before every hidden layer.
      batch_norm: whether there is batch norm before every ReLU.

    Example:
      >>> import funcrec as fr
      >>> tables, features = (fr.TableConfig("item", 10, 4),), (fr.FeatureConfig("item", table="item"),)
      >>> model = fr.models.wide_deep(tables, features, sizes=(8,))
      >>> fr.models.num_parameters(model.init(fr.key(0)))
      90

    Source: Cheng et al., "Wide & Deep Learning for Recommender Systems" (2016).
    """
    call = "funcrec.models.wide_deep"
    check_configs(call, tables, features, linear)
    init_wide, wide = first_order(linear, num_dense)
    init_deep, deep = deep_part(width(tables, features) + num_dense, sizes, dropout, batch_norm)

    def forward(params: Params, batch: Batch, key: Tensor | None):
        x = with_dense(lookup(params.tables, batch.ids, features).values, batch)
        z, stats = deep(params.dense, x, key, used(batch))
        return wide(params, batch) + z, stats

    return build(
        call, tables, (*features, *linear), num_dense, lambda key: {**init_wide(key), **init_deep(key)}, forward
    )


@remade
@typed
def deepfm(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    *,
    linear: Sequence[FeatureConfig] = (),
    num_dense: Size = 0,
    sizes: Sizes = (256, 256, 256),
    dropout: Share = 0.0,
    batch_norm: bool = False,
) -> Model:
    """Return DeepFM: `wide_deep` plus a factorization machine over the same embeddings, which must have one dim.

    Example:
      >>> import funcrec as fr
      >>> tables = (fr.TableConfig("user", 10, 4), fr.TableConfig("item", 20, 4))
      >>> features = (fr.FeatureConfig("user", table="user"), fr.FeatureConfig("item", table="item"))
      >>> wide_tables, wide = fr.models.linear_twins(tables, features)
      >>> model = fr.models.deepfm(tables + wide_tables, features, linear=wide, num_dense=3)
      >>> sorted(model.init(fr.key(0)).dense)
      ['bias', 'linear', 'mlp', 'out']

    Source: Guo et al., "DeepFM" (IJCAI 2017), eq. 1.
    """
    call = "funcrec.models.deepfm"
    check_configs(call, tables, features, linear)
    check(call, equal_dim_problems(features, tables))
    init_wide, wide = first_order(linear, num_dense)
    init_deep, deep = deep_part(width(tables, features) + num_dense, sizes, dropout, batch_norm)

    def forward(params: Params, batch: Batch, key: Tensor | None):
        acts = lookup(params.tables, batch.ids, features)
        z, stats = deep(params.dense, with_dense(acts.values, batch), key, used(batch))
        return wide(params, batch) + nn.factorization_machine(acts.stack()) + z, stats

    return build(
        call, tables, (*features, *linear), num_dense, lambda key: {**init_wide(key), **init_deep(key)}, forward
    )


# -- parts that other models share -------------------------------------------------------------------------------


def deep_part(num_in: int, sizes: Sequence[int], dropout: float, batch_norm: bool) -> tuple[Callable, Callable]:
    """Return (init, apply) of hidden layers `sizes` and an output layer, f[B, num_in] -> (f[B], stats).

    The statistics count the rows for which `mask` is true."""
    hidden = nn.mlp((num_in, *sizes), final_activation=torch.relu, dropout=dropout, batch_norm=batch_norm)
    out = nn.linear(sizes[-1], 1)

    def init(key: Tensor) -> dict[str, Any]:
        for_hidden, for_out = random.split(key)
        params = {"mlp": hidden.init(for_hidden), "out": out.init(for_out)}
        return {**params, "stats": hidden.init_stats()} if batch_norm else params

    def apply(dense: dict[str, Any], x: Tensor, key: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Any]:
        h, stats = run(hidden, part(dense, "mlp"), x, key, dense.get("stats", []), mask)
        return out.apply(part(dense, "out"), h).squeeze(-1), stats

    return init, apply


def run(
    layer: Layer, params: Any, x: Tensor, key: Tensor | None, stats: Any = (), mask: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Return the output and the statistics of a stack of layers, in evaluation without a key, else in training."""
    if key is None:
        return layer.apply(params, x, stats), stats
    return sure(layer.train_apply)(params, x, key, stats, mask)


def with_dense(x: Tensor, batch: Batch) -> Tensor:
    return x if batch.dense is None else torch.cat([x, batch.dense.to(x.dtype)], 1)


def width(tables: Sequence[TableConfig], features: Sequence[FeatureConfig]) -> int:
    """Return ΣD, the sum of the dims of the features."""
    dims = {t.name: t.embedding_dim for t in tables}
    return sum(dims[f.table] for f in features)
