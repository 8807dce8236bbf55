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

from funcrec.kernels import cpp, ops, reference

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


F16_EDGES = (torch.nan, torch.inf, -torch.inf, 1.8e7, -65536.0, 65504.0, 65520.0, -65519.0, 3e38, 2.0**-24, -0.0, 0.0)


def rows_to_quantize(num_rows: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return rows of many sizes around many centres. Some rows are constant, and some hold what f16 does not."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(shape, generator=g, dtype=torch.float64)
    x = (draw(num_rows, dim) - 0.5) * 10 ** (draw(num_rows, 1) * 12 - 8) + (draw(num_rows, 1) - 0.5) * 900
    x = torch.where(draw(num_rows, 1) < 0.2, x[:, :1], x)
    edges = torch.tensor(F16_EDGES, dtype=torch.float64)[torch.randint(len(F16_EDGES), (num_rows, dim), generator=g)]
    wild = draw(num_rows, 1) < 0.3
    some = draw(num_rows, dim) < torch.where(draw(num_rows, 1) < 0.5, 1.0, 1 / max(dim, 1))
    return torch.where(wild & some, edges, x).to(dtype)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_rows_have_the_reference_s_bytes(call, bits, dtype):
    """The kernel writes the bytes of the reference: to the nearest code, at random by one key, and by a key for each
    row, with other rows after the table's and for any strides."""
    for num_rows, dim in itertools.product((0, 1, 9), (0, 1, 3, 127, 128, 1030)):
        x = rows_to_quantize(num_rows, dim, dtype, num_rows + dim)
        keys = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=torch.Generator().manual_seed(dim))
        for key in (None, torch.tensor(-1234567), keys):
            want = reference.quantize_rows(x, bits, key)
            assert torch.equal(call("quantize_rows", x, bits, key), want), (num_rows, dim, key)
    wide = rows_to_quantize(13, 22, dtype, 1)
    for x in (wide[2:11, 1:20], wide[::3, ::2], wide.t(), wide.flip(1)[:, 3:], wide[:1].expand(5, 22)):
        assert torch.equal(
            call("quantize_rows", x, bits, torch.tensor(5)), reference.quantize_rows(x, bits, torch.tensor(5))
        )
        assert torch.equal(call("quantize_rows", x, bits), reference.quantize_rows(x.contiguous(), bits))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_numbers_come_back_within_a_step(call, bits):
    """The numbers that the codes encode are within half a step of the row's, and at random within a step, in f64."""
    x = torch.randn(20, 33, generator=torch.Generator().manual_seed(bits), dtype=torch.float64).float()
    for key, steps in ((None, 0.5), (torch.tensor(3), 1.0)):
        coded = call("quantize_rows", x, bits, key)
        got = torch.tensor([read(bytes(row.tolist()), bits, 33) for row in coded], dtype=torch.float64)
        step = (x.amax(1) - x.amin(1)).double()[:, None] / (2**bits - 1)
        lost = x.amin(1).abs().double()[:, None] * 2.0**-10
        assert ((got - x.double()).abs() <= step * steps * (1 + 2.0**-10) + lost).all()


def test_what_cannot_be_coded_raises(call):
    """Codes of other bits, tables of whole numbers, and keys that do not fit raise with names."""
    with pytest.raises(ValueError, match="there are no such codes"):
        call("quantize_rows", torch.ones(2, 3), 3, None)
    with pytest.raises(TypeError, match="`table` is not a table"):
        call("quantize_rows", torch.ones(2, 3, dtype=torch.int64), 8, None)
    with pytest.raises(ValueError, match="`key` is not a key"):
        call("quantize_rows", torch.ones(2, 3), 8, torch.arange(3))
