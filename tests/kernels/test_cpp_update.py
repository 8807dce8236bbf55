"""The C++ update equals the Python rules. expand and coalesce equal a loop.

Calls have bags and entries, several segments per table, and garbage in the padding. The reference result is in f64.
"""

import pytest
import torch
from funcrec.kernels.cpp import _update
from funcrec.kernels.forms import accumulation_dtype, capacity_of, segments_of
from programs.surroundings import on_threads
from programs.update_calls import CASES, Call, entries, make, numbers
from torch import Tensor

import funcrec as fr

LR, STEP = 0.1, 4


def optimizer_of(rule: str, options: dict) -> fr.optim.RowOptimizer:
    return getattr(fr.optim, rule)(lr=LR, **options)


def state(call: Call, rule: str, options: dict, dtype: torch.dtype, seed: int = 1):
    """Return random tables, and slots with the values of a run after a few steps."""
    torch.manual_seed(seed)
    shapes = list(zip(call.shapes[::2], call.shapes[1::2], strict=True))
    tables = {f"t{i}": torch.randn(s).to(dtype) for i, s in enumerate(shapes)}
    slots = optimizer_of(rule, options).init(tables)
    for own in slots.values():
        for name, x in own.items():
            x.copy_(torch.randint(0, STEP, x.shape) if name in ("counter", "last") else torch.rand_like(x) / 4)
    return tables, slots


def run(call: Call, rule: str, options: dict, tables, slots, key=None, step=STEP) -> None:
    names = list(slots["t0"]) if slots else []
    flat = [slots[t][name] for t in tables for name in names]
    lr, taken = torch.tensor(LR, dtype=torch.float64), torch.tensor(step)
    given = (lr, taken, key, rule, numbers(rule, options))
    _update.fused_update_(list(tables.values()), flat, *call[:5], *given)


def expected(call: Call, rule: str, options: dict, tables, slots, dtype: torch.dtype):
    """Return the result of the Python rules in `dtype`."""
    grads = {}
    for i, (name, x) in enumerate(tables.items()):
        named = entries(call, i, dtype)
        rows = torch.tensor([row for row, _, _ in named], dtype=torch.int64)
        terms = torch.stack([g for _, g, _ in named]) if named else torch.zeros(0, x.shape[1])
        grads[name] = fr.RowGrads.from_entries(rows, terms.to(dtype), num_embeddings=x.shape[0])
    to = lambda x: x.to(dtype)
    own = {name: {k: to(s) for k, s in each.items()} for name, each in slots.items()}
    wide = {name: to(x) for name, x in tables.items()}
    return optimizer_of(rule, options).update(grads, own, wide, STEP, implementation="reference")


def leaves(tables, slots) -> list[Tensor]:
    return [*tables.values(), *(x for own in slots.values() for x in own.values())]


def clone(tables, slots):
    return {k: x.clone() for k, x in tables.items()}, {
        n: {k: x.clone() for k, x in o.items()} for n, o in slots.items()
    }


def assert_near(got: Tensor, truth: Tensor, same: Tensor, old: Tensor) -> None:
    """Check |got - truth| <= 2 · (the largest error of the Python rule in f32, `same`, + one rounding). The rounding is
    to got's precision."""
    if got.numel() == 0:
        return
    eps = torch.finfo(accumulation_dtype(got.dtype)).eps
    lost = (same.double() - truth).abs().max() * eps / torch.finfo(torch.float32).eps
    size = truth.abs() + old.double().abs() + 1
    rounding = torch.finfo(got.dtype).eps * truth.abs() + torch.finfo(got.dtype).tiny
    assert ((got.double() - truth).abs() <= 2 * (lost + eps * size) + rounding).all()


SHAPES = [(50, 64), (7, 5), (300, 16), (1, 1), (0, 8), (40, 130), (30, 32), (20, 128), (9, 256)]


NARROW = (torch.float32, torch.bfloat16, torch.float16)  # tables that are summed in f32
FORMS = [(*case, dtype) for i, case in enumerate(CASES) for dtype in (torch.float64, NARROW[i % 3])]


@pytest.mark.parametrize(("rule", "options", "dtype"), FORMS, ids=str)
def test_update_is_the_rule(rule, options, dtype):
    """The update applies the Python rule to the summed gradient of each named row. The error is at most twice the error
    of the rule in f32, plus roundings."""
    call = make(SHAPES, accumulation_dtype(dtype))
    tables, slots = state(call, rule, options, dtype)
    exact = leaves(*expected(call, rule, options, tables, slots, torch.float64))
    plain = leaves(*expected(call, rule, options, tables, slots, torch.float32))
    before = [x.clone() for x in leaves(tables, slots)]
    run(call, rule, options, tables, slots)
    for got, truth, same, old in zip(leaves(tables, slots), exact, plain, before, strict=True):
        assert_near(got, truth, same, old)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_expand_writes_every_entry(dtype):
    """expand writes each entry at the entry's position. All other positions have row -1 and zeros."""
    call = make(SHAPES, dtype)
    out = _update.expand(*call)
    for t, dim in enumerate(call.shapes[1::2]):
        rows, grads = out[2 * t : 2 * t + 2]
        capacity = sum(capacity_of(s, call.rows[s.rows].shape[0]) for s in segments_of(call.segments) if s.table == t)
        truth_rows, truth = torch.full((capacity,), -1), torch.zeros(capacity, dim, dtype=torch.float64)
        for row, g, place in entries(call, t):
            truth_rows[place], truth[place] = row, g
        assert torch.equal(rows, truth_rows) and rows.dtype == torch.int64
        assert grads.dtype == accumulation_dtype(dtype)
        torch.testing.assert_close(grads.double(), truth, rtol=2 * torch.finfo(grads.dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_coalesce_sums_each_row(dtype):
    """coalesce returns the named rows in ascending order, with the sum and the number of entries of each row."""
    call = make(SHAPES, dtype)
    out = _update.coalesce(*call)
    for t, (num_rows, dim) in enumerate(zip(call.shapes[::2], call.shapes[1::2], strict=True)):
        rows, grads, count, repeats = out[4 * t : 4 * t + 4]
        named = entries(call, t)
        distinct = sorted({row for row, _, _ in named})
        terms = [[g for row, g, _ in named if row == r] for r in distinct]
        n = len(distinct)
        capacity = sum(capacity_of(s, call.rows[s.rows].shape[0]) for s in segments_of(call.segments) if s.table == t)
        assert rows.shape == repeats.shape == (min(capacity, num_rows),) and grads.shape == (
            min(capacity, num_rows),
            dim,
        )
        assert int(count) == n and rows[:n].tolist() == distinct and repeats[:n].tolist() == [len(x) for x in terms]
        assert (rows[n:] == -1).all() and (grads[n:] == 0).all() and (repeats[n:] == 0).all()
        eps = torch.finfo(grads.dtype).eps
        for got, each in zip(grads, terms):
            bound = eps * (len(each) + 1) * sum(g.abs() for g in each)
            assert ((got.double() - sum(each)).abs() <= bound).all()


def test_sums_run_in_the_order_of_entries():
    """A row's gradients are added one at a time, in the order of segments, bags and positions."""
    terms = torch.tensor([[1e8], [1.0], [-1e8], [1.0], [3.0], [1e8], [-1e8]])
    rows = torch.tensor([4, 4, 9, 4, 4, 4, 4, 4])
    segments = [0, 0, 0, 0, 0, 0, 3, 0, 0, -1, 0, 1, 0, 1, -1, 0, 4, 0, 0, -1]
    d, offsets = [terms[:3], terms[3:]], torch.tensor([0, 2, 4, 4])
    for wanted in (torch.float32, torch.float64):
        call = ([x.to(wanted) for x in d], [rows[:4], rows[4:]], [offsets], [], segments, [5, 1])
        total = torch.zeros((), dtype=wanted)
        for x in terms[[0, 0, 1, 3, 4, 5, 6], 0].to(wanted):
            total = total + x
        assert torch.equal(_update.coalesce(*call)[1][0, 0], total)


@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adam", "lamb"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_threads_change_no_bit(rule, dtype):
    """Tables, slots, sums and entries have the same bits for any number of threads."""
    shapes = [(3000, 64), (1, 4), (20_000, 7)]
    call = make(shapes, n=6000, bags=900)
    start = state(call, rule, {}, dtype)
    key = torch.tensor([[[k, 0, 0, -(-dim // 4)], [0, 2**63 - 1, 0, 0]] for k, (_, dim) in zip((3, 5, 7), shapes)])
    results = []
    for n in (1, 2, 3, 8):
        with on_threads(n):
            mine = clone(*start)
            run(call, rule, {}, *mine, key=key)
            results.append([*leaves(*mine), *_update.expand(*call), *_update.coalesce(*call)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_unnamed_rows_keep_their_bits_and_zero_gradients_touch():
    """A row that no entry names keeps every bit. A row with a zero gradient moves as the rule says."""
    call = make([(60, 8)], n=40, bags=5)
    tables, slots = state(call, "adam", {}, torch.float32)
    before = clone(tables, slots)
    run(call._replace(d=[torch.zeros_like(x) for x in call.d]), "adam", {}, tables, slots)
    named = torch.zeros(60, dtype=torch.bool)
    named[[row for row, _, _ in entries(call, 0)]] = True
    for got, old in zip(leaves(tables, slots), leaves(*before), strict=True):
        assert torch.equal(got[~named], old[~named])
        assert (got[named] != old[named]).any(1).all()


def splitmix(key: int, i: int) -> int:
    z = (key + 0x9E3779B97F4A7C15 * i) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize(("dtype", "cut"), [(torch.bfloat16, 16), (torch.float16, 13)], ids=str)
@pytest.mark.parametrize("dim", [3, 32, 70])
def test_stochastic_rounding_is_a_function_of_the_key(dtype, cut, dim):
    """Element (row, column) is rounded with 16 bits of SplitMix64. The bits depend on the row, the column, and three
    numbers: the key, the phase, and the words per row. The table lists these numbers for the row's segment."""
    num_rows, of = 5, ([[-(2**62), 0, 0, -(-dim // 4)]], [[12345, 0, 3, 90], [7, 2, 1, -4], [-9, 3, 2, 2**61]])
    keys = torch.tensor([[*own, *[[0, 2**63 - 1, 0, 0]] * (4 - len(own))] for own in of])
    start = torch.randn(2, num_rows, dim).to(dtype)
    grads = torch.randn(num_rows, dim)
    grads[1, :2] = torch.tensor([torch.inf, torch.nan])
    tables = [x.clone() for x in start]
    rows = torch.arange(num_rows)
    segments = [0, 0, 0, 0, -1, 0, num_rows, 0, 0, -1, 1, 0, 0, 0, -1, 0, num_rows, 0, 0, -1]
    given = (torch.tensor(0.5, dtype=torch.float64), torch.tensor(0), keys, "sgd", [0.0])
    _update.fused_update_(tables, [], [grads], [rows], [], [], segments, *given)
    for t, table in enumerate(tables):
        wide = start[t].float() - 0.5 * grads
        mine = [[x for x in of[t] if x[1] <= r][-1] for r in range(num_rows)]
        bit = lambda r, c, k, _, phase, words: (
            splitmix(k, r * words + (phase + c) // 4 + 1) >> 16 * ((phase + c) % 4) & 0xFFFF
        )
        bits = torch.tensor([[bit(r, c, *x) for c in range(dim)] for r, x in enumerate(mine)])
        raw = wide.view(torch.int32).long()
        kept = (raw + bits % 2**cut) >> cut << cut
        truth = torch.where(wide.isfinite(), kept.to(torch.int32).view(torch.float32), wide).to(dtype)
        torch.testing.assert_close(table, truth, rtol=0, atol=0, equal_nan=True)


def test_stochastic_rounding_is_right_in_the_mean():
    """The mean of many stochastically rounded steps, each far below the last digit, is the exact sum."""
    table = torch.ones(200, 16, dtype=torch.bfloat16)
    given = ([torch.ones(200, 16)], [torch.arange(200)], [], [], [0, 0, 0, 0, -1, 0, 200, 0, 0, -1])
    for i in range(100):
        lr, key = (
            torch.tensor(2.0**-12, dtype=torch.float64),
            torch.tensor([[[splitmix(i, 1) - 2**63, 0, 0, 4], [0, 2**63 - 1, 0, 0]]]),
        )
        _update.fused_update_([table], [], *given, lr, torch.tensor(i), key, "sgd", [0.0])
    # rounding to nearest would stay at 1
    assert abs(table.double().mean() - (1 - 100 * 2.0**-12)) < 1e-3


def test_rows_beyond_32_bits():
    """A table of more than 2³² rows is summed and updated as any other table, with rows in ascending order."""
    # only the touched pages take memory
    num_rows = 2**32 + 8
    rows = torch.tensor([2**32 + 7, 3, 2**32 + 3, 2**32 + 8, 2**32 + 7, 2**32 - 1, 3])
    given = ([torch.ones(7, 1)], [rows], [], [], [0, 0, 0, 0, -1, 0, 7, 0, 0, -1])
    taken, sums, count, repeats = _update.coalesce(*given, [num_rows, 1])
    assert taken.tolist() == [3, 2**32 - 1, 2**32 + 3, 2**32 + 7, -1, -1, -1] and int(count) == 4
    assert repeats.tolist() == [2, 1, 1, 2, 0, 0, 0] and torch.equal(sums[:, 0], repeats.float())
    table = torch.empty(num_rows, 1, dtype=torch.bfloat16)
    table[taken[:4]] = 8.0
    lr, step = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0)
    _update.fused_update_([table], [], *given, lr, step, None, "sgd", [0.0])
    assert table[taken[:4], 0].tolist() == [6.0, 7.0, 7.0, 6.0]
    # the two terms have different rows, row 3 and all other rows
    one = [0, 0, 0, 0, -1, 0, 4, 0, 0, -1]
    given = ([torch.ones(4, 1)] * 2, [rows[[1, 6, 1, 3]], rows[[0, 2, 5, 4]]], [], [], [*one, 0, 1, 0, 1, *one[4:]])
    _update.fused_update_([table], [], *given, lr, step, None, "sgd", [0.0])
    assert table[taken[:4], 0].tolist() == [3.0, 6.0, 6.0, 4.0]


NOTHING = [make([]), make([(5, 4)], n=21, bags=1), make([(0, 4)])]


@pytest.mark.parametrize(
    "call", [*NOTHING, make([(5, 4)])._replace(segments=[])], ids=["tables", "bags", "rows", "terms"]
)
def test_nothing_to_do(call):
    """Calls without tables, bags, rows or segments succeed. Rows without entries do not change."""
    tables, slots = state(call, "rowwise_adagrad", {}, torch.float32)
    truth = expected(call, "rowwise_adagrad", {}, tables, slots, torch.float32)
    run(call, "rowwise_adagrad", {}, tables, slots)
    for got, want in zip(leaves(tables, slots), leaves(*truth), strict=True):
        torch.testing.assert_close(got, want)
    assert len(_update.expand(*call)) == len(call.shapes) and len(_update.coalesce(*call)) == 2 * len(call.shapes)


@pytest.mark.parametrize("cuts", [[5, 0, 7, 3, 99], [-(2**62), 2**62, -1, 4, 4], [9, 9, 0, 9, 0], [0, 20, 0, 20, 0]])
def test_wild_offsets_touch_nothing_outside(cuts):
    """Offsets that do not ascend, or that leave the buffer, read only rows of the buffer. Each position is read at most
    once."""
    rows, d = torch.tensor([1, 2, 3, 1, 2, 3, 1, 2, 3]), torch.ones(4, 2)
    call = ([d], [rows], [torch.tensor(cuts)], [], [0, 0, 0, 0, 0, 0, 4, 0, 0, -1], [5, 2])
    taken, sums, count, repeats = _update.coalesce(*call)
    assert int(repeats.sum()) <= 9 and set(taken[: int(count)].tolist()) <= {1, 2, 3}
    assert torch.equal(sums[:, 0], repeats.float())
    assert set(_update.expand(*call)[0].tolist()) <= {-1, 1, 2, 3}


BAD = {
    "table": (0, 1), "d": (1, 7), "column": (2, -1), "columns": (2, 2), "rows": (3, 1), "offsets": (4, 1),
    "first_bag": (5, 2), "num_bags": (6, 5), "max_length": (7, -1), "weights": (9, 1),
}  # fmt: skip


@pytest.mark.parametrize(("at", "value"), BAD.values(), ids=BAD)
def test_a_segment_that_does_not_fit_is_named(at, value):
    """A segment that points outside its tensors raises before anything is written. The error has the segment's
    number."""
    good = [0, 0, 0, 0, 0, 0, 4, 0, 0, 0]
    bad = [*good[:at], value, *good[at + 1 :]]
    table, rows = torch.ones(5, 3), torch.tensor([1, 2, 3, 1])
    given = ([torch.ones(4, 4)], [rows], [torch.tensor([0, 1, 2, 3, 4])], [torch.ones(4)])
    rule = (torch.tensor(0.1, dtype=torch.float64), torch.tensor(0), None, "sgd", [0.0])
    for number, segments in ((1, good + bad), (0, bad + good)):
        for call, *more in (
            (_update.fused_update_, [table], [], *given, segments, *rule),
            (_update.coalesce, *given, segments, [5, 3]),
        ):
            with pytest.raises(ValueError, match=f"segment {number} does not fit"):
                call(*more)
    assert (table == 1).all()


def test_unfit_slots_and_rules_are_named():
    """A slot of another shape or dtype, too few slots, an unknown rule and a missing hyper-parameter each raise."""
    table, given = torch.ones(5, 4), ([], [], [], [], [])
    lr, step = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0)
    update = lambda slots, rule, hyper: _update.fused_update_([table], slots, *given, lr, step, None, rule, hyper)
    with pytest.raises(ValueError, match="slot 'sum' of table 0 does not fit"):
        update([torch.ones(5, 4, dtype=torch.float64)], "adagrad", [0.0, 0.0])
    with pytest.raises(ValueError, match="slot 'sum' of table 0 does not fit"):
        update([torch.ones(5)], "adagrad", [0.0, 0.0])
    with pytest.raises(ValueError, match="`slots` does not match"):
        update([], "adagrad", [0.0, 0.0])
    with pytest.raises(ValueError, match="`hyper` does not match"):
        update([], "sgd", [])
    with pytest.raises(ValueError, match="`rule` is unknown"):
        update([], "adamax", [])


STACKS = [torch.ones(3, 4, 2), torch.ones(3, 5, 2)]
SUMS = {"rule": "adagrad", "hyper": [0.0, 0.0]}
MISFITS = {
    "tables of two and three members": {"tables": [STACKS[0], STACKS[1][:2]]},
    "a table that is not a stack": {"tables": [STACKS[0], STACKS[1][0]]},
    "a first table that is not a stack": {"tables": [STACKS[0][0], STACKS[1]]},
    "one table for all members": {"tables": [torch.ones(4, 2).expand(3, 4, 2), STACKS[1]]},
    "gradients of two members": {"d": [torch.ones(2, 2, 2)]},
    "rows of two members": {"rows": [torch.zeros(2, 2, dtype=torch.int64)]},
    "numbers of two members": {"numbers": torch.ones(2, 1, dtype=torch.float64)},
    "numbers of another rule": {"numbers": torch.ones(2, dtype=torch.float64)},
    "rates of two members": {"lr": torch.ones(2)},
    "steps of four members": {"step": torch.zeros(4)},
    "slots of two members": {**SUMS, "slots": [torch.ones(3, 4, 2), torch.ones(2, 5, 2)]},
    "slots of other rows": {**SUMS, "slots": [torch.ones(3, 4, 2), torch.ones(3, 4, 2)]},
    "keys of two members": {"key": torch.tensor([[[[0, 0, 0, 1], [0, 2**63 - 1, 0, 0]]] * 2] * 2)},
    "windows of two members": {"first": torch.zeros(2, 2, dtype=torch.int64), "dims": [2, 2]},
    "numbers of other slots": {
        "rule": "rmsprop", "hyper": [0.5] * 4, "slots": [x.clone() for x in STACKS for _ in range(2)],
        "numbers": torch.tensor([[0.5] * 4, [0.5, 0.5, 0.0, 0.5], [0.5] * 4], dtype=torch.float64),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_stacks_of_other_members_are_refused(name):
    """Stacks that do not have one number of members, or that share memory, raise before a row is written."""
    given = {
        "tables": [x.clone() for x in STACKS], "slots": [], "d": [torch.ones(3, 2, 2)], "rows": [torch.tensor([0, 1])],
        "offsets": [], "weights": [], "segments": [0, 0, 0, 0, -1, 0, 2, 0, 0, -1], "lr": torch.tensor(0.1),
        "step": torch.tensor(0), "key": None, "rule": "sgd", "hyper": [0.0],
    }  # fmt: skip
    wrong = {**given, **MISFITS[name]}
    with pytest.raises(ValueError) as error:
        _update.fused_update_(**wrong)
    assert str(error.value).startswith("funcrec.kernels.cpp.") and "\n  got " in str(error.value)
    assert all(bool((t == 1).all()) for t in wrong["tables"])
    _update.fused_update_(**given)
    assert torch.equal(given["tables"][0][:, 0], torch.full((3, 2), 0.9))


def test_no_members():
    """Stacks without members have nothing to update."""
    given = ([torch.ones(0, 2, 2)], [torch.tensor([0, 1])], [], [], [0, 0, 0, 0, -1, 0, 2, 0, 0, -1])
    _update.fused_update_([torch.ones(0, 4, 2)], [], *given, torch.ones(0), torch.tensor(0), None, "sgd", [0.0])
