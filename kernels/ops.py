"""Contracts of the table operations, and the choice of an implementation.

    pooled_lookup            out[b, f] = Σ_{i in bag (f, b)} s_i · table_f[rows_f[i]]
    pooled_lookup_transpose  grads[i] = s_i · d_out[b, f]          one entry per id
    gather_rows              out[i] = table[rows[i]]
    coalesce                 one entry per distinct row, its gradients summed in the order of their positions
    scatter_rows             out[rows[i]] = new[i], elsewhere the table

with s_i the id's weight, or 1, over the bag's length for a mean. Every implementation keeps four rules:
 - a row outside [0, R) is never read or written: it counts as a row of zeros and gets no gradient;
 - positions beyond offsets[-1], and beyond `max_length` in a bag, are never read;
 - sums run in f32 (f64 for f64 tables), each bag's and each row's entries in the order of their positions;
 - shapes depend on shapes only.

`implementation` is a static choice by name; an unknown name raises, and nothing falls back.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from funcrec.kernels import reference
from torch import Tensor

IMPLEMENTATIONS = {"reference": reference}


class Feature(NamedTuple):
    """The static part of one feature of a pooled lookup.

    table: which of the tables. first_bag: its bags are offsets[first_bag : first_bag + B + 1].
    max_length: ids read per bag, 0 for all. mean, weighted: how s_i is made.
    """

    table: int
    first_bag: int
    max_length: int
    mean: bool
    weighted: bool


def pooled_lookup(
    tables: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: Sequence[Feature],
    num_bags: int,
    *,
    implementation: str = "reference",
) -> Tensor:
    """f32|f64[B, ΣD] from tables f[R, D] each, rows i[N] and a flat buffer of bags; rows has one buffer per feature."""
    return _of("pooled_lookup", implementation)(tables, rows, offsets, weights, features, num_bags)


def pooled_lookup_transpose(
    d_out: Tensor,
    shapes: Sequence[tuple[int, int]],
    rows: Sequence[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: Sequence[Feature],
    *,
    implementation: str = "reference",
) -> list[tuple[Tensor, Tensor]]:
    """(rows i[K], grads f[K, D]) per table, features in order; an entry that counts for nothing has row -1."""
    return _of("pooled_lookup_transpose", implementation)(d_out, shapes, rows, offsets, weights, features)


def gather_rows(table: Tensor, rows: Tensor, *, implementation: str = "reference") -> Tensor:
    """f32|f64[K, D]: table[rows], zeros for rows outside the table."""
    return _of("gather_rows", implementation)(table, rows)


def coalesce(
    rows: Tensor, grads: Tensor, num_rows: int, *, implementation: str = "reference"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows i[K] ascending, grads f[K, D], count i64[], repeats i64[K]); behind `count` rows are -1, grads and repeats 0.

    `repeats` is the number of entries that were summed into each row.
    """
    return _of("coalesce", implementation)(rows, grads, num_rows)


def scatter_rows(
    table: Tensor, rows: Tensor, count: Tensor, new: Tensor, *, implementation: str = "reference"
) -> Tensor:
    """The table with row rows[i] replaced by new[i] for i < count; rows[:count] are distinct and inside the table."""
    return _of("scatter_rows", implementation)(table, rows, count, new)


def _of(op: str, implementation: str) -> Callable:
    if implementation not in IMPLEMENTATIONS:
        names = sorted(IMPLEMENTATIONS)
        raise ValueError(f"funcrec.kernels.{op}: implementation {implementation!r} is unknown; there is {names}")
    return getattr(IMPLEMENTATIONS[implementation], op)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """f32 for f32, f16 and bf16 tables, f64 for f64."""
    return reference.accumulation_dtype(dtype)
