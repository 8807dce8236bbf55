"""The weighted mean that every loss ends with, and zeros for the values of padding.

    mean(x, w) = Σ_b w_b x_b / Σ_b w_b          on n ranks: the mean over ranks of Σ_b w_b x_b / (1/n Σ_r Σ_b w_b)

Shapes: B batch.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from torch import Tensor

from funcrec.core import Form, Problem, check, is_by_tree, is_tracked, typed
from funcrec.grad import total_weight
from funcrec.jagged import is_concrete
from funcrec.mesh import bound_names, pmean
from funcrec.tables import blank_padding, holds_somewhere, jump_problems, weight_value_problems

Numbers = Annotated[Tensor, Form("f[B]")]
Labels = Annotated[Tensor, Form("x[B]")]
Weights = Annotated[Tensor, Form("f[B]")] | None
Reduction = Literal["mean", "none"]


@typed
def weighted_mean(values: Numbers, weight: Weights = None) -> Tensor:
    """Return the weighted mean of the values of examples, f[]; 0 if all weights are 0.

    Args:
      values: f[B], a loss of each example.
      weight: f[B] >= 0, or None for the plain mean. A value of weight 0 is not read, unless the weights are
        differentiated. Then the derivative by its weight includes the value, which must be finite.

    Inside `shard_map`, and so in a step on a mesh, the weights are summed over all ranks. Ranks train on the mean of
    their losses. So this mean is the weighted mean over the examples of all ranks, whatever weights each rank has. (In
    a plan with `replicas` the sum is over all groups too.) In micro-batches (`accumulate_grads`) the sum is over all
    micro-batches. Without weights nothing is sent.

    Raises:
      ValueError: a weight is negative or not finite. Or the weights are differentiated, and all are 0, or an example of
        weight 0 has no finite value. If no value can be read (under `jit`, on a GPU), the mean is NaN.

    Law: a weight of 2 counts as the example twice. An example of weight 0 changes neither value nor gradient.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.losses.weighted_mean(torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([3.0, 1.0, 0.0]))
      tensor(1.2500)
    """
    call = "funcrec.losses.weighted_mean"
    check(call, weight_problems(weight))
    if weight is None:
        return values.mean()
    terms, total = terms_and_total(call, values, weight)
    if is_by_tree():  # The mean of a part is a sum of the batch's own terms, so that sums over parts have its bits.
        return (terms / total).sum().to(values.dtype)
    return (terms.sum() / total).to(values.dtype)


def terms_and_total(call: str, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the terms w x of a weighted mean, f[B], and their divisor, f[], which is 1 for padding only."""
    w, total = weights_and_total(weight, torch.promote_types(values.dtype, torch.float32))
    check(call, no_derivative_problems(values, weight, total))
    total = total if is_tracked(weight) else torch.where(total == 0, 1, total)
    return w * blank_padding(values, weight), total


def weights_and_total(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weights f[B] in a dtype, NaN where one is negative or infinite, and the divisor of the local mean,
    f[]: the mean over ranks of the sum of all weights."""
    w = torch.where((weight >= 0) & (weight < torch.inf), weight, torch.nan).to(dtype)
    total, ranks = total_weight(w), bound_names()
    return w, pmean(total, ranks) if ranks else total


def reduce(values: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    """Return values f[B] with 0 for padding, or the weighted mean of the values."""
    if reduction == "mean":
        return weighted_mean(values, weight)
    check("funcrec.losses", jump_problems(weight, 'a loss with reduction="none"'))
    return where_it_jumps(values, weight)


def where_it_jumps(values: Tensor, weight: Tensor | None) -> Tensor:
    """Return values f[B], 0 for padding. Where a weight of 0 is differentiated and cannot be read, the value is NaN."""
    if weight is None or not is_tracked(weight):
        return blank_padding(values, weight)
    return torch.where(weight == 0, torch.nan, values)


def can_be_read(*given: Tensor | None) -> bool:
    """Return whether all given values can be read. They cannot inside a vmap or on a GPU."""
    return all(x is None or is_concrete(x) for x in given)


# -- validators --------------------------------------------------------------------------------------------------


def weight_problems(weight: Tensor | None) -> Iterator[Problem]:
    """Yield a problem if a weight that can be read is negative or not finite."""
    if weight is not None and is_concrete(weight):
        yield from weight_value_problems(weight, "weight")


def no_derivative_problems(values: Tensor, weight: Tensor, total: Tensor) -> Iterator[Problem]:
    """Yield a problem if the weights are differentiated, but the mean has no derivative with respect to them."""
    if not is_tracked(weight):
        return
    got = "a derivative by the weights"
    if holds_somewhere(total == 0):
        hint = '(weight * loss(predictions, label, reduction="none")).sum()'
        yield Problem("all weights are 0, where their mean has no derivative.", got, "a sum of weights > 0", hint)
    elif holds_somewhere((weight == 0) & ~values.isfinite()):
        need, hint = "finite predictions and labels", "weight.detach(), if it is padding; or numbers for it"
        yield Problem("an example of weight 0 has no finite loss.", got, need, hint)
