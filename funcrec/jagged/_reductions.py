"""Reductions of the values of each bag, without a table.

    out[b] = reduce(values[offsets[b]], ..., values[offsets[b + 1] - 1])

No reduction reads the padding. Sums of floats run on the kernel of lookups, and extrema on their own kernel. All
transforms work with both, and with torch's operations, which the other reductions use.
Shapes: B bags, N capacity.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from torch import Tensor

from funcrec.core import Form, Problem, check, describe, replace, typed
from funcrec.jagged._jagged import JaggedTensor
from funcrec.jagged._primitives import bag_extrema, bag_spread, bag_sums

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@typed
def bag_reduce(
    bags: Annotated[JaggedTensor, Form("[N, ...]", weights=False)],
    reduce: Literal["sum", "mean", "max", "min", "prod", "logsumexp"] = "sum",
) -> Tensor:
    """Return the reduction of the values [N, ...] of each bag -> [B, ...].

    Args:
      bags: bags without weights; multiply the values by the weights first.
      reduce: an empty bag has sum and mean 0, prod 1, logsumexp -inf, max the least and min the greatest number of the
        dtype (infinite for floats). If several values are the greatest or the least, the first of them gets the whole
        derivative.

    Returns:
      the dtype of the values; i64 for a sum or a product of integers. Floats of 16 bits are computed in f32.

    Raises:
      TypeError: bools, floats of 8 bits, unsigned integers of 16 bits or more, mean or logsumexp of integers, and bags
        with weights.

    Law: bag_reduce(bags, "sum")[b] = bags[b].values.sum(0), and so on, whatever the padding holds.

    Cost: one pass over the values for sum, mean, max and min; more for the others, and log2 N for prod.

    Example:
      >>> import funcrec as fr
      >>> bags = fr.JaggedTensor.from_lists([[1.0, 4.0], [], [3.0]])
      >>> fr.bag_reduce(bags), fr.bag_reduce(bags, "mean"), fr.bag_reduce(bags, "prod")
      (tensor([5., 0., 3.]), tensor([2.5000, 0.0000, 3.0000]), tensor([4., 1., 3.]))

    Source: torch.segment_reduce; jax.ops.segment_sum and its relatives.
    """
    call, values = "funcrec.bag_reduce", bags.values
    check(call, value_problems(values, reduce in ("mean", "logsumexp")))
    wide = wide_of(values, reduce)
    if reduce in ("sum", "mean"):
        total = added(values.to(wide), bags)
        counts = column(bags.lengths.clamp(min=1), total)
        return (total / counts.to(wide) if reduce == "mean" else total).to(result_of(values, reduce))
    if reduce == "prod":
        return product(values.to(wide), bags).to(result_of(values, reduce))
    if reduce == "logsumexp":
        return logarithm_of_sum(values.to(wide), bags).to(values.dtype)
    return bag_extrema(values, bags.offsets, reduce == "max")


@typed
def bag_softmax(bags: Annotated[JaggedTensor, Form("f16+[N, ...]", weights=False)]) -> JaggedTensor:
    """Return bags in which each value x is e^x, divided by the sum of e^x over its bag. Padding is 0.

    bags: f[N, ...] without weights, each trailing position apart. Floats of 16 bits are computed in f32.

    Law: the result does not change if a number is added to all values of a bag.

    Example:
      >>> import funcrec as fr
      >>> fr.bag_softmax(fr.JaggedTensor.from_lists([[0.0, 0.0], [], [5.0]])).values
      tensor([0.5000, 0.5000, 1.0000])

    Source: FBGEMM's jagged_softmax; jraph's segment_softmax.
    """
    x = bags.values.to(wide_of(bags.values, "softmax"))
    raised = exponentials(x, shifts(x, bags), bags)
    total = bag_sums(raised, bags.offsets)
    parts = raised * bag_spread(1 / total, bags.offsets, bags.capacity)
    return replace(bags, values=parts.to(bags.values.dtype))


def wide_of(values: Tensor, reduce: str) -> torch.dtype:
    if values.is_floating_point() and values.itemsize < 4:
        return torch.float32
    return torch.int64 if values.dtype in INTEGERS and reduce in ("sum", "prod") else values.dtype


def result_of(values: Tensor, reduce: str) -> torch.dtype:
    return torch.int64 if values.dtype in INTEGERS and reduce in ("sum", "prod") else values.dtype


def column(x: Tensor, like: Tensor) -> Tensor:
    """Return x [N] as [N, 1, ...], to be broadcast over the trailing dimensions of `like`."""
    return x.view(-1, *[1] * (like.dim() - 1))


def masked(x: Tensor, bags: JaggedTensor, fill: float | int) -> Tensor:
    """Return x with `fill` in the padding."""
    inside = torch.arange(bags.capacity, device=x.device) < bags.offsets[-1]
    return torch.where(column(inside, x), x, torch.full((), fill, dtype=x.dtype, device=x.device))


def added(x: Tensor, bags: JaggedTensor) -> Tensor:
    """Return the sum of each bag [B, ...]. torch adds integers; the last row of its buffer takes the padding."""
    if x.is_floating_point():
        return bag_sums(x, bags.offsets)
    zeros = torch.zeros((bags.num_bags + 1, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return zeros.index_add(0, bags.bag_ids(), masked(x, bags, 0))[: bags.num_bags]


def shifts(x: Tensor, bags: JaggedTensor) -> Tensor:
    """Return the shift of exponents: the greatest value of each bag [B, ...], or 0 where that is not finite."""
    greatest = bag_extrema(x.detach(), bags.offsets, True)
    return torch.where(greatest.isfinite(), greatest, 0)


def exponentials(x: Tensor, shift: Tensor, bags: JaggedTensor) -> Tensor:
    """Return e^(x - shift of the bag). It is 1 in the padding, whatever that holds, so that no derivative is NaN
    there."""
    return (masked(x, bags, 0) - bag_spread(shift, bags.offsets, bags.capacity)).exp()


def logarithm_of_sum(x: Tensor, bags: JaggedTensor) -> Tensor:
    """Return log Σ e^x of each bag; -inf, which has no derivative, where the sum is 0."""
    shift = shifts(x, bags)
    total = bag_sums(exponentials(x, shift, bags), bags.offsets)
    is_zero = total == 0
    return torch.where(is_zero, -torch.inf, torch.where(is_zero, 1, total).log() + shift)


def product(x: Tensor, bags: JaggedTensor) -> Tensor:
    """Return the product of each bag, which is the last of the bag's prefix products. Doubling computes these. No
    division by a value occurs, so zeros have a derivative."""
    bag, x, step = bags.bag_ids(), masked(x, bags, 1), 1
    while step < x.shape[0]:
        is_same = column(bag[step:] == bag[:-step], x)
        x = torch.cat([x[:step], torch.where(is_same, x[step:] * x[:-step], x[step:])])
        step *= 2
    one = torch.ones((1, *x.shape[1:]), dtype=x.dtype, device=x.device)
    last = torch.where(bags.lengths > 0, bags.offsets[1:].long() - 1, x.shape[0])
    return torch.cat([x, one]).index_select(0, last)


# -- validators --------------------------------------------------------------------------------------------------


def value_problems(values: Tensor, of_floats: bool) -> Iterator[Problem]:
    need = "floats" if of_floats else "floats or integers"
    is_number = values.dtype in INTEGERS or (values.is_floating_point() and values.itemsize > 1)
    if not is_number or (of_floats and not values.is_floating_point()):
        hint = "bags of values.float()" if of_floats else "bags of values.long()"
        yield Problem(f"`bags.values` are not {need}.", describe(values), f"[N, ...], {need}", hint, TypeError)
