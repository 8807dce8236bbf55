"""Columns of pyarrow as numbers: ids, bags of ids, floats, times. Each value is exact, or an error names its row.

dictionaries, run ends and views count as the values that they stand for; a missing list is an empty bag

Shapes: N rows, M ids of all bags.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from funcrec.core import Problem, fail, sure
from funcrec.data.readers._arrow import compute
from funcrec.data.readers._rows import need_finite
from funcrec.data.readers._schema import Schema

# A function that names a row of the table in errors. A reader of files sets it to name the file and the line.
NAME_OF_ROW: contextvars.ContextVar[Callable[[int], str]] = contextvars.ContextVar("row", default=lambda r: f"row {r}")
ENCODE = "fr.data.fit_encoding and fr.data.encode, which make ids of it"


@contextlib.contextmanager
def rows_named(name_of_row: Callable[[int], str]) -> Iterator[None]:
    """Make errors inside the block call row r `name_of_row(r)`."""
    token = NAME_OF_ROW.set(name_of_row)
    try:
        yield
    finally:
        NAME_OF_ROW.reset(token)


def refuse(call: str, row: int, name: str, got: str, need: str, hint: str = "") -> NoReturn:
    """Raise an error for one value that cannot be read."""
    what = f"{NAME_OF_ROW.get()(int(row))}, column `{name}` cannot be read."
    fail(call, what, got=got, need=need, hint=hint)


def value_kind(kind):
    """Return the type of the values that `plain` makes of a column of this type."""
    import pyarrow as pa
    import pyarrow.types as kinds

    if isinstance(kind, pa.BaseExtensionType):
        return value_kind(kind.storage_type)
    return value_kind(kind.value_type) if kinds.is_dictionary(kind) or kinds.is_run_end_encoded(kind) else kind


def is_list(kind) -> bool:
    import pyarrow.types as kinds

    views = kinds.is_list_view(kind) or kinds.is_large_list_view(kind)
    return kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind) or views


def is_id(kind) -> bool:
    import pyarrow.types as kinds

    return kinds.is_integer(kind) or kinds.is_boolean(kind) or kinds.is_null(kind)


def is_number(kind) -> bool:
    import pyarrow.types as kinds

    return is_id(kind) or kinds.is_floating(kind) or kinds.is_decimal(kind)


def is_time(kind) -> bool:
    import pyarrow.types as kinds

    return is_number(kind) or kinds.is_timestamp(kind) or kinds.is_date(kind)


def is_point_in_time(kind) -> bool:
    """Return whether the type is a point in time or a duration. No model reads these directly."""
    import pyarrow.types as kinds

    return any(is_one(kind) for is_one in (kinds.is_timestamp, kinds.is_date, kinds.is_time, kinds.is_duration))


def time_hint(name: str, kind) -> str:
    """Return the hint how to make numbers from a column of timestamps, dates, times of the day, or durations."""
    import pyarrow.types as kinds

    own = f'df["{name}"]'
    if kinds.is_time(kind):
        return f"[60 * t.hour + t.minute for t in {own}], the minutes since midnight, for a number or an id"
    if kinds.is_duration(kind):
        return f"{own}.dt.total_seconds() for a number"
    own = f"pd.to_datetime({own})" if kinds.is_date(kind) else own
    age = f"({own} - {own}.min()).dt.total_seconds()"
    return f'{age} for a number; {own}.dt.dayofweek as categorical; time="{name}" for split_by_time'


def text_list_problems(types, names: list[str]) -> Iterator[Problem]:
    """Yield a problem for each multivalued column (of a pyarrow.Schema) of texts: no rule splits a text."""
    import pyarrow.types as kinds

    for name in names:
        kind = value_kind(types.field(name).type)
        if kinds.is_string(kind) or kinds.is_large_string(kind):
            what, need = f"column `{name}` does not hold lists.", "lists, for a multivalued column"
            hint = _type_hint(name, "lists of ids", kind)
            yield Problem(what, f"{types.field(name).type}", need, hint, TypeError)


def is_dense(kind) -> bool:
    import pyarrow.types as kinds

    return is_number(kind) or (kinds.is_fixed_size_list(kind) and is_number(value_kind(kind.value_type)))


def type_problems(types, schema: Schema) -> Iterator[Problem]:
    """Yield a problem for each column whose type (in a pyarrow.Schema) does not fit the schema."""
    import pyarrow.types as kinds

    lists, weights = set(schema.multivalued), dict(schema.weights)
    roles = [(n, "lists of ids" if n in lists else "ids", is_id) for n in schema.keys]
    roles += [(n, "lists of numbers" if of in lists else "numbers", is_number) for of, n in weights.items()]
    one = [n for n in (*schema.labels, schema.weight) if n is not None]
    roles += [*((n, "numbers", is_number) for n in one), *((n, "numbers", is_dense) for n in schema.dense)]
    roles += [] if schema.time is None else [(schema.time, "times", is_time)]
    for name, role, holds in roles:
        whole = kind = value_kind(types.field(name).type)
        if role.startswith("lists"):
            kind = value_kind(kind.value_type) if is_list(kind) else kind if kinds.is_null(kind) else None
        if kind is None or not holds(kind):
            is_label = name in schema.labels
            hint = (
                f'{{"{name}": pc.equal(column, value)}}, 1 where it is so'
                if is_label
                else _type_hint(name, role, whole)
            )
            got = f"{types.field(name).type}"
            yield Problem(f"column `{name}` does not hold {role}.", got, NEEDS[role], hint, TypeError)


NEEDS = {
    "ids": "integers or booleans", "lists of ids": "lists of integers or booleans", "numbers": "integers or floats",
    "lists of numbers": "lists of integers or floats", "times": "numbers, timestamps or dates",
}  # fmt: skip


def _type_hint(name: str, role: str, kind) -> str:
    import pyarrow.types as kinds

    if role.startswith("lists") and (kinds.is_string(kind) or kinds.is_large_string(kind)):
        return f'df["{name}"].str.split("|"), a list in each row, if "|" stands between them; then fr.data.fit_encoding'
    if is_list(kind) != role.startswith("lists") and role.endswith("ids"):
        other = "multivalued" if is_list(kind) else "categorical"
        return f'{other}=("{name}",) in the schema'
    if role == "ids" and kinds.is_floating(kind):
        text = f'Text(types={{"{name}": "int64"}}) in text'
        return f'df["{name}"].astype("Int64"), as pandas makes floats of integers with missing ones; {text}'
    if role.endswith("ids"):
        return ENCODE
    if is_list(kind):
        return f'multivalued=("{name}",) if these are ids; else a list of one fixed size, a column each'
    if is_point_in_time(kind):
        return time_hint(name, kind)
    return f'categorical=("{name}",) if these are kinds of something; else cast them: column.cast("float64")'


def plain(column):
    """Return the values that dictionaries, run ends, views and extension types stand for."""
    import pyarrow as pa
    import pyarrow.types as kinds

    pc = compute()
    kind = column.type
    if kinds.is_primitive(kind):
        return column
    if isinstance(kind, pa.BaseExtensionType):
        return plain(pa.chunked_array([c.storage for c in column.chunks], kind.storage_type))
    if kinds.is_dictionary(kind):
        chunks = [c.dictionary_decode() for c in column.chunks]  # a cast does not support extension types
        return plain(pa.chunked_array(chunks, kind.value_type))
    if kinds.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(column))
    if kinds.is_string_view(kind) or kinds.is_binary_view(kind):
        return column.cast(pa.large_string() if kinds.is_string_view(kind) else pa.large_binary())
    if kinds.is_list_view(kind) or kinds.is_large_list_view(kind):
        return pa.chunked_array(map(_list_of_view, column.chunks), pa.large_list(kind.value_type))
    return column


def _list_of_view(view):
    """Return a list view as a list, without a cast: in pyarrow 26, a cast leaves the last offset unwritten."""
    import pyarrow as pa

    pc = compute()
    lengths = pc.fill_null(pc.list_value_length(view), 0).to_numpy()
    ends = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    return pa.LargeListArray.from_arrays(ends, view.flatten(), mask=view.is_null())


def lists_and_ids(table, schema: Schema):
    """Return the table with its empty columns retyped: as nulls for ids, as lists of nulls for multivalued columns.

    A column is empty if all its values are missing, whatever its type."""
    import pyarrow as pa

    lists = {*schema.multivalued, *(by for of, by in schema.weights if of in schema.multivalued)}
    for at, (name, column) in enumerate(zip(table.column_names, table.columns)):
        if (name in lists or name in schema.categorical) and _is_nothing(column):
            empty = pa.nulls(len(column), pa.large_list(pa.null()) if name in lists else pa.null())
            table = table.set_column(at, name, empty)
    return table


def _is_nothing(column) -> bool:
    """Return whether all values are missing: nulls without a type, or floats that are all NaN, as pandas has them."""
    import pyarrow.types as kinds

    pc = compute()
    kind = value_kind(column.type)
    is_float = kinds.is_floating(kind)
    return kinds.is_null(kind) or (is_float and pc.all(plain(column).is_null(nan_is_null=True)).as_py() is not False)


def flat(column) -> tuple[Any, ...]:
    """Return (values, lengths i64[N]) of a column of lists. A missing list has length 0."""
    import pyarrow as pa

    pc = compute()
    if pa.types.is_null(column.type):  # a column whose lists are all missing
        return pa.chunked_array([], pa.null()), np.zeros(len(column), np.int64)
    values = pa.chunked_array([c.flatten() for c in column.chunks], column.type.value_type)
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    return plain(values), lengths.to_numpy().astype(np.int64)


def ids_of(call: str, column, name: str, *, missing: int | None = None) -> np.ndarray:
    """Return ids i64[N] of a column of integers or booleans. `missing` replaces a missing id."""
    column = plain(column)
    if column.null_count and missing is None:
        hint = f"missing=0, or another id of its own; or {ENCODE}"
        refuse(call, sure(first_true(column.is_null())), name, "a missing id", "an id", hint)
    found = _i64(call, column, name, int)
    return (found if missing is None else found.fill_null(missing)).to_numpy()


def bags_of(call: str, column, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids i64[M], lengths i64[N]) of a column of lists."""
    values, lengths = flat(plain(column))
    row = lambda nth: row_of(lengths, nth)
    if values.null_count:
        refuse(call, row(first_true(values.is_null())), name, "a missing id in a list", "ids")
    return _i64(call, values, name, row).to_numpy(), lengths


def _i64(call: str, column, name: str, row: Callable[[int], int]):
    import pyarrow as pa
    import pyarrow.types as kinds

    pc = compute()
    if kinds.is_uint64(column.type):
        nth = first_true(pc.greater(column, pa.scalar(2**63 - 1, pa.uint64())).fill_null(False))
        if nth is not None:
            refuse(call, row(nth), name, f"id {column[nth]}", "an id below 2⁶³", ENCODE)
    return column.cast(pa.int64())


def numbers_of(
    call: str, column, name: str, row: Callable[[int], int] = int, *, missing: float | None = None
) -> np.ndarray:
    """Return numbers f[N] or i[N] of a column of numbers or booleans. `missing` replaces nulls.

    Decimals are rounded to f64."""
    import pyarrow as pa
    import pyarrow.types as kinds

    column = plain(column)
    if column.null_count and missing is None:
        hint = "pc.fill_null(column, 0), or another number of its own"
        refuse(call, row(sure(first_true(column.is_null()))), name, "no number", "a number", hint)
    if not (kinds.is_integer(column.type) or kinds.is_floating(column.type)):
        column = column.cast(pa.float64() if kinds.is_decimal(column.type) else pa.uint8())
    return (column.fill_null(missing) if column.null_count else column).to_numpy()


def floats_of(
    call: str, column, name: str, row: Callable[[int], int] = int, *, missing: float | None = None
) -> np.ndarray:
    """Return numbers f32[N], all finite."""
    found = numbers_of(call, column, name, row, missing=missing)
    with np.errstate(over="ignore"):  # a number too large for f32 becomes inf, which is an error
        x = found.astype(np.float32)

    def no(at: int, _: str, got: str, need: str) -> NoReturn:
        beyond = f"{found[at]}, {got} in f32" if np.isfinite(found[at]) else got
        refuse(call, row(at), name, beyond, need)

    need_finite(x[:, None], (name,), no)
    return x


def dense_of(call: str, column, name: str, *, missing: float | None = None) -> np.ndarray:
    """Return numbers f32[N, k]: k is 1, or the size of the lists in a column of fixed-size lists."""
    import pyarrow.types as kinds

    column = plain(column)
    if not kinds.is_fixed_size_list(column.type):
        return floats_of(call, column, name, missing=missing)[:, None]
    values, lengths = flat(column)
    size = column.type.list_size
    if size and not lengths.all():
        refuse(call, int(np.flatnonzero(lengths == 0)[0]), name, "no numbers", f"{size} numbers")
    return floats_of(call, values, name, lambda nth: nth // size).reshape(-1, size)


def list_floats_of(call: str, column, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (f32[M], lengths i64[N]) of a column of lists of numbers."""
    values, lengths = flat(plain(column))
    return floats_of(call, values, name, lambda nth: row_of(lengths, nth)), lengths


def times_of(call: str, column, name: str) -> np.ndarray:
    """Return times i64[N] or f64[N]. Numbers stay as they are.

    Timestamps and dates become whole microseconds since 1970, without their fractions."""
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
    """Return the row whose bag holds the n-th id."""
    return int(np.searchsorted(np.cumsum(lengths), nth, side="right"))


def first_true(mask) -> int | None:
    """Return the place of the first true value of a chunked array of booleans, or None."""
    found = np.flatnonzero(mask.to_numpy())
    return int(found[0]) if found.size else None
