"""Each operation of funcrec.kernels, in every implementation, equals a loop over Python's numbers in f64.

Tables and gradients are multiples of 1/4, and weights of 1/64. Sums of their products are therefore exact in f32.
Results must agree to the last bit. Only the divisions of means may round. Outputs start as NaN (tests/conftest.py). An
unwritten element is therefore visible. Shapes: B bags, N ids, K entries, R rows, D dim.
"""

import itertools
from typing import NamedTuple

import pytest
import torch
from funcrec.kernels import ops
from funcrec.kernels.forms import capacity_of
from torch import Tensor

from funcrec.testing import assert_trees_close

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
I32, I64 = torch.int32, torch.int64
SIZES, INTS = [0, 1, 63, 65], [I64, I32]
# rows outside every table, of which i32 holds the first three
OUTSIDE = [-1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**40]


# -- values ------------------------------------------------------------------------------------------------------


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def floats(*shape: int, dtype=F32, seed=0, unit=4, most=4) -> Tensor:
    """Return random multiples of 1/unit in [-most, most]."""
    return (torch.randint(-most * unit, most * unit + 1, shape, generator=generator(seed)) / unit).to(dtype)


def rows_of(size: int, num_rows: int, *, dtype=I64, seed=1) -> Tensor:
    """Return random rows with many duplicates. Every fifth row is outside the table."""
    rows = torch.randint(0, max(num_rows, 1), (size,), generator=generator(seed))
    wild = torch.tensor([num_rows, *OUTSIDE[: 3 if dtype == I32 else None]])
    place = torch.arange(size)
    return torch.where((place % 5 == 4) | (num_rows == 0), wild[(place // 5) % len(wild)], rows).to(dtype)


def bounds_of(size: int, num_bags: int, dtype=I64, seed=2) -> Tensor:
    """Return random offsets of ragged bags, some of them empty, with padding before and after the bags."""
    used = max(size - 3, 0)
    return torch.randint(min(1, used), used + 1, (num_bags + 1,), generator=generator(seed)).sort().values.to(dtype)


def garbage(x: Tensor, offsets: Tensor) -> Tensor:
    """Return x with padding of NaN, or of rows outside every table."""
    place = torch.arange(x.shape[0])
    padding = (place < offsets[0]) | (place >= offsets[-1])
    return torch.where(padding, torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).min, x)


def strided(x: Tensor, kind: int) -> Tensor:
    """Return x itself, x as columns of a wider matrix, or x transposed in memory."""
    wide = torch.full((x.shape[0], x.shape[1] + 5), torch.nan, dtype=x.dtype)
    wide[:, 2:-3] = x
    return [x, wide[:, 2:-3], x.t().contiguous().t()][kind % 3]


class Case(NamedTuple):
    size: int
    num_bags: int
    ids: torch.dtype
    bounds: torch.dtype
    # the dtype of the tables, or None if each table has another dtype
    dtype: torch.dtype | None
    weights: torch.dtype = F32


class Problem(NamedTuple):
    tables: list[Tensor]
    rows: list[Tensor]
    offsets: Tensor
    weights: Tensor
    features: list[ops.Feature]
    num_bags: int

    @property
    def width(self) -> int:
        return sum(self.tables[f.table].shape[1] for f in self.features)


CASES = [
    Case(0, 0, I64, I64, F32), Case(0, 17, I32, I64, None), Case(1, 1, I64, I32, F64), Case(1, 17, I32, I32, BF16),
    Case(63, 0, I64, I64, F16), Case(63, 1, I32, I32, None, F64), Case(63, 17, I64, I64, F32),
    Case(63, 17, I32, I64, F16),
    Case(65, 1, I64, I32, BF16, BF16), Case(65, 17, I64, I32, None), Case(65, 17, I32, I32, F64, F64),
    Case(65, 17, I64, I64, F32, F16), Case(65, 3, I32, I64, BF16), Case(65, 17, I32, I32, F32),
]  # fmt: skip
OPTIONS = [  # max_length, mean, weighted
    (0, False, False), (0, True, False), (0, False, True), (3, True, True), (2, False, False), (5, False, True),
    (40, True, True), (40, False, False),
]  # fmt: skip


def problem(known, case: Case) -> Problem:
    """Return a problem with a feature for each dim, over two buffers. Some features share bags. The columns have
    another order than the features."""
    turn = CASES.index(case)
    mixed = [x for x in (F32, BF16, F64, F16) if x in known.dtypes]
    alike = case.dtype in known.dtypes
    dtypes = [case.dtype if alike else mixed[i % len(mixed)] for i in range(len(known.dims))]
    tables = [floats(9, dim, dtype=dtype, seed=dim) for dim, dtype in zip(known.dims, dtypes)]
    offsets = bounds_of(case.size, 3 * case.num_bags, case.bounds)
    rows = [garbage(rows_of(case.size, 9, dtype=x, seed=s), offsets) for s, x in enumerate((case.ids, I64))]
    weights = garbage(floats(case.size, dtype=case.weights, seed=4, unit=64, most=1), offsets)
    features, column = [], 0
    for i in reversed(range(len(tables))):
        options = OPTIONS[(turn + i) % len(OPTIONS)]
        features.append(ops.Feature(i, i % 2, (turn + i) % 3 * case.num_bags, *options, column))
        column += known.dims[i]
    return Problem(tables, rows, offsets, weights, features[::-1], case.num_bags)


def terms_of_problem(p: Problem, dtype: torch.dtype, turn: int) -> ops.Terms:
    """Return the cotangents of the problem's tables: from the lookups, and an entry for each of the first ids. The
    entries of every other table are weighted."""
    count, ids = p.rows[1].shape[0] // 2, p.rows[1].shape[0]
    d = [strided(floats(p.num_bags, p.width, dtype=dtype, seed=5), turn), floats(ids, 200, dtype=dtype, seed=6)]
    scales = [p.weights, floats(ids, seed=7, unit=64, most=1)]
    segments = []
    for f in p.features:
        scale = 0 if f.weighted else -1
        segments.append(
            ops.Segment(f.table, 0, f.column, f.rows, 0, f.first_bag, p.num_bags, f.max_length, f.mean, scale)
        )
        entries = ops.Segment(f.table, 1, f.table, f.table % 2, -1, 0, count, 0, False, f.table % 2 or -1)
        segments += [entries, segments[-1]._replace(max_length=2, mean=False)]
    return ops.Terms(d, p.rows, [p.offsets], scales, segments)


# -- loops -------------------------------------------------------------------------------------------------------


def positions(offsets: Tensor, first_bag: int, num_bags: int, num_ids: int, max_length: int) -> list[range]:
    """Return the positions that each bag reads."""
    bounds = [min(max(n, 0), num_ids) for n in offsets.tolist()[first_bag : first_bag + num_bags + 1]]
    return [range(a, min(b, a + max_length) if max_length else b) for a, b in itertools.pairwise(bounds)]


def reads(p: Problem, f: ops.Feature) -> list[tuple[int, list[tuple[int, float, Tensor]]]]:
    """Return for each bag (its divisor, the (position, weight, row in f64) of each of its ids inside the table)."""
    table, rows = p.tables[f.table].double(), p.rows[f.rows].tolist()
    weights = p.weights.tolist() if f.weighted else [1.0] * len(rows)
    bags = positions(p.offsets, f.first_bag, p.num_bags, len(rows), f.max_length)
    inside = lambda bag: [(i, weights[i], table[rows[i]]) for i in bag if 0 <= rows[i] < len(table)]
    return [(max(len(bag), 1) if f.mean else 1, inside(bag)) for bag in bags]


def pooled(p: Problem, f: ops.Feature) -> Tensor:
    """Return the columns of one feature, f64[B, D]."""
    none = torch.zeros(p.tables[f.table].shape[1], dtype=F64)
    return torch.stack([sum((s * x for _, s, x in bag), none) / n for n, bag in reads(p, f)] or [none])[: p.num_bags]


def entries_of(terms: ops.Terms, table: int, shape: tuple[int, int]) -> list[tuple[int, Tensor]]:
    """Return the (row, f64[D]) pairs of a table in order."""
    out, (num_rows, dim) = [], shape
    for s in terms.segments:
        if s.table != table:
            continue
        d, rows = terms.d[s.d].double()[:, s.column : s.column + dim], terms.rows[s.rows].tolist()
        weights = terms.weights[s.weights].tolist() if s.weights >= 0 else [1.0] * len(rows)
        if s.offsets < 0:
            bags = [range(i, i + 1) for i in range(s.num_bags)]
        else:
            bags = positions(terms.offsets[s.offsets], s.first_bag, s.num_bags, len(rows), s.max_length)
        for b, bag in enumerate(bags):
            share = 1 / len(bag) if s.mean and bag else 1
            out += [(rows[i], weights[i] * share * d[b]) for i in bag if 0 <= rows[i] < num_rows]
    return out


def eps(dtype: torch.dtype) -> float:
    """Return eps of the dtype in which an implementation sums tables of `dtype`."""
    return torch.finfo(ops.accumulation_dtype(dtype)).eps


def assert_within(got: Tensor, want: Tensor, bound: Tensor) -> None:
    assert got.shape == want.shape
    apart = (got.double() - want).abs()
    worst = (~(apart <= bound)).nonzero()[:1].tolist()
    assert not worst, f"at {worst[0]}: {got[tuple(worst[0])]} for {want[tuple(worst[0])]}"


# -- lookups -----------------------------------------------------------------------------------------------------


@pytest.mark.needs("pooled_lookup", slow=2)
def test_pooled_lookup(known, ask, case):
    """out[b] is the sum of a bag's factored rows. A mean divides the sum by the length. Padding is not read."""
    p = problem(known, case)
    got = ask("pooled_lookup", *p)
    assert got.dtype == (F64 if any(t.dtype == F64 for t in p.tables) else F32) and got.shape[1] == p.width
    for f in p.features:
        want, digits = pooled(p, f), eps(p.tables[f.table].dtype) if f.mean else 0
        assert_within(got[:, f.column : f.column + want.shape[1]], want, digits * want.abs())


@pytest.mark.needs("pooled_lookup")
@pytest.mark.parametrize("num_bags", [1, 2])
def test_neighbours_may_read_keys_apart(ask, num_bags):
    """Neighbouring columns of one table read the keys of their features, whichever keys lie in between."""
    table, rows, keys = floats(9, 16), torch.arange(4 * num_bags), (0, 2, 3)
    features = [ops.Feature(0, 0, k * num_bags, 0, False, False, 16 * i) for i, k in enumerate(keys)]
    got = ask("pooled_lookup", [table], [rows], torch.arange(4 * num_bags + 1), None, features, num_bags)
    assert torch.equal(got, torch.cat([table[rows].split(num_bags)[k] for k in keys], 1))


@pytest.mark.needs("pooled_lookup", slow=5)
def test_pooled_lookup_in_blocks(known, ask, case):
    """With n blocks, the columns come in n equal parts, one part after the other, with the same bits."""
    p = problem(known, case)
    features = [f._replace(column=f.column + k * p.width) for k in range(3) for f in p.features[:: -1 if k == 1 else 1]]
    whole = ask("pooled_lookup", *p._replace(features=features))
    assert_trees_close(ask("pooled_lookup", *p._replace(features=features), 3), torch.cat(whole.chunk(3, 1)))


@pytest.mark.needs("pooled_lookup_weights", slow=5)
def test_pooled_lookup_weights(known, ask, case):
    """d_weights[i] is ⟨row, d_out⟩, summed over the features that read and weight the id. For a mean, each product is
    divided by the length."""
    p = problem(known, case)
    wide = F64 if all(t.dtype == F64 for t in p.tables) else F32
    d = strided(floats(p.num_bags, p.width, seed=5, dtype=wide), CASES.index(case))
    got = ask("pooled_lookup_weights", d, *p[:-1])
    want, mass = torch.zeros(2, case.size, dtype=F64)
    for f in p.features:
        for b, (length, bag) in enumerate(reads(p, f) if f.weighted else []):
            for i, _, x in bag:
                terms = x * d[b, f.column : f.column + len(x)] / length
                want[i] += terms.sum()
                mass[i] += terms.abs().sum() if f.mean else 0
    assert got.dtype == case.weights
    digits = max(eps(case.weights), eps(wide))
    assert_within(got, want, 140 * digits * mass + max(digits, torch.finfo(case.weights).eps) * want.abs())


@pytest.mark.needs("pooled_lookup")
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16])
def test_a_bag_is_summed_in_order(known, ask, dtype):
    """A bag's rows are added in order, in f32 or f64, with the bits of a loop."""
    dtype = dtype if dtype in known.dtypes else F32
    table = torch.randn(50, 16, generator=generator(9)).to(dtype)
    rows, offsets = torch.randint(0, 50, (200,), generator=generator(10)), torch.tensor([0, 7, 7, 200])
    features = [ops.Feature(0, 0, 0, 0, False, False, 0), ops.Feature(0, 0, 0, 12, False, False, 16)]
    want = torch.zeros(3, 32, dtype=ops.accumulation_dtype(dtype))
    for f in features:
        for b, bag in enumerate(positions(offsets, 0, 3, 200, f.max_length)):
            for i in bag:
                want[b, f.column : f.column + 16] += table[rows[i]].to(want.dtype)
    assert_trees_close(ask("pooled_lookup", [table], [rows], offsets, None, features, 3), want)


@pytest.mark.needs("pooled_lookup")
@pytest.mark.parametrize("last", [30, 2**40, -1])
def test_wild_offsets_read_nothing_outside(known, ask, implementation, last):
    """Offsets are read as their running maximum, clamped to the buffer. Triton clamps each bag separately. There, a bag
    that ends before its start is empty."""
    dim, wild = known.dims[-1], torch.tensor([-5, 3, 11, 7, 4, -(2**40), last])
    p = Problem([floats(9, dim)], [rows_of(20, 9)], wild, floats(20), [], 6)
    f = ops.Feature(0, 0, 0, 0, False, True, 0)
    got = ask("pooled_lookup", *p._replace(features=[f]))
    counts = wild if implementation == "triton" else wild.cummax(0).values.clamp(0, 20)
    assert_trees_close(got, pooled(p._replace(offsets=counts), f).float())


# -- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.needs("gather_rows")
@pytest.mark.parametrize("size", SIZES)
def test_gather_rows(known, ask, size):
    """out[i] is row rows[i], in f32 or f64. A row outside the table gives zeros, even if the table holds NaN."""
    for dtype, dim, ints in zip(itertools.cycle(known.dtypes), known.dims, itertools.cycle(INTS)):
        table, rows = floats(7, dim, dtype=dtype), rows_of(size, 7, dtype=ints)
        table[0] = torch.nan
        want = [table[r].double() if 0 <= r < 7 else torch.zeros(dim, dtype=F64) for r in rows.tolist()]
        want = torch.stack(want) if size else torch.zeros(0, dim)
        assert_trees_close(ask("gather_rows", table, rows), want.to(ops.accumulation_dtype(dtype)))


@pytest.mark.needs("scatter_rows")
@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("behind", [0, -1, 2**31 - 1])
def test_scatter_rows(known, ask, count, behind):
    """Rows before `count` are replaced, rounded to nearest. All other rows stay. Garbage after `count` is not read."""
    for dtype, dim, ints in zip(itertools.cycle(known.dtypes), known.dims, itertools.cycle(INTS)):
        table, new = floats(7, dim, dtype=dtype), torch.randn(4, dim, generator=generator(8))
        before, unread = table.clone(), torch.arange(4) >= count
        rows = torch.where(unread, behind, torch.tensor([6, 0, 3, 5])).to(ints)
        new = strided(torch.where(unread[:, None], torch.nan, new), dim)
        want = before.index_put((rows[:count].long(),), new[:count].to(dtype))
        got = ask("scatter_rows", table, rows, torch.tensor(count), new)
        assert_trees_close([got, table], [want, before])


# -- cotangents of tables ----------------------------------------------------------------------------------------


def terms_of_case(known, case: Case) -> tuple[ops.Terms, list[tuple[int, int]]]:
    p = problem(known, case)
    terms = terms_of_problem(p, {F64: F64, BF16: BF16}.get(case.dtype, F32), CASES.index(case))
    return terms, [tuple(t.shape) for t in p.tables]


@pytest.mark.needs("expand", slow=3)
def test_expand(known, ask, case):
    """Entries come in the order of segments, bags and positions. Unused positions have row -1 and zeros."""
    terms, shapes = terms_of_case(known, case)
    for t, (rows, grads) in enumerate(ask("expand", terms, shapes)):
        want = entries_of(terms, t, shapes[t])
        capacity = sum(capacity_of(s, len(terms.rows[s.rows])) for s in terms.segments if s.table == t)
        assert grads.shape == (capacity, shapes[t][1]) and grads.dtype == ops.accumulation_dtype(terms.d[0].dtype)
        assert rows.dtype == I64 and rows[rows != -1].tolist() == [row for row, _ in want]
        assert not grads[rows == -1].any()
        for got, (_, g) in zip(grads[rows != -1], want):
            assert_within(got, g, 2 * eps(grads.dtype) * g.abs())


@pytest.mark.needs("coalesce", slow=3)
def test_coalesce(known, ask, case):
    """coalesce returns each named row once, ascending, with the row's sum and number of entries. The places after
    `count` have row -1, zeros and 0."""
    terms, shapes = terms_of_case(known, case)
    for t, (rows, grads, count, repeats) in enumerate(ask("coalesce", terms, shapes)):
        named: dict[int, list[Tensor]] = {}
        for row, g in entries_of(terms, t, shapes[t]):
            named.setdefault(row, []).append(g)
        capacity = sum(capacity_of(s, len(terms.rows[s.rows])) for s in terms.segments if s.table == t)
        more = min(capacity, shapes[t][0]) - len(named)
        assert (rows.dtype, repeats.dtype, count.tolist()) == (I64, I64, len(named))
        assert rows.tolist() == sorted(named) + [-1] * more
        assert repeats.tolist() == [len(named[r]) for r in sorted(named)] + [0] * more
        assert not grads[len(named) :].any() and grads.dtype == ops.accumulation_dtype(terms.d[0].dtype)
        for row, got in zip(sorted(named), grads):
            bound = (len(named[row]) + 2) * eps(grads.dtype) * sum(g.abs() for g in named[row])
            assert_within(got, sum(named[row]), bound)


@pytest.mark.needs("coalesce")
def test_a_row_is_summed_in_order(ask):
    """A row's sum has the bits of a loop over the entries of `expand`: segments in order, bags in order, positions in
    order."""
    for dtype in (F32, F64):
        d, rows = [torch.randn(n, 3, generator=generator(n)).to(dtype) for n in (4, 60)], rows_of(60, 3)
        bags = ops.Segment(0, 0, 0, 0, 0, 0, 4, 0, False, -1)
        segments = [bags, ops.Segment(0, 1, 0, 0, -1, 0, 60, 0, False, -1), bags._replace(max_length=7, mean=True)]
        terms, want = ops.Terms(d, [rows], [bounds_of(60, 4)], [], segments), torch.zeros(3, 3, dtype=dtype)
        ((entries, grads),) = ask("expand", terms, [(3, 3)])
        for row, g in zip(entries.tolist(), grads):
            if row >= 0:
                want[row] += g
        assert_trees_close(ask("coalesce", terms, [(3, 3)])[0][:2], (torch.arange(3), want))


@pytest.mark.needs("pooled_lookup", "pooled_lookup_weights", "gather_rows")
def test_lookups_of_nothing(known, ask):
    """Lookups without tables, features, ids, rows or columns return empty results and zeros."""
    dim, ids, bounds = known.dims[-1], torch.tensor([0, -1, 7]), torch.tensor([0, 2, 3])
    empty, f, ones = torch.zeros(0, dim), [ops.Feature(0, 0, 0, 0, False, True, 0)], torch.ones(3)
    assert_trees_close(ask("pooled_lookup", [], [], bounds, None, [], 2), torch.zeros(2, 0))
    assert_trees_close(ask("pooled_lookup", [empty], [ids], bounds, ones, f, 2), torch.zeros(2, dim))
    assert_trees_close(
        ask("pooled_lookup", [floats(2, dim)], [ids[:0]], bounds * 0, ones[:0], f, 2), torch.zeros(2, dim)
    )
    assert_trees_close(ask("pooled_lookup_weights", torch.ones(2, 0), [], [], bounds, ones, []), ones * 0)
    assert_trees_close(ask("pooled_lookup_weights", torch.ones(2, dim), [empty], [ids], bounds, ones, f), ones * 0)
    assert_trees_close(ask("gather_rows", empty, ids), torch.zeros(3, dim))


@pytest.mark.needs("scatter_rows", "expand", "coalesce", "fused_update")
def test_cotangents_of_nothing(ask):
    """Cotangents without tables, segments, entries or rows give empty results. Tables do not change."""
    ids, empty, none = torch.tensor([0, -1, 7]), torch.zeros(0, 2), ops.Terms([], [], [], [], [])
    alone = ops.Terms([torch.ones(3, 2)], [ids], [], [], [ops.Segment(0, 0, 0, 0, -1, 0, 3, 0, False, -1)])
    assert_trees_close(ask("scatter_rows", floats(3, 2), ids[:0], torch.tensor(0), empty), floats(3, 2))
    assert_trees_close(ask("expand", alone, [(0, 2)])[0][0], torch.full((3,), -1))
    numbers = (torch.tensor(0.1, dtype=F64), torch.tensor(0), None, "sgd", [0.0])
    assert_trees_close(ask("fused_update", [floats(3, 2)], [[]], none, *numbers)[0], [floats(3, 2)])
    assert_trees_close(ask("coalesce", alone, [(0, 2)]), [(ids[:0], empty, torch.tensor(0), ids[:0])])
    assert_trees_close(ask("coalesce", none, [(3, 2)]), [(ids[:0], empty, torch.tensor(0), ids[:0])])
    assert_trees_close(ask("expand", none, [(3, 2)]), [(ids[:0], empty)])
    assert ask("expand", none, []) == ask("coalesce", none, []) == ask("fused_update", [], [], none, *numbers)[0] == []


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
@pytest.mark.parametrize("call", [ops.expand, ops.coalesce], ids=["expand", "coalesce"])
def test_entries_on_meta_have_the_dtype_of_their_sums(call, dtype):
    """The operator of C++ has the same shapes and dtypes on the meta device."""
    segment = ops.Segment(0, 0, 0, 0, 0, 0, 2, 0, False, -1)

    def forms(device):
        on = lambda *xs: [x.to(device) for x in xs]
        terms = ops.Terms(
            on(torch.ones(2, 3, dtype=dtype)), on(torch.arange(4)), on(torch.tensor([0, 1, 4])), [], [segment]
        )
        return [(x.shape, x.dtype) for x in call(terms, [(9, 3)], implementation="cpp")[0]]

    assert forms("meta") == forms("cpu")
