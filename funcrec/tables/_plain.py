"""Lookups of plain tables {name: f[R, D]}, and the transposes of these lookups.

    acts[b, f] = Σ_{i in bag (f, b)} s_i · table_f[row_i]          pooled
    rows[i]    = table_f[row_i]                                    sequences

s_i is the id's weight (or 1), divided by the bag's length for a mean.
Shapes: B bags, F features, N ids, D dim.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from funcrec.core import replace
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor, bag_ids, take_ranges
from funcrec.kernels.forms import Feature
from funcrec.tables import _primitives as primitives
from funcrec.tables._configs import FeatureConfig
from funcrec.tables._hashing import hash_rows
from funcrec.tables._kinds import KINDS, Kind, LookupResult, Placed, table_shapes
from funcrec.tables._rowgrads import Bags, RowGrads
from funcrec.tables._tape import summed

Tables = Mapping[str, Tensor]


def read_plain(
    tables: Tables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None = None
) -> LookupResult:
    """Return the result of a lookup of plain tables. `features` are all pooled, or all sequences."""
    if features and features[0].pooling == "none":
        return read_sequences(tables, ids, features, implementation)
    shapes = table_shapes(tables)
    names, buffers, forms = lookup_forms(ids, features, shapes)
    return _pooled(shapes, [tables[n] for n in names], buffers, forms, ids, features, implementation)


KINDS[dict] = Kind(lambda tables: {n: tuple(t.shape) for n, t in tables.items()}, read_plain, placed=Placed())


def _pooled(
    shapes: Mapping[str, tuple[int, int]],
    used: list[Tensor],
    buffers: list[Tensor],
    forms: list[Feature],
    ids: KeyedJaggedTensor,
    features: Sequence[FeatureConfig],
    implementation: str | None,
) -> LookupResult:
    """Return the result of pooling the rows of `used` as `forms` describe. The transpose is for tables of `shapes`."""
    values = primitives.pooled_lookup(
        used, buffers, ids.offsets, read_weights(ids, features), forms, num_bags_of(ids, features),
        implementation=implementation,
    )  # fmt: skip
    return pooled_read(values, ids, features, shapes)


def pooled_read(
    values: Tensor, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], shapes: Mapping[str, tuple[int, int]]
) -> LookupResult:
    """Return the result of a lookup whose pooled values are f[B, C]. The transpose is for tables of `shapes`."""
    out = KeyedTensor(values, tuple(f.name for f in features), tuple(shapes[f.table][1] for f in features))
    return LookupResult(out, lambda: ids, lambda d, ids: pooled_transpose(d, ids, features, shapes))


def pooled_transpose(
    d_acts: KeyedTensor,
    ids: KeyedJaggedTensor,
    features: Sequence[FeatureConfig],
    shapes: Mapping[str, tuple[int, int]],
) -> dict[str, RowGrads]:
    """Return Σ_f Σ_b Σ_{i in bag (f, b)} s_i · e_{row_i} ⊗ d_acts[b, f] as Bags, without writing out entries."""
    names, buffers, forms = lookup_forms(ids, features, shapes)
    terms: dict[str, list[Bags]] = {n: [] for n in names}
    for f in forms:  # Consecutive features of one table and one buffer form one term.
        of_table, own = terms[names[f.table]], (f._replace(table=0, rows=0),)
        if of_table and of_table[-1].rows is buffers[f.rows]:
            of_table[-1] = replace(of_table[-1], features=of_table[-1].features + own)
        else:
            of_table.append(Bags(d_acts.values, buffers[f.rows], ids.offsets, ids.weights, own))
    return {n: RowGrads(tuple(t), *shapes[n]) for n, t in terms.items()}


def read_rows(
    tables: Tables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None
) -> tuple[LookupResult, Callable[[list[Tensor]], LookupResult]]:
    """Return the separate rows that a pooled lookup reads, and a function that does the lookup in copies of them.

    The split serves a derivative inside the loss with respect to the weights. Such a derivative depends on the tables.
    A tap on the lookup's output would miss this dependence; a tap on the rows does not.
    """
    shapes = table_shapes(tables)
    names, buffers, forms = lookup_forms(ids, features, shapes)
    pairs = list(dict.fromkeys((f.table, f.rows) for f in forms))
    heights, numbers, num_bags = [tables[n].shape[0] for n in names], [], num_bags_of(ids, features)
    for t, r in pairs:
        own = [is_read(ids, f, num_bags) for f in forms if (f.table, f.rows) == (t, r)]
        numbers.append(marked(torch.where(torch.stack(own).any(0), buffers[r], -1), heights[t]))
    rows = [
        primitives.gather_rows(tables[names[t]], x, implementation=implementation)
        for (t, _), x in zip(pairs, numbers, strict=True)
    ]
    entries = lambda d, saved: summed(
        (names[t], RowGrads.from_entries(x, g, num_embeddings=heights[t]))
        for (t, _), g, x in zip(pairs, d, saved, strict=True)
    )
    places = torch.arange(ids.capacity, device=ids.values.device)
    of_copy = [f._replace(table=pairs.index((f.table, f.rows)), rows=0) for f in forms]
    return LookupResult(rows, lambda: numbers, entries), lambda rows: _pooled(
        shapes, rows, [places], of_copy, ids, features, implementation
    )


def read_sequences(
    tables: Tables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None
) -> LookupResult:
    """Return each id's row and weight, and the transpose of the map to the rows."""
    gather = lambda table, rows: primitives.gather_rows(tables[table], rows, implementation=implementation)
    return sequences_read(gather, ids, features, table_shapes(tables))


def sequences_read(
    gather: Callable[[str, Tensor], Tensor],
    ids: KeyedJaggedTensor,
    features: Sequence[FeatureConfig],
    shapes: Mapping[str, tuple[int, int]],
) -> LookupResult:
    """Return sequences of the rows gather(table, i[N]) -> f[N, D]. The transpose is for tables of `shapes`."""
    heights = {f.name: shapes[f.table][0] for f in features}
    bags = {f.name: sequence_rows(ids, f, heights[f.name]) for f in features}
    out = {f.name: replace(bags[f.name], values=gather(f.table, bags[f.name].values)) for f in features}
    numbers = lambda: {k: marked(x.values, heights[k]) for k, x in bags.items()}
    entries = lambda d, numbers: summed(
        (f.table, RowGrads.from_entries(numbers[f.name], d[f.name], num_embeddings=heights[f.name])) for f in features
    )
    return LookupResult(out, numbers, entries)


def sequence_bags(ids: KeyedJaggedTensor, feature: FeatureConfig) -> JaggedTensor:
    """Return the ids of a sequence feature, bag by bag, and its weights, in a buffer of the size of its rows."""
    bounds = ids.offsets_for(feature.key)
    lengths, capacity = bounds.diff(), ids.capacity
    if feature.max_length is not None:
        lengths = lengths.clamp(max=feature.max_length)
        capacity = min(capacity, lengths.shape[0] * feature.max_length)
    weights = ids.weights if feature.weighted else None
    return take_ranges(ids.values, weights, bounds[:-1], lengths, capacity)


def sequence_rows(ids: KeyedJaggedTensor, feature: FeatureConfig, num_embeddings: int) -> JaggedTensor:
    """Return the rows of a sequence feature, bag by bag. Padding has row -1."""
    bags = sequence_bags(ids, feature)
    rows = hash_rows(bags.values, feature.hash, num_embeddings)
    inside = torch.arange(bags.capacity, device=rows.device) < bags.offsets[-1]
    return JaggedTensor(torch.where(inside, rows, -1), bags.offsets, bags.weights)


def marked(rows: Tensor, num_embeddings: int) -> Tensor:
    """Return the rows, with -1 for each row outside the table."""
    return torch.where((rows >= 0) & (rows < num_embeddings), rows, -1)


def num_bags_of(ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> int:
    """Return B, the number of bags of all features. Without features, return that of every key (0 if keys differ)."""
    if features:
        return ids.bags_of(features[0].key)
    common = set(map(ids.bags_of, ids.keys)) or {ids.num_bags if ids.strides is None else 0}
    return common.pop() if len(common) == 1 else 0


def read_weights(ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> Tensor | None:
    """Return the ids' weights if a feature reads them, else None."""
    return ids.weights if any(f.weighted for f in features) else None


def lookup_forms(
    ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], shapes: Mapping[str, tuple[int, int]]
) -> tuple[list[str], list[Tensor], list[Feature]]:
    """Return the names of the tables to read, a buffer of rows per hash, and a kernel's Feature per feature."""
    names = list(dict.fromkeys(f.table for f in features))
    buffers: dict = {}
    out, column = [], 0
    bags = ids.num_bags if ids.strides is None else 0  # read once
    starts = {key: i * bags for i, key in enumerate(ids.keys)} if ids.strides is None else {}
    for f in features:
        num_embeddings, dim = shapes[f.table]
        how = None if f.hash is None else (f.hash, num_embeddings)
        if how not in buffers:
            buffers[how] = hash_rows(ids.values, f.hash, num_embeddings)
        options = (f.max_length or 0, f.pooling == "mean", f.weighted, column)
        start = starts[f.key] if f.key in starts else ids.bag_range(f.key)[0]
        out.append(Feature(names.index(f.table), list(buffers).index(how), start, *options))
        column += dim
    return names, list(buffers.values()), out


def is_read(ids: KeyedJaggedTensor, feature: Feature, num_bags: int) -> Tensor:
    """Return a mask of the positions of the buffer that a feature reads, bool[N]."""
    bounds = ids.offsets.cummax(0).values.clamp(0, ids.capacity)  # what a lookup reads in place of any offsets
    bounds = bounds[feature.first_bag : feature.first_bag + num_bags + 1]
    bag, place = bag_ids(bounds, ids.capacity), torch.arange(ids.capacity, device=bounds.device)
    inside = (bag >= 0) & (bag < num_bags)
    if not feature.max_length:
        return inside
    return inside & (place - bounds.index_select(0, bag.clamp(0, num_bags)) < feature.max_length)
