"""Derivatives of functions that are made of pieces. A NaN of the input is in the piece that keeps it, as in torch.

torch's own compositions put a NaN into another piece, where the derivative is finite.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcrec.invariance import _functions
from funcrec.invariance._functions import widened

aten = torch.ops.aten
exp, sigmoid = widened(_functions.exp), widened(_functions.sigmoid)


def elu_backward(d: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor) -> Tensor:
    """Return the cotangent of elu, selu or celu, from their input or their result x."""
    slope = alpha * scale
    bent = d * input_scale * (x + slope) if is_result else d * input_scale * slope * exp(x * input_scale)
    return torch.where(x > 0, d * scale, bent)


def hardswish_backward(d: Tensor, x: Tensor) -> Tensor:
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, d, d * (x / 3 + 0.5)))


def smooth_l1_backward(d: Tensor, x: Tensor, y: Tensor, reduction: int, beta: float) -> Tensor:
    """Return the cotangent of x: a line up to distance beta, and a sign beyond."""
    away, share = x - y, d * (1.0 / max(x.numel(), 1) if reduction == 1 else 1.0)
    return torch.where(away.abs() >= beta, share * torch.sign(away), share * away / beta)


def shrink_backward(d: Tensor, x: Tensor, bound: float) -> Tensor:
    """Return d beyond the bounds. It is 0 at NaN, where torch's vectors have 0 and the last elements d."""
    return torch.where((x < -bound) | (x > bound), d, 0)


def glu_jvp(out: Tensor, x: Tensor, dx: Tensor, dim: int) -> Tensor:
    """Return the tangent of a σ(b), where a and b are the halves of x."""
    (_, b), (da, db) = x.chunk(2, dim), dx.chunk(2, dim)
    gate = sigmoid(b)
    return da * gate + db * (out - out * gate)


def glu_backward_jvp(d_x: Tensor, d: Tensor, x: Tensor, dd: Tensor, dx: Tensor, dim: int) -> Tensor:
    """Return the tangent of d_x = (d σ, d a σ (1 - σ)) along dd and dx, σ = σ(b)."""
    (a, b), (da, db) = x.chunk(2, dim), dx.chunk(2, dim)
    gate = sigmoid(b)
    slope = gate * (1 - gate)
    first = dd * gate + d * (slope * db)
    second = dd * (a * slope) + d * (da * slope + a * (slope * (1 - 2 * gate) * db))
    return torch.cat([first, second], dim)


REPLACED: dict[Any, Callable[..., Tensor]] = {
    aten.elu_backward.default: elu_backward,
    aten.hardswish_backward.default: hardswish_backward,
    aten.smooth_l1_loss_backward.default: smooth_l1_backward,
    **dict.fromkeys((aten.softshrink_backward.default, aten.hardshrink_backward.default), shrink_backward),
    aten.glu_jvp.default: glu_jvp,
    aten.glu_backward_jvp.default: glu_backward_jvp,
}
