"""The area under the ROC curve: the probability that a positive example scores above a negative one; ties count half.

    AUC = Σ_i Σ_j w_i y_i · w_j (1 - y_j) · ([s_i > s_j] + ½ [s_i = s_j]) / (P · N)

P and N are the sums of the weights of positive and of negative examples. `exact_auc` reads all scores at once; `auc`
counts them in bins. `exact_average_precision` reads the same sorted scores.
"""

import torch
from torch import Tensor

from funcrec.core import Count, check, typed
from funcrec.metrics._histogram import histogram, histogram_problems
from funcrec.metrics._metric import Metric, example_problems, examples


@typed
def auc(num_bins: Count = 2**16, *, from_logits: bool = False) -> Metric:
    """Make a metric: AUC from a histogram of the logits, with `num_bins` even bins between -16 and 16; logits beyond
    fall into the outer bins.

    Scores in one bin count as ties, so the result differs from the exact one by at most ½ Σ_b P_b N_b / (P · N).
    `auc_error` computes this from the state: below 1e-4 for a model whose logits have standard deviation 1. The result
    is NaN without a positive or a negative example.

    Cost: the state is f64[2, num_bins], read and written at each update.

    Example:
      >>> import torch
      >>> from funcrec.metrics import auc
      >>> m = auc()
      >>> m.compute(m.update(m.init(), torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])))
      tensor(0.7500, dtype=torch.float64)
    """

    def compute(negative, positive):
        below = negative.cumsum(0) - negative
        return (positive * (below + negative / 2)).sum() / (positive.sum() * negative.sum())

    return histogram("auc", num_bins, from_logits, compute)


def auc_error(state: Tensor) -> Tensor:
    """Bound |auc - exact_auc|, from the state of `auc`: state -> f64[].

    Law: |auc().compute(state) - exact_auc(...)| <= auc_error(state) + rounding.
    """
    check("funcrec.metrics.auc_error", histogram_problems(state))
    negative, positive = state
    return (positive * negative).sum() / 2 / (positive.sum() * negative.sum())


def exact_auc(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute the AUC of a whole set by sorting; scores are logits or probabilities.

    Args:
      scores: f[B], no NaN; only their order counts.
      labels: [B] in [0, 1].
      weights: [B] >= 0, or None.

    Returns:
      f64[]; NaN without a positive or a negative example.

    Law: unchanged by any increasing map of the scores; exact_auc(-scores) = 1 - exact_auc(scores).

    Cost: one sort, O(B log B).

    Example:
      >>> import torch
      >>> from funcrec.metrics import exact_auc
      >>> exact_auc(torch.tensor([0.5, 0.5, 0.9]), torch.tensor([0, 1, 1]))
      tensor(0.7500, dtype=torch.float64)
    """
    check("funcrec.metrics.exact_auc", example_problems(scores, labels, weights, True, "scores"))
    p, y, w = examples(scores, labels, weights, True)
    order = p.argsort()
    ranked, y, w = (x.index_select(0, order) for x in (p, y, w))
    negative, positive = w * (1 - y), w * y
    before = torch.cat([negative.new_zeros(1), negative.cumsum(0)])  # before[i]: the negatives among the first i
    first, last = torch.searchsorted(ranked, ranked), torch.searchsorted(ranked, ranked, right=True)
    below, upto = before.index_select(0, first), before.index_select(0, last)
    return (positive * (below + upto) / 2).sum() / (positive.sum() * negative.sum())


def exact_average_precision(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute the average precision of a whole set by sorting -> f64[]: the area under the steps of the
    precision-recall curve.

    Args:
      scores: f[B], no NaN; only their order counts.
      labels: [B] in [0, 1].
      weights: [B] >= 0, or None.

    Returns:
      NaN without a positive example. Examples of equal scores are predicted together.

    Law: unchanged by any increasing map of the scores.

    Cost: one sort, O(B log B).

    Example:
      >>> import torch
      >>> from funcrec.metrics import exact_average_precision
      >>> exact_average_precision(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
      tensor(0.8333, dtype=torch.float64)

    Source: scikit-learn's average_precision_score; TorchRec's AUPRC.
    """
    check("funcrec.metrics.exact_average_precision", example_problems(scores, labels, weights, True, "scores"))
    p, y, w = examples(scores, labels, weights, True)
    order = (-p).argsort()
    ranked, y, w = (x.index_select(0, order) for x in (-p, y, w))
    upto = torch.searchsorted(ranked, ranked, right=True)
    said, hits = (torch.cat([w.new_zeros(1), x.cumsum(0)]).index_select(0, upto) for x in (w, w * y))
    return (w * y * hits / torch.where(said == 0, 1, said)).sum() / (w * y).sum()
