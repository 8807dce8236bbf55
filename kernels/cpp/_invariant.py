"""Products and sums whose bits do not depend on the batch, in C++ (csrc/invariant.h)."""

from funcrec.kernels.cpp._native import DTYPES, REALS, call, check, empty, fail
from torch import Tensor


def invariant_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return a b, f[S, M, N]. Either matrix may be stored by rows or by columns."""
    a, shape, *left = operand(a)
    b, (stack, inner, columns), *right = operand(b)
    dtype = a.dtype
    if dtype != b.dtype or shape[0] != stack or shape[2] != inner:
        got = f"{dtype}{list(shape)} and {b.dtype}{[stack, inner, columns]}"
        fail(
            "invariant_bmm", "the operands do not match.", got, "f[S, M, K] and f[S, K, N] of one dtype", "x.to(dtype)"
        )
    rows = shape[1]
    out = empty((stack, rows, columns), dtype)
    if stack and rows and columns:
        call("invariant_bmm", [DTYPES[dtype], stack, rows, columns, inner, *left, *right, out.data_ptr()])
    return out


def invariant_sum(x: Tensor) -> Tensor:
    """Return the sums over the middle dimension of f[P, N, Q], f[P, Q]."""
    x = x.contiguous()
    at = check(x, 3, REALS)
    out = empty((x.shape[0], x.shape[2]), x.dtype)
    if out.numel():
        call("invariant_sum", [DTYPES[x.dtype], *x.shape, at, out.data_ptr()])
    return out


def operand(x: Tensor) -> tuple[Tensor, tuple[int, ...], int, int, int, bool]:
    """Return matrices [S, R, C] whose rows or columns are contiguous, which the kernel reads in place, and their shape,
    pointer, step between matrices, stride between rows or columns, and whether it is between columns.

    Each attribute of a tensor is read once: that takes longer than a small product.
    """
    at, shape = check(x, 3, REALS), x.shape
    (_, rows, columns), (step, row, column) = shape, x.stride()
    if step >= 0 and column == 1 and row >= columns:
        return x, shape, at, step, row, False
    if step >= 0 and row == 1 and column >= rows:
        return x, shape, at, step, column, True
    x = x.contiguous()
    return x, shape, x.data_ptr(), rows * columns, columns, False
