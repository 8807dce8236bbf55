"""Encoders of numbers: into buckets, to mean 0 and variance 1, into logarithms.

    bucketize:  id = 1 + number of edges <= x;  0 where x is missing       normalize:  (x - mean) / deviation
    log1p:      log(1 + x)

NaN counts as missing, as a null does. The learned state is the same for all ways of cutting rows into chunks: it uses
moments of blocks of a fixed number of rows, and quantiles of counted values. Shapes: N values, K edges.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcrec.core import Problem, Within, check, describe, fail, pytree, sure, typed
from funcrec.data.encoders._encoders import Encoder, Place, by_elements, fixed, floats_of

BLOCK = 1 << 16  # values in one block of moments
# The most distinct values that are counted. If there are more, values with the same leading digits count as one value.
MOST_COUNTED = 1 << 20
DIGITS = 4  # the number of binary digits that are dropped at once


@pytree
class Buckets:
    """The state of `bucketize`: edges f64[K], ascending."""

    edges: Tensor

    @property
    def num_ids(self) -> int:
        return self.edges.shape[0] + 2

    @by_elements
    def apply(self, values: Any, place: Place) -> np.ndarray:
        """Return ids i64 of a column of numbers: 1 below the first edge, k + 1 from the k-th edge, 0 if missing."""
        x, edges = floats_of(values, place), _learned(self.edges, place)
        found = np.where(np.isnan(x), 0, 1 + np.searchsorted(edges, x, side="right"))
        edges = edges.tolist()
        for at, integer in _large_integers(values, x):
            found[at] = 1 + bisect.bisect_right(edges, integer)  # Python compares integers with floats exactly
        return found


def _large_integers(values: Any, x: np.ndarray) -> list[tuple[int, int]]:
    """Return (place, value) of each integer that f64 may not hold."""
    import pyarrow.types as kinds

    if kinds.is_floating(values.type) or not (places := np.flatnonzero(np.abs(x) >= 2.0**53)).size:
        return []
    return list(zip(places.tolist(), values.take(places).to_pylist(), strict=True))


class Counted(NamedTuple):
    """Counted values: the values, ascending; their counts; parts not added yet; the number of dropped binary digits."""

    values: np.ndarray
    counts: np.ndarray
    waiting: tuple = ()
    digits: int = 0


ascend = lambda edges: all(a < b for a, b in itertools.pairwise((-math.inf, *edges, math.inf)))
SomeEdges = Annotated[Sequence[float], Within("one edge or more", len, "are none")]
Edges = Annotated[SomeEdges, Within("finite numbers, each above the last", ascend, "do not ascend")]
NumQuantiles = Annotated[int, Within("an int >= 2", lambda n: n >= 2, "is too small")]


@typed
def bucketize(edges: Edges | None = None, *, num_quantiles: NumQuantiles | None = None) -> Encoder:
    """Return an encoder of numbers into ids of buckets: 1 below the first edge, k + 1 from the k-th edge.

    A missing number gets id 0.

    Args:
      edges: the edges, ascending. Give either `edges` or `num_quantiles`.
      num_quantiles: 2 or more, the number of buckets. The buckets have equal numbers of rows, as far as the values
        allow: the edges are the quantiles k / num_quantiles, interpolated as numpy does. If values repeat, there may be
        fewer buckets.

    Law: the state depends neither on the order of the rows nor on their chunks.

    Cost: memory for up to 2²⁰ distinct values. If there are more, values with the same leading binary digits count as
    one value. Then the edges of 5 million normal numbers have errors up to 3e-5.

    Example:
      >>> from funcrec.data import bucketize
      >>> bucketize(num_quantiles=2).fit([1.0, 2.0, 3.0, 4.0]).apply([0.0, 2.4, 2.5, 9.0, None]).to_pylist()
      [1, 1, 2, 2, 0]
    """
    call = "funcrec.data.bucketize"
    check(call, _bucket_problems(edges, num_quantiles))
    if edges is not None:
        return fixed(Buckets(torch.tensor([float(x) for x in edges], dtype=torch.float64)), "ids")
    nothing, number = Counted(np.zeros(0), np.zeros(0, np.int64)), sure(num_quantiles)
    return Encoder(lambda: nothing, _count, lambda known: Buckets(torch.from_numpy(_edges(call, known, number))))


def _count(known: Counted, values: Any, place: Place) -> Counted:
    x = _finite(values, place)
    for at, integer in _large_integers(values, x):
        if integer != float(x[at]):
            hint = "a column less its least value, or divided (nanoseconds as seconds); or bucketize(edges=...)"
            place.refuse(at, f"{integer}", "integers that f64 holds, as all within 2⁵³ are, to learn from", hint)
    x = x[~np.isnan(x)]
    known = known._replace(waiting=(*known.waiting, np.unique(x, return_counts=True)))
    waits = sum(len(v) for v, _ in known.waiting)
    return _add_up(known) if waits > max(BLOCK, len(known.values)) else known


def _add_up(known: Counted) -> Counted:
    """Return the counts with the waiting parts added, for at most MOST_COUNTED distinct values.

    The values alone decide how many digits stay."""
    parts = [known[:2], *known.waiting]
    values, counts, digits = np.concatenate([v for v, _ in parts]), np.concatenate([c for _, c in parts]), known.digits
    while True:
        # The mask rounds towards zero. The sum with 0.0 turns -0.0 into 0.0.
        bits = (values + 0.0).view(np.int64) & (np.int64(-1) << min(digits, 63))
        distinct, at = np.unique(bits.view(np.float64), return_inverse=True)
        sums = np.zeros(len(distinct), np.int64)
        np.add.at(sums, at, counts)
        values, counts = distinct, sums
        if len(values) <= MOST_COUNTED:
            return Counted(values, counts, (), digits)
        digits += DIGITS


def _edges(call: str, known: Counted, num_quantiles: int) -> np.ndarray:
    values, counts, *_ = _add_up(known)
    if not len(values):
        need, hint = "a number or more", "bucketize(edges=...), or a column that has values"
        fail(call, "there are no numbers to learn from.", got="none, or all missing", need=need, hint=hint)
    ends = counts.cumsum()
    at = np.arange(1, num_quantiles) / num_quantiles * (ends[-1] - 1)
    low, high = (values[np.searchsorted(ends, f(at), side="right")] for f in (np.floor, np.ceil))
    part = at - np.floor(at)
    # This order of operations rounds as numpy.quantile does.
    edges = np.where(part < 0.5, low + (high - low) * part, high - (high - low) * (1 - part))
    return np.unique(edges[edges > values[0]])


# -- moments ---------------------------------------------------------------------------------------------------------


class Moments(NamedTuple):
    """The count, mean and Σ (x - mean)² of whole blocks of values. rest: later values, fewer than BLOCK."""

    count: int = 0
    mean: float = 0.0
    square: float = 0.0
    rest: tuple[np.ndarray, ...] = ()


@pytree
class Normal:
    """The state of `normalize`: mean and deviation, f64[], or f64[k] for lists of k. Equal values have deviation 1."""

    mean: Tensor
    deviation: Tensor

    @property
    def num_ids(self) -> None:
        return None

    @by_elements
    def apply(self, values: Any, place: Place) -> np.ndarray:
        """Return numbers f64 of a column of numbers. A missing number becomes 0, which stands for the mean."""
        _check_size(place, values, self.mean.numel())
        mean, deviation = (_learned(x, place) for x in (self.mean, self.deviation))
        x = ((floats_of(values, place).reshape(-1, self.mean.numel()) - mean) / deviation).ravel()
        return np.where(np.isnan(x), 0.0, x)


def normalize() -> Encoder:
    """Return an encoder of numbers into (x - mean) / deviation of the learned rows.

    A missing number becomes 0, which stands for the mean. A list of a fixed size k counts as k columns: each position
    has a mean and a deviation.

    Law: the state does not depend on how the rows are cut into chunks. A column of equal values has deviation 1.

    Example:
      >>> from funcrec.data import normalize
      >>> normalize().fit([1.0, 3.0]).apply([1, 2, 5, None]).to_pylist()
      [-1.0, 0.0, 3.0, 0.0]

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    """
    return Encoder(tuple, _measure, _normal_of, "numbers")


def _measure(known: tuple[Moments, ...], values: Any, place: Place) -> tuple[Moments, ...]:
    """Return the moments of each position of a row after these values."""
    if values.null_count == len(values):  # a column without values may have any type
        return known
    known = known or (Moments(),) * place.size
    _check_size(place, values, len(known))
    x = _finite(values, place).reshape(-1, len(known))
    return tuple(_with(m, column[~np.isnan(column)]) for m, column in zip(known, x.T, strict=True))


def _check_size(place: Place, values: Any, size: int) -> None:
    if place.size != size and len(values):
        of = lambda k: "one number of each row" if k == 1 else f"lists of {k} numbers"
        place.refuse_type(
            f"{of(place.size)}, of {values.type}", f"{of(size)}, as was learned", "a column for each size"
        )


def _with(known: Moments, values: np.ndarray) -> Moments:
    known = known._replace(rest=(*known.rest, values))
    if sum(map(len, known.rest)) < BLOCK:
        return known
    x = np.concatenate(known.rest)
    whole = len(x) // BLOCK * BLOCK
    for block in x[:whole].reshape(-1, BLOCK):
        known = _joined(known, block)
    return known._replace(rest=(x[whole:],))


def _joined(known: Moments, block: np.ndarray) -> Moments:
    with np.errstate(over="ignore", invalid="ignore"):  # `_normal_of` reports infinite squares
        mean = float(block.mean())
        count, step = known.count + len(block), mean - known.mean
        square = float(np.square(block - mean).sum()) + step * step * (known.count / count) * len(block)
    return known._replace(count=count, mean=known.mean + step * (len(block) / count), square=known.square + square)


def _normal_of(known: tuple[Moments, ...]) -> Normal:
    rests = [np.concatenate([np.zeros(0), *m.rest]) for m in known]
    known = tuple(_joined(m, rest) if len(rest) else m for m, rest in zip(known, rests, strict=True))
    if not known or not all(m.count for m in known):
        need, hint = "a number or more", "a column that has values, or one less in the schema"
        got = "none, or all missing"
        fail("funcrec.data.normalize", "there are no numbers to learn from.", got=got, need=need, hint=hint)
    if not all(math.isfinite(m.square) for m in known):
        what, got = "the squares of the numbers are infinite.", f"numbers around {known[0].mean:.3g}"
        need, hint = "numbers below 1e150", "fr.data.chain(fr.data.log1p(), fr.data.normalize())"
        fail("funcrec.data.normalize", what, got=got, need=need, hint=hint)
    of = lambda x: torch.tensor(x if len(x) > 1 else x[0], dtype=torch.float64)
    return Normal(of([m.mean for m in known]), of([math.sqrt(m.square / m.count) or 1.0 for m in known]))


def _learned(x: Tensor, place: Place) -> np.ndarray:
    """Return the learned numbers. Raise if they are not f64: with fewer digits, different values may become equal."""
    if x.dtype != torch.float64:
        what = f"what was learned of column `{place.name}` was cast."
        hint = "fr.tree.to(params, dtype), not the encoding"
        fail(place.call, what, got=describe(x), need="f64, as it was learned", hint=hint, kind=TypeError)
    return x.cpu().numpy()


def _finite(values: Any, place: Place) -> np.ndarray:
    """Return numbers f64, all finite or missing. A missing number is NaN."""
    x = floats_of(values, place)
    if np.isinf(x).any():
        at = int(np.isinf(x).argmax())
        place.refuse(at, f"{x[at]}", "a finite number, to learn from", "leave such rows out, or bucketize(edges=...)")
    return x


# -- logarithms ------------------------------------------------------------------------------------------------------


@pytree
class Log1p:
    """The state of `log1p`. It holds nothing."""

    @property
    def num_ids(self) -> None:
        return None

    @by_elements
    def apply(self, values: Any, place: Place) -> np.ndarray:
        """Return log(1 + x), f64, of numbers x > -1. Missing numbers stay missing. Other numbers raise ValueError."""
        x = floats_of(values, place)
        if (x <= -1).any():
            at = int((x <= -1).argmax())
            place.refuse(at, f"{x[at]}", "a number above -1", "normalize() alone, or other numbers for such rows")
        return np.log1p(x)


def log1p() -> Encoder:
    """Return an encoder of numbers x above -1 into log(1 + x). Missing numbers stay missing.

    Other numbers raise an error that names the column and the row.

    Example:
      >>> from funcrec.data import chain, log1p, normalize
      >>> chain(log1p(), normalize()).fit([0, 1, 3]).apply([1]).to_pylist()
      [0.0]
    """
    return fixed(Log1p())


def _bucket_problems(edges: Any, num_quantiles: object) -> Iterator[Problem]:
    if (edges is None) == (num_quantiles is None):
        got, need = "neither" if edges is None else "both", "one of them"
        yield Problem("one of `edges` and `num_quantiles` is needed.", got, need, "bucketize(num_quantiles=10)")
    elif edges is not None and not all(float(x) == x for x in edges):
        wrong = next(x for x in edges if float(x) != x)
        need = f"one that it holds: {int(float(wrong))}"
        yield Problem("`edges` has an integer that f64 does not hold.", f"{wrong}", need)
