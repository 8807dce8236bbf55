"""Attention within bags, and its transpose: one program for each head and tile of queries, or of keys.

A tile of queries reads the keys of its bag tile by tile, with a running maximum. The transpose computes the scores once
more: tiles of queries give d_queries and each tile's own sums for the biases, tiles of keys give d_keys and d_values.
The number of tiles is bounded by shapes: at most ⌈N / TILE⌉ + B. A program finds its bag by a binary search, and the
programs that are left over do nothing. Products are in f32 (f64 for f64), not in the tensor cores' shorter formats.
Shapes: B bags, N queries, M keys, H heads, D dim, V dim of values, P distances, T buckets of time, K tiles.
"""

from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from funcrec.kernels.forms import accumulation_dtype, time_bounds
from funcrec.kernels.reference_jagged import ascending
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.device import constexpr, jit, kernel, larger, plus, rounded, smaller, upper_bound
from torch import Tensor

TILE = 32  # queries and keys of a tile


class Call(NamedTuple):
    """The values that all kernels get. tensors: q, k, v, bounds of queries and keys, biases, times, targets, numbers.

    sizes: H, D, V, P, T, B, steps of the searches for a bag and a bucket. flags: compile-time choices. dtype: of sums.
    """

    tensors: list[Tensor]
    sizes: list[int]
    flags: dict
    dtype: torch.dtype


def jagged_attention(queries: Tensor, keys: Tensor, values: Tensor, *rest) -> tuple[Tensor, Tensor]:
    """Return (out f[N, H, V], logs f[N, H]); without softmax the second is [0, H]."""
    call = _described(queries, keys, values, *rest)
    num_queries, heads = queries.shape[:2]
    out = queries.new_zeros((num_queries, heads, values.shape[2]))
    logs = queries.new_zeros((num_queries if rest[9] else 0, heads), dtype=call.dtype)
    tiles = _tiles(call.tensors[3])
    on.launch(_forward, (_most(queries, call), heads), *call.tensors, tiles, out, logs, *call.sizes, **call.flags)
    return out, logs


def jagged_attention_transpose(
    d_out: Tensor, out: Tensor, logs: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *rest
) -> tuple[Tensor, ...]:
    """Return the cotangents of queries, keys, values, position_bias and time_bias, [0, 0] for a bias that is None.

    Cost: a tile's sums for a bias take a pass over its pairs for each distance, or bucket, that occurs in it.
    """
    call = _described(queries, keys, values, *rest)
    heads, most = queries.shape[1], _most(queries, call)
    d_q, d_k, d_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (queries, keys, values))
    sums = [queries.new_zeros((0 if x is None else most, heads, n), dtype=call.dtype)
            for x, n in zip(rest[2:4], call.sizes[3:5], strict=True)]  # fmt: skip
    given = d_out.contiguous(), out.contiguous(), logs.contiguous()
    bins = {n: triton.next_power_of_2(x) for n, x in zip(("DISTANCES", "BUCKETS"), call.sizes[3:5], strict=True)}
    at = _tiles(call.tensors[3])
    on.launch(_of_queries, (most, heads), *call.tensors, at, *given, d_q, *sums, *call.sizes, **call.flags, **bins)
    at, most = _tiles(call.tensors[4]), _most(keys, call)
    on.launch(_of_keys, (most, heads), *call.tensors, at, *given, d_k, d_v, *call.sizes, **call.flags)
    return d_q, d_k, d_v, *(_bias_of(x, own, queries) for x, own in zip(rest[2:4], sums, strict=True))


def _bias_of(bias: Tensor | None, sums: Tensor, queries: Tensor) -> Tensor:
    """Return the cotangent of a bias f[H or 1, P] from the sums of each tile and head, f[K, H, P]."""
    if bias is None:
        return queries.new_empty((0, 0))
    each = sums.sum(0)
    return (each if bias.shape[0] > 1 else each.sum(0, keepdim=True)).to(bias.dtype)


def _most(x: Tensor, call: Call) -> int:
    """Return the greatest number of tiles of a buffer."""
    return on.cdiv(x.shape[0], TILE) + call.sizes[5]


def _tiles(bounds: Tensor) -> Tensor:
    """Return where the tiles of each bag begin, i64[B + 1]."""
    counts = (bounds.diff() + TILE - 1) // TILE
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _described(
    queries: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, key_offsets: Tensor, position_bias: Tensor | None,
    time_bias: Tensor | None, query_times: Tensor | None, key_times: Tensor | None, num_targets: Tensor | None,
    scale: float, normalizer: float, softmax: bool, causal: bool,
) -> Call:  # fmt: skip
    (num_queries, heads, dim), (num_keys, _, width) = queries.shape, values.shape
    dtype = accumulation_dtype(queries.dtype)
    bounds = [
        ascending(x).clamp(0, n).long().contiguous() for x, n in ((offsets, num_queries), (key_offsets, num_keys))
    ]
    nothing = torch.zeros(1, dtype=dtype, device=queries.device)
    biases = [nothing if x is None else x.to(dtype).contiguous() for x in (position_bias, time_bias)]
    times = [nothing] * 3
    if time_bias is not None:
        times = [time_bounds(time_bias), *(cast(Tensor, x).double().contiguous() for x in (query_times, key_times))]
    targets = bounds[0] if num_targets is None else num_targets.long().contiguous()
    numbers = torch.stack([torch.full((), float(x), dtype=dtype, device=queries.device) for x in (scale, normalizer)])
    of = lambda x: (1, 1) if x is None else tuple(x.shape)
    flags = {
        "HAS_POSITION": position_bias is not None, "POSITION_HEADS": of(position_bias)[0],
        "HAS_TIME": time_bias is not None, "TIME_HEADS": of(time_bias)[0], "HAS_TARGETS": num_targets is not None,
        "SOFTMAX": bool(softmax), "CAUSAL": bool(causal), "SIDE": TILE, "DTYPE": on.DTYPES[queries.dtype],
        "ACC": on.DTYPES[dtype], "D_PAD": max(16, triton.next_power_of_2(dim)),
        "V_PAD": max(16, triton.next_power_of_2(width)),
    }  # fmt: skip
    tensors = [queries.contiguous(), keys.contiguous(), values.contiguous(), *bounds, *biases, *times, targets, numbers]
    distances, buckets, num_bags = of(position_bias)[1], of(time_bias)[1], bounds[0].shape[0] - 1
    sizes = [heads, dim, width, distances, buckets, num_bags, on.steps(num_bags + 1), on.steps(buckets)]
    return Call(tensors, sizes, flags, dtype)


# -- device functions ---------------------------------------------------------------------------------------------


@triton.jit
def _rows(x, place, begin, inside, head, heads, dim, PAD: tl.constexpr, ACC: tl.constexpr):
    """Return rows of x [N, H, dim] of one head, ACC[rows, PAD], with zeros outside."""
    column = tl.arange(0, PAD)
    at = ((begin + place) * heads + head)[:, None] * dim + column[None, :]
    return tl.load(x + at, mask=inside[:, None] & (column < dim)[None, :], other=0).to(ACC)


@triton.jit
def _put(x, rows, place, begin, inside, head, heads, dim, PAD: tl.constexpr, DTYPE: tl.constexpr):
    column = tl.arange(0, PAD)
    at = ((begin + place) * heads + head)[:, None] * dim + column[None, :]
    tl.store(x + at, rounded(rows, DTYPE), mask=inside[:, None] & (column < dim)[None, :])


@triton.jit
def _product(x, y, ACC: constexpr):
    return tl.dot(x, y, input_precision="ieee", out_dtype=ACC)


@triton.jit
def _bucket(bounds, apart, buckets, steps):
    """Return the number of the ascending bounds f32[buckets - 1] that are at most `apart`; all for NaN."""
    low = tl.full(apart.shape, 0, tl.int32)
    high = low + (buckets - 1)
    for _ in range(steps):
        searching = low < high
        middle = (low + high) // 2
        above = tl.load(bounds + middle, mask=searching, other=0) > apart
        high = tl.where(searching & above, middle, high)
        low = tl.where(searching & (above == 0), middle + 1, low)
    return low


@triton.jit
def _pairs(
    i, j, n, m, history, begin, key_begin, by_distance, by_time, edges, query_times, key_times, head, distances,
    buckets, steps, HAS_POSITION: tl.constexpr, POSITION_HEADS: tl.constexpr, HAS_TIME: tl.constexpr,
    TIME_HEADS: tl.constexpr, HAS_TARGETS: tl.constexpr, CAUSAL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return (whether query i sees key j, the biases, and their places), [rows, columns] each."""
    place, column = (i + m - n)[:, None], j[None, :]
    sees = (i < n)[:, None] & (j < m)[None, :]
    if CAUSAL:
        sees = sees & (column <= place)
    if HAS_TARGETS:
        sees = sees & ((column < history) | (column == place))
        place, column = tl.minimum(place, history), tl.minimum(column, history)
    bias = tl.where(sees, 0.0, 0.0).to(ACC)
    distance = tl.minimum(tl.abs(place - column), distances - 1).to(tl.int32)
    bucket = distance
    if HAS_POSITION:
        row = by_distance + (head * distances if POSITION_HEADS > 1 else head * 0)
        bias += tl.load(row + distance, mask=sees, other=0)
    if HAS_TIME:
        now = tl.load(query_times + begin + i, mask=i < n, other=0)
        then = tl.load(key_times + key_begin + j, mask=j < m, other=0)
        bucket = _bucket(edges, tl.abs(now[:, None] - then[None, :]).to(tl.float32), buckets, steps)
        row = by_time + (head * buckets if TIME_HEADS > 1 else head * 0)
        bias += tl.load(row + bucket, mask=sees, other=0)
    return sees, bias, distance, bucket


@jit
def _bag_of(tiles, bounds, key_bounds, targets, num_bags, bag_steps, HAS_TARGETS: tl.constexpr):
    """Return (whether this program has a tile, its number in its bag, begin and length of the bag's queries and keys,
    the number of keys before the targets)."""
    t = tl.program_id(0).to(tl.int64)
    bag = upper_bound(tiles, t * 0, t * 0 + num_bags + 1, t, bag_steps) - 1
    inside = bag < num_bags
    begin, end = tl.load(bounds + bag, mask=inside, other=0), tl.load(bounds + bag + 1, mask=inside, other=0)
    key_begin = tl.load(key_bounds + bag, mask=inside, other=0)
    m = tl.load(key_bounds + bag + 1, mask=inside, other=0) - key_begin
    history = m
    if HAS_TARGETS:
        own = tl.load(targets + bag, mask=inside, other=0)
        history = m - tl.minimum(tl.maximum(own, 0), m)
    return inside, t - tl.load(tiles + bag, mask=inside, other=0), begin, end - begin, key_begin, m, history


@triton.jit
def _slopes(s, g, sees, log, middle, normalizer, SOFTMAX: tl.constexpr):
    """Return the weights p and the slopes of the scores s, for the products g of cotangents and values."""
    if SOFTMAX:
        p = tl.where(sees, tl.exp(s - log[:, None]), 0.0)
        return p, tl.where(sees, p * (g - middle[:, None]), 0.0)
    else:
        z = 1 / (1 + tl.exp(-s))
        slope = g / normalizer * z * (1 + s * (1 - z))
        return tl.where(sees, s * z / normalizer, 0.0), tl.where(sees, slope, 0.0)


@triton.jit
def _sums_at(sums, place, slopes, sees, BINS: tl.constexpr):
    """Return sums f[BINS] with the slopes of each place added, in the order of places."""
    bins = tl.arange(0, BINS)
    first = tl.reduce(tl.reduce(tl.where(sees, place, BINS), 1, smaller), 0, smaller)
    last = tl.reduce(tl.reduce(tl.where(sees, place, -1), 1, larger), 0, larger)
    for b in range(first, last + 1):  # pyright: ignore[reportArgumentType]  # Triton's integers
        own = tl.reduce(tl.reduce(tl.where(sees & (place == b), slopes, 0.0), 1, plus), 0, plus)
        sums = tl.where(bins == b, sums + own, sums)
    return sums


# -- kernels ------------------------------------------------------------------------------------------------------


@kernel()
def _forward(
    q, k, v, bounds, key_bounds, by_distance, by_time, edges, query_times, key_times, targets, numbers, tiles, out,
    logs, heads, dim, width, distances, buckets, num_bags, bag_steps, steps, HAS_POSITION: tl.constexpr,
    POSITION_HEADS: tl.constexpr, HAS_TIME: tl.constexpr, TIME_HEADS: tl.constexpr, HAS_TARGETS: tl.constexpr,
    SOFTMAX: tl.constexpr, CAUSAL: tl.constexpr, SIDE: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr,
    D_PAD: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    inside, tile, begin, n, key_begin, m, history = _bag_of(
        tiles, bounds, key_bounds, targets, num_bags, bag_steps, HAS_TARGETS
    )
    if inside:
        i = tile * SIDE + tl.arange(0, SIDE)
        x = _rows(q, i, begin, i < n, head, heads, dim, D_PAD, ACC) * tl.load(numbers)
        normalizer = tl.load(numbers + 1)
        sums = tl.full((SIDE, V_PAD), 0, ACC)
        top, total = tl.full((SIDE,), float("-inf"), ACC), tl.full((SIDE,), 0, ACC)
        count = tl.full((SIDE,), 0, tl.int32)
        end = tl.minimum(m, tile * SIDE + SIDE + m - n) if CAUSAL else m
        for first in range(0, end, SIDE):
            j = first + tl.arange(0, SIDE)
            y = _rows(k, j, key_begin, j < m, head, heads, dim, D_PAD, ACC)
            values = _rows(v, j, key_begin, j < m, head, heads, width, V_PAD, ACC)
            sees, bias, _place, _other = _pairs(
                i, j, n, m, history, begin, key_begin, by_distance, by_time, edges, query_times, key_times, head,
                distances, buckets, steps, HAS_POSITION, POSITION_HEADS, HAS_TIME, TIME_HEADS, HAS_TARGETS, CAUSAL, ACC,
            )  # fmt: skip
            s = _product(x, tl.trans(y), ACC) + bias
            if SOFTMAX:
                s = tl.where(sees, s, float("-inf"))
                best = tl.maximum(top, tl.reduce(s, 1, larger))
                shift = tl.where(best == float("-inf"), 0.0, best)
                p, shrink = tl.where(sees, tl.exp(s - shift[:, None]), 0.0), tl.exp(top - shift)
                total, sums, top = total * shrink + tl.reduce(p, 1, plus), sums * shrink[:, None], best
                count += tl.reduce(sees.to(tl.int32), 1, plus)
            else:
                p = tl.where(sees, s / (1 + tl.exp(-s)) / normalizer, 0.0)
            sums += _product(p, values, ACC)
        if SOFTMAX:
            total = tl.where(count == 0, 1.0, total)
            sums = sums / total[:, None]
            log = tl.where(count == 0, float("-inf"), top + tl.log(total))
            tl.store(logs + (begin + i) * heads + head, log, mask=i < n)
        _put(out, sums, i, begin, i < n, head, heads, width, V_PAD, DTYPE)


@kernel()
def _of_queries(
    q, k, v, bounds, key_bounds, by_distance, by_time, edges, query_times, key_times, targets, numbers, tiles, d_out,
    out, logs, d_q, d_distance, d_time, heads, dim, width, distances, buckets, num_bags, bag_steps, steps,
    HAS_POSITION: tl.constexpr, POSITION_HEADS: tl.constexpr, HAS_TIME: tl.constexpr, TIME_HEADS: tl.constexpr,
    HAS_TARGETS: tl.constexpr, SOFTMAX: tl.constexpr, CAUSAL: tl.constexpr, SIDE: tl.constexpr, DTYPE: tl.constexpr,
    ACC: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, DISTANCES: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    inside, tile, begin, n, key_begin, m, history = _bag_of(
        tiles, bounds, key_bounds, targets, num_bags, bag_steps, HAS_TARGETS
    )
    if inside:
        i = tile * SIDE + tl.arange(0, SIDE)
        scale, normalizer = tl.load(numbers), tl.load(numbers + 1)
        x = _rows(q, i, begin, i < n, head, heads, dim, D_PAD, ACC) * scale
        d = _rows(d_out, i, begin, i < n, head, heads, width, V_PAD, ACC)
        log, middle = _kept(logs, out, d, i, begin, n, head, heads, width, V_PAD, ACC, SOFTMAX)
        sums, of_distance, of_time = (
            tl.full((SIDE, D_PAD), 0, ACC),
            tl.full((DISTANCES,), 0, ACC),
            tl.full((BUCKETS,), 0, ACC),
        )
        end = tl.minimum(m, tile * SIDE + SIDE + m - n) if CAUSAL else m
        for first in range(0, end, SIDE):
            j = first + tl.arange(0, SIDE)
            y = _rows(k, j, key_begin, j < m, head, heads, dim, D_PAD, ACC)
            values = _rows(v, j, key_begin, j < m, head, heads, width, V_PAD, ACC)
            sees, bias, distance, bucket = _pairs(
                i, j, n, m, history, begin, key_begin, by_distance, by_time, edges, query_times, key_times, head,
                distances, buckets, steps, HAS_POSITION, POSITION_HEADS, HAS_TIME, TIME_HEADS, HAS_TARGETS, CAUSAL, ACC,
            )  # fmt: skip
            s, g = _product(x, tl.trans(y), ACC) + bias, _product(d, tl.trans(values), ACC)
            _p, slopes = _slopes(s, g, sees, log, middle, normalizer, SOFTMAX)
            sums += _product(slopes, y, ACC)
            if HAS_POSITION:
                of_distance = _sums_at(of_distance, distance, slopes, sees, DISTANCES)
            if HAS_TIME:
                of_time = _sums_at(of_time, bucket, slopes, sees, BUCKETS)
        _put(d_q, sums * scale, i, begin, i < n, head, heads, dim, D_PAD, DTYPE)
        own = tl.program_id(0).to(tl.int64) * heads + head
        if HAS_POSITION:
            at = tl.arange(0, DISTANCES)
            tl.store(d_distance + own * distances + at, of_distance, mask=at < distances)
        if HAS_TIME:
            at = tl.arange(0, BUCKETS)
            tl.store(d_time + own * buckets + at, of_time, mask=at < buckets)


@triton.jit
def _kept(logs, out, d, i, begin, n, head, heads, width, V_PAD: tl.constexpr, ACC: tl.constexpr, SOFTMAX: tl.constexpr):
    """Return the logarithm of each query's denominator, and the product of its result and cotangent."""
    log, middle = tl.full(i.shape, 0, ACC), tl.full(i.shape, 0, ACC)
    if SOFTMAX:
        log = tl.load(logs + (begin + i) * heads + head, mask=i < n, other=0)
        middle = tl.reduce(d * _rows(out, i, begin, i < n, head, heads, width, V_PAD, ACC), 1, plus)
    return log, middle


@kernel()
def _of_keys(
    q, k, v, bounds, key_bounds, by_distance, by_time, edges, query_times, key_times, targets, numbers, tiles, d_out,
    out, logs, d_k, d_v, heads, dim, width, distances, buckets, num_bags, bag_steps, steps, HAS_POSITION: tl.constexpr,
    POSITION_HEADS: tl.constexpr, HAS_TIME: tl.constexpr, TIME_HEADS: tl.constexpr, HAS_TARGETS: tl.constexpr,
    SOFTMAX: tl.constexpr, CAUSAL: tl.constexpr, SIDE: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr,
    D_PAD: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    inside, tile, begin, n, key_begin, m, history = _bag_of(
        tiles, bounds, key_bounds, targets, num_bags, bag_steps, HAS_TARGETS
    )
    if inside:
        j = tile * SIDE + tl.arange(0, SIDE)
        scale, normalizer = tl.load(numbers), tl.load(numbers + 1)
        y = _rows(k, j, key_begin, j < m, head, heads, dim, D_PAD, ACC)
        values = _rows(v, j, key_begin, j < m, head, heads, width, V_PAD, ACC)
        of_key, of_value = tl.full((SIDE, D_PAD), 0, ACC), tl.full((SIDE, V_PAD), 0, ACC)
        start = tl.maximum(tile * SIDE + n - m, 0) // SIDE * SIDE if CAUSAL else tile * 0
        for first in range(start, n, SIDE):
            i = first + tl.arange(0, SIDE)
            x = _rows(q, i, begin, i < n, head, heads, dim, D_PAD, ACC) * scale
            d = _rows(d_out, i, begin, i < n, head, heads, width, V_PAD, ACC)
            log, middle = _kept(logs, out, d, i, begin, n, head, heads, width, V_PAD, ACC, SOFTMAX)
            sees, bias, _place, _other = _pairs(
                i, j, n, m, history, begin, key_begin, by_distance, by_time, edges, query_times, key_times, head,
                distances, buckets, steps, HAS_POSITION, POSITION_HEADS, HAS_TIME, TIME_HEADS, HAS_TARGETS, CAUSAL, ACC,
            )  # fmt: skip
            s, g = _product(x, tl.trans(y), ACC) + bias, _product(d, tl.trans(values), ACC)
            p, slopes = _slopes(s, g, sees, log, middle, normalizer, SOFTMAX)
            of_value += _product(tl.trans(p), d, ACC)
            of_key += _product(tl.trans(slopes), x, ACC)
        _put(d_k, of_key, j, key_begin, j < m, head, heads, dim, D_PAD, DTYPE)
        _put(d_v, of_value, j, key_begin, j < m, head, heads, width, V_PAD, DTYPE)
