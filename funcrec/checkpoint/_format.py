"""The one-file checkpoint: a file of named tensors, the last of them the tree, as JSON in UTF-8.

Nothing in a file is run, and all sizes are compared with the file's size before memory is allocated.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor

from funcrec.checkpoint._tree_json import DTYPES, CodeError, show
from funcrec.core import fail, sure
from funcrec.files import CHUNK, HEAD, FileError, Placed, beginning, chunks, crc_of, read_header, size_of, write_tensors
from funcrec.kernels.memory import empty_table

KIND, ALIGN = "funcrec checkpoint 4", 64  # bytes: a mapped tensor is aligned like one of the allocator's
TREE = "__tree__"
MAX_SIZE = 2**63


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
    """Return the name of a block in errors; for a tensor in several blocks it includes its rows and its file."""
    return f"{x.name}, rows {b.first} to {b.first + b.rows - 1}, in `{b.file}`" if b.file else x.name


class Want(NamedTuple):
    """Rows [first, first + R) and columns [first_column, ...) of a stored tensor, to be written to into[R, C]."""

    first: int
    first_column: int
    into: Tensor


def grid_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return a shape as (rows, columns)."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


# -- writing -----------------------------------------------------------------------------------------------------


def write_file(
    file: BinaryIO, code: Any, names: Sequence[str], pieces: list[Any], wrote: Callable[[], None]
) -> list[tuple[int, int]]:
    """Write the pieces; return (offset, CRC) of each. Each is dropped after it is written, and `wrote` is called."""
    content = {"devices": [p.device for p in pieces], "tree": code}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    tree = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    specs = [(n, p.rows.dtype, p.rows.shape) for n, p in zip(names, pieces, strict=True)]

    def tensors() -> Iterator[Tensor]:
        while pieces:
            yield pieces.pop(0).rows
            wrote()
        yield tree

    places = write_tensors(file, KIND, [*specs, (TREE, tree.dtype, tree.shape)], tensors(), {}, ALIGN)
    return [(p.offset, p.crc) for p in places[:-1]]


# -- reading -----------------------------------------------------------------------------------------------------


def is_checkpoint(file: BinaryIO) -> bool:
    """Return whether a file begins like a checkpoint."""
    file.seek(HEAD)
    start = beginning(KIND)
    return file.read(len(start)) == start


def read_index(file: BinaryIO) -> tuple[list[Stored], Any]:
    """Return the tensors, each as one block, and the code of the tree; no size exceeds the file's."""

    def read(at: int, count: int) -> bytes:
        file.seek(at)
        return file.read(count)

    try:
        found, _ = read_header(KIND, size_of(file), read, ALIGN)
    except FileError as error:
        raise CodeError("a file that {}: {}, not {}".format(*error.args)) from None
    tree = found.pop(TREE, None)
    text = b"" if tree is None else read(tree.offset, tree.nbytes)
    if tree is None or zlib.crc32(text) != tree.crc:
        raise CodeError("a tree with a wrong checksum")
    try:
        content = json.loads(text.decode("utf-8", "surrogatepass"))
        devices, code = content["devices"], content["tree"]
        stored = [_stored(p, device) for p, device in zip(found.values(), devices, strict=True)]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CodeError(f"a tree that cannot be read: {error}") from None
    return stored, code


def _stored(p: Placed, device: Any) -> Stored:
    check_tensor(str(p.dtype).removeprefix("torch."), list(p.shape), device)
    rows, columns = grid_of(p.shape)
    block = Block("", p.offset, 0, 0, rows, columns, p.crc)
    return Stored(p.name, p.dtype, p.shape, (rows, columns), device, (block,))


def is_size(n: Any) -> bool:
    return type(n) is int and 0 <= n < MAX_SIZE


def check_tensor(dtype: Any, shape: Any, device: Any) -> None:
    """Raise unless torch can have such a tensor."""
    good = isinstance(dtype, str) and dtype in DTYPES and isinstance(shape, list) and all(map(is_size, shape))
    if not good or not isinstance(device, str):
        raise CodeError(f"a tensor that cannot be: {show((dtype, shape, device))}")
    try:
        torch.empty(shape, dtype=DTYPES[dtype], device="meta")
    except RuntimeError as error:  # torch's own limits
        raise CodeError(f"a tensor that cannot be: {str(error).splitlines()[0]}") from None


def fill(file: BinaryIO, x: Stored, block: Block, wants: Sequence[Want]) -> None:
    """Read a block, check its CRC, and copy the wanted parts to their places."""
    width = block.columns * x.dtype.itemsize
    step = max(1, CHUNK // max(1, width)) if width else max(1, block.rows)
    direct = _direct(x, block, wants)
    buffer = blank(min(step, block.rows) * width) if direct is None else None
    file.seek(block.offset)
    crc = 0
    for first in range(0, block.rows, step):
        n = min(step, block.rows - first)
        held = sure(direct)[first : first + n].flatten().view(torch.uint8) if buffer is None else buffer[: n * width]
        for data in chunks(held):
            if cast(Any, file).readinto(data) != len(data):
                raise CodeError(f"{block_name(x, block)} cut off")
            crc = zlib.crc32(data, crc)
        if x.dtype == torch.bool and held.numel() and int(held.amax()) > 1:
            raise CodeError(f"{block_name(x, block)} with bytes that are not bools")
        if buffer is not None:
            scatter(held.view(x.dtype).view(n, block.columns), block.first + first, block.first_column, wants)
    if crc != block.crc:
        raise CodeError(f"{block_name(x, block)} with a wrong checksum")


def check_block(x: Stored, block: Block, held: Tensor) -> None:
    """Check the CRC of a block that is in memory."""
    if crc_of(held) != block.crc:
        raise CodeError(f"{block_name(x, block)} with a wrong checksum")
    if x.dtype == torch.bool and int(held.view(torch.uint8).amax()) > 1:
        raise CodeError(f"{block_name(x, block)} with bytes that are not bools")


def _direct(x: Stored, block: Block, wants: Sequence[Want]) -> Tensor | None:
    """Return the memory of the only Want, if it wants just this block; else None."""
    if len(wants) != 1:
        return None
    (want,) = wants
    first, last = block.first - want.first, block.first + block.rows - want.first
    is_whole = want.first_column == block.first_column and want.into.shape[1] == block.columns
    if not is_whole or first < 0 or last > want.into.shape[0] or want.into.device.type != "cpu":
        return None
    return want.into[first:last] if want.into.is_contiguous() else None


def scatter(rows: Tensor, first: int, first_column: int, wants: Sequence[Want]) -> None:
    """Copy rows[n, columns] of a tensor, from (first, first_column) on, to their places."""
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
    """Return u8[nbytes] in memory where rows are read fast, like the tables of `init`."""
    try:
        return empty_table((nbytes,), dtype=torch.uint8, device="cpu")
    except (RuntimeError, OSError) as error:
        got = f"{nbytes:,} bytes: {str(error).splitlines()[0]}"
        fail("funcrec.load", "there is no memory for a tensor.", got=got, need="free memory", kind=MemoryError)
