"""Delta files: what changed of a package's weights from one version to the next.

weights(to) = weights(from) with whole tensors, and rows of others, in place of their own          bit for bit

A file of named tensors, whose texts are the package's `manifest` (its digest), `from` and `to`. Of a parameter X that
changes it has whole/X; or rows/X i64[n], ascending, and values/X, n rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from funcrec.core import Problem, check, fail
from funcrec.files import FileError, Header, Placed, check_crc, read_header, tensor_at, write_tensors, write_whole
from funcrec.serve._json_forms import text_of
from funcrec.serve._weights import DTYPES, STORED, fail_damaged

KIND, ALIGN = "funcrec delta 2", 8
WHOLE, ROWS, VALUES = "whole/", "rows/", "values/"
AGAIN = "fr.write_delta again, or the file's own copy"


class Change(NamedTuple):
    """Of one tensor: its rows i64[n], ascending, None for all of it; and their values."""

    rows: Tensor | None
    values: Tensor


def write_file(call: str, path: Path, digest: str, since: str, version: str, changes: Mapping[str, Change]) -> None:
    """The file, whole or not there."""
    tensors: dict[str, Tensor] = {}
    for name, (rows, values) in changes.items():
        tensors |= {WHOLE + name: values} if rows is None else {ROWS + name: rows, VALUES + name: values}
    texts = {"manifest": digest, "from": since, "to": version}
    write_whole(call, path, lambda file: write_tensors(file, KIND, tensors, texts, ALIGN))


def read_changes(
    call: str, path: Path, params: Sequence[dict], digest: str, version: str
) -> tuple[dict[str, Change], str]:
    """({parameter: what changes}, the version that it makes), all of the file held to what a package is."""
    data, wanted = _read(call, path), {p["name"]: p for p in params}
    try:
        header = read_header(KIND, len(data), lambda at, n: bytes(data[at : at + n]), ALIGN, STORED)
        check(call, place_problems(path, header.texts, digest, version))
        parts = _parts(header)
        check(call, form_problems(path, parts, wanted))
        found = {n: tensor_at(data, p) for n, p in header.tensors.items()}
        for n, p in header.tensors.items():
            check_crc(p, found[n])
    except FileError as error:
        fail_damaged(call, path, error, AGAIN)
    whole = lambda n: WHOLE + n in found
    changes = {n: Change(None if whole(n) else found[ROWS + n], found[(VALUES, WHOLE)[whole(n)] + n]) for n in parts}
    check(call, row_problems(path, changes, wanted))
    return changes, header.texts["to"]


def _read(call: str, path: Path) -> bytearray:
    try:
        return bytearray(path.read_bytes())
    except OSError as error:
        need, got = "a file of fr.write_delta", error.strerror or str(error)
        fail(call, f"`{path}` cannot be read.", got=got, need=need, hint=AGAIN, kind=type(error))


def _parts(header: Header) -> dict[str, dict[str, Placed]]:
    """{parameter: {WHOLE, ROWS, VALUES: tensor}}."""
    out: dict[str, dict[str, Placed]] = {}
    for name, p in header.tensors.items():
        part, slash, own = name.partition("/")
        out.setdefault(own if slash else name, {})[part + slash] = p
    return out


# -- validators --------------------------------------------------------------------------------------------------


def place_problems(path: Path, texts: Mapping[str, str], digest: str, version: str) -> Iterator[Problem]:
    if absent := [key for key in ("manifest", "from", "to") if key not in texts]:
        yield Problem(f"`{path}` is damaged.", f'no text "{absent[0]}"', "the file as it was written", AGAIN)
    elif texts["manifest"] != digest:
        got, need = f"of the package {texts['manifest'][:12]}..", f"of {digest[:12]}.."
        hint = "fr.write_delta(path, delta, package, ...) of this one"
        yield Problem(f"`{path}` is of another package.", got, need, hint)
    elif texts["from"] != version:
        got, need = f"from {texts['from']!r} to {texts['to']!r}", f"from {version!r}, the version that runs"
        hint = "those between first, or the weights of a later version"
        yield Problem(f"`{path}` is not the next delta.", got, need, hint)


def form_problems(
    path: Path, parts: Mapping[str, Mapping[str, Placed]], params: Mapping[str, dict]
) -> Iterator[Problem]:
    """A parameter of the package, whole; or rows of it, and as many values."""
    what, form = f"`{path}` has other parameters.", lambda p: (p.dtype, list(p.shape))
    for name, own in parts.items():
        if name not in params:
            yield Problem(what, name, f"each of {list(params)[:5]}", AGAIN)
            continue
        dtype, shape = DTYPES[params[name]["dtype"]], params[name]["shape"]
        n = own[ROWS].shape[:1] if ROWS in own else ()
        rows = {ROWS: (torch.int64, [*n]), VALUES: (dtype, [*n, *shape[1:]])}
        found = {part: form(p) for part, p in own.items()}
        if found != {WHOLE: (dtype, shape)} and not (found == rows and shape and n):
            need = f"{text_of(params[name])}, whole, or rows i64[n] and their values"
            yield Problem(what, f"{name} in another form", need, AGAIN)


def row_problems(path: Path, changes: Mapping[str, Change], params: Mapping[str, dict]) -> Iterator[Problem]:
    for name, (rows, _) in changes.items():
        if rows is None or not rows.numel():
            continue
        most = params[name]["shape"][0]
        if rows[0] < 0 or rows[-1] >= most or not (rows[1:] > rows[:-1]).all():
            got, need = f"{int(rows.min())} to {int(rows.max())}", f"ascending, each once, 0 to {most - 1}"
            yield Problem(f"`{path}` has rows that {name} has not.", got, need, AGAIN)
