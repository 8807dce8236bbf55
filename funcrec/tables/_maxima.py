"""Lookups of features whose pooling is "max": the greatest value of each column among the rows of a bag.

    acts[b, j] = max_{i in bag b} s_i · table[row_i, j],   0 for an empty bag

A maximum is not linear in the tables, and partial maxima cannot be added. So it is a sequence lookup and a reduction
here, and ranks exchange rows. It works for every kind of tables and every placement that has sequences. The first of
equal values gets the derivative.
Shapes: B bags, N ids, D dim.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.core import describe, fail, replace
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor, bag_reduce, placed_extrema, put_extrema
from funcrec.tables._configs import FeatureConfig
from funcrec.tables._kinds import LookupResult, is_plain
from funcrec.tables._plain import read_plain
from funcrec.tables._rowgrads import RowGrads


def is_max(feature: FeatureConfig) -> bool:
    return feature.pooling == "max"


def as_sequences(features: Sequence[FeatureConfig]) -> tuple[FeatureConfig, ...]:
    """Return the features with the pooling of a sequence."""
    return tuple(replace(f, pooling="none") for f in features)


def greatest(rows: JaggedTensor) -> Tensor:
    """Return the greatest values of each bag of rows f[N, D] -> f[B, D], 0 for an empty bag."""
    found = bag_reduce(rows, "max")
    return torch.where((rows.lengths > 0)[:, None], found, torch.zeros((), dtype=found.dtype, device=found.device))


def weigh(rows: Tensor, bags: JaggedTensor) -> Tensor:
    """Return each row times its id's weight, f[N, D], or the rows themselves if there are no weights."""
    return times(rows, bags.weights)


def times(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows if weights is None else rows * weights[:, None].to(rows.dtype)


def in_order(features: Sequence[FeatureConfig], sums: KeyedTensor | None, maxima: Mapping[str, Tensor]) -> KeyedTensor:
    """Return the columns of all features in their order, in the widest of their dtypes."""
    found = {**({} if sums is None else sums.to_dict()), **maxima}
    wide = torch.float64 if any(x.dtype == torch.float64 for x in found.values()) else torch.float32
    return KeyedTensor.from_dict({f.name: found[f.name].to(wide) for f in features})


def maxima_read(read: LookupResult) -> LookupResult:
    """Return the lookup of maxima {feature: f[B, D]} that reads the rows of `read`, a lookup of sequences."""
    sizes, offsets, places, out = {}, {}, {}, {}
    weights = {k: x.weights for k, x in read.out.items() if x.weights is not None}
    for k, x in read.out.items():
        best, places[k] = placed_extrema(weigh(x.values, x), x.offsets, True)
        sizes[k], offsets[k] = x.values.shape[0], x.offsets
        out[k] = torch.where((x.lengths > 0)[:, None], best, torch.zeros((), dtype=best.dtype, device=best.device))
    dtypes = {k: x.dtype for k, x in out.items()}

    def transpose(d_acts: Mapping[str, Tensor] | KeyedTensor, saved: Any) -> dict[str, RowGrads]:
        of_rows, weights, offsets, places = saved
        put = lambda k: put_extrema(d_acts[k].to(dtypes[k]), offsets[k], places[k], sizes[k])
        return read.transpose({k: times(put(k), weights.get(k)) for k in sizes}, of_rows)

    return LookupResult(out, lambda: (read.saved(), weights, offsets, places), transpose, read.overflows)


def maxima_transpose(
    call: str, d_acts: KeyedTensor, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], tables: Any
) -> dict[str, RowGrads]:
    """Return the cotangents of the tables of maxima: an entry per id, whose columns are 0 where another id won."""
    if not isinstance(tables, Mapping) or not is_plain(tables):
        need, hint = "{name: f[R, D]}, whose rows say which id won", "the tables; or value_and_grad of a loss"
        fail(call, "a maximum has no transpose without its tables.", got=describe(tables), need=need, hint=hint)
    read = maxima_read(read_plain(tables, ids, as_sequences(features)))
    return read.transpose(d_acts, read.saved())
