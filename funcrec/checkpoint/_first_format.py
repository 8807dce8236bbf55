"""Checkpoints as funcrec 0.1 began to write them: torch's zip archive
of the tensors and a tree of tuples, read as today's.

    read_first(file) = (tensors, code)        as a header of today tells them

torch reads it without running code of it. Every record lies in
the file as it is, so that nothing is larger than the file.
"""

import errno
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
from torch import Tensor

from funcrec.checkpoint._code import CodeError, encode, show

FORMAT = "funcrec checkpoint 1"
CHUNK = 1 << 20  # bytes


def read_first(file: BinaryIO, device: torch.device | None) -> tuple[list[Tensor], Any]:
    """The tensors, in the order of the tree's code, and that code.

    Raises: CodeError for a file that is damaged or of another kind.
    """
    with tempfile.TemporaryFile() as copy:
        nbytes = _copy_archive(file, copy)
        try:
            content = torch.load(copy, map_location=device, weights_only=True)
        except Exception as error:  # torch.load has no error type of its own
            raise CodeError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CodeError("a zip archive that save did not write")
    given, tensors = content.get("tensors"), []
    if not isinstance(given, list) or not all(_is_whole(x, nbytes) for x in given):
        raise CodeError("tensors that save did not write")

    def take(place: Any) -> list:
        if place != len(tensors) or place == len(given):
            raise CodeError(f"a tensor that is not in its place: {show(place)}")
        tensors.append(given[place])
        return ["tensor"]

    code = _code(content.get("tree"), take)
    if len(tensors) < len(given):
        raise CodeError("more tensors in the file than in its tree")
    return tensors, code


def _copy_archive(file: BinaryIO, copy: BinaryIO) -> int:
    """Write the records, each of which has its CRC, to an archive whose own entries are
    whole (torch trusts those); how many bytes they have."""
    try:
        with zipfile.ZipFile(file) as archive, zipfile.ZipFile(copy, "w") as made:
            records = archive.infolist()
            if any(r.compress_type != zipfile.ZIP_STORED or r.flag_bits & 1 for r in records):
                raise CodeError("an archive that is compressed or encrypted")
            for r in records:
                with archive.open(r) as source, made.open(r.filename, "w", force_zip64=True) as target:
                    shutil.copyfileobj(source, target, CHUNK)
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, struct.error) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise
        raise CodeError(f"{error}") from None
    copy.seek(0)
    return sum(r.file_size for r in records)


def _is_whole(x: Any, nbytes: int) -> bool:
    """Whether x is a plain tensor whose elements all lie in the file."""
    plain = type(x) is Tensor and x.layout == torch.strided and not x.is_quantized and not x.requires_grad
    return plain and not x.is_meta and x.numel() * x.element_size() <= x.untyped_storage().nbytes() <= nbytes


def _code(code: Any, take: Callable[[Any], list]) -> Any:
    """A node of the first format as one of today's."""
    inside = lambda part: _code(part, take)
    match code:
        case ("tensor", place):
            return take(place)
        case ("plain", bool() | int() | float() | str() | None as value):
            return encode(value, "tree").code
        case ("dict", [*items]) if all(isinstance(item, tuple) and len(item) == 2 for item in items):
            return ["dict", [[encode(k, "tree").code, inside(v)] for k, v in items]]
        case ("list" | "tuple" as kind, [*items]):
            return [kind, [inside(v) for v in items]]
        case ("class", str(name), [*fields], [*parts], static):
            return ["class", name, list(fields), [inside(p) for p in parts], inside(static)]
    raise CodeError(f"a node of the tree that is unknown: {show(code)}")
