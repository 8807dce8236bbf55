"""Memory for tables on the CPU: in pages of 2 MiB, where the system gives them.

A lookup reads rows far apart. With pages of 4 KiB nearly each is also a miss of the address caches, which costs more than the
row itself (two to four times as much on a virtual machine).
"""

import ctypes
import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes
MADV_HUGEPAGE = 14


def empty_table(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """torch.empty, of huge pages when it is large, on the CPU and on Linux; pages are given when they are first written."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if type(out) is Tensor and out.device.type == "cpu" and sys.platform == "linux":
        start = -(-out.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        size = (out.data_ptr() + out.nbytes) // HUGE_PAGE * HUGE_PAGE - start
        if size > 0:
            _madvise()(start, size, MADV_HUGEPAGE)  # advice: a system without huge pages says no, and all is as before
    return out


def full_table(shape: tuple[int, ...], value: float, *, dtype: torch.dtype, device=None) -> Tensor:
    """torch.full in such memory."""
    return empty_table(shape, dtype=dtype, device=device).fill_(value)


@functools.cache
def _madvise() -> Callable:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
