"""Means over groups, such as users, of a value that each group's examples give alone.

    grouped_auc = Σ_g ω_g AUC_g / Σ_g ω_g,        ω_g = Σ_b in g w_b, or 1

Groups that have no value are left out. Shapes: B examples.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, kind_of
from funcrec.metrics._metric import example_problems, examples

FLAG = kind_of(bool)


def grouped_auc(
    scores: Tensor, labels: tuple[Tensor, Tensor], weights: Tensor | None = None, *, equal: bool = False
) -> Tensor:
    """Compute the mean AUC of groups -> f64[]. It is GAUC if a group is a user. With `equal` it is uAUC, in which each
    user counts alike.

    Args:
      scores: f[B], no NaN; only their order within a group counts.
      labels: ([B] in [0, 1], i[B]): the labels, and the group of each example, any integers.
      weights: [B] >= 0, or None.
      equal: whether each group counts alike. False weights a group by the sum of its weights.

    Returns:
      NaN if no group has both a positive and a negative example. Groups that lack one of them are left out of the mean.

    Law: with one group it is `exact_auc`.

    Cost: two sorts, O(B log B).

    Example:
      >>> import torch
      >>> from funcrec.metrics import grouped_auc
      >>> labels, users = torch.tensor([0, 1, 1, 0]), torch.tensor([7, 7, 3, 3])
      >>> grouped_auc(torch.tensor([0.1, 0.4, 0.2, 0.8]), (labels, users))
      tensor(0.5000, dtype=torch.float64)

    Source: Zhou et al., "Deep interest network for click-through rate prediction" (KDD 2018), eq. 8, with weights;
    TorchRec's grouped AUC and GAUC, which are `equal`, and count groups of one class as ½ or not at all.
    """
    y, w, run, group, group_of_run = _runs("grouped_auc", scores, labels, weights, equal, descending=False)
    negative, positive = total_of(w * (1 - y), run), total_of(w * y, run)
    negatives, positives, weight = (total_of(x, group) for x in (w * (1 - y), w * y, w))
    before = _within(negative.cumsum(0) - negative, negatives, group_of_run)
    area = total_of(positive * (before + negative / 2), group_of_run)
    return grouped_mean(area, positives * negatives, weight, equal)


def grouped_average_precision(
    scores: Tensor, labels: tuple[Tensor, Tensor], weights: Tensor | None = None, *, equal: bool = False
) -> Tensor:
    """Compute the mean average precision of groups -> f64[]. Arguments as in `grouped_auc`.

    Returns:
      NaN if no group has a positive example. Groups without one are left out of the mean.

    Law: with one group it is `exact_average_precision`.

    Cost: two sorts, O(B log B).

    Example:
      >>> import torch
      >>> from funcrec.metrics import grouped_average_precision
      >>> labels, users = torch.tensor([0, 1, 1, 0]), torch.tensor([7, 7, 3, 3])
      >>> grouped_average_precision(torch.tensor([0.1, 0.4, 0.2, 0.8]), (labels, users))
      tensor(0.7500, dtype=torch.float64)

    Source: TorchRec's grouped AUPRC, which is `equal`.
    """
    y, w, run, group, group_of_run = _runs("grouped_average_precision", scores, labels, weights, equal, descending=True)
    said, hits = total_of(w, run), total_of(w * y, run)
    weight, positives = total_of(w, group), total_of(w * y, group)
    all_said = said + _within(said.cumsum(0) - said, weight, group_of_run)
    all_hits = hits + _within(hits.cumsum(0) - hits, positives, group_of_run)
    precision = all_hits / torch.where(all_said == 0, 1, all_said)
    return grouped_mean(total_of(hits * precision, group_of_run), positives, weight, equal)


def grouped_mean(values: Tensor, totals: Tensor, weight: Tensor, equal: bool) -> Tensor:
    """Return the mean of values / totals over groups, f64[B] each -> f64[]. A group whose total is 0 is left out."""
    is_judged = totals > 0
    mean = values / torch.where(is_judged, totals, 1)
    counts = torch.ones_like(weight) if equal else weight
    used = torch.where(totals.isnan(), torch.nan, torch.where(is_judged, counts, 0))
    return (used * mean).sum() / used.sum()


def in_order(*keys: Tensor) -> Tensor:
    """Return the order of a sort by the last key, then by the key before it, and so on: [B] each -> i64[B]."""
    order = keys[0].argsort(stable=True)
    for key in keys[1:]:
        order = order.index_select(0, key.index_select(0, order).argsort(stable=True))
    return order


def starts_of(x: Tensor) -> Tensor:
    """Return whether each value differs from the one before, [B] -> bool[B]."""
    return torch.cat([torch.ones_like(x[:1], dtype=torch.bool), x[1:] != x[:-1]])


def latest(is_mark: Tensor) -> Tensor:
    """Return for each place the last marked place that is not after it, bool[B] -> i64[B]; the first place is
    marked."""
    return torch.where(is_mark, torch.arange(len(is_mark), device=is_mark.device), 0).cummax(0).values


def ends_of(is_start: Tensor) -> Tensor:
    """Return for each place the next marked place after it, or B, bool[B] -> i64[B]."""
    is_last = torch.cat([is_start[1:], torch.ones_like(is_start[:1])])
    return len(is_start) - latest(is_last.flip(0)).flip(0)


def total_of(x: Tensor, index: Tensor) -> Tensor:
    """Return the sums of x by index, f64[B], i64[B] below B -> f64[B]."""
    return torch.zeros_like(x).index_add(0, index, x)


def _runs(
    name: str, scores: Tensor, labels: Any, weights: Tensor | None, equal: Any, *, descending: bool
) -> tuple[Tensor, ...]:
    """Return (y, w, run, group, the group of each run) of the examples in the order of groups and scores.

    A run has examples of one group and one score. Runs and groups are numbers from 0 on, at most B.
    """
    call = f"funcrec.metrics.{name}"
    check(call, pair_problems(labels, scores), FLAG.find("equal", equal))
    y, groups = labels
    check(call, example_problems(scores, y, weights, True, "scores"))
    p, y, w = examples(scores, y, weights, True)
    order = in_order(-p if descending else p, groups)
    p, y, w, groups = (x.index_select(0, order) for x in (p, y, w, groups))
    is_new = starts_of(groups)
    group, run = is_new.cumsum(0) - 1, (is_new | starts_of(p)).cumsum(0) - 1
    return y, w, run, group, torch.zeros_like(group).scatter(0, run, group)


def _within(before: Tensor, totals: Tensor, group: Tensor) -> Tensor:
    """Return sums over all that precedes a run, as sums over what precedes it within its group."""
    return before - (totals.cumsum(0) - totals).index_select(0, group)


# -- validators --------------------------------------------------------------------------------------------------


def pair_problems(labels: Any, scores: Any) -> Iterator[Problem]:
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
