"""Kernels of lookups as differentiable functions. Their derivatives are kernels, or plain torch.

    d_tables = lookupᵀ(d_out)         d_weights[i] = ⟨table[row_i], d_out[bag_i]⟩         tangents: the map on tangents

A kernel in `funcrec.kernels` has no derivative. This file gives kernels reverse and forward rules. The vmap of a kernel
is one call, in which the members are more tables, buffers and features. The rules hold under every nesting of
torch.func. The dense gradient of a table comes from the reference; `value_and_grad` never needs it.
Shapes: B bags, C columns, N ids, R rows, D dim, T tables.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcrec.core import any_tracked, by_vmap_rule, is_in_transform, is_in_vmap, one_level_below, sure
from funcrec.jagged import offsets_of, take_ranges
from funcrec.kernels import ops, reference, stacks
from funcrec.kernels.forms import Feature, Segment, features_of, flatten

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Lookup:
    """The static part of a pooled lookup, whose tensors are the tables, the buffers of rows, offsets and any weights.

    The class is not a tuple, because torch.func would flatten a tuple in every call.
    """

    implementation: str
    features: tuple[Feature, ...]
    num_bags: int
    num_tables: int
    num_rows: int
    blocks: int = 1

    def parts(self, tensors: Sequence[T]) -> tuple[list[T], list[T], T, T | None]:
        t, r = self.num_tables, self.num_tables + self.num_rows
        return list(tensors[:t]), list(tensors[t:r]), tensors[r], tensors[r + 1] if len(tensors) > r + 1 else None

    def call(self, tensors: Sequence[Tensor]) -> Tensor:
        return ops.pooled_lookup(
            *self.parts(tensors), self.features, self.num_bags, self.blocks, implementation=self.implementation
        )

    def joined(self, out: Tensor) -> Tensor:
        """Return the blocks of an output, [n · B, C / n], as [B, C]."""
        return out if self.blocks == 1 else torch.cat(out.chunk(self.blocks), 1)

    def weighted_only(self) -> "_Lookup":
        return dataclasses.replace(self, features=tuple(f for f in self.features if f.weighted))


def pooled_lookup(
    tables: Any,
    rows: Any,
    offsets: Any,
    weights: Any,
    features: Any,
    num_bags: Any,
    blocks: int = 1,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Return the result of `ops.pooled_lookup`, differentiable in tables and weights."""
    choice = ops.chosen(implementation, offsets.device)
    if choice == "reference":
        return ops.pooled_lookup(tables, rows, offsets, weights, features, num_bags, blocks, implementation=choice)
    spec = _Lookup(choice, tuple(features), num_bags, len(tables), len(rows), blocks)
    return looked_up(spec, *tables, *rows, offsets, *([] if weights is None else [weights]))


def looked_up(spec: _Lookup, *tensors: Tensor) -> Tensor:
    """Return the result of the lookup.

    If no derivative is wanted, one call of the operator computes all members of a vmap.
    """
    is_followed = torch.compiler.is_dynamo_compiling() or any_tracked(tensors)
    if not is_followed and not is_in_transform():
        return spec.call(tensors)
    if is_followed or not is_in_vmap():
        return _PooledLookup.apply(spec, *tensors)
    rule = lambda info, dims, *xs: _PooledLookup.vmap(info, (None, *dims), spec, *xs)
    return by_vmap_rule(functools.partial(looked_up, spec), rule, tensors)


def gather_rows(table: Tensor, rows: Tensor, *, implementation: str | None = None) -> Tensor:
    """Return the result of `ops.gather_rows`, differentiable in the table."""
    choice = ops.chosen(implementation, table.device)
    if choice == "reference":
        return ops.gather_rows(table, rows, implementation=choice)
    return _GatherRows.apply(choice, table, rows)


class _PooledLookup(torch.autograd.Function):
    @staticmethod
    def forward(spec, *tensors):
        return spec.call(tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save(ctx, inputs)

    @staticmethod
    def backward(ctx, d_out):
        saved = ctx.saved_tensors  # read once: torch.utils.checkpoint gives them only once
        tables, _, _, weights = ctx.spec.parts(saved)
        needed, d_out, spec = ctx.needs_input_grad[1:], ctx.spec.joined(d_out), dataclasses.replace(ctx.spec, blocks=1)
        grads: list[Tensor | None] = [None] * len(saved)
        if any(needed[: len(tables)]):
            grads[: len(tables)] = _dense_transpose(spec, d_out, saved)
        if weights is not None and needed[-1]:
            grads[-1] = _LookupWeights.apply(spec, d_out, *saved)
        return None, *grads

    @staticmethod
    def jvp(ctx, _, *tangents):
        return one_level_below(functools.partial(_lookup_tangent, ctx.spec), ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info, in_dims, spec, *tensors):
        members = _Members(spec, info.batch_size, in_dims[1:], tensors)
        if members.are_one_batch():
            return looked_up(*members.one_batch()).unflatten(0, (members.num, spec.num_bags)), 0
        if not is_in_transform() and not any_tracked(tensors):
            return spec.call(members.stacks), 0
        if members.num == 0:
            return members.no_output(), 0
        if members.are_apart and not members.fit():
            return _loop(_PooledLookup, info, in_dims, spec, tensors)
        out = looked_up(*members.call(members.are_apart))
        return out.unflatten(0, (members.num, spec.blocks * spec.num_bags)), 0


class _LookupWeights(torch.autograd.Function):
    """The cotangent d_weights of a pooled lookup, which is bilinear in d_out and the tables."""

    @staticmethod
    def forward(spec, d_out, *tensors):
        tables, rows, offsets, weights = spec.parts(tensors)
        return ops.pooled_lookup_weights(
            d_out, tables, rows, offsets, weights, spec.features, implementation=spec.implementation
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save(ctx, inputs)

    @staticmethod
    def backward(ctx, d_weights):
        d_out, *tensors = ctx.saved_tensors
        needed, t = ctx.needs_input_grad[1:], ctx.spec.num_tables
        grads: list[Tensor | None] = [None] * len(tensors)
        at = [*tensors[:-1], d_weights]
        if any(needed[1 : t + 1]):
            grads[:t] = _dense_transpose(ctx.spec.weighted_only(), d_out, at)
        return None, _in_weights(ctx.spec, tensors, d_weights) if needed[0] else None, *grads

    @staticmethod
    def jvp(ctx, _, *tangents):
        return one_level_below(functools.partial(_weights_tangent, ctx.spec), ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info, in_dims, spec, d_out, *tensors):
        _, of_d, *dims = in_dims
        members = _Members(spec, info.batch_size, dims, tensors)
        if members.num == 0:
            weights = sure(members.parts[3])
            return weights.new_zeros(0, weights.shape[-1]), 0
        if not members.fit():
            return _loop(_LookupWeights, info, in_dims, spec, (d_out, *tensors))
        # `wide` has the members' columns side by side.
        wide = d_out[:, None].expand(-1, members.num, -1) if of_d is None else d_out.movedim(of_d, 1)
        call, *rest = members.call(True, wide.shape[2])
        out = _LookupWeights.apply(dataclasses.replace(call, blocks=1), wide.flatten(1), *rest)
        return out.unflatten(0, (members.num, -1)), 0


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(spec, table, rows):
        return ops.gather_rows(table, rows, implementation=spec)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save(ctx, inputs)

    @staticmethod
    def backward(ctx, d_out):
        table, rows = ctx.saved_tensors
        return None, dense_sum(rows, d_out, table.shape[0]).to(table.dtype), None

    @staticmethod
    def jvp(ctx, _, *tangents):
        return one_level_below(lambda x, t: _GatherRows.apply(ctx.spec, t[0], x[1]), ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info, in_dims, spec, table, rows):
        _, of_table, of_rows = in_dims
        if of_rows is not None:
            rows = rows.movedim(of_rows, 0)
        k, num_ids = info.batch_size, rows.shape[-1]
        if of_table is not None:  # The members' tables become one tall table.
            table = table.movedim(of_table, 0)
            inside = (rows >= 0) & (rows < table.shape[1])
            first = torch.arange(k, device=rows.device)[:, None] * table.shape[1]
            rows, table = torch.where(inside, rows.long() + first, -1), table.flatten(0, 1)
        return _GatherRows.apply(spec, table, rows.reshape(-1)).unflatten(0, (k, num_ids)), 0


class _Members:
    """The K members of a vmap of lookups as one lookup, on stacked tensors or with K times the features."""

    def __init__(self, spec: _Lookup, num: int, dims: Sequence[int | None], tensors: Sequence[Tensor]):
        self.spec, self.num = spec, num
        self.dims = spec.parts(dims)
        self.stacks = [x if not d else x.movedim(d, 0) for x, d in zip(tensors, dims, strict=True)]
        self.parts = spec.parts(self.stacks)
        self.are_apart = self.dims[2] is not None or self.dims[3] is not None

    def fit(self) -> bool:
        return stacks.fit(self.parts[1], self.parts[3])

    def are_one_batch(self) -> bool:
        """Return whether only the ids differ: members that share their tables are the examples of one batch."""
        tables, rows, offsets, weights = self.dims
        own = [*rows, offsets, *([] if self.parts[3] is None else [weights])]
        if self.num == 0 or self.spec.blocks > 1 or any(d is not None for d in tables) or None in own:
            return False
        b = self.spec.num_bags
        keys_are_alike = b and all(f.first_bag % b == 0 for f in self.spec.features)
        return bool(keys_are_alike) and (self.parts[2].shape[1] - 1) % b == 0

    def one_batch(self) -> tuple:
        """Return the static part and the tensors of one lookup of K · B bags: for each key those of all members."""
        spec, k = self.spec, self.num
        tables, rows, offsets, weights = self.parts
        grid = lambda x: x.unflatten(1, (-1, spec.num_bags)).transpose(0, 1).flatten().long()
        starts, lengths = grid(offsets[:, :-1]), grid(torch.diff(offsets, dim=1))
        member = torch.arange(k, device=offsets.device).repeat_interleave(spec.num_bags)
        first = member.repeat(lengths.shape[0] // max(member.shape[0], 1))
        taken = lambda x: take_ranges(x.flatten(), None, starts + first * x.shape[1], lengths, x.numel())
        moved, scale = [taken(x) for x in rows], None if weights is None else taken(weights).values
        ends = (moved[0].offsets if moved else offsets_of(lengths)).to(offsets.dtype)
        features = tuple(f._replace(first_bag=f.first_bag * k) for f in spec.features)
        flat = [*tables, *(x.values for x in moved), ends, *([] if scale is None else [scale])]
        return dataclasses.replace(spec, features=features, num_bags=spec.num_bags * k), *flat

    def no_output(self) -> Tensor:
        tables, _, offsets, _ = self.parts
        return stacks.no_members(tables, offsets, flatten(self.spec.features), self.spec.num_bags, self.spec.blocks)

    def call(self, apart: bool, width: int | None = None) -> tuple[Any, ...]:
        """Return the static part and the tensors of the one lookup, as `stacks.lookups_together` makes them."""
        spec, k = self.spec, self.num
        own = flatten(spec.features)
        tables, rows, offsets, weights, numbers = stacks.lookups_together(*self.parts, own, k, apart, width)
        sizes = {"num_tables": len(tables), "num_rows": len(rows), "blocks": spec.blocks * k}
        flat = [*tables, *rows, offsets, *([] if weights is None else [weights])]
        return dataclasses.replace(spec, features=tuple(features_of(numbers)), **sizes), *flat


def _save(ctx, inputs) -> None:
    ctx.spec = inputs[0]
    ctx.save_for_backward(*inputs[1:])
    ctx.save_for_forward(*inputs[1:])


def _lookup_tangent(spec: _Lookup, tensors: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Tensor:
    t, parts = spec.num_tables, []
    if any(x is not None for x in tangents[:t]):
        parts.append(_PooledLookup.apply(spec, *_or_zeros(tensors[:t], tangents[:t]), *tensors[t:]))
    if spec.parts(tensors)[3] is not None and tangents[-1] is not None:
        parts.append(_in_weights(spec, tensors, tangents[-1]))
    return sum(parts[1:], parts[0])


def _weights_tangent(spec: _Lookup, tensors: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Tensor:
    (d_out, *rest), t, parts = tensors, spec.num_tables, []
    if tangents[0] is not None:
        parts.append(_LookupWeights.apply(spec, tangents[0], *rest))
    if any(x is not None for x in tangents[1 : t + 1]):
        parts.append(_LookupWeights.apply(spec, d_out, *_or_zeros(rest[:t], tangents[1 : t + 1]), *rest[t:]))
    return sum(parts[1:], parts[0])


def _or_zeros(tensors: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor]:
    return [torch.zeros_like(x) if d is None else d for x, d in zip(tensors, tangents, strict=True)]


def _loop(function, info, in_dims, spec, tensors):
    """Return (outputs, 0), the stacked outputs of one call of the function for each member of the vmap."""
    take = lambda x, dim, i: x if dim is None else x.select(dim, i).contiguous()
    outs = [
        function.apply(spec, *(take(x, dim, i) for x, dim in zip(tensors, in_dims[1:], strict=True)))
        for i in range(info.batch_size)
    ]
    return torch.stack(outs), 0


def _in_weights(spec: _Lookup, tensors: Sequence[Tensor], d_weights: Tensor) -> Tensor:
    """Return the tangent of the lookup in the weights.

    The lookup f is affine in the weights, so f(d) - f(0) is its linear part.
    """
    at = lambda weights: _PooledLookup.apply(spec, *tensors[:-1], weights)
    return at(d_weights) - at(torch.zeros_like(d_weights))


def _dense_transpose(spec: _Lookup, d_out: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the dense gradient f[R, D] of each table, in plain torch."""
    tables, rows, offsets, weights = spec.parts(tensors)
    scale = [] if weights is None else [weights]
    segments = segments_of_lookup(spec.features, spec.num_bags)
    entries = reference.expand([d_out], rows, [offsets], scale, flatten(segments), [n for t in tables for n in t.shape])
    each = zip(entries[::2], entries[1::2], tables, strict=True)
    return [dense_sum(rows, grads, t.shape[0]).to(t.dtype) for rows, grads, t in each]


def segments_of_lookup(features: Sequence[Feature], num_bags: int) -> list[Segment]:
    """Return segments of the cotangents of one lookup's tables. Each list of tensors holds one tensor of the lookup."""
    return [
        Segment(f.table, 0, f.column, f.rows, 0, f.first_bag, num_bags, f.max_length, f.mean, 0 if f.weighted else -1)
        for f in features
    ]


def dense_sum(rows: Tensor, grads: Tensor, num_rows: int) -> Tensor:
    """Return Σ_i e_{rows[i]} ⊗ grads[i], f[R, D]; rows outside the table do not count."""
    inside = (rows >= 0) & (rows < num_rows)
    place = torch.where(inside, rows, num_rows).long()
    terms = torch.where(inside[:, None], grads, 0)
    dense = terms.new_zeros(num_rows + 1, terms.shape[1])
    return dense.scatter_add(0, place[:, None].expand(terms.shape), terms)[:num_rows]
