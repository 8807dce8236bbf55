"""Delta files: what changed of a package's weights from one version to the next.

weights(to) = weights(from) with whole tensors, and rows of others, in place of their own          bit for bit

8 bytes "FRDELTA1", u64 length of the header, u32 its CRC, u32 0         little-endian, as all numbers
the header, JSON: {"format", "manifest", "from", "to", "size", "crc32" of all after the header, "tensors": [...]}
each tensor's bytes from a multiple of 8 on, zeros between: {"name", "rows": n, "offset", "nbytes"}
    rows n: i64[n], ascending, then n rows' bytes.       rows null: all of its bytes
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import Problem, check, fail
from funcrec.files import chunks, plain_parts, write_whole
from funcrec.serve._weights import DTYPES

MAGIC, FORMAT, ALIGN = b"FRDELTA1", 1, 8
START = struct.Struct("<8sQII")
HEADER = {"format": int, "manifest": str, "from": str, "to": str, "size": int, "crc32": int, "tensors": list}
ENTRY = {"name": str, "rows": int | None, "offset": int, "nbytes": int}
AGAIN = "fr.write_delta again, or the file's own copy"


class Change(NamedTuple):
    """Of one tensor: its rows i64[n], ascending, None for all of it; and their values."""

    rows: Tensor | None
    values: Tensor


def write_file(call: str, path: Path, digest: str, since: str, version: str, changes: Mapping[str, Change]) -> None:
    """The file, whole or not there."""
    parts, at = [], 0
    entries = []
    for name, change in changes.items():
        own = [*(() if change.rows is None else (change.rows,)), change.values]
        data = b"".join(chunk for x in own for part in plain_parts(x) for chunk in chunks(part))
        rows = None if change.rows is None else change.rows.shape[0]
        entries.append({"name": name, "rows": rows, "offset": at, "nbytes": len(data)})
        parts += [data, b"\0" * (-len(data) % ALIGN)]
        at += len(data) + len(parts[-1])
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    content = {"format": FORMAT, "manifest": digest, "from": since, "to": version, "size": at, "crc32": crc}
    header = json.dumps({**content, "tensors": entries}).encode()
    header += b" " * (-(START.size + len(header)) % ALIGN)
    start = START.pack(MAGIC, len(header), zlib.crc32(header), 0)
    write_whole(call, path, lambda file: file.writelines([start, header, *parts]))


def read_changes(
    call: str, path: Path, params: Sequence[dict], digest: str, version: str
) -> tuple[dict[str, Change], str]:
    """({parameter: what changes}, the version that it makes), all of the file held to what a package is."""
    data = _read(call, path)
    header, body = _parsed(call, path, data)
    need = header["size"]
    if len(body) != need or zlib.crc32(body) != header["crc32"]:
        fail(call, f"`{path}` is damaged.", got=f"{len(body)} bytes, another CRC", need=f"{need} bytes", hint=AGAIN)
    check(call, place_problems(path, header, digest, version))
    shapes = {p["name"]: p for p in params}
    check(call, entry_problems(path, header, shapes))
    changes = {e["name"]: _change(e, shapes[e["name"]], body) for e in header["tensors"]}
    check(call, row_problems(path, changes, shapes))
    return changes, header["to"]


def _read(call: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        need, got = "a file of fr.write_delta", error.strerror or str(error)
        fail(call, f"`{path}` cannot be read.", got=got, need=need, hint=AGAIN, kind=type(error))


def _parsed(call: str, path: Path, data: bytes) -> tuple[dict[str, Any], memoryview]:
    def damaged(got: str, need: str):
        fail(call, f"`{path}` is not a delta.", got=got, need=need, hint=AGAIN)

    if len(data) < START.size or data[:8] != MAGIC:
        damaged(f"{len(data)} bytes that begin with {data[:8]!r}", f"{MAGIC!r}")
    _, length, crc, zero = START.unpack_from(data)
    header = data[START.size : START.size + length]
    if len(header) != length or zlib.crc32(header) != crc or zero:
        damaged("a header that was changed or cut off", f"{length} bytes of CRC {crc:08x}")
    try:
        content = json.loads(header)
    except (ValueError, RecursionError):
        damaged("a header that is not JSON", "the file as it was written")
    if not has_form(content, HEADER) or not all(has_form(e, ENTRY) for e in content["tensors"]):
        damaged("a header with other entries", "the file as it was written")
    if content["format"] != FORMAT:
        damaged(f"format {content['format']}", f"format {FORMAT}")
    return content, memoryview(data)[START.size + length :]


def has_form(x: Any, form: Mapping[str, Any]) -> bool:
    """Whether an object of JSON has these entries and no other."""
    is_one = lambda v, kind: isinstance(v, kind) and not isinstance(v, bool)
    return isinstance(x, dict) and x.keys() == form.keys() and all(is_one(x[k], kind) for k, kind in form.items())


def _change(entry: dict, param: dict, body: memoryview) -> Change:
    data = body[entry["offset"] : entry["offset"] + entry["nbytes"]]
    dtype, n = DTYPES[param["dtype"]], entry["rows"]
    take = lambda part, dtype: (
        torch.frombuffer(bytearray(part), dtype=dtype) if len(part) else torch.empty(0, dtype=dtype)
    )
    if n is None:
        return Change(None, take(data, dtype).view(param["shape"]))
    return Change(take(data[: 8 * n], torch.int64), take(data[8 * n :], dtype).view(n, *param["shape"][1:]))


def row_bytes(param: Mapping) -> int:
    """Of one row of a parameter [R, ...]."""
    return torch.Size(param["shape"][1:]).numel() * DTYPES[param["dtype"]].itemsize


# -- validators --------------------------------------------------------------------------------------------------


def place_problems(path: Path, header: dict, digest: str, version: str) -> Iterator[Problem]:
    if header["manifest"] != digest:
        got, need = f"of the package {header['manifest'][:12]}..", f"of {digest[:12]}.."
        yield Problem(
            f"`{path}` is of another package.", got, need, "fr.write_delta(path, delta, package, ...) of this one"
        )
    elif header["from"] != version:
        got, need = f"from {header['from']!r} to {header['to']!r}", f"from {version!r}, the version that runs"
        yield Problem(
            f"`{path}` is not the next delta.", got, need, "those between first, or the weights of a later version"
        )


def entry_problems(path: Path, header: dict, shapes: Mapping[str, dict]) -> Iterator[Problem]:
    names = [e["name"] for e in header["tensors"]]
    for e in header["tensors"]:
        param, n = shapes.get(e["name"]), e["rows"]
        if param is None or names.count(e["name"]) > 1:
            yield Problem(f"`{path}` has other parameters.", e["name"], f"each once of {list(shapes)[:5]}", AGAIN)
            continue
        rows = param["shape"][0] if param["shape"] else 1
        whole = rows * row_bytes(param) if param["shape"] else DTYPES[param["dtype"]].itemsize
        need = whole if n is None else n * (8 + row_bytes(param))
        if (
            (n is not None and (n < 0 or not param["shape"]))
            or e["nbytes"] != need
            or not 0 <= e["offset"] <= header["size"] - need
        ):
            got = f"{e['name']}: {e['nbytes']} bytes at {e['offset']}"
            yield Problem(
                f"`{path}` has a tensor of another size.", got, f"{need} bytes within {header['size']}", AGAIN
            )


def row_problems(path: Path, changes: Mapping[str, Change], shapes: Mapping[str, dict]) -> Iterator[Problem]:
    for name, (rows, _) in changes.items():
        if rows is None or not rows.numel():
            continue
        most = shapes[name]["shape"][0]
        if rows[0] < 0 or rows[-1] >= most or not (rows[1:] > rows[:-1]).all():
            got = f"{int(rows.min())} to {int(rows.max())}"
            yield Problem(
                f"`{path}` has rows that {name} has not.", got, f"ascending, each once, 0 to {most - 1}", AGAIN
            )
