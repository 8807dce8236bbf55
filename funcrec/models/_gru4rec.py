"""GRU4Rec: the next item by a recurrent state over the history.

hidden = W gru(... gru(dropout(E[history]))),  W only if the states have another dim than the items
"""

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
def gru4rec(
    tables: Sequence[TableConfig],
    history: FeatureConfig,
    *,
    num_hidden: Count | None = None,
    layers: Count = 1,
    max_length: Count = 200,
    dropout: Share = 0.0,
) -> SequenceModel:
    """Return GRU4Rec, which predicts the next item of a history by recurrent states. Nothing is padded.

    Args:
      tables, history, max_length: as in `sasrec`.
      num_hidden: the dim of the states. If it differs from the items' dim, a linear layer without bias follows. None
        takes the items' dim.
      layers: the number of `fr.nn.gru`, one after the other.
      dropout: the rate after the embeddings, and between two recurrent layers.

    Example:
      >>> import funcrec as fr
      >>> items = (fr.TableConfig("item", 10, 8, initializer=fr.normal(0.02)),)
      >>> model = fr.models.gru4rec(items, fr.FeatureConfig("history", table="item", pooling="none"))
      >>> batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"history": [[1, 2], [], [3, 4, 5]]}))
      >>> model.query(model.init(fr.key(0)), batch).shape
      torch.Size([3, 8])

    Source: Hidasi et al., "Session-based recommendations with recurrent neural networks" (ICLR 2016), with tied
      vectors as in Klenitskiy and Vasilev (RecSys 2023).
    """
    call = "funcrec.models.gru4rec"
    check_history(call, tables, history)
    dim = next(t.embedding_dim for t in tables if t.name == history.table)
    size = num_hidden or dim
    units = [nn.gru(dim if i == 0 else size, size) for i in range(layers)]
    out = None if size == dim else nn.linear(size, dim, bias=None)

    def init(key: Tensor) -> dict[str, Any]:
        for_out, *keys = random.split(key, layers + 1)
        own = {"gru": [unit.init(k) for unit, k in zip(units, keys, strict=True)]}
        return own if out is None else {**own, "out": out.init(for_out)}

    def run(params: dict[str, Any], x: JaggedTensor, key: Tensor | None) -> JaggedTensor:
        keys = [None] * layers if key is None else random.split(key, layers)
        for unit, own, k in zip(units, params["gru"], keys, strict=True):
            x = x if k is None else replace(x, values=nn.dropout(x.values, k, dropout))
            x = unit.apply(own, x)
        return x if out is None else replace(x, values=out.apply(params["out"], x.values))

    encoder = Layer(init, lambda params, x: run(params, x, None), lambda params, x, key: (run(params, x, key), []))
    return sequence_model(call, tables, history, encoder, max_length)
