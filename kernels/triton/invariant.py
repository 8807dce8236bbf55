"""Products and sums whose bits depend on the numbers alone: a program sums blocks of at most CHAIN terms in order.

    parts[j] = chain_{⌊j K / J⌋ ≤ k < ⌊(j + 1) K / J⌋},   out = tree_j parts[j]

The blocks of one output run side by side, and the tree of `reference_invariant` adds them. `tl.fma` rounds once on a
device; in the interpreter it rounds twice, unless a test puts an exact one in its place.
Shapes: S stacked matrices, M rows, K terms, N columns, J blocks; P outer, Q inner.
"""

import triton.language as tl
from funcrec.kernels.invariant import num_blocks
from funcrec.kernels.reference_invariant import joined
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.device import kernel, lanes
from torch import Tensor

REALS = (tl.float32, tl.float64)
ROWS, COLUMNS = 16, 64  # the tile of a program: 8 sums for each thread


def invariant_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return a b, f[S, M, N], in chains acc = fma(a, b, acc) from acc = 0."""
    if a.dtype != b.dtype or on.DTYPES.get(a.dtype) not in REALS or a.shape[::2] != (b.shape[0], b.shape[1]):
        got = f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
        on.fail(
            "the operands do not match.", got, "f[S, M, K] and f[S, K, N] of f32 or f64", "x.to(dtype)", "invariant_bmm"
        )
    (stack, rows, terms), columns = a.shape, b.shape[2]
    blocks = num_blocks(terms)
    parts = a.new_empty(stack, blocks, rows, columns)
    tiles = on.cdiv(rows, ROWS), on.cdiv(columns, COLUMNS)
    on.launch(
        _products, (stack * blocks * tiles[0] * tiles[1],), a, *a.stride(), b, *b.stride(), parts, rows, columns, terms,
        blocks, *tiles, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return joined(parts, 1)


def invariant_sum(x: Tensor) -> Tensor:
    """Return the sums over the middle dimension of f[P, N, Q], f[P, Q], in chains acc + x from acc = 0."""
    if on.DTYPES.get(x.dtype) not in REALS:
        on.fail("a tensor is of another kind.", str(x.dtype), "f32 or f64", "x.float()", "invariant_sum")
    outer, terms, inner = x.shape
    blocks = num_blocks(terms)
    parts = x.new_empty(outer, blocks, inner)
    on.launch(
        _sums, (on.cdiv(parts.numel(), on.BLOCK),), x, *x.stride(), parts, parts.numel(), terms, inner, blocks,
        on.cdiv(terms, blocks), LANES=on.BLOCK, num_warps=4,
    )  # fmt: skip
    return joined(parts, 1)


@kernel()
def _products(
    a, a_stack, a_row, a_term, b, b_stack, b_term, b_column, parts, num_rows, size, count, block, row_tiles,
    column_tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    tile, part = place % (row_tiles * column_tiles), place // (row_tiles * column_tiles)
    row = tile // column_tiles * ROWS + tl.arange(0, ROWS)
    column = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    first, last = part % block * count // block, (part % block + 1) * count // block
    a += part // block * a_stack + row * a_row + first * a_term
    b += part // block * b_stack + column * b_column + first * b_term
    acc = tl.full((ROWS, COLUMNS), 0, parts.dtype.element_ty)
    for k in range(last - first):
        x = tl.load(a + k * a_term, mask=row < num_rows, other=0)
        y = tl.load(b + k * b_term, mask=column < size, other=0)
        x, y = tl.broadcast(x[:, None], y[None, :])
        acc = tl.fma(x, y, acc)
    to = (part * num_rows + row)[:, None] * size + column[None, :]
    tl.store(parts + to, acc, mask=(row < num_rows)[:, None] & (column < size)[None, :])


@kernel()
def _sums(
    x, x_outer, x_term, x_inner, parts, size, num_values, count, block, steps, LANES: tl.constexpr
):  # fmt: skip
    place = lanes(LANES)
    part = place // count % block
    first, last = part * num_values // block, (part + 1) * num_values // block
    x += place // (count * block) * x_outer + place % count * x_inner + first * x_term
    acc = tl.full((LANES,), 0, parts.dtype.element_ty)
    for k in range(steps):
        acc += tl.load(x + k * x_term, mask=(place < size) & (first + k < last), other=0)
    tl.store(parts + place, acc, mask=place < size)
