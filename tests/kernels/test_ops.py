"""Each operation of funcrec.kernels, in every implementation, against a loop over Python's numbers in f64."""

import itertools

import pytest
import torch
from funcrec.kernels import ops
from torch.fx.experimental.proxy_tensor import make_fx

from funcrec.testing import assert_trees_close

SIZES = [0, 1, 63, 65]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
IMPLEMENTATIONS = sorted(ops.IMPLEMENTATIONS)
BIG = 2**31 - 1


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


def generator(seed):
    return torch.Generator().manual_seed(seed)


def floats(*shape, dtype=torch.float32, seed=0):
    """Multiples of 1/4 in [-4, 4]: exact in every dtype, and so are their sums."""
    return (torch.randint(-16, 17, shape, generator=generator(seed)) / 4).to(dtype)


def rows_of(size, num_rows, *, dtype=torch.int64, seed=1):
    """Rows with many duplicates; every fifth is outside."""
    rows = torch.randint(0, num_rows, (size,), generator=generator(seed))
    outside = torch.tensor([-1, num_rows, BIG, -BIG, -2])[torch.arange(size) % 5]
    return torch.where(torch.arange(size) % 5 == 4, outside.roll(size), rows).to(dtype)


def bags(size, num_bags, padding, dtype=torch.int64):
    """Offsets of `num_bags` ragged bags (some empty) over size - padding ids."""
    used = max(size - padding, 0)
    cuts = torch.randint(0, used + 1, (max(num_bags - 1, 0),), generator=generator(2)).sort().values
    bounds = torch.cat([torch.tensor([0]), cuts, torch.tensor([used])])
    return (bounds if num_bags else bounds[:1]).to(dtype)


def inside(row, num_rows):
    return 0 <= row < num_rows


def multipliers(bounds, weights, feature):
    """[[(position, s_i), ...], ...]: what each bag of the feature reads, and with which factor."""
    out = []
    for start, stop in itertools.pairwise(bounds):
        stop = min(stop, start + feature.max_length) if feature.max_length else stop
        size = max(stop - start, 1)
        factor = lambda i: (weights[i] if feature.weighted else 1.0) / (size if feature.mean else 1)  # noqa: B023
        out.append([(i, factor(i)) for i in range(start, stop)])
    return out


FEATURES = {
    "sum": ops.Feature(0, 0, 0, False, False),
    "mean": ops.Feature(0, 0, 0, True, False),
    "weighted": ops.Feature(1, 0, 0, False, True),
    "weighted mean of 3": ops.Feature(0, 0, 3, True, True),
    "sum of 2": ops.Feature(1, 0, 2, False, False),
    "weighted sum of 5": ops.Feature(1, 0, 5, False, True),
    "sum of 40": ops.Feature(0, 0, 40, False, True),
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_bags", [0, 1, 17])
@pytest.mark.parametrize("ints", [torch.int64, torch.int32])
def test_pooled_lookup_and_its_transpose(implementation, name, size, num_bags, ints):
    """out[b] is the factored sum of the bag's rows; grads[i] is the factored gradient of its bag; padding is not read."""
    feature, padding = FEATURES[name], min(size, 3)
    if num_bags == 0:
        padding = size
    tables = [floats(9, 5, dtype=torch.float64), floats(4, 3, dtype=torch.float64, seed=3)]
    num_rows, dim = tables[feature.table].shape
    rows, offsets = rows_of(size, num_rows, dtype=ints), bags(size, num_bags, padding, ints)
    weights = floats(size, seed=4)
    weights[size - padding :] = torch.nan
    table, numbers, scale = tables[feature.table], rows.tolist(), weights.tolist()
    read = multipliers(offsets.tolist(), scale, feature)

    want = torch.zeros(num_bags, dim, dtype=torch.float64)
    for b, bag in enumerate(read):
        for i, s in bag:
            want[b] += s * table[numbers[i]] if inside(numbers[i], num_rows) else 0
    args = ([rows], offsets, weights, [feature])
    got = ops.pooled_lookup(tables, *args, num_bags, implementation=implementation)
    assert_trees_close(got, want, rtol=1e-14, atol=1e-14)

    d = floats(num_bags, dim, dtype=torch.float64, seed=5)
    entries = ops.pooled_lookup_transpose(d, [t.shape for t in tables], *args, implementation=implementation)
    entry_rows, grads = entries[feature.table]
    unread = entries[1 - feature.table]
    assert unread[0].shape == (0,) and unread[1].shape == (0, tables[1 - feature.table].shape[1])
    assert all(r == -1 or inside(r, num_rows) for r in entry_rows.tolist()) and entry_rows.dtype == rows.dtype
    dense, wanted = torch.zeros(num_rows, dim, dtype=torch.float64), torch.zeros(num_rows, dim, dtype=torch.float64)
    for row, grad in zip(entry_rows.tolist(), grads):
        if row >= 0:
            dense[row] += grad
    for b, bag in enumerate(read):
        for i, s in bag:
            if inside(numbers[i], num_rows):
                wanted[numbers[i]] += s * d[b]
    assert_trees_close(dense, wanted, rtol=1e-14, atol=1e-13)


def test_features_share_a_buffer(implementation):
    """Feature f's bags begin at first_bag; columns stand side by side, in the order of the features."""
    tables = [floats(9, 2), floats(9, 1, seed=3)]
    rows, offsets = rows_of(20, 9), bags(20, 8, 2)
    features = [
        ops.Feature(1, 4, 0, False, False),
        ops.Feature(0, 0, 0, False, False),
        ops.Feature(1, 2, 0, True, False),
    ]
    run = lambda fs: ops.pooled_lookup(tables, [rows] * len(fs), offsets, None, fs, 4, implementation=implementation)
    assert_trees_close(run(features), torch.cat([run([f]) for f in features], 1))
    for f in features:
        want = [
            sum(
                (tables[f.table][rows[i]] for i in range(offsets[b], offsets[b + 1]) if inside(rows[i], 9)),
                torch.zeros(1),
            )
            for b in range(f.first_bag, f.first_bag + 4)
        ]
        size = offsets.diff()[f.first_bag : f.first_bag + 4, None].clamp(min=1) if f.mean else 1
        assert_trees_close(run([f]), torch.stack([w.expand(tables[f.table].shape[1]) for w in want]) / size)


@pytest.mark.parametrize("max_length", [0, 1, 3, 40])
@pytest.mark.parametrize("mean", [False, True])
def test_neighbours_are_looked_up_as_if_alone(implementation, max_length, mean):
    """Features whose bags follow each other give the bits of separate lookups, and their entries in the same order."""
    table, num_bags = floats(9, 2), 5
    rows, offsets, weights = rows_of(33, 9), bags(33, 15, 2), floats(33, seed=4)
    features = [ops.Feature(0, f * num_bags, max_length, mean, True) for f in range(3)]
    k = {"implementation": implementation}
    run = lambda fs: ops.pooled_lookup([table], [rows] * len(fs), offsets, weights, fs, num_bags, **k)
    together = run(features)
    assert_trees_close(together, torch.cat([run([f]) for f in features], 1))
    back = lambda d, fs: ops.pooled_lookup_transpose(d, [table.shape], [rows] * len(fs), offsets, weights, fs, **k)[0]
    whole = ops.coalesce(*back(together, features), 9, **k)
    parts = [back(d, [f]) for d, f in zip(together.split(2, 1), features)]
    assert_trees_close(whole[1], ops.coalesce(*map(torch.cat, zip(*parts)), 9, **k)[1][: len(whole[1])])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_rows(implementation, size, dtype):
    """out[i] is row rows[i], in f32 or f64; zeros for a row outside, even of a table that holds NaN."""
    table, rows = floats(7, 5, dtype=dtype), rows_of(size, 7)
    table[0] = torch.nan
    got = ops.gather_rows(table, rows, implementation=implementation)
    want = [table[r].double() if inside(r, 7) else torch.zeros(5, dtype=torch.float64) for r in rows.tolist()]
    want = torch.stack(want) if size else torch.zeros(0, 5, dtype=torch.float64)
    assert_trees_close(got, want.to(torch.promote_types(dtype, torch.float32)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ints", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coalesce(implementation, size, ints, dtype):
    """Each distinct row once, ascending, its gradients summed in order; -1 and zeros behind; NaN of no row unread."""
    rows, grads = (
        rows_of(size, 7, dtype=ints),
        torch.randn(size, 5, generator=generator(6), dtype=torch.float64).to(dtype),
    )
    valid = torch.tensor([inside(r, 7) for r in rows.tolist()], dtype=torch.bool)
    grads = torch.where(valid[:, None], grads, torch.nan)
    got = ops.coalesce(rows, grads, 7, implementation=implementation)
    sums, times = {}, {}
    for row, grad in zip(rows.tolist(), grads):
        if inside(row, 7):
            sums[row] = sums[row] + grad if row in sums else grad
            times[row] = times.get(row, 0) + 1
    distinct, more = sorted(sums), size - len(sums)
    want = (
        torch.tensor(distinct + [-1] * more, dtype=ints),
        torch.cat([torch.stack([sums[r] for r in distinct]), torch.zeros(more, 5, dtype=dtype)])
        if distinct
        else grads * 0,
        torch.tensor(len(distinct)),
        torch.tensor([times[r] for r in distinct] + [0] * more, dtype=torch.int64),
    )
    assert_trees_close(got, want)


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ints", [torch.int64, torch.int32])
@pytest.mark.parametrize("behind", [-1, 0, 6, BIG, -BIG])
def test_scatter_rows(implementation, count, dtype, ints, behind):
    """Rows before `count` are replaced, the others stay, the table is not written; garbage behind `count` is unread."""
    table = floats(7, 5, dtype=dtype)
    before = table.clone()
    rows = torch.tensor([6, 0, 3, 5], dtype=ints)
    new = floats(4, 5, seed=8)
    garbage = torch.arange(4) >= count
    rows, new = torch.where(garbage, behind, rows).to(ints), torch.where(garbage[:, None], torch.nan, new)
    got = ops.scatter_rows(table, rows, torch.tensor(count), new, implementation=implementation)
    want = before.clone()
    for row, values in zip(rows.tolist()[:count], new):
        want[row] = values.to(dtype)
    assert_trees_close(got, want)
    assert_trees_close(table, before)


def test_scatter_rows_of_nothing(implementation):
    """No entries at all: the table."""
    table = floats(3, 2)
    none = torch.zeros(0, dtype=torch.int64)
    got = ops.scatter_rows(table, none, torch.tensor(0), floats(0, 2), implementation=implementation)
    assert_trees_close(got, table)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_tables_are_summed_in_f32(implementation, dtype):
    """The error against f64 is at most that of one rounding to f32 per term, where sums in the table's dtype lose more."""
    table = torch.randn(50, 8, generator=generator(9)).to(dtype)
    rows, offsets = torch.randint(0, 50, (400,), generator=generator(10)), torch.tensor([0, 100, 400])
    feature = ops.Feature(0, 0, 0, False, False)
    run = lambda t: ops.pooled_lookup([t], [rows], offsets, None, [feature], 2, implementation=implementation)
    exact = run(table.double())
    bound = 300 * torch.finfo(torch.float32).eps * run(table.double().abs())
    assert run(table).dtype == torch.float32
    assert bool(((run(table).double() - exact).abs() <= bound).all())


def _everything(implementation):
    """One answer of every operation, on sizes that threads would share."""
    table = torch.randn(500, 64, generator=generator(11))
    rows = torch.randint(-5, 505, (20_000,), generator=generator(12))
    grads, offsets = torch.randn(20_000, 64, generator=generator(13)), bags(20_000, 700, 11)
    weights = torch.rand(20_000, generator=generator(14))
    features = [ops.Feature(0, 0, 0, True, True), ops.Feature(0, 0, 8, False, False)]
    k = {"implementation": implementation}
    pooled = ops.pooled_lookup([table], [rows] * 2, offsets, weights, features, 700, **k)
    transposed = ops.pooled_lookup_transpose(pooled, [table.shape], [rows] * 2, offsets, weights, features, **k)
    coalesced = ops.coalesce(rows, grads, 500, **k)
    return (
        pooled,
        transposed,
        ops.gather_rows(table, rows, **k),
        coalesced,
        ops.scatter_rows(table, *coalesced[:1], coalesced[2], coalesced[1], **k),
    )


def test_threads_change_no_bit(implementation):
    """One thread and two give the same bits."""
    threads = torch.get_num_threads()
    try:
        answers = []
        for n in (1, 2):
            torch.set_num_threads(n)
            answers.append(_everything(implementation))
    finally:
        torch.set_num_threads(threads)
    assert_trees_close(*answers)


def test_every_operation_traces(implementation):
    """No operation reads a value on the host."""
    table, rows, offsets = floats(5, 3), rows_of(6, 5), bags(6, 2, 1)
    feature = ops.Feature(0, 0, 2, True, False)

    def run(table, rows, offsets):
        k = {"implementation": implementation}
        out = ops.pooled_lookup([table], [rows], offsets, None, [feature], 2, **k)
        ((r, g),) = ops.pooled_lookup_transpose(out, [table.shape], [rows], offsets, None, [feature], **k)
        r, g, count, _ = ops.coalesce(r, g, 5, **k)
        return ops.scatter_rows(table, r, count, g + ops.gather_rows(table, r, **k), **k)

    traced = make_fx(run, tracing_mode="fake")(table, rows, offsets)
    assert_trees_close(traced(table, rows, offsets), run(table, rows, offsets))


def test_shapes_beyond_i32(implementation):
    """Tables of more than 2³¹ rows and elements have shapes on the meta device."""
    table, rows = torch.empty(2**32, 64, device="meta"), torch.empty(10, dtype=torch.int64, device="meta")
    assert ops.gather_rows(table, rows, implementation=implementation).shape == (10, 64)
    grads = torch.empty(10, 64, device="meta")
    r, g, count, repeats = ops.coalesce(rows, grads, 2**32, implementation=implementation)
    assert (r.shape, g.shape, count.shape, repeats.shape) == ((10,), (10, 64), (), (10,))
    assert ops.scatter_rows(table, r, count, g, implementation=implementation).shape == table.shape


def test_rows_beyond_i32(implementation):
    """coalesce keeps rows above 2³¹ apart."""
    rows = torch.tensor([2**33, 1, 2**33, 2**33 + 1, 2**40])
    r, g, count, repeats = ops.coalesce(rows, torch.ones(5, 1), 2**34, implementation=implementation)
    assert r.tolist() == [1, 2**33, 2**33 + 1, -1, -1] and g.flatten().tolist() == [1.0, 2.0, 1.0, 0.0, 0.0]
    assert int(count) == 3 and repeats.tolist() == [1, 2, 1, 0, 0]


def test_an_unknown_implementation_is_refused():
    """Nothing falls back: the error names what there is."""
    with pytest.raises(ValueError, match=r"'nothing' is unknown; there is \['reference'"):
        ops.gather_rows(floats(1, 1), rows_of(1, 1), implementation="nothing")
