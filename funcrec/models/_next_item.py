"""The training losses of sequence models: each position of a history predicts the next item.

    loss = mean_p l(hidden_p, next item of p)        over all positions that have a next item

Shapes: B histories, N items of all histories, K negatives, D dim, R rows of the item table.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from funcrec import losses
from funcrec.core import Count, PositiveMagnitude, Problem, UnitInterval, check, random, sure, typed
from funcrec.jagged import JaggedTensor
from funcrec.models._model import TrainingLoss, input_problems
from funcrec.models._sequence import SequenceModel, history_of, listed_problems, looked_up, shifted
from funcrec.tables import Batch, Params


@typed
def next_item_loss(
    model: SequenceModel,
    *,
    loss: Literal["full_softmax", "sampled_softmax", "gbce"] = "full_softmax",
    num_negatives: Count | None = None,
    temperature: PositiveMagnitude = 1.0,
    calibration: UnitInterval = 0.75,
    chunk: Count | None = None,
) -> TrainingLoss[Tensor]:
    """Return the training loss of a sequence model, (params, batch, *, key) -> f[].

    A history of n items has n - 1 positions with a next item; the latest model.max_length of them count. An example of
    weight 0 is padding.

    Args:
      loss: "full_softmax" ranks each next item among all items. "sampled_softmax" and "gbce" rank it among
        `num_negatives` items, drawn uniformly by the key, the same for all positions of the batch;
        ranks of a mesh draw their own.
      num_negatives: K, which the losses of drawn items require.
      temperature: of "full_softmax" and "sampled_softmax". calibration: of "gbce". chunk: of "full_softmax".

    Law: every position counts alike, whatever history and batch it is in. The gradient of the item table has the rows
      that the loss read: with "full_softmax" all of them, so a row optimizer then equals a dense one.

    Example:
      >>> import funcrec as fr
      >>> items = (fr.TableConfig("item", 10, 8, initializer=fr.normal(0.02)),)
      >>> model = fr.models.sasrec(items, fr.FeatureConfig("history", table="item", pooling="none"), max_length=5)
      >>> batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"history": [[1, 2], [], [3, 4, 5, 6, 7, 8]]}))
      >>> loss_fn = fr.models.next_item_loss(model)
      >>> bool(loss_fn(model.init(fr.key(0)), batch, key=fr.key(1)) < 4)
      True

    Source: Klenitskiy and Vasilev, "Turning dross into gold loss" (RecSys 2023), section 3.
    """
    call = "funcrec.models.next_item_loss"
    check(call, negative_problems(loss, num_negatives), unread_problems(loss, temperature, calibration, chunk))
    history = model.features[0]
    num_items = next(t.num_embeddings for t in model.tables if t.name == history.table)

    def drawn(params: Params, key: Tensor) -> tuple[Tensor, Tensor]:
        check(call, listed_problems(params.tables, history.table))
        count = sure(num_negatives)
        rows = random.shift_right(random.bits(key, (count,)), 1) % num_items
        bag = JaggedTensor(rows, torch.tensor([0, count], device=rows.device))
        return rows, looked_up(params.tables, history, bag).values

    def loss_fn(params: Params, batch: Batch, *, key: Tensor | None = None):  # a missing key is an error of four parts
        key = random.check_key(call, key)
        check(call, input_problems(params, batch, 0))
        for_model, for_draw = random.split(key)
        inputs, targets = shifted(history_of(batch, history), model.max_length)
        h = model.train_hidden(params, inputs, for_model).values
        weight = weight_of(inputs, batch.weight, h.dtype)
        if num_negatives is None:
            how = {"temperature": temperature, "chunk": chunk}
            return losses.full_softmax(h, model.items(params), targets.values, weight, **how)
        rows, negatives = drawn(params, for_draw)
        own, ids = looked_up(params.tables, history, targets).values, targets.values
        given: dict[str, Any] = {"candidate_ids": ids, "negative_ids": rows.to(ids.dtype)}
        if loss == "gbce":
            return losses.gbce(h, own, negatives, weight, num_items=num_items, calibration=calibration, **given)
        return losses.sampled_softmax(h, own, negatives, weight, temperature=temperature, **given)

    return loss_fn


def weight_of(bags: JaggedTensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight of each position f[N]: that of its history; 0 in the padding."""
    bag = bags.bag_ids()
    inside = bag < bags.num_bags
    if weight is None or not bags.num_bags:
        return inside.to(dtype)
    return torch.where(inside, weight.index_select(0, bag.clamp(max=bags.num_bags - 1)), 0)


# -- validators --------------------------------------------------------------------------------------------------


def negative_problems(loss: str, num_negatives: int | None) -> Iterator[Problem]:
    if (num_negatives is None) != (loss == "full_softmax"):
        need = "a number for the losses of drawn items, None for full_softmax"
        got = f"loss={loss!r}, num_negatives={num_negatives}"
        yield Problem("`num_negatives` does not match `loss`.", got, need, 'loss="sampled_softmax", num_negatives=256')


def unread_problems(loss: str, temperature: float, calibration: float, chunk: int | None) -> Iterator[Problem]:
    """Yield a problem for an argument that the loss does not read."""
    given = {"temperature": temperature != 1.0, "calibration": calibration != 0.75, "chunk": chunk is not None}
    read = {"full_softmax": {"temperature", "chunk"}, "sampled_softmax": {"temperature"}, "gbce": {"calibration"}}
    for name in sorted(n for n in given if given[n] and n not in read[loss]):
        need = f"arguments of this loss: {', '.join(sorted(read[loss]))}"
        yield Problem(f"`{name}` is not an argument of this loss.", f"loss={loss!r}", need, "another loss")
