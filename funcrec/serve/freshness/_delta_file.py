"""Delta files: what changed of a package's weights from one version to the next.

weights(to) = weights(from) with some tensors, and some rows of others, replaced bit for bit

A delta is a file of named tensors, with the texts `manifest` (the package's digest), `from` and `to`. A changed
parameter X is stored as whole/X; or as rows/X i64[n], ascending, and values/X with n rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from funcrec.core import Problem, check, fail
from funcrec.files import FileError, Placed, check_crc, read_header, reason, tensor_at, write_tensors, write_whole
from funcrec.serve._weights import DTYPES, STORED, fail_damaged

KIND, ALIGN = "funcrec delta 2", 8
WHOLE, ROWS, VALUES = "whole/", "rows/", "values/"
AGAIN = "fr.write_delta again, or the file's own copy"


class Change(NamedTuple):
    """The change of one tensor: its rows i64[n], ascending (None for all rows), and their values."""

    rows: Tensor | None
    values: Tensor


def write_file(call: str, path: Path, digest: str, since: str, version: str, changes: Mapping[str, Change]) -> None:
    """Write the file, whole or not at all."""
    tensors: dict[str, Tensor] = {}
    for name, (rows, values) in changes.items():
        tensors |= {WHOLE + name: values} if rows is None else {ROWS + name: rows, VALUES + name: values}
    specs = [(n, x.dtype, x.shape) for n, x in tensors.items()]
    texts = {"manifest": digest, "from": since, "to": version}
    write_whole(call, path, lambda file: write_tensors(file, KIND, specs, tensors.values(), texts, ALIGN))


def read_changes(
    call: str, path: Path, params: Sequence[dict], digest: str, version: str
) -> tuple[dict[str, Change], str]:
    """Return ({parameter: its change}, the version that it makes), after a check of the whole file against the
    package."""
    data, wanted = _read(call, path), {p["name"]: p for p in params}
    try:
        places, texts = read_header(KIND, len(data), lambda at, n: bytes(data[at : at + n]), ALIGN, STORED)
        check(call, place_problems(path, texts, digest, version))
        check(call, form_problems(path, places, wanted))
        found = {n: tensor_at(data, p) for n, p in places.items()}
        for n, p in places.items():
            check_crc(p, found[n])
    except FileError as error:
        fail_damaged(call, path, error, AGAIN)
    changes = {n.removeprefix(WHOLE): Change(None, x) for n, x in found.items() if n.startswith(WHOLE)}
    rows = [n.removeprefix(ROWS) for n in found if n.startswith(ROWS)]
    changes |= {n: Change(found[ROWS + n], found[VALUES + n]) for n in rows}
    check(call, row_problems(path, changes, wanted))
    return changes, texts["to"]


def _read(call: str, path: Path) -> bytearray:
    try:
        return bytearray(path.read_bytes())
    except OSError as error:
        need, got = "a file of fr.write_delta", reason(error)
        fail(call, f"`{path}` cannot be read.", got=got, need=need, hint=AGAIN, kind=type(error))


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


def form_problems(path: Path, found: Mapping[str, Placed], params: Mapping[str, dict]) -> Iterator[Problem]:
    """Yield problems unless each tensor is a whole parameter of the package, or its rows, or values of as many rows. No
    parameter is both."""
    for name, x in found.items():
        own = name.partition("/")[2]
        p, rows, is_whole = params.get(own), found.get(ROWS + own), WHOLE + own in found
        n = [*rows.shape] if rows else []
        forms = {}
        if p and is_whole and not rows:
            forms[WHOLE + own] = (DTYPES[p["dtype"]], p["shape"])
        elif p and p["shape"] and rows and len(n) == 1 and VALUES + own in found:
            forms = {ROWS + own: (torch.int64, n), VALUES + own: (DTYPES[p["dtype"]], [*n, *p["shape"][1:]])}
        if forms.get(name) != (x.dtype, [*x.shape]):
            need = f"whole/, rows/ and values/ of {list(params)[:5]}"
            yield Problem(f"`{path}` has other parameters.", f"{name} {[*x.shape]}", need, AGAIN)


def row_problems(path: Path, changes: Mapping[str, Change], params: Mapping[str, dict]) -> Iterator[Problem]:
    for name, (rows, _) in changes.items():
        if rows is None or not rows.numel():
            continue
        most = params[name]["shape"][0]
        if rows[0] < 0 or rows[-1] >= most or not (rows[1:] > rows[:-1]).all():
            got, need = f"{int(rows.min())} to {int(rows.max())}", f"ascending, each once, 0 to {most - 1}"
            yield Problem(f"`{path}` has rows that {name} has not.", got, need, AGAIN)
