"""FBGEMM's operators satisfy the contract of the kernels, checked against loops over Python's numbers in f64."""

import itertools
import sys

import pytest
import torch
from funcrec.kernels import fbgemm, fbgemm_bags, reference
from funcrec.kernels.forms import Feature, Segment, flatten
from funcrec.kernels.rules import RULES
from programs.surroundings import on_threads

import funcrec as fr
from funcrec.testing import assert_trees_close

pytest.importorskip("fbgemm_gpu")

SIZES = [0, 1, 63, 65]
BIG = 2**31 - 1
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
INTS = [torch.int64, torch.int32]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def floats(*shape, dtype=torch.float32, seed=0):
    """Return random multiples of 1/4 in [-4, 4]. These multiples and their sums are exact in every dtype."""
    return (torch.randint(-16, 17, shape, generator=generator(seed)) / 4).to(dtype)


def rows_of(size, num_rows, *, dtype=torch.int64, seed=1, bad=True):
    """Return random rows with many duplicates. With `bad`, every fifth row is outside the table."""
    rows = torch.randint(0, num_rows, (size,), generator=generator(seed))
    outside = torch.tensor([-1, num_rows, BIG, -BIG, -2])[torch.arange(size) % 5]
    return torch.where((torch.arange(size) % 5 == 4) & bad, outside.roll(size), rows).to(dtype)


def offsets_of(size, num_bags, padding, dtype=torch.int64):
    """Return random offsets of ragged bags, some of them empty, over size - padding ids."""
    used = max(size - padding, 0)
    cuts = torch.randint(0, used + 1, (max(num_bags - 1, 0),), generator=generator(2)).sort().values
    bounds = torch.cat([torch.tensor([0]), cuts, torch.tensor([used])])
    return (bounds if num_bags else bounds[:1]).to(dtype)


def bags_of(bounds, size, max_length):
    """Return [[position, ...], ...]. The contract reads the running maximum of the offsets, clamped and cut."""
    bounds = [min(max(b, 0), size) for b in itertools.accumulate(bounds, max)]
    cut = lambda a, b: min(b, a + max_length) if max_length else b
    return [list(range(a, cut(a, b))) for a, b in itertools.pairwise(bounds)]


def factor(bag, i, weights, f):
    return (weights[i] if f.weighted else 1.0) / (max(len(bag), 1) if f.mean else 1)


FEATURES = {
    "sum": Feature(0, 0, 0, 0, False, False, 0),
    "mean": Feature(0, 0, 0, 0, True, False, 0),
    "weighted": Feature(0, 0, 0, 0, False, True, 0),
    "weighted mean of 3": Feature(0, 0, 0, 3, True, True, 0),
    "sum of 2": Feature(0, 0, 0, 2, False, False, 0),
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_bags", [0, 1, 17])
@pytest.mark.parametrize("ints", INTS)
@pytest.mark.parametrize("bad", [False, True])
def test_pooled_lookup_and_the_gradient_of_weights(name, size, num_bags, ints, bad):
    """out[b] is the factored sum of the bag's rows, and d_weights[i] = ⟨row_i, d_out[b]⟩. Arguments do not change.
    Padding is not read."""
    f, padding = FEATURES[name], size if num_bags == 0 else min(size, 3)
    table, rows = floats(9, 8), rows_of(size, 9, dtype=ints, bad=bad)
    offsets, weights = offsets_of(size, num_bags, padding, ints), floats(size, seed=4)
    rows[size - padding :], weights[size - padding :] = BIG, torch.nan
    before = (table.clone(), rows.clone(), offsets.clone(), weights.clone())
    d = floats(num_bags, 8, seed=5)
    want, d_weights = torch.zeros(num_bags, 8, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for b, bag in enumerate(bags_of(offsets.tolist(), size, f.max_length)):
        for i in bag:
            if 0 <= rows[i] < 9:
                want[b] += factor(bag, i, weights.tolist(), f) * table[rows[i]].double()
                if f.weighted:
                    share = max(len(bag), 1) if f.mean else 1
                    d_weights[i] += (table[rows[i]].double() @ d[b].double()) / share
    got = fbgemm.pooled_lookup([table], [rows], offsets, weights, flatten([f]), num_bags)
    assert_trees_close(got, want.float(), **CLOSE)
    got = fbgemm.pooled_lookup_weights(d, [table], [rows], offsets, weights, flatten([f]))
    assert_trees_close(got, d_weights.float(), **CLOSE)
    assert_trees_close((table, rows, offsets, weights), before)


def test_features_of_many_tables():
    """Every feature fills its own columns from its own table, buffer and bags. Tables in f16 are summed in f32."""
    tables = [floats(9, 4), floats(5, 8, seed=3).half(), floats(0, 4)]
    rows, offsets = [rows_of(20, 9), rows_of(20, 5, seed=7, dtype=torch.int32)], offsets_of(20, 8, 2)
    features = [
        Feature(0, 0, 4, 0, False, False, 8),
        Feature(1, 1, 0, 0, True, False, 0),
        Feature(2, 0, 2, 0, False, False, 12),
    ]
    run = lambda fs: fbgemm.pooled_lookup(tables, rows, offsets, None, flatten(fs), 4)
    together = run(features)
    assert together.shape == (4, 16) and together.dtype == torch.float32
    for f in features:
        dim = tables[f.table].shape[1]
        assert_trees_close(together[:, f.column : f.column + dim], run([f._replace(column=0)]))
    assert not together[:, 12:].any()
    assert fbgemm.pooled_lookup([], [], offsets, None, [], 3).shape == (3, 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gather_rows(size, dtype):
    """out[i] is row rows[i] in f32. A row outside the table gives zeros, even if the table holds NaN."""
    table, rows = floats(7, 4, dtype=dtype), rows_of(size, 7)
    table[0] = torch.nan
    want = [table[r].float() if 0 <= r < 7 else torch.zeros(4) for r in rows.tolist()]
    assert_trees_close(fbgemm.gather_rows(table, rows), torch.stack(want) if size else torch.zeros(0, 4))


HYPER = {"sgd": [0.0], "adagrad": [1e-6, 0.0], "rowwise_adagrad": [1e-6, 0.0, 0, 0.0]}
LR = 0.1


def make_slot(rule, table):
    shape = {"sgd": (0,), "adagrad": table.shape, "rowwise_adagrad": table.shape[:1]}[rule]
    return floats(*shape, seed=9).abs()


def apply_rule(rule, row, g, slot, r):
    """Return the result of the rule's formula for row r, in f64."""
    if rule == "sgd":
        row[r] -= LR * g
        return
    slot[r] += g.square() if rule == "adagrad" else g.square().mean()
    row[r] -= LR * g / (slot[r].sqrt() + HYPER[rule][0])


def entries_of(s, d, rows, offsets, weights, dim):
    """Yield the (row, gradient) pairs of a segment in order."""
    if s.offsets < 0:
        bags = [[i] for i in range(s.num_bags)]
    else:
        bounds = offsets[s.offsets][s.first_bag : s.first_bag + s.num_bags + 1].tolist()
        bags = bags_of(bounds, len(rows[s.rows]), s.max_length)
    for b, bag in enumerate(bags):
        for i in bag:
            scale = float(weights[s.weights][i]) if s.weights >= 0 else 1.0
            yield (
                int(rows[s.rows][i]),
                scale / (len(bag) if s.mean else 1) * d[s.d][b, s.column : s.column + dim].double(),
            )


@pytest.mark.parametrize("rule", HYPER)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [False, True])
def test_fused_update(rule, size, dtype, bad):
    """The update sums a table's segments into one gradient per row. Rows without an entry keep every bit. No other
    memory is written."""
    tables = [floats(9, 8, dtype=dtype), floats(40, 4, dtype=dtype, seed=3)]
    slots = [make_slot(rule, t) for t in tables] if rule != "sgd" else []
    rows = [rows_of(size, 9, bad=bad), rows_of(size, 9, dtype=torch.int32, seed=6, bad=bad)]
    offsets = [offsets_of(size, 7, min(size, 3)), offsets_of(size, 4, 0, torch.int32)]
    d = [floats(7, 20, seed=5), floats(8, max(size, 4), seed=8).t()]
    segments = [
        Segment(0, 0, 8, 0, 0, 0, 7, 0, False, -1),
        Segment(0, 0, 0, 0, 0, 2, 5, 2, True, 0),
        Segment(1, 0, 16, 1, 1, 0, 4, 0, False, -1),
        Segment(0, 1, 0, 1, -1, 0, size, 0, False, 0),
    ]
    weights = [floats(size, seed=4)]
    want, states = [t.double() for t in tables], [s.double() for s in slots] or [None, None]
    for t in range(2):
        sums = {}
        for s in segments:
            if s.table == t:
                for r, g in entries_of(s, d, rows, offsets, weights, tables[t].shape[1]):
                    if 0 <= r < tables[t].shape[0]:
                        sums[r] = sums.get(r, 0) + g
        for r, g in sums.items():
            apply_rule(rule, want[t], g, states[t], r)
        still = [r for r in range(tables[t].shape[0]) if r not in sums]
        want[t][still] = tables[t][still].double()
    given = (rows, offsets, d, weights)
    before = [[x.clone() for x in xs] for xs in given]
    numbers = (torch.tensor(LR, dtype=torch.float64), torch.tensor(0))
    fbgemm.fused_update_(tables, slots, d, rows, offsets, weights, flatten(segments), *numbers, None, rule, HYPER[rule])
    close = CLOSE if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    assert_trees_close(tables, [w.to(dtype) for w in want], **close)
    assert_trees_close(slots, [s.float() for s in states] if slots else [], **CLOSE)
    assert_trees_close(given, tuple(before))


def test_threads_change_no_bit():
    """One thread and two threads give the same bits, even when a row repeats often."""
    rows, offsets, d = rows_of(20_000, 500), offsets_of(20_000, 700, 11), torch.randn(700, 64, generator=generator(1))
    answers = []
    segment = flatten([Segment(0, 0, 0, 0, 0, 0, 700, 0, False, -1)])
    for n in (1, 2):
        with on_threads(n):
            table, slot = torch.ones(500, 64), torch.zeros(500)
            numbers = (torch.tensor(LR, dtype=torch.float64), torch.tensor(0), None)
            args = ([d], [rows], [offsets], [], segment, *numbers, "rowwise_adagrad", HYPER["rowwise_adagrad"])
            fbgemm.fused_update_([table], [slot], *args)
            answers.append((table, slot))
    assert_trees_close(*answers)


@pytest.mark.parametrize("bounds", [[0, 70, 3, 9], [-5, 2, 4, 1000], [8, 2, 2, 20]])
def test_offsets_never_lead_outside(bounds):
    """Offsets are read as their running maximum, clamped to the buffer. This also holds in lookups of quantised
    tables."""
    table, rows, size = floats(9, 4), rows_of(20, 9), 20
    got = fbgemm.pooled_lookup([table], [rows], torch.tensor(bounds), None, flatten([FEATURES["sum"]]), 3)
    want = torch.zeros(3, 4)
    for b, bag in enumerate(bags_of(bounds, size, 0)):
        want[b] = sum((table[rows[i]] for i in bag if 0 <= rows[i] < 9), torch.zeros(4))
    assert_trees_close(got, want)
    coded = fbgemm.quantize_rows(table, 8)
    how = ([coded], [rows], torch.tensor(bounds), None, flatten([FEATURES["sum"]]), 3, [8], [4])
    assert_trees_close(fbgemm.quantized_lookup(*how), reference.quantized_lookup(*how), **CLOSE)
    values = floats(20, 2)
    padded = fbgemm.to_padded(values, torch.tensor(bounds), 4, -1.0)
    for b, bag in enumerate(bags_of(bounds, size, 4)):
        rest = torch.full((4 - len(bag), 2), -1.0)
        assert_trees_close(padded[b], torch.cat([values[bag], rest]))


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("capacity", [0, 5, 40])
def test_take_ranges(shape, dtype, capacity):
    """The ranges follow one another, cut at the capacity. The rest are zeros, and so are positions outside the
    buffer."""
    values = floats(20, *shape, seed=2).to(dtype)
    starts, lengths = torch.tensor([3, 0, 18, -2, 2**40]), torch.tensor([4, 0, 5, 3, 1], dtype=torch.int32)
    got, offsets = fbgemm.take_ranges(values, starts, lengths, capacity)
    want, position = torch.zeros(capacity, *shape, dtype=dtype), 0
    for start, length in zip(starts.tolist(), lengths.tolist()):
        for i in range(start, start + length):
            if position < capacity and 0 <= i < 20:
                want[position] = values[i]
            position += 1
    assert_trees_close((got, offsets), (want, torch.tensor([0, 4, 4, 9, 12, 13])))
    assert fbgemm.take_ranges(values[:0], starts[:0], lengths[:0], 3)[0].eq(0).all()


@pytest.mark.parametrize("ints", INTS)
@pytest.mark.parametrize("weighted", [None, torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("block", [4, 2**33])
def test_bucketize(ints, weighted, bad, padding, block):
    """Ids are grouped by (owner, bag) in their order. Ids without an owner, and padding, are left out."""
    size, num_bags, shards = 30, 6, 3
    rows, offsets = rows_of(size, 12, dtype=ints, bad=bad), offsets_of(size, num_bags, padding, ints)
    weights = None if weighted is None else floats(size, seed=4).to(weighted)
    groups = [[] for _ in range(shards * num_bags)]
    for b, bag in enumerate(bags_of(offsets.tolist(), size, 0)):
        for i in bag:
            owner = int(rows[i]) // block
            if 0 <= owner < shards:
                groups[owner * num_bags + b].append(i)
    order = [i for group in groups for i in group]
    moved, lengths, new_weights, positions = fbgemm.bucketize(rows, offsets, weights, shards, block)
    assert lengths.tolist() == [len(g) for g in groups] and lengths.dtype == torch.int64
    assert moved.tolist() == [int(rows[i]) % block for i in order] + [0] * (size - len(order))
    assert moved.dtype == ints
    assert positions.tolist() == [order.index(i) if i in order else -1 for i in range(size)]
    if weights is None:
        assert new_weights.shape == (0,)
    else:
        assert_trees_close(new_weights, torch.cat([weights[order], weights.new_zeros(size - len(order))]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_bags,length", [(0, 3), (7, 0), (7, 3), (7, 50)])
def test_padded_and_back(dtype, num_bags, length):
    """to_padded cuts and fills each bag. from_padded is its transpose: ⟨to_padded(x), y⟩ = ⟨x, from_padded(y)⟩ with
    fill 0."""
    size, padding = 40, 40 if num_bags == 0 else 4
    values, offsets = floats(size, 3, dtype=dtype), offsets_of(size, num_bags, padding)
    padded = fbgemm.to_padded(values, offsets, length, 0.0)
    assert padded.shape == (num_bags, length, 3) and padded.dtype == dtype
    for b, bag in enumerate(bags_of(offsets.tolist(), size, length) if length else []):
        assert_trees_close(padded[b, : len(bag)], values[bag])
        assert not padded[b, len(bag) :].any()
    y = floats(num_bags, length, 3, dtype=dtype, seed=3)
    back = fbgemm.from_padded(y, offsets, size)
    assert back.shape == (size, 3)
    assert float((padded.double() * y.double()).sum()) == float((values.double() * back.double()).sum())


SEGMENT = flatten([Segment(0, 0, 0, 0, -1, 0, 1, 0, False, -1)])
NUMBERS = (torch.tensor(LR, dtype=torch.float64), torch.tensor(0))


def update(table, rule="sgd", hyper=(0.0,), key=None):
    d, rows = torch.ones(1, table.shape[1]), torch.zeros(1, dtype=torch.int64)
    slot = torch.zeros(table.shape[0])
    fbgemm.fused_update_([table], [slot], [d], [rows], [], [], SEGMENT, *NUMBERS, key, rule, list(hyper))


ONE_ROW = torch.zeros(1, dtype=torch.int64)
REFUSED = {
    "a dim that 4 does not divide": (lambda: fbgemm.gather_rows(floats(2, 6), ONE_ROW), ValueError, "dim 6"),
    "f64": (lambda: fbgemm.gather_rows(floats(2, 4).double(), ONE_ROW), TypeError, "float64"),
    "bf16": (lambda: update(floats(2, 4).bfloat16()), TypeError, "bfloat16"),
    "columns of a table": (lambda: fbgemm.gather_rows(floats(2, 8)[:, :4], ONE_ROW), ValueError, "contiguous"),
    "another device": (lambda: fbgemm.gather_rows(floats(2, 4).to("meta"), ONE_ROW), ValueError, "meta"),
    "another rule": (lambda: update(floats(2, 4), "adam", (0.9, 0.999, 1e-8, 0.0)), ValueError, "'adam'"),
    "weight decay": (lambda: update(floats(2, 4), "sgd", (0.1,)), ValueError, "weight_decay=0.1"),
    "max_norm": (
        lambda: update(floats(2, 4), "rowwise_adagrad", (1e-8, 0.0, 0, 2.0)), ValueError, "max_norm=2.0",
    ),
    "a key": (lambda: update(floats(2, 4).half(), key=torch.zeros(1, dtype=torch.int64)), ValueError, "no key"),
    "descending offsets": (
        lambda: fbgemm.from_padded(floats(2, 3, 4), torch.tensor([0, 5, 2]), 6), ValueError, "descend",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_operators_cannot_do_is_refused(name):
    """A call that FBGEMM's operators cannot run raises an error that says what it got, what it needs and what to try.
    The rules have the hyper-parameters that `ops` passes."""
    call, kind, match = REFUSED[name]
    with pytest.raises(kind, match=match) as error:
        call()
    assert [line.split()[0] for line in str(error.value).splitlines()[1:]] == ["got", "need", "try"]
    assert all(len(fbgemm.RULES[rule]) == len(RULES[rule].hyper) for rule in fbgemm.RULES)


def test_without_fbgemm_the_error_names_the_extra(monkeypatch):
    """If fbgemm_gpu is missing, the error of a call says how to install the package."""
    fbgemm_bags._load.cache_clear()
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    with pytest.raises(ImportError, match=r'pip install "funcrec\[fbgemm-cpu\]"'):
        fbgemm.gather_rows(floats(2, 4), ONE_ROW)


def test_a_step_through_the_public_calls():
    """lookup, its transpose and an update with implementation="fbgemm" give the reference's values."""
    table, features = fr.TableConfig("item", 50, 8), [fr.FeatureConfig("clicked", table="item", pooling="mean")]
    ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2, 49], [], [2, 2, 50, -1]]})
    sparse = fr.optim.rowwise_adagrad(lr=LR)
    answers = []
    for name in ("reference", "fbgemm"):
        tables = fr.init(fr.key(0), [table])
        acts = fr.lookup(tables, ids, features, implementation=name)
        grads = fr.lookup_transpose(acts, ids, features, tables)
        answers.append((acts.values, *sparse.update(grads, sparse.init(tables), tables, 0, implementation=name)))
    assert_trees_close(*answers, rtol=1e-6, atol=1e-6)
