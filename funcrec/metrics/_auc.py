"""The area under the ROC curve: the probability that a positive example scores above a negative one; ties count half.

    AUC = Σ_i Σ_j w_i y_i · w_j (1 - y_j) · ([s_i > s_j] + ½ [s_i = s_j]) / (P · N)

P and N are the sums of the weights of positive and of negative examples. `exact_auc` reads all scores at once; `auc`
counts them in bins. `grouped_auc` is the mean over groups, such as users.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from funcrec.core import Count, Problem, check, describe, typed
from funcrec.metrics._histogram import histogram, histogram_problems
from funcrec.metrics._metric import Metric, example_problems, examples


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


def grouped_auc(scores: Tensor, labels: tuple[Tensor, Tensor], weights: Tensor | None = None) -> Tensor:
    """Compute the mean AUC of groups, weighted by the groups' weights -> f64[]. It is GAUC if a group is a user.

    Args:
      scores: f[B], no NaN; only their order within a group counts.
      labels: ([B] in [0, 1], i[B]): the labels, and the group of each example, any integers.
      weights: [B] >= 0, or None.

    Returns:
      NaN where no group has both a positive and a negative example; others are left out of the mean.

    Law: of one group, `exact_auc`.

    Cost: two sorts, O(B log B).

    Example:
      >>> import torch
      >>> from funcrec.metrics import grouped_auc
      >>> labels, users = torch.tensor([0, 1, 1, 0]), torch.tensor([7, 7, 3, 3])
      >>> grouped_auc(torch.tensor([0.1, 0.4, 0.2, 0.8]), (labels, users))
      tensor(0.5000, dtype=torch.float64)

    Source: Zhou et al., "Deep interest network for click-through rate prediction" (KDD 2018), eq. 8, with weights.
    """
    call = "funcrec.metrics.grouped_auc"
    check(call, pair_problems(labels, scores))
    labels, groups = labels
    check(call, example_problems(scores, labels, weights, True, "scores"))
    p, y, w = examples(scores, labels, weights, True)
    order = p.argsort()
    order = order.index_select(0, groups.index_select(0, order).argsort(stable=True))
    p, y, w, groups = (x.index_select(0, order) for x in (p, y, w, groups))
    first = torch.zeros_like(groups[:1], dtype=torch.bool)
    is_other = torch.cat([first, groups[1:] != groups[:-1]])
    group = is_other.cumsum(0)  # numbers from 0 on; there are at most B groups, and B runs of one group and one score
    run = (is_other | torch.cat([first, p[1:] != p[:-1]])).cumsum(0)
    total = lambda x, i: torch.zeros_like(x).index_add(0, i, x)
    negative, positive = total(w * (1 - y), run), total(w * y, run)
    group_of_run = torch.zeros_like(group).scatter(0, run, group)
    negatives, positives, weight = (total(x, group) for x in (w * (1 - y), w * y, w))
    before = negative.cumsum(0) - negative
    before = before - (negatives.cumsum(0) - negatives).index_select(0, group_of_run)  # within the group
    pairs = positives * negatives
    is_judged = pairs > 0
    area = total(positive * (before + negative / 2), group_of_run) / torch.where(is_judged, pairs, 1)
    used = torch.where(is_judged | pairs.isnan(), weight, 0)
    return (used * area).sum() / used.sum()


# -- validators --------------------------------------------------------------------------------------------------


def pair_problems(labels: object, scores: object) -> Iterator[Problem]:
    """Report labels that are not a pair of labels and groups."""
    is_pair = isinstance(labels, tuple | list) and len(labels) == 2 and all(isinstance(x, Tensor) for x in labels)
    need, hint = "([B] labels, i[B] groups)", "(batch.label, users)"
    if not is_pair:
        yield Problem("`labels` are not labels and groups.", describe(labels), need, hint, TypeError)
    elif labels[1].dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        yield Problem("`labels[1]` are not groups.", describe(labels[1]), "i[B]", "users.long()", TypeError)
    elif isinstance(scores, Tensor) and scores.dim() == 1 and labels[1].shape != scores.shape:
        need, hint = f"i[{len(scores)}], a group for each example", "groups of the same batch"
        yield Problem("`labels[1]` do not match the predictions.", describe(labels[1]), need, hint)
