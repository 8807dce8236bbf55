"""Predictions of a model for raw rows: takes columns, and returns probabilities.

predict(model, params, encoding, rows) = link(model.apply(params, encode(encoding, rows)))
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Count, Problem, check, describe, own_errors, replace, typed
from funcrec.data import Encoding, encode
from funcrec.models import Model
from funcrec.tables import Params

CALL = "funcrec.predict"


@typed
def predict(model: Model, params: Params, encoding: Encoding, rows: Any, *, batch_size: Count = 8192) -> Tensor:
    """Return the model's predictions for rows of columns, in the form that `fr.data.encode` takes.

    Args:
      params: `done.best` of the result of `fit`; from a GPU `done.best.to("cpu")`.
      encoding: the encoding of the training data. Columns of its label, weight and time are not read.
      rows: N rows, in a data frame, a dict of lists or a table of pyarrow.
      batch_size: the number of rows that go through the model at once.

    Returns:
      f[N], or f[N, T] for a model with T labels. The schema's kind of a label decides: probabilities for "binary",
      the model's own numbers for "number". For a "class" f[N, K], probabilities that add up to 1.

    Law: within rounding, the prediction for a row does not depend on the other rows.

    Raises:
      ValueError: if the columns are not the encoding's (`fr.data.encode`), if the encoding has more ids than a table
        has rows, or if the model's scores do not match the schema's labels.
      TypeError: if it is called within `jit`, since columns are read on the host.

    Example:
      >>> import torch, funcrec as fr
      >>> columns = {"item": ["tea", "jam"], "click": [1, 0]}
      >>> encoding = fr.data.fit_encoding(columns, fr.data.Schema("click", categorical=("item",)))
      >>> model = fr.models.lr(*fr.data.configs(encoding, embedding_dim=1))
      >>> fr.predict(model, model.init(fr.key(0)), encoding, {"item": ["jam", "tea", "new"]}).shape
      torch.Size([3])
    """
    schema = encoding.schema
    check(CALL, encoding_problems(encoding, model))
    unlabeled = replace(schema, label=None, label_kind="binary", weight=None, time=None)
    data, out = encode(replace(encoding, schema=unlabeled), rows), []
    for first in range(0, max(data.num_rows, 1), batch_size):
        batch = data.take(torch.arange(first, min(first + batch_size, data.num_rows)))
        with own_errors(CALL, model.apply, params, batch, need="params and a batch of the encoding"):
            scores = model.apply(params, batch)
        check(CALL, score_problems(scores, batch.ids.num_bags, schema.label_kinds))
        out.append(scores)
    return linked(torch.cat(out), schema.label_kinds)


def linked(scores: Tensor, kinds: tuple[str, ...]) -> Tensor:
    """Return the scores of each label under the link of the label's kind.

    Without a label it takes the link of a binary label.
    """
    if "class" in kinds:
        return scores.softmax(1)
    if len(kinds) <= 1:
        return scores if kinds == ("number",) else scores.sigmoid()
    own = [x.sigmoid() if kind == "binary" else x for x, kind in zip(scores.unbind(1), kinds, strict=True)]
    return torch.stack(own, 1)


# -- validators --------------------------------------------------------------------------------------------------


def encoding_problems(encoding: Encoding, model: Model) -> Iterator[Problem]:
    """Report unhashed columns with more ids than their table has rows, and a class among several labels."""
    sizes, kinds = {t.name: t.num_embeddings for t in model.tables}, encoding.schema.label_kinds
    for f in (f for f in model.features if f.hash is None):
        count = encoding.num_ids.get(f.key, 0)
        if count > sizes[f.table]:
            what = f"column {f.key!r} has more ids than table {f.table!r} has rows."
            hint = "the training data's encoding"
            yield Problem(what, f"{count} ids in `encoding`", f"at most {sizes[f.table]}", hint)
    if "class" in kinds and len(kinds) > 1:
        hint = "model.apply(params, fr.data.encode(encoding, rows).take(torch.arange(n)))"
        yield Problem("a class among several labels has no place.", f"{list(kinds)}", "no class among them", hint)


def score_problems(scores: Any, count: int, kinds: tuple[str, ...]) -> Iterator[Problem]:
    """Report scores of the model that do not have, for each row, a number for each label or each class."""
    is_class, several = kinds == ("class",), len(kinds) > 1
    need = f"f[{count}, K], K >= 2" if is_class else f"f[{count}, {len(kinds)}]" if several else f"f[{count}]"
    is_right = isinstance(scores, Tensor) and scores.is_floating_point() and scores.dim() == 1 + (is_class or several)
    is_right = is_right and scores.shape[0] == count
    if not is_right or (several and scores.shape[1] != len(kinds)) or (is_class and scores.shape[1] < 2):
        kind = ValueError if isinstance(scores, Tensor) else TypeError
        hint = "a model of these labels, or another label_kind in the schema"
        yield Problem(f"`model` gives no scores of {list(kinds) or 'a label'}.", describe(scores), need, hint, kind)
