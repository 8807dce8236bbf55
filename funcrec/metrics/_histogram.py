"""Metrics of the order of scores, from counts of the logits in even bins.

    state[0] = Σ_b w_b (1 - y_b) [bin of z_b],   state[1] = Σ_b w_b y_b [bin of z_b]

Scores of one bin count as ties. Shapes: B examples.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Count, Problem, UnitInterval, check, describe, typed
from funcrec.metrics._metric import Metric, as_doubles

LOGIT_RANGE = 16.0  # range of the bins; f32 probabilities end near ±16


def histogram(name: str, num_bins: int, from_logits: bool, compute: Callable[[Tensor, Tensor], Any]) -> Metric:
    """Return a metric: compute(weights of the negative, of the positive examples in each bin), lowest scores first."""

    def init(device=None):
        return torch.zeros((2, num_bins), dtype=torch.float64, device=device)

    def update(state, predictions, labels, weights=None):
        check(f"funcrec.metrics.{name}.update", histogram_problems(state, num_bins))
        p, y, w = as_doubles(f"funcrec.metrics.{name}.update", predictions, labels, weights, from_logits)
        logits = p if from_logits else torch.logit(p)  # an example without weight or value has p = 0
        place = (logits.clamp(-LOGIT_RANGE, LOGIT_RANGE) / (2 * LOGIT_RANGE) + 0.5) * num_bins
        bins = place.long().clamp(0, num_bins - 1)
        counts = [torch.zeros_like(state[0]).scatter_add(0, bins, x) for x in (w * (1 - y), w * y)]
        return state + torch.stack(counts)

    def checked_compute(state):
        check(f"funcrec.metrics.{name}.compute", histogram_problems(state, num_bins))
        return compute(*state)

    return Metric(init, update, checked_compute, from_logits)


def precision_and_recall(negative: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (precision, recall, share of the positives) at each bin's threshold, highest scores first."""
    negative, positive = negative.flip(0), positive.flip(0)
    hits, total = positive.cumsum(0), positive.sum()
    said = hits + negative.cumsum(0)
    return hits / torch.where(said == 0, 1, said), hits / total, positive / total  # no quotient has a derivative of NaN


@typed
def average_precision(num_bins: Count = 2**16, *, from_logits: bool = False) -> Metric:
    """Make a metric: the area under the steps of the precision-recall curve.

    It is the mean, over positive examples, of the precision at their thresholds.

    Bins and their error are those of `auc`. NaN without a positive example.

    Example:
      >>> import torch
      >>> from funcrec.metrics import average_precision
      >>> m = average_precision()
      >>> m.compute(m.update(m.init(), torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])))
      tensor(0.8333, dtype=torch.float64)

    Source: scikit-learn's average_precision_score; TorchRec's AUPRC.
    """

    def compute(negative, positive):
        precision, _, part = precision_and_recall(negative, positive)
        return (precision * part).sum()

    return histogram("average_precision", num_bins, from_logits, compute)


@typed
def recall_at_precision(target: UnitInterval, num_bins: Count = 2**16, *, from_logits: bool = False) -> Metric:
    """Make a metric: the greatest recall among thresholds with a precision of at least `target`. It is 0 if no
    threshold has that precision.

    Bins are those of `auc`. NaN without a positive example.

    Example:
      >>> import torch
      >>> from funcrec.metrics import recall_at_precision
      >>> m = recall_at_precision(0.9)
      >>> m.compute(m.update(m.init(), torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])))
      tensor(0.5000, dtype=torch.float64)

    Source: torchmetrics' RecallAtFixedPrecision; TorchRec's hindsight target precision and recall.
    """

    def compute(negative, positive):
        precision, recall, _ = precision_and_recall(negative, positive)
        found = torch.where(precision >= target, recall, 0).amax()
        return torch.where(positive.sum() > 0, found, torch.nan)

    return histogram("recall_at_precision", num_bins, from_logits, compute)


@typed
def hindsight_target_pr(target: UnitInterval, num_bins: Count = 2**16, *, from_logits: bool = False) -> Metric:
    """Make a metric: the lowest threshold with a precision of at least `target`, and what it reaches. Its `compute`
    returns {"threshold", "precision", "recall"}.

    threshold: a probability. An example is predicted positive if its probability is at least this. The recall is that
    of `recall_at_precision`: no other threshold with enough precision has a greater recall. Without such a threshold
    the recall is 0, and the others are NaN.

    Bins are those of `auc`. All three are NaN without a positive example.

    Example:
      >>> import torch
      >>> from funcrec.metrics import hindsight_target_pr
      >>> m = hindsight_target_pr(0.6)
      >>> found = m.compute(m.update(m.init(), torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])))
      >>> {name: round(float(x), 2) for name, x in found.items()}
      {'threshold': 0.35, 'precision': 0.67, 'recall': 1.0}

    Source: TorchRec's hindsight target precision and recall, of 1000 even thresholds.
    """

    def compute(negative, positive):
        precision, recall, _ = precision_and_recall(negative, positive)
        edges = torch.arange(num_bins - 1, -1, -1, dtype=torch.float64, device=positive.device) / num_bins
        is_used = negative.flip(0) + positive.flip(0) > 0  # the threshold of an empty bin is that of the next full one
        is_reached = (precision >= target) & is_used
        last = torch.where(is_reached, torch.arange(num_bins, device=positive.device), -1).amax()
        at = last.clamp(min=0).reshape(1)
        has_any, has_positive = last >= 0, positive.sum() > 0
        of = lambda x, other: torch.where(has_any, x.index_select(0, at)[0], other)
        pick = lambda x, other: torch.where(has_positive, of(x, other), torch.nan)
        threshold = torch.where(edges > 0, (LOGIT_RANGE * (2 * edges - 1)).sigmoid(), 0)  # the first bin goes down to 0
        return {
            "threshold": pick(threshold, torch.nan),
            "precision": pick(precision, torch.nan),
            "recall": pick(recall, 0.0),
        }

    return histogram("hindsight_target_pr", num_bins, from_logits, compute)


# -- validators --------------------------------------------------------------------------------------------------


def histogram_problems(state: object, num_bins: int | None = None) -> Iterator[Problem]:
    need, hint = f"f64[2, {num_bins or 'num_bins'}]", "state = auc(num_bins).init()"
    if not isinstance(state, Tensor) or not state.is_floating_point():
        yield Problem("`state` is not a histogram.", describe(state), need, hint, TypeError)
    elif state.dim() != 2 or state.shape[0] != 2 or num_bins not in (None, state.shape[1]):
        yield Problem("`state` is not a histogram of these bins.", describe(state), need, hint)
