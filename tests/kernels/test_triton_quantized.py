"""Triton's lookups of quantised rows have the bits of the C++ kernels, and read what a loop over the bytes reads.

On the CPU the kernels run in the interpreter of triton. Rows have an odd number of bytes, so most begin at an odd
address. Padding holds NaN and ids far outside their tables.
"""

import itertools
import os
import struct

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from funcrec.kernels import cpp, ops

KINDS = (
    (8, torch.uint8), (4, torch.uint8), (2, torch.uint8), (16, torch.float16), (16, torch.bfloat16), (32, torch.float32)
)  # fmt: skip
SIZES = (0, 1, 63, 65)
WILD = (torch.nan, torch.inf, 1.8e7, -65536.0)


def table_of(num_rows: int, dim: int, bits: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a table of quantised or plain rows. Row 1 does not fit f16, and so its codes are NaN."""
    x = torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(seed)) * 3
    if num_rows > 1:
        x[1] = WILD[seed % len(WILD)]
    return cpp.quantize_rows(x, bits) if dtype == torch.uint8 else x.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal, where NaN equals NaN."""
    return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a, 12345.0), torch.nan_to_num(b, 12345.0))


def read(row: bytes, bits: int, dim: int) -> list[float]:
    scale, bias = struct.unpack("<2e", row[:4])
    return [(row[4 + c * bits // 8] >> c * bits % 8 & (2**bits - 1)) * scale + bias for c in range(dim)]


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dim", [1, 5, 33, 1030])
def test_rows_are_the_bytes_numbers(call, bits, dim):
    """Each number is code · scale + bias. Rows outside the table are zeros, also of a table without rows."""
    table = table_of(9, dim, bits, torch.uint8, 3)
    rows = torch.tensor([8, 0, -1, 9, 2**40, -(2**63), 3, 1])
    want = torch.zeros(8, dim, dtype=torch.float64)
    for i in (0, 1, 6, 7):
        want[i] = torch.tensor(read(bytes(table[rows[i]].tolist()), bits, dim))
    got = call("quantized_rows", table, rows, bits, dim)
    assert same(got, want.float())
    assert not call("quantized_rows", table[:0], rows, bits, dim).any()
    assert call("quantized_rows", table, rows[:0], bits, dim).shape == (0, dim)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ints", [torch.int32, torch.int64])
def test_a_lookup_has_the_bits_of_the_cpu(call, ids, ascending, size, ints):
    """Tables of all kinds in one call, of two dims: cut bags, means and weights give the bits of the C++ kernel."""
    torch.manual_seed(size)
    dims = [(5, 16)[t % 2] for t in range(len(KINDS))]
    tables = [table_of(7, dim, *kind, t) for t, (dim, kind) in enumerate(zip(dims, KINDS, strict=True))]
    offsets = ascending(6, 0, max(size - 3, 0), ints)
    weights = torch.rand(size)
    weights[int(offsets[-1]) :] = torch.nan
    rows = [ids(size, 7, ints)]
    columns = [0, *itertools.accumulate(dims)]
    bits = [b for b, _ in KINDS]
    for weighted, mean in itertools.product((False, True), repeat=2):
        features = [ops.Feature(t, 0, t % 3, t % 2 * 4, mean, weighted, columns[t]) for t in range(len(KINDS))]
        how = weights if weighted else None
        want = ops.quantized_lookup(tables, rows, offsets, how, features, 4, bits, dims, implementation="cpp")
        got = call("quantized_lookup", tables, rows, offsets, how, [int(x) for f in features for x in f], 4, bits, dims)
        assert same(got, want)


def test_one_plan_serves_tables_with_equal_forms(call):
    """Calls with the same forms read the tables, ids and weights of their own: other memory, other lengths of ids."""
    for seed in range(3):
        tables = [table_of(7, 5, 8, torch.uint8, seed), table_of(7, 5, 4, torch.uint8, seed + 1)]
        rows = [torch.arange(4 + seed) % 7]
        offsets, dims = torch.tensor([0, 2, 4 + seed]), [5, 5]
        features = [ops.Feature(t, 0, 0, 0, False, False, 5 * t) for t in range(2)]
        want = ops.quantized_lookup(tables, rows, offsets, None, features, 2, [8, 4], dims, implementation="cpp")
        flat = [int(x) for f in features for x in f]
        assert same(call("quantized_lookup", tables, rows, offsets, None, flat, 2, [8, 4], dims), want)


def test_what_is_no_table_of_codes_raises(call):
    """Bytes that do not fit `bits` and `dim`, tables that are not contiguous, and missing dims raise with names."""
    table, one = table_of(4, 5, 8, torch.uint8, 0), torch.tensor([0])
    given = [one], torch.tensor([0, 1]), None, [0] * 7, 1
    with pytest.raises(ValueError, match=r"`tables\[0\]` is not a table of 6 columns"):
        call("quantized_lookup", [table], *given, [8], [6])
    with pytest.raises(ValueError, match="`bits` and `dims` do not match"):
        call("quantized_lookup", [table], *given, [8], [])
    with pytest.raises(ValueError, match="not contiguous"):
        call("quantized_lookup", [table.t().contiguous().t()], *given, [8], [5])
    with pytest.raises(ValueError, match="do not reach the last bag"):
        call("quantized_lookup", [table], [one], torch.tensor([0]), None, [0] * 7, 1, [8], [5])
