"""Faults of text that pyarrow reads without an error: an open quote, integers that become floats, and text in another
encoding, which becomes bytes."""

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from funcrec.core import fail
from funcrec.data.readers._arrow import compute, text_of

BEYOND = 2.0**63  # above the largest i64
REST = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')  # the rest of a field in quotes


def last_column(path: Path, delimiter: str, names: list[str] | None) -> str | None:
    """Return the name of the last column, or None.

    An open quote in the last column swallows the rest of the file. In other columns it causes an error."""

    if names is None:
        with text_of(path) as file, io.TextIOWrapper(file, "utf-8-sig", "replace", newline="") as text:
            names = next(csv.reader(text, delimiter=delimiter), [])
    return names[-1] if names and names.count(names[-1]) == 1 else None


def ends_in_a_line_break(chunk, name: str) -> bool:
    """Return whether the last field of a record batch contains a line break. An open quote leads to such a field."""
    value = chunk.column(name)[-1].as_py()
    value = value.encode() if isinstance(value, str) else value
    return isinstance(value, bytes) and (b"\n" in value or b"\r" in value)


def check_quotes(call: str, path: Path, delimiter: str) -> None:
    """Raise if a field begins with a quote and does not end with a quote."""

    begin = re.compile(rb"(?:^|[\r" + re.escape(delimiter.encode()) + rb'])"')
    opened = None
    with text_of(path) as file:
        for number, line in enumerate(io.BufferedReader(file), 1):
            at = 0
            while found := (begin.search(line, at) if opened is None else REST.match(line, at)):
                at = found.end()
                opened = number + line[:at].count(b"\r") if opened is None else None
    if opened is not None:
        what = f"`{path.name}`, line {opened} has a quote that nothing closes."
        hint = "Text(quotes=False), if quotes are part of the text"
        fail(call, what, got="one field up to the end of the file", need='"..." around a field', hint=hint)


def check_floats(call: str, path: Path, chunk, as_text: Callable[[list[str]], Any]) -> None:
    """Raise if a column that was inferred as floats has integers that do not fit in an i64.

    chunk: the rows from which the types were inferred. as_text: returns these rows of the named columns as text.
    """
    import pyarrow.types as kinds

    pc = compute()
    floats = [f.name for f in chunk.schema if kinds.is_floating(f.type)]
    large = [n for n in floats if (pc.max(pc.abs(chunk.column(n))).as_py() or 0.0) >= BEYOND]
    if not large:
        return
    written = as_text(large)
    for name in large:
        is_whole = pc.match_substring_regex(written.column(name), r"^\s*-?[0-9]+\s*$").fill_null(True)
        if pc.all(is_whole).as_py():
            at = pc.index(pc.greater_equal(pc.abs(chunk.column(name)), BEYOND), True).as_py()
            what = f"`{path.name}`, column `{name}` has integers that are beyond 64 bits with a sign."
            hint = f'Text(types={{"{name}": "uint64"}}), "string" or "double"'
            fail(call, what, got=written.column(name)[at].as_py(), need="a type of its own", hint=hint)


def check_text(call: str, path: Path, chunk, first: int) -> None:
    """Raise if a column was inferred as bytes: it holds text that is not in UTF-8. first: the line of the first row."""
    import pyarrow.types as kinds

    for name in (f.name for f in chunk.schema if kinds.is_binary(f.type)):
        at, value = next((i, x) for i, x in enumerate(chunk.column(name).to_pylist()) if x and not is_utf8(x))
        what, need = f"`{path.name}`, line {first + at}, column `{name}` is not text in UTF-8.", "text in UTF-8"
        hint = f'path.write_text(path.read_text("latin-1")), or Text(types={{"{name}": "binary"}})'
        fail(call, what, got=f"{value[:40]!r}", need=need, hint=hint)


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_utf16(path: Path) -> bool:
    """Return whether the file begins with the mark of UTF-16. The caller could not read the file."""
    import pyarrow as pa

    try:
        with text_of(path) as file:
            return file.read(2) in (b"\xff\xfe", b"\xfe\xff")
    except (pa.ArrowException, OSError):
        return False


def is_fraction(words: str) -> bool:
    """Return whether the words of pyarrow say that an integer was expected, and name a number that is not whole."""
    found = re.search(r"conversion error to u?int\d+: invalid value '([^']*)'", words)
    try:
        return found is not None and not re.fullmatch(r"\s*[+-]?\d+\s*", found[1]) and bool(str(float(found[1])))
    except ValueError:
        return False
