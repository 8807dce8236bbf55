"""Files of named tensors in the layout of safetensors, with a check of every byte.

    length of the header, u64 | header, JSON: texts, and dtype, shape and place of each tensor | the tensors' bytes

The texts begin with the file's format and a CRC of the header and its length. This CRC counts its own digits as zeros.
The CRCs of the tensors follow, in the tensors' order. Each tensor that has bytes begins at a multiple of an alignment.
A tensor of zeros, whose name begins with PADDING, fills the room before it.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from funcrec.files._tensor_bytes import crc_of, write_bytes

HEAD, DIGITS, MOST = 8, 8, 1 << 48  # bytes of the length; digits of a CRC; no size is larger
PADDING, TEXTS, BLANK = "__padding__", "__metadata__", "0" * DIGITS
DTYPE_NAMES = {  # in the order in which safetensors lays them out; its library does not read the last two
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64", torch.float32: "F32",
    torch.uint32: "U32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16",
    torch.int16: "I16", torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex128: "C128", torch.complex32: "C32",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

Read = Callable[[int, int], bytes]  # (where, how many) -> bytes of a file
Spec = tuple[str, torch.dtype, Sequence[int]]


class FileError(Exception):
    """Raised for a file that differs from what was written: what is wrong, what it has and what is needed."""


class Placed(NamedTuple):
    """A tensor in a file, from byte `offset` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    crc: int = 0

    @property
    def nbytes(self) -> int:
        return 0 if 0 in self.shape else prod(self.shape) * self.dtype.itemsize

    @property
    def is_padding(self) -> bool:
        return self.name.startswith(PADDING)


def lay(specs: Iterable[Spec], align: int) -> Iterator[Placed]:
    """Yield the places of tensors one after the other, and of the padding between them."""
    end = count = 0
    for name, dtype, shape in specs:
        found = Placed(name, dtype, tuple(shape), end)
        gap = -end % align if found.nbytes else 0
        if gap:
            yield Placed(f"{PADDING}{count}", torch.uint8, (gap,), end)
        yield found._replace(offset=end + gap)
        end, count = end + gap + found.nbytes, count + 1


# -- writing -----------------------------------------------------------------------------------------------------


def header_of(places: Iterable[Placed], texts: Mapping[str, str], align: int) -> bytes:
    """Return the length and the header, padded to a multiple of `align` bytes."""
    content: dict[str, Any] = {TEXTS: dict(texts)} if texts else {}
    for p in places:
        at = [p.offset, p.offset + p.nbytes]
        content[p.name] = {"dtype": DTYPE_NAMES[p.dtype], "shape": list(p.shape), "data_offsets": at}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    text = text.ljust(-(-(HEAD + len(text)) // align) * align - HEAD)
    return len(text).to_bytes(HEAD, "little") + text


def beginning(kind: str) -> bytes:
    """Return the beginning of a header of a format, up to the digits of its CRC."""
    return f'{{"{TEXTS}":{{"format":"{kind}","crc32":"'.encode()


def write_tensors(
    file: BinaryIO,
    kind: str,
    specs: Iterable[Spec],
    tensors: Iterable[Tensor],
    texts: Mapping[str, str],
    align: int,
    late: Callable[[Sequence[Placed]], Mapping[str, str]] = lambda places: {},
) -> list[Placed]:
    """Write tensors as they come, then the header before them; return their places.

    Args:
      late: gives texts that follow from the places, each as long as its placeholder in `texts`.
    """

    def header(more: Mapping[str, str]) -> bytes:
        crcs = "".join(f"{p.crc:0{DIGITS}x}" for p in places if not p.is_padding)
        out = header_of(places, {"format": kind, "crc32": BLANK, "crc32s": crcs, **texts, **more}, align)
        at = HEAD + len(beginning(kind))
        return out[:at] + f"{zlib.crc32(out):0{DIGITS}x}".encode() + out[at + DIGITS :]

    places, values = list(lay(specs, align)), iter(tensors)
    start = file.seek(len(header({})))
    for i, p in enumerate(places):
        if p.is_padding:
            file.write(bytes(p.nbytes))
        else:
            places[i] = p._replace(crc=write_bytes(file, next(values)))
    out = [p._replace(offset=start + p.offset) for p in places if not p.is_padding]
    whole = header(late(out))
    if len(whole) != start:
        raise ValueError("a text has another length than its placeholder")
    file.seek(0)
    file.write(whole)
    return out


# -- reading -----------------------------------------------------------------------------------------------------


def read_header(
    kind: str, size: int, read: Read, align: int, dtypes: Mapping[str, torch.dtype] = DTYPES
) -> tuple[dict[str, Placed], dict[str, str]]:
    """Read the header of a file of `size` bytes, which accounts for every byte; return ({name: tensor}, texts).

    Raises:
      FileError: if the file differs from what was written. kernels/serving/tensors.cpp has the same messages.
    """
    head = read(0, HEAD)
    length = int.from_bytes(head, "little")
    if len(head) < HEAD or length > size - HEAD:
        raise FileError("is cut off", f"{size} bytes", "a header and the tensors that it names")
    text, start = read(HEAD, length), beginning(kind)
    if not text.startswith(start):
        raise FileError("is of another format", "another beginning", kind)
    at = len(start)
    now = f"{zlib.crc32(text[at + DIGITS :], zlib.crc32(head + start + BLANK.encode())):0{DIGITS}x}"
    if text[at : at + DIGITS] != now.encode():
        raise FileError("was changed", f"CRC {now}", "the CRC in its header")
    try:
        content = json.loads(text.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        raise FileError("is damaged", "a header that is not JSON", "the file as it was written") from None
    texts = content.pop(TEXTS)
    places = sorted((_placed(n, x, dtypes) for n, x in content.items()), key=lambda p: (p.offset, p.nbytes))
    end = 0
    for p in places:
        if p.offset != end:
            raise FileError("is damaged", f"{p.name} from {p.offset} on", f"from {end} on")
        end += p.nbytes
    first = HEAD + length
    if first + end != size:
        what = "is cut off" if first + end > size else "goes on past its end"
        raise FileError(what, f"{size} bytes", f"{first + end} bytes")
    for p in places:
        if p.nbytes and not p.is_padding and (first + p.offset) % align:
            raise FileError("is damaged", f"{p.name} at byte {first + p.offset}", f"a multiple of {align}")
        if p.is_padding and read(first + p.offset, p.nbytes).strip(b"\0"):
            raise FileError("was changed", "bytes between its tensors", "zeros")
    found = [p._replace(offset=first + p.offset) for p in places if not p.is_padding]
    return {p.name: p._replace(crc=crc) for p, crc in zip(found, _crcs(texts, len(found)), strict=True)}, texts


def _placed(name: str, x: Any, dtypes: Mapping[str, torch.dtype]) -> Placed:
    match x:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end], **more} if not more:
            if dtype in dtypes and all(map(_is_size, (*shape, begin, end))):
                found = Placed(name, dtypes[dtype], tuple(shape), begin)
                is_small = 0 in shape or all(n <= MOST for n in accumulate(shape, mul))  # before numbers of any length
                if is_small and found.nbytes == end - begin:
                    return found
    raise FileError("is damaged", f"a tensor that cannot be, {name}", "a dtype, a shape and a place of its size")


def _is_size(n: Any) -> bool:
    return type(n) is int and 0 <= n <= MOST


def _crcs(texts: Any, count: int) -> list[int]:
    """Return the CRC of each tensor."""
    crcs = texts.get("crc32s") if isinstance(texts, dict) and all(isinstance(x, str) for x in texts.values()) else None
    if crcs is None or len(crcs) != DIGITS * count or not re.fullmatch("[0-9a-f]*", crcs):
        raise FileError("is damaged", "other texts", "texts, and a CRC for each tensor")
    return [int(crcs[i : i + DIGITS], 16) for i in range(0, len(crcs), DIGITS)]


def tensor_at(memory: Any, p: Placed) -> Tensor:
    """Return a tensor in the memory of a file, mapped or read."""
    flat = torch.frombuffer(memory, dtype=p.dtype, count=prod(p.shape), offset=p.offset) if p.nbytes else None
    return (torch.zeros(0, dtype=p.dtype) if flat is None else flat).view(p.shape)


def check_crc(p: Placed, x: Tensor) -> None:
    """Raise a FileError if a tensor has another CRC."""
    if (crc := crc_of(x)) != p.crc:
        raise FileError(f"was changed, in {p.name}", f"CRC {crc:0{DIGITS}x}", f"{p.crc:0{DIGITS}x}")
