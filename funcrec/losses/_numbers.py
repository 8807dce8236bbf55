"""Losses of predicted numbers.

    mse: (p - y)²        huber: ½ d² where d = |p - y| ≤ δ, else δ (d - ½ δ)

Shapes: B batch.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from funcrec.core import PositiveMagnitude, Scalar, check, or_nan, typed
from funcrec.losses._mean import Labels, Numbers, Reduction, Weights, can_be_read, reduce, weight_problems
from funcrec.tables import blank_padding, label_value_problems


@typed
def mse(predictions: Numbers, label: Labels, weight: Weights = None, *, reduction: Reduction = "mean") -> Tensor:
    """Return the mean of (prediction - label)².

    Args:
      predictions: f[B].
      label: [B], finite, of any real dtype.
      weight: f[B] >= 0, or None. An example of weight 0 is padding and is not read, unless the weights are
        differentiated (`weighted_mean`).
      reduction: "mean" for `weighted_mean`, f[]; "none" for the loss of each example, f[B], 0 for padding.

    Raises:
      ValueError: values can be read, and a label is not finite.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.losses.mse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
      tensor(2.)

    Source: torch.nn.functional.mse_loss.
    """
    return _of_errors("funcrec.losses.mse", torch.square, predictions, label, weight, reduction)


@typed
def huber(
    predictions: Numbers,
    label: Labels,
    weight: Weights = None,
    *,
    delta: PositiveMagnitude | Scalar = 1.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the mean of a loss that is a square up to distance δ and a line beyond. So the gradient of a distant label
    is at most that of a label at distance δ.

    Args:
      predictions, label, weight, reduction: as in `mse`.
      delta: δ > 0, a number or f[]. The loss is NaN for a tensor that is not > 0.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.losses.huber(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 5.0]))
      tensor(2.5000)

    Source: Huber, "Robust estimation of a location parameter" (1964); torch.nn.functional.huber_loss.
    """
    delta = or_nan(delta)
    bent = lambda e: torch.where(e.abs() <= delta, e.square() / 2, delta * (e.abs() - delta / 2))
    return _of_errors("funcrec.losses.huber", bent, predictions, label, weight, reduction)


def _of_errors(call: str, loss: Callable, predictions, label, weight, reduction) -> Tensor:
    check(call, weight_problems(weight))
    any_number = {"weight": weight, "labels": (-math.inf, math.inf)}
    check(call, label_value_problems(label, "label", **any_number) if can_be_read(label, weight) else ())
    p, y = blank_padding(predictions, weight), blank_padding(label, weight)
    return reduce(loss(p - y.to(p.dtype)), weight, reduction)
