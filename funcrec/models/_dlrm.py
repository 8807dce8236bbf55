"""DLRM: dot products of all pairs of vectors, which are the embeddings and the vector of the dense inputs.

    z = top([x_0 ... x_F, (⟨x_i, x_j⟩)_{i>j}]),   x_0 = bottom(dense)

Shapes: B batch, F features, D dim.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from funcrec import nn
from funcrec.core import Count, Problem, Share, Size, Sizes, check, random, remade, typed
from funcrec.models._deep import deep_part, run
from funcrec.models._model import Model, build, check_configs, equal_dim_problems, part, used
from funcrec.tables import Batch, FeatureConfig, Params, TableConfig, lookup


@remade
@typed
def dlrm(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    *,
    num_dense: Size = 0,
    bottom: Sequence[Count] = (),
    sizes: Sizes = (512, 256),
    dropout: Share = 0.0,
    batch_norm: bool = False,
    keep: Literal["all", "dense"] = "all",
) -> Model:
    """Return a model with interactions by dot products. Without dense inputs it is the inner-product network PNN.

    Args:
      bottom: the hidden layers over the dense inputs, with ReLU after each layer. The last size must be the dim of the
        embeddings.
      sizes: the hidden layers over the interactions, with ReLU after each layer. An output layer follows them.
      keep: the vectors that the top reads with the dot products: "all", or only the "dense" vector, as in the paper.

    Raises:
      ValueError: features have different dims, or the last size of `bottom` is another dim.

    Example:
      >>> import funcrec as fr
      >>> tables = (fr.TableConfig("user", 10, 4), fr.TableConfig("item", 20, 4))
      >>> features = (fr.FeatureConfig("user", table="user"), fr.FeatureConfig("item", table="item"))
      >>> model = fr.models.dlrm(tables, features, num_dense=13, bottom=(8, 4), keep="dense")
      >>> sorted(model.init(fr.key(0)).dense)
      ['bottom', 'mlp', 'out']

    Source: Naumov et al., "Deep Learning Recommendation Model" (2019); for keep="all" without dense inputs, Qu et al.,
    "Product-based Neural Networks" (2016), §III-A.
    """
    call = "funcrec.models.dlrm"
    check_configs(call, tables, features)
    check(call, equal_dim_problems(features, tables))
    dim = next(t.embedding_dim for t in tables if t.name == features[0].table)
    check(call, bottom_problems(bottom, num_dense, dim), keep_problems(keep, num_dense))
    count = len(features) + bool(num_dense)
    num_kept = count if keep == "all" else 1
    init_top, top = deep_part(num_kept * dim + count * (count - 1) // 2, sizes, dropout, batch_norm)
    below = nn.mlp((num_dense, *bottom), final_activation=torch.relu) if num_dense else None

    def init(key: Tensor) -> dict[str, Any]:
        for_bottom, for_top = random.split(key)
        return init_top(for_top) if below is None else {"bottom": below.init(for_bottom), **init_top(for_top)}

    def forward(params: Params, batch: Batch, key: Tensor | None):
        x = lookup(params.tables, batch.ids, features).stack()
        parts = (x,)
        if below is not None:
            first, _ = run(below, part(params.dense, "bottom"), batch.dense.to(x.dtype), key)
            parts = (first[:, None], x)
        kept = [p.flatten(1) for p in (parts if keep == "all" else parts[:1])]
        return top(params.dense, torch.cat([*kept, nn.dot_interaction(*parts)], 1), key, used(batch))

    return build(call, tables, features, num_dense, init, forward)


# -- validators --------------------------------------------------------------------------------------------------


def bottom_problems(bottom: Sequence[int], num_dense: int, dim: int | None = None):
    """Yield problems if dense inputs have no layer, or if the last layer has another size than a given `dim`."""
    if num_dense and not bottom:
        got, need = f"() with num_dense={num_dense}", "at least one size"
        yield Problem("`bottom` has no layer.", got, need, "bottom=(64, 16)")
    elif num_dense and dim is not None and bottom[-1] != dim:
        need = f"bottom[-1] == {dim}, the embeddings' dim"
        yield Problem("`bottom` does not end in the embeddings' dim.", f"{tuple(bottom)}", need)
    elif not num_dense and bottom:
        yield Problem("`bottom` has no input.", f"{tuple(bottom)} with num_dense=0", "bottom=()", "num_dense=...")


def keep_problems(keep: object, num_dense: int):
    if keep == "dense" and not num_dense:
        yield Problem("`keep` names a vector that does not exist.", "'dense' with num_dense=0", "keep='all'")
