"""Tables with the rows of one batch alone: a kind of tables that its own columns read, and nothing else.

A row of such a table is not the row of an id, so whatever takes all rows, or another column, is refused.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from funcrec.core import check, describe, mapping, pytree
from funcrec.jagged import KeyedJaggedTensor
from funcrec.kinds import DynamicTables, feature_problems
from funcrec.tables import KINDS, FeatureConfig, Kind, kind_of_tables, table_shapes

AS_WHOLE = "cached.gather(params), for all rows"


@mapping(lambda read: read.tables, "table")
@pytree(static=("columns", "first"))
class ReadTables:
    """Tables of a batch's rows, as `cached_step(...).read` returns them next to the batch with these rows.

    tables: {table: f[R, D]}. columns, first: those of the cached tables.
    """

    tables: dict[str, Tensor]
    columns: tuple[tuple[str, str, int | None], ...]
    first: tuple[tuple[str, str, str, float | None], ...]

    def __repr__(self) -> str:
        return f"ReadTables({{{', '.join(f'{n}: {describe(t)}' for n, t in self.tables.items())}}})"


def read_of(dynamic: DynamicTables, tables: dict[str, Tensor]) -> ReadTables:
    return ReadTables(tables, dynamic.columns, dynamic.first)


def as_rows(
    read: ReadTables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]
) -> tuple[Any, KeyedJaggedTensor]:
    """Return the plain tables and the same ids, which are rows already."""
    of_column, of_table = {c: v for c, v, _ in read.columns}, {x[0]: x[1] for x in read.first}
    check("funcrec.lookup", feature_problems(features, of_column, of_table))
    return read.tables, ids


KINDS[ReadTables] = Kind(
    lambda read: table_shapes(read.tables),
    lambda read, *lookup: kind_of_tables(read.tables).read(read.tables, *lookup),
    placed=AS_WHOLE,
    follows=lambda read: [x[0] for x in read.first],
    as_rows=as_rows,
)
