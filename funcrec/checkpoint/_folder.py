"""A checkpoint that many ranks write: a folder with a file for each rank, and a manifest that locates each block.

    rank-0-of-2-TOKEN, rank-1-of-2-TOKEN: a one-file checkpoint of each rank's blocks, under a name that was never used
    manifest: a one-file checkpoint of the tree, and of the places of all blocks

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

from funcrec.checkpoint._format import Block, Stored, block_name, check_tensor, grid_of, is_size, read_index, write_file
from funcrec.checkpoint._rank_parts import Writers, whole_parts
from funcrec.checkpoint._tree_json import DTYPES, CodeError, Cut, Encoded, decode, encode, show
from funcrec.core import fail
from funcrec.files import STALE_S, flush, open_file, raise_os, size_of, write_whole

MANIFEST = "manifest"
FORMAT = "funcrec folder 2"
OURS = re.compile(r"rank-\d+-of-\d+-[0-9a-f]{16}")
STEP = re.compile(r"step-(\d{10,})")  # the name of a checkpoint that `keep` counts
BLOCK_BYTES = 1 << 24  # a reader of one row reads such a block, and checks its CRC
MOST_OPEN = 64
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


def write_rank(call: str, path: Path, pieces: Sequence[Piece], names: Sequence[str], wrote: Callable[[], None]) -> list:
    """Write and flush the file of a rank, and return [name, bytes, blocks] of the file in types of JSON."""
    blocks = [[p.leaf, p.first, p.first_column, p.rows.shape[0], p.rows[:1].numel()] for p in pieces]
    label = lambda leaf, a, b, n, width: f"{names[leaf]}[{a}:{a + n}, {b}:{b + width}]"
    labels, places = [label(*b) for b in blocks], []
    code = ["dict", [[n, ["tensor"]] for n in labels]]
    write_whole(call, path, lambda file: places.extend(write_file(file, code, labels, pieces, wrote)))
    return [
        path.name,
        path.stat().st_size,
        [[b[0], at, *b[1:], crc] for b, (at, crc) in zip(blocks, places, strict=True)],
    ]


def heads_of(encoded: Encoded) -> list[list]:
    """Return [name, dtype, shape, grid, device] of each leaf."""
    out = []
    for name, x in encoded.leaves.items():
        grid, held = (x.grid, x.held[0]) if isinstance(x, Cut) else (grid_of(x.shape), x)
        out.append([name, str(x.dtype).removeprefix("torch."), list(x.shape), list(grid), str(held.device)])
    return out


def write_manifest(call: str, folder: Path, tree: Any, heads: Sequence[list], written: Sequence[list]) -> None:
    """Write the manifest, after which the folder holds the new checkpoint. tree: the code of the tree."""
    blocks: list[list] = [[] for _ in heads]
    for i, (_, _, own) in enumerate(written):
        for leaf, *where in own:
            blocks[leaf].append([i, *where])
    leaves = [[*head, sorted(own, key=lambda b: b[2:4])] for head, own in zip(heads, blocks, strict=True)]
    content = {"files": [[name, size] for name, size, _ in written], "tensors": leaves, "tree": tree}
    code, _, _ = encode({"format": FORMAT, "manifest": json.dumps(content, separators=(",", ":"))}, "manifest")
    old = files_of(folder)
    write_whole(call, folder / MANIFEST, lambda file: write_file(file, code, [], [], lambda: None))
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
    if isinstance(tree, dict) and tree.get("format") == FORMAT and set(tree) == {"format", "manifest"}:
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
        none, code = read_index(file)
    tree = decode(code, iter(()))
    if none or not isinstance(tree, dict) or tree.get("format") != FORMAT or not isinstance(tree.get("manifest"), str):
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
    return Manifest(dict(files), [_leaf(x, files) for x in leaves], code)


def _leaf(x: Any, files: Sequence[tuple[str, int]]) -> Stored:
    match x:
        case [str(name), dtype, shape, [rows, columns], device, [*blocks]]:
            check_tensor(dtype, shape, device)
        case _:
            raise CodeError(f"a tensor that cannot be: {show(x)}")
    numel = torch.Size(shape).numel()
    if not is_size(rows) or not is_size(columns) or rows * columns != numel:
        raise CodeError(f"a tensor that cannot be: {show(x)}")
    found = []
    for b in blocks:
        if not isinstance(b, list) or len(b) != 7 or not all(map(is_size, b)) or b[0] >= len(files):
            raise CodeError(f"a block of {name} that cannot be: {show(b)}")
        file, at, first, column, n, width, crc = b
        if at + n * width * DTYPES[dtype].itemsize > files[file][1] or not n * width:
            raise CodeError(f"a block of {name} that is not in its file: {show(b)}")
        found.append(Block(files[file][0], at, first, column, n, width, crc))
    out = Stored(name, DTYPES[dtype], tuple(shape), (rows, columns), device, tuple(found))
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


class Files(NamedTuple):
    """The files of a folder. A file is opened when it is first read.

    checked: the files whose index, and all bytes outside of blocks, agree with their CRCs.
    """

    call: str
    folder: Path
    sizes: dict[str, int]
    opened: dict[str, BinaryIO]
    checked: set[str]

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
