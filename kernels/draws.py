"""The schemas of the operations on initial rows, the shapes of their results, and the numbers that they share.

Shapes: M rows, R rows of a table, D dim.
"""

from typing import NamedTuple

import torch

UNIFORM, NORMAL, CONSTANT, GIVEN = range(4)  # what the numbers of a new row are

SCHEMAS = {
    "initial_rows": "(Tensor key, Tensor starts, SymInt dim, int kind, float scale, ScalarType dtype) -> Tensor",
    "draw_rows": "(Tensor[] tables, Tensor[] given, Tensor rows, Tensor ids, Tensor counts, Tensor keys, int[] fresh, "
    "float[] scales) -> Tensor[]",
    "draw_rows_": "(Tensor(a!)[] tables, Tensor[] given, Tensor rows, Tensor ids, Tensor counts, Tensor keys, int[] "
    "fresh, float[] scales) -> ()",
}


class Fresh(NamedTuple):
    """New rows of one table.

    table: the table's number. kind: UNIFORM, NORMAL, CONSTANT, or GIVEN for rows of a matrix.
    given: the matrix's number, for GIVEN. It has one row for all places, or a row for each place.
    dim, first: elements id · dim + first, ... of the key are the row `id`; for UNIFORM and NORMAL.
    rows, ids: where the table's places begin among all rows and ids. places: the number of places.
    number: the number in `counts`: how many of the places are new rows.
    key: the number in `keys`, for UNIFORM and NORMAL.
    """

    table: int
    kind: int
    given: int = 0
    dim: int = 0
    first: int = 0
    rows: int = 0
    ids: int = 0
    places: int = 0
    number: int = 0
    key: int = 0


FIELDS = len(Fresh._fields)


def fresh_of(flat: list[int]) -> list[Fresh]:
    return [Fresh(*flat[i : i + FIELDS]) for i in range(0, len(flat), FIELDS)]


def _initial_rows(key, starts, dim, kind, scale, dtype):
    return starts.new_empty((starts.shape[0], dim), dtype=dtype)


FAKES = {
    "initial_rows": _initial_rows,
    "draw_rows": lambda tables, *rest: [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tables],
}
