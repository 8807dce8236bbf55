"""Compiled programs that pad tensors between two inaccessible pages: a read outside a tensor ends the process.

PYTHONPATH=tests python -m programs.at_page_ends
"""

import ctypes
import mmap

import torch
from torch import Tensor

import funcrec as fr

PAGE = mmap.PAGESIZE
DTYPES = (torch.int64, torch.int32, torch.float32, torch.bool, torch.uint8)
COUNTS = (272, 264, 64)  # each buffer has at least 64 bytes, because an unaligned buffer is copied


def between_pages(count: int, dtype: torch.dtype, at_end: bool) -> Tensor:
    """Return a tensor at the start or the end of its page. The pages before and after it are inaccessible."""
    place = mmap.mmap(-1, 3 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(place))
    nbytes = count * dtype.itemsize
    x = torch.frombuffer(place, dtype=dtype, count=count, offset=2 * PAGE - nbytes if at_end else PAGE)
    x.copy_(torch.arange(count) % 3)
    for page in (0, 2):
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page * PAGE), PAGE, 0):
            raise OSError("mprotect")
    return x


def padded(x: Tensor) -> Tensor:
    before, both = torch.nn.functional.pad(x, (6, 0), value=1), torch.nn.functional.pad(x, (1, 5))
    return torch.cat([before.to(torch.int64) * 3, both.to(torch.int64)])


def main() -> None:
    torch.set_num_threads(1)
    every = fr.jit(lambda xs: {name: padded(x) for name, x in xs.items()})  # one program of all counts
    for at_end in (False, True):
        xs = {f"{d}, {count} elements": between_pages(count, d, at_end) for d in DTYPES for count in COUNTS}
        for name, y in every(xs).items():
            if not torch.equal(y, padded(xs[name])):
                raise AssertionError(name)
    print("right")


if __name__ == "__main__":
    main()
