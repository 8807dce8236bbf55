"""Tables with the rows of one batch alone: a kind of tables that its own columns read, and nothing else.

    id in the batch' = number + row          number: another one for each read

A row of such a table is not the row of an id, so whatever takes all rows, or another column, is refused. An id that no
row of these tables has, such as one of another batch, reads the last row, which is NaN.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Named, check, describe, mapping, pytree, replace
from funcrec.jagged import KeyedJaggedTensor
from funcrec.kinds import DynamicTables, columns_of, feature_problems
from funcrec.tables import KINDS, FeatureConfig, Kind, kind_of_tables, table_shapes

NUM_READ = itertools.count()
AS_WHOLE = "cached.gather(params), for all rows"


@mapping(lambda read: read.tables, "table")
@pytree(static=("columns", "first"))
class ReadTables(Named[Any]):
    """Tables of a batch's rows, as `cached_step(...).read` returns them next to the batch with these rows.

    tables: {table: f[R, D]}. number: the id of row 0, i64[]. columns, first: those of the cached tables.
    """

    tables: dict[str, Tensor]
    number: Tensor
    columns: tuple[tuple[str, str, int | None], ...]
    first: tuple[tuple[str, str, str, float | None], ...]

    def __repr__(self) -> str:
        return f"ReadTables({{{', '.join(f'{n}: {describe(t)}' for n, t in self.tables.items())}}})"


def read_of(dynamic: DynamicTables, tables: dict[str, Tensor], number: int, device: torch.device) -> ReadTables:
    return ReadTables(tables, torch.tensor(number, device=device), dynamic.columns, dynamic.first)


def new_number() -> int:
    """Return a number that no read of this process had, of the last 2^22 ones; any two lie 2^40 apart."""
    return (next(NUM_READ) % (1 << 22) + 1) << 40


def as_rows(
    read: ReadTables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]
) -> tuple[Any, KeyedJaggedTensor]:
    """Return the plain tables, and ids with the rows that the features read."""
    of_column, of_table = {c: v for c, v, _ in read.columns}, {x[0]: x[1] for x in read.first}
    check("funcrec.lookup", feature_problems(features, of_column, of_table))
    own = [f for f in features if f.table in of_table]
    if not own:
        return read.tables, ids
    last = read.tables[own[0].table].shape[0] - 1
    rows = ids.values.long() - read.number
    rows = torch.where((rows >= 0) & (rows <= last), rows, last)
    return read.tables, replace(ids, values=torch.where(is_in(ids, columns_of(own)), rows, ids.values))


def is_in(ids: KeyedJaggedTensor, columns: Collection[str]) -> Tensor:
    """Return whether each value is one of these columns, bool[N]."""
    at = torch.arange(ids.capacity, device=ids.values.device)
    bounds = [ids.offsets_for(c) for c in columns]
    return torch.stack([(at >= own[0]) & (at < own[-1]) for own in bounds]).any(0)


KINDS[ReadTables] = Kind(
    lambda read: table_shapes(read.tables),
    lambda read, *lookup: kind_of_tables(read.tables).read(read.tables, *lookup),
    placed=AS_WHOLE,
    any_ids=lambda read: [x[0] for x in read.first],
    follows=lambda read: [x[0] for x in read.first],
    as_rows=as_rows,
)
