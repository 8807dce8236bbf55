"""Columns of pyarrow as numbers: ids, bags of ids, floats, times; each value as it is, or an error with column and row.

    dictionaries, run ends and views are the values they stand for;   a missing list is an empty bag

Shapes: N rows, M ids of all bags.
"""

import contextvars
from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np

from funcrec.core import fail
from funcrec.data._rows import need_finite

# what a row of the table that is being read is called: a reader of files says which line of which file
NAME_OF_ROW: contextvars.ContextVar[Callable[[int], str]] = contextvars.ContextVar("row", default=lambda r: f"row {r}")
ENCODE = "fr.data.fit_encoding and fr.data.encode, which make ids of it"


def refuse(call: str, row: int, name: str, got: str, need: str, hint: str = "") -> NoReturn:
    """One value cannot be read."""
    what = f"{NAME_OF_ROW.get()(int(row))}, column `{name}` cannot be read."
    fail(call, what, got=got, need=need, hint=hint)


def refuse_type(call: str, column, name: str, what: str, need: str, hint: str) -> NoReturn:
    fail(call, f"column `{name}` {what}.", got=str(column.type), need=need, hint=hint, kind=TypeError)


def plain(column):
    """The values that dictionaries, run ends, views and extension types stand for."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return plain(pa.chunked_array([c.storage for c in column.chunks], kind.storage_type))
    if kinds.is_dictionary(kind):
        return plain(column.cast(kind.value_type))
    if kinds.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(column))
    if kinds.is_string_view(kind) or kinds.is_binary_view(kind):
        return column.cast(pa.large_string() if kinds.is_string_view(kind) else pa.large_binary())
    if kinds.is_list_view(kind) or kinds.is_large_list_view(kind):
        return column.cast(pa.large_list(kind.value_type))
    return column


def is_list(kind) -> bool:
    import pyarrow.types as kinds

    return kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)


def flat(column) -> tuple:
    """A column of lists -> (values, lengths i64[N]); a missing list has length 0."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = pa.chunked_array([c.flatten() for c in column.chunks], column.type.value_type)
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    return plain(values), lengths.to_numpy().astype(np.int64)


def ids_of(call: str, column, name: str, row: Callable[[int], int] = int) -> np.ndarray:
    """i64[N] of a column of integers or booleans. row: the row that the n-th id belongs to."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    column, kind = plain(column), column.type
    if is_list(column.type):
        what, need = "holds lists", "one id per row"
        refuse_type(call, column, name, what, need, f'multivalued=("{name}",) in the schema')
    if column.null_count == len(column) and kinds.is_null(column.type):
        column = column.cast(pa.int64())
    if not (kinds.is_integer(column.type) or kinds.is_boolean(column.type)):
        is_number = kinds.is_floating(column.type)
        why = f'df["{name}"].astype("Int64"): pandas makes floats of integers with missing ones'
        hint = why if is_number else ENCODE
        refuse_type(call, pa.chunked_array([], kind), name, "does not hold ids", "integers or booleans", hint)
    if column.null_count:
        nth = first_true(pc.is_null(column))
        hint = f"{ENCODE}, missing ones too; or fill them: pc.fill_null(column, 0)"
        refuse(call, row(nth), name, "a missing id", "an id", hint)
    if kinds.is_uint64(column.type):
        nth = first_true(pc.greater(column, pa.scalar(2**63 - 1, pa.uint64())))
        if nth is not None:
            refuse(call, row(nth), name, f"id {column[nth]}", "an id below 2⁶³", ENCODE)
    return column.cast(pa.int64()).to_numpy()


def bags_of(call: str, column, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(ids i64[M], lengths i64[N]) of a column of lists."""
    values, lengths = _lists(call, column, name)
    return ids_of(call, values, name, lambda nth: row_of(lengths, nth)), lengths


def _lists(call: str, column, name: str) -> tuple:
    column = plain(column)
    if not is_list(column.type):
        hint = f'categorical=("{name}",) in the schema, for one id per row'
        refuse_type(call, column, name, "does not hold lists", "lists of ids, or of their weights", hint)
    return flat(column)


def numbers_of(call: str, column, name: str, row: Callable[[int], int] = int) -> np.ndarray:
    """f[N] or i[N] of a column of numbers or booleans, none of them missing; decimals are rounded to f64."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    column, kind = plain(column), column.type
    if kinds.is_null(column.type):
        column = column.cast(pa.float64())
    if kinds.is_boolean(column.type) or kinds.is_decimal(column.type):
        column = column.cast(pa.uint8() if kinds.is_boolean(column.type) else pa.float64())
    if not (kinds.is_integer(column.type) or kinds.is_floating(column.type)):
        hint = f'categorical=("{name}",) if these are kinds of something; else cast them: column.cast("float64")'
        refuse_type(call, pa.chunked_array([], kind), name, "does not hold numbers", "integers or floats", hint)
    if column.null_count:
        hint = "pc.fill_null(column, 0), or another number of its own"
        refuse(call, row(first_true(pc.is_null(column))), name, "no number", "a number", hint)
    return column.to_numpy()


def floats_of(call: str, column, name: str, row: Callable[[int], int] = int) -> np.ndarray:
    """f32[N], all finite."""
    found = numbers_of(call, column, name, row)
    with np.errstate(over="ignore"):  # what no f32 holds is infinite, and named
        x = found.astype(np.float32)
    need_finite(x[:, None], (name,), lambda at, _, got, need: refuse(call, row(at), name, str(found[at]), need))
    return x


def dense_of(call: str, column, name: str) -> np.ndarray:
    """f32[N, k]: k is 1, or the size of a column of fixed-size lists."""
    import pyarrow.types as kinds

    column = plain(column)
    if not kinds.is_fixed_size_list(column.type):
        return floats_of(call, column, name)[:, None]
    values, lengths = flat(column)
    size = column.type.list_size
    if size and not lengths.all():
        refuse(call, int(np.flatnonzero(lengths == 0)[0]), name, "no numbers", f"{size} numbers")
    return floats_of(call, values, name, lambda nth: nth // size).reshape(-1, size)


def list_floats_of(call: str, column, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(f32[M], lengths i64[N]) of a column of lists of numbers."""
    values, lengths = _lists(call, column, name)
    return floats_of(call, values, name, lambda nth: row_of(lengths, nth)), lengths


def times_of(call: str, column, name: str) -> np.ndarray:
    """i64[N] or f64[N]: numbers as they are, timestamps and dates as microseconds since 1970, cut off."""
    import pyarrow as pa
    import pyarrow.types as kinds

    column = plain(column)
    if kinds.is_timestamp(column.type) or kinds.is_date(column.type):
        column = column.cast(pa.timestamp("us", getattr(column.type, "tz", None)), safe=False).cast(pa.int64())
    found = numbers_of(call, column, name)
    if found.dtype.kind == "f":
        found = found.astype(np.float64)
        need_finite(found[:, None], (name,), lambda at, _, got, need: refuse(call, at, name, got, "a finite number"))
        return found
    if found.dtype == np.uint64 and found.size and found.max() >= 2**63:
        refuse(call, int(found.argmax()), name, f"{found.max()}", "a number below 2⁶³")
    return found.astype(np.int64)


def row_of(lengths: np.ndarray, nth: int) -> int:
    """The row whose bag holds the n-th id."""
    return int(np.searchsorted(np.cumsum(lengths), nth, side="right"))


def first_true(mask) -> int | None:
    """The place of the first true value of a chunked array of booleans."""
    found = np.flatnonzero(mask.to_numpy())
    return int(found[0]) if found.size else None


def doubled(names: list[str]) -> Iterator[str]:
    return (n for n in dict.fromkeys(names) if names.count(n) > 1)
