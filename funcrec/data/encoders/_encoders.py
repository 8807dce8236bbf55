"""Encoders: how a column becomes ids or numbers. An encoder learns from some rows and is applied to any rows.

    state = encoder.fit(column)          state.apply(column)[r] depends on state and column[r] only

A state is a small tree that `fr.save` accepts. The state has the method that applies it. It does not depend on how rows
are cut into chunks. So one pass fits data that are larger than memory. Lists are encoded element by element.
Dictionaries are encoded as the values that they stand for.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import numpy as np
from torch import Tensor

from funcrec.core import Problem, check, describe, fail, pytree, typed, typed_fields
from funcrec.data.encoders._codes import values_of
from funcrec.data.readers import _columns as columns
from funcrec.data.readers._sources import as_array, need_pyarrow


class Place(NamedTuple):
    """The names of a column in errors: the call, the column, and the row of its n-th value.

    size: how many values a row has if the column holds lists of a fixed size; else 1.

    Example:
      >>> from funcrec.data import Place
      >>> Place("mine.apply", "age").refuse(3, "age -1", "an age >= 0")
      Traceback (most recent call last):
      ...
      ValueError: mine.apply: row 3, column `age` cannot be read.
        got   age -1
        need  an age >= 0
    """

    call: str
    name: str
    row: Callable[[int], int] = int
    size: int = 1

    def refuse(self, nth: int, got: str, need: str, hint: str = "") -> None:
        columns.refuse(self.call, self.row(nth), self.name, got, need, hint)

    def refuse_type(self, kind: Any, need: str, hint: str) -> NoReturn:
        what = f"column `{self.name}` has values of another kind."
        fail(self.call, what, got=str(kind), need=need, hint=hint, kind=TypeError)


class Fitted(Protocol):
    """The state of an encoder. `fr.pytree` makes its class, so that `fr.save` can save it.

    num_ids: n if the ids are in [0, n); None if the state makes numbers.
    apply: turns a column into a column of ids i64 or of numbers f64."""

    @property
    def num_ids(self) -> int | None: ...

    def apply(self, column: Any, place: Place = ...) -> Any: ...


@typed_fields
class Encoder(NamedTuple):
    """A way to encode columns that has not yet learned from a column. `vocabulary()` and similar functions return it.

    Args:
      init: () -> the knowledge before any value.
      update: (known, values, place) -> the knowledge after these values. `values` is a pyarrow.ChunkedArray without
        lists. Errors name `place`.
      compute: known -> the state. `fr.pytree` makes its class, which has `num_ids` and `apply(column)`.
      makes: "ids", or "numbers" for dense columns.
      learns: whether `update` uses the values.

    Example:
      >>> from funcrec.data import vocabulary
      >>> state = vocabulary().fit(["b", "a", "b"])
      >>> state.num_ids, state.apply(["a", "b", "c", None]).to_pylist()
      (3, [1, 2, 0, 0])
    """

    init: Callable[[], Any]
    update: Callable[[Any, Any, Place], Any]
    compute: Callable[[Any], Fitted]
    makes: Literal["ids", "numbers"] = "ids"
    learns: bool = True

    def fit(self, column: Any) -> Fitted:
        """Return the state for a column of pyarrow, pandas or polars, a list of values, or an iterable of chunks."""
        call = "funcrec.data.Encoder.fit"
        known, first = self.init(), 0
        for chunk in _chunks(call, column):
            known = self.update(known, *elements(chunk, Place(call, "column", lambda r, first=first: first + r))[:2])
            first += len(chunk)
        return self.compute(known)


def fixed(state: Fitted, makes: Literal["ids", "numbers"] = "numbers") -> Encoder:
    """Return an encoder that learns nothing. Its `fit` raises for values that `state` cannot encode."""

    def update(known: Fitted, values: Any, place: Place) -> Fitted:
        state.apply(values, place)
        return known

    return Encoder(lambda: state, update, lambda known: known, makes, False)


# -- columns and their elements --------------------------------------------------------------------------------------


def as_column(call: str, x: Any) -> Any:
    """Return a pyarrow.ChunkedArray of the values of `x`."""
    pa = need_pyarrow(call)
    need = "a column of pyarrow, pandas or polars, a numpy array, a tensor on the CPU, or a list of values"
    x = values_of(call, x, "column") if isinstance(x, Tensor) else x
    try:
        if isinstance(x, pa.ChunkedArray):
            return x
        if hasattr(x, "__arrow_c_stream__") and not hasattr(x, "__arrow_c_array__"):
            return pa.chunked_array(x)
        if isinstance(x, list | tuple | np.ndarray) or hasattr(x, "__arrow_c_array__"):
            return pa.chunked_array([as_array(x)])
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        what = "`column` cannot be read."
        fail(call, what, got=str(error)[:120], need="values of one kind", hint='column=["a", "b"]', kind=TypeError)
    fail(call, "`column` is not a column.", got=describe(x), need=need, hint='column=["a", "b"]', kind=TypeError)


def _chunks(call: str, x: Any) -> Iterator[Any]:
    """Yield a whole column, or each column of an iterable."""
    pa = need_pyarrow(call)
    is_stream = isinstance(x, Iterable) and not hasattr(x, "__arrow_c_stream__") and not hasattr(x, "__arrow_c_array__")
    is_chunks = isinstance(x, list | tuple) and bool(x) and all(isinstance(c, pa.Array | pa.ChunkedArray) for c in x)
    if is_chunks or (is_stream and not isinstance(x, list | tuple | np.ndarray | Tensor | str | bytes | dict)):
        yield from (as_column(call, c) for c in x)
    else:
        yield as_column(call, x)


def elements(column: Any, place: Place) -> tuple[Any, Place, Any]:
    """Return (values, with lists joined end to end; the place of these values; the lengths of the lists, or None)."""
    import pyarrow as pa

    column = columns.plain(column)
    if not columns.is_list(column.type):
        return column, place, None
    values, lengths = columns.flat(column)
    if columns.is_list(values.type):
        place.refuse_type(
            column.type, "values, or lists of values", "pyarrow.compute.list_flatten, for one list of a row"
        )
    row = lambda nth: place.row(columns.row_of(lengths, nth))
    size = column.type.list_size if pa.types.is_fixed_size_list(column.type) else 1
    return values, place._replace(row=row, size=size), lengths


def by_elements(encode: Callable) -> Callable:
    """Return the `apply` of a state, from a function (state, values, place) -> as many numbers, NaN where missing."""

    @typed
    def apply(self, column: Any, place: Place = Place("funcrec.data.apply", "column")) -> Any:  # noqa: B008
        import pyarrow as pa
        import pyarrow.types as kinds

        column = columns.plain(as_column(place.call, column))
        values, inner, lengths = elements(column, place)
        made = pa.array(encode(self, values, inner), from_pandas=True)
        if lengths is None:
            return pa.chunked_array([made])
        missing = column.is_null().combine_chunks() if column.null_count else None
        if kinds.is_fixed_size_list(column.type):
            nth = np.where(lengths > 0, np.cumsum(lengths > 0) - 1, 0)[:, None] * inner.size + np.arange(inner.size)
            made = (
                made if missing is None else made.take(pa.array(nth.ravel(), mask=np.repeat(lengths == 0, inner.size)))
            )
            return pa.chunked_array([pa.FixedSizeListArray.from_arrays(made, inner.size, mask=missing)])
        ends = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
        return pa.chunked_array([pa.LargeListArray.from_arrays(ends, made, mask=missing)])

    apply.__doc__ = encode.__doc__
    apply.__qualname__ = "apply"
    return apply


def floats_of(values: Any, place: Place) -> np.ndarray:
    """Return numbers or booleans as f64[N]. A missing value is NaN."""
    import pyarrow as pa
    import pyarrow.types as kinds

    kind = values.type
    is_cast = kinds.is_boolean(kind) or kinds.is_decimal(kind) or kinds.is_null(kind)
    if not (is_cast or kinds.is_integer(kind) or kinds.is_floating(kind)):
        hint = 'vocabulary() for what is not a number; column.cast("float64") for numbers that are written as text'
        hint = columns.time_hint(place.name, kind) if columns.is_point_in_time(kind) else hint
        place.refuse_type(kind, "integers, floats or booleans", hint)
    values = values.cast(pa.uint8()) if kinds.is_boolean(kind) else values
    return values.cast(pa.float64(), safe=False).to_numpy()


# -- several, one after the other -----------------------------------------------------------------------------------


@pytree
class Chained:
    """The state of `chain`: the states of its encoders, of which the first is applied first."""

    states: tuple

    @property
    def num_ids(self) -> int | None:
        return self.states[-1].num_ids

    @typed
    def apply(self, column: Any, place: Place = Place("funcrec.data.apply", "column")) -> Any:  # noqa: B008
        for state in self.states:
            column = state.apply(column, place)
        return column


@typed
def chain(*encoders: Encoder) -> Encoder:
    """Return an encoder that applies these encoders in order. One encoder may learn, from the values that it gets.

    Raises:
      ValueError: two of the encoders learn. The second of these would have to read the rows again.

    Example:
      >>> from funcrec.data import bucketize, chain, log1p
      >>> chain(log1p(), bucketize(edges=(1.0, 3.0))).fit([0, 5, 100]).apply([0, 5, 100]).to_pylist()
      [1, 2, 3]
    """
    check("funcrec.data.chain", _chain_problems(encoders))
    at = next((i for i, e in enumerate(encoders) if e.learns), len(encoders) - 1)
    before = [e.compute(e.init()) for e in encoders[:at]]
    behind = [e.compute(e.init()) for e in encoders[at + 1 :]]

    def update(known: Any, values: Any, place: Place) -> Any:
        for state in before:
            values = state.apply(values, place)
        return encoders[at].update(known, values, place)

    compute = lambda known: Chained((*before, encoders[at].compute(known), *behind))
    return Encoder(encoders[at].init, update, compute, encoders[-1].makes, encoders[at].learns)


def _chain_problems(encoders: tuple) -> Iterator[Problem]:
    if not encoders:
        yield Problem("`encoders` are none.", "chain()", "one or more", "chain(log1p(), normalize())")
    elif sum(e.learns for e in encoders) > 1:
        what, need = "two of `encoders` learn from the rows.", "at most one that learns"
        yield Problem(what, f"{sum(e.learns for e in encoders)}", need, "bucketize(edges=...) in a vocabulary's place")
