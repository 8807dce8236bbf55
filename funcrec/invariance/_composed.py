"""Operators that torch composes of others, as these compositions: each part is called directly, not found by the mode.

An eager call of a part by the mode takes more time than the part itself does for few numbers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.invariance import _error_function, _extrema, _functions, _sums
from funcrec.invariance._functions import widened

aten = torch.ops.aten
exp, log, log1p, rsqrt, tanh = (widened(getattr(_functions, n)) for n in ("exp", "log", "log1p", "rsqrt", "tanh"))
erf, amax = widened(_error_function.erf), _extrema.REPLACED[aten.amax.default]


def shifted(x: Tensor, dim: int) -> Tensor:
    """Return x minus its greatest number along the dim, in f32 for 16-bit floats."""
    x = _sums.wide(x.contiguous())
    size: Any = x.shape[dim] if x.dim() else 1
    if not isinstance(size, int):  # of a program for any size
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        size = guard_or_false(size > 0)
    if size:
        return x - amax(x, [dim], True)
    least = x.new_full([1 if d == dim % x.dim() else n for d, n in enumerate(x.shape)], -math.inf)
    return x - amax(torch.cat((x, least), dim), [dim], True)


def softmax(x: Tensor, dim: int, is_wide: bool) -> Tensor:
    terms = exp(shifted(x, dim))
    out = terms / _sums.sum_of(terms, [dim], True)
    return out if is_wide else out.to(x.dtype)


def log_softmax(x: Tensor, dim: int, is_wide: bool) -> Tensor:
    away = shifted(x, dim)
    out = away - log(_sums.sum_of(exp(away), [dim], True))
    return out if is_wide else out.to(x.dtype)


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised numbers, their mean, and one over their deviation."""
    dims, wide = list(range(x.dim() - len(shape), x.dim())), _sums.wide(x.contiguous())
    mean = _sums.mean_of(wide, dims, True)
    apart = wide - mean
    per = rsqrt(_sums.mean_of(apart * apart, dims, True) + eps)
    out = apart * per
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.to(x.dtype), mean.to(x.dtype), per.to(x.dtype)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return x * 0.5 * (erf(x * math.sqrt(0.5)) + 1)
    inner = (x + x * x * x * 0.044715) * (math.sqrt(2) * (2 / math.sqrt(math.pi)) * 0.5)
    return x * 0.5 * (tanh(inner) + 1)


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = x if beta == 1 else x * beta
    bent = log1p(exp(scaled))
    return torch.where(scaled > threshold, x, bent if beta == 1 else bent / beta)


ROUNDED: dict[Any, Callable[..., Tensor]] = {aten.gelu.default: gelu, aten.softplus.default: softplus}
REPLACED: dict[Any, Callable[..., Any]] = {
    aten._softmax.default: softmax,
    aten._log_softmax.default: log_softmax,
    aten.native_layer_norm.default: layer_norm,
}
