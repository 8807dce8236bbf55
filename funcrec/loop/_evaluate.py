"""Computes metrics of a model on batches.

    metrics(∪_i predict(params, b_i), label_i, weight_i)

Shapes: B batch.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from funcrec.cached import CachedStep
from funcrec.core import Problem, check, describe, fail, own_errors, sure, tree_map, typed
from funcrec.loop._numbers import named_numbers
from funcrec.loop._ranks import all_parts, num_processes
from funcrec.mesh import Mesh, Ranks, say
from funcrec.metrics import Metric
from funcrec.tables import bounded, validate

AT_ONCE = (  # these are functions of all examples, and do not make metrics
    "exact_auc", "exact_average_precision", "exact_rauc", "grouped_auc", "grouped_average_precision", "grouped_rauc",
)  # fmt: skip
ANY = (-math.inf, math.inf)  # for numbers and classes: a loss itself checks its labels
_is_trial: ContextVar[bool] = ContextVar("funcrec_trial", default=False)


@contextlib.contextmanager
def one_batch() -> Iterator[None]:
    """Make `evaluate` take only the first batch of this process while the body of the `with` statement runs.

    From an iterator it takes no batch, since that would use up the iterator.
    """
    before = _is_trial.set(True)
    try:
        yield
    finally:
        _is_trial.reset(before)


@typed
def evaluate(
    predict: Callable[[Any, Any], Tensor],
    params: Any,
    batches: Iterable[Any] | Callable[[], Iterable[Any]],
    metrics: Mapping[str, Metric | Callable[..., Any]],
    *,
    label: Callable[[Any], Tensor] = lambda batch: batch.label,
    weight: Callable[[Any], Tensor | None] = lambda batch: batch.weight,
    mesh: Mesh | None = None,
) -> dict[str, float]:
    """Return {name: number}, the metrics of predict(params, batch) on all batches.

    A metric of several values gives a number for each: "auc.0" and "auc.1" for a tensor [2], "auc.click" for a dict
    with the key "click". `fr.metrics.named` gives names to the entries of a tensor.

    Args:
      predict: (params, batch) -> a number for each example, or for each class of each example, such as
        `fr.jit(model.apply)`. It compiles once if all batches have one shape: `fr.data.batches(..., pad_last=True)`
        pads a short last batch with examples of weight 0, which no metric counts.
      batches: an iterable of batches or of (position, batch), or a function that returns such an iterable, as a loader
        does. For several evaluations pass a list or a function. One evaluation uses up an iterator.
      metrics: {name: Metric}, whose states add up batch after batch (`fr.metrics.auc()`), or {name: function} of the
        predictions, labels and weights of all examples whose weight is not 0 (`fr.metrics.exact_auc`).
      label, weight: functions that read these from a batch. For one of several tasks, `label=lambda batch:
        batch.label[:, 0]`. If weights are None, all examples count alike.
      mesh: a mesh of real ranks. Each rank has its own examples, all ranks equally many. The numbers then cover all
        examples, and are the same on all ranks. None if every process sees every example.

    Raises:
      ValueError: if there is no batch (an iterator may be used up), or a batch has no label.

    Example:
      >>> import torch, funcrec as fr
      >>> ids = fr.KeyedJaggedTensor.from_lists({"item": [[1], [2]]})
      >>> batches = [fr.Batch(ids, torch.tensor([0.0, 1.0])), fr.Batch(ids, torch.tensor([1.0, 1.0]))]
      >>> predict = lambda params, batch: params["score"][batch.ids.values]
      >>> metrics = {"accuracy": fr.metrics.accuracy(), "auc": fr.metrics.exact_auc}
      >>> fr.evaluate(predict, {"score": torch.tensor([0.0, 0.1, 0.9])}, batches, metrics)
      {'accuracy': 0.75, 'auc': 0.8333333333333334}
    """
    call = "funcrec.evaluate"
    check(call, metrics_problems(metrics))
    given, mesh = batches_of(call, batches, mesh)
    if given is None:
        return dict.fromkeys(metrics, math.nan)
    adding = {n: m for n, m in metrics.items() if isinstance(m, Metric)}
    at_once = {n: m for n, m in metrics.items() if n not in adding}
    states, seen = None, []
    for batch in given:
        with own_errors(call, predict, params, batch, need="params and a batch that it reads"):
            scores = predict(params, batch)
        y, w = label(batch), weight(batch)
        check(call, scores_problems(scores, y))
        scores = scores.detach()  # no_grad around `predict` would compile `predict` once more
        states = {n: m.init(scores.device) for n, m in adding.items()} if states is None else states
        states = {n: m.update(states[n], scores, y, w) for n, m in adding.items()}
        if at_once:
            seen.append((scores, y, scores.new_ones(scores.shape[:1]) if w is None else w))
    if states is None:
        hint = "a list, or a function: batches=lambda: fr.data.batches(data, rows, 8192, pad_last=True)"
        fail(call, "`batches` are empty.", got="no batch", need="a batch or more", hint=hint)
    return named_numbers(call, results(metrics, states, seen, mesh), "`metrics[{name}]` gave no number.")


def batches_of(call: str, batches: Any, mesh: Mesh | None) -> tuple[Iterator | None, Mesh | None]:
    """Return (the batches without positions, the mesh).

    Inside `one_batch` these are the first batch and None. For an iterator they are None and the mesh.
    """
    given: Any = batches
    if callable(batches):
        with own_errors(call, batches, need="no argument"):
            given = cast(Callable, batches)()
    check(call, batches_problems(given))
    if _is_trial.get():
        if isinstance(given, Iterator) and given is batches:
            return None, mesh
        given, mesh = itertools.islice(given, 1), None
    return (item[1] if is_pair(item) else item for item in given), mesh


def evaluation(
    step: Any, model: Any, own: Callable | None, batches: Any, metrics: Mapping | None, counts_bad_ids: bool
) -> Callable | None:
    """Return a function params -> {name: number}.

    It is the user's own function, or computes the model's metrics on batches, whose ids it checks.
    """
    check("funcrec.fit", validation_problems(own, batches, metrics))
    if batches is None:
        return own

    def predict(params: Any, batch: Any) -> Tensor:
        if not counts_bad_ids:
            features = bounded(model.features, getattr(params, "tables", None))
            validate(batch, features, model.tables, labels=ANY)
        return model.apply(*read(params, batch))

    read = step.read if isinstance(step, CachedStep) else lambda params, batch: (params, batch)
    return functools.partial(evaluate, predict, batches=batches, metrics=sure(metrics))


def validation_problems(evaluate: Any, validation: Any, metrics: Any) -> Iterator[Problem]:
    """Report a `validation` without `metrics`, with `evaluate`, or in an iterator, which serves one epoch only."""
    if validation is not None and not metrics:
        hint = 'metrics={"auc": fr.metrics.exact_auc}'
        yield Problem("`validation` needs `metrics`.", f"metrics={metrics!r}", "{name: metric}", hint)
    if validation is not None and evaluate is not None:
        what, got = "`evaluate` and `validation` are both given.", "two evaluations"
        yield Problem(what, got, "one of them", "evaluate, with all that it measures", TypeError)
    if isinstance(validation, Iterator):
        what, need = ("`validation` gives its batches once.", "batches for every epoch: a loader, or a list")
        yield Problem(what, describe(validation), need, "validation=list(batches)", TypeError)


def results(metrics: Mapping, states: Mapping, seen: list[tuple[Tensor, ...]], mesh: Mesh | None) -> dict[str, Any]:
    """Return {name: metric} over the examples of all ranks, in the order of `metrics`."""
    if num_processes(mesh) > 1:
        states = tree_map(lambda x: all_parts(x[None], mesh).sum(0), states)
    whole = tree_map(lambda *xs: torch.cat(xs), *seen) if seen else ()
    if num_processes(mesh) > 1 and whole:
        counts = say(len(whole[0]), Ranks.of(mesh))
        if len(set(counts)) > 1:
            hint = "pad the rows to a multiple of the ranks, by examples of weight 0"
            got, need = f"{counts} examples", "as many on every rank"
            fail("funcrec.evaluate", "the ranks have different numbers of examples.", got=got, need=need, hint=hint)
        whole = tree_map(lambda x: all_parts(x, mesh), whole)
    if whole:
        is_used = (whole[2] != 0).flatten(1).any(1) if whole[2].dim() > 1 else whole[2] != 0
        whole = tree_map(lambda x: x[is_used], whole)  # examples of weight 0 only fill up a batch
    found = {}
    for n, m in metrics.items():
        with own_errors("funcrec.evaluate", m, *whole, need="(predictions, labels, weights) of all examples"):
            found[n] = m.compute(states[n]) if n in states else m(*whole)
    return found


def is_pair(item: object) -> bool:
    """Return whether an item is a pair (position, batch), as loaders give."""
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], tuple)


# -- validators --------------------------------------------------------------------------------------------------


def metrics_problems(metrics: Mapping[str, Metric | Callable]) -> Iterator[Problem]:
    if not metrics:
        need, hint = "{name: Metric, or a function}", '{"auc": fr.metrics.auc(from_logits=True)}'
        yield Problem("`metrics` are none.", describe(metrics), need, hint)
    for n, m in metrics.items():
        if isinstance(m, FunctionType) and m.__module__.startswith("funcrec.metrics") and m.__name__ not in AT_ONCE:
            what, hint = f"`metrics[{n!r}]` makes a metric, and is not one.", f"fr.metrics.{m.__name__}()"
            yield Problem(what, f"the function {m.__name__}", "a Metric", hint, TypeError)


def batches_problems(batches: object) -> Iterator[Problem]:
    if not isinstance(batches, Iterable) or isinstance(batches, Tensor | Mapping | str):
        need, hint = "an iterable of batches, or a function that gives one", "[batch]"
        yield Problem("`batches` cannot be iterated.", describe(batches), need, hint, TypeError)


def scores_problems(scores: object, label: object) -> Iterator[Problem]:
    if not isinstance(scores, Tensor):
        hint = "predict=fr.jit(model.apply)"
        yield Problem("`predict` gave no tensor.", describe(scores), "f[B]", hint, TypeError)
    elif scores.dim() == 0:
        need, hint = "f[B], one for each example", "predict=fr.jit(model.apply), without a mean over the batch"
        yield Problem("`predict` gave one number for a whole batch.", describe(scores), need, hint)
    elif label is None:
        need, hint = "[B], one for each prediction", "batches of the data's labels; model.apply needs none"
        yield Problem("`batch.label` is missing: there is nothing to compare with.", "None", need, hint)
    elif isinstance(label, Tensor) and sorted((scores.shape, label.shape)) == sorted(
        (scores.shape[:1], (*scores.shape[:1], 1))
    ):
        got, hint = f"predictions {describe(scores)}, labels {describe(label)}", "predict=lambda p, b: ....squeeze(-1)"
        yield Problem("`predict` and the labels would be broadcast: one has a column more.", got, "both [B]", hint)
