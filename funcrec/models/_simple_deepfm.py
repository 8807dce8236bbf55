"""TorchRec's SimpleDeepFMNN. A model in which the vector of a bottom network joins the embeddings, and one layer weighs
three parts.

    d = bottom(dense);  x = [d, e_1 ... e_F];  z = out([d, relu(W x), Σ_{i<j} x_i x_j])

The last sum is over all pairs of numbers. Shapes: B batch, F features, D dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec import nn
from funcrec.core import Count, check, random, remade, typed
from funcrec.models._model import Model, build, check_configs, equal_dim_problems, part
from funcrec.tables import Batch, FeatureConfig, Params, TableConfig, lookup


@remade
@typed
def simple_deepfm(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    *,
    num_dense: Count,
    hidden_size: Count = 32,
    deep_size: Count = 16,
) -> Model:
    """Return TorchRec's SimpleDeepFMNN. Its prediction is the sigmoid of the logit. `deepfm` is the model of the paper.

    Args:
      hidden_size: the size of the layer between the dense inputs and their vector f[B, D].
      deep_size: the size of the only layer of the deep part.

    Raises:
      ValueError: features have different dims, or there are no dense inputs.

    Example:
      >>> import funcrec as fr
      >>> tables = (fr.TableConfig("user", 10, 4), fr.TableConfig("item", 20, 4))
      >>> features = (fr.FeatureConfig("user", table="user"), fr.FeatureConfig("item", table="item"))
      >>> model = fr.models.simple_deepfm(tables, features, num_dense=3, hidden_size=8, deep_size=5)
      >>> sorted(model.init(fr.key(0)).dense)
      ['bottom', 'deep', 'out']

    Source: TorchRec's models/deepfm.py, after Guo et al., "DeepFM" (IJCAI 2017).
    """
    call = "funcrec.models.simple_deepfm"
    check_configs(call, tables, features)
    check(call, equal_dim_problems(features, tables))
    dim = next(t.embedding_dim for t in tables if t.name == features[0].table)
    layers = {
        "bottom": nn.mlp((num_dense, hidden_size, dim), final_activation=torch.relu),
        "deep": nn.mlp(((len(features) + 1) * dim, deep_size), final_activation=torch.relu),
        "out": nn.linear(dim + deep_size + 1, 1),
    }

    def init(key: Tensor) -> dict[str, Any]:
        return {name: layer.init(own) for (name, layer), own in zip(layers.items(), random.split(key, 3))}

    def forward(params: Params, batch: Batch, key: Tensor | None):
        pooled = lookup(params.tables, batch.ids, features).values
        of = lambda name, x: layers[name].apply(part(params.dense, name), x)
        first = of("bottom", batch.dense.to(pooled.dtype))
        x = torch.cat([first, pooled], 1)
        pairs = nn.factorization_machine(x[..., None])[:, None]
        return of("out", torch.cat([first, of("deep", x), pairs], 1)).squeeze(-1), ()

    return build(call, tables, features, num_dense, init, forward)
