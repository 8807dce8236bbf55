"""The operations on jagged buffers, in every implementation, equal loops over Python's lists.

Outputs start as NaN (tests/conftest.py). An unwritten element is therefore visible. Shapes: B bags, N ids, S shards.
"""

import itertools

import pytest
import torch
from programs.surroundings import on_threads
from torch import Tensor

from funcrec.testing import assert_trees_close

F32, F64, F16, BF16, I32, I64 = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64,
)  # fmt: skip
SIZES = [0, 1, 63, 65]
INTS = [I64, I32]


def integers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return random integers in [low, high)."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def numbers_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 3) -> Tensor:
    return integers(-9, 10, shape, dtype, seed)


def bounds_of(size: int, num_bags: int, dtype: torch.dtype) -> Tensor:
    """Return random offsets of ragged bags, some of them empty, with padding before and after the bags."""
    used = max(size - 3, 0)
    return integers(min(1, used), used + 1, (num_bags + 1,), dtype, 2).sort().values


def garbage(x: Tensor, offsets: Tensor) -> Tensor:
    """Return x with padding of NaN, or of the least integer."""
    if x.dtype == torch.bool:
        return x
    place = torch.arange(x.shape[0]).reshape(-1, *(1,) * (x.dim() - 1))
    padding = (place < offsets[0]) | (place >= offsets[-1])
    return torch.where(padding, torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).min, x)


def rows_for(size: int, most: int, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return random rows from -2 to most + 1, and some rows at the ends of the dtype."""
    rows = integers(-2, min(most + 2, 2**31), (size,), dtype, 1)
    rows[3::7], rows[4::7] = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    return garbage(rows, offsets)


@pytest.mark.needs("take_ranges")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_bags", [0, 1, 9])
def test_take_ranges(ask, size, num_bags):
    """The ranges follow one another, cut at the capacity. The rest are zeros, and so are positions outside the
    buffer."""
    shapes = itertools.cycle([(), (3,), (2, 2)])
    for dtype, shape, ints, capacity in zip([F32, I64, BF16, torch.bool, F64, I32], shapes, INTS * 3, [0, 40, 70] * 2):
        values = numbers_of((size, *shape), dtype)
        starts = integers(-3, size + 3, (num_bags,), ints, 5)
        lengths = integers(0, 8, (num_bags,), INTS[ints == I64], 6)
        if num_bags > 1:
            starts[1] = torch.iinfo(ints).min
        taken = [i for a, n in zip(starts.tolist(), lengths.tolist()) for i in range(a, a + n)][:capacity]
        want = torch.zeros((capacity, *shape), dtype=dtype)
        for place, i in enumerate(taken):
            want[place] = values[i] if 0 <= i < size else 0
        offsets = torch.cat([torch.zeros(1, dtype=I64), lengths.cumsum(0)])
        assert_trees_close(ask("take_ranges", values, starts, lengths, capacity), (want, offsets))


@pytest.mark.needs("take_ranges_transpose")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_bags", [0, 1, 9])
def test_take_ranges_transpose(ask, size, num_bags):
    """Each position gets the sum of the cotangents of the position's copies. Cotangents of positions outside the buffer
    are not read. Cotangents after the last range are not read either."""
    shapes = itertools.cycle([(), (3,), (2, 2), (0,)])
    for dtype, shape, ints, capacity in zip([F32, F64, BF16, F16, F32, F64], shapes, INTS * 3, [0, 40, 70] * 2):
        starts = integers(-3, size + 3, (num_bags,), ints, 5)
        lengths = integers(0, 8, (num_bags,), INTS[ints == I64], 6)
        if num_bags > 1:
            starts[1] = torch.iinfo(ints).min
        taken = [i for a, n in zip(starts.tolist(), lengths.tolist()) for i in range(a, a + n)][:capacity]
        d = numbers_of((capacity, *shape), dtype)
        d[len(taken) :] = torch.nan
        want = torch.zeros((size, *shape), dtype=dtype)
        for place, i in enumerate(taken):
            if 0 <= i < size:
                want[i] += d[place]
            else:
                d[place] = torch.nan
        assert_trees_close(ask("take_ranges_transpose", d, starts, lengths, size), want)


@pytest.mark.needs("take_ranges_transpose")
def test_take_ranges_transpose_adds_in_order(ask, known):
    """Overlapping ranges are summed in f32 in their order. 16-bit cotangents are rounded once. Any number of
    threads gives the same bits."""
    count, last = (6, 80) if known.slow else (60, 1000)
    lengths, starts = torch.full((count,), 50), integers(0, last, (count,), I64, 4)
    for dtype in (F32, BF16):
        d = torch.randn((50 * count, 33), generator=torch.Generator().manual_seed(1)).to(dtype)
        want = torch.zeros(last + 50, 33)
        for b, start in enumerate(starts.tolist()):
            want[start : start + 50] += d[50 * b : 50 * b + 50].float()
        for threads in (1,) if known.slow else (1, 2, 3):
            with on_threads(threads):
                assert_trees_close(ask("take_ranges_transpose", d, starts, lengths, last + 50), want.to(dtype))


@pytest.mark.needs("bucketize")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_bags", [0, 1, 9])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_bucketize(ask, size, num_bags, num_shards):
    """Rows go to shard row // block, as local rows of the shard, in order within a (shard, bag). Rows without a shard
    are left out."""
    for ints, bounds, weighted, block in zip(INTS * 2, [I32, I64, I64, I32], [None, F32, F64, F16], [1, 4, 4, 2**30]):
        offsets = bounds_of(size, num_bags, bounds)
        rows = rows_for(size, num_shards * block, offsets, ints)
        weights = None if weighted is None else garbage(numbers_of((size,), weighted), offsets)
        want, numbers, cuts = [], rows.tolist(), offsets.tolist()
        for shard, (a, b) in itertools.product(range(num_shards), itertools.pairwise(cuts)):
            want.append([i for i in range(a, b) if numbers[i] // block == shard])
        order = [i for part in want for i in part]
        local, positions = torch.zeros_like(rows), torch.full((size,), -1)
        moved = torch.zeros(0) if weights is None else torch.zeros_like(weights)
        for place, i in enumerate(order):
            local[place], positions[i] = numbers[i] % block, place
            if weights is not None:
                moved[place] = weights[i]
        lengths = torch.tensor([len(part) for part in want], dtype=I64)
        got = ask("bucketize", rows, offsets, weights, num_shards, block)
        assert_trees_close(got, (local, lengths, moved, positions))


@pytest.mark.needs("to_padded", "from_padded")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_bags", [0, 1, 9])
def test_to_padded_and_back(known, ask, size, num_bags):
    """to_padded cuts and fills each bag. from_padded writes the elements of a bag back, with zeros elsewhere."""
    for dtype, width, length, bounds in zip(known.padded, [1, 5, 2, 0, 3, 1, 4], [0, 1, 4, 30, 4, 2, 7], INTS * 4):
        offsets = bounds_of(size, num_bags, bounds)
        values = garbage(numbers_of((size, width), dtype), offsets)
        want, back = torch.full((num_bags, length, width), 2).to(dtype), torch.zeros((size + 3, width), dtype=dtype)
        padded = numbers_of((num_bags, length, width), dtype, seed=8)
        for b, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
            for place in range(min(end - start, length)):
                want[b, place], back[start + place] = values[start + place], padded[b, place]
        assert_trees_close(ask("to_padded", values, offsets, length, 2.0), want)
        assert_trees_close(ask("from_padded", padded, offsets, size + 3), back)
        assert_trees_close(ask("from_padded", padded, offsets, size // 2), back[: size // 2])
