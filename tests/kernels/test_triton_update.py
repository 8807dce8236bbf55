"""Triton's update equals the Python rules, in the interpreter on the CPU. expand and coalesce equal loops.

Tests make the segments of calls by hand: features that share a buffer, cut bags, means, weights, strided cotangents and
ids far outside their tables. The padding holds NaN and garbage. Outputs start as NaN. An unwritten element is therefore
visible.
"""

import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

pytest.importorskip("triton", reason="needs triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    # triton reads this variable when it decorates the kernels
    os.environ["TRITON_INTERPRET"] = "1"

from funcrec.kernels.forms import accumulation_dtype, capacities, capacity_of, is_padded, segments_of  # noqa: E402
from funcrec.kernels.triton import group  # noqa: E402
from programs.update_calls import CASES, numbers  # noqa: E402

import funcrec as fr  # noqa: E402

F32, F64, F16, BF16, I32, I64 = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64,
)  # fmt: skip


# -- cotangents of tables ----------------------------------------------------------------------------------------


class Cotangent(NamedTuple):
    """The cotangents of tables with `shapes`, in the form that the flat operations take."""

    d: list[Tensor]
    rows: list[Tensor]
    offsets: list[Tensor]
    weights: list[Tensor]
    segments: list[int]
    shapes: list[int]


SHAPES = ((50, 16), (7, 5), (0, 8), (9, 33), (8, 16))


@pytest.fixture
def make(ascending, ids):
    def make(shapes=SHAPES, dtype=F32, n=70, num_bags=9) -> Cotangent:
        """Return cotangents of four kinds for each table: two features on a buffer that all tables share, a feature on
        its own buffer, cut to 2, and plain entries."""
        torch.manual_seed(n)
        widest = max((dim for _, dim in shapes), default=1)
        d, cuts = [], ascending(2 * num_bags * len(shapes), 2, n - 3, I32)
        rows, weights, segments = [ids(n, 8)], [torch.rand(n), torch.rand(n, dtype=F64)], []
        weights[0][int(cuts[-1]) :] = torch.nan
        offsets = [torch.cat([cuts, torch.tensor([-(10**6)], dtype=I32)])]
        for t, (num_rows, _) in enumerate(shapes):
            wide = torch.randn(widest + 7, max(num_bags, n)).t().to(dtype)
            d.append(wide if t % 2 else wide.contiguous())
            rows.append(ids(n, num_rows, (I32, I64)[t % 2]))
            offsets.append(ascending(num_bags, 0, n, (I64, I32)[t % 2]))
            # in table 1, the first bags come after the later bags
            first = (2 * t + 1, 2 * t) if t == 1 else (2 * t, 2 * t + 1)
            for k in range(2):
                segments += [t, t, 4 - k, 0, 0, first[k] * num_bags, num_bags, (0, 30)[k], k, -k]
            segments += [t, t, 0, t + 1, t + 1, 0, num_bags, 2, 1, 1 if t % 3 else -1]
            segments += [t, t, 1, t + 1, -1, 0, max(n - 7, 0), 0, 0, 1 if t % 2 else -1]
        return Cotangent(d, rows, offsets, weights, segments, [x for shape in shapes for x in shape])

    return make


@pytest.fixture
def entries(bags):
    def entries(c: Cotangent, table: int) -> list[tuple[int, Tensor, int]]:
        """Return (row, f64 gradient, the entry's position in `expand`) of all entries, from the definition."""
        out, begin, dim = [], 0, c.shapes[2 * table + 1]
        for s in segments_of(c.segments):
            if s.table != table:
                continue
            grads, rows = c.d[s.d].double()[:, s.column : s.column + dim], c.rows[s.rows].tolist()
            scale = c.weights[s.weights].double().tolist() if s.weights >= 0 else [1.0] * len(rows)
            if s.offsets < 0:
                out += [(rows[i], scale[i] * grads[i], begin + i) for i in range(s.num_bags)]
            else:
                for b, bag in enumerate(bags(c.offsets[s.offsets].tolist(), s.first_bag, s.num_bags, s.max_length)):
                    share = 1 / len(bag) if s.mean and bag else 1
                    for i in bag:
                        place = b * s.max_length + i - bag.start if is_padded(s, len(rows)) else i
                        out.append((rows[i], scale[i] * share * grads[b], begin + place))
            begin += capacity_of(s, len(rows))
        return [e for e in out if 0 <= e[0] < c.shapes[2 * table]]

    return entries


CALLS = [{"n": n, "num_bags": b, "dtype": t} for n, b, t in [(70, 9, F32), (65, 1, F64), (63, 0, F32), (33, 4, BF16)]]
NOTHING = [{"shapes": ()}, {"n": 7, "num_bags": 1}, {"shapes": ((5, 3),), "n": 7, "num_bags": 0, "segments": []}]


@pytest.fixture(params=[*CALLS, *NOTHING], ids=str)
def c(request, make) -> Cotangent:
    given = dict(request.param)
    segments = given.pop("segments", None)
    made = make(**given)
    return made if segments is None else made._replace(segments=segments)


def test_expand_writes_every_entry(call, entries, c):
    """expand writes each entry at the entry's position. All other positions have row -1 and zeros."""
    out = call("expand", *c)
    assert len(out) == len(c.shapes)
    for t, dim in enumerate(c.shapes[1::2]):
        rows, grads = out[2 * t : 2 * t + 2]
        size = capacities(segments_of(c.segments), c.rows, len(c.shapes) // 2)[t]
        want_rows, want = torch.full((size,), -1), torch.zeros(size, dim, dtype=F64)
        for row, g, place in entries(c, t):
            want_rows[place], want[place] = row, g
        assert torch.equal(rows, want_rows) and rows.dtype == I64 and grads.dtype == accumulation_dtype(c.d[0].dtype)
        torch.testing.assert_close(grads.double(), want, rtol=2 * torch.finfo(grads.dtype).eps, atol=0)


def test_coalesce_sums_each_row(assert_sums, call, entries, c):
    """coalesce returns the named rows in ascending order, with the sum and the number of entries of each row."""
    out = call("coalesce", *c)
    assert len(out) == 2 * len(c.shapes)
    for t, (num_rows, dim) in enumerate(zip(c.shapes[::2], c.shapes[1::2], strict=True)):
        rows, grads, count, repeats = out[4 * t : 4 * t + 4]
        named = entries(c, t)
        distinct = sorted({row for row, _, _ in named})
        terms = [[g for row, g, _ in named if row == r] for r in distinct]
        n, size = len(distinct), capacities(segments_of(c.segments), c.rows, len(c.shapes) // 2)[t]
        most = min(size, num_rows)
        assert rows.shape == repeats.shape == (most,) and grads.shape == (most, dim) and count.shape == ()
        assert int(count) == n and rows[:n].tolist() == distinct and repeats[:n].tolist() == [len(x) for x in terms]
        assert (rows[n:] == -1).all() and (grads[n:] == 0).all() and (repeats[n:] == 0).all()
        for got, each in zip(grads, terms):
            assert_sums(got, each)


def chunked(terms: Tensor) -> Tensor:
    """Return the sum of terms [n, D] in the order that `group` defines."""
    total = torch.zeros_like(terms[0])
    if len(terms) <= group.CHUNK:
        for x in terms:
            total = total + x
        return total
    for part in terms.split(group.CHUNK):
        total = total + chunked(part)
    return total


@pytest.mark.parametrize("repeats", [1, 2, group.CHUNK, group.CHUNK + 1, 5 * group.CHUNK + 7])
def test_sums_run_in_a_fixed_order(call, repeats):
    """The entries of a row are added in order. More than CHUNK entries are added by chunks. Other rows in the batch
    change no bit of the sum."""
    torch.manual_seed(repeats)
    terms, others = torch.randn(repeats, 3), torch.randn(4 * group.CHUNK + 5, 3)
    for before in (0, group.CHUNK - 1, 2 * group.CHUNK + 3) if repeats > group.CHUNK else (group.CHUNK - 1,):
        more = others[: before + group.CHUNK + 5]
        rows = torch.cat([torch.full((before,), 2), torch.full((repeats,), 5), torch.full((len(more) - before,), 7)])
        d, order = torch.cat([more[:before], terms, more[before:]]), torch.randperm(len(rows))
        # the entries of row 5 keep their order among the entries of other rows
        order[rows[order] == 5] = torch.arange(before, before + repeats)
        order[rows[order] == 2] = torch.arange(before)
        segments = [0, 0, 0, 0, -1, 0, len(rows), 0, 0, -1]
        found, grads, count, _ = call("coalesce", [d[order]], [rows[order]], [], [], segments, [9, 3])
        assert found[: int(count)].tolist() == [2, 5, 7][before == 0 :]
        assert torch.equal(grads[int(before > 0)], chunked(terms))
        if before:
            assert torch.equal(grads[0], chunked(more[:before]))


def test_every_run_has_an_end(make):
    """`starts` lists the start of each run of equal keys, then the end of the last run."""
    c = tree_map(lambda x: x.to(DEVICE) if isinstance(x, Tensor) else x, make(shapes=((50, 16), (9, 5))))
    for num_rows in ([50, 9], [10**6, 10**6]):
        g = group.group_entries(segments_of(c.segments), *c[:4], num_rows, F32)
        lengths = g.keys.cpu().unique_consecutive(return_counts=True)[1]
        runs = len(lengths) + int(g.keys[-1] != sum(num_rows))
        assert g.starts[: runs + 1].tolist() == [0, *lengths.cumsum(0).tolist(), len(g.keys)][: runs + 1]


def test_features_of_one_buffer_share_one_pass():
    """F features in one buffer of N ids need one pass over N positions. The order of a table can need further
    passes."""
    rows, plan = [torch.zeros(100, dtype=I64)], lambda flat: group.plan_passes(segments_of(flat), rows)
    feature = lambda table, first_bag: [table, 0, 0, 0, 0, first_bag, 5, 0, 0, -1]
    (one,) = plan([x for f in range(6) for x in feature(f % 3, 5 * f)])
    assert one.capacity == 100 and len(one.segments) == 6
    twice = group.merged(segments_of([*feature(0, 0), *feature(1, 5)[:3], 1, *feature(1, 5)[4:]]), rows * 2, rows, [])
    assert len(group.plan_passes(twice, rows * 2)) == 1
    more = plan(feature(0, 5) + feature(0, 0) + feature(1, 10) + feature(1, 0))
    assert [[(s.table, s.first_bag) for s in p.segments] for p in more] == [[(0, 5), (1, 10)], [(0, 0)], [(1, 0)]]


# -- updates -----------------------------------------------------------------------------------------------------

LR, STEP = 0.1, 4


def state(c: Cotangent, rule: str, options: dict, dtype: torch.dtype):
    """Return random tables, and slots with the values of a run after a few steps."""
    torch.manual_seed(1)
    tables = {f"t{i}": torch.randn(*s).to(dtype) for i, s in enumerate(zip(c.shapes[::2], c.shapes[1::2], strict=True))}
    slots = getattr(fr.optim, rule)(lr=LR, **options).init(tables)
    for own in slots.values():
        for name, x in own.items():
            x.copy_(torch.randint(0, STEP, x.shape) if name in ("counter", "last") else torch.rand_like(x) / 4)
    return tables, slots


def leaves(tables, slots) -> list[Tensor]:
    return [*tables.values(), *(x for own in slots.values() for x in own.values())]


@pytest.fixture
def updated(call):
    def updated(c: Cotangent, rule: str, options: dict, tables, slots, key=None) -> list[Tensor]:
        """Return the leaves after one fused update."""
        after = [x.to(DEVICE, copy=True) for x in leaves(tables, slots)]
        lr, step = torch.tensor(LR, dtype=F64), torch.tensor(STEP)
        call(
            "fused_update_",
            after[: len(tables)],
            after[len(tables) :],
            *c[:5],
            lr,
            step,
            key,
            rule,
            numbers(rule, options),
        )
        return [x.cpu() for x in after]

    return updated


@pytest.fixture
def expected(entries):
    def expected(c: Cotangent, rule: str, options: dict, tables, slots, dtype: torch.dtype) -> list[Tensor]:
        """Return the leaves after the Python rule in `dtype`."""
        grads, to = {}, lambda x: x.to(dtype)
        for i, (name, x) in enumerate(tables.items()):
            named = entries(c, i)
            rows = torch.tensor([row for row, _, _ in named], dtype=I64)
            terms = torch.stack([g for _, g, _ in named]) if named else torch.zeros(0, x.shape[1])
            grads[name] = fr.RowGrads.from_entries(rows, terms.to(dtype), num_embeddings=x.shape[0])
        own = tree_map(to, (slots, tables))
        return leaves(*getattr(fr.optim, rule)(lr=LR, **options).update(grads, *own, STEP, implementation="reference"))

    return expected


def assert_near(got: Tensor, truth: Tensor, same: Tensor, old: Tensor) -> None:
    """Check |got - truth| <= 2 · (the largest error of the Python rule in f32, `same`, + one rounding). The rounding is
    to got's precision."""
    if got.numel() == 0:
        return
    eps = torch.finfo(accumulation_dtype(got.dtype)).eps
    lost = (same.double() - truth).abs().max() * eps / torch.finfo(F32).eps
    size = truth.abs() + old.double().abs() + 1
    rounding = torch.finfo(got.dtype).eps * truth.abs() + torch.finfo(got.dtype).tiny
    assert ((got.double() - truth).abs() <= 2 * (lost + eps * size) + rounding).all()


RULE_CASES = [(rule, options, (F32, F64, BF16, F16)[i % 4]) for i, (rule, options) in enumerate(CASES)]


@pytest.mark.parametrize(("rule", "options", "dtype"), RULE_CASES, ids=str)
def test_update_is_the_rule(expected, make, updated, rule, options, dtype):
    """The update applies the Python rule to the summed gradient of each named row. The error is at most twice the error
    of the rule in f32, plus roundings."""
    c = make(dtype=accumulation_dtype(dtype))
    tables, slots = state(c, rule, options, dtype)
    exact, plain = (expected(c, rule, options, tables, slots, x) for x in (F64, F32))
    got, before = updated(c, rule, options, tables, slots), leaves(tables, slots)
    for leaf in zip(got, exact, plain, before, strict=True):
        assert_near(*leaf)


def test_update_of_tables_of_all_dtypes_at_once(expected, make, updated):
    """One call updates tables of different dims and dtypes in the same way as separate calls."""
    c = make(dtype=F64)
    tables, slots = state(c, "adam", {}, F64)
    dtypes = dict(zip(tables, (BF16, F64, F32, F32, BF16)))
    tables = {n: t.to(dtypes[n]) for n, t in tables.items()}
    slots = {n: {k: x.to(accumulation_dtype(dtypes[n])) for k, x in own.items()} for n, own in slots.items()}
    for got, truth in zip(updated(c, "adam", {}, tables, slots), expected(c, "adam", {}, tables, slots, F64)):
        digits = torch.finfo(got.dtype).eps + 8 * torch.finfo(accumulation_dtype(got.dtype)).eps
        assert ((got.double() - truth).abs() <= digits * (1 + truth.abs()) * 4).all()


def test_unnamed_rows_keep_their_bits_and_zero_gradients_touch(entries, make, updated):
    """A row that no entry names keeps every bit. A row with a zero gradient moves as the rule says."""
    c = make(shapes=((60, 8),), n=30)
    c = c._replace(d=[torch.zeros_like(x) for x in c.d])
    tables, slots = state(c, "adam", {}, F32)
    named = torch.zeros(60, dtype=torch.bool)
    named[[row for row, _, _ in entries(c, 0)]] = True
    for got, old in zip(updated(c, "adam", {}, tables, slots), leaves(tables, slots), strict=True):
        assert torch.equal(got[~named], old[~named]) and (got[named] != old[named]).any(1).all()


def splitmix(key: int, i: int) -> int:
    z = (key + 0x9E3779B97F4A7C15 * i) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize(("dtype", "cut"), [(BF16, 16), (F16, 13)], ids=str)
@pytest.mark.parametrize("dim", [3, 70])
def test_stochastic_rounding_is_a_function_of_the_key(updated, dtype, cut, dim):
    """Element (row, column) is rounded with 16 bits of SplitMix64. The bits depend on the key, the phase and the words
    per row in the table's list for the row's segment. inf and NaN do not change."""
    num_rows, of = 5, ([[-(2**62), 0, 0, -(-dim // 4)]], [[12345, 0, 3, 90], [7, 2, 1, -4], [-9, 3, 2, 2**61]])
    keys = torch.tensor([[*own, *[[0, 2**63 - 1, 0, 0]] * (4 - len(own))] for own in of])
    tables = {f"t{t}": torch.randn(num_rows, dim).to(dtype) for t in range(2)}
    grads = torch.randn(num_rows, dim)
    grads[1, :2] = torch.tensor([torch.inf, torch.nan])
    segments = [0, 0, 0, 0, -1, 0, num_rows, 0, 0, -1, 1, 0, 0, 0, -1, 0, num_rows, 0, 0, -1]
    c = Cotangent([grads], [torch.arange(num_rows)], [], [], segments, [num_rows, dim] * 2)
    got = updated(c, "sgd", {}, tables, {}, key=keys)
    for t, table in enumerate(tables.values()):
        wide = table.float() - torch.tensor(LR) * grads
        mine = [[x for x in of[t] if x[1] <= r][-1] for r in range(num_rows)]
        bit = lambda r, c, k, _, phase, words: (
            splitmix(k, r * words + (phase + c) // 4 + 1) >> 16 * ((phase + c) % 4) & 0xFFFF
        )
        bits = torch.tensor([[bit(r, c, *x) for c in range(dim)] for r, x in enumerate(mine)])
        kept = (wide.view(I32).long() + bits % 2**cut) >> cut << cut
        truth = torch.where(wide.isfinite(), kept.to(I32).view(F32), wide).to(dtype)
        torch.testing.assert_close(got[t], truth, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rule": "nothing"}, "`rule` is unknown"),
        ({"slots": []}, "`slots` has another length"),
        ({"slots": [torch.zeros(5, dtype=F64)]}, "slot 0 does not fit its table"),
        ({"tables": [torch.zeros(3, 5).t()]}, "table 0 is not contiguous"),
        ({"segments": [0, 0, 0, 0, -1, 0, 5, 0, 0, -1]}, "segment 0 is longer than its rows"),
        ({"segments": [0, 0, 0, 0, -1, 0, 7, 0, 0, -1]}, "segment 0 is longer than its d"),
        ({"segments": [0, 0, 0, 0, 0, 2, 4, 0, 0, -1]}, "segment 0 is longer than its offsets"),
    ],
)
def test_updates_that_do_not_fit_are_refused(call, ids, change, said):
    """Updates that do not fit raise before anything is written."""
    ids, cuts, number = torch.zeros(4, dtype=I64), torch.zeros(5, dtype=I64), torch.tensor(0.1, dtype=F64)
    given = {
        "tables": [torch.zeros(5, 3)], "slots": [torch.zeros(5)], "d": [torch.zeros(6, 3)], "rows": [ids],
        "offsets": [cuts],
        "weights": [], "segments": [0, 0, 0, 0, -1, 0, 4, 0, 0, -1], "lr": number, "step": torch.tensor(0), "key": None,
        "rule": "rowwise_adagrad", "hyper": [1e-8, 0.0, 0.0, 0.0],
    }  # fmt: skip
    with pytest.raises(ValueError, match=said):
        call("fused_update_", *{**given, **change}.values())


def test_nothing_is_read_on_the_host(call, make, no_host_reads, updated):
    """No operation reads a tensor's value on the host. Each operation can therefore be part of a CUDA graph."""
    c = make()
    tables, slots = state(c, "adam", {}, F32)
    with no_host_reads():
        call("expand", *c)
        call("coalesce", *c)
        updated(c, "adam", {}, tables, slots)
