"""Kernels on jagged buffers as differentiable functions. Each is linear in the values, and its transpose is a kernel.

    take_ranges ↔ take_ranges_transpose          to_padded ↔ from_padded          bag_sums ↔ bag_spread
    bag_pick ↔ bag_put, of places that bag_extrema finds

Reverse and forward rules hold under every nesting of torch.func. vmap over the values alone is one call, with the
members side by side as columns. vmap over offsets is a loop. The values may also be integers.
Shapes: B bags, N values, C capacity of an output, L places of a padded bag.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import is_transforming, one_level_below
from funcrec.kernels import ops, reference, reference_extrema
from funcrec.kernels.forms import Feature
from funcrec.kernels.tracked import is_concrete as is_concrete

TRANSPOSES = {
    "take_ranges": "take_ranges_transpose",
    "take_ranges_transpose": "take_ranges",
    "to_padded": "from_padded",
    "from_padded": "to_padded",
    "bag_sums": "bag_spread",
    "bag_spread": "bag_sums",
    "bag_pick": "bag_put",
    "bag_put": "bag_pick",
}


class _Map(NamedTuple):
    """The static part of a call.

    size: C, N or L of the output; bag_sums and bag_pick do not read it. fill: the value of empty places in the result
    of to_padded, and of empty bags in the result of bag_pick.
    """

    name: str
    implementation: str
    size: int
    fill: float | int = 0

    def run(self, x: Tensor, *ints: Tensor) -> Tensor:
        if self.name in ("bag_sums", "bag_spread"):
            flat = x.reshape(x.shape[0], math.prod(x.shape[1:])).contiguous()
            out = (_sums if self.name == "bag_sums" else _spread)(flat, ints[0], self.size, self.implementation)
            return out.reshape(out.shape[0], *x.shape[1:])
        if self.name == "bag_pick":
            return _pick(x, ints[0], ints[1], self.fill)
        if self.name == "bag_put":
            return _operation("bag_extrema_transpose", self.implementation)(x, *ints, self.size)
        fill = (self.fill,) if self.name == "to_padded" else ()
        out = _operation(self.name, self.implementation)(x, *ints, self.size, *fill)
        return out[0] if self.name == "take_ranges" else out

    def transpose(self, size: int) -> "_Map":
        return _Map(TRANSPOSES[self.name], self.implementation, size)


def take_ranges(values: Tensor, starts: Tensor, lengths: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return the result of `ops.take_ranges`, differentiable in the values. The offsets have the lengths' dtype."""
    choice = _chosen(values)
    if choice == "reference" or not is_transformed(values):
        taken, offsets = _operation("take_ranges", choice)(values, starts, lengths, capacity)
        return taken, offsets.to(lengths.dtype)
    return _Linear.apply(_Map("take_ranges", choice, capacity), values, starts, lengths), offsets_of(lengths)


def take_ranges_transpose(d: Tensor, starts: Tensor, lengths: Tensor, num_values: int) -> Tensor:
    """Return the result of `ops.take_ranges_transpose`, differentiable in d."""
    return _call(_Map("take_ranges_transpose", _chosen(d), num_values), d, starts, lengths)


def to_padded(values: Tensor, offsets: Tensor, length: int, fill: float | int) -> Tensor:
    """Return the result of `ops.to_padded`, differentiable in the values."""
    return _call(_Map("to_padded", _chosen(values), length, fill), values, offsets)


def from_padded(padded: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """Return the result of `ops.from_padded`, differentiable in `padded`."""
    return _call(_Map("from_padded", _chosen(padded), capacity), padded, offsets)


def bag_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of each bag of f32|f64[N, ...] -> [B, ...], differentiable in the values."""
    return _call(_Map("bag_sums", _chosen(values), 0), values, offsets)


def bag_spread(x: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """Return its bag's row for each position, f32|f64[B, ...] -> [N, ...], differentiable in x. Padding is 0."""
    return _call(_Map("bag_spread", _chosen(x), capacity), x, offsets)


def bag_extrema(values: Tensor, offsets: Tensor, greatest: bool) -> Tensor:
    """Return the greatest or least value of each bag of [N, ...] -> [B, ...], differentiable in the values.

    The whole derivative goes to the place of the value; of equal values, to the first.
    """
    if not torch.compiler.is_dynamo_compiling() and not is_transformed(values):
        return _operation("bag_extrema", _with_extrema(values))(values, offsets, greatest, False)[0]
    return placed_extrema(values, offsets, greatest)[0]


def placed_extrema(values: Tensor, offsets: Tensor, greatest: bool) -> tuple[Tensor, Tensor]:
    """Return (`bag_extrema`, the first place of each such value i64[B, ...], which is N for an empty bag)."""
    choice = _with_extrema(values)
    if not torch.compiler.is_dynamo_compiling() and not is_transformed(values):
        return _operation("bag_extrema", choice)(values, offsets, greatest, True)
    if choice == "reference":
        return reference.bag_extrema(values, offsets, greatest, True)
    places = _Places.apply(choice, greatest, values.detach(), offsets)
    limit = reference_extrema.limit_of(values.dtype, greatest)
    return _call(_Map("bag_pick", choice, 0, limit), values, offsets, places), places


def put_extrema(d: Tensor, offsets: Tensor, places: Tensor, num_values: int) -> Tensor:
    """Return d [B, ...] at its places, and zeros elsewhere, [N, ...], differentiable in d."""
    return _call(_Map("bag_put", _with_extrema(d), num_values), d, offsets, places)


def _with_extrema(x: Tensor) -> str:
    """Return the name of the implementation. It is the reference on a device whose default has no extrema."""
    return "reference" if torch.compiler.is_dynamo_compiling() else ops.available("bag_extrema", x.device)


def _pick(x: Tensor, offsets: Tensor, places: Tensor, fill: float | int) -> Tensor:
    """Return x[places[b, j], j], or `fill` at place N."""
    size = x.shape[0]
    none = torch.full((), fill, dtype=x.dtype, device=x.device)
    if isinstance(size, int) and not size:
        return none.expand(places.shape).clone()
    return torch.where(places < size, x.gather(0, places.clamp(max=size - 1)), none)


def _sums(x: Tensor, offsets: Tensor, size: int, implementation: str) -> Tensor:
    """The values serve as a table and each position as an id; the kernel of lookups adds them in order."""
    whole = [Feature(0, 0, 0, 0, False, False, 0)]
    rows = torch.arange(x.shape[0], device=x.device)
    return _operation("pooled_lookup", implementation)(
        [x.contiguous()], [rows], offsets, None, whole, offsets.shape[0] - 1
    )


def _spread(x: Tensor, offsets: Tensor, size: int, implementation: str) -> Tensor:
    """The padding has the row B, which no table of B rows has."""
    return _operation("gather_rows", implementation)(x, bag_ids(offsets, size))


def bag_ids(offsets: Tensor, capacity: int) -> Tensor:
    """Return the bag of each position, i64[capacity]: the number of boundaries up to it, less 1.

    A sum over marks takes a fifth of the time of a binary search for each position.
    """
    marks = torch.zeros(capacity + 1, dtype=torch.int64, device=offsets.device)
    at = offsets.long().clamp(0, capacity)
    return marks.scatter_add(0, at, torch.ones_like(at))[:-1].cumsum(0) - 1


def kept_places(mask: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (source i64[N], lengths i64[B]): the places where `mask` is true inside a bag, in order, then zeros; and
    the number of them in each bag."""
    places = torch.where(mask, torch.arange(mask.shape[0], device=mask.device), -1)  # -1 is the row of no shard
    found, lengths, *_ = _operation("bucketize", _chosen(mask))(places, offsets, None, 1, 1 << 62)
    return found, lengths


def _operation(name: str, implementation: str) -> Callable:
    if implementation == "reference":
        return getattr(reference, name)
    return functools.partial(getattr(ops, name), implementation=implementation)


def _chosen(x: Tensor) -> str:
    """Return the name of the implementation.

    Under Dynamo it is the reference, because Dynamo ignores choices and our `backward` rules.
    """
    return "reference" if torch.compiler.is_dynamo_compiling() else ops.chosen(None, x.device)


def are_equal(sizes: Iterable[Any]) -> bool:
    """Return whether all sizes are equal.

    The function compares sizes, because sizes that an export leaves open have no hash.
    """
    first, *others = [*sizes] or [None]
    return all(x == first for x in others)


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the cumulative sums of lengths, after a first 0, i[B] -> i[B + 1]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])


def _call(spec: _Map, x: Tensor, *ints: Tensor) -> Tensor:
    if spec.implementation == "reference" or not is_transformed(x):
        return spec.run(x, *ints)
    return _Linear.apply(spec, x, *ints)


def is_transformed(x: Tensor) -> bool:
    """Return whether the caller may want a derivative of x, or a vmap may batch x."""
    follows = x.requires_grad and torch.is_grad_enabled()
    return follows or is_transforming()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(spec, x, *ints):
        return spec.run(x, *ints)

    @staticmethod
    def setup_context(ctx, inputs, output):
        spec, x, *ints = inputs
        ctx.spec, ctx.size = spec, x.shape[1] if spec.name == "from_padded" else x.shape[0]
        ctx.save_for_backward(*ints)
        ctx.save_for_forward(*ints)

    @staticmethod
    def backward(ctx, d_out):
        ints = ctx.saved_tensors
        return None, _Linear.apply(ctx.spec.transpose(ctx.size), d_out, *ints), *(None for _ in ints)

    @staticmethod
    def jvp(ctx, _, tangent, *no_tangents):
        linear = ctx.spec._replace(fill=0)
        return one_level_below(lambda ints, t: _Linear.apply(linear, t[0], *ints), ctx.saved_tensors, [tangent])

    @staticmethod
    def vmap(info, in_dims, spec, x, *ints):
        _, dim, *int_dims = in_dims
        if spec.name in ("bag_pick", "bag_put") and int_dims[0] is None:  # the members' places are columns, too
            aside = lambda t, d: _aside(t, d, info.batch_size)
            return _Linear.apply(spec, aside(x, dim), ints[0], aside(ints[1], int_dims[1])), 1
        if all(d is None for d in int_dims):
            column = 2 if spec.name == "from_padded" else 1
            return _Linear.apply(spec, x.movedim(dim, column), *ints), 2 if spec.name == "to_padded" else 1
        member = lambda t, d, i: t if d is None else t.select(d, i)
        outs = [
            _Linear.apply(spec, *(member(t, d, i) for t, d in zip((x, *ints), (dim, *int_dims), strict=True)))
            for i in range(info.batch_size)
        ]
        return torch.stack(outs), 0


class _Places(torch.autograd.Function):
    """The places of the extrema of bags, which have no derivative."""

    @staticmethod
    def forward(implementation, greatest, x, offsets):
        return _operation("bag_extrema", implementation)(x, offsets, greatest, True)[1]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, _):
        return None, None, None, None

    @staticmethod
    def jvp(ctx, *no_tangents):
        return None

    @staticmethod
    def vmap(info, in_dims, implementation, greatest, x, offsets):
        *_, dim, offsets_dim = in_dims
        if offsets_dim is None:
            return _Places.apply(implementation, greatest, x.movedim(dim, 1), offsets), 1
        member = lambda t, d, i: t if d is None else t.select(d, i)
        outs = [
            _Places.apply(implementation, greatest, member(x, dim, i), member(offsets, offsets_dim, i))
            for i in range(info.batch_size)
        ]
        return torch.stack(outs), 0


def _aside(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Return x with the members of a vmap as its dimension 1."""
    return x.unsqueeze(1).expand(-1, size, *x.shape[1:]) if dim is None else x.movedim(dim, 1)
