"""Read and write records of one size in a file, in C++ (csrc/records.h)."""

from funcrec.kernels.cpp._native import call, ints
from torch import Tensor, empty, int64


def move_records(fd: int, rows: Tensor, records: Tensor, size: int, writes: bool, workers: int) -> int:
    """Move the records of ascending rows between a file and memory, the contiguous `records`.

    Returns:
      0; the system's error number; -1 if the file ends before a record.
    """
    status = empty((), dtype=int64)
    call("records", [fd, size, int(writes), workers, *ints(rows), records.data_ptr(), status.data_ptr()])
    return int(status)
