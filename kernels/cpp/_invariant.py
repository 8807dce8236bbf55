"""Products and sums whose bits do not depend on the batch, in C++ (csrc/invariant.h)."""

from funcrec.kernels.cpp._native import DTYPES, REALS, call, check, empty, fail
from torch import Tensor


def invariant_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return a b, f[S, M, N]. Either matrix may be stored by rows or by columns."""
    a, b = (x if is_matrix(x) else x.contiguous() for x in (a, b))
    check(a, 3, REALS), check(b, 3, REALS)
    if a.dtype != b.dtype or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        got = f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
        fail(
            "invariant_bmm", "the operands do not match.", got, "f[S, M, K] and f[S, K, N] of one dtype", "x.to(dtype)"
        )
    stack, rows, depth = a.shape
    out = empty((stack, rows, b.shape[2]), a.dtype)
    if out.numel():
        call(
            "invariant_bmm", [DTYPES[a.dtype], stack, rows, b.shape[2], depth, *operand(a), *operand(b), out.data_ptr()]
        )
    return out


def invariant_sum(x: Tensor) -> Tensor:
    """Return the sums over the middle dimension of f[P, N, Q], f[P, Q]."""
    x = x.contiguous()
    at = check(x, 3, REALS)
    out = empty((x.shape[0], x.shape[2]), x.dtype)
    if out.numel():
        call("invariant_sum", [DTYPES[x.dtype], *x.shape, at, out.data_ptr()])
    return out


def is_matrix(x: Tensor) -> bool:
    """Return whether the kernel can read matrices [S, R, C] in place: their rows or their columns are contiguous."""
    if x.dim() != 3 or x.stride(0) < 0:
        return False
    step, stride = x.stride(1), x.stride(2)
    return (stride == 1 and step >= x.shape[2]) or (step == 1 and stride >= x.shape[1])


def operand(x: Tensor) -> tuple[int, int, int, bool]:
    """Return the pointer, the step between matrices, the stride between rows or columns, and whether it is columns."""
    turned = not (x.stride(2) == 1 and x.stride(1) >= x.shape[2])
    return x.data_ptr(), x.stride(0), x.stride(2 if turned else 1), turned
