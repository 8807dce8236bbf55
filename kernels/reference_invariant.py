"""Products and sums whose bits do not depend on the batch, in plain torch.

    out = tree_j chain_{k in block j},    N terms are J blocks, the least power of two of at most CHAIN terms each

Block j has the terms from ⌊j N / J⌋ on, in order; the tree joins neighbours. So 2 n terms are the sum of two halves, if
n > CHAIN / 2.

Shapes: S stacked matrices, M rows, K terms, N columns; P outer, Q inner.
"""

import itertools

import torch
import torch.nn.functional as F
from funcrec.kernels.invariant import num_blocks
from torch import Tensor


def invariant_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return a b, f[S, M, N], in chains acc = fma(a, b, acc) from acc = 0."""
    a, b = in_blocks(a, 2), in_blocks(b, 1)  # [S, M, J, longest], [S, J, longest, N]; a term 0 · 0 changes no sum
    acc = a.new_zeros((*a.shape[:3], b.shape[3]))  # [S, M, J, N]
    for k in range(a.shape[3]):
        acc = fused(a[..., k, None], b[:, None, :, k], acc)
    return joined(acc, 2)


def invariant_sum(x: Tensor) -> Tensor:
    """Return the sums over the middle dimension of f[P, N, Q], f[P, Q], in chains acc + x from acc = 0."""
    x = in_blocks(x, 1)  # [P, J, longest, Q]
    acc = x.new_zeros((x.shape[0], x.shape[1], x.shape[3]))
    for k in range(x.shape[2]):
        acc = acc + x[:, :, k]
    return joined(acc, 1)


def in_blocks(x: Tensor, dim: int) -> Tensor:
    """Return x with `dim` cut to its J blocks, [J, terms of the longest]; a shorter block has a zero at its end."""
    size, count = x.shape[dim], num_blocks(x.shape[dim])
    first = [j * size // count for j in range(count + 1)]
    spare = lambda begin, end: (*[0] * (2 * (x.dim() - 1 - dim)), 0, -(-size // count) - (end - begin))
    return torch.stack([F.pad(x.narrow(dim, i, j - i), spare(i, j)) for i, j in itertools.pairwise(first)], dim)


def joined(x: Tensor, dim: int) -> Tensor:
    """Return the tree over the blocks of `dim`: sums of neighbours, then of these."""
    while x.shape[dim] > 1:
        left, right = x.unflatten(dim, (-1, 2)).unbind(dim + 1)
        x = left + right
    return x.squeeze(dim)


def fused(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return x y + z with one rounding.

    The product of two f32 is exact in f64. The sum in f64 is rounded to odd, so that the rounding to f32 is the only
    one. In f64, the product and the sum are exact pairs, and the small parts are rounded to odd.

    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums" (2008).
    """
    if x.dtype == torch.float64:
        return fused_double(x, y, z)
    return to_odd(x.double() * y.double(), z.double().expand(torch.broadcast_shapes(x.shape, y.shape, z.shape))).to(
        x.dtype
    )


def fused_double(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    high, low = exact_product(x, y)
    sum_low, rest_low = exact_sum(z, low)
    sum_high, rest_high = exact_sum(high, sum_low)
    return torch.where(torch.isfinite(high), sum_high + to_odd(rest_low, rest_high), x * y + z)


def exact_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return (s, e) with s = x + y rounded and s + e = x + y."""
    s = x + y
    t = s - x
    return s, (x - (s - t)) + (y - t)


def exact_product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return (p, e) with p = x y rounded and p + e = x y, for f64 far from overflow and underflow."""
    p = x * y
    (a, b), (c, d) = halves(x), halves(y)
    return p, ((a * c - p) + a * d + b * c) + b * d


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    t = x * 134217729.0
    high = t - (t - x)
    return high, x - high


def to_odd(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y of f64, rounded to odd: the neighbour whose last bit is 1, if the sum is between two numbers."""
    s, e = exact_sum(x, y)
    bits = s.view(torch.int64)
    is_even, is_up = (bits & 1) == 0, (e > 0) == (s > 0)
    moved = torch.where(is_up, bits + 1, bits - 1).view(torch.float64)
    return torch.where((e != 0) & is_even & torch.isfinite(s) & torch.isfinite(e), moved, s)
