"""Columns of distinct bags, expanded to examples by inverse indices, and the transpose.

    out[e, f] = group_f[inverse[f, e], columns of f]          d_group_f[u] = Σ_{e: inverse[f, e] = u} d_out[e, f]

One copy of ranges computes all columns. The transpose adds in the order of the examples.
Shapes: E examples, F features, B_g bags and W_g columns of group g.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcrec.jagged import _primitives as primitives


class Columns(NamedTuple):
    """Where the columns of a feature lie: [first, first + dim) of a group."""

    group: int
    first: int
    dim: int


class Ranges(NamedTuple):
    """The ranges of one buffer that form the rows of the output, in units of `unit` numbers.

    starts, lengths: i64[E · F]. total: the length of the buffer in units.
    """

    starts: Tensor
    lengths: Tensor
    unit: int
    total: int


def expand_columns(groups: Sequence[Tensor], columns: Sequence[Columns], inverse: Tensor) -> Tensor:
    """Return the columns of the features for each example, f[E, ΣD].

    An inverse index of no bag gives zeros. Where the indices cannot be read (under `jit` or `vmap`), it gives NaN: a
    part of examples may name bags of other parts, which is an error where they can be read.

    groups: f[B_g, W_g], whose columns are those of the features. inverse: i[F, E], one row for each of `columns`.
    """
    if not columns:
        return torch.zeros(inverse.shape[1], 0, device=inverse.device)
    r = _ranges([(x.shape[0], x.shape[1]) for x in groups], columns, inverse)
    flat = [x.reshape(-1, r.unit) for x in groups]
    buffer, width = torch.cat(flat) if len(flat) > 1 else flat[0], sum(c.dim for c in columns)
    out, _ = primitives.take_ranges(buffer, r.starts, r.lengths, inverse.shape[1] * width // r.unit)
    out = out.reshape(inverse.shape[1], width)
    if primitives.is_concrete(inverse):
        return out
    of_column = torch.tensor([f for f, c in enumerate(columns) for _ in range(c.dim)], device=inverse.device)
    is_bag = (r.starts < r.total).view(inverse.shape[1], len(columns)).index_select(1, of_column)
    return torch.where(is_bag, out, torch.nan)


def expand_columns_transpose(
    d: Tensor, shapes: Sequence[tuple[int, int]], columns: Sequence[Columns], inverse: Tensor
) -> list[Tensor]:
    """Return the cotangents f[B_g, W_g] of the groups, whose shapes are `shapes`, from d f[E, ΣD]."""
    if not columns:
        return [d.new_zeros(shape) for shape in shapes]
    r = _ranges(shapes, columns, inverse)
    flat = primitives.take_ranges_transpose(d.reshape(-1, r.unit), r.starts, r.lengths, r.total)
    parts = flat.split([bags * width // r.unit for bags, width in shapes])
    return [x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)]


def _ranges(shapes: Sequence[tuple[int, int]], columns: Sequence[Columns], inverse: Tensor) -> Ranges:
    unit = math.gcd(*(n for c in columns for n in (c.first, c.dim)), *(width for _, width in shapes))
    bases = [0]
    for bags, width in shapes:
        bases.append(bases[-1] + bags * width // unit)
    numbers = [(shapes[c.group][0], shapes[c.group][1] // unit, bases[c.group] + c.first // unit) for c in columns]
    bags, width, first = torch.tensor(numbers, device=inverse.device).unsqueeze(2).unbind(1)  # i64[F, 1] each
    inverse = inverse.long()
    starts = torch.where((inverse >= 0) & (inverse < bags), first + inverse * width, bases[-1])
    lengths = torch.tensor([c.dim // unit for c in columns], device=inverse.device).repeat(inverse.shape[1])
    return Ranges(starts.t().reshape(-1), lengths, unit, bases[-1])
