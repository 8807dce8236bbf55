"""Click logs in parquet: columns of one id, and list columns of several.

    row r, column c: an id -> a bag of one;   a list -> that bag;   an empty or missing list -> an empty bag

Shapes: B rows of a batch. Floor 6.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from funcrec._errors import Problem, check, fail
from funcrec._jagged import offsets_of
from funcrec._keyed_jagged import KeyedJaggedTensor, pad_to_bucket
from funcrec._state import Batch
from funcrec.data._arrow import check_batching, fixed_tables, need_file, need_pyarrow
from funcrec.data._criteo import Transform, transform_dense, transform_problems

CALL = "funcrec.data.criteo_parquet"


def criteo_parquet(
    path: str | os.PathLike,
    batch_size: int,
    *,
    label: str = "label",
    dense: Sequence[str] | None = None,
    sparse: Sequence[str] | None = None,
    transform: Transform = None,
    missing: int | None = None,
    bucket: bool = False,
    skip: int = 0,
    drop_last: bool = False,
) -> Iterator[Batch]:
    """Read a parquet file row group by row group.

    Args:
      label: the column of labels, any numbers.
      dense: columns of numbers; those named int_... if None. A missing one counts as 0. None are needed.
      sparse: columns of integers or of lists of integers, the keys of the batch; those named cat_... if None.
      transform: see `transform_dense`.
      missing: the id of a missing integer; without it one is an error. A missing list is an empty bag.
      bucket: pad the ids by `fr.pad_to_bucket`, since lists give every batch another number of ids.
      skip, drop_last: as in `criteo_tsv`.

    Returns: batches with ids i64 and no padding unless `bucket`.

    Raises: at the call: TypeError, ValueError, FileNotFoundError; ModuleNotFoundError without pyarrow. While reading:
    ValueError that names file, column and row.
    """
    pyarrow = need_pyarrow(CALL)
    import pyarrow.parquet as parquet

    check_batching(CALL, batch_size, skip)
    path = need_file(CALL, path)
    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        fail(CALL, f"`{path.name}` is not a whole parquet file.", got=str(error)[:120], need="a parquet file")
    schema = file.schema_arrow
    dense = tuple(n for n in schema.names if n.startswith("int_")) if dense is None else tuple(dense)
    sparse = tuple(n for n in schema.names if n.startswith("cat_")) if sparse is None else tuple(sparse)
    check(CALL, transform_problems(transform), _schema_problems(path, schema, label, dense, sparse))
    chunks = file.iter_batches(batch_size=batch_size, columns=[label, *dense, *sparse])
    tables = fixed_tables(chunks, batch_size, skip, drop_last)
    return (_batch(path, first, t, label, dense, sparse, transform, missing, bucket) for first, t in tables)


def _batch(path, first, table, label, dense, sparse, transform, missing, bucket) -> Batch:
    values, lengths = zip(*(_bags(path, first, table[n].combine_chunks(), n, missing) for n in sparse), strict=True)
    lengths = torch.from_numpy(np.concatenate(lengths))
    ids = KeyedJaggedTensor(torch.from_numpy(np.concatenate(values)), offsets_of(lengths), keys=sparse)
    x = None
    if dense:
        x = np.stack([_numbers(table[n].combine_chunks().fill_null(0)) for n in dense], 1)
        x = transform_dense(torch.from_numpy(x), transform)
    labels = table[label].combine_chunks()
    if labels.null_count:
        row = first + int(np.flatnonzero(labels.is_null().to_numpy(zero_copy_only=False))[0])
        _bad_row(path, row, label, "no label", "a number")
    return Batch(pad_to_bucket(ids) if bucket else ids, torch.from_numpy(_numbers(labels)), x)


def _numbers(column) -> np.ndarray:
    return np.array(column.to_numpy(zero_copy_only=False), dtype=np.float32)


def _bags(path: Path, first: int, column, name: str, missing: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(ids i64, lengths i64[B]) of one column."""
    import pyarrow.compute as pc

    if _is_list(column.type):
        values, lengths = column.flatten(), pc.list_value_length(column).fill_null(0)
        if values.null_count:
            at = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            ends = np.cumsum(lengths.to_numpy(zero_copy_only=False))
            _bad_row(path, first + int(np.searchsorted(ends, at, side="right")), name, "a missing id in a list", "ids")
        lengths = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    else:
        if column.null_count and missing is None:
            row = first + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            _bad_row(path, row, name, "a missing id", "ids", "missing=0, or another id of its own")
        values = column.fill_null(missing) if column.null_count else column
        lengths = np.ones(len(column), np.int64)
    return np.array(values.to_numpy(zero_copy_only=False), dtype=np.int64), lengths


def _is_list(kind) -> bool:
    import pyarrow.types as kinds

    return kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)


def _schema_problems(path: Path, schema, label: str, dense: tuple, sparse: tuple) -> Iterator[Problem]:
    import pyarrow.types as kinds

    absent = [n for n in (label, *dense, *sparse) if n not in schema.names]
    if absent or not sparse:
        what = f"`{path.name}` lacks columns." if absent else f"`{path.name}` has no column of ids."
        need = f"{', '.join(absent)}" if absent else "columns cat_0, cat_1, ..."
        yield Problem(what, f"{schema.names}", need, "label=, dense= and sparse= name the columns")
        return
    for n in (label, *dense):
        kind = schema.field(n).type
        if not (kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind)):
            yield Problem(f"column `{n}` does not hold numbers.", f"{kind}", "integers or floats", kind=TypeError)
    for n in sparse:
        kind = schema.field(n).type
        if not kinds.is_integer(kind.value_type if _is_list(kind) else kind):
            yield Problem(f"column `{n}` does not hold ids.", f"{kind}", "integers or lists of them", kind=TypeError)


def _bad_row(path: Path, row: int, name: str, got: str, need: str, hint: str = ""):
    fail(CALL, f"`{path.name}`, row {row}, column `{name}` cannot be read.", got=got, need=need, hint=hint)
