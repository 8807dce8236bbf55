"""Products and sums whose bits depend on the numbers alone.

    out = tree_j chain_{k in block j}

N terms are a power of two of blocks, the least for which no block has more than 256 terms; their lengths differ by one
at most. The terms of a block are summed in order. A tree joins neighbouring blocks, then neighbouring sums. So no bit
depends on other rows or columns, on threads, on the instruction set or on the implementation. Two halves of more than
128 terms each add up to the whole. Up to 256 terms, zeros after the last term change no bit.
"""

from funcrec.kernels import library
from funcrec.kernels.choice import operation
from funcrec.kernels.tracked import any_tracked
from torch import Tensor


def invariant_bmm(a: Tensor, b: Tensor, *, implementation: str | None = None) -> Tensor:
    """Return a b, f32|f64[S, M, N], whose bits depend on each row of `a` and column of `b` alone.

    Terms are summed in blocks of at most 256 in order, acc = fma(a, b, acc) from acc = 0; a tree joins neighbouring
    blocks, then neighbouring sums. So they depend on no other row, no thread, no instruction set and no implementation.
    """
    return _result("invariant_bmm", implementation, a, b)


def invariant_sum(x: Tensor, *, implementation: str | None = None) -> Tensor:
    """Return the sums of f32|f64[P, N, Q] over N, f[P, Q], in the order of `invariant_bmm`: acc + x from acc = 0."""
    return _result("invariant_sum", implementation, x)


def _result(name: str, implementation: str | None, *tensors: Tensor) -> Tensor:
    if any_tracked(tensors):
        raise TypeError(
            f"funcrec.kernels.{name}: the operation has no derivative.\n  got   a tensor that grad or jvp follows\n"
            "  need  plain tensors\n  try   fr.invariant around the whole function, with its derivative"
        )
    call = operation(name, implementation, *tensors)
    try:
        return call(*tensors)
    except ValueError:  # a compiled operator tells all that does not fit in one way
        if call is library.operator("cpp", name):
            library.function("cpp", name)(*tensors)
        raise
