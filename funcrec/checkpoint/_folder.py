"""A checkpoint that many ranks write: a folder with a file for each rank, and a manifest that says which file has what.

    rank-0-of-2-TOKEN, rank-1-of-2-TOKEN: a one-file checkpoint of each rank's blocks, under a name that was never used
    manifest: a one-file checkpoint of the tree, and of the rows and columns that each file has

Every reader reads the manifest, whose size is in files and tensors. The blocks of a file, at most 16 MiB each, with
their places and CRCs, are in the file's own index. Only a reader that wants rows of the file reads it.

First all files and the folder are flushed. Then the manifest is renamed. Before that the folder holds the old
checkpoint, and after it the new checkpoint. Then the files of the old checkpoint are removed.
"""

import contextlib
import errno
import json
import re
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from funcrec.checkpoint._format import (
    Block,
    Stored,
    Want,
    block_name,
    check_tensor,
    fill,
    grid_of,
    is_size,
    read_index,
    write_file,
)
from funcrec.checkpoint._rank_parts import Writers, whole_parts
from funcrec.checkpoint._tree_json import DTYPES, CodeError, Cut, Encoded, decode, encode, show
from funcrec.core import fail, sure
from funcrec.files import STALE_S, flush, open_file, raise_os, size_of, write_whole

MANIFEST = "manifest"
FORMAT = "funcrec folder 3"
WITH_BLOCKS = "funcrec folder 2"  # an earlier format, which is read, too: its manifest has every block of all files
LABEL = re.compile(r"(.*)\[(\d+):(\d+), (\d+):(\d+)\]", re.DOTALL)  # the name of a block in the file of a rank
OURS = re.compile(r"rank-\d+-of-\d+-[0-9a-f]{16}")
STEP = re.compile(r"step-(\d{10,})")  # the name of a checkpoint that `keep` counts
BLOCK_BYTES = 1 << 24  # a reader of one row reads such a block, and checks its CRC
MOST_OPEN = 64
UNKNOWN = -1  # the place in its file, and the CRC, of rows that a manifest names
ROWS = 64  # the rows of a block are a multiple of this, so that the next block may begin at its end


class Manifest(NamedTuple):
    """The content of a manifest. files: {name: bytes}. leaves: the tensors. code: the code of the tree."""

    files: dict[str, int]
    leaves: list[Stored]
    code: Any


# -- writing -----------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A block of leaf number `leaf`, with the leaf's device. `first` and `first_column` say where the block begins."""

    leaf: int
    first: int
    first_column: int
    rows: Tensor
    device: str


def pieces_of(leaves: Sequence[Tensor | Cut], where: Writers) -> dict[int, list[Piece]]:
    """Return {rank: the blocks that the rank writes}, for the ranks of this process."""
    out: dict[int, list[Piece]] = {rank: [] for rank in where.own}
    for i, x in enumerate(leaves):
        for rank, first, column, rows in x.parts(where) if isinstance(x, Cut) else whole_parts(x, where):
            width = rows[:1].numel() * rows.element_size()
            step = max(ROWS, BLOCK_BYTES // max(1, width) // ROWS * ROWS)
            for at in range(0, rows.shape[0] if width else 0, step):
                out[rank].append(Piece(i, first + at, column, rows[at : at + step], str(rows.device)))
    return out


def whole_pieces(leaves: Sequence[Tensor]) -> list[Piece]:
    """Return the pieces of one file, which are the whole tensors."""
    return [Piece(i, 0, 0, x, str(x.device)) for i, x in enumerate(leaves)]


def file_name(rank: int, size: int, token: str) -> str:
    return f"rank-{rank}-of-{size}-{token}"


def write_rank(call: str, path: Path, pieces: list[Piece], names: Sequence[str], wrote: Callable[[], None]) -> list:
    """Write and flush the file of a rank, and return [name, bytes, ranges] of the file in types of JSON.

    A range is [leaf, first row, first column, rows, columns] of adjacent blocks.
    """
    blocks = [[p.leaf, p.first, p.first_column, p.rows.shape[0], p.rows[:1].numel()] for p in pieces]
    label = lambda leaf, a, b, n, width: f"{names[leaf]}[{a}:{a + n}, {b}:{b + width}]"
    labels = [label(*b) for b in blocks]
    code = ["dict", [[n, ["tensor"]] for n in labels]]
    write_whole(call, path, lambda file: write_file(file, code, labels, pieces, wrote))
    return [path.name, path.stat().st_size, joined(blocks)]


def joined(blocks: Sequence[list[int]]) -> list[list[int]]:
    """Return [leaf, first, first column, rows, columns] of blocks, with blocks below each other as one."""
    out: list[list[int]] = []
    for leaf, first, column, rows, width in blocks:
        if out and [out[-1][0], out[-1][1] + out[-1][3], out[-1][2], out[-1][4]] == [leaf, first, column, width]:
            out[-1][3] += rows
        else:
            out.append([leaf, first, column, rows, width])
    return out


def heads_of(encoded: Encoded) -> list[list]:
    """Return [name, dtype, shape, grid, device] of each leaf."""
    out = []
    for name, x in encoded.leaves.items():
        grid, held = (x.grid, x.held[0]) if isinstance(x, Cut) else (grid_of(x.shape), x)
        out.append([name, str(x.dtype).removeprefix("torch."), list(x.shape), list(grid), str(held.device)])
    return out


def write_manifest(call: str, folder: Path, tree: Any, heads: Sequence[list], written: Sequence[list]) -> None:
    """Write the manifest, after which the folder holds the new checkpoint. tree: the code of the tree."""
    rows = sorted(
        [leaf, first, column, i, *size] for i, (_, _, own) in enumerate(written) for leaf, first, column, *size in own
    )
    ranges = torch.tensor(rows, dtype=torch.int64).reshape(-1, 6)
    content = {"files": [[name, size] for name, size, _ in written], "tensors": [*heads], "tree": tree}
    told = {"format": FORMAT, "manifest": json.dumps(content, separators=(",", ":")), "ranges": ranges}
    encoded = encode(told, "manifest")
    names, pieces = list(encoded.leaves), whole_pieces(encoded.tensors)
    old = files_of(folder)
    write_whole(call, folder / MANIFEST, lambda file: write_file(file, encoded.code, names, pieces, lambda: None))
    for name in old - {name for name, _, _ in written}:
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def files_of(folder: Path) -> set[str]:
    """Return the names of the files of the folder's checkpoint, and of the files that interrupted saves left."""
    held: set[str] = set()
    with contextlib.suppress(CodeError, OSError):
        held = set(read_manifest("", folder).files)
    old = lambda x: OURS.fullmatch(x.name) and time.time() - x.stat().st_mtime > STALE_S
    for x in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # removed meanwhile
            held |= {x.name} if old(x) else set()
    return held


def make_folder(call: str, folder: Path) -> None:
    """Make the folder.

    An existing folder stays. It raises if something else has the name.
    """
    try:
        folder.mkdir()
        flush(folder.parent)
    except OSError as error:
        if isinstance(error, FileExistsError) and folder.is_dir():
            return
        hint = "another path: a checkpoint of ranks is a folder, and a file stays a file"
        need = "the name of a folder, in one that is there"
        raise_os(call, error, f"the folder `{folder}` cannot be made.", need, hint)


# -- reading -----------------------------------------------------------------------------------------------------


def fail_without_manifest(call: str, path: Path) -> None:
    """Raise an error about a folder without a manifest, which names the contents of the folder."""
    names = sorted(x.name for x in path.iterdir())
    steps, parts = [n for n in names if STEP.fullmatch(n)], [n for n in names if OURS.fullmatch(n)]
    some = lambda own: f"{', '.join(own[:2])}{f' and {len(own) - 2} more' if len(own) > 2 else ''}"
    need, hint = "a file that save wrote, or a folder", "a file or a folder in it; fr.latest(folder)"
    if steps:
        what, hint = f"`{path}` is a folder of checkpoints.", f"fr.load(fr.latest({str(path)!r}))"
        fail(call, what, got=some(steps[::-1]), need="one of them", hint=hint, kind=IsADirectoryError)
    if parts:
        what, hint = f"`{path}` has no manifest.", "an older checkpoint; the manifest is the last that a save writes"
        fail(call, what, got=some(parts), need=f"`{MANIFEST}` next to them", hint=hint, kind=FileNotFoundError)
    what = f"`{path}` is not a file, nor a folder that holds a checkpoint."
    fail(call, what, got="a folder without a manifest", need=need, hint=hint, kind=IsADirectoryError)


def fail_if_manifest(call: str, path: Path, tree: Any) -> None:
    """Raise for the manifest of a folder, which is not a checkpoint of its own."""
    if isinstance(tree, dict) and tree.get("format") in (FORMAT, WITH_BLOCKS) and "manifest" in tree:
        what, need = f"`{path.name}` is the manifest of a folder.", "the folder, which is the checkpoint"
        fail(call, what, got=f"`{path}`", need=need, hint=f"fr.load({str(path.parent)!r})")


def is_folder(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(path.stat().st_mode)
    return False


def read_manifest(call: str, folder: Path) -> Manifest:
    """Return the content of the folder's manifest.

    Raises:
      CodeError: if the manifest is damaged, or is a file of another kind.
      OSError: if the manifest cannot be read.
    """
    with open_file(call, folder / MANIFEST) as file:
        found, code = read_index(file)
        tree = decode(code, (_in_memory(file, x) for x in found))
    ranges = tree.get("ranges") if isinstance(tree, dict) else None
    kind = {0: WITH_BLOCKS, 1: FORMAT}.get(len(found)) if isinstance(tree, dict) else None
    if kind is None or tree.get("format") != kind or not isinstance(tree.get("manifest"), str):
        raise CodeError("a manifest that save did not write")
    try:
        content = json.loads(tree["manifest"])
        files = [(name, size) for name, size in content["files"]]
        leaves, code = content["tensors"], content["tree"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CodeError(f"a manifest that cannot be read: {error}") from None
    if not all(isinstance(name, str) and OURS.fullmatch(name) and is_size(size) for name, size in files):
        raise CodeError(f"files that cannot be: {show(files)}")
    if len(dict(files)) < len(files) or not isinstance(leaves, list):
        raise CodeError(f"a file that is named twice: {show(files)}")
    if kind == WITH_BLOCKS:
        return Manifest(dict(files), [_leaf(x, files) for x in leaves], code)
    return Manifest(dict(files), _with_ranges(leaves, ranges, files), code)


def _in_memory(file: BinaryIO, x: Stored) -> Tensor:
    """Return a small tensor of an opened file."""
    out = torch.empty(x.grid, dtype=x.dtype)
    fill(file, x, x.blocks[0], [Want(0, 0, out)])
    return out.view(x.shape)


def _with_ranges(heads: list[Any], ranges: Any, files: Sequence[tuple[str, int]]) -> list[Stored]:
    """Return the stored tensors, whose blocks are ranges of a file. The place in the file and the CRC are not known."""
    if not isinstance(ranges, Tensor) or ranges.dtype != torch.int64 or ranges.dim() != 2 or ranges.shape[1] != 6:
        raise CodeError("a manifest that save did not write")
    own: list[list[Block]] = [[] for _ in heads]
    for row in ranges.tolist():
        leaf, first, column, file, n, width = row
        if not all(map(is_size, row)) or leaf >= len(heads) or file >= len(files) or not n * width:
            raise CodeError(f"rows that cannot be: {show(row)}")
        own[leaf].append(Block(files[file][0], UNKNOWN, first, column, n, width, UNKNOWN))
    out = [_head(x)._replace(blocks=tuple(blocks)) for x, blocks in zip(heads, own, strict=True)]
    for x in out:
        if not is_covered(x):
            raise CodeError(f"{x.name} with other rows than it has")
    return out


def _head(x: Any) -> Stored:
    match x:
        case [str(name), dtype, shape, [rows, columns], device]:
            check_tensor(dtype, shape, device)
        case _:
            raise CodeError(f"a tensor that cannot be: {show(x)}")
    if not is_size(rows) or not is_size(columns) or rows * columns != torch.Size(shape).numel():
        raise CodeError(f"a tensor that cannot be: {show(x)}")
    return Stored(name, DTYPES[dtype], tuple(shape), (rows, columns), device, ())


def _leaf(x: Any, files: Sequence[tuple[str, int]]) -> Stored:
    match x:
        case [*head, [*blocks]]:
            out = _head(head)
        case _:
            raise CodeError(f"a tensor that cannot be: {show(x)}")
    name, itemsize, found = out.name, out.dtype.itemsize, []
    for b in blocks:
        if not isinstance(b, list) or len(b) != 7 or not all(map(is_size, b)) or b[0] >= len(files):
            raise CodeError(f"a block of {name} that cannot be: {show(b)}")
        file, at, first, column, n, width, crc = b
        if at + n * width * itemsize > files[file][1] or not n * width:
            raise CodeError(f"a block of {name} that is not in its file: {show(b)}")
        found.append(Block(files[file][0], at, first, column, n, width, crc))
    out = out._replace(blocks=tuple(found))
    if not is_covered(out):
        raise CodeError(f"{name} with other rows than it has")
    return out


def is_covered(x: Stored) -> bool:
    """Return whether the blocks cover the tensor, in adjacent bands of columns with consecutive rows each."""
    rows, columns = x.grid
    if not rows * columns:
        return not x.blocks
    bands: dict[tuple[int, int], int] = {}
    for b in sorted(x.blocks, key=lambda b: b.first):
        band = (b.first_column, b.columns)
        if bands.setdefault(band, 0) != b.first:
            return False
        bands[band] += b.rows
    at = 0
    for first, width in sorted(bands):
        if first != at or bands[first, width] != rows:
            return False
        at += width
    return at == columns


def labelled(found: Sequence[Stored], file: str) -> dict[tuple[str, torch.dtype], list[Block]]:
    """Return {(tensor, dtype): its blocks} of the index of a rank's file, in the order of columns and rows."""
    out: dict[tuple[str, torch.dtype], list[Block]] = {}
    for x in found:
        match = LABEL.fullmatch(x.name)
        a, b, c, d = map(int, match.groups()[1:]) if match else (0, 0, 0, 0)
        (held,) = x.blocks
        if b <= a or d <= c or (b - a) * (d - c) != held.rows * held.columns:
            raise CodeError(f"a block that cannot be: {show(x.name)}")
        out.setdefault((sure(match)[1], x.dtype), []).append(Block(file, held.offset, a, c, b - a, d - c, held.crc))
    return {key: sorted(own, key=lambda b: (b.first_column, b.first)) for key, own in out.items()}


class Files(NamedTuple):
    """The files of a folder. A file is opened when it is first read.

    checked: the files whose index, and all bytes outside of blocks, agree with their CRCs.
    blocks: {file: {(tensor, dtype): its blocks there}}, of the files of which rows were wanted.
    """

    call: str
    folder: Path
    sizes: dict[str, int]
    opened: dict[str, BinaryIO]
    checked: set[str]
    blocks: dict[str, dict[tuple[str, torch.dtype], list[Block]]]

    def blocks_of(self, block: Block, x: Stored) -> Sequence[Block]:
        """Return the blocks of a tensor that make up a range of its rows in one file; of a block the block itself."""
        if block.offset != UNKNOWN:
            return (block,)
        if block.file not in self.blocks:
            file = self.file(block.file, block_name(x, block))
            self.blocks[block.file] = labelled(read_index(file)[0], block.file)
        last, right = block.first + block.rows, block.first_column + block.columns
        own = [
            b for b in self.blocks[block.file].get((x.name, x.dtype), ())
            if block.first <= b.first < last and block.first_column <= b.first_column < right
        ]  # fmt: skip
        parts = joined([[0, b.first, b.first_column, b.rows, b.columns] for b in own])
        if parts != [[0, block.first, block.first_column, block.rows, block.columns]]:
            raise CodeError(f"{block_name(x, block)}, which has other rows")
        return own

    def open(self, block: Block, x: Stored) -> BinaryIO:
        return self.file(block.file, block_name(x, block))

    def check(self, rank: int, size: int) -> None:
        """Check that every file is there and whole, also files that hold no block.

        Each rank checks its share of the files.
        """
        for name in list(self.sizes)[rank::size]:
            if name not in self.checked:
                self.file(name, f"`{name}`")

    def file(self, name: str, label: str) -> BinaryIO:
        """Return the opened file. label: the value that is read from it, for errors."""
        if name not in self.opened:
            try:
                file = open_file(self.call, self.folder / name)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                gone = "which does not exist" if error.errno == errno.ENOENT else "which cannot be read"
                raise CodeError(f"{label}, {gone}") from error
            if len(self.opened) == MOST_OPEN:
                self.opened.pop(next(iter(self.opened))).close()
            self.opened[name] = file
            size = size_of(file)
            if size != self.sizes[name]:
                raise CodeError(f"{label}, which has {size:,} bytes and not {self.sizes[name]:,}")
            if name not in self.checked:
                try:
                    read_index(file)
                except CodeError as error:
                    raise CodeError(f"{label}, which is {error}") from None
                self.checked.add(name)
        return self.opened[name]

    def close(self) -> None:
        for file in self.opened.values():
            file.close()
