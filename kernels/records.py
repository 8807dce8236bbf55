"""Records of one size in a file: record r is the bytes [r · size, (r + 1) · size) of a file.

    read_records(fd, rows, records)     records[i] = the record of rows[i]
    write_records(fd, rows, records)    the record of rows[i] = records[i]

`rows` i64[N] ascend; for a write no row comes twice. `records` [N, C] is contiguous; a row of it is a record. `workers`
requests are under way at once. Neighbouring rows are one request. Both implementations move the same bytes.
"""

import os

from funcrec.kernels import cpp
from funcrec.kernels.choice import chosen
from torch import Tensor, uint8

READERS = 16  # a disk answers so many requests at once faster than one after the other
WRITERS = 1  # the system writes to one file for one thread at a time


def read_records(
    fd: int, rows: Tensor, records: Tensor, *, workers: int = READERS, implementation: str | None = None
) -> None:
    """Read the records of ascending rows into `records`.

    Raises:
      OSError: the system's. EOFError: if the file ends before a record.
    """
    _move(fd, rows, records, False, workers, implementation)


def write_records(
    fd: int, rows: Tensor, records: Tensor, *, workers: int = WRITERS, implementation: str | None = None
) -> None:
    """Write `records` as the records of ascending rows, none of them twice.

    Raises:
      OSError: the system's. Some of the records are then written.
    """
    _move(fd, rows, records, True, workers, implementation)


def _move(fd: int, rows: Tensor, records: Tensor, writes: bool, workers: int, implementation: str | None) -> None:
    if records.dim() != 2 or rows.shape != records.shape[:1] or not records.is_contiguous():
        raise ValueError(
            f"funcrec.kernels.records: rows and records do not fit.\n"
            f"  got   {list(rows.shape)}, {list(records.shape)}\n"
            "  need  i64[N] and a contiguous [N, C]\n  try   records.contiguous()"
        )
    size = records.shape[1] * records.itemsize
    if not rows.numel() or not size:
        return
    move = _reference if chosen(implementation, rows.device) == "reference" else cpp.move_records
    status = move(fd, rows.contiguous(), records, size, writes, workers)
    if status < 0:
        raise EOFError("funcrec.kernels.records: the file ends before a record")
    if status:
        raise OSError(status, os.strerror(status))


def _reference(fd: int, rows: Tensor, records: Tensor, size: int, writes: bool, workers: int) -> int:
    """Move one record after the other."""
    memory = records.view(uint8).numpy().data.cast("B")
    for i, row in enumerate(rows.tolist()):
        at, end, place = i * size, (i + 1) * size, row * size
        while at < end:
            moved = (os.pwritev if writes else os.preadv)(fd, [memory[at:end]], place)
            if not moved:
                return -1
            at, place = at + moved, place + moved
    return 0
