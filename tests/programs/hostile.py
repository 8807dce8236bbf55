"""Generated calls of every C++ operation, with any arguments that its types allow.

Each call is compared with the reference. The call on one thread is compared with the same call on two threads.

    check(operation, seed, place)       for operation in OPERATIONS

Offsets may descend, be negative, exceed the buffer's length or be the least and largest integers. The same holds for
ids. Sizes may be 0, with null pointers, and inputs may be strided. `place` puts each input where a read outside it is
detected (guarded.py, a sanitizer). Operations that move numbers must equal the reference bit for bit. Operations that
sum must be as near to the reference in f64 as their precision allows. Two threads must give the bits of one thread.
Shapes: B bags, N ids, R rows, D dim.
"""

from collections.abc import Callable

import torch
from funcrec.kernels import cpp, library, ops, reference
from funcrec.kernels.forms import accumulation_dtype, row_bytes
from torch import Tensor

from programs import surroundings
from programs.hostile_attention import ATTENTION
from programs.hostile_draw import (
    BF16,
    DIMS,
    EXTREMES,
    F16,
    F32,
    F64,
    FLOATS,
    I32,
    I64,
    Draw,
    Result,
    padded_weights,
    size,
    wide,
)
from programs.hostile_draws import DRAWS
from programs.hostile_jagged import JAGGED
from programs.hostile_products import PRODUCTS
from programs.hostile_updates import UPDATES
from programs.hostile_vocabularies import VOCABULARIES

library.load("cpp")  # defines torch.ops.funcrec_cpp

# -- lookups -----------------------------------------------------------------------------------------------------


def lookup_inputs(draw: Draw, weights_dtype: torch.dtype):
    num_bags, n = draw.size(), draw.size()
    tables = [draw.table() for _ in range(draw.one(1, 2, 4))]
    rows = [draw.ids(n, draw.one(*tables).shape[0]) for _ in range(draw.one(1, 2))]
    first = [draw.random.randint(0, 2) * num_bags + draw.one(0, 1) for _ in range(draw.one(0, 1, 2, 5))]
    offsets = draw.offsets(max(first, default=0) + num_bags, n)
    features, column = [], 0
    for at in first:
        t = draw.random.randrange(len(tables))
        cut, mean, weighted = draw.one(0, 0, 1, 3, 16, 17), draw.one(False, True), draw.one(False, True)
        features.append(ops.Feature(t, draw.random.randrange(len(rows)), at, cut, mean, weighted, column))
        column += tables[t].shape[1]
    return tables, rows, offsets, padded_weights(draw, offsets, n, weights_dtype), features, num_bags, column


def pooled_lookup(draw: Draw) -> Result:
    *given, features, num_bags, _ = lookup_inputs(draw, draw.one(F32, F64, BF16))
    flat = [int(x) for f in features for x in f]
    how = (flat, num_bags)
    if features and draw.one(0, 0, 1):  # equal parts of the columns, one feature in each part
        given[0] = [draw.place(draw.noise(7, 16, dtype=draw.one(*FLOATS))) for _ in given[0]]
        flat = [int(x) for i, f in enumerate(features) for x in f._replace(column=16 * i)]
        how = (flat, num_bags, len(features))
    run = lambda: [torch.ops.funcrec_cpp.pooled_lookup(*given, *how)]
    acc, call = F64 if all(x.dtype == F64 for x in given[0]) else F32, reference.pooled_lookup
    return Result(run, [call(*wide(given), *how)], [call(*size(given), *how)], given[1][0].shape[0], acc)


def stacked_lookup(draw: Draw) -> Result:
    """Return the result of a lookup for K members in one call, in stacks of their tables."""
    _, rows, offsets, weights, features, num_bags, _ = lookup_inputs(draw, draw.one(F32, F64))
    k, tables, column = draw.one(1, 2, 3), [], 0
    for i, f in enumerate(features):
        tables.append(draw.place(draw.noise(k, draw.one(0, 1, 7, 50), draw.one(*DIMS), dtype=draw.one(F32, BF16))))
        features[i], column = f._replace(table=i, column=column), column + tables[i].shape[2]
    if not tables:
        tables = [draw.place(draw.noise(k, 7, 3))]
    flat = [int(x) for f in features for x in f]
    one = torch.func.vmap(lambda xs: torch.ops.funcrec_cpp.pooled_lookup(xs, rows, offsets, weights, flat, num_bags))
    call = lambda to: torch.stack([
        reference.pooled_lookup(*to(([x[i] for x in tables], rows, offsets, weights)), flat, num_bags) for i in range(k)
    ])  # fmt: skip
    return Result(lambda: [one(tables)], [call(wide)], [call(size)], rows[0].shape[0], F32)


def pooled_lookup_weights(draw: Draw) -> Result:
    tables, rows, offsets, weights, features, num_bags, columns = lookup_inputs(draw, draw.one(*FLOATS))
    d = draw.noise(columns, num_bags, dtype=draw.one(F32, F64, BF16)).t()
    d = draw.place(d.contiguous()) if draw.one(0, 1) else draw.place(d.t().contiguous()).t()
    given, flat = (d, tables, rows, offsets, weights), [int(x) for f in features for x in f]
    call = reference.pooled_lookup_weights
    run = lambda: [torch.ops.funcrec_cpp.pooled_lookup_weights(*given, flat)]
    acc = F64 if all(x.dtype == F64 for x in (d, *tables)) else F32
    return Result(run, [call(*wide(given), flat)], [call(*size(given), flat)], 5 * (columns + 1), acc)


def gather_rows(draw: Draw) -> Result:
    table = draw.table()
    rows = draw.ids(draw.size(), table.shape[0])
    run = lambda: [torch.ops.funcrec_cpp.gather_rows(table, rows)]
    return Result(run, [reference.gather_rows(table, rows)])


def scatter_rows(draw: Draw) -> Result:
    (table,), rows, count, (new,), want = written(draw, 1)
    return Result(lambda: [torch.ops.funcrec_cpp.scatter_rows(table, rows, count, new)], want)


def gather_block(draw: Draw) -> Result:
    """Return the result of reads of the same rows in several tables of one height."""
    num_rows, n = draw.one(0, 1, 7, 300), draw.size()
    tables = [draw.place(draw.noise(num_rows, draw.one(*DIMS), dtype=draw.one(*FLOATS))) for _ in range(draw.one(1, 3))]
    rows = draw.ids(n, num_rows)
    return Result(lambda: cpp.gather_block(tables, rows), [reference.gather_rows(x, rows) for x in tables])


def scatter_block(draw: Draw) -> Result:
    tables, rows, count, new, want = written(draw, draw.one(1, 2, 3))

    def run() -> list[Tensor]:
        own = [draw.place(x) for x in tables]
        cpp.scatter_block_(own, rows, count, new)
        return own

    return Result(run, want)


def written(draw: Draw, num_tables: int):
    """Return (tables, rows, count, new, the tables with these rows written)."""
    num_rows = draw.one(0, 1, 2, 7, 50, 300)
    tables = [draw.place(draw.noise(num_rows, draw.one(*DIMS), dtype=draw.one(*FLOATS))) for _ in range(num_tables)]
    n = min(draw.size(), num_rows)
    rows = draw.mix(torch.randperm(num_rows, generator=draw.generator)[:n].to(draw.one(I32, I64)), 0.2, num_rows)
    count = draw.one(0, n, n // 2, -1, n + 1, *EXTREMES)
    new, want = [draw.noise(n, x.shape[1], dtype=draw.one(F32, F64)) for x in tables], [x.clone() for x in tables]
    for i, row in enumerate(rows.tolist()[: max(count, 0)]):
        for x, y in zip(want, new):
            if 0 <= row < num_rows:
                x[row] = y[i].to(accumulation_dtype(y.dtype)).to(x.dtype)
    return tables, draw.put(rows), draw.place(torch.tensor(count)), [*map(draw.place, new)], want


# -- quantised rows ----------------------------------------------------------------------------------------------


def coded(draw: Draw) -> tuple[Tensor, int, int, Tensor]:
    """Return (table, bits, dim, the table's values in f32). The table has floats, or is quantised, with finite scales
    and biases and any codes."""
    bits, dim, num_rows = draw.one(8, 4, 2, 8, 4, 2, 16, 32), draw.one(*DIMS), draw.one(0, 1, 2, 7, 50, 300)
    if bits > 8:
        table = draw.noise(num_rows, dim, dtype=F32 if bits == 32 else draw.one(F16, BF16))
        return draw.place(table), bits, dim, table.float()
    codes = torch.randint(0, 256, (num_rows, row_bytes(bits, dim) - 4), generator=draw.generator)
    head = draw.noise(num_rows, 2, dtype=F16).view(torch.uint8)
    table = torch.cat([head, codes.to(torch.uint8)], 1)
    return draw.place(table), bits, dim, reference.quantized_rows(table, torch.arange(num_rows), bits, dim)


def quantized_lookup(draw: Draw) -> Result:
    _, rows, offsets, weights, features, num_bags, _ = lookup_inputs(draw, draw.one(F32, F64, BF16))
    made = [coded(draw) for _ in range(4)]
    flat, column = [], 0
    for f in features:
        flat += map(int, f._replace(column=column))
        column += made[f.table][2]
    tables, bits, dims, plain = map(list, zip(*made, strict=True))
    run = lambda: [torch.ops.funcrec_cpp.quantized_lookup(tables, rows, offsets, weights, flat, num_bags, bits, dims)]
    given, call, how = (plain, rows, offsets, weights), reference.pooled_lookup, (flat, num_bags)
    return Result(run, [call(*wide(given), *how)], [call(*size(given), *how)], rows[0].shape[0], F32)


def quantized_rows(draw: Draw) -> Result:
    table, bits, dim, plain = coded(draw)
    while bits > 8:
        table, bits, dim, plain = coded(draw)
    rows = draw.ids(draw.size(), table.shape[0])
    run = lambda: [torch.ops.funcrec_cpp.quantized_rows(table, rows, bits, dim)]
    return Result(run, [reference.gather_rows(plain, rows)])


def quantize_rows(draw: Draw) -> Result:
    table = draw.noise(draw.size(), draw.one(*DIMS)) * draw.one(1, 1, 1e-8, 1e4)
    table = draw.place(torch.where(torch.rand(table.shape, generator=draw.generator) < 1e-3, torch.nan, table))
    table = draw.place(table.to(draw.one(*FLOATS)))
    given = (table, draw.one(8, 4, 2), draw.one(None, draw.place(torch.tensor(draw.one(0, 7, *EXTREMES)))))
    return Result(lambda: [torch.ops.funcrec_cpp.quantize_rows(*given)], [reference.quantize_rows(*given)])


def top_k(draw: Draw) -> Result:
    items, bits, dim, plain = coded(draw)
    num_queries, k = draw.one(0, 1, 2, 5, 7, 13), draw.one(0, 1, 3, 10, 70)
    queries = draw.noise(num_queries, dim, dtype=draw.one(F32, F64))
    if bits > 8:
        bits, plain = 0, items
    left_out = draw.one(None, draw.ids(draw.size(), items.shape[0]))
    offsets = None if left_out is None else draw.offsets(num_queries, left_out.shape[0])
    queries = draw.place(queries)
    run = lambda: list(torch.ops.funcrec_cpp.top_k(queries, items, left_out, offsets, k, bits))
    return Result(run, list(reference.top_k(queries, plain, left_out, offsets, k)))


OPERATIONS = {
    f.__name__: f
    for f in (
        pooled_lookup, stacked_lookup, pooled_lookup_weights, gather_rows, gather_block, scatter_rows, scatter_block,
        quantized_lookup, quantized_rows, quantize_rows, top_k, *JAGGED, *DRAWS, *ATTENTION, *VOCABULARIES, *PRODUCTS,
        *UPDATES,
    )
}  # fmt: skip


# -- comparison --------------------------------------------------------------------------------------------------


def on_threads(number: int, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    with surroundings.on_threads(number):
        return run()


def is_same(x: Tensor, y: Tensor) -> bool:
    """Return whether dtype, shape and every bit are equal."""
    as_bytes = lambda z: z.new_empty(z.numel()).copy_(z.flatten()).view(torch.uint8)
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(as_bytes(x), as_bytes(y))


def is_near(x: Tensor, want: Tensor, magnitude: Tensor, terms: int, acc: torch.dtype | None) -> bool:
    """Return whether the error is at most one rounding for each term of the sum, plus one rounding to 16 bits."""
    acc, own = torch.finfo(acc or accumulation_dtype(x.dtype)), torch.finfo(x.dtype)
    bound = ((terms + 8) * acc.eps + own.eps) * magnitude + own.tiny
    return x.shape == want.shape and bool(((x.double() - want).abs() <= bound).all())


def is_right(x: Tensor, want: Tensor, made: Result, i: int) -> bool:
    if made.bounds is not None:
        return x.shape == want.shape and bool(((x.double() - want).abs() <= made.bounds[i]).all())
    is_sum = made.sizes is not None and made.sizes[i] is not None
    return is_near(x, want, made.sizes[i], made.terms, made.acc) if is_sum else is_same(one_nan(x), one_nan(want))


def one_nan(x: Tensor) -> Tensor:
    """Return x with one NaN's bits for every NaN: torch's copies of bf16 on several threads change them."""
    return torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x


def check(
    operation: str,
    seed: int,
    place: Callable[[Tensor], Tensor] = torch.clone,
    threads: int = 2,
    on_threads: Callable[..., list[Tensor]] = on_threads,
) -> None:
    """Raise if a call differs from the reference, or if its bits change with the number of threads."""
    made = OPERATIONS[operation](Draw(seed, place))
    got = on_threads(1, made.run)
    for i, (x, want) in enumerate(zip(got, made.want, strict=True)):
        good = is_right(x, want, made, i)
        assert good, f"{operation} {seed}: result {i} is not the reference's: {x.dtype}{list(x.shape)}\n{x}\n{want}"
    again = on_threads(threads, made.run)
    same = all(map(is_same, got, again))
    assert same, f"{operation} {seed}: {threads} threads give other bits"
