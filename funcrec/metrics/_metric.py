"""A metric is three pure functions on a state; states can be added.

    update(update(s, a), b) = update(s, a then b),   merge(update(0, a), update(0, b)) = update(0, a then b)

A state is a tree of f64 sums. Their shapes do not depend on the data, so it passes through `jit`, `vmap` and `psum`.
All functions here are traceable. They check the values of CPU tensors, except while they are traced. Shapes: B
examples.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from funcrec.core import (
    Device,
    Problem,
    check,
    describe,
    element_problems,
    is_tracked,
    tree_leaves,
    tree_map,
    tree_problems,
    tree_structure,
    typed,
    typed_fields,
)
from funcrec.jagged import is_concrete

State = Any
ANY = object()  # value of from_logits: predictions may be any numbers
RANGES = {True: (-math.inf, math.inf), False: (0.0, 1.0), ANY: (-math.inf, math.inf)}  # of predictions, by from_logits
CHANCES, FINITE = (0.0, 1.0), (-sys.float_info.max, sys.float_info.max)  # ranges of labels


class InitMetric(Protocol):
    """A function that returns the state before the first example."""

    __module__ = "funcrec.metrics"  # what `help` shows

    def __call__(self, device: Any = None) -> State: ...


class UpdateMetric(Protocol):
    """A function that returns the state after more examples."""

    __module__ = "funcrec.metrics"  # what `help` shows

    def __call__(self, state: State, predictions: Any, labels: Any, weights: Tensor | None = None) -> State: ...


@typed_fields
class Metric(NamedTuple):
    """`init(device=None) -> state`, `update(state, predictions, labels, weights=None) -> state`,
    `compute(state) -> f64[]`, or a tensor or a dict of several values, as for `per_task`, `grouped`, `named`,
    `collect`.

    predictions: f[B] or i[B, K] or f[B, T]: probabilities, or logits if made with from_logits=True. mse,
      rmse and mae take any numbers; per_task takes f[B, T]; multiclass_accuracy takes f[B, C]; recall, hit_rate and
      ndcg take lists of rows, i[B, K].
    labels: one for each example: floats, integers or booleans in [0, 1]. mse, rmse and mae take any finite ones;
      multiclass_accuracy takes classes below C; metrics of lists take bags of rows; grouped and by_session take
      (labels, groups).
    from_logits: whether predictions are logits. None: several metrics, only some of which take logits.
    weights: [B] >= 0 and finite, or None for ones. An example of weight 0 is padding, unless the weights are
      differentiated.

    `compute` returns NaN before the first example, if all weights are 0, or if a quotient has no value, so that no such
    result looks like the best. A sum, such as `sum_weights`, is then 0. If values cannot be read (traced, on a GPU), an
    example out of range makes the result NaN; no error is raised.

    Law: the state is the sum over examples in any order and any split, up to a relative rounding error of 1e-12.

    Example:
      >>> import torch
      >>> from funcrec.metrics import accuracy
      >>> metric = accuracy()
      >>> state = metric.update(metric.init(), torch.tensor([0.9, 0.2]), torch.tensor([1, 1]))
      >>> metric.compute(state)
      tensor(0.5000, dtype=torch.float64)
    """

    init: InitMetric
    update: UpdateMetric
    compute: Callable[[State], Any]
    from_logits: bool | None = False


def collect(metrics: Mapping[str, Metric]) -> Metric:
    """Combine several metrics into one; its state and result are dicts.

    Example:
      >>> import torch
      >>> from funcrec.metrics import collect, ctr, mae
      >>> both = collect({"ctr": ctr(), "mae": mae()})
      >>> state = both.update(both.init(), torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]))
      >>> {name: float(x) for name, x in both.compute(state).items()}
      {'ctr': 0.5, 'mae': 0.5}
    """
    check("funcrec.metrics.collect", _mapping_problems(metrics))
    metrics = dict(metrics)

    def init(device=None):
        return {name: m.init(device) for name, m in metrics.items()}

    def update(state, predictions, labels, weights=None):
        return {name: m.update(state[name], predictions, labels, weights) for name, m in metrics.items()}

    def compute(state):
        return {name: m.compute(state[name]) for name, m in metrics.items()}

    of_each = {m.from_logits for m in metrics.values()}
    return Metric(init, update, compute, of_each.pop() if len(of_each) == 1 else None)


def merge(a: State, b: State) -> State:
    """Add two states, a, b [...] -> [...]: the state of the examples of both. On a mesh `psum(state)` adds the states
    of all ranks.

    Law: commutative, associative up to rounding, and `init()` is its zero.
    """
    check("funcrec.metrics.merge", _structure_problems(a, b))
    return tree_map(torch.add, a, b)


def sums(
    name: str,
    terms: Callable[[Tensor, Tensor], dict[str, Tensor]],
    compute: Callable[[dict[str, Tensor]], Tensor],
    *,
    from_logits: bool | object = False,
    of_labels: tuple[float, float] = CHANCES,
) -> Metric:
    """Make a metric of weighted sums: `terms(predictions, labels) -> {sum: f64[B]}`; the sum of the weights is
    "weight".

    from_logits: ANY takes any predictions. of_labels: the range of labels.
    """
    names = (*terms(torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)), "weight")

    @typed
    def init(device: Device | None = None):
        return {n: torch.zeros((), dtype=torch.float64, device=device) for n in names}

    def update(state, predictions, labels, weights=None):
        check(f"funcrec.metrics.{name}.update", state_problems(state, names))
        p, y, w = as_doubles(f"funcrec.metrics.{name}.update", predictions, labels, weights, from_logits, of_labels)
        added = {**terms(p, y), "weight": torch.ones_like(w)}
        return {n: state[n] + (w * added[n]).sum() for n in names}

    def checked_compute(state):
        check(f"funcrec.metrics.{name}.compute", state_problems(state, names))
        return compute(state)

    return Metric(init, update, checked_compute, from_logits is True)


def as_doubles(
    call: str, predictions, labels, weights, from_logits: bool | object, of_labels: tuple[float, float] = CHANCES
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the predictions, labels and weights, and return them as `examples` does."""
    check(call, example_problems(predictions, labels, weights, from_logits, of_labels=of_labels))
    return examples(predictions, labels, weights, from_logits, of_labels)


def examples(
    predictions, labels, weights, from_logits: bool | object, of_labels: tuple[float, float] = CHANCES
) -> tuple[Tensor, Tensor, Tensor]:
    """Return f64[B] each: 0 with weight 0 for padding, and 0 with weight NaN for an example out of range, so that
    every sum shows it. If the weights are differentiated, no example is padding."""
    p, y = predictions.double(), labels.double()
    w = torch.ones_like(p) if weights is None else weights.double()
    low, high = RANGES[from_logits]
    valid = (p >= low) & (p <= high) & (y >= of_labels[0]) & (y <= of_labels[1]) & (w >= 0) & (w < torch.inf)
    used, good = (valid, valid) if is_tracked(w) else (valid & (w != 0), valid | (w == 0))
    return torch.where(used, p, 0), torch.where(used, y, 0), torch.where(good, w, torch.nan)


# -- validators --------------------------------------------------------------------------------------------------


def example_problems(
    predictions, labels, weights, from_logits: bool | object, name: str = "predictions", of_labels=CHANCES
):
    if not isinstance(predictions, Tensor) or not predictions.is_floating_point():
        hint = "predictions.float()" if isinstance(predictions, Tensor) else ""
        yield Problem(f"`{name}` are not floating-point numbers.", describe(predictions), "f[B]", hint, TypeError)
        return
    if predictions.dim() != 1:
        yield Problem(f"`{name}` are not a vector.", describe(predictions), "f[B]", f"{name}.flatten(), or vmap")
        return
    given = {"labels": labels} if weights is None else {"labels": labels, "weights": weights}
    for other, x in given.items():
        if not isinstance(x, Tensor) or x.is_complex():
            yield Problem(f"`{other}` are not numbers.", describe(x), f"a tensor [{len(predictions)}]", kind=TypeError)
        elif x.shape != predictions.shape:
            hint, need = "those of the same examples, of both", f"shape {list(predictions.shape)}"
            yield Problem(f"`{other}` do not match `{name}`.", describe(x), need, hint)
        elif x.device != predictions.device:
            yield Problem(f"`{other}` are on another device.", describe(x), f"device {predictions.device}")
        elif other == "labels":
            allowed = "finite labels" if of_labels == FINITE else f"labels in [{of_labels[0]:g}, {of_labels[1]:g}]"
            yield from range_problems(x, other, of_labels[0], of_labels[1], allowed, weights)
        else:
            yield from range_problems(x, other, 0, sys.float_info.max, "finite weights >= 0")
    need = "probabilities in [0, 1], no NaN" if from_logits is False else "numbers, no NaN"
    hint = "from_logits=True, or predictions.sigmoid()" if from_logits is False else ""
    yield from range_problems(predictions, name, *RANGES[from_logits], need, weights, hint)


def range_problems(x: Tensor, name: str, low: float, high: float, need: str, weights=None, hint: str = ""):
    """Check that values of weight != 0 are in [low, high]; if one of the tensors is not concrete, nothing is read."""
    if not is_concrete(x) or x.numel() == 0 or (isinstance(weights, Tensor) and not is_concrete(weights)):
        return
    wrong = ~((x >= low) & (x <= high))
    if isinstance(weights, Tensor) and weights.shape == x.shape:
        wrong = wrong & (weights != 0)
    yield from element_problems(f"`{name}` leave their range.", name, x, wrong, need, hint)


def _mapping_problems(metrics: object) -> Iterator[Problem]:
    if not isinstance(metrics, Mapping) or not all(isinstance(m, Metric) for m in metrics.values()):
        need = "{name: Metric}"
        yield Problem("`metrics` are not metrics by name.", describe(metrics), need, "auc(), not auc", TypeError)


def state_problems(state: object, names: Sequence[str]) -> Iterator[Problem]:
    """Check that `init` or `update` of the same metric made `state`."""
    form = dict.fromkeys(names, ())
    yield from tree_problems(state, "state", form, "is not this metric's", "state = metric.init()")


def _structure_problems(a: State, b: State) -> Iterator[Problem]:
    shapes = [[x.shape if isinstance(x, Tensor) else None for x in tree_leaves(s)] for s in (a, b)]
    if tree_structure(a) != tree_structure(b) or shapes[0] != shapes[1]:
        got = f"{tree_structure(a)} and {tree_structure(b)}, {shapes[0]} and {shapes[1]}"
        what, hint = "`a` and `b` are states of different metrics.", "states of one `metric`: metric.init(), or updated"
        yield Problem(what, got, "two states of one metric", hint, TypeError)
