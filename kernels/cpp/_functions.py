"""Elementwise functions of exact operations in one pass, in C++ (csrc/functions.h)."""

import torch
from funcrec.kernels.cpp._native import DTYPES, REALS, call, check, fail
from funcrec.kernels.invariant import FUNCTIONS
from torch import Tensor

NUMBERS = {name: number for number, name in enumerate(FUNCTIONS)}


def invariant_function(name: str, x: Tensor) -> Tensor:
    """Return the function of FUNCTIONS of each number of x, f32|f64[...], with the strides that torch's own gives.

    The bits are those of the composition of exact operations in `funcrec.invariance`. A NaN may be another NaN.
    """
    number = NUMBERS.get(name)
    if number is None:
        fail("invariant_function", "the function is unknown.", repr(name), f"one of {[*NUMBERS]}", "'exp'")
    if not isinstance(x, Tensor):
        what = "the argument is not a tensor."
        fail("invariant_function", what, type(x).__name__, "a tensor of f32 or f64", "torch.tensor(x)", TypeError)
    at, out = check(x, x.dim(), REALS), torch.empty_like(x)
    to = out.data_ptr()
    if out.stride() != x.stride():  # numbers that do not lie end to end are copied, and replaced in the copy
        at = out.copy_(x).data_ptr()
    if to:
        call("invariant_function", [number, DTYPES[x.dtype], x.numel(), at, to])
    return out
