"""The undo journal: the old records of all rows that were written between a commit and the next.

    file   =  head ‖ block ‖ block ‖ ...        head: the name of the machine's start, and whether blocks are flushed
    block  =  [magic, CRC, n rows, m old records] ‖ rows ‖ old records of the first m rows; the others had none

A block is whole in the file before its rows are written. A block that a killed process left unfinished is the last one,
and its rows were not written. Blocks are undone from the last to the first, so the oldest record of a row stays.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from funcrec.core import fail
from funcrec.files import flush

MAGIC, HEAD, BLOCK = b"funcrec undo 1\n\0", struct.Struct("<16s40s?7x"), struct.Struct("<QIIQQ")
MARK = 0x6F64_6E75_6365_7266
BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine_start() -> str:
    """Return a name for the time since the machine started, or "" where the system has none."""
    try:
        return BOOT.read_text().strip()[:36]
    except OSError:
        return ""


class Undo:
    """The journal of one commit. It has a file from the first block on."""

    def __init__(self, path: Path, is_durable: bool):
        self.path, self.is_durable = path, is_durable
        self.fd, self.end = -1, 0

    def append(self, rows: Tensor, old: Tensor) -> None:
        """Write a block. If this raises or is interrupted, the next block takes its place."""
        if self.fd < 0:
            self._begin()
        parts = [rows.numpy(), old.view(torch.uint8).numpy() if old.numel() else np.empty(0, np.uint8)]
        crc = 0
        for x in parts:
            crc = zlib.crc32(memoryview(x).cast("B"), crc)
        head = BLOCK.pack(MARK, crc, 0, len(rows), len(old))
        end = _write(self.fd, [head, *parts], self.end)
        if self.is_durable:
            os.fdatasync(self.fd)
        self.end = end

    def _begin(self) -> None:
        """Make the file. Its name and head are on the disk before any block is."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            end = _write(fd, [HEAD.pack(MAGIC, machine_start().encode(), self.is_durable)], 0)
            os.fsync(fd)
            flush(self.path.parent)
        except BaseException:
            os.close(fd)
            raise
        self.fd, self.end = fd, end

    def flush(self) -> None:
        """Put all blocks on the disk. The head then says that they are there, and later blocks are flushed, too."""
        if self.fd >= 0 and not self.is_durable:
            os.fdatasync(self.fd)
            self.is_durable = True
            _write(self.fd, [HEAD.pack(MAGIC, machine_start().encode(), True)], 0)
            os.fdatasync(self.fd)

    def close(self) -> None:
        fd, self.fd = self.fd, -1  # first, so that an interrupt does not close the number twice
        if fd >= 0:
            os.close(fd)


def blocks_of(call: str, path: Path, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (rows, old records u8[m, size]) of the whole blocks in a journal's file, the last block first."""
    with open(path, "rb") as file:
        head = file.read(HEAD.size)
        if len(head) < HEAD.size:
            return  # the process stopped before the head was written, and so before any block
        magic, start, is_durable = HEAD.unpack(head)
        if magic != MAGIC:
            fail(call, f"`{path}` is not a journal.", got=repr(magic), need=repr(MAGIC), hint="another folder")
        if not is_durable and start.rstrip(b"\0").decode() != machine_start():
            what = "the machine stopped while the store had writes that were not committed."
            hint = "a copy of the folder, or a checkpoint; with durable=True a store survives this"
            fail(call, what, got="durable=False", need="writes that were on the disk in order", hint=hint)
        places = []
        while (place := _whole_block(file, size)) is not None:
            places.append(place)
        if _is_block_after(file, HEAD.size if not places else _end(places[-1], size), size):
            got, need = "a changed block, and a whole one after it", "the file as it was written"
            fail(call, f"`{path}` was changed.", got=got, need=need, hint="a copy of the folder")
        for at, count, count_old in reversed(places):
            file.seek(at)
            rows = torch.frombuffer(bytearray(file.read(8 * count)) or bytearray(8), dtype=torch.int64)[:count]
            old = np.frombuffer(file.read(size * count_old), np.uint8).reshape(count_old, size)
            yield rows, torch.from_numpy(old.copy())


def _whole_block(file, size: int) -> tuple[int, int, int] | None:
    """Return (the place of the rows, n, m) of the block at the file's position, or None if it is not whole."""
    head = file.read(BLOCK.size)
    if len(head) < BLOCK.size:
        return None
    mark, want, _, count, count_old = BLOCK.unpack(head)
    at, left, crc = file.tell(), 8 * count + size * count_old, 0
    if mark != MARK or count_old > count or at + left > os.fstat(file.fileno()).st_size:
        return None
    while left:
        part = file.read(min(left, 1 << 24))
        crc, left = zlib.crc32(part, crc), left - len(part)
        if not part:
            return None
    return (at, count, count_old) if crc == want else None


def _end(place: tuple[int, int, int], size: int) -> int:
    at, count, count_old = place
    return at + 8 * count + size * count_old


def _is_block_after(file, at: int, size: int) -> bool:
    """Return whether a whole block begins after the place `at`. A process that stops leaves none after an unfinished
    one."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        while (at := whole.find(struct.pack("<Q", MARK), at + 1)) >= 0:
            file.seek(at)
            if _whole_block(file, size) is not None:
                return True
    return False


def _write(fd: int, parts: list, at: int) -> int:
    """Write all bytes at a place, and return the place after them."""
    for part in parts:
        memory = memoryview(part).cast("B") if len(part) else memoryview(b"")
        while memory:
            moved = os.pwrite(fd, memory, at)
            memory, at = memory[moved:], at + moved
    return at
