"""What a model says of rows as they come: columns in, probabilities out.

predict(model, params, encoding, rows) = link(model.apply(params, encode(encoding, rows)))
"""

from typing import Any

import torch
from torch import Tensor

from funcrec.core import Count, describe, fail, own_errors, typed
from funcrec.data import Encoding, encode
from funcrec.models import Model
from funcrec.tables import Params

CALL = "funcrec.predict"


@typed
def predict(model: Model, params: Params, encoding: Encoding, rows: Any, *, batch_size: Count = 8192) -> Tensor:
    """The model's answers for rows of columns, as `fr.data.encode` takes them.

    Args:
      params: as `fit` gives them: `done.best`.
      encoding: that of the rows that the model was trained on; the label's column may be absent.
      rows: N rows: a data frame, a dict of lists, a table of pyarrow.
      batch_size: rows that go through the model at once.

    Returns:
      f[N], or f[N, T] of a model of T labels, by the kinds that the schema has of them: of "binary" ones probabilities,
      of a "number" what the model gives. Of a "class" f[N, K], probabilities that add up to 1.

    Law: a row's answer is the one that it has alone, within the rounding of its products.

    Raises:
      ValueError: columns that are not the encoding's (`fr.data.encode`).

    Example:
      >>> import torch, funcrec as fr
      >>> columns = {"item": ["tea", "jam"], "click": [1, 0]}
      >>> encoding = fr.data.fit_encoding(columns, fr.data.Schema("click", categorical=("item",)))
      >>> model = fr.models.lr(*fr.data.configs(encoding, embedding_dim=1))
      >>> fr.predict(model, model.init(fr.key(0)), encoding, {"item": ["jam", "tea", "new"]}).shape
      torch.Size([3])
    """
    data = encode(encoding, rows)
    out = []
    for first in range(0, max(data.num_rows, 1), batch_size):
        batch = data.take(torch.arange(first, min(first + batch_size, data.num_rows)))
        with own_errors(CALL, model.apply, params, batch, need="params and a batch of the encoding"):
            out.append(model.apply(params, batch))
    return linked(torch.cat(out), encoding.schema.label_kinds)


def linked(scores: Tensor, kinds: tuple[str, ...]) -> Tensor:
    """Scores as what the labels are; without a label they are those of a binary one."""
    kinds = kinds or ("binary",)
    if set(kinds) == {"binary"}:
        return scores.sigmoid()
    if kinds == ("class",):
        return scores.softmax(-1)
    if len(kinds) == 1:
        return scores
    if "class" in kinds or scores.shape[1:] != (len(kinds),):
        got, need = f"{describe(scores)} for {list(kinds)}", f"f[N, {len(kinds)}], no class among them"
        hint = "model.apply(params, fr.data.encode(encoding, rows).take(torch.arange(n)))"
        fail(CALL, "which scores are of which label is not known.", got=got, need=need, hint=hint)
    own = [x.sigmoid() if kind == "binary" else x for x, kind in zip(scores.unbind(1), kinds, strict=True)]
    return torch.stack(own, 1)
