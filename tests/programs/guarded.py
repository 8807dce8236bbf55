"""Memory between inaccessible pages: a kernel that reads or writes outside its tensor ends the process.

| no access | ...... tensor | no access |

`at_end`: the tensor ends at an inaccessible page. Without `at_end`, the tensor begins at such a page.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


class Guards:
    """Memory areas of `size` bytes, each between two inaccessible pages. `reset` makes them free again."""

    def __init__(self, rooms: int = 64, size: int = 1 << 20):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        every = size + PAGE
        start = libc.mmap(None, rooms * every + PAGE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        for i in range(rooms + 1):
            assert libc.mprotect(start + i * every, PAGE, 0) == 0
        self.size, self.rooms, self.used, self.at_end = size, [start + i * every + PAGE for i in range(rooms)], 0, True

    def reset(self, at_end: bool) -> None:
        self.used, self.at_end = 0, at_end

    def place(self, x: Tensor) -> Tensor:
        """Return a copy of x in a guarded area. Without a free area, the copy lies elsewhere. Without CPU memory,
        return x
        unchanged."""
        if type(x) is not Tensor or x.device.type != "cpu":
            return x
        if not x.nbytes or x.nbytes > self.size or self.used == len(self.rooms):
            return x.clone()
        where = self.rooms[self.used] + (self.size - x.nbytes if self.at_end else 0)
        self.used += 1
        memory = (ctypes.c_char * x.nbytes).from_address(where)
        return torch.frombuffer(memory, dtype=x.dtype).view(x.shape).copy_(x)


@contextlib.contextmanager
def outputs(guards: Guards) -> Iterator[None]:
    """Guard also the outputs that callers of C++ kernels allocate with torch. The outputs are filled with NaN, or with
    77 in integers."""
    plain = torch.empty, torch.empty_like
    fill = lambda x: x.fill_(torch.nan if x.is_floating_point() else 1 if x.dtype == torch.bool else 77)
    torch.empty = lambda *args, **how: guards.place(fill(plain[0](*args, **how)))
    torch.empty_like = lambda *args, **how: guards.place(fill(plain[1](*args, **how)))
    try:
        yield
    finally:
        torch.empty, torch.empty_like = plain
