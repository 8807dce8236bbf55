"""The sum of several losses of each example.

    loss = Σ_t c_t loss_t(predictions[:, t], label[:, t])

Shapes: B batch, T tasks.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import torch
from torch import Tensor

from funcrec.core import Form, Magnitude, Problem, Scalar, Within, check, describe, is_tracked, own_errors, typed
from funcrec.losses._mean import Reduction, terms_and_total, weighted_mean

CALL = "funcrec.losses.multi_task"

Losses = Annotated[Sequence[Callable[..., Tensor]], Within("a sequence of losses, one per task", len, "are none")]


@typed
def multi_task(losses: Losses, *, weights: Sequence[Magnitude | Scalar] | None = None) -> Callable:
    """Return a loss of T columns, made from T losses of one column.

    Args:
      losses: a function of (predictions, label, weight, reduction=...) for each column, such as `bce` and `mse`.
      weights: c, one number or f[] for each task. None means 1 for each task.

    Returns:
      loss(predictions f[B, T], label [B, T], weight=None, *, reduction="mean") -> f[], or f[B] with "none". weight is
      f[B] for examples, or f[B, T] for each task, where 0 means that an example has no label for a task. "mean" is
      the weighted mean of what "none" returns. With f[B, T] it is Σ_t c_t mean_t, each by its own weights.

    Law: "mean" adds the terms of an example first, c_t w_t loss_t / Σ w_t, and then the examples. So micro-batches and
      ranks keep its bits under `invariant`. With weights that are differentiated it is a sum of T means, which each
      part rounds.

    Example:
      >>> import torch, funcrec as fr
      >>> loss = fr.losses.multi_task([fr.losses.bce, fr.losses.mse], weights=(1.0, 0.5))
      >>> loss(torch.tensor([[0.0, 3.0]]), torch.tensor([[1.0, 1.0]]))
      tensor(2.6931)
    """
    check(CALL, task_problems(losses, weights))
    c = [1.0] * len(losses) if weights is None else list(weights)
    return functools.partial(_loss_of_tasks, tuple(losses), tuple(c))


@typed(call=CALL)
def _loss_of_tasks(
    losses: tuple[Callable, ...],
    c: tuple[float | Tensor, ...],
    predictions: Annotated[Tensor, Form("f[B, T]")],
    label: Annotated[Tensor, Form("x[B, T]")],
    weight: Annotated[Tensor, Form("f[...]")] | None = None,
    *,
    reduction: Reduction = "mean",
) -> Tensor:
    check(CALL, column_problems(predictions, weight, len(losses)))
    is_one_sum = reduction == "mean" and (weight is None or not is_tracked(weight))
    how: Reduction = "none" if is_one_sum else reduction  # parts of a batch keep the order of one sum over examples
    columns = [weight if weight is None or weight.dim() == 1 else weight[:, t] for t in range(len(losses))]
    terms = []
    for t, (loss, own) in enumerate(zip(losses, columns, strict=True)):
        with own_errors(CALL, loss, predictions[:, t], label[:, t], need="the predictions and labels of one task"):
            of_task = loss(predictions[:, t], label[:, t], own, reduction=how)
        if is_one_sum and weight is not None and weight.dim() == 2:
            of_task = torch.div(*terms_and_total(CALL, of_task, weight[:, t]))
        terms.append(c[t] * of_task)
    total = torch.stack(terms).sum(0)
    if not is_one_sum:
        return total
    if weight is None or weight.dim() == 1:
        return weighted_mean(total, weight)
    return total.sum().to(predictions.dtype)


def task_problems(losses: Sequence[Callable], weights: Sequence[float | Tensor] | None) -> Iterator[Problem]:
    for t, loss in enumerate(losses):
        if not takes_reduction(loss):
            name, need = getattr(loss, "__name__", type(loss).__name__), "(predictions, label, weight, *, reduction)"
            hint = 'fr.losses.mse; in your own: x if reduction == "none" else fr.losses.weighted_mean(x, weight)'
            what = f"`losses[{t}]` takes no `reduction`."
            yield Problem(what, f"{name}{inspect.signature(loss)}", need, hint, TypeError)
    if weights is not None and len(weights) != len(losses):
        need = f"{len(losses)} finite numbers >= 0"
        yield Problem("`weights` do not match the tasks.", f"{tuple(weights)}", need, f"weights={(1.0,) * len(losses)}")


def takes_reduction(loss: Callable) -> bool:
    try:
        given = inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a call shows whether it takes `reduction`
        return True
    return "reduction" in given or any(p.kind is p.VAR_KEYWORD for p in given.values())


def column_problems(predictions: Tensor, weight: Tensor | None, num_tasks: int) -> Iterator[Problem]:
    if predictions.shape[1] != num_tasks:
        need = f"[B, {num_tasks}], a column for each loss"
        yield Problem("`predictions` do not match the tasks.", describe(predictions), need, "as many losses")
    if weight is not None and weight.shape not in (predictions.shape, predictions.shape[:1]):
        need = f"f{list(predictions.shape[:1])}, or f{list(predictions.shape)}"
        yield Problem("`weight` does not match the examples.", describe(weight), need, "weight=None")
