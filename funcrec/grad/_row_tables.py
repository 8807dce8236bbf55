"""Tables that hold only the rows that a function reads: a kind of tables whose lookups find each id's place by search.

    lookup(RowTables(t[rows], rows)) == lookup({name: t})          for ids whose rows are among `rows`

Shapes: R rows of the whole table, n rows held, D dim.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from funcrec.core import mapping, pytree
from funcrec.jagged import KeyedJaggedTensor, KeyedTensor
from funcrec.tables import (
    KINDS,
    Bags,
    FeatureConfig,
    Kind,
    LookupResult,
    RowGrads,
    gather_rows,
    is_read,
    lookup_forms,
    marked,
    num_bags_of,
    pooled_lookup,
    read_weights,
    sequences_read,
)


@mapping(lambda tables: tables.held, "table")
@pytree(static=("heights",))
class RowTables:
    """Some rows of each table: held {table: f[n, D]}, rows {table: i64[n]}, heights ((table, R), ...).

    rows: ascending, and R from the number of held rows on. A lookup of another row of the table gives NaN.
    """

    held: dict[str, Tensor]
    rows: dict[str, Tensor]
    heights: tuple[tuple[str, int], ...]


def places_of(rows: Tensor, wanted: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """Return (the place of each wanted row i64[N], -1 for a row outside the table; bool[N], whether a row of the table
    is missing)."""
    at = torch.searchsorted(rows, wanted.long().contiguous()).clamp(max=rows.shape[0] - 1)
    inside = (wanted >= 0) & (wanted < height)
    held = inside & (rows[at] == wanted)
    return torch.where(held, at, -1), inside & ~held


def shapes_of(tables: RowTables) -> dict[str, tuple[int, int]]:
    heights = dict(tables.heights)
    return {name: (heights[name], x.shape[1]) for name, x in tables.held.items()}


def read(
    tables: RowTables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None
) -> LookupResult:
    """Return the result of a lookup. `features` are all pooled, or all sequences."""
    if features[0].pooling == "none":
        return read_sequences(tables, ids, features, implementation)
    shapes, small = shapes_of(tables), {n: tuple(x.shape) for n, x in tables.held.items()}
    names, buffers, forms = lookup_forms(ids, features, shapes)
    pairs = list(dict.fromkeys((f.table, f.rows) for f in forms))
    found = [places_of(tables.rows[names[t]], buffers[r], shapes[names[t]][0]) for t, r in pairs]
    forms = [f._replace(rows=pairs.index((f.table, f.rows))) for f in forms]
    places, num_bags = [place for place, _ in found], num_bags_of(ids, features)
    values = pooled_lookup(
        [tables.held[n] for n in names], places, ids.offsets, read_weights(ids, features), forms, num_bags,
        implementation=implementation,
    )  # fmt: skip
    lost = torch.stack([(found[f.rows][1] & is_read(ids, f, num_bags)).any() for f in forms]).any()
    values = torch.where(lost, torch.nan, values)
    out = KeyedTensor(values, tuple(f.name for f in features), tuple(shapes[f.table][1] for f in features))

    def transpose(d: KeyedTensor, saved: tuple) -> dict[str, RowGrads]:
        places, offsets, weights = saved
        terms: dict[str, list[Bags]] = {}
        for f in forms:
            own = Bags(d.values, places[f.rows], offsets, weights, (f._replace(table=0, rows=0),))
            terms.setdefault(names[f.table], []).append(own)
        return {n: RowGrads(tuple(t), *small[n]) for n, t in terms.items()}

    return LookupResult(out, lambda: (places, ids.offsets, ids.weights), transpose)


def read_sequences(
    tables: RowTables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None
) -> LookupResult:
    """Return each id's row and weight, and the transpose of the map to the rows."""
    shapes = shapes_of(tables)

    def gather(table: str, wanted: Tensor) -> Tensor:
        place, is_lost = places_of(tables.rows[table], wanted, shapes[table][0])
        rows = gather_rows(tables.held[table], place, implementation=implementation)
        return torch.where(is_lost[:, None], torch.nan, rows)

    whole = sequences_read(gather, ids, features, shapes)

    def transpose(d: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> dict[str, RowGrads]:
        """Return the cotangents by places, from those by rows of the whole tables."""
        return {n: by_places(g, tables.rows[n]) for n, g in whole.transpose(d, saved).items()}

    return whole._replace(transpose=transpose)


def by_places(grads: RowGrads, rows: Tensor) -> RowGrads:
    entries = grads.entries()
    place, _ = places_of(rows, marked(entries.rows, grads.num_embeddings), grads.num_embeddings)
    return RowGrads.from_entries(place, entries.grads, num_embeddings=rows.shape[0], count=entries.count)


KINDS[RowTables] = Kind(shapes_of, read, placed="the whole tables")
