"""Each operation of `ops` in plain torch: out of place, static shapes, no host read.

grad, jvp, vmap and hessian apply to these functions directly, also in f64. The functions sum in a fixed order, eager
and compiled: `scatter_add` over whole rows adds in the order of positions, while Inductor would turn `index_add` into
atomics.
Shapes: B bags, N buffer length, K entries, R rows, D dim.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from funcrec.kernels.forms import (
    CODE_BITS,
    Feature,
    Segment,
    accumulation_dtype,
    check_tables,
    features_of,
    is_padded,
    segments_of,
    widest,
)
from funcrec.kernels.owners import blocks_by
from funcrec.kernels.reference_attention import jagged_attention, jagged_attention_transpose
from funcrec.kernels.reference_columns import admit_columns, find_columns, settle_columns
from funcrec.kernels.reference_draws import draw_rows, initial_rows
from funcrec.kernels.reference_extrema import bag_extrema, bag_extrema_transpose
from funcrec.kernels.reference_interaction import dot_interaction, dot_interaction_transpose
from funcrec.kernels.reference_invariant import invariant_bmm, invariant_sum
from funcrec.kernels.reference_jagged import (
    ascending,
    bucketize,
    from_padded,
    place_among,
    take_ranges,
    take_ranges_transpose,
    to_padded,
)
from funcrec.kernels.reference_quantized import quantize_rows, quantized_rows
from funcrec.kernels.reference_top_k import top_k
from funcrec.kernels.reference_vocabulary import admit_ids, find_ids, settle_ids
from torch import Tensor

__all__ = [
    "admit_columns",
    "admit_ids",
    "bag_extrema",
    "bag_extrema_transpose",
    "bucketize",
    "coalesce",
    "dot_interaction",
    "dot_interaction_transpose",
    "draw_rows",
    "expand",
    "find_columns",
    "find_ids",
    "from_padded",
    "gather_rows",
    "initial_rows",
    "invariant_bmm",
    "invariant_sum",
    "jagged_attention",
    "jagged_attention_transpose",
    "owner_blocks",
    "pooled_lookup",
    "pooled_lookup_weights",
    "quantize_rows",
    "quantized_lookup",
    "quantized_rows",
    "scatter_rows",
    "settle_columns",
    "settle_ids",
    "take_ranges",
    "take_ranges_transpose",
    "to_padded",
    "top_k",
]  # fmt: skip

UNROLL_MAX = 16  # the longest bags with sums term by term; Inductor fuses such a sum into its consumer


_owner_blocks = blocks_by(take_ranges, bucketize)


def owner_blocks(ids: Any, offsets: Any, *how: Any):
    return _owner_blocks(ids, ascending(offsets).clamp(0, ids.shape[0]), *how)


# -- pooled lookup -----------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Neighbouring features that differ only in their places, as one lookup with `width` times as many bags."""

    feature: Feature
    width: int

    def bounds(self, offsets: Tensor, num_bags: int) -> Tensor:
        first = self.feature.first_bag
        return offsets[first : first + self.width * num_bags + 1]


def runs_of(features: Sequence[Feature], dims: Sequence[int], num_bags: int) -> list[Run]:
    """Return runs of the features, in the order of the features' columns.

    A run joins neighbours if table, options and buffer agree and the bags follow each other.
    """
    runs: list[Run] = []
    for feature in sorted(features, key=lambda f: f.column):
        last = runs[-1] if runs else None
        if last:
            first, width = last.feature, last.width
            bag, column = first.first_bag + width * num_bags, first.column + width * dims[first.table]
            if feature == first._replace(first_bag=bag, column=column):
                runs[-1] = last._replace(width=width + 1)
                continue
        runs.append(Run(feature, 1))
    return runs


def pooled_lookup(
    tables: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: Sequence[int],
    num_bags: int,
    blocks: int = 1,
) -> Tensor:
    read, dims = [functools.partial(gather_rows, t) for t in tables], [t.shape[1] for t in tables]
    out = _pooled(read, dims, rows, offsets, weights, features, num_bags)
    return out if blocks == 1 else torch.cat(out.chunk(blocks, 1))


def quantized_lookup(
    tables: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: Sequence[int],
    num_bags: int,
    bits: Sequence[int],
    dims: Sequence[int],
) -> Tensor:
    """Return the `pooled_lookup` of the numbers that the rows encode, f32[B, C]."""
    check_tables("quantized_lookup", tables, bits, dims)
    coded = lambda t, b, dim: lambda rows: quantized_rows(t, rows, b, dim)
    every = zip(tables, bits, dims, strict=True)
    read = [coded(t, b, dim) if b in CODE_BITS else functools.partial(gather_rows, t) for t, b, dim in every]
    return _pooled(read, dims, rows, offsets, weights, features, num_bags).to(torch.float32)


def _pooled(read, dims, rows, offsets, weights, features, num_bags) -> Tensor:
    """Return the pooled rows, f[B, C]. read[t](rows) returns rows of table t."""
    columns, offsets = [], ascending(offsets)
    for run in runs_of(features_of(features), dims, num_bags):
        feature = run.feature
        bounds = run.bounds(offsets, num_bags).clamp(0, rows[feature.rows].shape[0])
        scale = weights if feature.weighted else None
        pool = _pool_short if 0 < feature.max_length <= UNROLL_MAX else _pool_long
        out = pool(read[feature.table], rows[feature.rows], bounds, scale, feature.max_length)
        out = out / bag_lengths(bounds, feature.max_length)[:, None] if feature.mean else out
        columns.append(out.unflatten(0, (run.width, num_bags)).transpose(0, 1).flatten(1))
    dtype = widest(columns)
    return torch.cat([c.to(dtype) for c in columns], 1) if columns else offsets.new_zeros((num_bags, 0), dtype=dtype)


def _pool_short(read: Callable, ids: Tensor, bounds: Tensor, weights: Tensor | None, max_length: int) -> Tensor:
    """Return the sums over the places 0, 1, ... of each bag, f[B, D]."""
    total = cast(Tensor, 0)
    for place in range(max_length):
        position = bounds[:-1] + place
        total = total + _terms(read, ids, position, position < bounds[1:], weights)
    return total


def _pool_long(read: Callable, ids: Tensor, bounds: Tensor, weights: Tensor | None, max_length: int) -> Tensor:
    """Return the sums of each bag, f[B, D], by adding every position of the buffer to its bag.

    Positions outside all bags go to bag B, which is cut off.
    """
    num_bags = bounds.shape[0] - 1
    position, bag, valid = _flat_entries(bounds, ids.shape[0], max_length)
    terms = _terms(read, ids, position, valid, weights)
    sums = terms.new_zeros(num_bags + 1, terms.shape[1])
    return sums.scatter_add(0, bag[:, None].expand(terms.shape), terms)[:num_bags]


def _terms(read: Callable, ids: Tensor, position: Tensor, valid: Tensor, weights: Tensor | None) -> Tensor:
    """Return s_i · table[ids[position]], with zeros if the position or the id does not count."""
    out = read(_rows_at(ids, position, valid))
    if weights is not None:
        out = out * _scale_at(weights, position, valid).to(out.dtype)
    return out


def _rows_at(ids: Tensor, position: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, _take(ids, position), -1)


def _scale_at(weights: Tensor, position: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, _take(weights, position), 0)[:, None]


def _take(buffer: Tensor, position: Tensor) -> Tensor:
    """Return buffer[position], with the position clamped into the buffer, or zeros if the buffer is empty."""
    if buffer.shape[0] == 0:
        return buffer.new_zeros(position.shape + buffer.shape[1:])
    return buffer.index_select(0, position.clamp(0, buffer.shape[0] - 1))


def _flat_entries(bounds: Tensor, capacity: int, max_length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (position, bag, valid) of each position of the buffer: its bag (B for none) and whether it counts."""
    num_bags = bounds.shape[0] - 1
    position = torch.arange(capacity, device=bounds.device, dtype=bounds.dtype)
    bag = place_among(bounds, position) - 1
    valid = (bag >= 0) & (bag < num_bags)
    bag = torch.where(valid, bag, num_bags)
    if max_length:
        valid = valid & (position - bounds.index_select(0, bag) < max_length)
    return position, bag, valid


def _padded_entries(bounds: Tensor, max_length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (position, bag, valid) of each entry, with `max_length` entries per bag."""
    num_bags = bounds.shape[0] - 1
    place = torch.arange(max_length, device=bounds.device, dtype=bounds.dtype)
    position = (bounds[:-1, None] + place).flatten()
    valid = (bounds[:-1, None] + place < bounds[1:, None]).flatten()
    bag = torch.arange(num_bags, device=bounds.device)[:, None].expand(num_bags, max_length).flatten()
    return position, bag, valid


def bag_lengths(bounds: Tensor, max_length: int) -> Tensor:
    """Return the divisor of a mean, f32[B], at least 1."""
    lengths = bounds.diff()
    return (lengths.clamp(max=max_length) if max_length else lengths).clamp(min=1).to(torch.float32)


def pooled_lookup_weights(
    d_out: Tensor,
    tables: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: Sequence[int],
) -> Tensor:
    num_bags = d_out.shape[0]
    assert weights is not None  # the cotangent is that of weights
    offsets, total = ascending(offsets), torch.zeros_like(weights, dtype=accumulation_dtype(weights.dtype))
    for f in features_of(features):
        if not f.weighted:
            continue
        bounds = offsets[f.first_bag : f.first_bag + num_bags + 1].clamp(0, rows[f.rows].shape[0])
        position, bag, valid = _flat_entries(bounds, rows[f.rows].shape[0], f.max_length)
        d = d_out[:, f.column : f.column + tables[f.table].shape[1]]
        d = d / bag_lengths(bounds, f.max_length)[:, None] if f.mean else d
        dots = (gather_rows(tables[f.table], _rows_at(rows[f.rows], position, valid)) * _take(d, bag)).sum(1)
        total = total + torch.where(valid, dots, 0)
    return total.to(weights.dtype)


# -- the cotangents of tables ------------------------------------------------------------------------------------


def expand(d: Any, rows: Any, offsets: Any, weights: Any, segments: Any, shapes: Any) -> list[Tensor]:
    entries: list[list] = [[] for _ in shapes[::2]]
    offsets = [ascending(x) for x in offsets]
    for s in segments_of(segments):
        num_rows, dim = shapes[2 * s.table : 2 * s.table + 2]
        taken, grads = _entries(s, d[s.d][:, s.column : s.column + dim], rows[s.rows], offsets, weights)
        taken = taken.long()  # i64, because i32 may be too small for R
        inside = (taken >= 0) & (taken < num_rows)
        wide = accumulation_dtype(grads.dtype)
        entries[s.table].append((torch.where(inside, taken, -1), torch.where(inside[:, None], grads.to(wide), 0)))
    device = (*d, *rows, torch.empty(0))[0].device
    nothing = lambda dim: (torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, dim, device=device))
    out = [
        (torch.cat([r for r, _ in each]), torch.cat([g for _, g in each])) if each else nothing(dim)
        for each, dim in zip(entries, shapes[1::2], strict=True)
    ]
    return [x for pair in out for x in pair]


def _entries(s: Segment, d: Tensor, ids: Tensor, offsets: Sequence[Tensor], weights: Sequence[Tensor]):
    """Return (rows i[K], s_i · d[bag] f[K, D]) of one segment. The offsets ascend."""
    d = d.to(accumulation_dtype(d.dtype))
    scale = weights[s.weights] if s.weights >= 0 else None
    if s.offsets < 0:
        grads = d[: s.num_bags] if scale is None else d[: s.num_bags] * scale[: s.num_bags, None].to(d.dtype)
        return ids[: s.num_bags], grads
    bounds = offsets[s.offsets][s.first_bag : s.first_bag + s.num_bags + 1].clamp(0, ids.shape[0])
    # s_i / len is one factor, rounded once, as in the kernels. So an entry has the same bits in all implementations.
    lengths = bag_lengths(bounds, s.max_length).double() if s.mean else None
    if lengths is not None and scale is None:
        d = d * (1 / lengths)[:, None].to(d.dtype)
    if is_padded(s, ids.shape[0]):
        position, bag, valid = _padded_entries(bounds, s.max_length)
    else:
        position, bag, valid = _flat_entries(bounds, ids.shape[0], s.max_length)
    grads = _take(d, bag)
    if scale is not None:
        by = _scale_at(scale, position, valid)
        by = by if lengths is None else by.double() / _take(lengths, bag)[:, None].clamp(min=1)
        grads = grads * by.to(d.dtype)
    return _rows_at(ids, position, valid), grads


def coalesce(d: Any, rows: Any, offsets: Any, weights: Any, segments: Any, shapes: Any) -> list[Tensor]:
    entries = expand(d, rows, offsets, weights, segments, shapes)
    out = []
    for taken, grads, num_rows in zip(entries[::2], entries[1::2], shapes[::2], strict=True):
        distinct, sums, count, repeats = _coalesce_entries(taken, grads, num_rows)
        most = min(taken.shape[0], num_rows)
        out += [distinct[:most], sums[:most], count, repeats[:most]]
    return out


def _coalesce_entries(rows: Tensor, grads: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if rows.shape[0] == 0:
        return rows, grads, rows.new_zeros(()), rows
    ordered, permutation = torch.sort(torch.where(rows >= 0, rows, num_rows), stable=True)
    valid = ordered < num_rows
    first = torch.cat([torch.ones_like(valid[:1]), ordered[1:] != ordered[:-1]])
    segment = first.cumsum(0) - 1
    terms = torch.where(valid[:, None], grads.index_select(0, permutation), 0)
    sums = torch.zeros_like(terms).scatter_add(0, segment[:, None].expand(terms.shape), terms)
    distinct = torch.full_like(ordered, -1).scatter(0, segment, torch.where(valid, ordered, -1))
    repeats = torch.zeros_like(segment).scatter_add(0, segment, valid.to(segment.dtype))
    return distinct, sums, (first & valid).sum(), repeats


# -- rows --------------------------------------------------------------------------------------------------------


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    inside = (rows >= 0) & (rows.long() < table.shape[0])
    return torch.where(inside[:, None], _take(table, rows).to(accumulation_dtype(table.dtype)), 0)


def scatter_rows(table: Tensor, rows: Tensor, count: Tensor, new: Tensor) -> Tensor:
    """Return the table with new[i] in row rows[i] for i < count.

    Entries from `count` on rewrite the old values of distinct rows that the first entries do not name. So no place is
    written twice.
    """
    most = min(rows.shape[0], table.shape[0])
    if most == 0:
        return table
    entry = torch.arange(most, device=rows.device)
    named = entry < count
    # The j-th unnamed row is j + (the number of named rows that have at most j unnamed rows below them).
    ordered = torch.sort(torch.where(named, rows[:most].long(), 2 * table.shape[0] + entry)).values
    spare = (entry - count).clamp(min=0)
    spare = (spare + torch.searchsorted(ordered - entry, spare, right=True)).clamp(max=table.shape[0] - 1)
    target = torch.where(named, rows[:most].long().clamp(0, table.shape[0] - 1), spare)
    value = torch.where(named[:, None], new[:most].to(table.dtype), table.index_select(0, target))
    return table.index_put((target,), value)
