"""Quantised rows: their error bounds, their sums, and refused inputs, against loops over bytes in f64.

Shapes: B bags, N ids, R rows, D dim, S bytes. L = 2^bits - 1.
"""

import itertools
import struct

import pytest
import torch
from funcrec.kernels import cpp, ops, reference
from funcrec.kernels.forms import CODE_BITS, row_bytes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from funcrec.testing import assert_trees_close

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
DIMS = (1, 2, 3, 4, 5, 7, 9, 16, 17, 31, 33, 64, 65, 100, 128, 130, 257)
KEY = torch.tensor(1234567)
HALF = 2.0**-11  # the relative error of f16's normal numbers


def noise(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def read(row: bytes, bits: int, dim: int) -> list[float]:
    """Return the values of a row, computed by a loop over the row's bytes."""
    scale, bias = struct.unpack("<2e", row[:4])
    code = lambda c: row[4 + c * bits // 8] >> c * bits % 8 & (2**bits - 1)
    return [code(c) * scale + bias for c in range(dim)]


def read_all(table, bits, dim):
    """Return the values f64[R, D] of all rows."""
    return torch.tensor([read(bytes(row.tolist()), bits, dim) for row in table], dtype=F64).view(-1, dim)


def spans(dim: int, dtype=F32):
    """Return rows f[R, D] of many sizes around many centres, all within the range of f16."""
    sizes = torch.tensor([1e-9, 1e-7, 1e-5, 1e-3, 0.02, 1, 40, 3e3], dtype=F64)
    centres = torch.tensor([0, 1, -1, 30, -777], dtype=F64)
    at = [s * torch.cat([torch.zeros(1, dtype=F64), c[None]]).max() if s < 0 else c for s in sizes for c in centres]
    scales = sizes.repeat_interleave(len(centres))
    return (noise(len(at), dim) * scales[:, None] + torch.stack(at)[:, None]).to(dtype)


def bound(x, bits):
    """Return the contract's error bound, f64[R, 1]: half a step, or the rounding of the least number to f16. A step
    below the normal numbers of f16 adds L times half of the least number of f16."""
    most = 2**bits - 1
    low, high = x.amin(1, True).double(), x.amax(1, True).double()
    step = (high - low) / most
    tiny = torch.where(step < 2.0**-14, most * 2.0**-25, 0)
    lost = torch.maximum(low.abs() * HALF, torch.tensor(2.0**-25))
    return torch.maximum(step * (0.5 + most * 2.0**-23) + lost / most, lost) * (1 + HALF) + tiny


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64])
def test_a_row_is_within_its_bound(bits, dtype):
    """Each number is read within half a step, or within the f16 rounding of the least number of the row."""
    for dim in DIMS:
        x = spans(dim, dtype)
        got = read_all(cpp.quantize_rows(x, bits), bits, dim)
        assert ((got - x.double()).abs() <= bound(x.to(F32), bits)).all(), dim


@pytest.mark.parametrize("bits", CODE_BITS)
def test_both_implementations_write_the_same_bytes(bits):
    """The C++ kernel writes the bytes of the reference, rounding to nearest and at random, for every dtype and any
    numbers."""
    for dim, dtype in itertools.product((0, *DIMS), (F32, F16, BF16, F64)):
        x = torch.cat([spans(dim, dtype), outside(dim).to(dtype)])
        for key in (None, KEY):
            assert torch.equal(cpp.quantize_rows(x, bits, key), reference.quantize_rows(x, bits, key)), (dim, dtype)


def outside(dim: int):
    """Return rows outside the range of f16. With more than one column, some rows have only one number outside the
    range."""
    wild = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.8e7, -65536.0, 1e38, -1e38])
    rows = wild[:, None].expand(-1, dim).clone()
    mixed = noise(5, dim, dtype=F32)
    mixed[:, dim // 2 :][:, :1] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.8e7, -65536.0])[:, None]
    return torch.cat([rows, mixed]) if dim > 1 else rows


@pytest.mark.parametrize("bits", CODE_BITS)
def test_what_f16_does_not_hold_is_nan_in_all_columns(bits):
    """NaN, infinities, a least number above 65504 and a range above 65504 · L make the whole row NaN. The greatest
    numbers that fit, constants and zeros are exact."""
    for dim, key in itertools.product((2, 5, 64), (None, KEY)):
        rows = torch.arange(13)
        assert ops.quantized_rows(ops.quantize_rows(outside(dim), bits, key), rows[:12], bits, dim).isnan().all()
        most = 2**bits - 1
        fit = torch.zeros(5, dim)
        fit[0], fit[1], fit[2, 0], fit[3, 0], fit[4] = 65504.0, -65504.0, 65504.0 * most, 2.0**-24, -0.5
        got = ops.quantized_rows(ops.quantize_rows(fit, bits, key), rows[:5], bits, dim)
        assert torch.equal(got[[0, 1, 2, 4]], fit[[0, 1, 2, 4]]) and (got[3] - fit[3]).abs().max() <= 2.0**-24


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("dtype", [F32, F16])
def test_bytes_are_fbgemms(bits, dtype):
    """For finite rows and dims that FBGEMM supports, scale, bias and codes equal the bits of FBGEMM's operator."""
    pytest.importorskip("fbgemm_gpu")
    theirs = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf
    for dim in (8, 16, 24, 64, 72, 136):
        x = torch.cat([spans(dim, dtype), torch.full((2, dim), 3.1, dtype=dtype), torch.zeros(1, dim, dtype=dtype)])
        x[-2] *= -1
        # adding 0 removes the sign of zeros
        x += 0
        ours = cpp.quantize_rows(x, bits)
        assert torch.equal(ours.roll(-4, 1), theirs(x, bits)), dim
        both = torch.cat([x, outside(dim).to(dtype)])
        assert torch.equal(ops.quantize_rows(both, bits, implementation="fbgemm"), cpp.quantize_rows(both, bits))
        ids = torch.tensor([0, -1, 7, 2**40, 40])
        got = ops.quantized_rows(ours, ids, bits, dim, implementation="fbgemm")
        assert_trees_close(got, ops.quantized_rows(ours, ids, bits, dim), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dim", [4, 16, 64, 132])
def test_a_lookup_is_fbgemms(dim):
    """For dims that the lookup of FBGEMM supports, its sums of the same rows equal ours within the rounding of f32."""
    pytest.importorskip("fbgemm_gpu")
    tables, bits, plain = mixed_tables(dim)
    tables, bits, plain = tables[:5], bits[:5], plain[:5]
    # FBGEMM weights codes and biases separately
    parts = [(x - x.amin(1, True)).double() + x.abs().amax() for x in plain]
    ids, offsets = torch.randint(-2, 53, (90,)), torch.tensor([3, 9, 9, 30, 31, 88])
    weights = noise(90, dtype=F32, seed=1)
    for weighted, mean in itertools.product((False, True), repeat=2):
        features = [ops.Feature(t, 0, 0, t % 3, mean, weighted, t * dim) for t in range(5)]
        args = [ids], offsets, weights, features, 5
        got = ops.quantized_lookup(tables, *args, bits, [dim] * 5, implementation="fbgemm")
        size = ops.pooled_lookup(parts, *args[:2], weights.abs().double(), *args[3:])
        error = (got - ops.quantized_lookup(tables, *args, bits, [dim] * 5)).abs()
        assert (error <= 100 * torch.finfo(F32).eps * size).all()


def test_instruction_sets_have_the_same_bits(on_every_level):
    """AVX-512, AVX2 and plain x86 write the rows of the reference, and sum the rows to the reference's bits."""
    for dim in DIMS:
        tables, bits, _ = mixed_tables(dim)
        ids = torch.randint(-2, 53, (90,), generator=torch.Generator().manual_seed(dim))
        offsets, weights = torch.arange(0, 91, 3), noise(90, dtype=F32, seed=1)
        features = [ops.Feature(t, 0, t * 5, 3, t % 2 == 1, t > 2, t * dim) for t in range(6)]
        args = tables, [ids], offsets, weights, features, 5, bits, [dim] * 6
        x = spans(dim)
        want = (
            ops.quantized_lookup(*args, implementation="reference"),
            *(reference.quantize_rows(x, b) for b in CODE_BITS),
        )
        run = lambda args=args, x=x: (ops.quantized_lookup(*args), *(cpp.quantize_rows(x, b) for b in CODE_BITS))
        found = on_every_level(run)
        for level, got in found.items():
            assert all(map(torch.equal, got, want)), (level, dim)


class Seen(TorchDispatchMode):
    """A mode that records the names of the called operators."""

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        self.names = [*getattr(self, "names", []), call.__name__]
        return call(*args, **(kwargs or {}))


def test_what_looks_on_sees_the_operator():
    """A call that bypasses the dispatcher gives the operator's bits. Modes, the profiler and tracers see the operator.
    Derivatives raise."""
    tables, bits, _ = mixed_tables(8)
    features = [ops.Feature(t, 0, t * 5, 0, False, False, t * 8) for t in range(6)]
    call = lambda *t: ops.quantized_lookup(t, [torch.arange(30)], torch.arange(31), None, features, 5, bits, [8] * 6)
    want = call(*tables)
    with Seen() as seen:
        assert torch.equal(call(*tables), want)
    assert "quantized_lookup.default" in seen.names
    with torch.profiler.profile() as profile:
        call(*tables)
    assert any("quantized_lookup" in e.key for e in profile.key_averages())
    for mode in ("real", "fake"):
        graph = make_fx(call, tracing_mode=mode)(*tables)
        assert "quantized_lookup" in graph.code and torch.equal(graph(*tables), want)
    with pytest.raises(TypeError, match="derivative"):
        tracked = [*tables[:3], *(t.clone().requires_grad_() for t in tables[3:])]
        ops.quantized_lookup(
            tracked, [torch.arange(30)], torch.arange(31), None, features, 5, bits, [8] * 6, implementation="cpp"
        )


@pytest.mark.parametrize("bits", CODE_BITS)
def test_rounding_at_random_is_unbiased(bits):
    """Over many keys, the mean of the read values is the number itself. This includes the least number, which f16
    rounds."""
    x = torch.cat([noise(1, 7, dtype=F32) * 0.1 + 0.3, noise(1, 7, seed=3, dtype=F32)])
    n = 2000
    keys = torch.arange(n) * 7919 + 11
    reads = torch.stack([ops.quantized_rows(ops.quantize_rows(x, bits, k), torch.arange(2), bits, 7) for k in keys])
    assert (reads - x).abs().max() <= (reads.amax((0, 2)) - reads.amin((0, 2))).max() / (2**bits - 1) * 1.01
    error = (reads.double() - x.double()).mean(0)
    assert (error.abs() <= 4.5 * reads.double().std(0) / n**0.5 + 1e-6 * x.abs()).all()
    # the values differ between keys
    assert reads.std(0).max() > 0


def test_random_bits_are_of_key_row_and_column():
    """Rounding at random gives the same bytes in a repeated call, on any number of threads, and for a part of the
    rows."""
    x, before = noise(3000, 33, dtype=F32), torch.get_num_threads()
    whole = cpp.quantize_rows(x, 4, KEY)
    assert torch.equal(whole[:100], cpp.quantize_rows(x[:100], 4, KEY))
    assert not torch.equal(whole, cpp.quantize_rows(x, 4, KEY + 1))
    try:
        torch.set_num_threads(3)
        assert torch.equal(whole, cpp.quantize_rows(x, 4, KEY))
        assert torch.equal(cpp.quantize_rows(x, 4), reference.quantize_rows(x, 4))
    finally:
        torch.set_num_threads(before)


# -- lookups -----------------------------------------------------------------------------------------------------


def mixed_tables(dim: int, num_rows: int = 50):
    """Return (tables, bits, the values of each table), with tables of every kind for one call."""
    x = noise(6, num_rows, dim, dtype=F32)
    tables = [cpp.quantize_rows(x[i], b) for i, b in enumerate(CODE_BITS)] + [x[3], x[4].half(), x[5].bfloat16()]
    bits = [*CODE_BITS, 32, 16, 16]
    plain = [read_all(t, b, dim).to(F32) if b < 16 else t for t, b in zip(tables, bits, strict=True)]
    return tables, bits, plain


@pytest.mark.parametrize("dim", DIMS)
def test_a_lookup_is_that_of_what_the_rows_stand_for(dim):
    """Quantised lookups have the bits of `pooled_lookup` on f32 tables of the same values, and the f64 sum within f32
    rounding. This covers sums, means, weights, cut bags, ids of both widths, and garbage in the padding."""
    tables, bits, plain = mixed_tables(dim)
    generator = torch.Generator().manual_seed(dim)
    ids = torch.randint(-2, 53, (90,), generator=generator)
    offsets = torch.randint(3, 87, (6 * 5 + 1,), generator=generator).sort().values
    weights = noise(90, dtype=F32, seed=1)
    ids[: offsets[0]] = ids[offsets[-1] :] = 2**31 - 1
    weights[: offsets[0]] = weights[offsets[-1] :] = torch.nan
    order = (3, 0, 4, 2, 1, 5)
    for (weighted, mean), longest in itertools.product(itertools.product((False, True), repeat=2), (0, 3)):
        features = [ops.Feature(t, 0, t * 5, longest, mean, weighted, c * dim) for c, t in enumerate(order)]
        for narrow in (False, True):
            own, at = (ids.int(), offsets.int()) if narrow else (ids, offsets)
            args = (tables, [own], at, weights, features, 5, bits, [dim] * 6)
            got = ops.quantized_lookup(*args)
            assert torch.equal(got, ops.pooled_lookup(plain, [own], at, weights, features, 5))
        want = [x.double() for x in plain], [ids], offsets, weights.double(), features, 5
        size = ops.pooled_lookup([x.abs() for x in want[0]], *want[1:3], want[3].abs(), *want[4:])
        error = (got - ops.pooled_lookup(*want)).abs()
        assert (error <= 100 * torch.finfo(F32).eps * size).all()
        assert_trees_close(ops.quantized_lookup(*args, implementation="reference"), got, rtol=1e-5, atol=1e-5)


def test_weights_of_a_quantised_lookup_have_a_derivative():
    """A quantised lookup is differentiable in its weights. The gradient has the dot products of rows and cotangents."""
    (table,), dim = [cpp.quantize_rows(noise(9, 5), 8)], 5
    ids, offsets, weights = torch.tensor([1, 2, 8, 9, 0]), torch.tensor([0, 2, 4]), noise(5, dtype=F32)
    look = lambda w: ops.quantized_lookup(
        [table], [ids], offsets, w, [ops.Feature(0, 0, 0, 0, False, True, 0)], 2, [8], [5]
    )
    d = noise(2, dim, dtype=F32, seed=2)
    (grad,) = torch.func.vjp(look, weights)[1](d)
    rows = ops.quantized_rows(table, ids, 8, 5)
    want = [rows[0] @ d[0], rows[1] @ d[0], rows[2] @ d[1], torch.tensor(0.0), torch.tensor(0.0)]
    assert_trees_close(grad, torch.stack(want), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", CODE_BITS)
def test_rows_outside_are_zeros(bits):
    """quantized_rows returns the rows of the table, read from their bytes, and zeros for ids outside the table or for
    an empty table."""
    for dim in DIMS:
        table = cpp.quantize_rows(noise(20, dim, dtype=F32), bits)
        ids = torch.tensor([0, 19, -1, 20, 2**40, -(2**63), 7, 7])
        want = read_all(table, bits, dim).to(F32)[ids.clamp(0, 19)] * ((ids >= 0) & (ids < 20))[:, None]
        for name in ("cpp", "reference"):
            assert torch.equal(ops.quantized_rows(table, ids, bits, dim, implementation=name), want)
            assert torch.equal(ops.quantized_rows(table[:0], ids, bits, dim, implementation=name), torch.zeros(8, dim))


@pytest.mark.parametrize("implementation", ["cpp", "reference"])
def test_nothing_to_look_up(implementation):
    """Lookups without bags, ids, tables or rows return zeros, or empty tensors."""
    table, none, one = cpp.quantize_rows(noise(3, 6), 4), torch.zeros(0, dtype=torch.int64), ops.Feature(*[0] * 7)
    look = lambda *args: ops.quantized_lookup(*args, implementation=implementation)
    assert look([table], [none], torch.zeros(1, dtype=torch.int64), None, [one], 0, [4], [6]).shape == (0, 6)
    assert look([], [], torch.zeros(3, dtype=torch.int64), None, [], 2, [], []).shape == (2, 0)
    empty = look([table[:0]], [torch.tensor([0, 1])], torch.tensor([0, 2, 2]), None, [one], 2, [4], [6])
    assert torch.equal(empty, torch.zeros(2, 6))
    assert ops.quantize_rows(torch.zeros(0, 6), 4, implementation=implementation).shape == (0, row_bytes(4, 6))


TABLE, IDS, OFFSETS = torch.zeros(3, 9, dtype=torch.uint8), torch.tensor([0, 1]), torch.tensor([0, 1, 2])
one = lambda **changed: {
    "tables": [TABLE], "rows": [IDS], "offsets": OFFSETS, "weights": None, "features": [ops.Feature(*[0] * 7)],
    "num_bags": 2, "bits": [8], "dims": [5], **changed,
}  # fmt: skip
e = lambda call, said, kind=ValueError, **given: pytest.param(call, given, kind, said, id=f"{call}-{said}-{len(given)}")


@pytest.mark.parametrize(
    ("call", "given", "kind", "said"),
    [
        e("quantized_lookup", "got   torch.uint8.*need  u8.R, 8.", **one(dims=[4])),
        e("quantized_lookup", "need  u8.R, 7.", **one(bits=[4])),
        e("quantized_lookup", "need  torch.float32", TypeError, **one(bits=[32])),
        e("quantized_lookup", "bits in .2, 4, 8, 16, 32.", **one(bits=[3])),
        e("quantized_lookup", "one for each of 1 tables", **one(bits=[8, 8])),
        e("quantized_lookup", "float32.3, 9.*need  u8", TypeError, **one(tables=[TABLE.float()])),
        e("quantized_lookup", "float64", TypeError, **one(tables=[torch.zeros(3, 5, dtype=F64)], bits=[32])),
        e("quantized_lookup", "weights", **one(features=[ops.Feature(0, 0, 0, 0, False, True, 0)])),
        e("quantized_lookup", "boundaries", **one(num_bags=3)),
        e("quantized_lookup", "feature 0", **one(features=[ops.Feature(1, 0, 0, 0, False, False, 0)])),
        e("quantized_lookup", "contiguous", **one(tables=[torch.zeros(9, 3, dtype=torch.uint8).t()])),
        e("quantized_rows", "need  u8.R, 8.", table=TABLE, rows=IDS, bits=8, dim=4),
        e("quantized_rows", "got .*float32", TypeError, table=TABLE, rows=IDS.float(), bits=8, dim=5),
        e("quantize_rows", "one of .8, 4, 2.", table=TABLE.float(), bits=16),
        e("quantize_rows", "uint8", TypeError, table=TABLE, bits=8),
        e("quantize_rows", "`key` is not a key", TypeError, table=TABLE.float(), bits=8, key=torch.zeros(2)),
        e("quantize_rows", "a dim that 2 divides", table=TABLE.float(), bits=8, implementation="fbgemm"),
        e("quantize_rows", "takes no key", table=TABLE[:, :8].float(), bits=8, key=KEY, implementation="fbgemm"),
        e("quantize_rows", "bfloat16", TypeError, table=TABLE.bfloat16(), bits=8, implementation="fbgemm"),
        e("quantized_rows", "a dim that 2 divides", table=TABLE, rows=IDS, bits=4, dim=9, implementation="fbgemm"),
        e(
            "quantized_lookup",
            "bfloat16",
            TypeError,
            implementation="fbgemm",
            **one(tables=[torch.zeros(3, 5, dtype=BF16)], bits=[16]),
        ),
        e("quantize_rows", "no derivative", TypeError, table=torch.zeros(3, 2, requires_grad=True), bits=8),
    ],
)
def test_what_does_not_fit_is_refused(call, given, kind, said):
    """Rows whose width does not fit bits and dim raise, and so do other dtypes, derivatives of codes, and calls that
    FBGEMM cannot run."""
    if "implementation" in given:
        pytest.importorskip("fbgemm_gpu")
    with pytest.raises(kind, match=f"(?s)funcrec.kernels.*{said}") as error:
        getattr(ops, call)(**given)
    assert [line.split()[0] for line in str(error.value).splitlines()[1:]][:2] == ["got", "need"]
