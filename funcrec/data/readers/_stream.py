"""Tables larger than memory: record batches of one size, in order or shuffled, from any starting batch.

    batch i = rows [i · B, (i + 1) · B) of the parts in a random order, each window of W rows shuffled

The order depends only on the key, the source and W. So the number of batches that were read describes a position.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from funcrec.core import Count, Key, Size, fail, random, typed
from funcrec.data.datasets._ctr import random_order
from funcrec.data.readers._files import Format, opened
from funcrec.data.readers._rank_parts import RankOf, source_of
from funcrec.data.readers._sources import Part, Source, part_chunks, table_of

WINDOW = 1 << 17
ROW = "\0row"  # a column that numbers each row: the number of its part, and its number in the part's file
BITS = 40  # bits of a row's number in its file


@typed
def read(source: object, *, columns: Sequence[str] | None = None, format: Format = None) -> Any:
    """Return a pyarrow.Table of the rows of any source.

    Args:
      source: a pandas, polars or pyarrow table, or any value with Arrow's PyCapsule interface; a dict of columns, which
        are lists or arrays of numpy or torch; a path, a list of paths, or a folder, also as URLs in a store
        ("s3://bucket/clicks": see `fr.save`). Files are CSV, TSV or Parquet. Text
        may be packed as .gz, .bz2, .zst or .lz4. Hive partitions of a folder (`day=3/part.parquet`) become columns of
        integers or strings.
      columns: the columns to read, in this order. None reads all columns of the first file.
      format: "csv", "tsv", "parquet" or a `Text`, for files whose names do not end in a known suffix.

    Returns:
      the rows in the order of the files. Files of a folder are sorted by name. A column's type holds the values of all
      files.

    Raises:
      ValueError, TypeError: a value or an argument does not fit. The error names file and line, or row and column.
      FileNotFoundError: there is no such file.

    Law: read(path) has the rows of `stream(path)`.

    Example:
      >>> from funcrec.data import read
      >>> read({"item": [3, 4], "tags": [["a"], []]}, columns=["tags"]).to_pydict()
      {'tags': [['a'], []]}
    """
    call = "funcrec.data.read"
    return table_of(call, opened(call, source, columns, format))


@typed
def stream(
    source: object,
    batch_size: Count,
    *,
    columns: Sequence[str] | None = None,
    format: Format = None,
    key: Key | None = None,
    window: Count = WINDOW,
    skip: Size = 0,
    drop_last: bool = False,
    rank_of: RankOf = None,
) -> Iterator[Any]:
    """Return an iterator over the rows of `read`, as pyarrow.RecordBatches of `batch_size` rows.

    A few blocks of a file are in memory at a time.

    Args:
      source, columns, format: as in `read`.
      key: shuffles files and row groups, then the rows of each window. None keeps the order. `fr.fold_in(key, epoch)`
        gives another order in each epoch. A file of text is one part: only the window mixes its rows.
      window: the number of rows that are held and shuffled together.
      skip: the number of first batches to leave out, for a run that continues. Row groups inside them are not read.
      drop_last: leave out a last batch that is not full.
      rank_of: (rank, number of ranks): to read only this rank's row groups, or pieces of a table. Every part is one
        rank's, and the largest are given first, so ranks differ by one part at most. It raises if a rank has no rows.

    Law: an epoch has every row once, over all ranks. The batches after `skip` equal those of an iterator without
      `skip`.

    Example:
      >>> from funcrec.data import stream
      >>> [batch.to_pydict() for batch in stream({"item": [3, 4, 5]}, 2)]
      [{'item': [3, 4]}, {'item': [5]}]
    """
    call = "funcrec.data.stream"
    found = source_of(call, opened(call, source, columns, format), rank_of)
    numbered = tables(call, found, batch_size, key=key, window=window, skip=skip, drop_last=drop_last)
    return (_joined(table) for _, table in numbered)


def row_name(source: Source, number: int) -> str:
    return source.parts[number >> BITS].name_of(number & ((1 << BITS) - 1))


def tables(
    call: str,
    source: Source,
    batch_size: int,
    *,
    key: Tensor | None = None,
    window: int = WINDOW,
    skip: int = 0,
    drop_last: bool = False,
) -> Iterator[tuple[np.ndarray, Any]]:
    """Yield (numbers of the rows for `row_name`, table of `batch_size` rows), without the first `skip` tables.

    Raises:
      ValueError: the source has no batch, or fewer than `skip` batches. A loop that reads such a source again and again
        would never advance.
    """
    first, seen = skip * batch_size, [0]
    parts = list(enumerate(source.parts))
    if key is None:
        chunks = _numbered(call, parts, first, seen)
    else:
        parts = [parts[i] for i in random_order(random.fold_in(key, 0), len(parts)).tolist()]
        number = first // window
        whole_windows = _shuffled(_numbered(call, parts, number * window, seen), random.fold_in(key, 1), window, number)
        chunks = _behind(whole_windows, first - number * window)
    for table in regrouped(chunks, batch_size):
        if table.num_rows == batch_size or not drop_last:
            yield table[ROW].to_numpy(), table.drop_columns([ROW])
    count = seen[0] // batch_size if drop_last else -(-seen[0] // batch_size)
    if not count or count < skip:
        least = f"at least {batch_size if drop_last else 1} rows"
        need = f"at least {skip} batches, to skip them" if count else least
        got, hint = f"{seen[0]} rows, batches of {batch_size}", "a smaller batch_size, or drop_last=False"
        fail(call, f"{source.name} does not make a batch.", got=got, need=need, hint=hint)


def _numbered(call: str, parts: list[tuple[int, Part]], skip: int, seen: list[int]) -> Iterator:
    """Yield the record batches after the first `skip` rows, with a column of row numbers. `seen` counts all rows.

    Parts that are skipped whole are not read."""
    import pyarrow as pa

    for number, part in parts:
        if part.num_rows is not None and part.num_rows <= skip:
            skip, seen[0] = skip - part.num_rows, seen[0] + part.num_rows
            continue
        at = (number << BITS) + part.first
        for chunk in part_chunks(call, part):
            numbers = pa.array(np.arange(at, at + chunk.num_rows))
            at, seen[0] = at + chunk.num_rows, seen[0] + chunk.num_rows
            cut, skip = min(skip, chunk.num_rows), max(skip - chunk.num_rows, 0)
            if cut < chunk.num_rows:
                yield chunk.append_column(ROW, numbers).slice(cut)


def _behind(chunks: Iterator, skip: int) -> Iterator:
    """Yield the record batches after the first `skip` rows."""
    for chunk in chunks:
        cut, skip = min(skip, chunk.num_rows), max(skip - chunk.num_rows, 0)
        if cut < chunk.num_rows:
            yield chunk.slice(cut)


def _shuffled(chunks: Iterator, key: Tensor, window: int, first: int) -> Iterator:
    """Yield the rows of each window, in an order that depends on the key and the number of the window."""
    for number, table in enumerate(regrouped(chunks, window), first):
        order = random_order(random.fold_in(key, number), table.num_rows)
        yield from table.combine_chunks().take(order.cpu().numpy()).to_batches()


def regrouped(chunks: Iterator, size: int) -> Iterator:
    """Yield tables of `size` rows, made from record batches of any size. The last table may have fewer rows."""
    import pyarrow as pa

    pending, have = [], 0
    for chunk in chunks:
        pending.append(chunk)
        have += chunk.num_rows
        if have >= size:
            table = pa.Table.from_batches(pending)
            for at in range(0, have - size + 1, size):
                yield table.slice(at, size)
            pending, have = table.slice(have - have % size).to_batches(), have % size
    if have:
        yield pa.Table.from_batches(pending)


def _joined(table):
    """Return a table as one record batch. If the table is one batch already, nothing is copied."""
    (batch,) = table.combine_chunks().to_batches()
    return batch
