"""Columns of the user's data, as numbers that torch can count and sort.

codes(a) < codes(b)   where a < b;   codes(a) = codes(b)   where a = b

A column is a tensor, a numpy array, a list, or a value with Arrow's PyCapsule interface. The columns of pyarrow, pandas
and polars have this interface.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, fail, is_tracked
from funcrec.data.readers._arrow import compute
from funcrec.data.readers._sources import as_array, need_pyarrow
from funcrec.jagged import is_concrete

NEED = "a tensor, a numpy array, a list of numbers or text, or a column of pyarrow, pandas or polars"


def codes_of(call: str, column: Any, name: str, *, is_time: bool = False) -> Tensor:
    """Return ranks i64[N]: the rank of each value among the distinct values, from 0. Text is ordered by its bytes.

    Raises:
      TypeError: `column` is not a column, or it holds no times although `is_time` is set.
      ValueError: a value is missing, or there is no row.
    """
    values = values_of(call, column, name) if isinstance(column, Tensor) else column
    if not isinstance(values, np.ndarray) or values.dtype.kind in "OUST":
        values = _arrow_values(call, column, name, is_time)
    is_text = not isinstance(values, np.ndarray)
    got = describe(column) if isinstance(column, Tensor) else type(column).__name__
    if not is_text:
        check(call, _value_problems(values, name, is_time))
    if not len(values):
        fail(call, f"`{name}` has no rows.", got=got, need="a row or more", hint=f"{name}=torch.tensor([0, 0, 1])")
    if is_text:
        pc = compute()
        encoded = values.dictionary_encode()
        places = np.argsort(pc.sort_indices(encoded.dictionary).to_numpy())
        return torch.from_numpy(places[encoded.indices.to_numpy()])
    return torch.from_numpy(np.unique(values, return_inverse=True)[1].astype(np.int64))


def values_of(call: str, x: Tensor, name: str) -> np.ndarray:
    """Return the values of a tensor. The tensor must be on the CPU and must not be differentiated."""
    if not is_concrete(x) or is_tracked(x):
        got, need = describe(x), "a tensor on the CPU, outside of transforms, that needs no gradient"
        got = f"{got} that is differentiated" if is_tracked(x) else got
        fail(call, f"`{name}` has no values that can be read.", got=got, need=need, hint=f"{name}.detach().cpu()")
    return (x.float() if x.dtype == torch.bfloat16 else x).detach().numpy()


def _arrow_values(call: str, column: Any, name: str, is_time: bool) -> Any:
    """Return a pyarrow array of text without nulls, or a numpy vector of other values."""
    is_array, is_stream = hasattr(column, "__arrow_c_array__"), hasattr(column, "__arrow_c_stream__")
    if not (is_array or is_stream or isinstance(column, np.ndarray | list | tuple)):
        hint = f"{name}=torch.tensor([0, 0, 1])"
        fail(call, f"`{name}` is not a column.", got=describe(column), need=NEED, hint=hint, kind=TypeError)
    pa = need_pyarrow(call)
    kinds = pa.types
    try:
        array = pa.chunked_array(column).combine_chunks() if is_stream and not is_array else as_array(column)
        array = array.cast(pa.int64()) if not len(array) and pa.types.is_null(array.type) else array
    except (pa.ArrowException, TypeError, ValueError) as error:
        got, hint = f"{type(column).__name__}: {error}"[:120], f"{name}=torch.tensor([0, 0, 1])"
        fail(call, f"`{name}` is not a column.", got=got, need=NEED, hint=hint, kind=TypeError)
    array = array.dictionary_decode() if kinds.is_dictionary(array.type) else array
    if array.null_count:
        check(call, [_missing(name, array.is_null().index(True).as_py())])
    is_number = kinds.is_integer(array.type) or kinds.is_floating(array.type) or kinds.is_boolean(array.type)
    if is_number or kinds.is_temporal(array.type):
        return array.to_numpy(zero_copy_only=False)
    is_text = kinds.is_string(array.type) or kinds.is_large_string(array.type) or kinds.is_string_view(array.type)
    if is_time or not is_text:
        check(call, [_other_kind(name, str(array.type), is_time)])
    return array.cast(pa.large_string())


def _value_problems(values: np.ndarray, name: str, is_time: bool) -> Iterator[Problem]:
    kind = values.dtype.kind
    if kind not in ("iufmM" if is_time else "iufbmM"):
        yield _other_kind(name, f"{values.dtype}", is_time)
    elif values.ndim != 1:
        hint = f"{name}=torch.tensor([0, 0, 1])"
        yield Problem(f"`{name}` is not a vector.", f"shape {list(values.shape)}", "a value for each row", hint)
    elif kind in "fmM":
        missing = np.isnan(values) if kind == "f" else np.isnat(values)
        if missing.any():
            yield _missing(name, int(missing.argmax()))


def _other_kind(name: str, got: str, is_time: bool) -> Problem:
    need = "numbers, dates or timestamps" if is_time else "numbers, times or text"
    hint = f"pyarrow.compute.strptime({name}, '%Y-%m-%d', 's') of text" if is_time else f"pyarrow.array({name})"
    return Problem(f"`{name}` has values of another kind.", got, need, hint, TypeError)


def _missing(name: str, row: int) -> Problem:
    hint = f"leave such rows out, or {name}.fill_null(...)"
    return Problem(f"`{name}` misses a value.", f"none in row {row}", "a value for each row", hint)


def length_problems(**columns: Tensor) -> Iterator[Problem]:
    (first, a), (other, b) = columns.items()
    if len(a) != len(b):
        what = f"`{other}` has another number of rows than `{first}`."
        yield Problem(what, f"{len(b)} rows", f"{len(a)} rows", "columns of one table")
