"""Device functions that the kernels share: searches, bags, sums, IEEE division and root, random bits.

Addresses are i64, and functions turn them into pointers. All positions are i64.
"""

import functools
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

GAMMA = tl.constexpr(-7046029254386353131)  # SplitMix64's constants as i64
MIX_1 = tl.constexpr(-4658895280553007687)
MIX_2 = tl.constexpr(-7723592293110705685)

# Names of arguments that are sizes of data. triton does not recompile when such a size becomes 1 or a multiple of 16.
SIZES = (
    "size", "capacity", "steps", "slots", "num_bags", "num_rows", "num_ids", "num_values", "num_tables", "num_segments",
    "num_shards", "block", "nothing", "first_key", "behind_key", "first_bag", "behind_bag", "max_length", "mean",
    "count", "group_steps", "key_steps",
)  # fmt: skip
kernel = functools.partial(triton.jit, do_not_specialize=SIZES)
if TYPE_CHECKING:  # To a checker of Python, a call of Triton's function never returns, and a constant is an object.
    from typing import Any as constexpr

    jit: Any = triton.jit
else:
    constexpr, jit = tl.constexpr, triton.jit


# Combinations of integers, which the interpreter knows and computes by numpy. It cannot call `tl.sum`, `tl.max` and
# `tl.min` if triton was imported before TRITON_INTERPRET was set.
of_greatest, of_least, of_sum = (
    triton.language.standard._elementwise_max,
    triton.language.standard._elementwise_min,
    triton.language.standard._sum_combine,
)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def sum_columns(x):
    """Return the sums over the columns, f[rows], by adding neighbours again and again.

    A plain reduction adds in an order that the compiler chooses with the layout. The layout depends on the alignment of
    the loads.
    """
    if x.shape[1] == 1:
        return tl.reshape(x, (x.shape[0],))
    else:
        return sum_columns(tl.reduce(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2, plus))


@triton.jit
def lanes(LANES: tl.constexpr):
    """Return this program's positions along axis 0, i64[LANES]."""
    return tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)


@triton.jit
def upper_bound(array, low, high, value, steps):
    """Return, for each lane, the first place in [low, high) whose element is greater than `value`, or high."""
    for _ in range(steps):
        searching = low < high
        middle = (low + high) // 2
        above = tl.load(array + middle, mask=searching, other=0).to(tl.int64) > value
        high = tl.where(searching & above, middle, high)
        low = tl.where(searching & (above == 0), middle + 1, low)
    return low


@jit
def bag_bounds(offsets, bag, inside, num_ids, max_length):
    """Return (begin, length) of bags within [0, num_ids], cut to max_length unless that is 0.

    The length is 0 where bounds descend.
    """
    begin = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=inside, other=0).to(tl.int64)
    begin = tl.minimum(tl.maximum(begin, 0), num_ids)
    end = tl.minimum(tl.maximum(end, 0), num_ids)
    length = tl.maximum(end - begin, 0)
    return begin, tl.where(max_length > 0, tl.minimum(length, max_length), length)


@triton.jit
def pointers(address, DTYPE: constexpr, ALIGN: constexpr):
    """Return pointers [rows, 1] from addresses [rows], which are multiples of ALIGN bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE))[:, None], (ALIGN, ALIGN))


@triton.jit
def rows_at(address, row, DIM: constexpr, DTYPE: constexpr, ALIGN: constexpr):
    """Return pointers [rows, 1] to the first of the DIM numbers of each row.

    address: the address of the table, or an address for each row.
    """
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    return pointers(address + row * (DIM * BYTES), DTYPE, ALIGN)


@triton.jit
def decoded(address, column, read, BITS: constexpr):
    """Return the numbers code · scale + bias of quantised rows, f32[rows, columns], and 0 where `read` is false.

    address: i64[rows], where the rows [scale f16][bias f16][codes of BITS, low bits first] begin. A row may begin at an
    odd address, so every load is of one byte. The product is exact in f32.
    """
    first = address.to(tl.pointer_type(tl.uint8))[:, None]
    code = tl.load(first + 4 + (column * BITS // 8)[None, :], mask=read, other=0).to(tl.int32)
    code = (code >> (column * BITS % 8).to(tl.int32)[None, :]) & ((1 << BITS) - 1)
    some = tl.reduce(read.to(tl.int32), 1, larger)[:, None] != 0  # pyright: ignore[reportArgumentType]
    x = code.to(tl.float32) * half_at(first, some) + half_at(first + 2, some)
    return tl.where(read, x, 0)


@triton.jit
def half_at(first, read):
    """Return the f16 numbers at pointers to bytes, as f32."""
    low = tl.load(first, mask=read, other=0).to(tl.int16)
    high = tl.load(first + 1, mask=read, other=0).to(tl.int16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def divide(x, y):
    """Return x / y, rounded to nearest, because `/` on f32 only approximates. y is a tensor, x a tensor or a number."""
    if y.dtype == tl.float32:
        return tl.div_rn(x, y)
    else:
        return x / y


@triton.jit
def root(x):
    """Return √x, rounded to nearest."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Return x rounded to DTYPE, to nearest, ties to even.

    The function rounds to bf16 by operations on bits, because triton's interpreter would truncate.
    """
    if tl.bfloat16 == DTYPE:
        number = x.to(tl.float32).to(tl.int32, bitcast=True)
        finite = (number & 0x7F800000) != 0x7F800000
        near = (number + 0x7FFF + ((number >> 16) & 1)) & -65536  # 0xFFFF0000
        return tl.where(finite, near, number).to(tl.float32, bitcast=True).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def mix(z):
    """Return SplitMix64's finaliser of i64 numbers. The right shifts insert zeros."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def random_bits(draws, row, column):
    """Return random numbers in [0, 2¹⁶), i32[rows, columns], for columns i64[rows or 1, columns].

    Four columns share one number of the key's sequence. draws: pointers to the segment of each row, (key, begin, phase,
    words).
    """
    column = column + tl.load(draws + 2)[:, None]
    counter = (row * tl.load(draws + 3))[:, None] + column // 4 + 1
    number = mix(tl.load(draws)[:, None] + counter * GAMMA)
    return ((number >> (16 * (column % 4))) & 0xFFFF).to(tl.int32)


@triton.jit
def round_stochastically(x, bits, DTYPE: tl.constexpr):
    """Return f32 numbers rounded at random to f16 or bf16; inf and NaN stay.

    The probability to round up equals the part that is cut off.
    """
    number = x.to(tl.int32, bitcast=True)
    finite = (number & 0x7F800000) != 0x7F800000
    # bf16 keeps 16 bits, and f16 keeps 19 (subnormal numbers of f16 are rounded once more).
    CUT: tl.constexpr = 0xFFFF if tl.bfloat16 == DTYPE else 0x1FFF  # pyright: ignore[reportAssignmentType]
    cut = (number + (bits & CUT)) & (-1 - CUT)
    return tl.where(finite, cut, number).to(tl.float32, bitcast=True).to(DTYPE)
