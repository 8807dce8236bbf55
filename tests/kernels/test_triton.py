"""Triton's lookups and jagged operations equal loops in f64. On the CPU the kernels run in the interpreter of triton.

Calls have features that share a buffer, cut bags, means, weights, strided cotangents and ids far outside their tables.
The padding holds NaN and garbage. Outputs start as NaN. An unwritten element is therefore visible.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    # triton reads this variable when it decorates the kernels
    os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl  # noqa: E402
from funcrec.kernels import triton as kernels  # noqa: E402
from funcrec.kernels.forms import accumulation_dtype  # noqa: E402
from funcrec.kernels.triton import launch  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

F32, F64, F16, BF16, I32, I64 = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64,
)  # fmt: skip
SIZES = (0, 1, 63, 65)


# -- lookups -----------------------------------------------------------------------------------------------------


class Lookup(NamedTuple):
    """A lookup of four features of two dims and two dtypes. Two features share bags, and one is cut. Means and weights
    are mixed."""

    tables: list[Tensor]
    rows: list[Tensor]
    offsets: Tensor
    weights: Tensor
    features: list[int]
    num_bags: int


@pytest.fixture
def lookup_case(ascending, ids):
    def lookup_case(size: int, dtype: torch.dtype, ints: torch.dtype, num_bags: int) -> Lookup:
        torch.manual_seed(size)
        tables = [torch.randn(9, 5).to(dtype), torch.randn(4, 24).to(dtype), torch.randn(6, 5, dtype=F64)]
        padding = min(size, 3)
        offsets = ascending(2 * num_bags, 0, size - padding, ints)
        offsets[0] = 0
        weights = torch.rand(size)
        weights[int(offsets[-1]) :] = torch.nan
        rows = [ids(size, 9, ints), ids(size, 4)]
        features = [0, 0, 0, 0, 0, 0, 0, 1, 1, num_bags, 0, 1, 1, 5, 2, 0, num_bags, 3, 1, 1, 34, 0, 1, 0, 2, 0, 1, 29]
        return Lookup(tables, rows, offsets, weights, features, num_bags)

    return lookup_case


CASES = [
    (0, F32, I64, 0),
    (0, F32, I64, 7),
    (1, BF16, I32, 1),
    (63, F16, I32, 17),
    (65, F32, I64, 17),
    (65, F64, I32, 3),
]


@pytest.mark.parametrize(("size", "dtype", "ints", "num_bags"), CASES)
def test_pooled_lookup(assert_sums, bags, call, lookup_case, size, dtype, ints, num_bags):
    """out[b] is the factored sum of the rows of each feature. Padding and rows outside the table are not read."""
    p = lookup_case(size, dtype, ints, num_bags)
    got = call("pooled_lookup", *p)
    assert got.shape == (num_bags, 39) and got.dtype == F64
    for at in range(0, 28, 7):
        t, r, first, most, mean, weighted, column = p.features[at : at + 7]
        table, rows = p.tables[t].double(), p.rows[r].tolist()
        for b, bag in enumerate(bags(p.offsets.tolist(), first, num_bags, most)):
            read = [i for i in bag if 0 <= rows[i] < len(table)]
            scale = lambda i: (p.weights[i].double() if weighted else 1) / (len(bag) if mean else 1)  # noqa: B023
            terms = [scale(i) * table[rows[i]] for i in read]
            assert_sums(got[b, column : column + table.shape[1]].to(accumulation_dtype(p.tables[t].dtype)), terms)


@pytest.mark.parametrize(("size", "dtype", "ints", "num_bags"), CASES)
def test_pooled_lookup_weights(bags, call, lookup_case, size, dtype, ints, num_bags):
    """d_weights[i] is the sum of ⟨row, d_out⟩ over the weighted features that hold id i, and 0 for all other ids."""
    p = lookup_case(size, dtype, ints, num_bags)
    d = torch.randn(num_bags, 78)[:, ::2]
    got = call("pooled_lookup_weights", d, *p[:-1])
    want, mass = torch.zeros(2, size, dtype=F64)
    for at in range(0, 28, 7):
        t, r, first, most, mean, weighted, column = p.features[at : at + 7]
        table, rows = p.tables[t].double(), p.rows[r].tolist()
        for b, bag in enumerate(bags(p.offsets.tolist(), first, num_bags, most)):
            for i in bag:
                if weighted and 0 <= rows[i] < len(table):
                    terms = table[rows[i]] * d[b, column : column + table.shape[1]] / (len(bag) if mean else 1)
                    want[i] += terms.sum()
                    mass[i] += terms.abs().sum()
    assert got.dtype == F32 and ((got - want).abs() <= 30 * torch.finfo(F32).eps * mass).all()


def test_a_bag_is_summed_in_order(call):
    """A bag's terms are added in order, with the bits of a loop, even for rows wider than a tile."""
    table, rows = torch.randn(20, 1030), torch.randint(0, 20, (40,))
    got = call("pooled_lookup", [table], [rows], torch.tensor([0, 33, 40]), None, [0, 0, 0, 0, 0, 0, 0], 2)
    for b, bag in enumerate([range(33), range(33, 40)]):
        total = torch.zeros(1030)
        for i in bag:
            total += table[rows[i]]
        assert torch.equal(got[b], total)


def test_wild_offsets_are_clamped(call):
    """Offsets are clamped into the buffer. A bag that ends before its start is empty."""
    table, wild = torch.arange(1.0, 5.0)[:, None], torch.tensor([-5, 3, 2**40, 2, 1, -(2**40), 9])
    got = call("pooled_lookup", [table], [torch.tensor([0, 1, 2, 3])], wild, None, [0, 0, 0, 0, 0, 0, 0], 6)
    assert got[:, 0].tolist() == [6, 4, 0, 0, 0, 10]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=str)
def test_rows_are_gathered_and_scattered(call, ids, size, dtype):
    """gather_rows is table[rows], with zeros outside. scatter_rows_ writes only the rows before count, rounded."""
    torch.manual_seed(size)
    table, rows = torch.randn(70, 5).to(dtype), ids(size, 70, I32)
    got = call("gather_rows", table, rows)
    known = (rows >= 0) & (rows < 70)
    want = torch.where(known[:, None], table[torch.where(known, rows, 0)].to(got.dtype), 0)
    assert torch.equal(got, want) and got.dtype == accumulation_dtype(dtype)
    count, mine = size // 2, table.clone().to(DEVICE)
    chosen, new = torch.randperm(70)[:size], torch.randn(size, 5, dtype=F64)
    chosen[count:], new[count:] = -(2**40), torch.nan
    call("scatter_rows_", mine, chosen, torch.tensor(count), new)
    table[chosen[:count]] = new[:count].to(dtype)
    assert torch.equal(mine.cpu(), table)


# -- jagged buffers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [F32, F16, I32, torch.bool], ids=str)
def test_take_ranges(call, n, dtype):
    """Range b is values[starts[b] : starts[b] + lengths[b]], bit for bit. Positions outside the buffer give zeros. The
    elements after the last range are zeros."""
    torch.manual_seed(n)
    values = torch.randint(0, 2**15, (n, 2, 3)).to(dtype)
    starts, lengths = torch.randint(-2, n + 2, (6,)), torch.tensor([0, 3, 5, 0, 1, 4], dtype=I32)
    got, offsets = call("take_ranges", values, starts, lengths, 15)
    places = [s + i for s, length in zip(starts.tolist(), lengths.tolist()) for i in range(length)]
    zero = torch.zeros(2, 3, dtype=dtype)
    want = [values[p] if 0 <= p < n else zero for p in places] + [zero] * 2
    assert torch.equal(got, torch.stack(want)) and offsets.tolist() == [0, 0, 3, 8, 8, 9, 13]
    got, offsets = call("take_ranges", values, starts[:0], lengths[:0], 4)
    assert got.shape == (4, 2, 3) and not got.any() and offsets.tolist() == [0]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("ints", "num_shards", "block"), [(I32, 3, 4), (I64, 300, 1)])
def test_bucketize(ascending, bags, call, ids, n, ints, num_shards, block):
    """Ids are grouped by (owner, bag) in their order, as local rows of their owner. Ids without an owner, and padding,
    are left out."""
    torch.manual_seed(n)
    rows, offsets, weights = (
        ids(n, 12, ints),
        ascending(5, n // 2 and 1, n - 2 * (n > 1), ints),
        torch.rand(n, dtype=F64),
    )
    out, lengths, scales, positions = call("bucketize", rows, offsets, weights, num_shards, block)
    found = [(b, i, r) for b, bag in enumerate(bags(offsets.tolist(), 0, 5, 0)) for i in bag for r in [int(rows[i])]]
    groups = [[] for _ in range(5 * num_shards)]
    for b, i, r in found:
        if 0 <= r < num_shards * block:
            groups[r // block * 5 + b].append(i)
    order = [i for g in groups for i in g]
    assert lengths.tolist() == [len(g) for g in groups] and lengths.dtype == I64 and out.dtype == ints
    assert out.tolist() == [int(rows[i]) % block for i in order] + [0] * (n - len(order))
    assert scales.tolist() == [float(weights[i]) for i in order] + [0] * (n - len(order))
    assert positions.tolist() == [order.index(i) if i in order else -1 for i in range(n)]
    plain = call("bucketize", rows, offsets, None, num_shards, block)
    assert plain[2].shape == (0,) and all(torch.equal(plain[k], x) for k, x in enumerate((out, lengths)))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_padded_and_back(ascending, bags, call, n, dtype):
    """to_padded cuts and fills bags. from_padded writes the bags back. With fill 0 each function is the other's
    transpose."""
    torch.manual_seed(n)
    values, offsets = torch.randn(n, 3).to(dtype), ascending(4, 0, max(n - 2, 0), I32)
    values[int(offsets[-1]) :] = torch.nan
    got = call("to_padded", values, offsets, 5, -1.5)
    back = call("from_padded", got, offsets, n)
    want, returned = torch.full((4, 5, 3), -1.5, dtype=dtype), torch.zeros(n, 3, dtype=dtype)
    for b, bag in enumerate(bags(offsets.tolist(), 0, 4, 5)):
        want[b, : len(bag)] = values[bag.start : bag.stop]
        returned[bag.start : bag.stop] = values[bag.start : bag.stop]
    assert torch.equal(got, want) and torch.equal(back, returned)
    assert call("to_padded", values, offsets[:1], 5, 0.0).shape == (0, 5, 3)
    assert call("from_padded", got[:, :0], offsets, n).eq(0).all()


# -- on the host --------------------------------------------------------------------------------------------------


def test_integers_travel_as_arguments():
    """pack, and a kernel's arguments, bring any number of integers to the device unchanged, up to addresses' size."""
    for n in (0, 1, launch.PACKED, 3 * launch.PACKED + 1):
        values = [(2**58 - 1) // (i + 1) if i % 3 else i for i in range(n)]
        assert launch.pack(values, DEVICE)[:n].tolist() == launch.carried(values, DEVICE)[:n].tolist() == values


def test_nothing_is_read_on_the_host(call, lookup_case, no_host_reads):
    """No operation reads a tensor's value on the host. Each operation can therefore be part of a CUDA graph."""
    p = lookup_case(20, F32, I64, 4)
    with no_host_reads():
        call("pooled_lookup", *p)
        call("pooled_lookup_weights", torch.zeros(4, 39), *p[:-1])
        call("bucketize", p.rows[0], p.offsets, p.weights, 2, 5)
        call("owner_blocks", p.rows[0], p.offsets, [0, 2, 9, 5, 2, 1, 0, 0, 3], [0, 0], 4, 2, 6, False, True)
        call("take_ranges", p.weights, p.offsets[:-1], p.offsets.diff(), 9)


def test_tensors_on_the_cpu_are_refused(monkeypatch):
    """Without the interpreter, tensors on the CPU raise an error that says what to do."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(
        ValueError, match=r"(?s)tensors are on the CPU.*need  tensors on a CUDA device.*TRITON_INTERPRET=1"
    ):
        kernels.gather_rows(torch.zeros(3, 2), torch.tensor([0]))


COMPILED = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = get_current_stream = lambda self, *_: 0

triton.runtime.driver.set_active(Hopper())
from funcrec.kernels import triton as kernels
from funcrec.kernels.triton import launch
launch.INTERPRETED, run, wide = True, JITFunction.run, set()

def compile_only(self, *args, grid, warmup, **options):
    made = run(self, *args, grid=grid, warmup=True, **options)
    if ".v4" in made.asm["ptx"]:
        wide.add(self.fn.__name__)
    if "0d3FDB333333333333" in made.asm["ptx"]:
        wide.add("0.425")
    if self.fn.__name__ == "_products" and "fma.rn.f" in made.asm["ptx"] and "mul.f" not in made.asm["ptx"]:
        wide.add("one_rounding")

JITFunction.run = compile_only
tables, rows = [torch.zeros(32, 64)] * 2, [torch.zeros(256, dtype=torch.int64)]
offsets = torch.zeros(33, dtype=torch.int32)
weights, d = torch.rand(256), [torch.zeros(16, 128)]
kernels.invariant_bmm(d[0][None], d[0].T[None]), kernels.invariant_sum(d[0][None])
features = [0, 0, 0, 0, 0, 1, 0, 1, 0, 16, 2, 1, 0, 64]
segments = [0, 0, 0, 0, 0, 0, 16, 0, 1, 0, 1, 0, 64, 0, 0, 16, 16, 2, 0, -1, 1, 0, 64, 0, -1, 0, 16, 0, 0, -1]
kernels.pooled_lookup(tables, rows, offsets, weights, features, 16)
kernels.pooled_lookup_weights(d[0], tables, rows, offsets, weights, features)
keys = None, offsets[0].long(), rows[0][:32]
for bits, dtype, key in zip((8, 4, 2), (torch.float32, torch.bfloat16, torch.float64), keys):
    codes = [torch.zeros(32, 4 + 8 * bits // 8, dtype=torch.uint8)] * 2
    kernels.quantized_rows(codes[0], rows[0], bits, 8)
    kernels.quantize_rows(torch.zeros(32, 24, dtype=dtype), bits, key)
    kernels.quantize_rows(torch.zeros(32, 1030, dtype=dtype).T[:32], bits, key)
    kernels.quantized_lookup(codes, rows, offsets, weights, [*features[:13], 8], 16, [bits] * 2, [8, 8])
kernels.scatter_rows_(tables[0], rows[0], torch.tensor(3), kernels.gather_rows(tables[0], rows[0]))
kernels.expand(d, rows, [offsets], [weights], segments, [32, 64, 32, 64])
kernels.coalesce(d, rows, [offsets], [weights], segments, [32, 64, 32, 64])
number = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0)
short = [t.bfloat16() for t in tables]
ids = rows, [offsets], [weights], segments
draws, begins = torch.zeros(2, 2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
kernels.fused_update_(short, [torch.zeros(32)] * 2, d, *ids, *number, draws, "rowwise_adagrad", [1e-8, 0.1, 0.0, 0.0])
kernels.fused_update_(tables, [torch.zeros(32)] * 2, [torch.zeros(16, 192)], *ids, *number, None,
    "rowwise_adagrad", [1e-8, 0.0, 0.0, 0.0], begins, [128, 128])
kernels.fused_update_(tables, [torch.zeros(32, 64)] * 4, d, *ids, *number, None, "adam", [0.9, 0.999, 1e-8, 0.0])
counts = torch.ones(3, dtype=torch.int64)
kernels.take_ranges(weights, counts, counts, 8)
kernels.bucketize(rows[0], offsets, weights, 2, 5)
kernels.from_padded(kernels.to_padded(d[0], counts, 6, 0.5), counts, 50)
for dtype, is_biased, how in (
    (torch.float32, True, (True, True)), (torch.bfloat16, False, (False, True)), (torch.float64, True, (True, False))
):
    x, at, rest = torch.zeros(40, 2, 16, dtype=dtype), torch.tensor([0, 40]), [None] * 5
    if is_biased:
        rest = [torch.zeros(2, 9, dtype=dtype), torch.zeros(1, 14), *[torch.arange(40)] * 2, torch.tensor([3])]
    given = x, x, x, at, at, *rest, 0.5, 3.0, *how
    out = kernels.jagged_attention(*given)
    kernels.jagged_attention_transpose(x, *out, *given)
entries, number = torch.zeros(256, 2, dtype=torch.int64), torch.tensor(200)
tags = torch.zeros(256, dtype=torch.uint8)
kernels.find_ids(tags, entries, rows[0], number, 1, 2**62)
launch.carried([1, 2], tags.device)
how, state = [3, 9, 2, 2**52, 1, 2**62], [tags, entries, number, tags]
found = kernels.admit_columns(state * 2, [entries[:, 0]] * 2, rows, [offsets], how * 2, [0, 0, 0, 9, 2, 1, 0, 9, 9, 0])
kernels.settle_columns_(state * 2, rows, [offsets], found, how * 2, [0, 0, 0, 9, 2, 1, 0, 9, 9, 0])
for kind, dtype in ((0, torch.float32), (1, torch.bfloat16), (2, torch.float16), (3, torch.float64)):
    table, places = torch.zeros(32, 64, dtype=dtype), [0, kind, 0, 64, 0, 0, 0, 1, 0, 0]
    kernels.draw_rows_([table], [table[:1]], rows[0], rows[0], counts, counts, places, [0.1])
    if kind < 2:
        kernels.initial_rows(number, rows[0], 64, kind, 0.1, dtype)
print(*sorted(wide))
"""


def test_kernels_call_no_function_that_the_interpreter_may_lack():
    """No kernel calls tl.sum, tl.zeros or another function that triton itself wrote for `jit`: it cannot be interpreted
    where triton was imported before TRITON_INTERPRET was set."""
    files = sorted(Path(kernels.__file__).parent.glob("*.py"))
    own = [name for name, x in vars(tl).items() if isinstance(x, (JITFunction, InterpretedFunction))]
    assert {"sum", "max", "zeros", "cdiv"} <= set(own)
    called = {p.name: re.findall(rf"\btl\.(?:{'|'.join(own)})\(", p.read_text()) for p in files}
    assert len(files) > 8 and {name: found for name, found in called.items() if found} == {}


def test_kernels_compile_for_hopper(tmp_path):
    """Every kernel compiles for sm_90 without a device. Kernels that move rows move 16 bytes at a time. A kernel that
    draws normal numbers compares f64 numbers with 0.425, not with the nearest f32. Products of one order round each
    multiply-add once."""
    keep = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env=keep | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    moves = {"_pool", "_gather", "_scatter", "_chunk_sums", "_coalesce", "_update", "_expand", "0.425", "one_rounding"}
    assert moves <= set(run.stdout.split())
