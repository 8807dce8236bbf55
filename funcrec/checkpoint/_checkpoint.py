"""Checkpoints: any tree of tensors and plain numbers in one file that is whole or not there.

    load(save(path, x)) == x, bit for bit

    MAGIC | the bytes of every tensor | header, JSON: dtype, shape,
    device and CRC of each, and the tree | its length and CRC

No example is needed to read it, and nothing in it is run. All sizes
are held against the file's before memory is asked for.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from funcrec.checkpoint._code import DTYPES, CodeError, decode, encode, show, transform_problems
from funcrec.checkpoint._files import as_path, open_file, write_whole
from funcrec.checkpoint._first_format import read_first
from funcrec.core import CLASSES, Problem, check, class_name, describe, fail
from funcrec.kernels.memory import empty_table

MAGIC = b"funcrec checkpoint 2\n"
FOOTER = struct.Struct("<QI")  # the header's length in bytes, and its CRC
CHUNK = 1 << 24  # bytes


def save(path: str | os.PathLike, tree: Any) -> Path:
    """Write a tree (dicts, lists, tuples, funcrec's values, tensors, numbers, strings) to one file.

    The bytes go to a temporary file beside `path`, are flushed to the disk and then take its name: an interrupted save
    leaves the old file whole, readers never see half of one, and of several savers at once the last to finish stays. Of
    a symbolic link the file that it names is written, and the link stays.

    Each tensor is written by value: a view without the rest of its memory, one that stands in two places twice. As
    loaded, each is contiguous and has memory of its own.

    Returns: the path.

    Raises: TypeError that names every leaf and key that would not come back the same (another tensor than a plain,
      dense one, one of which a derivative is wanted, a number of numpy, an Enum), before anything is written; OSError
      when the disk is full or the folder cannot be written.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = fr.save(folder + "/state.pt", {"w": torch.ones(2), "epoch": 3})
      ...     fr.load(path)
      {'w': tensor([1., 1.]), 'epoch': 3}
    """
    path = as_path("funcrec.save", path)
    check("funcrec.save", transform_problems())
    code, tensors, problems = encode(tree, "tree")
    check("funcrec.save", problems)
    write_whole("funcrec.save", path, lambda file: _write(file, code, tensors))
    return path


def load(path: str | os.PathLike, *, like: Any = None, device: torch.device | str | None = None) -> Any:
    """Read what `save` wrote, files of the first format too.

    Args:
      like: a tree to compare with; every path whose kind, shape or dtype differs, or that only one has, is told.
      device: where the tensors go; by default where they were saved from.

    Raises: ValueError for a file that is truncated, damaged (every byte is under a CRC) or no checkpoint, and for a
      tree unlike `like`; FileNotFoundError.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = fr.save(folder + "/state.pt", {"w": torch.ones(2)})
      ...     fr.load(path, like={"w": torch.ones(3)})
      Traceback (most recent call last):
      ...
      ValueError: funcrec.load: `['w']` has another shape or dtype.
        got   f32[2]
        need  f32[3]
        try   like=None, which loads what there is
    """
    path = as_path("funcrec.load", path)
    check("funcrec.load", transform_problems())
    place = None if device is None else _device(device)
    with open_file("funcrec.load", path) as file:
        try:
            tensors, code = _read(file, place)
            tree = decode(code, tensors)
            if next(tensors, None) is not None:
                raise CodeError("more tensors in the file than in its tree")
        except (CodeError, RecursionError) as error:
            hint = "an older checkpoint; `save` itself never leaves half a file"
            what, need = f"`{path.name}` is not a whole checkpoint.", "a file that save wrote"
            fail("funcrec.load", what, got=str(error), need=need, hint=hint)
    if like is not None:
        check("funcrec.load", difference_problems(tree, like))
    return tree


# -- the file ----------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A tensor in the header."""

    dtype: str
    shape: list[int]
    device: str
    crc: int


def _write(file: BinaryIO, code: Any, tensors: list[Tensor]) -> None:
    file.write(MAGIC)
    entries = [_write_tensor(file, x) for x in tensors]
    text = json.dumps({"tensors": entries, "tree": code}, ensure_ascii=False, separators=(",", ":"))
    header = text.encode("utf-8", "surrogatepass")
    file.write(header)
    file.write(FOOTER.pack(len(header), zlib.crc32(header)))


def _write_tensor(file: BinaryIO, x: Tensor) -> Entry:
    plain = x.detach().resolve_conj().resolve_neg().cpu()
    plain = torch.zeros_like(plain).copy_(plain) if plain._is_zerotensor() else plain.contiguous()
    crc = 0
    for chunk in _chunks(plain):
        crc = zlib.crc32(chunk, crc)
        file.write(chunk)
    return Entry(str(x.dtype).removeprefix("torch."), list(x.shape), str(x.device), crc)


def _chunks(x: Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor on the CPU."""
    if x.numel():
        data = memoryview(x.reshape(-1).view(torch.uint8).numpy())
        yield from (data[i : i + CHUNK] for i in range(0, len(data), CHUNK))


def _read(file: BinaryIO, place: torch.device | None) -> tuple[Iterator[Tensor], Any]:
    """The tensors, each made when it is asked for, and the code of the tree."""
    if file.read(2) == b"PK":
        tensors, code = read_first(file, place)
        return (_blank(x.nbytes).view(x.dtype).view(x.shape).to(x.device).copy_(x) for x in tensors), code
    file.seek(0)
    entries, code = _read_header(file)
    return (_read_tensor(file, e, place or _device(e.device)) for e in entries), code


def _read_header(file: BinaryIO) -> tuple[list[Entry], Any]:
    """The tensors and the tree of an opened file, which then stands at its first
    tensor; nothing is larger than the file has bytes for."""
    size = os.fstat(file.fileno()).st_size
    begin = file.read(len(MAGIC))
    if begin != MAGIC:
        raise CodeError("another kind of file")
    if size < len(MAGIC) + FOOTER.size:
        raise CodeError("a file that is cut off")
    file.seek(size - FOOTER.size)
    length, crc = FOOTER.unpack(file.read(FOOTER.size))
    start = size - FOOTER.size - length
    if start < len(MAGIC):
        raise CodeError("a file that is cut off, or goes on behind its end")
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
    nbytes = sum(_checked_bytes(e) for e in entries)
    if nbytes != start - len(MAGIC):
        raise CodeError(f"{start - len(MAGIC)} bytes of tensors where the header says {nbytes}")
    file.seek(len(MAGIC))
    return entries, code


def _checked_bytes(e: Entry) -> int:
    is_size = lambda n: type(n) is int and 0 <= n < 2**63
    good = isinstance(e.dtype, str) and e.dtype in DTYPES and isinstance(e.shape, list) and all(map(is_size, e.shape))
    if not good or not isinstance(e.device, str) or type(e.crc) is not int:
        raise CodeError(f"a tensor that cannot be: {show(e)}")
    try:
        torch.empty(e.shape, dtype=DTYPES[e.dtype], device="meta")
    except RuntimeError as error:  # torch's own limits
        raise CodeError(f"a tensor that cannot be: {str(error).splitlines()[0]}") from None
    return prod(e.shape) * DTYPES[e.dtype].itemsize


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        got, need = f"{device!r:.60}: {str(error).splitlines()[0]:.100}", "a device of this machine"
        fail("funcrec.load", "the device cannot be used.", got=got, need=need, hint='device="cpu"')
    return found


def _blank(nbytes: int) -> Tensor:
    """u8[nbytes] where rows are read fast, as those of `init`."""
    try:
        return empty_table((nbytes,), dtype=torch.uint8, device="cpu")
    except (RuntimeError, OSError) as error:
        got = f"{nbytes:,} bytes: {str(error).splitlines()[0]}"
        fail("funcrec.load", "there is no memory for a tensor.", got=got, need="free memory", kind=MemoryError)


def _read_tensor(file: BinaryIO, e: Entry, device: torch.device) -> Tensor:
    memory = _blank(prod(e.shape) * DTYPES[e.dtype].itemsize)
    x = memory.view(DTYPES[e.dtype]).view(e.shape)
    crc = 0
    for chunk in _chunks(x):
        if file.readinto(chunk) != len(chunk):
            raise CodeError("a file that was cut off while it was read")
        crc = zlib.crc32(chunk, crc)
    if crc != e.crc:
        raise CodeError(f"a tensor {describe(x)} with a wrong checksum")
    if x.dtype == torch.bool and x.numel() and int(x.view(torch.uint8).amax()) > 1:
        raise CodeError(f"a tensor {describe(x)} with bytes that are not bools")
    return x.to(device)


# -- comparing ---------------------------------------------------------------------------------------------------


def difference_problems(tree: Any, like: Any) -> Iterator[Problem]:
    """Every node in which two trees differ in place, kind, shape or dtype."""
    found, wanted = dict(_nodes(tree, "")), dict(_nodes(like, ""))
    leaves = lambda nodes: [p for p, (_, is_leaf) in nodes.items() if is_leaf]
    hint = "like=None, which loads what there is"
    for path in [p for p in leaves(wanted) if p not in found]:
        yield Problem(f"`{path}` is missing.", "nothing", wanted[path][0], hint)
    for path in [p for p in leaves(found) if p not in wanted]:
        yield Problem(f"`{path}` is not expected.", found[path][0], "nothing", hint)
    for path, (need, is_leaf) in wanted.items():
        if path in found and found[path][0] != need:
            differs = "has another shape or dtype" if is_leaf and found[path][1] else "is another kind of value"
            yield Problem(f"`{path or 'tree'}` {differs}.", found[path][0], need, hint)


def _nodes(node: Any, path: str) -> Iterator[tuple[str, tuple[str, bool]]]:
    """(path, (what it is, whether it is a leaf)) of every node."""
    children: list[tuple[str, Any]] = []
    kind = type(node).__name__
    if isinstance(node, Tensor):
        kind = describe(node)
    elif isinstance(node, dict):
        children = [(f"{path}[{show(k)}]", v) for k, v in node.items()]
    elif isinstance(node, (list, tuple)):
        children = [(f"{path}[{i}]", v) for i, v in enumerate(node)]
    elif class_name(type(node)) in CLASSES:
        values, (fields, static) = CLASSES[class_name(type(node))][0](node)
        kind = f"{kind} {show(static)}" if static else kind
        children = [(f"{path}.{n}".lstrip("."), v) for n, v in zip(fields, values, strict=True)]
    yield path, (kind, not children)
    for where, child in children:
        yield from _nodes(child, where)
