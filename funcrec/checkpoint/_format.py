"""The one-file format: tensors and a tree in a file, every byte of which is under a CRC.

    MAGIC | the bytes of every tensor, each from a multiple of ALIGN on | header, JSON: dtype, shape,
    device and CRC of each, and the tree | its length and CRC

Nothing in a file is run, and all sizes are held against the file's before memory is asked for.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from funcrec.checkpoint._tree_json import DTYPES, CodeError, show
from funcrec.core import fail, short_dtype
from funcrec.files import CHUNK, chunks, crc_of, write_bytes
from funcrec.kernels.memory import empty_table

ALIGN = 64  # bytes: a mapped tensor lies as one of the allocator's does
MAGIC = b"funcrec checkpoint 3".ljust(ALIGN - 1) + b"\n"
FOOTER = struct.Struct("<QI")  # the header's length in bytes, and its CRC
MAX_SIZE = 2**63


class Entry(NamedTuple):
    """A tensor in the header."""

    dtype: str
    shape: list[int]
    device: str
    crc: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class Block(NamedTuple):
    """Rows and columns of a tensor that lie together in a file, from `offset` on, under one CRC."""

    file: str
    offset: int
    first: int
    first_column: int
    rows: int
    columns: int
    crc: int


class Stored(NamedTuple):
    """A tensor that is in files, made of blocks of its `grid` of rows and columns."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    grid: tuple[int, int]
    device: str
    blocks: tuple[Block, ...]


def block_name(x: Stored, b: Block) -> str:
    """What a block is called in errors: of a tensor in several blocks its rows and its file, too."""
    return f"{x.name}, rows {b.first} to {b.first + b.rows - 1}, in `{b.file}`" if b.file else x.name


class Want(NamedTuple):
    """Rows [first, first + R) and columns [first_column, ...) of a stored tensor, to be written to into[R, C]."""

    first: int
    first_column: int
    into: Tensor


def grid_of(shape: Sequence[int]) -> tuple[int, int]:
    """A shape seen as rows and columns."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


# -- writing -----------------------------------------------------------------------------------------------------


class Writer(NamedTuple):
    """A file that is being written; entries: of the tensors that are there."""

    file: BinaryIO
    entries: list[Entry]


def begin(file: BinaryIO) -> Writer:
    file.write(MAGIC)
    return Writer(file, [])


def append(to: Writer, x: Tensor, device: str) -> tuple[int, int]:
    """Write a tensor that is from a device: where it begins, and its CRC."""
    to.file.write(bytes(-to.file.tell() % ALIGN))
    at, crc = to.file.tell(), write_bytes(to.file, x)
    to.entries.append(Entry(str(x.dtype).removeprefix("torch."), list(x.shape), device, crc))
    return at, crc


def finish(to: Writer, code: Any) -> None:
    text = json.dumps({"tensors": to.entries, "tree": code}, ensure_ascii=False, separators=(",", ":"))
    header = text.encode("utf-8", "surrogatepass")
    to.file.write(header)
    to.file.write(FOOTER.pack(len(header), zlib.crc32(header)))


# -- reading -----------------------------------------------------------------------------------------------------


def read_header(file: BinaryIO) -> tuple[list[Stored], Any]:
    """The tensors, each as one block, and the code of the tree; nothing is larger than the file has bytes for."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    if file.read(len(MAGIC)) != MAGIC:
        raise CodeError("another kind of file")
    if size < len(MAGIC) + FOOTER.size:
        raise CodeError("a file that is cut off")
    file.seek(size - FOOTER.size)
    length, crc = FOOTER.unpack(file.read(FOOTER.size))
    start = size - FOOTER.size - length
    if start < len(MAGIC):
        raise CodeError("a file that is cut off, or goes on past its end")
    file.seek(start)
    text = file.read(length)
    if zlib.crc32(text) != crc:
        raise CodeError("a header with a wrong checksum")
    try:
        header = json.loads(text.decode("utf-8", "surrogatepass"))
        entries = [Entry(*e) for e in header["tensors"]]
        code = header["tree"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CodeError(f"a header that cannot be read: {error}") from None
    for e in entries:
        if type(e.crc) is not int:
            raise CodeError(f"a tensor that cannot be: {show(e)}")
        check_tensor(e.dtype, e.shape, e.device)
    places = list(_places(entries))
    end = places[-1][1] if places else len(MAGIC)
    if end != start:
        raise CodeError(f"{start - len(MAGIC)} bytes of tensors where the header says {end - len(MAGIC)}")
    for at, _, gap in places:
        file.seek(at - gap)
        if any(file.read(gap)):
            raise CodeError("bytes between its tensors")
    return [_stored(e, at) for e, (at, _, _) in zip(entries, places, strict=True)], code


def _places(entries: Sequence[Entry]) -> Iterator[tuple[int, int, int]]:
    """(where it begins, where it ends, how many bytes lie before it) of every tensor."""
    end = len(MAGIC)
    for e in entries:
        gap = -end % ALIGN
        at = end + gap
        end = at + e.nbytes
        yield at, end, gap


def _stored(e: Entry, at: int) -> Stored:
    rows, columns = grid_of(e.shape)
    name = f"a tensor {short_dtype(DTYPES[e.dtype])}{e.shape}"
    block = Block("", at, 0, 0, rows, columns, e.crc)
    return Stored(name, DTYPES[e.dtype], tuple(e.shape), (rows, columns), e.device, (block,))


def is_size(n: Any) -> bool:
    return type(n) is int and 0 <= n < MAX_SIZE


def check_tensor(dtype: Any, shape: Any, device: Any) -> None:
    """A tensor that torch can have."""
    good = isinstance(dtype, str) and dtype in DTYPES and isinstance(shape, list) and all(map(is_size, shape))
    if not good or not isinstance(device, str):
        raise CodeError(f"a tensor that cannot be: {show((dtype, shape, device))}")
    try:
        torch.empty(shape, dtype=DTYPES[dtype], device="meta")
    except RuntimeError as error:  # torch's own limits
        raise CodeError(f"a tensor that cannot be: {str(error).splitlines()[0]}") from None


def fill(file: BinaryIO, x: Stored, block: Block, wants: Sequence[Want]) -> None:
    """Read a block, hold it to its CRC, and write what of it is wanted to where it is wanted."""
    width = block.columns * x.dtype.itemsize
    step = max(1, CHUNK // max(1, width)) if width else max(1, block.rows)
    direct = _direct(x, block, wants)
    buffer = None if direct is not None else blank(min(step, block.rows) * width)
    file.seek(block.offset)
    crc = 0
    for first in range(0, block.rows, step):
        n = min(step, block.rows - first)
        held = direct[first : first + n].flatten().view(torch.uint8) if buffer is None else buffer[: n * width]
        for data in chunks(held):
            if file.readinto(data) != len(data):
                raise CodeError(f"{block_name(x, block)} cut off")
            crc = zlib.crc32(data, crc)
        if x.dtype == torch.bool and held.numel() and int(held.amax()) > 1:
            raise CodeError(f"{block_name(x, block)} with bytes that are not bools")
        if buffer is not None:
            scatter(held.view(x.dtype).view(n, block.columns), block.first + first, block.first_column, wants)
    if crc != block.crc:
        raise CodeError(f"{block_name(x, block)} with a wrong checksum")


def check_block(x: Stored, block: Block, held: Tensor) -> None:
    """Hold a block that is in memory to its CRC."""
    if crc_of(held) != block.crc:
        raise CodeError(f"{block_name(x, block)} with a wrong checksum")
    if x.dtype == torch.bool and int(held.view(torch.uint8).amax()) > 1:
        raise CodeError(f"{block_name(x, block)} with bytes that are not bools")


def _direct(x: Stored, block: Block, wants: Sequence[Want]) -> Tensor | None:
    """Memory that wants just this block, if so."""
    if len(wants) != 1:
        return None
    (want,) = wants
    first, last = block.first - want.first, block.first + block.rows - want.first
    is_whole = want.first_column == block.first_column and want.into.shape[1] == block.columns
    if not is_whole or first < 0 or last > want.into.shape[0] or want.into.device.type != "cpu":
        return None
    return want.into[first:last] if want.into.is_contiguous() else None


def scatter(rows: Tensor, first: int, first_column: int, wants: Sequence[Want]) -> None:
    """rows[n, columns] of a tensor, from (first, first_column) on, to where they are wanted."""
    for w in wants:
        (n, columns), (a, b) = w.into.shape, (w.first - first, w.first_column - first_column)
        here = rows[max(0, a) : max(0, a + n), max(0, b) : max(0, b + columns)]
        if here.numel():
            w.into[max(0, -a) :, max(0, -b) :][: here.shape[0], : here.shape[1]] = here


def is_wanted(block: Block, want: Want) -> bool:
    (n, columns), end, last = want.into.shape, block.first + block.rows, block.first_column + block.columns
    within = want.first < end and want.first + n > block.first
    return within and want.first_column < last and want.first_column + columns > block.first_column


def blank(nbytes: int) -> Tensor:
    """u8[nbytes] where rows are read fast, as those of `init`."""
    try:
        return empty_table((nbytes,), dtype=torch.uint8, device="cpu")
    except (RuntimeError, OSError) as error:
        got = f"{nbytes:,} bytes: {str(error).splitlines()[0]}"
        fail("funcrec.load", "there is no memory for a tensor.", got=got, need="free memory", kind=MemoryError)
