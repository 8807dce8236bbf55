"""Generated calls of attention within bags and of its transpose. See hostile.py.

Offsets of queries and of keys are drawn together (keys kept before the queries) or apart. Rows outside of all bags are
NaN, and so are their times. Shapes: B bags, N queries, M keys, H heads, D dim, V dim of values.
"""

from typing import NamedTuple

import torch
from funcrec.kernels import reference
from funcrec.kernels.forms import accumulation_dtype
from torch import Tensor

from programs.hostile_draw import BF16, EXTREMES, F16, F32, F64, FLOATS, I32, I64, Draw, Result, bounds_of, wide

HEADS, WIDTHS = (0, 1, 1, 2, 3), (0, 1, 2, 3, 8, 15, 16, 17, 33, 48, 65)
LENGTHS = (0, 1, 2, 3, 5, 17, 47, 48, 49, 96, 130, 390)  # tiles have 48 rows and 384 columns


class Call(NamedTuple):
    """A drawn call. floats: (queries, keys, values). rest: the other tensors. numbers: what is no tensor."""

    floats: tuple[Tensor, ...]
    rest: tuple[Tensor | None, ...]
    numbers: tuple


def jagged_attention(draw: Draw) -> Result:
    call = drawn(draw)
    run = lambda: finite(torch.ops.funcrec_cpp.jagged_attention(*call.floats, *call.rest, *call.numbers))
    truth, same = (finite(answer(call, dtype)) for dtype in (F64, F32))
    dtype = call.floats[0].dtype
    dtypes = dtype, accumulation_dtype(dtype)
    return Result(run, truth, bounds=[allowed(*x) for x in zip(truth, same, dtypes, strict=True)])


def jagged_attention_transpose(draw: Draw) -> Result:
    call = drawn(draw)
    dtype, truth = call.floats[0].dtype, answer(call, F64)
    d = blotted(draw.noise(*truth[0].shape, dtype=dtype), call.rest[0])
    given = draw.place(d), draw.place(truth[0].to(dtype)), draw.place(truth[1].to(accumulation_dtype(dtype)))
    forward = torch.ops.funcrec_cpp.jagged_attention_transpose
    run = lambda: [*forward(*given, *call.floats, *call.rest, *call.numbers)]
    truth, same = (cotangents(call, given, dtype) for dtype in (F64, F32))
    lost = of_differences(call, given[0])
    types = [x.dtype if x is not None else F64 for x in (*call.floats, *call.rest[2:4])]
    return Result(run, truth, bounds=[allowed(*x) for x in zip(truth, same, types, lost, strict=True)])


ATTENTION = (jagged_attention, jagged_attention_transpose)


# -- draws -------------------------------------------------------------------------------------------------------


def drawn(draw: Draw) -> Call:
    dtype, heads, dim, width = draw.one(*FLOATS), draw.one(*HEADS), draw.one(*WIDTHS), draw.one(*WIDTHS)
    if draw.is_large:
        heads, dim, width = 2, draw.one(16, 33), draw.one(16, 33)
    (n, offsets), (m, key_offsets) = buffers(draw)
    shapes = ((n, offsets, dim), (m, key_offsets, dim), (m, key_offsets, width))
    floats = tuple(spread(draw, blotted(draw.noise(size, heads, d, dtype=dtype), at)) for size, at, d in shapes)
    bias = lambda *sizes: draw.place(draw.noise(draw.one(1, heads), draw.one(*sizes), dtype=draw.one(dtype, F32)))
    by_distance = draw.one(None, bias(1, 2, 7, 100))
    by_time = draw.one(None, bias(1, 2, 14, 40))
    times = [times_of(draw, *at) for at in ((n, offsets), (m, key_offsets))] if by_time is not None else [None, None]
    targets = torch.randint(-1, 6, (offsets.shape[0] - 1,), generator=draw.generator).to(draw.one(I32, I64))
    targets = draw.one(None, draw.put(draw.mix(targets, draw.one(0, 0.3))))
    numbers = draw.one(0.0, 0.25, 1.0, -0.5), draw.one(1.0, 7.0, 0.5), draw.one(False, True), draw.one(False, True)
    return Call(floats, (offsets, key_offsets, by_distance, by_time, *times, targets), numbers)


def buffers(draw: Draw) -> list[tuple[int, Tensor]]:
    """Return the capacity and the offsets of queries and of keys."""
    if draw.one(False, True):  # apart
        num_bags = draw.one(2, 4) if draw.is_large else draw.one(0, 1, 2, 5)
        sizes = [900 if draw.is_large else draw.one(*LENGTHS) for _ in range(2)]
        return [(n, draw.offsets(num_bags, n)) for n in sizes]
    some = (250, 300) if draw.is_large else LENGTHS
    lengths = [draw.one(*some) for _ in range(6 if draw.is_large else draw.one(0, 1, 2, 3))]
    keys = [max(n + draw.one(0, 0, 0, 1, 1, 48, 335, -2, -n), 0) for n in lengths]
    found = []
    for each in (lengths, keys):
        first, end = draw.one(0, 0, 3), draw.one(0, 1, 5)
        offsets = torch.tensor([first, *each]).cumsum(0)
        found.append((int(offsets[-1]) + end, draw.put(offsets.to(draw.one(I32, I64)))))
    return found


def blotted(x: Tensor, offsets: Tensor) -> Tensor:
    """Return x with NaN outside of all bags."""
    bounds = bounds_of(offsets, x.shape[0])
    x[: bounds[0]] = x[bounds[-1] :] = torch.nan
    return x


def spread(draw: Draw, x: Tensor) -> Tensor:
    """Return x in a place where reads outside x are detected, sometimes with other strides."""
    return draw.place(x) if draw.one(0, 0, 1) else draw.place(x.transpose(0, 1).contiguous()).transpose(0, 1)


def times_of(draw: Draw, n: int, offsets: Tensor) -> Tensor:
    dtype = draw.one(I32, I64, F32, F64)
    if dtype in (I32, I64):
        x = torch.randint(-5, draw.one(4, 90_000), (n,), generator=draw.generator).to(dtype)
        return draw.put(draw.mix(x, draw.one(0, 0.2)))
    x = draw.noise(n, dtype=dtype) * draw.one(1, 1e5)
    if draw.one(0, 0, 1) and n:
        x[draw.random.randrange(n)] = draw.one(torch.inf, -torch.inf, torch.nan, *map(float, EXTREMES))
    return draw.put(blotted(x, offsets))


# -- the reference -----------------------------------------------------------------------------------------------


def cast(x, dtype: torch.dtype):
    """Return x with numbers in f64, or in f32 if they were not f64's own: times keep f64."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def arguments(call: Call, dtype: torch.dtype) -> list:
    offsets, key_offsets, by_distance, by_time, *times, targets = call.rest
    biases = [cast(x, dtype) for x in (by_distance, by_time)]
    floats = [cast(x, dtype) for x in call.floats]
    return [*floats, offsets, key_offsets, *biases, *times, targets, *call.numbers]


def answer(call: Call, dtype: torch.dtype) -> list[Tensor]:
    return [*reference.jagged_attention(*arguments(call, dtype))]


def cotangents(call: Call, given: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    return [*reference.jagged_attention_transpose(*(cast(x, dtype) for x in given), *arguments(call, dtype))]


def finite(results) -> list[Tensor]:
    """Return the results with -1e4 for -inf, the logarithm of a query that sees no key."""
    return [x.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=-1e4) for x in results]


# -- bounds ------------------------------------------------------------------------------------------------------


def greatest(x: Tensor) -> float:
    return x.double().abs().nan_to_num(0).max().item() if x.numel() else 0.0


def allowed(truth: Tensor, same: Tensor, own: torch.dtype, lost: float = 0.0) -> Tensor:
    """Return 8 · (the loss of the reference in f32, and 64 roundings of the greatest number), plus one rounding to 16
    bits, and `lost`. For f64, the loss is the loss of f32 in units of f64."""
    acc, eps = torch.finfo(accumulation_dtype(own)), torch.finfo(own).eps if own in (F16, BF16) else 0
    most = greatest(truth)
    of_sums = greatest(same.double() - truth) * (acc.eps / torch.finfo(F32).eps)
    bound = 8 * (of_sums + 64 * acc.eps * most) + lost + 1e-30
    return bound + eps * truth.abs() + (torch.finfo(own).tiny if eps else 0)


def of_differences(call: Call, d_out: Tensor) -> list[float]:
    """Return what roundings may change in each cotangent of softmax, whose slopes are differences of numbers: those of
    ⟨d, out⟩, where `out` may have 16 bits, and those of the logarithms."""
    if not call.numbers[2]:
        return [0.0] * 5
    dtype, scale = call.floats[0].dtype, abs(call.numbers[0])
    q, k, v = map(greatest, call.floats)
    eps = 64 * torch.finfo(accumulation_dtype(dtype)).eps + (torch.finfo(dtype).eps if dtype in (F16, BF16) else 0)
    each = wide(d_out).nan_to_num(0).abs().sum(-1) * v * eps
    most, total = greatest(each), each.sum().item()
    return [scale * k * most, scale * q * total, 0.0, total, total]
