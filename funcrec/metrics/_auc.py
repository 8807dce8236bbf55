"""The area under the ROC curve: the probability that a positive example scores above a negative one; ties count half.

    AUC = Σ_i Σ_j w_i y_i · w_j (1 - y_j) · ([s_i > s_j] + ½ [s_i = s_j]) / (P · N)

P and N are the sums of the weights of positive and of negative examples. `exact_auc` reads all scores at once; `auc`
counts them in bins.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from funcrec.core import Count, Problem, check, describe, typed
from funcrec.metrics._metric import Metric, as_doubles, example_problems, examples

LOGIT_RANGE = 16.0  # range of the bins; f32 probabilities end near ±16


@typed
def auc(num_bins: Count = 2**16, *, from_logits: bool = False) -> Metric:
    """Make a metric: AUC from a histogram of the logits, with `num_bins` even bins
    between -16 and 16; logits beyond fall into the outer bins.

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

    def init(device=None):
        return torch.zeros((2, num_bins), dtype=torch.float64, device=device)

    def update(state, predictions, labels, weights=None):
        check("funcrec.metrics.auc.update", histogram_problems(state, num_bins))
        p, y, w = as_doubles("funcrec.metrics.auc.update", predictions, labels, weights, from_logits)
        logits = p if from_logits else torch.logit(p)  # an example without weight or value has p = 0
        place = (logits.clamp(-LOGIT_RANGE, LOGIT_RANGE) / (2 * LOGIT_RANGE) + 0.5) * num_bins
        bins = place.long().clamp(0, num_bins - 1)
        counts = [torch.zeros_like(state[0]).scatter_add(0, bins, x) for x in (w * (1 - y), w * y)]
        return state + torch.stack(counts)

    def compute(state):
        check("funcrec.metrics.auc.compute", histogram_problems(state, num_bins))
        negative, positive = state
        below = negative.cumsum(0) - negative
        return (positive * (below + negative / 2)).sum() / (positive.sum() * negative.sum())

    return Metric(init, update, compute)


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


def histogram_problems(state: object, num_bins: int | None = None) -> Iterator[Problem]:
    need, hint = f"f64[2, {num_bins or 'num_bins'}]", "state = auc(num_bins).init()"
    if not isinstance(state, Tensor) or not state.is_floating_point():
        yield Problem("`state` is not a histogram.", describe(state), need, hint, TypeError)
    elif state.dim() != 2 or state.shape[0] != 2 or num_bins not in (None, state.shape[1]):
        yield Problem("`state` is not a histogram of these bins.", describe(state), need, hint)
