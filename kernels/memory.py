"""Memory for tables on the CPU, in pages of 2 MiB if the system grants them.

A lookup reads rows far apart. With pages of 4 KiB nearly each row is also a miss of the address caches (TLB), which
costs more than the row itself (two to four times as much on a virtual machine).

Large tables are mapped from the system, not taken from the allocator. Memory that the allocator reuses keeps the small
pages of its last owner. It may also begin anywhere, so that a table loses the large page at either end.
"""

import contextlib
import ctypes
import mmap
import sys
import weakref

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes
MIN_MAPPED = HUGE_PAGE
_all_mapped: "weakref.WeakValueDictionary[int, mmap.mmap]" = weakref.WeakValueDictionary()


def empty_table(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """Return torch.empty, in huge pages if the tensor is large, on the CPU and on Linux.

    The system grants a page when it is first written.
    """
    like = torch.empty(0, dtype=dtype, device=device)
    size = dtype.itemsize
    for n in shape:
        size *= n
    if type(like) is not Tensor or like.device.type != "cpu" or sys.platform != "linux" or size < MIN_MAPPED:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(_mapped(size), dtype=dtype).view(shape)


def full_table(shape: tuple[int, ...], value: float, *, dtype: torch.dtype, device=None) -> Tensor:
    """Return torch.full in memory from `empty_table`."""
    return empty_table(shape, dtype=dtype, device=device).fill_(value)


def is_mapped(address: int) -> bool:
    """Whether a table from this module begins at the address."""
    return address in _all_mapped


def _mapped(size: int) -> memoryview:
    """Map `size` bytes from a multiple of HUGE_PAGE on; the last page is huge if it is at least half full."""
    pages = (size + HUGE_PAGE // 2) // HUGE_PAGE
    memory = mmap.mmap(-1, max(size, pages * HUGE_PAGE) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    begin = -address % HUGE_PAGE
    _all_mapped[address + begin] = memory
    with contextlib.suppress(AttributeError, OSError):  # only advice: a system without huge pages refuses
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[begin : begin + size]
