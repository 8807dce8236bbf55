"""Each operation of `ops` in plain torch: out of place, static shapes, no host read.

They pass grad, jvp, vmap and hessian as they stand, run in f64, and sum in a fixed order in eager and compiled form
(`scatter_add` over whole rows adds in the order of positions; `index_add` would become atomics under Inductor).
Shapes: B bags, N buffer length, K entries, R rows, D dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

UNROLL_MAX = 16  # bags of at most so many ids are summed term by term, which Inductor fuses into what reads the sum


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Run(NamedTuple):
    """Features that stand side by side, alike in everything: one lookup of `width` times as many bags."""

    feature: tuple
    ids: Tensor
    width: int

    def bounds(self, offsets: Tensor, num_bags: int) -> Tensor:
        first = self.feature.first_bag
        return offsets[first : first + self.width * num_bags + 1]


def runs_of(features: Sequence, rows: Sequence[Tensor], num_bags: int) -> list[Run]:
    """The features in order, neighbours joined where table, options and buffer agree and the bags follow each other."""
    runs: list[Run] = []
    for feature, ids in zip(features, rows, strict=True):
        last = runs[-1] if runs else None
        follows = last and feature == last.feature._replace(first_bag=last.feature.first_bag + last.width * num_bags)
        if follows and ids is last.ids:
            runs[-1] = last._replace(width=last.width + 1)
        else:
            runs.append(Run(feature, ids, 1))
    return runs


def pooled_lookup(tables, rows, offsets, weights, features, num_bags) -> Tensor:
    columns = []
    for run in runs_of(features, rows, num_bags):
        feature, bounds = run.feature, run.bounds(offsets, num_bags)
        scale = weights if feature.weighted else None
        pool = _pool_short if 0 < feature.max_length <= UNROLL_MAX else _pool_long
        out = pool(tables[feature.table], run.ids, bounds, scale, feature.max_length)
        out = out / bag_lengths(bounds, feature.max_length)[:, None] if feature.mean else out
        columns.append(out.unflatten(0, (run.width, num_bags)).transpose(0, 1).flatten(1))
    dtype = max((c.dtype for c in columns), key=lambda d: d.itemsize, default=torch.float32)
    return torch.cat([c.to(dtype) for c in columns], 1) if columns else offsets.new_zeros((num_bags, 0), dtype=dtype)


def _pool_short(table: Tensor, ids: Tensor, bounds: Tensor, weights: Tensor | None, max_length: int) -> Tensor:
    """Σ over the places 0, 1, ... of a bag."""
    total = 0
    for place in range(max_length):
        position = bounds[:-1] + place
        total = total + _terms(table, ids, position, position < bounds[1:], weights)
    return total


def _pool_long(table: Tensor, ids: Tensor, bounds: Tensor, weights: Tensor | None, max_length: int) -> Tensor:
    """Σ by adding every position of the buffer to its bag; positions of no bag go to bag B, which is cut off."""
    num_bags = bounds.shape[0] - 1
    position, bag, valid = _flat_entries(bounds, ids.shape[0], max_length)
    terms = _terms(table, ids, position, valid, weights)
    sums = terms.new_zeros(num_bags + 1, terms.shape[1])
    return sums.scatter_add(0, bag[:, None].expand(terms.shape), terms)[:num_bags]


def _terms(table: Tensor, ids: Tensor, position: Tensor, valid: Tensor, weights: Tensor | None) -> Tensor:
    """s_i · table[ids[position]], zeros where the position or the id counts for nothing."""
    out = gather_rows(table, _rows_at(ids, position, valid))
    if weights is not None:
        scale = _take(weights, position)
        out = out * torch.where(valid, scale, 0)[:, None].to(out.dtype)
    return out


def _rows_at(ids: Tensor, position: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, _take(ids, position), -1)


def _take(buffer: Tensor, position: Tensor) -> Tensor:
    if buffer.shape[0] == 0:
        return buffer.new_zeros(position.shape)
    return buffer.index_select(0, position.clamp(0, buffer.shape[0] - 1))


def _flat_entries(bounds: Tensor, capacity: int, max_length: int) -> tuple[Tensor, Tensor, Tensor]:
    """One entry per position of the buffer: its position, its bag (B for none) and whether it counts."""
    num_bags = bounds.shape[0] - 1
    position = torch.arange(capacity, device=bounds.device, dtype=bounds.dtype)
    bag = torch.searchsorted(bounds, position, right=True) - 1
    valid = (bag >= 0) & (bag < num_bags)
    bag = torch.where(valid, bag, num_bags)
    if max_length:
        valid = valid & (position - bounds.index_select(0, bag) < max_length)
    return position, bag, valid


def _padded_entries(bounds: Tensor, max_length: int) -> tuple[Tensor, Tensor, Tensor]:
    """`max_length` entries per bag."""
    num_bags = bounds.shape[0] - 1
    place = torch.arange(max_length, device=bounds.device, dtype=bounds.dtype)
    position = (bounds[:-1, None] + place).flatten()
    valid = (bounds[:-1, None] + place < bounds[1:, None]).flatten()
    bag = torch.arange(num_bags, device=bounds.device)[:, None].expand(num_bags, max_length).flatten()
    return position, bag, valid


def bag_lengths(bounds: Tensor, max_length: int) -> Tensor:
    """f32[B]: the divisor of a mean, at least 1."""
    lengths = bounds.diff()
    return (lengths.clamp(max=max_length) if max_length else lengths).clamp(min=1).to(torch.float32)


def pooled_lookup_transpose(d_out, shapes, rows, offsets, weights, features) -> list[tuple[Tensor, Tensor]]:
    num_bags, column = d_out.shape[0], 0
    entries: list[list] = [[] for _ in shapes]
    for run in runs_of(features, rows, num_bags):
        feature, bounds = run.feature, run.bounds(offsets, num_bags)
        num_rows, dim = shapes[feature.table]
        d = d_out[:, column : column + run.width * dim]
        d = d.unflatten(1, (run.width, dim)).transpose(0, 1).flatten(0, 1)
        column += run.width * dim
        if feature.mean:
            d = d / bag_lengths(bounds, feature.max_length)[:, None]
        entries[feature.table].append(_spread(d, run.ids, bounds, weights, feature, num_rows))
    nothing = lambda dim: (torch.zeros(0, dtype=torch.int64, device=d_out.device), d_out.new_zeros(0, dim))
    return [
        tuple(torch.cat(parts) for parts in zip(*each, strict=True)) if each else nothing(dim)
        for each, (_, dim) in zip(entries, shapes, strict=True)
    ]


def _spread(d: Tensor, ids: Tensor, bounds: Tensor, weights, feature, num_rows: int) -> tuple[Tensor, Tensor]:
    """A bag's cotangent for each of its ids: (rows i[K], s_i · d[bag] f[K, D])."""
    num_bags = d.shape[0]
    if feature.max_length and feature.max_length * num_bags <= max(ids.shape[0], num_bags):
        position, bag, valid = _padded_entries(bounds, feature.max_length)
    else:
        position, bag, valid = _flat_entries(bounds, ids.shape[0], feature.max_length)
    grads = _take_rows(d, bag)
    if feature.weighted:
        grads = grads * torch.where(valid, _take(weights, position), 0)[:, None].to(grads.dtype)
    taken = _rows_at(ids, position, valid)
    return torch.where((taken >= 0) & (taken < num_rows), taken, -1), grads


def _take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], index clamped into x; zeros when x has no row."""
    if x.shape[0] == 0:
        return x.new_zeros(index.shape[0], x.shape[1])
    return x.index_select(0, index.clamp(0, x.shape[0] - 1))


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    inside = (rows >= 0) & (rows < table.shape[0])
    taken = table.index_select(0, torch.where(inside, rows, 0)).to(accumulation_dtype(table.dtype))
    return torch.where(inside[:, None], taken, 0)


def coalesce(rows: Tensor, grads: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if rows.shape[0] == 0:
        return rows, grads, rows.new_zeros((), dtype=torch.int64), rows.to(torch.int64)
    inside = (rows >= 0) & (rows < num_rows)
    ordered, permutation = torch.sort(torch.where(inside, rows, num_rows), stable=True)
    valid = ordered < num_rows
    first = torch.cat([torch.ones_like(valid[:1]), ordered[1:] != ordered[:-1]])
    segment = first.cumsum(0) - 1
    terms = torch.where(valid[:, None], grads.index_select(0, permutation), 0)
    sums = torch.zeros_like(terms).scatter_add(0, segment[:, None].expand(terms.shape), terms)
    distinct = torch.full_like(ordered, -1).scatter(0, segment, torch.where(valid, ordered, -1))
    repeats = torch.zeros_like(segment).scatter_add(0, segment, valid.to(segment.dtype))
    return distinct, sums, (first & valid).sum(), repeats


def scatter_rows(table: Tensor, rows: Tensor, count: Tensor, new: Tensor) -> Tensor:
    """Entries behind `count` write again what entry 0 writes; with no entry, row 0 is written with itself."""
    if rows.shape[0] == 0:
        return table
    entry = torch.arange(rows.shape[0], device=rows.device)
    source = torch.where(entry < count, entry, 0)
    target = rows.index_select(0, source).clamp(0, table.shape[0] - 1)
    old = table.index_select(0, target)
    value = torch.where(count > 0, new.to(table.dtype).index_select(0, source), old)
    return table.index_put((target,), value)


__all__: Sequence[str] = ["coalesce", "gather_rows", "pooled_lookup", "pooled_lookup_transpose", "scatter_rows"]
