"""Deep & Cross networks: bounded-degree products of all inputs, then an MLP.

    z = mlp(cross([e_1 ... e_F, x_0])),   x_0 = dense, or bottom(dense)

Shapes: B batch, F features, D dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec import nn
from funcrec.core import Count, Draw, Magnitude, Share, Size, Sizes, check, random, remade, typed
from funcrec.models._deep import deep_part, run, width, with_dense
from funcrec.models._dlrm import bottom_problems
from funcrec.models._model import Model, build, check_configs, part, used
from funcrec.tables import Batch, FeatureConfig, Params, TableConfig, lookup, modulo


@remade
@typed
def dcnv2(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    *,
    num_dense: Size = 0,
    num_cross: Count = 2,
    rank: Count | None = None,
    sizes: Sizes = (256, 256),
    dropout: Share = 0.0,
    batch_norm: bool = False,
    cross_penalty: Magnitude = 0.0,
    cross_weight: Draw = nn.xavier_normal,
) -> Model:
    """Return DCN-v2, stacked: cross layers on the concatenation of embeddings and dense inputs, then an MLP.

    Args:
      num_cross, rank: as in `nn.cross_network`. With rank None the matrix is full.
      cross_penalty: a factor. The loss adds its product with the sum of the Frobenius norms of the cross matrices.
      cross_weight: draws the cross matrices.

    Example:
      >>> import funcrec as fr
      >>> tables, features = (fr.TableConfig("item", 10, 4),), (fr.FeatureConfig("item", table="item"),)
      >>> model = fr.models.dcnv2(tables, features, batch_norm=True)
      >>> sorted(model.init(fr.key(0)).dense)
      ['cross', 'mlp', 'out', 'stats']

    Source: Wang et al., "DCN V2" (WWW 2021), fig. 1a.
    """
    call = "funcrec.models.dcnv2"
    check_configs(call, tables, features)
    num_in = width(tables, features) + num_dense
    cross = nn.cross_network(num_in, num_cross, rank, weight=cross_weight)
    init_deep, deep = deep_part(num_in, sizes, dropout, batch_norm)

    def init(key: Tensor) -> dict[str, Any]:
        for_cross, for_deep = random.split(key)
        return {"cross": cross.init(for_cross), **init_deep(for_deep)}

    def forward(params: Params, batch: Batch, key: Tensor | None):
        x = with_dense(lookup(params.tables, batch.ids, features).values, batch)
        return deep(params.dense, cross.apply(part(params.dense, "cross"), x), key, used(batch))

    def penalty(dense: dict[str, Any]) -> Tensor:
        matrices = [w for layer in dense["cross"] for name, w in layer.items() if name != "bias"]
        return cross_penalty * torch.stack([torch.linalg.vector_norm(w) for w in matrices]).sum()

    return build(call, tables, features, num_dense, init, forward, penalty if cross_penalty else None)


@remade
@typed
def dlrm_dcnv2(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    *,
    num_dense: Size = 13,
    bottom: Sequence[Count] = (512, 256, 128),
    num_cross: Count = 3,
    rank: Count | None = 512,
    sizes: Sizes = (1024, 1024, 512, 256),
) -> Model:
    """Return DLRM with cross layers as its interaction, as in MLPerf: top(cross([bottom(dense), e_1 ... e_F])).

    Args:
      bottom: the hidden layers over the dense inputs, with ReLU after each layer.
      sizes: the hidden layers of the top. An output layer of size 1 follows them.

    Example:
      >>> import funcrec as fr
      >>> tables, features = (fr.TableConfig("item", 10, 4),), (fr.FeatureConfig("item", table="item"),)
      >>> model = fr.models.dlrm_dcnv2(tables, features, num_dense=2, bottom=(8, 4), rank=3, sizes=(16,))
      >>> model.init(fr.key(0)).dense["cross"][0]["u"].shape
      torch.Size([8, 3])

    Source: TorchRec's DLRM_DCN; MLCommons training, recommendation_v2.
    """
    call = "funcrec.models.dlrm_dcnv2"
    check_configs(call, tables, features)
    check(call, bottom_problems(bottom, num_dense))
    num_in = width(tables, features) + (bottom[-1] if num_dense else 0)
    below = nn.mlp((num_dense, *bottom), final_activation=torch.relu, bias=nn.fan_out_normal) if num_dense else None
    cross = nn.cross_network(num_in, num_cross, rank)
    top = nn.mlp((num_in, *sizes, 1), bias=nn.fan_out_normal)

    def init(key: Tensor) -> dict[str, Any]:
        keys = random.split(key, 3)
        dense = {"cross": cross.init(keys[1]), "top": top.init(keys[2])}
        return dense if below is None else {"bottom": below.init(keys[0]), **dense}

    def forward(params: Params, batch: Batch, key: Tensor | None):
        x = lookup(params.tables, batch.ids, features).values
        if below is not None:
            first, _ = run(below, part(params.dense, "bottom"), batch.dense.to(x.dtype), key)
            x = torch.cat([first, x], 1)
        z, _ = run(top, part(params.dense, "top"), cross.apply(part(params.dense, "cross"), x), key)
        return z.squeeze(-1), {}

    return build(call, tables, features, num_dense, init, forward)


MLPERF_ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
MLPERF_IDS_PER_BAG = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


@remade
@typed
def mlperf_dlrm_dcnv2(max_rows: Count | None = None, *, embedding_dim: Count = 128) -> Model:
    """Return the model of MLPerf training's recommendation benchmark: Criteo's 13 dense and 26 multi-hot features.

    Args:
      max_rows: larger tables are cut to this many rows, and their ids hashed by modulo. None keeps 204,184,588 rows.

    Returns:
      a Model with tables "t_cat_0" ... "t_cat_25" and features "cat_0" ... "cat_25", pooled by sums.

    Example:
      >>> import funcrec as fr
      >>> model = fr.models.mlperf_dlrm_dcnv2()
      >>> sum(t.num_embeddings for t in model.tables), sum(f.max_length for f in model.features)
      (204184588, 214)

    Source: MLCommons training, recommendation_v2/torchrec_dlrm.
    """
    tables, features = [], []
    for i, (rows, length) in enumerate(zip(MLPERF_ROWS, MLPERF_IDS_PER_BAG, strict=True)):
        kept = rows if max_rows is None else min(max_rows, rows)
        cut = kept < rows
        tables.append(TableConfig(f"t_cat_{i}", kept, embedding_dim))
        features.append(
            FeatureConfig(f"cat_{i}", table=f"t_cat_{i}", max_length=length, hash=modulo() if cut else None)
        )
    return dlrm_dcnv2(tables, features, bottom=(512, 256, embedding_dim))
