"""Operators whose calls run no Python: the compiled object registers them with torch's dispatcher (csrc/operators.h).

A package calls its operators by the dispatcher, so Python would take longer around a small product than the product.
"""

import ctypes
import functools

from funcrec.kernels.cpp import _native

NAMES = frozenset(("invariant_bmm", "invariant_sum"))


@functools.cache
def compiled_operators() -> frozenset[str]:
    """Register the operators for the CPU, and return their names.

    Return no names if there is no compiled object for this processor, if it is older, or if torch lacks the functions.
    Then Python's functions are the operators, and the first call says what is missing.
    """
    try:
        register = _native.library().funcrec_operators
        torch_library = _native.torch_library()._handle
    except (RuntimeError, ValueError, OSError, AttributeError):
        return frozenset()
    register.argtypes, register.restype = [ctypes.c_void_p], ctypes.c_int64
    return frozenset() if register(torch_library) else NAMES
