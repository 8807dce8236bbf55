"""Scaled dot-product attention, with its transpose, by products of a fixed order.

    out = p v,   p = softmax(s),   s = q kᵀ c + mask
    d_v = pᵀ d,   d_s = p (d vᵀ - Σ d out),   d_q = c d_s k,   d_k = c d_sᵀ q

Shapes: S stacked batches, H heads of queries, G heads of keys, L queries, K keys, E dim.
"""

import math
from typing import Any

import torch
from torch import Tensor

from funcrec.invariance import _functions, _sums
from funcrec.invariance._functions import widened

exp, log = widened(_functions.exp), widened(_functions.log)


def stacked(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of matrices [S, H, ...]."""
    shape = (*a.shape[:2], a.shape[2], b.shape[3])
    return _sums.bmm(a.flatten(0, 1), b.flatten(0, 1)).reshape(shape)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Return keys or values [S, G, ...] for each head of queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def scores(q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None) -> tuple[Tensor, float]:
    """Return s, f[S, H, L, K], and c."""
    c = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    s = stacked(q, repeated(k, q.shape[1]).mT) * c
    if is_causal:
        mask = torch.ones(s.shape[2:], dtype=torch.bool, device=s.device).tril()
    if mask is None:
        return s, c
    return (torch.where(mask, s, -math.inf) if mask.dtype == torch.bool else s + mask), c


def attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, is_causal: bool = False, *, attn_mask: Any = None,
    scale: Any = None,
) -> Any:  # fmt: skip
    """Return the outputs f[S, H, L, E], and the logarithms of the softmax's sums f[S, H, L]."""
    if dropout:
        return NotImplemented
    dtype = q.dtype
    q, k, v = map(_sums.wide, (q, k, v))
    s, _ = scores(q, k, is_causal, attn_mask, scale)
    most = torch.amax(s, -1, keepdim=True) if s.shape[-1] else s.new_zeros((*s.shape[:-1], 1))
    most = torch.where(most == -math.inf, 0.0, most)  # a query without keys
    p = exp(s - most)
    total = _sums.sum_of(p, [-1], True)
    weights = torch.where(total == 0, 0.0, p / total)
    out = stacked(weights, repeated(v, q.shape[1])).to(dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), (most + log(total)).squeeze(-1)


def attention_backward(
    d: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, dropout: float, is_causal: bool, *,
    attn_mask: Any = None, scale: Any = None,
) -> Any:  # fmt: skip
    """Return the cotangents of queries, keys and values."""
    if dropout:
        return NotImplemented
    dtype, groups = q.dtype, k.shape[1]
    d, q, k, v, out = map(_sums.wide, (d, q, k, v, out))
    s, c = scores(q, k, is_causal, attn_mask, scale)
    p = torch.where(s == -math.inf, 0.0, exp(s - logs.unsqueeze(-1)))
    own = _sums.sum_of(d * out, [-1], True)
    d_s = p * (stacked(d, repeated(v, q.shape[1]).mT) - own) * c
    d_k, d_v = stacked(d_s.mT, q), stacked(p.mT, d)
    if groups != q.shape[1]:
        d_k, d_v = (_sums.sum_of(x.unflatten(1, (groups, -1)), [2]) for x in (d_k, d_v))
    return tuple(x.to(dtype) for x in (stacked(d_s, repeated(k, q.shape[1])), d_k, d_v))
