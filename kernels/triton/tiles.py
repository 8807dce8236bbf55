"""Functions that the optimizers' rules call, on a tile of rows f[rows, columns] or before the launch."""

import math

import torch
import triton
import triton.language as tl
from funcrec.kernels.triton.device import divide, sum_columns
from torch import Tensor


@triton.jit
def row_sum(x, column, DIM: tl.constexpr):
    """Return the sums of the first DIM columns, f[rows, 1]."""
    return sum_columns(tl.where((column < DIM)[None, :], x, 0))[:, None]


@triton.jit
def divide_by(x, NUMBER: tl.constexpr):
    """Return x / NUMBER, rounded to nearest."""
    return divide(x, tl.full(x.shape, NUMBER, x.dtype))


@triton.jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


def correction(b: float, t: Tensor) -> Tensor:
    """Return 1 - bᵗ without cancellation."""
    return -torch.expm1(t * math.log(b)) if b > 0 else torch.ones_like(t)
