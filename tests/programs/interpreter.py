"""Triton's interpreter on the CPU, in a tenth of its processor time for kernels that reduce.

The interpreter combines the elements of a reduction one by one, each call of a device function prepares triton's
language again, and each number's dtype is found in a new dictionary. Here a reduction combines halves, as a device
does, a launch prepares the language once, and dtypes are kept.
"""

import contextlib

import numpy as np
import pytest


def reduce_by_halves(self, given: tuple) -> list:
    """Return the reductions of tensors over one axis, or over all elements.

    Each step combines the first half with the second half, so n elements, a power of two, take log₂ n steps.
    """
    whole, shape = self.axis is None, given[0].handle.data.shape
    parts = [x.handle.data.reshape(-1) if whole else np.moveaxis(x.handle.data, self.axis, 0) for x in given]
    kinds = [x.dtype for x in parts]
    while (n := len(parts[0])) > 1:
        halves = [x[: n // 2] for x in parts], [x[n // 2 :] for x in parts]
        made = self.combine_fn.fn(*(self.to_tensor(x, y.dtype) for half in halves for x, y in zip(half, given)))
        made = made if isinstance(made, tuple) else (made,)
        parts = [x.handle.data.astype(kind) for x, kind in zip(made, kinds, strict=True)]
    out = [x[0] for x in parts]
    if self.keep_dims:
        out = [x.reshape([1] * len(shape)) if whole else np.expand_dims(x, self.axis) for x in out]
    return [self.to_tensor(x, y.dtype) for x, y in zip(out, given, strict=True)]


def call_prepared(self, *args, **kwargs):
    """Call a device function. The launch of its kernel has prepared the language for all functions."""
    return self.rewrite()(*args, **kwargs)


@contextlib.contextmanager
def hastened():
    """Return a context in which the interpreter is fast."""
    from triton.runtime import interpreter

    dtypes, find = {}, interpreter._get_np_dtype

    def kept(dtype):
        name = dtype.scalar.name
        return dtypes[name] if name in dtypes else dtypes.setdefault(name, find(dtype.scalar))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.ReduceOps, "generic_reduce", reduce_by_halves)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call_prepared)
        patch.setattr(interpreter, "_get_np_dtype", kept)
        yield
