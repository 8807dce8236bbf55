"""top_k gives the reference's bits in every implementation, thread count, instruction set and batch."""

import re
from pathlib import Path

import pytest
import torch
from funcrec.kernels import ops
from hypothesis import given
from hypothesis import strategies as st
from programs.surroundings import on_threads

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES = [(3, 1000, 7, 5), (7, 5000, 64, 10), (1, 70, 16, 300), (13, 257, 1, 1), (0, 10, 3, 2), (2, 0, 3, 2)]


def draw(b, n, d, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(b, d, generator=generator).to(dtype), torch.randn(n, d, generator=generator).to(dtype)


def same(got, want):
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(got, want, strict=True)), (got, want)


@pytest.mark.needs("top_k", without="reference")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_the_references(ask, shape, dtype):
    """Scores and rows equal those of the reference bit for bit, for every dtype. Some sizes fill the blocks, some do
    not."""
    *sizes, k = shape
    queries, items = draw(*sizes, dtype)
    if not sizes[1]:
        # a row without items has no score
        queries[0] = torch.nan
    left_out = torch.arange(-1, 40) % 37, torch.arange(sizes[0] + 1).clamp(max=9) * 4
    for rows, offsets in ((None, None), left_out):
        want = ops.top_k(queries, items, rows, offsets, k, implementation="reference")
        same(ask("top_k", queries, items, rows, offsets, k), want)


@given(st.integers(1, 4), st.integers(1, 90), st.integers(1, 9), st.integers(0, 2**20))
def test_ties_go_to_the_lower_row(b, n, k, seed):
    """Among equal scores, the lower row comes first, as in a stable sort in f64. The scores are whole numbers, so that
    they are exact."""
    generator = torch.Generator().manual_seed(seed)
    queries, items = (torch.randint(-2, 3, (m, 3), generator=generator).float() for m in (b, n))
    scores, order = (queries.double() @ items.double().T).sort(dim=1, descending=True, stable=True)
    got, rows = ops.top_k(queries, items, None, None, k)
    kept = min(k, n)
    assert torch.equal(rows[:, :kept], order[:, :kept]) and torch.equal(got[:, :kept].double(), scores[:, :kept])
    assert (rows[:, kept:] == -1).all() and (got[:, kept:] == -torch.inf).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dim", [1, 6, 64])
def test_quantised_rows_are_read_as_their_values(bits, dim):
    """top_k of quantised rows equals top_k of code · scale + bias, bit for bit."""
    generator = torch.Generator().manual_seed(dim)
    each, num_rows = 8 // bits, 150
    codes = torch.randint(0, 256, (num_rows, -(-dim // each)), generator=generator, dtype=torch.uint8)
    params = torch.randn(num_rows, 2, generator=generator).half()
    table = torch.cat([params.view(torch.uint8), codes], 1)
    unpacked = torch.stack([(codes.int() >> bits * i) & (2**bits - 1) for i in range(each)], 2).flatten(1)[:, :dim]
    values = unpacked.float() * params[:, :1].float() + params[:, 1:].float()
    queries = torch.randn(3, dim, generator=generator)
    want = ops.top_k(queries, values, None, None, 9)
    same(ops.top_k(queries, table, None, None, 9, bits), want)
    same(ops.top_k(queries, table, None, None, 9, bits, implementation="reference"), want)


def test_a_score_depends_on_its_two_vectors_alone():
    """A query's result has the same bits alone, in any batch, among fewer rows, and on any number of threads."""
    queries, items = draw(300, 3000, 24)
    want = ops.top_k(queries, items, None, None, 20)
    for n in (1, 3):
        with on_threads(n):
            same(ops.top_k(queries, items, None, None, 20), want)
            same(ops.top_k(queries[7:8], items, None, None, 20), [x[7:8] for x in want])
    first = ops.top_k(queries, items[: int(want[1].max()) + 1], None, None, 20)
    same(first, want)


def test_instruction_sets_have_the_same_bits(on_every_level):
    """AVX-512, AVX2 and plain x86 give the reference's scores, bit for bit, for one query and for many queries."""
    queries, items = draw(9, 700, 33)
    for dtype in (torch.float32, torch.float64, torch.float16):
        for count in (1, 2, 9):
            args = queries[:count].to(dtype), items.to(dtype), None, None, 6
            want = ops.top_k(*args, implementation="reference")
            for got in on_every_level(lambda args=args: ops.top_k(*args)).values():
                same(got, want)


def test_nothing_outside_is_read():
    """Bags with wild offsets, and rows outside the table, give the reference's result without a read outside."""
    queries, items = draw(3, 20, 4)
    rows = torch.tensor([5, -1, 2**40, 20, 3, 3, 7])
    for offsets in ([0, 3, 2, 99], [-5, 9, 9, 9], [7, 7, 7, 7], [0, 0, 0, 0]):
        bags = torch.tensor(offsets)
        want = ops.top_k(queries, items, rows, bags, 20, implementation="reference")
        same(ops.top_k(queries, items, rows, bags, 20), want)
    assert ops.top_k(queries, items, None, None, 0)[1].shape == (3, 0)


def test_the_memory_of_a_call_is_of_its_answers_order():
    """When all rows are requested on several threads, each thread keeps only the rows of its part. Memory is therefore
    proportional to the result."""
    queries, items = draw(32, 20_000, 8)
    status = Path("/proc/self/status")
    resident = lambda key: int(re.search(rf"{key}:\s+(\d+)", status.read_text())[1]) << 10
    with on_threads(4):
        ops.top_k(queries, items, None, None, 1)
        before = resident("VmRSS")
        # reset the peak
        Path("/proc/self/clear_refs").write_text("5")
        answer = ops.top_k(queries, items, None, None, len(items))
        assert resident("VmHWM") - before < 5 * sum(x.nbytes for x in answer)
    same(answer, ops.top_k(queries, items, None, None, len(items), implementation="reference"))


def hard(kind, n, d, generator):
    """Return a query and items whose sums round, cancel, overflow or vanish, or are nearly equal."""
    query, items = torch.randn(1, d, generator=generator), torch.randn(n, d, generator=generator)
    if kind == "nearly equal":  # the k best differ in their last bits, and the order of a sum decides
        items = items[:1] + torch.randint(-2, 3, (n, d), generator=generator) * 2.0**-23
    elif kind == "ascending":
        items = items[(items @ query[0]).argsort()]
    elif kind == "cancelling":
        items = torch.cat([items * 1e6, (1 - items) * 1e6], 1)[:, :d].contiguous()
        items[:, 1::2] = -items[:, : d - d % 2 : 2] * query[:, : d - d % 2 : 2] / query[:, 1::2]
    elif kind == "large":
        query, items = query * 2e19, items * 1e19
    elif kind == "small":
        query, items = query * 1e-3, items * 1e-38
    elif kind == "of all sizes":
        items = items * 10.0 ** torch.randint(-38, 39, (n, 1), generator=generator)
    elif kind == "some NaN":
        items[torch.randint(0, n, (n // 3,), generator=generator), 0] = torch.nan
        items[torch.randint(0, n, (n // 3,), generator=generator), -1] = torch.inf
    return query, items


KINDS = ("nearly equal", "ascending", "cancelling", "large", "small", "of all sizes", "some NaN")


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_is_left_out_wrongly(kind):
    """For one query, rows that a quick sum tells from the best are never among the best, whatever the numbers."""
    for seed, (n, d, k) in enumerate([(700, 64, 10), (333, 33, 3), (50, 5, 60), (17, 16, 1), (900, 130, 40)]):
        query, items = hard(kind, n, d, torch.Generator().manual_seed(seed))
        queries = torch.cat([query, -query, query * 0])
        for some in (query, queries):
            want = ops.top_k(some, items, None, None, k, implementation="reference")
            same(ops.top_k(some, items, None, None, k), want)
