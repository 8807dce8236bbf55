"""HSTU as a model of the next item, by attention without softmax over the history.

hidden = norm(layer(... layer(dropout(√D · E[history] + position))))
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from funcrec import nn
from funcrec.core import Count, Share, random, remade, replace, typed
from funcrec.jagged import JaggedTensor
from funcrec.models._sequence import SequenceModel, check_history, sequence_model
from funcrec.nn import Layer
from funcrec.tables import FeatureConfig, TableConfig


@remade
@typed
def hstu(
    tables: Sequence[TableConfig],
    history: FeatureConfig,
    *,
    layers: Count = 2,
    heads: Count = 1,
    qk_dim: Count | None = None,
    linear_dim: Count | None = None,
    max_length: Count = 200,
    dropout: Share = 0.2,
) -> SequenceModel:
    """Return HSTU, which predicts the next item of a history by gated attention without softmax. Nothing is padded.

    Times are not read. `hstu_ranker` reads times and actions, and scores given candidates.

    Args:
      tables, history, max_length: as in `sasrec`.
      layers, heads: the number of `fr.nn.hstu_layer`, and of their heads.
      qk_dim, linear_dim: of each head, as in `fr.nn.hstu_layer`. None takes the items' dim divided by the number of
        heads.
      dropout: the rate after the embeddings and within the layers.

    Example:
      >>> import funcrec as fr
      >>> items = (fr.TableConfig("item", 10, 8, initializer=fr.normal(0.02)),)
      >>> model = fr.models.hstu(items, fr.FeatureConfig("history", table="item", pooling="none"), max_length=5)
      >>> params = model.init(fr.key(0))
      >>> batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"history": [[1, 2], [], [3, 4, 5, 6, 7, 8]]}))
      >>> scores = model.query(params, batch) @ model.items(params).T
      >>> scores.shape
      torch.Size([3, 10])

    Source: Zhai et al., "Actions Speak Louder than Words" (ICML 2024), eqs. 1-3, with relative positions in each layer,
      in place of positions and times; positions at the input as in meta-recsys/generative-recommenders.
    """
    call = "funcrec.models.hstu"
    check_history(call, tables, history)
    dim = next(t.embedding_dim for t in tables if t.name == history.table)
    own_dim = max(dim // heads, 1)
    layer = nn.hstu_layer(
        dim, normalizer=float(max_length), num_heads=heads, qk_dim=qk_dim or own_dim, linear_dim=linear_dim or own_dim,
        num_positions=max_length, dropout=dropout,
    )  # fmt: skip
    position, norm = nn.position_embedding(max_length, dim), nn.layer_norm(dim, eps=1e-6)

    def init(key: Tensor) -> dict[str, Any]:
        for_position, for_norm, *keys = random.split(key, layers + 2)
        own = [layer.init(k) for k in keys]
        return {"position": position.init(for_position), "layers": own, "norm": norm.init(for_norm)}

    def run(params: dict[str, Any], bags: JaggedTensor, key: Tensor | None) -> JaggedTensor:
        first, *keys = (None,) * (layers + 1) if key is None else random.split(key, layers + 1)
        x = position.apply(params["position"], replace(bags, values=bags.values * math.sqrt(dim)))
        x = x if first is None else replace(x, values=nn.dropout(x.values, first, dropout))
        for own, k in zip(params["layers"], keys, strict=True):
            x = layer.apply(own, x) if k is None else layer.train_apply(own, x, k)[0]
        return replace(x, values=norm.apply(params["norm"], x.values))

    encoder = Layer(init, lambda params, x: run(params, x, None), lambda params, x, key: (run(params, x, key), []))
    return sequence_model(call, tables, history, encoder, max_length)
