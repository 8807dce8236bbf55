"""Click logs in parquet: columns of one id, and list columns of several.

    row r, column c: an id -> a bag of one;   a list -> that bag;   an empty or missing list -> an empty bag

Shapes: B rows of a batch.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from funcrec.core import Problem, check, fail, typed
from funcrec.data._arrow import check_batching, fixed_tables, need_file, need_pyarrow
from funcrec.data._criteo import Transform, transform_dense, transform_problems
from funcrec.data._rows import Vocabularies, need_finite, need_ids, need_labels, vocabulary_problems
from funcrec.jagged import KeyedJaggedTensor, offsets_of, pad_to_bucket
from funcrec.tables import Batch

CALL = "funcrec.data.criteo_parquet"


@typed
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
    vocabularies: Vocabularies = None,
) -> Iterator[Batch]:
    """Read a parquet file row group by row group; pages that have a checksum are checked.

    Args:
      label: the column of labels, numbers in [0, 1].
      dense: columns of numbers; those named int_... if None. A missing one counts as 0. None are needed.
      sparse: columns of integers or of lists of integers, the keys of the batch; those named cat_... if None. A feature
        whose table has fewer rows than there are ids needs a hash.
      transform: see `transform_dense`.
      missing: the id of a missing integer; without it one is an error. A missing list is an empty bag.
      bucket: pad the ids by `fr.pad_to_bucket`, since lists give every batch another number of ids.
      skip, drop_last, vocabularies: as in `criteo_tsv`.

    Returns: batches with ids i64 and no padding unless `bucket`.

    Raises: at the call: TypeError, ValueError, FileNotFoundError; ModuleNotFoundError without pyarrow. While reading:
    ValueError that names file, column and row, or the damage.
    """
    pyarrow = need_pyarrow(CALL)
    import pyarrow.parquet as parquet

    check_batching(CALL, batch_size, skip, bucket=bucket, drop_last=drop_last)
    path = need_file(CALL, path)
    try:
        file = parquet.ParquetFile(path, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        fail(CALL, f"`{path.name}` is not a whole parquet file.", got=str(error)[:120], need="a parquet file")
    schema = file.schema_arrow
    dense = tuple(n for n in schema.names if n.startswith("int_")) if dense is None else tuple(dense)
    sparse = tuple(n for n in schema.names if n.startswith("cat_")) if sparse is None else tuple(sparse)
    check(CALL, transform_problems(transform), _schema_problems(path, schema, label, dense, sparse))
    check(CALL, vocabulary_problems(vocabularies, sparse), _missing_problems(missing))
    chunks = _chunks(path, file, batch_size, [label, *dense, *sparse])
    tables = fixed_tables(CALL, path, chunks, batch_size, skip, drop_last)
    columns, how = (label, dense, sparse), (transform, missing, bucket, vocabularies or {})
    return (_batch(path, first, t, columns, how) for first, t in tables)


def _chunks(path: Path, file, batch_size: int, columns: list[str]) -> Iterator:
    import pyarrow

    try:
        rows, need = 0, file.metadata.num_rows
        for chunk in file.iter_batches(batch_size=batch_size, columns=columns):
            rows += chunk.num_rows
            yield chunk
        if rows != need:
            raise pyarrow.ArrowInvalid(f"{rows} rows of {need}")
    except (pyarrow.ArrowException, OSError) as error:
        fail(CALL, f"`{path.name}` is damaged.", got=str(error)[:120], need="pages as they were written")


def _batch(path: Path, first: int, table, columns: tuple, how: tuple) -> Batch:
    (label, dense, sparse), (transform, missing, bucket, sizes) = columns, how
    refuse = lambda row, name, got, need: _bad_row(path, first + row, name, got, need)
    values, lengths = zip(*(_bags(path, first, table[n].combine_chunks(), n, missing) for n in sparse), strict=True)
    for n, ids, counts in zip(sparse, values, lengths, strict=True):
        need_ids(ids, sizes.get(n), n, refuse, lambda at, counts=counts: _row_of(counts, at))
    lengths = torch.from_numpy(np.concatenate(lengths))
    ids = KeyedJaggedTensor(torch.from_numpy(np.concatenate(values)), offsets_of(lengths), keys=sparse)
    x = None
    if dense:
        x = np.stack([_numbers(table[n].combine_chunks(), 0) for n in dense], 1)
        need_finite(x, dense, refuse)
        x = transform_dense(torch.from_numpy(x), transform)
    labels = table[label].combine_chunks()
    if labels.null_count:
        row = first + int(np.flatnonzero(labels.is_null().to_numpy(zero_copy_only=False))[0])
        _bad_row(path, row, label, "no label", "a number")
    need_labels(labels.to_numpy(zero_copy_only=False), label, refuse)
    return Batch(pad_to_bucket(ids) if bucket else ids, torch.from_numpy(_numbers(labels)), x)


def _numbers(column, missing: int | None = None) -> np.ndarray:
    if missing is not None and column.null_count:
        column = column.fill_null(bool(missing) if str(column.type) == "bool" else missing)
    with np.errstate(over="ignore"):  # what no f32 holds is infinite, and named
        return np.array(column.to_numpy(zero_copy_only=False), dtype=np.float32)


def _bags(path: Path, first: int, column, name: str, missing: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(ids i64, lengths i64[B]) of one column."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if _is_list(column.type):
        values, lengths = column.flatten(), pc.list_value_length(column).fill_null(0)
        if values.null_count:
            at = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            row = _row_of(lengths.to_numpy(zero_copy_only=False), at)
            _bad_row(path, first + row, name, "a missing id in a list", "ids")
        lengths = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    else:
        if column.null_count and missing is None:
            row = first + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            _bad_row(path, row, name, "a missing id", "ids", "missing=0, or another id of its own")
        values, lengths = column, np.ones(len(column), np.int64)
    if pa.types.is_uint64(values.type):
        large = np.flatnonzero(pc.greater(values, pa.scalar(2**63 - 1, pa.uint64())).fill_null(False))
        if large.size:
            row = first + _row_of(lengths, int(large[0]))
            _bad_row(path, row, name, f"id {values[int(large[0])]}", "ids below 2⁶³", "a hash when the file is written")
    values = values.cast(pa.int64())
    return values.fill_null(missing or 0).to_numpy(zero_copy_only=False), lengths


def _row_of(lengths: np.ndarray, at: int) -> int:
    """The row whose bag holds the at-th id."""
    return int(np.searchsorted(np.cumsum(lengths), at, side="right"))


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
    doubled = sorted(
        {n for n in (label, *dense, *sparse) if schema.names.count(n) > 1 or sparse.count(n) + dense.count(n) > 1}
    )
    if doubled:
        yield Problem(
            f"`{path.name}`: columns are named twice.", f"{doubled}", "distinct names in the file and the call"
        )
        return
    for n in (label, *dense):
        kind = schema.field(n).type
        if not (kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind)):
            yield Problem(f"column `{n}` does not hold numbers.", f"{kind}", "integers or floats", kind=TypeError)
    for n in sparse:
        kind = schema.field(n).type
        if not kinds.is_integer(kind.value_type if _is_list(kind) else kind):
            yield Problem(f"column `{n}` does not hold ids.", f"{kind}", "integers or lists of them", kind=TypeError)


def _missing_problems(missing: int | None) -> Iterator[Problem]:
    if missing is not None and not -(2**63) <= missing < 2**63:
        yield Problem("`missing` is not an id.", f"{missing}", "an int of 64 bits")


def _bad_row(path: Path, row: int, name: str, got: str, need: str, hint: str = ""):
    fail(CALL, f"`{path.name}`, row {row}, column `{name}` cannot be read.", got=got, need=need, hint=hint)
