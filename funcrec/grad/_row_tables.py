"""Rows of tables that stand for whole tables: lookups find the place of each id's row by search.

    lookup({name: HeldRows(t[rows], rows, R)}) == lookup({name: t})          for ids whose rows are among `rows`

A function may put such tables under other names, and next to plain tables, as it may the tables themselves.
Shapes: R rows of the whole table, n rows held, D dim.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from funcrec.core import Named, describe, fail, mapping, replace
from funcrec.jagged import KeyedJaggedTensor, is_concrete
from funcrec.kernels.forms import Feature
from funcrec.tables import (
    KINDS,
    Bags,
    FeatureConfig,
    Kind,
    LookupResult,
    RowGrads,
    gather_rows,
    is_plain,
    is_read,
    kind_of_tables,
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
    def joined(tables: Mapping[str, "HeldRows | Tensor"]) -> Mapping:
        """Return tables whose lookups read held rows and plain tables. Vocabularies keep finding the rows of ids."""
        if holds_vocabularies(tables):
            return replace(cast(Any, tables), tables=RowTables(dict(tables)))
        if not is_plain(tables):
            fail(
                "funcrec.of_rows", "the function reads its tables as another kind of tables.", got=describe(tables),
                need="lookups of plain or dynamic tables", hint="a loss that reads tables as they are", kind=TypeError,
            )  # fmt: skip
        return RowTables(dict(tables))


@mapping(lambda tables: tables.parts, "table")
class RowTables(Named[Any]):
    """A dict of held rows and of plain tables, as a kind of tables."""

    def __init__(self, parts: dict[str, HeldRows | Tensor]):
        self.parts = parts


def holds_vocabularies(tables: Mapping) -> bool:
    """Return whether these are whole, trained tables that follow vocabularies: `dynamic_tables`, all rows in memory."""
    kind = kind_of_tables(tables)
    follows = kind.follows(tables) and kind.layout(tables) is None and kind.is_trained(tables)
    return bool(follows) and set(kind.follows(tables)) == set(kind.any_ids(tables))  # a cache's ids are rows of a store


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
    return {name: (x.shape[0], x.shape[1]) for name, x in tables.parts.items()}


def read(
    tables: RowTables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None
) -> LookupResult:
    """Return the result of a lookup, whose transpose gives gradients of whole tables. `features` are all pooled, or all
    sequences."""
    if features[0].pooling == "none":
        return read_sequences(tables, ids, features, implementation)
    shapes = shapes_of(tables)
    names, buffers, forms = lookup_forms(ids, features, shapes)
    num_bags, look = num_bags_of(ids, features), lambda f, rows: found(tables.parts[names[f.table]], rows)
    in_parts = is_concrete(ids.offsets)
    held, places, forms, lost = (found_in_parts if in_parts else found_whole)(look, ids, buffers, forms, num_bags)
    values = pooled_lookup(
        [held[t] for t in range(len(names))], places, ids.offsets, read_weights(ids, features), forms, num_bags,
        implementation=implementation,
    )  # fmt: skip
    values = values if lost is None else torch.where(lost, torch.nan, values)
    return pooled_read(values, ids, features, shapes)


class Places(NamedTuple):
    """What a lookup reads: held {number of a table: f[n, D]}; buffers of places; features that read these buffers; and
    lost bool[], whether a row that is read is missing, or None if none is."""

    held: dict[int, Tensor]
    buffers: list[Tensor]
    forms: list[Feature]
    lost: Tensor | None


def found_whole(
    look: Callable, ids: KeyedJaggedTensor, buffers: Sequence[Tensor], forms: Sequence[Feature], num_bags: int
) -> Places:  # fmt: skip
    """Return the places of all ids in each table. look: (feature, rows) -> what `found` returns."""
    pairs = {(f.table, f.rows): f for f in forms}
    each = [look(f, buffers[f.rows]) for f in pairs.values()]
    forms = [f._replace(rows=list(pairs).index((f.table, f.rows))) for f in forms]
    lost = torch.stack([(each[f.rows][2] & is_read(ids, f, num_bags)).any() for f in forms]).any()
    held = {t: x for (t, _), (x, _, _) in zip(pairs, each, strict=True)}
    return Places(held, [place for _, place, _ in each], forms, lost)


def found_in_parts(
    look: Callable, ids: KeyedJaggedTensor, buffers: Sequence[Tensor], forms: Sequence[Feature], num_bags: int
) -> Places:  # fmt: skip
    """Return the places of each feature's own ids, where offsets can be read.

    Features that read other positions share a buffer, and a feature says how long its longest bag is. So its gradient
    has room for its own ids, and not for those of all features."""
    ranges, longest = measured(ids.offsets, ids.capacity, forms, num_bags)
    layers = apart(ranges)
    each = [look(f, buffers[f.rows][a:b]) for f, (a, b) in zip(forms, ranges, strict=True)]
    places = []
    for layer in range(max(layers) + 1):
        parts, at = [], 0
        for (a, b), own, (_, place, _) in sorted(zip(ranges, layers, each, strict=True), key=lambda x: x[0]):
            if own == layer and a < b:
                parts += [place.new_full((a - at,), -1, dtype=torch.int64), place.long()]
                at = b
        places.append(torch.cat([*parts, ids.offsets.new_full((ids.capacity - at,), -1, dtype=torch.int64)]))
    lost = torch.stack([missing.any() for _, _, missing in each]).any()
    if is_concrete(lost) and not bool(lost):
        lost = None
    else:  # Ids that a feature does not read, because a bag has more than `max_length`, may be missing.
        read = [is_read(ids, f, num_bags)[a:b] for f, (a, b) in zip(forms, ranges, strict=True)]
        lost = torch.stack([(missing & own).any() for (_, _, missing), own in zip(each, read, strict=True)]).any()
    held = {f.table: x for f, (x, _, _) in zip(forms, each, strict=True)}
    forms = [f._replace(rows=i, max_length=room(f, n)) for f, i, n in zip(forms, layers, longest, strict=True)]
    return Places(held, places, forms, lost)


def measured(
    offsets: Tensor, size: int, forms: Sequence[Feature], num_bags: int
) -> tuple[list[tuple[int, int]], list[int]]:  # fmt: skip
    """Return (the positions [a, b) in a buffer of this size that hold each feature's ids, the length of each feature's
    longest bag)."""
    bounds, n = offsets.cummax(0).values.clamp(0, size), len(forms)
    cuts = [bounds[f.first_bag + i] for i in (0, num_bags) for f in forms]
    numbers = torch.stack([*cuts, *(longest_bag(bounds, size, f, num_bags) for f in forms)]).tolist()
    return list(zip(numbers[:n], numbers[n : 2 * n], strict=True)), numbers[2 * n :]


def longest_bag(offsets: Tensor, size: int, feature: Feature, num_bags: int) -> Tensor:
    """Return the length of a feature's longest bag in a buffer of this size, or more for offsets that descend."""
    own = offsets[feature.first_bag : feature.first_bag + num_bags + 1].cummax(0).values.clamp(0, size)
    return torch.cat([own.diff(), own.new_zeros(1)]).max()


def room(feature: Feature, longest: int) -> int:
    """Return a `max_length` with which a feature reads the same ids. It is not 0, which stands for any length."""
    return max(1, min(longest, feature.max_length or longest))


def apart(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the least number for each range that no earlier range has that overlaps it."""
    layers: list[list[tuple[int, int]]] = [[]]
    out = []
    for a, b in ranges:
        free = (i for i, taken in enumerate(layers) if a == b or all(b <= c or d <= a for c, d in taken))
        out.append(next(free, len(layers)))
        if out[-1] == len(layers):
            layers.append([])
        layers[out[-1]] += [(a, b)] * (a < b)
    return out


def with_room(grads: RowGrads) -> RowGrads:
    """Return the gradient with room for the ids of its own longest bags, where offsets can be read.

    Without it, a gradient of one feature's bags has room for the ids of all features of the lookup."""

    def one(term: Bags | Any) -> Bags | Any:
        if not isinstance(term, Bags) or not is_concrete(term.offsets):
            return term
        size = term.rows.shape[0]
        longest = torch.stack([longest_bag(term.offsets, size, f, term.d.shape[0]) for f in term.features]).tolist()
        forms = (f._replace(max_length=room(f, n)) for f, n in zip(term.features, longest, strict=True))
        return replace(term, features=tuple(forms))

    return replace(grads, terms=tuple(map(one, grads.terms)))


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
