"""Sources of rows: the parts of files, read one after another, and tables in memory.

    source -> Source(schema, parts);   the rows of a source are those of its parts, in order

A part is a row group, a file of text or a piece of a table. In errors, a part names its rows.
"""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from funcrec.core import Problem, check, describe, fail, is_followed, is_tracked, reported, sure, twice_problems
from funcrec.data.readers._arrow import as_array as as_array
from funcrec.data.readers._arrow import need_pyarrow
from funcrec.data.readers._schema import Schema
from funcrec.files import Url, raise_of_store

END_BYTES = 1 << 12  # a Parquet file ends with the metadata of its rows
NEED = "a pandas, polars or pyarrow table, a dict of columns, a path, or paths"


Wanted = Sequence[str] | Schema | None  # the columns to read: a list, those of a schema, or None for all


class Part(NamedTuple):
    """A run of rows. file: the name of its file, "" in memory. word, first: the name of its first row, as "line" 2.

    num_rows: the number of rows; None if only reading can count them. read: returns all record batches of the part."""

    file: str
    word: str
    first: int
    num_rows: int | None
    read: Callable[[], Iterator[Any]]

    def name_of(self, row: int) -> str:
        """Return the name of a row in errors: `part-3.parquet`, row 17."""
        return f"`{self.file}`, {self.word} {row}" if self.file else f"{self.word} {row}"


class Source(NamedTuple):
    """A source. schema: a pyarrow.Schema of the columns that are read. parts: see `Part`. name: its name in errors.

    files: the paths of its files; none for a table in memory.
    """

    schema: Any
    parts: list[Part]
    name: str
    files: tuple[Path | Url, ...] = ()

    @property
    def content(self) -> dict[str, int]:
        """Return numbers that change if rows are added or removed.

        For files these are their number, their bytes, and a CRC of their names, sizes, first and last bytes.
        """
        if not self.files:
            return {"rows": sum(part.num_rows or 0 for part in self.parts)}
        crc, size = 0, 0
        for path in self.files:
            with path.open("rb") as file:
                own = file.seek(0, os.SEEK_END)
                ends = []
                for at in (0, max(own - END_BYTES, 0)):
                    file.seek(at)
                    ends.append(file.read(END_BYTES))
            size, crc = size + own, zlib.crc32(repr((path.name, own, ends)).encode(), crc)
        return {"files": len(self.files), "bytes": size, "crc": crc}


def table_of(call: str, source: Source):
    """Return all rows of a source as a table."""
    import pyarrow as pa

    return pa.Table.from_batches((c for part in source.parts for c in part_chunks(call, part)), source.schema)


def part_chunks(call: str, part: Part) -> Iterator:
    """Yield the record batches of a part. Raise if their rows are more or fewer than `part.num_rows`."""
    import pyarrow as pa

    rows = 0
    try:
        for chunk in part.read():
            rows += chunk.num_rows
            yield chunk
        if part.num_rows is not None and rows != part.num_rows:
            raise pa.ArrowInvalid(f"{rows} rows of {part.num_rows}")
    except (pa.ArrowException, OSError) as error:
        raise_of_store(error)
        what, need = f"`{part.file}` is damaged.", "pages as they were written"
        fail(call, what, got=f"{str(error)[:120]}", need=need, hint="the file once more from where it came")


def absent_problems(name: str, names: Sequence[str], wanted: Wanted) -> Iterator[Problem]:
    """Yield problems if a wanted column is absent, or occurs twice."""
    labels = wanted.labels if isinstance(wanted, Schema) else ()
    columns = names if wanted is None else sure(wanted_names(wanted))
    if not columns and wanted is not None:
        yield Problem("`columns` are none.", "no name", "names of columns", f"columns={names[:2]!r}; None for all")
    hint, once = f"columns={sorted({*columns})}", "each name once"
    found = twice_problems("`columns` name a column twice.", () if wanted is None else columns, hint, once)
    if (yield from reported(found)):
        return
    own = [n for n in names if n in columns]
    yield from twice_problems(f"{name} has a column twice.", own, "other names, when it is written", once)
    absent = [n for n in columns if n not in names]
    if absent:
        is_unlabelled = set(absent) <= set(labels)
        hint = "label=None in the schema, for prediction" if is_unlabelled else "names that it has"
        yield Problem(f"{name} lacks columns.", f"{list(names)}", f"{absent}", hint)


def wanted_names(wanted: Wanted) -> list[str] | None:
    return None if wanted is None else list(wanted.columns if isinstance(wanted, Schema) else wanted)


# -- memory ----------------------------------------------------------------------------------------------------------


def as_table(call: str, source: Any, wanted: Wanted):
    """Return a pyarrow.Table of the wanted columns of a source in memory."""
    pa, names = need_pyarrow(call), wanted_names(wanted)
    hint = '{"item": [1, 2], "click": [0, 1]}'
    try:
        if isinstance(source, pa.Table):
            table = source
        elif isinstance(source, pa.RecordBatch):
            table = pa.Table.from_batches([source])
        elif hasattr(source, "__arrow_c_stream__"):
            table = pa.table(source)
        elif hasattr(source, "__arrow_c_array__"):
            table = pa.Table.from_batches([pa.record_batch(source)])
        elif isinstance(source, Mapping):
            check(call, absent_problems("the table", list(map(str, source)), wanted))
            found = {str(n): _column(call, n, x) for n, x in source.items() if names is None or n in names}
            table = pa.Table.from_arrays(list(found.values()), names=list(found))
        else:
            fail(call, "the source is not a table.", got=describe(source), need=NEED, hint=hint, kind=TypeError)
    except (pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
        if len(error.args) == 1 and "\n  got   " in str(error):  # an error that this library raised
            raise
        got = f"{describe(source)}: {'; '.join(map(str, error.args))}"[:200]
        if isinstance(source, Mapping):
            need = "columns of one length"
            fail(call, "the columns of the table differ in length.", got=got, need=need, hint=hint)
        need = "columns of numbers, text, times or lists, each of one kind and one name"
        hint = "df.dtypes tells their kinds"
        hint = f"{hint}; df.iloc[[0]] for one row, series.to_frame() for one column"
        fail(call, "the table cannot be read.", got=got, need=need, hint=hint, kind=TypeError)
    check(call, absent_problems("the table", table.column_names, wanted))
    return (table if names is None else table.select(names)).replace_schema_metadata(None)


def _column(call: str, name: str, x: Any):
    """Return one column of a dict. The column is a list, an array of any library, or a tensor."""
    import pyarrow as pa

    what, need = f"column `{name}` cannot be read.", "values of one kind; None where one is missing"
    hint = "a list, a vector of numpy or torch, an array of pyarrow: [1, 2], or [[1, 2], []]"
    if isinstance(x, Number):
        fail(call, what, got=describe(x), need=f"{need}: a list of one, for one row", hint=f"[{x!r}]", kind=TypeError)
    if isinstance(x, str | bytes | Mapping):
        fail(call, what, got=describe(x), need=need, hint=hint, kind=TypeError)
    if isinstance(x, torch.Tensor) and is_followed(x):
        got = f"{describe(x)} that is differentiated" if is_tracked(x) else describe(x)
        need = "a tensor outside of transforms, that needs no gradient"
        fail(call, what, got=got, need=need, hint=f"{name}.detach()", kind=TypeError)
    try:
        x = x.detach().cpu().resolve_conj().resolve_neg().numpy() if isinstance(x, torch.Tensor) else x
        if isinstance(x, np.ndarray) and x.ndim == 2 and x.shape[1]:
            return pa.FixedSizeListArray.from_arrays(as_array(x.reshape(-1)), x.shape[1])
        return x if isinstance(x, pa.Array | pa.ChunkedArray) else as_array(x)
    except (pa.ArrowException, TypeError, OverflowError, ValueError, NotImplementedError) as error:
        got = f"{describe(x)}; {str(error)[:100]}"
        hint = "pa.array(x, pa.uint64()), or strings" if isinstance(error, OverflowError) else hint
        fail(call, what, got=got, need=need, hint=hint, kind=TypeError)
