"""Metrics made of metrics.

    windowed: Σ of the last n updates' states       grouped: a state for each group       recalibrated, unweighted:
    other predictions or weights go in              labelled: no missing labels          per_task: a state for each
    named: values by name

All are metrics too: their states add up. Shapes: B examples, G groups, T tasks.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
from torch import Tensor
from torch.func import vmap

from funcrec.core import (
    Count,
    PositiveMagnitude,
    Problem,
    Within,
    check,
    describe,
    element_problems,
    tree_leaves,
    tree_map,
    typed,
)
from funcrec.jagged import is_concrete
from funcrec.metrics._groups import pair_problems
from funcrec.metrics._metric import Metric, range_problems


@typed
def windowed(metric: Metric, num_updates: Count) -> Metric:
    """Make a metric: `metric` over the examples of the last `num_updates` updates.

    The state holds one state per update, and `compute` adds them. Nothing is subtracted, so no rounding error
    accumulates.

    Cost: the memory of num_updates states, moved at each update.

    Example:
      >>> import torch
      >>> from funcrec.metrics import ctr, windowed
      >>> m = windowed(ctr(), 2)
      >>> state = m.init()
      >>> for label in (1.0, 0.0, 0.0):
      ...     state = m.update(state, torch.tensor([0.5]), torch.tensor([label]))
      >>> m.compute(state)
      tensor(0., dtype=torch.float64)

    Source: TorchRec's window metrics.
    """

    def init(device=None):
        return tree_map(lambda x: x.new_zeros((num_updates, *x.shape)), metric.init(device))

    def update(state, predictions, labels, weights=None):
        check("funcrec.metrics.windowed.update", leading_problems(state, num_updates, "updates"))
        empty = tree_map(lambda x: torch.zeros_like(x[0]), state)
        newest = metric.update(empty, predictions, labels, weights)
        return tree_map(lambda kept, x: torch.cat([kept[1:], x[None]]), state, newest)

    def compute(state):
        check("funcrec.metrics.windowed.compute", leading_problems(state, num_updates, "updates"))
        return metric.compute(tree_map(lambda x: x.sum(0), state))

    return metric._replace(init=init, update=update, compute=compute)


@typed
def grouped(metric: Metric, num_groups: Count) -> Metric:
    """Make a metric: `metric` for each group of examples. Its `compute` returns f64[G].

    labels: (labels, i[B] groups), such as `label=lambda batch: (batch.label, segment)` of `fr.evaluate`. A group
    outside [0, num_groups) raises. Where values cannot be read, such an example makes all groups NaN.

    Cost: num_groups updates of B examples. For many groups use `grouped_auc`, which sorts.

    Example:
      >>> import torch
      >>> from funcrec.metrics import ctr, grouped
      >>> m, labels, groups = grouped(ctr(), 3), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 2])
      >>> m.compute(m.update(m.init(), torch.full((3,), 0.5), (labels, groups)))
      tensor([0.5000,    nan, 1.0000], dtype=torch.float64)

    Source: TorchRec's segmented NE and grouped AUC.
    """

    def init(device=None):
        return tree_map(lambda x: x.new_zeros((num_groups, *x.shape)), metric.init(device))

    def update(state, predictions, labels, weights=None):
        call = "funcrec.metrics.grouped.update"
        check(call, leading_problems(state, num_groups, "groups"), pair_problems(labels, predictions))
        labels, groups = labels
        check(call, group_problems(groups, weights, num_groups))
        w = torch.ones_like(groups, dtype=torch.float64) if weights is None else weights.double()
        is_known = (groups >= 0) & (groups < num_groups)
        w = torch.where(is_known | (w == 0), w, torch.nan)
        is_own = (groups == torch.arange(num_groups, device=groups.device)[:, None]) | ~is_known
        own = torch.where(is_own, w, 0)
        return vmap(lambda s, v: metric.update(s, predictions, labels, v))(state, own)

    def compute(state):
        check("funcrec.metrics.grouped.compute", leading_problems(state, num_groups, "groups"))
        return vmap(metric.compute)(state)

    return metric._replace(init=init, update=update, compute=compute)


@typed
def recalibrated(metric: Metric, coefficient: PositiveMagnitude) -> Metric:
    """Make a metric: `metric` of p / (p + (1 - p) / coefficient), for a model that was trained on sampled negatives.

    coefficient: the share of the negatives that training kept. It is for probabilities, not for logits.

    Example:
      >>> import torch
      >>> from funcrec.metrics import calibration, recalibrated
      >>> m = recalibrated(calibration(), 0.1)
      >>> m.compute(m.update(m.init(), torch.full((11,), 0.5), torch.tensor([1.0] + [0.0] * 10)))
      tensor(1., dtype=torch.float64)

    Source: He et al., "Practical lessons from predicting clicks on ads at Facebook" (ADKDD 2014), §6.3; TorchRec.
    """

    check("funcrec.metrics.recalibrated", logit_problems(metric))

    def update(state, predictions, labels, weights=None):
        check("funcrec.metrics.recalibrated.update", probability_problems(predictions))
        check("funcrec.metrics.recalibrated.update", chance_problems(predictions, weights))
        p = torch.where((predictions >= 0) & (predictions <= 1), predictions.double(), torch.nan)
        return metric.update(state, p / (p + (1 - p) / coefficient), labels, weights)

    return metric._replace(update=update)


@typed
def unweighted(metric: Metric) -> Metric:
    """Make a metric: `metric` with weight 1 for every example, except those of weight 0, which are padding.

    Example:
      >>> import torch
      >>> from funcrec.metrics import ctr, unweighted
      >>> m, weights = unweighted(ctr()), torch.tensor([5.0, 1.0, 0.0])
      >>> m.compute(m.update(m.init(), torch.full((3,), 0.5), torch.tensor([1.0, 0.0, 0.0]), weights))
      tensor(0.5000, dtype=torch.float64)

    Source: TorchRec's unweighted NE.
    """

    def update(state, predictions, labels, weights=None):
        check("funcrec.metrics.unweighted.update", weights_problems(weights))
        if weights is not None:
            is_right = (weights >= 0) & (weights < torch.inf)
            weights = torch.where(is_right, (weights != 0).double(), torch.nan)
        return metric.update(state, predictions, labels, weights)

    return metric._replace(update=update)


@typed
def labelled(metric: Metric) -> Metric:
    """Make a metric: `metric` of the examples that have a label; NaN means that the label is missing.

    Example:
      >>> import torch
      >>> from funcrec.metrics import ctr, labelled
      >>> m = labelled(ctr())
      >>> m.compute(m.update(m.init(), torch.full((3,), 0.5), torch.tensor([1.0, torch.nan, 0.0])))
      tensor(0.5000, dtype=torch.float64)

    Source: TorchRec's allow_missing_label_with_zero_weight.
    """

    def update(state, predictions, labels, weights=None):
        if isinstance(labels, Tensor) and labels.is_floating_point():
            missing = labels.isnan()
            w = torch.ones_like(labels, dtype=torch.float64) if weights is None else weights
            if isinstance(w, Tensor) and w.shape == labels.shape:
                labels, weights = torch.where(missing, 0, labels), torch.where(missing, 0, w)
        return metric.update(state, predictions, labels, weights)

    return metric._replace(update=update)


@typed
def per_task(metric: Metric, num_tasks: Count) -> Metric:
    """Make a metric: `metric` for each of several tasks. Its `compute` returns f64[T].

    predictions: f[B, T]. labels: [B, T]. weights: [B] for all tasks, [B, T], or None.

    Example:
      >>> import torch
      >>> from funcrec.metrics import binary_precision, per_task
      >>> m, labels = per_task(binary_precision(), 2), torch.tensor([[1, 0], [0, 1]])
      >>> m.compute(m.update(m.init(), torch.tensor([[0.9, 0.2], [0.8, 0.7]]), labels))
      tensor([0.5000, 1.0000], dtype=torch.float64)

    Source: TorchRec's n_tasks, and its multi-label precision, whose integers hold a label in each bit:
    `(codes[:, None] >> torch.arange(T)) & 1`.
    """

    def init(device=None):
        return tree_map(lambda x: x.new_zeros((num_tasks, *x.shape)), metric.init(device))

    def update(state, predictions, labels, weights=None):
        call = "funcrec.metrics.per_task.update"
        check(call, leading_problems(state, num_tasks, "tasks"))
        check(call, column_problems(predictions, labels, weights, num_tasks))
        column = lambda x, t: x[:, t] if x is not None and x.dim() == 2 else x
        each = [
            metric.update(tree_map(lambda x: x[t], state), *(column(x, t) for x in (predictions, labels, weights)))  # noqa: B023
            for t in range(num_tasks)
        ]
        return tree_map(lambda *xs: torch.stack(xs), *each)

    def compute(state):
        check("funcrec.metrics.per_task.compute", leading_problems(state, num_tasks, "tasks"))
        return vmap(metric.compute)(state)

    return metric._replace(init=init, update=update, compute=compute)


differ = lambda names: 0 < len(set(names)) == len(names)
Names = Annotated[
    Sequence[str], Within("a name for each value, all different", differ, "are none, or not all different")
]


@typed
def named(metric: Metric, names: Names) -> Metric:
    """Make a metric: `metric`, whose `compute` returns a dict {name: value} in place of a tensor of several values.

    The names are those of the tensors' first dimension: tasks of `per_task`, groups of `grouped`. `fr.evaluate` then
    gives the numbers "auc.click" and "auc.buy" in place of "auc.0" and "auc.1".

    Example:
      >>> import torch
      >>> from funcrec.metrics import ctr, named, per_task
      >>> m = named(per_task(ctr(), 2), ["click", "buy"])
      >>> state = m.update(m.init(), torch.full((2, 2), 0.5), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
      >>> {name: float(x) for name, x in m.compute(state).items()}
      {'click': 1.0, 'buy': 0.5}
    """
    names = tuple(names)

    def compute(state):
        found = metric.compute(state)
        check("funcrec.metrics.named.compute", value_problems(found, names))
        return {name: tree_map(lambda x: x[i], found) for i, name in enumerate(names)}  # noqa: B023

    return metric._replace(compute=compute)


# -- validators --------------------------------------------------------------------------------------------------


def leading_problems(state: object, count: int, of: str) -> Iterator[Problem]:
    leaves = tree_leaves(state)
    if not leaves or not all(isinstance(x, Tensor) and x.dim() and x.shape[0] == count for x in leaves):
        need, hint = f"tensors [{count}, ...], of {count} {of}", "state = metric.init()"
        yield Problem("`state` is not this metric's.", describe(state), need, hint, TypeError)


def value_problems(found: object, names: Sequence[str]) -> Iterator[Problem]:
    leaves = tree_leaves(found)
    if not leaves or not all(isinstance(x, Tensor) and x.dim() and x.shape[0] == len(names) for x in leaves):
        got, need = describe(found), f"tensors [{len(names)}, ...], a value for each of {[*names]}"
        yield Problem("`metric` does not have a value for each name.", got, need, "per_task(metric, len(names))")


def group_problems(groups: Tensor, weights: object, num_groups: int) -> Iterator[Problem]:
    if weights is not None and (not isinstance(weights, Tensor) or weights.shape != groups.shape):
        need, hint = f"[{len(groups)}], or None", "weights of the same batch"
        yield Problem("`weights` do not match `labels`.", describe(weights), need, hint)
    elif is_concrete(groups) and (weights is None or is_concrete(weights)):
        wrong = (groups < 0) | (groups >= num_groups)
        wrong = wrong if weights is None else wrong & (weights != 0)
        need, hint = f"groups in [0, {num_groups})", "grouped(metric, num_groups), with a larger num_groups"
        yield from element_problems("`labels[1]` leave their range.", "labels[1]", groups, wrong, need, hint)


def probability_problems(predictions: object) -> Iterator[Problem]:
    if not isinstance(predictions, Tensor) or not predictions.is_floating_point():
        need, hint = "f[B], probabilities", "predictions.sigmoid()"
        yield Problem("`predictions` are not floating-point numbers.", describe(predictions), need, hint, TypeError)


def weights_problems(weights: object) -> Iterator[Problem]:
    if weights is not None and (not isinstance(weights, Tensor) or weights.is_complex()):
        yield Problem("`weights` are not numbers.", describe(weights), "[B], or None", "torch.ones(B)", TypeError)
    elif weights is not None and weights.dim() == 1:
        yield from range_problems(weights, "weights", 0, sys.float_info.max, "finite weights >= 0")


def chance_problems(predictions: Tensor, weights: object) -> Iterator[Problem]:
    """Report predictions that are no probabilities. A metric of logits cannot be recalibrated."""
    if predictions.dim() == 1 and (weights is None or isinstance(weights, Tensor)):
        need, hint = "probabilities in [0, 1], no NaN", "predictions.sigmoid(), and a metric without from_logits"
        yield from range_problems(predictions, "predictions", 0, 1, need, weights, hint)


def logit_problems(metric: Metric) -> Iterator[Problem]:
    if metric.from_logits is not False:
        got = "from_logits=True" if metric.from_logits else "some with from_logits=True"
        yield Problem("`metric` takes logits.", got, "probabilities", "the metric without from_logits")


def column_problems(predictions: object, labels: object, weights: object, num_tasks: int) -> Iterator[Problem]:
    need = f"[B, {num_tasks}], a column for each task"
    for name, x in (("predictions", predictions), ("labels", labels)):
        if not isinstance(x, Tensor):
            yield Problem(f"`{name}` are not a tensor.", describe(x), need, "torch.stack(columns, 1)", TypeError)
        elif x.dim() != 2 or x.shape[1] != num_tasks:
            yield Problem(f"`{name}` have no column for each task.", describe(x), need, f"x.reshape(-1, {num_tasks})")
    need = f"[B] for all tasks, [B, {num_tasks}], or None"
    if weights is not None and not isinstance(weights, Tensor):
        yield Problem("`weights` are not numbers.", describe(weights), need, "torch.ones(B)", TypeError)
    elif weights is not None and (weights.dim() not in (1, 2) or weights.shape[1:] not in ((), (num_tasks,))):
        yield Problem("`weights` do not match `labels`.", describe(weights), need, "weights[:, 0]")
