"""SASRec: the next item by causal attention over the history.

hidden = norm(block(... block(dropout(√D · E[history] + position))))
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from funcrec import nn
from funcrec.core import Count, Share, random, remade, replace, sure, typed
from funcrec.jagged import JaggedTensor
from funcrec.models._sequence import SequenceModel, check_history, sequence_model
from funcrec.nn import Layer
from funcrec.tables import FeatureConfig, TableConfig


@remade
@typed
def sasrec(
    tables: Sequence[TableConfig],
    history: FeatureConfig,
    *,
    blocks: Count = 2,
    heads: Count = 1,
    max_length: Count = 200,
    dropout: Share = 0.1,
) -> SequenceModel:
    """Return SASRec, which predicts the next item of a history by causal attention. Nothing is padded.

    Args:
      tables: the configs, with that of the items. Its dim is that of all layers.
      history: the feature of the history, with pooling "none", items in time order, latest last.
      blocks, heads: the number of `fr.nn.sasrec_block`, and of their heads.
      max_length: the number of latest items that the model reads. Positions count from the first of these.
      dropout: the rate after the embeddings and within the blocks. The paper also drops weights of the attention;
        `jagged_attention` stores no tensor of them, so it has no dropout.

    Example:
      >>> import funcrec as fr
      >>> items = (fr.TableConfig("item", 10, 8, initializer=fr.normal(0.02)),)
      >>> model = fr.models.sasrec(items, fr.FeatureConfig("history", table="item", pooling="none"), max_length=5)
      >>> params = model.init(fr.key(0))
      >>> batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"history": [[1, 2], [], [3, 4, 5, 6, 7, 8]]}))
      >>> scores = model.query(params, batch) @ model.items(params).T
      >>> scores.shape
      torch.Size([3, 10])

    Source: Kang and McAuley, "Self-attentive sequential recommendation" (ICDM 2018); Klenitskiy and Vasilev, "Turning
      dross into gold loss" (RecSys 2023), whose SASRec+ is this model with `fr.losses.full_softmax`.
    """
    call = "funcrec.models.sasrec"
    check_history(call, tables, history)
    dim = next(t.embedding_dim for t in tables if t.name == history.table)
    layers = [nn.sasrec_block(dim, heads=heads, dropout=dropout) for _ in range(blocks)]
    position, norm = nn.position_embedding(max_length, dim), nn.layer_norm(dim, eps=1e-8)

    def init(key: Tensor) -> dict[str, Any]:
        for_position, for_norm, *keys = random.split(key, blocks + 2)
        own = [layer.init(k) for layer, k in zip(layers, keys, strict=True)]
        return {"position": position.init(for_position), "blocks": own, "norm": norm.init(for_norm)}

    def run(params: dict[str, Any], bags: JaggedTensor, key: Tensor | None) -> JaggedTensor:
        first, *keys = (None,) * (blocks + 1) if key is None else random.split(key, blocks + 1)
        x = position.apply(params["position"], replace(bags, values=bags.values * math.sqrt(dim)))
        x = x if first is None else replace(x, values=nn.dropout(x.values, first, dropout))
        for layer, own, k in zip(layers, params["blocks"], keys, strict=True):
            x = layer.apply(own, x) if k is None else sure(layer.train_apply)(own, x, k)[0]
        return replace(x, values=norm.apply(params["norm"], x.values))

    encoder = Layer(init, lambda params, x: run(params, x, None), lambda params, x, key: (run(params, x, key), []))
    return sequence_model(call, tables, history, encoder, max_length)
