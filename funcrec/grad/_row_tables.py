"""Rows of tables that stand for whole tables: lookups find the place of each id's row by search.

    lookup({name: HeldRows(t[rows], rows, R)}) == lookup({name: t})          for ids whose rows are among `rows`

A function may put such tables under other names, and next to plain tables, as it may the tables themselves.
Shapes: R rows of the whole table, n rows held, D dim.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from funcrec.core import describe, fail, mapping
from funcrec.jagged import KeyedJaggedTensor
from funcrec.tables import (
    KINDS,
    FeatureConfig,
    Kind,
    LookupResult,
    gather_rows,
    is_plain,
    is_read,
    lookup_forms,
    num_bags_of,
    pooled_lookup,
    pooled_read,
    read_weights,
    sequences_read,
)


class HeldRows:
    """Some rows of a table f[R, D], in place of the table: held f[n, D], rows i64[n], height R.

    rows: ascending, and R from the number of held rows on. A lookup of another row of the table gives NaN. A value is
    not a pytree: it is within one call of a function, whose tensors are others.
    """

    def __init__(self, held: Tensor, rows: Tensor, height: int):
        self.held = held
        self.rows = rows
        self.height = height

    shape = property(lambda self: torch.Size((self.height, self.held.shape[1])))
    dtype = property(lambda self: self.held.dtype)
    device = property(lambda self: self.held.device)

    @staticmethod
    def joined(tables: Mapping[str, "HeldRows | Tensor"]) -> "RowTables":
        """Return tables whose lookups read held rows and plain tables."""
        if not is_plain(tables):
            fail(
                "funcrec.of_rows", "the function reads its tables as another kind of tables.", got=describe(tables),
                need="lookups of plain tables", hint="of_rows, hvp of the loss of plain tables", kind=TypeError,
            )  # fmt: skip
        return RowTables(dict(tables))


@mapping(lambda tables: tables.parts, "table")
class RowTables:
    """A dict of held rows and of plain tables, as a kind of tables."""

    def __init__(self, parts: dict[str, HeldRows | Tensor]):
        self.parts = parts


def places_of(rows: Tensor, wanted: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """Return (the place of each wanted row i64[N], -1 for a row outside the table; bool[N], whether a row of the table
    is missing)."""
    at = torch.searchsorted(rows, wanted.long().contiguous()).clamp(max=rows.shape[0] - 1)
    inside = (wanted >= 0) & (wanted < height)
    held = inside & (rows[at] == wanted)
    return torch.where(held, at, -1), inside & ~held


def found(table: HeldRows | Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (the tensor to read, the place of each wanted row in it, whether the row is missing)."""
    if isinstance(table, HeldRows):
        return table.held, *places_of(table.rows, wanted, table.height)
    return table, wanted, torch.zeros_like(wanted, dtype=torch.bool)


def shapes_of(tables: RowTables) -> dict[str, tuple[int, int]]:
    return {name: tuple(x.shape) for name, x in tables.parts.items()}


def read(
    tables: RowTables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None
) -> LookupResult:
    """Return the result of a lookup, whose transpose gives gradients of whole tables. `features` are all pooled, or all
    sequences."""
    if features[0].pooling == "none":
        return read_sequences(tables, ids, features, implementation)
    shapes = shapes_of(tables)
    names, buffers, forms = lookup_forms(ids, features, shapes)
    pairs = list(dict.fromkeys((f.table, f.rows) for f in forms))
    each = [found(tables.parts[names[t]], buffers[r]) for t, r in pairs]
    forms = [f._replace(rows=pairs.index((f.table, f.rows))) for f in forms]
    held = {t: x for (t, _), (x, _, _) in zip(pairs, each, strict=True)}
    places, num_bags = [place for _, place, _ in each], num_bags_of(ids, features)
    values = pooled_lookup(
        [held[t] for t in range(len(names))], places, ids.offsets, read_weights(ids, features), forms, num_bags,
        implementation=implementation,
    )  # fmt: skip
    lost = torch.stack([(each[f.rows][2] & is_read(ids, f, num_bags)).any() for f in forms]).any()
    return pooled_read(torch.where(lost, torch.nan, values), ids, features, shapes)


def read_sequences(
    tables: RowTables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None
) -> LookupResult:
    """Return each id's row and weight, and the transpose of the map to the rows."""

    def gather(table: str, wanted: Tensor) -> Tensor:
        held, place, is_lost = found(tables.parts[table], wanted)
        rows = gather_rows(held, place, implementation=implementation)
        return torch.where(is_lost[:, None], torch.nan, rows)

    return sequences_read(gather, ids, features, shapes_of(tables))


KINDS[RowTables] = Kind(shapes_of, read, placed="the whole tables")
