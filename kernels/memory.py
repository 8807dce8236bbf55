"""Memory on the CPU: for tables, in pages of 2 MiB if the system grants them; and what the allocator keeps.

A lookup reads rows far apart. With pages of 4 KiB nearly each read of a row also misses the address caches (TLB). A
miss costs more than the row itself (two to four times as much on a virtual machine).

`empty_table` maps memory for large tables from the system, and does not take it from the allocator. Memory that the
allocator reuses keeps the small pages of its last owner. Such memory may also begin anywhere, so that a table has no
large page at either end.
"""

import contextlib
import ctypes
import mmap
import sys
import weakref
from typing import Any

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes
MIN_MAPPED = HUGE_PAGE
LARGEST_KEPT = (32 << 20) - (64 << 10)  # bytes of a block for which glibc adapts; it maps larger ones each time
_all_mapped: "weakref.WeakValueDictionary[int, mmap.mmap]" = weakref.WeakValueDictionary()


def empty_table(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """Return an uninitialised tensor of this shape, in huge pages for a large tensor on the CPU and on Linux.

    The system grants a page at the first write to that page.
    """
    like = torch.empty(0, dtype=dtype, device=device)
    size = dtype.itemsize
    for n in shape:
        size *= n
    if type(like) is not Tensor or like.device.type != "cpu" or sys.platform != "linux" or size < MIN_MAPPED:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(_mapped(size), dtype=dtype).view(shape)


def full_table(shape: tuple[int, ...], value: float, *, dtype: torch.dtype, device: Any = None) -> Tensor:
    """Return a tensor of this shape, filled with `value`, in memory from `empty_table`."""
    return empty_table(shape, dtype=dtype, device=device).fill_(value)


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB that are freed at the end of its heap.

    glibc keeps twice the largest block that was mapped and freed, of at most 32 MiB. So this allocates such a block, to
    which nobody writes, and frees it. Without it, each training step gives pages back to the system and faults them in
    again, which takes 3 to 10 % of a DLRM's step. A program that sets MALLOC_* has glibc's fixed limits instead.

    A storage is memory of the CPU whatever torch's default device and modes are, and no setting of torch fills it.

    The price: freed memory between living blocks stays with the process, as it does after any program that frees such a
    block. `ctypes.CDLL(None).malloc_trim(0)` gives it back.

    Source: glibc's manual, "Malloc Tunable Parameters" (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD).
    """
    torch.UntypedStorage(LARGEST_KEPT)


def is_mapped(address: int) -> bool:
    """Return whether a table from this module begins at the address."""
    return address in _all_mapped


def _mapped(size: int) -> memoryview:
    """Return `size` bytes of mapped memory that begin at a multiple of HUGE_PAGE.

    The last page is huge if it is at least half full.
    """
    pages = (size + HUGE_PAGE // 2) // HUGE_PAGE
    memory = mmap.mmap(-1, max(size, pages * HUGE_PAGE) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    begin = -address % HUGE_PAGE
    _all_mapped[address + begin] = memory
    with contextlib.suppress(AttributeError, OSError):  # A system without huge pages refuses the advice.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[begin : begin + size]
