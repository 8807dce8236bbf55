"""Accuracy over classes.

    Σ_b w_b [rank of z_b,y_b among z_bc <= k] / Σ_b w_b,     k = 1 for the best alone

Shapes: B examples, C classes.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from torch import Tensor

from funcrec.core import Count, Form, Problem, check, describe, kind_of, reported, typed
from funcrec.jagged import is_concrete
from funcrec.metrics._metric import ANY, RANGES, Metric, example_problems, range_problems, sums

LOGITS = kind_of(Annotated[Tensor, Form("f[B, C]")])


def multiclass_accuracy() -> Metric:
    """Make a metric: the share of the examples whose highest logit is their class's. Of equal logits the first counts
    as the highest.

    predictions: f[B, C], logits or probabilities, no NaN. labels: [B], classes 0 <= label < C, integers or whole
    floats.

    Example:
      >>> import torch
      >>> from funcrec.metrics import multiclass_accuracy
      >>> m = multiclass_accuracy()
      >>> m.compute(m.update(m.init(), torch.tensor([[0.1, 2.0, 0.3], [1.0, 0.2, 0.1]]), torch.tensor([1, 2])))
      tensor(0.5000, dtype=torch.float64)
    """
    return _of_rank("multiclass_accuracy", 1)


@typed
def top_k_accuracy(k: Count) -> Metric:
    """Make a metric: the share of the examples whose class has one of the k highest logits; of equal logits the first
    counts. Arguments as in `multiclass_accuracy`, which is this metric with k = 1.

    Source: scikit-learn's top_k_accuracy_score; TorchRec's multiclass recall.
    """
    return _of_rank("top_k_accuracy", k)


def _of_rank(name: str, k: int) -> Metric:
    right = sums(name, lambda p, y: {"right": p}, lambda s: s["right"] / s["weight"], from_logits=ANY)

    def update(state, predictions, labels, weights=None):
        call = f"funcrec.metrics.{name}.update"
        check(call, logit_problems(predictions))
        num_classes, first = predictions.shape[1], predictions.detach().new_zeros(predictions.shape[:1])
        check(call, example_problems(first, labels, weights, ANY, of_labels=(0, num_classes - 1)))
        check(call, row_problems(predictions, labels, weights))
        y, is_number = labels.double(), ~predictions.isnan().any(1)
        is_class = is_number & (y >= 0) & (y < num_classes) & (y == y.floor())
        own = torch.where(is_class, y, 0).long()[:, None]
        z, classes = predictions.gather(1, own), torch.arange(num_classes, device=y.device)
        is_before = (predictions > z) | ((predictions == z) & (classes < own))
        is_right = torch.where(is_class, (is_before.sum(1) < k).double(), torch.nan)
        return right.update(state, is_right, torch.zeros_like(y), weights)

    return Metric(right.init, update, right.compute)


# -- validators --------------------------------------------------------------------------------------------------


def logit_problems(predictions: Any) -> Iterator[Problem]:
    hint = "the logits, not their argmax"
    found = (p._replace(hint=hint) for p in LOGITS.find("predictions", predictions))
    if not (yield from reported(found)) and not predictions.shape[1]:
        yield Problem("`predictions` have no column for each class.", describe(predictions), "f[B, C]", "accuracy()")


def row_problems(predictions: Tensor, labels: Tensor, weights: Tensor | None) -> Iterator[Problem]:
    """Check values that can be read: logits are not NaN, and labels are whole. Rows of weight 0 are not checked."""
    if is_concrete(predictions):
        worst = torch.where(predictions.isnan().any(1), torch.nan, torch.zeros_like(predictions[:, 0]))
        yield from range_problems(worst, "predictions", *RANGES[ANY], "numbers, no NaN", weights)
    if labels.is_floating_point() and is_concrete(labels):
        parts = labels - labels.floor()
        need, hint = "whole labels, of which these are the fractions", "labels.long(), if they are classes"
        yield from range_problems(parts, "labels", 0, 0, need, weights, hint)
