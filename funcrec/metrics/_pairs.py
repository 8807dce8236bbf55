"""The share of pairs that scores and labels order alike.

    RAUC = Σ_i<j w_i w_j [y_i != y_j] ([s_i, s_j ordered as y_i, y_j] + ½ [s_i = s_j])  /  Σ_i<j w_i w_j [y_i != y_j]

A pair of equal labels has no order and does not count; a pair of equal scores counts half. So for labels 0 and 1 it is
the AUC. It is (1 + D) / 2 for Somers' D. Shapes: B examples.
"""

import torch
from torch import Tensor

from funcrec.core import check
from funcrec.metrics._groups import FLAG, ends_of, grouped_mean, in_order, latest, pair_problems, starts_of, total_of
from funcrec.metrics._metric import ANY, FINITE, Metric, example_problems, examples, sums


def exact_rauc(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute the RAUC of a whole set -> f64[]: the share of pairs that scores and labels order alike.

    Args:
      scores: f[B], no NaN; only their order counts.
      labels: [B], any finite numbers; only their order counts.
      weights: [B] >= 0, or None.

    Returns:
      NaN if all labels are equal. A pair of equal labels does not count; a pair of equal scores counts half.

    Law: `exact_auc` if labels are 0 and 1; exact_rauc(-scores) = 1 - exact_rauc(scores).

    Cost: three sorts and log2 B passes over all examples, O(B log B).

    Example:
      >>> import torch
      >>> from funcrec.metrics import exact_rauc
      >>> exact_rauc(torch.tensor([0.1, 0.5, 0.5]), torch.tensor([3.0, 7.0, 60.0]))
      tensor(0.8333, dtype=torch.float64)

    Source: TorchRec's RAUC, where a pair of equal scores or labels counts whole, and weights do not count.
    """
    check("funcrec.metrics.exact_rauc", example_problems(scores, labels, weights, ANY, "scores", FINITE))
    p, y, w = examples(scores, labels, weights, ANY, FINITE)
    agreeing, pairs, _ = pairs_of(p, y, w, torch.zeros_like(p, dtype=torch.int64))
    return agreeing.sum() / pairs.sum()


def grouped_rauc(
    scores: Tensor, labels: tuple[Tensor, Tensor], weights: Tensor | None = None, *, equal: bool = False
) -> Tensor:
    """Compute the mean RAUC of groups -> f64[]. Pairs across two groups do not count.

    Args:
      scores: f[B], no NaN; only their order within a group counts.
      labels: ([B], i[B]): the labels, any finite numbers, and the group of each example.
      weights: [B] >= 0, or None.
      equal: whether each group counts alike, and not by the sum of its weights.

    Returns:
      NaN if no group has different labels. Groups of equal labels are left out of the mean.

    Law: with one group it is `exact_rauc`.

    Example:
      >>> import torch
      >>> from funcrec.metrics import grouped_rauc
      >>> labels, users = torch.tensor([3.0, 9.0, 60.0, 5.0]), torch.tensor([7, 7, 3, 3])
      >>> grouped_rauc(torch.tensor([0.1, 0.4, 0.2, 0.8]), (labels, users))
      tensor(0.5000, dtype=torch.float64)

    Source: TorchRec's grouped RAUC, which is `equal`.
    """
    call = "funcrec.metrics.grouped_rauc"
    check(call, pair_problems(labels, scores), FLAG.find("equal", equal))
    y, groups = labels
    check(call, example_problems(scores, y, weights, ANY, "scores", FINITE))
    p, y, w = examples(scores, y, weights, ANY, FINITE)
    agreeing, pairs, group = pairs_of(p, y, w, groups)
    agreeing, pairs, weight = (total_of(x, group) for x in (agreeing, pairs, w))
    return grouped_mean(agreeing, pairs, weight, equal)


def xauc() -> Metric:
    """Make a metric: the share of the pairs within each update's batch that predictions and labels order alike.

    Predictions may be any numbers but NaN, and labels any finite numbers. Pairs count as in `exact_rauc`, weighted by
    the product of their weights. The result depends on which examples share a batch; states of batches add up.

    Example:
      >>> import torch
      >>> from funcrec.metrics import xauc
      >>> m = xauc()
      >>> m.compute(m.update(m.init(), torch.tensor([10.0, 30.0, 20.0]), torch.tensor([15.0, 40.0, 60.0])))
      tensor(0.6667, dtype=torch.float64)

    Source: Zhan et al., "Deconfounding duration bias in watch-time prediction for video recommendation" (KDD 2022),
    §5.1; TorchRec's XAUC, where a pair that is equal in one of the two counts 0, and in both 1.
    """
    whole = sums("xauc", lambda p, y: {"agreeing": p}, lambda s: s["agreeing"] / s["weight"], from_logits=ANY)

    def update(state, predictions, labels, weights=None):
        check("funcrec.metrics.xauc.update", example_problems(predictions, labels, weights, ANY, of_labels=FINITE))
        p, y, w = examples(predictions, labels, weights, ANY, FINITE)
        agreeing, pairs, _ = pairs_of(p, y, w, torch.zeros_like(p, dtype=torch.int64))
        share = torch.where(pairs == 0, 0, agreeing / torch.where(pairs == 0, 1, pairs))
        return whole.update(state, share, torch.zeros_like(share), pairs)

    return Metric(whole.init, update, whole.compute)


def pairs_of(scores: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (right, all, group) of each example, f64[B], f64[B], i64[B]. all: the weight of its pairs with a lower
    label. right: the weight of those that the scores order alike. group: its group as a number from 0 on. Pairs across
    two groups do not count.

    Labels become ranks r within a group. Two ranks have a highest bit in which they differ; this bit says which rank is
    lower. So examples are parted by the bits, from the highest on, in the order of the scores. In a part, each example
    whose bit is 1 forms pairs with those whose bit is 0. No pair is formed twice.
    """
    num, at = len(scores), torch.arange(len(scores), device=scores.device)
    order = in_order(labels, groups)
    is_new = starts_of(groups[order])
    start = latest(is_new)
    same = latest(is_new | starts_of(labels[order]))
    group, rank = (torch.zeros_like(at).scatter(0, order, x) for x in (is_new.cumsum(0) - 1, same - start))
    upto = _sums_before(weights[order])
    pairs = weights * torch.zeros_like(weights).scatter(0, order, upto[same] - upto[start])
    order = in_order(rank, scores, groups)  # examples of equal scores have the lower label first
    is_new = starts_of(groups[order])
    run = (is_new | starts_of(scores[order])).cumsum(0)
    start, end = latest(is_new), ends_of(is_new)
    rank, w, agreeing = rank[order], weights[order], torch.zeros_like(weights)
    for bit in reversed(range(max(num - 1, 0).bit_length())):
        is_one = ((rank >> bit) & 1).bool()
        zeros = _sums_before((~is_one).long())
        lower = _sums_before(torch.where(is_one, 0, w))
        first, tie = zeros[start], latest(starts_of(run) | (at == start))
        share = torch.where(is_one, (lower[tie] + lower[:-1]) / 2 - lower[start], 0)
        agreeing = agreeing.index_add(0, order, share)
        before, middle = zeros[:-1] - first, start + zeros[end] - first
        place = torch.where(is_one, middle + at - start - before, start + before)
        to = torch.zeros_like(at).scatter(0, place, at)
        start, end = torch.where(is_one, middle, start), torch.where(is_one, end, middle)
        rank, start, end, run, order, w = (x.index_select(0, to) for x in (rank, start, end, run, order, w))
    return weights * agreeing, pairs, group


def _sums_before(x: Tensor) -> Tensor:
    """Return the sum of the first i values, for i from 0 on, [B] -> [B + 1]."""
    return torch.cat([x.new_zeros(1), x.cumsum(0)])
