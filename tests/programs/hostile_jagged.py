"""Generated calls of the operations on jagged buffers and records, with any offsets and values. See hostile.py.

Shapes: B bags, N ids.
"""

import os

import torch
from funcrec.kernels import reference
from funcrec.kernels.records import read_records, write_records
from torch import Tensor

from programs.hostile_draw import DIMS, EXTREMES, F64, FLOATS, I32, I64, MOVED, Draw, Result, bounds_of, size, wide


def trailing(draw: Draw) -> tuple[int, ...]:
    return draw.one((), (), (1,), (2,), (3,), (2, 2), (0,), (20,))


def ranges(draw: Draw, n: int) -> tuple[Tensor, Tensor]:
    num_bags = draw.size()
    starts = torch.randint(-3, n + 3, (num_bags,), generator=draw.generator).to(draw.one(I32, I64))
    lengths = torch.randint(-1, 6, (num_bags,), generator=draw.generator).to(draw.one(I32, I64))
    share = draw.one(0, 0, 0.2)
    return draw.put(draw.mix(starts, share)), draw.put(draw.mix(lengths, share))


def take_ranges(draw: Draw) -> Result:
    values = draw.place(draw.numbers(draw.size(), *trailing(draw), dtype=draw.one(*MOVED)))
    given = (values, *ranges(draw, values.shape[0]), draw.size())
    return Result(lambda: [*torch.ops.funcrec_cpp.take_ranges(*given)], [*reference.take_ranges(*given)])


def take_ranges_transpose(draw: Draw) -> Result:
    d, n = draw.place(draw.noise(draw.size(), *trailing(draw), dtype=draw.one(*FLOATS))), draw.size()
    given = (d, *ranges(draw, n), n)
    call = reference.take_ranges_transpose
    return Result(
        lambda: [torch.ops.funcrec_cpp.take_ranges_transpose(*given)],
        [call(*wide(given))],
        [call(*size(given))],
        d.shape[0],
    )


def to_padded(draw: Draw) -> Result:
    values = draw.place(draw.numbers(draw.size(), *trailing(draw), dtype=draw.one(*MOVED)))
    longest = draw.one(0, 1, 2, 5, 16, 17, 40)
    given = (values, draw.offsets(draw.size(), values.shape[0]), longest, draw.one(0, 1))
    return Result(lambda: [torch.ops.funcrec_cpp.to_padded(*given)], [reference.to_padded(*given)])


def from_padded(draw: Draw) -> Result:
    num_bags, capacity = draw.size(), draw.size()
    shape = (num_bags, draw.one(0, 1, 2, 5, 16, 17), *trailing(draw))
    given = (draw.place(draw.numbers(*shape, dtype=draw.one(*MOVED))), draw.offsets(num_bags, capacity), capacity)
    return Result(lambda: [torch.ops.funcrec_cpp.from_padded(*given)], [reference.from_padded(*given)])


def bag_extrema(draw: Draw) -> Result:
    dtype, n = draw.one(*FLOATS, I32, I64, torch.int16, torch.int8, torch.uint8), draw.size()
    values = draw.noise(n, *draw.one((), (draw.one(*DIMS),), (2, 3)), dtype=F64) * draw.one(1, 50)
    values = (
        values.round().clamp(0 if dtype == torch.uint8 else -128, 127) if draw.one(0, 1) else values
    )  # many are equal
    values = values if dtype.is_floating_point else values.clamp(0 if dtype == torch.uint8 else -128, 127)
    wild = torch.rand(values.shape, generator=draw.generator)
    if dtype.is_floating_point and draw.one(0, 1):
        for i, x in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, 0.0)):
            values = torch.where((wild >= 0.02 * i) & (wild < 0.02 * (i + 1)), x, values)
    values, offsets, greatest = draw.place(values.to(dtype)), draw.offsets(draw.size(), n), draw.one(False, True)
    run = lambda: [
        *torch.ops.funcrec_cpp.bag_extrema(values, offsets, greatest, True),
        torch.ops.funcrec_cpp.bag_extrema(values, offsets, greatest, False)[0],
    ]
    best, places = reference.bag_extrema(values, offsets, greatest, True)
    return Result(run, [best, places, best])


def bag_extrema_transpose(draw: Draw) -> Result:
    num_bags, n = draw.size(), draw.size()
    shape = num_bags, *draw.one((), (draw.one(*DIMS),), (2, 3))
    offsets = draw.offsets(num_bags, n)
    bounds = torch.tensor(bounds_of(offsets, n))
    lengths = bounds.diff().reshape(-1, *[1] * (len(shape) - 1))
    places = bounds[:-1].reshape(lengths.shape) + (torch.rand(shape, generator=draw.generator) * (lengths + 1)).long()
    wild = torch.rand(shape, generator=draw.generator) < draw.one(0, 0, 0.1)
    places = draw.place(torch.where(wild, draw.one(*EXTREMES), places))
    given = (draw.place(draw.noise(*shape, dtype=draw.one(*FLOATS))), offsets, places, n)
    run = lambda: [torch.ops.funcrec_cpp.bag_extrema_transpose(*given)]
    return Result(run, [reference.bag_extrema_transpose(*given)])


def bucketize(draw: Draw) -> Result:
    n, block = draw.size() * (5 if draw.is_large else 1), draw.one(1, 3, 8, 2**20, 2**33, 2**62, 2**63 - 1)
    rows = torch.randint(0, 3 * min(block, 2**40), (n,), generator=draw.generator)
    rows = draw.put(draw.mix(rows if block > 2**20 else rows.to(draw.one(I32, I64)), draw.one(0, 0.3)))
    weights = draw.one(None, draw.put(draw.noise(n, dtype=draw.one(*FLOATS))))
    given = (rows, draw.offsets(draw.size(), n), weights, draw.one(0, 1, 2, 7), block)
    return Result(lambda: [*torch.ops.funcrec_cpp.bucketize(*given)], [*reference.bucketize(*given)])


def owner_blocks(draw: Draw) -> Result:
    n, num_bags, num_ids = draw.one(1, 2, 5), draw.size(), draw.size() * (6 if draw.is_large else 1)
    placed, num_groups = draw.one(False, True), draw.one(1, 2, 4)
    groups = [*range(num_groups)] if placed else [draw.random.randrange(num_groups) for _ in range(draw.one(1, 3, 5))]
    lanes = []
    for group in groups:
        ranks, num_rows = draw.random.sample(range(n), draw.random.randint(1, n)), draw.one(1, 5, 40)
        starts = [draw.random.randrange(20) for _ in ranks]
        lanes.append(
            (group * num_bags, draw.one(0, 2), num_rows, -(-num_rows // len(ranks)), len(ranks), *ranks, *starts)
        )
    served = [[i for i, x in enumerate(lanes) if r in x[5 : 5 + x[4]]] for r in range(n)]
    slots = [k for own in served for k in own + [-1] * (max(map(len, served)) - len(own))]
    flat, room = [x for lane in lanes for x in lane], draw.one(0, 1, 5, num_ids)
    given = (draw.ids(num_ids, 40), draw.offsets(num_groups * num_bags, num_ids), flat, slots, num_bags, n, room)
    given = (*given, draw.one(False, True), placed)
    return Result(lambda: [*torch.ops.funcrec_cpp.owner_blocks(*given)], [*reference.owner_blocks(*given)])


def move_records(draw: Draw) -> Result:
    """Write records to a file in memory, and read all of them."""
    count, width, workers = draw.one(1, 64, 65, 300), draw.one(1, 3, 260), draw.one(1, 2, 16)
    rows = torch.randint(count, (draw.size(),), generator=draw.generator).unique()
    rows, every = draw.put(rows.to(draw.one(I32, I64))), draw.put(torch.arange(count))
    records = draw.put(torch.randint(256, (len(rows), width), generator=draw.generator, dtype=torch.uint8))

    def run() -> list[Tensor]:
        fd, found = os.memfd_create("records"), torch.empty(count, width, dtype=torch.uint8)
        try:
            os.truncate(fd, count * width)
            write_records(fd, rows, records, workers=workers, implementation="cpp")
            read_records(fd, every, found, workers=workers, implementation="cpp")
        finally:
            os.close(fd)
        return [found]

    return Result(run, [torch.zeros(count, width, dtype=torch.uint8).index_copy(0, rows.long(), records)])


JAGGED = (
    take_ranges, take_ranges_transpose, to_padded, from_padded, bag_extrema, bag_extrema_transpose, bucketize,
    owner_blocks, move_records,
)  # fmt: skip
