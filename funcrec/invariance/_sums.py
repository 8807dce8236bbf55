"""torch's products and sums by the two operations whose order is fixed: `invariant_bmm` and `invariant_sum`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode as _recorder

from funcrec.kernels import library, ops

SHORT = 32  # the most terms of a sum that a program has as single additions


def ordered(name: str, *xs: Tensor) -> Tensor:
    """Return the operation's result. It runs below autograd, and does not ask whether its operands are tracked."""
    choice = ops.chosen(None, xs[0].device)
    call = library.operator(choice, name)
    if call is None or xs[0].is_cuda:  # on CUDA, torch's scatter_add has no order
        raise NotImplementedError(
            f"funcrec.invariant: implementation {choice!r} has no products of a fixed order.\n  got   tensors on "
            f"{xs[0].device}\n  need  'cpp' or 'reference'\n  try   .cpu()"
        )
    return call(*xs)


def wide(x: Tensor) -> Tensor:
    """Return floats in the dtype in which sums run: f32 for 16-bit floats."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def bmm(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_floating_point():
        return torch.bmm(a, b)  # whole numbers have one sum in any order
    out = ordered("invariant_bmm", wide(a), wide(b))
    return out if out.dtype == a.dtype else out.to(a.dtype)


def mm(a: Tensor, b: Tensor) -> Tensor:
    return bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


def mv(a: Tensor, x: Tensor) -> Tensor:
    return mm(a, x.unsqueeze(1)).squeeze(1)


def dot(x: Tensor, y: Tensor) -> Tensor:
    return mm(x.unsqueeze(0), y.unsqueeze(1)).reshape(())


def sum_of(
    x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the sums over `dims` (None and () for all), in the order of the elements over these dims."""
    if not (dtype or x.dtype).is_floating_point:
        return torch.sum(x, list(dims), keepdim, dtype=dtype) if dims else torch.sum(x, dtype=dtype)
    dtype = dtype or x.dtype
    over = sorted({d % max(x.dim(), 1) for d in dims}) if dims else list(range(x.dim()))
    x = wide(x if x.dtype.is_floating_point else x.to(dtype))
    x = x.double() if dtype == torch.float64 else x
    if not over or not x.dim():
        return x.to(dtype, copy=True)
    kept, size = [d for d in range(x.dim()) if d not in over], lambda dims: math.prod(x.shape[d] for d in dims)
    shape = [1 if d in over else n for d, n in enumerate(x.shape) if keepdim or d not in over]
    first, last = over[0], over[-1]
    if over == list(range(first, last + 1)):  # neighbours: the operation reads the memory as it is
        cut = size(range(first)), size(over), size(range(last + 1, x.dim()))
        return of_middle(x.reshape(cut)).reshape(shape).to(dtype)
    moved = x.permute(*kept, *over).reshape(size(kept), size(over), 1)
    return of_middle(moved).reshape(shape).to(dtype)


def of_middle(x: Tensor) -> Tensor:
    """Return the sums of f[P, N, Q] over N. A program that is being recorded has few terms as a chain of its own.

    A compiler fuses the chain with what makes the terms and what reads the sum. acc begins at 0, as -0 shows.
    """
    terms = x.shape[1]
    if not (_recorder() and isinstance(terms, int) and 0 < terms <= SHORT):
        return ordered("invariant_sum", x)
    acc = x.select(1, 0) + 0.0
    for k in range(1, terms):
        acc = acc + x.select(1, k)
    return acc


def sum_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return sum_of(x, dtype=dtype)


def mean_of(
    x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dtype = dtype or x.dtype
    x = wide(x if x.is_floating_point() else x.to(dtype))
    total = sum_of(x, dims, keepdim, dtype=torch.float64 if dtype == torch.float64 else None)
    over = dims or range(x.dim())
    return (total / math.prod(x.shape[d] for d in over if x.dim())).to(dtype)


def mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return mean_of(x, dtype=dtype)
