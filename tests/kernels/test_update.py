"""The fused update of every implementation equals the Python rules. Some laws of the update hold to the last bit.

    update(grads) = rule(table[row], Σ of the row's terms, slots[row]) for every named row. Unnamed rows keep their
    bits.

Gradients are sums of bags and entries with all their options, ids outside the tables and NaN in the padding. The
reference result is that of the rule in f64. The memory of outputs is full of NaN before a call (tests/conftest.py).
Shapes: B bags, N ids, R rows, D dim.
"""

import pytest
import torch
from funcrec.kernels import ops
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.surroundings import on_threads
from programs.update_calls import CASES
from torch import Tensor
from torch.utils._pytree import tree_map

import funcrec as fr
from funcrec.core._tree import replace
from funcrec.optim._rounding import draws_of, round_stochastic
from funcrec.tables._rowgrads import Bags, Entries, RowGrads, terms_of
from funcrec.testing import assert_trees_close

F32, F64, F16, BF16, I32, I64 = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64,
)  # fmt: skip
SIZES = [0, 1, 63, 65]
LR = 0.125


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    """Return random normal numbers. No two of their sums are equal, so that no rule is at the edge of a jump."""
    return torch.randn(shape, generator=generator(seed), dtype=F64).to(dtype)


def rows_of(size: int, num_rows: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return random rows with repeats. Every fifth row is outside the table."""
    rows = torch.randint(0, num_rows, (size,), generator=generator(seed))
    wild = torch.tensor([num_rows, -1, torch.iinfo(dtype).max, torch.iinfo(dtype).min])
    place = torch.arange(size)
    return torch.where(place % 5 == 4, wild[place // 5 % 4], rows).to(dtype)


@st.composite
def row_grads(draw, num_rows: int, dim: int, dtype: torch.dtype, unit: float | None = None) -> RowGrads:
    """Return up to three random terms of a table's cotangent, as multiples of `unit` if `unit` is given. Shrinks to no
    entries."""
    terms = []
    for _ in range(draw(st.integers(1, 3))):
        seed, size, kind = draw(st.integers(0, 2**16)), draw(st.sampled_from(SIZES)), draw(st.integers(0, 2))
        rows = rows_of(size, num_rows, draw(st.sampled_from([I64, I32])), seed)
        bags = draw(st.sampled_from([1, 5]))
        d = noise(dim + 3, bags if kind else size, dtype=dtype, seed=seed).t() * draw(st.sampled_from([1, 1, 0]))
        d = d if unit is None else (d / unit).round() * unit
        if kind == 0:
            terms.append(Entries(rows, d[:, 3:], torch.tensor(max(size - 2, 0)) if draw(st.booleans()) else None))
            continue
        offsets = (
            torch.randint(1, max(size - 1, 2), (bags + 1,), generator=generator(seed)).sort().values.clamp(max=size)
        )
        weighted = draw(st.booleans()) and unit is None
        place = torch.arange(size)
        padding = (place < offsets[0]) | (place >= offsets[-1])
        weights = torch.where(padding, torch.nan, noise(size, seed=seed + 1)) if weighted else None
        max_length, mean = draw(st.sampled_from([0, 1, 3, 40])), draw(st.booleans()) and unit is None
        f = ops.Feature(0, 0, 0, max_length, mean, weighted, draw(st.integers(0, 3)))
        terms.append(Bags(d.contiguous() if kind == 1 else d, rows, offsets, weights, (f,)))
    return RowGrads(tuple(terms), num_rows, dim, False)


def optimizer_of(rule: str, options: dict) -> fr.optim.RowOptimizer:
    return getattr(fr.optim, rule)(lr=LR, **options)


def state_of(optimizer: fr.optim.RowOptimizer, grads: dict[str, RowGrads], dtypes, step: int):
    """Return tables, with NaN in rows without a gradient, and slots after some steps."""
    tables, named = {}, {}
    for i, (name, g) in enumerate(grads.items()):
        rows = g.coalesce(implementation="reference")
        named[name] = torch.zeros(g.num_embeddings, dtype=torch.bool)
        named[name][rows.rows[: rows.count]] = True
        x = noise(g.num_embeddings, g.dim, seed=i)
        tables[name] = torch.where(named[name][:, None], x, torch.nan).to(dtypes[i])
    slots = optimizer.init(tables)
    for own in slots.values():
        for k, x in own.items():
            counts = torch.randint(0, max(step, 1), x.shape, generator=generator(3))
            x.copy_(counts if k in ("counter", "last") else noise(*x.shape, seed=4).square() / 4)
    return tables, slots, named


def run(optimizer, grads, slots, tables, step, implementation="reference", device="cpu", key=None):
    """Return (tables, slots) of an update on the implementation's device. The function checks that the arguments of the
    update do not change."""
    move = lambda tree, to: tree_map(lambda x: x.to(to) if isinstance(x, Tensor) else x, tree)
    args = move((grads, slots, tables, torch.tensor(step)), device)
    before = move(args[1:3], "cpu") if device != "cpu" else tree_map(torch.clone, args[1:3])
    out = optimizer.update(*args, implementation=implementation, key=move(key, device))
    assert_trees_close(move(args[1:3], "cpu"), before)
    return move(out, "cpu")


def cast(tree, dtype: torch.dtype):
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


def assert_near(got: Tensor, truth: Tensor, same: Tensor, old: Tensor, table: torch.dtype) -> None:
    """Check |got - truth| <= 2 · (the error of the Python rule in got's precision, `same`, + one rounding) + one
    rounding to 16 bits."""
    if got.numel() == 0:
        return
    eps = torch.finfo(ops.accumulation_dtype(table)).eps
    lost = (same.double() - truth).abs().max() if eps > 1e-8 else 1e-12
    bound = 2 * (lost + eps * (truth.abs() + old.double().abs()))
    short = torch.finfo(got.dtype)
    bound += (short.eps * truth.abs() + short.tiny) * (got.dtype in (F16, BF16))
    worst = int(((got.double() - truth).abs() - bound).argmax())
    assert ((got.double() - truth).abs() <= bound).all(), (
        got.flatten()[worst],
        truth.flatten()[worst],
        bound.flatten()[worst],
    )


def refuses(known, rule: str, options: dict) -> bool:
    return rule not in known.rules or bool(known.unsupported & {name for name, x in options.items() if x})


@pytest.mark.needs("fused_update")
@pytest.mark.parametrize("rule_options", CASES, ids=lambda c: "-".join([c[0], *map(str, c[1].values())]))
def test_update_is_the_rule(implementation, known, device, rule_options):
    """Every named row moves as the Python rule says, with at most twice the error of the rule. All other rows keep
    every bit."""
    rule, options = rule_options
    optimizer = optimizer_of(rule, options)
    if refuses(known, rule, options):
        g = RowGrads.from_entries(torch.tensor([0]), torch.ones(1, 4), num_embeddings=2)
        tables = {"t": torch.zeros(2, 4)}
        with pytest.raises(ValueError):
            optimizer.update({"t": g}, optimizer.init(tables), tables, 0, implementation=implementation)
        return

    @settings(max_examples=1 if known.slow else 4)
    @given(st.data())
    def law(data):
        # f64 has its own update, because a gradient in f64 would raise the precision of the other tables
        for dtypes in ((F32, BF16, F16), (F64,)):
            dtypes = [x for x in dtypes if x in known.dtypes]
            step, dims = data.draw(st.sampled_from([0, 4, 1000])), data.draw(st.permutations(known.dims))
            shapes = [(data.draw(st.sampled_from([40, 1, 7])), dim) for dim, _ in zip(dims, dtypes)]
            wide = F64 if dtypes == [F64] else F32
            grads = {f"t{i}": data.draw(row_grads(*shape, wide)) for i, shape in enumerate(shapes)}
            tables, slots, named = state_of(optimizer, grads, dtypes, step)
            got = run(optimizer, grads, slots, tables, step, implementation, device)
            same = run(optimizer, *(cast(x, wide) for x in (grads, slots, tables)), step)
            truth = run(optimizer, *(cast(x, F64) for x in (grads, slots, tables)), step)
            for name, table in tables.items():
                leaves = lambda t, s: [t[name], *(s[name][k] for k in slots[name])]  # noqa: B023
                for x, exact, plain, old in zip(leaves(*got), leaves(*truth), leaves(*same), leaves(tables, slots)):
                    moved = named[name]
                    assert x.dtype == old.dtype
                    assert torch.equal(x[~moved].nan_to_num(7.0), old[~moved].nan_to_num(7.0))
                    assert_near(x[moved], exact[moved], plain[moved], old[moved], table.dtype)

    law()


@pytest.mark.needs("fused_update", "coalesce")
@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adam", "lamb"])
def test_update_is_coalesce_and_the_rule(implementation, known, device, rule):
    """The update gives the same bits from the coalesced gradient as from its terms."""
    optimizer = optimizer_of(rule, {})

    @settings(max_examples=1 if known.slow else 4)
    @given(st.data())
    def law(data):
        dtypes = [data.draw(st.sampled_from([F32, BF16])), F32]
        grads = {n: data.draw(row_grads(7, dim, F32)) for n, dim in zip("ab", known.dims[2:])}
        tables, slots, _ = state_of(optimizer, grads, dtypes, 4)
        to = lambda g: tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, g)
        summed = {n: to(g).coalesce(implementation=implementation) for n, g in grads.items()}
        each = [run(optimizer, g, slots, tables, 4, implementation, device) for g in (grads, summed)]
        assert_trees_close(*each)

    law()


@pytest.mark.needs("fused_update")
@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adagrad"])
def test_tables_in_one_are_tables_apart(implementation, known, device, rule):
    """Tables that lie one after the other in a larger table get the bits of separate updates, for any order of the
    terms."""
    optimizer = optimizer_of(rule, {})

    @settings(max_examples=1 if known.slow else 8)
    @given(st.data())
    def law(data):
        dim, heights = known.dims[2], data.draw(st.lists(st.sampled_from([1, 7, 40, 100]), min_size=2, max_size=4))
        grads = {f"t{i}": data.draw(row_grads(r, dim, F32)) for i, r in enumerate(heights)}
        tables, slots, _ = state_of(optimizer, grads, [F32] * len(grads), 4)
        starts, terms = dict(zip(grads, [sum(heights[:i]) for i in range(len(heights))])), []
        for name, g in grads.items():
            for at, t in enumerate(g.terms):
                inside = (t.rows >= 0) & (t.rows < g.num_embeddings)
                moved = torch.where(inside, t.rows.long() + starts[name], -1).to(t.rows.dtype)
                terms.append((at, replace(t, rows=moved)))
        terms = tuple(t for _, t in sorted(terms, key=lambda x: x[0]))
        together = lambda xs: {"one": torch.cat(list(xs))}
        own = {k: torch.cat([s[k] for s in slots.values()]) for k in slots["t0"]}
        one = {"one": RowGrads(terms, sum(heights), dim, False)}
        got = run(optimizer, one, {"one": own}, together(tables.values()), 4, implementation, device)
        apart = run(optimizer, grads, slots, tables, 4, implementation, device)
        want = together(apart[0].values()), {"one": {k: torch.cat([s[k] for s in apart[1].values()]) for k in own}}
        assert_trees_close(got, want)

    law()


@pytest.mark.needs("expand", "coalesce")
def test_coalesce_is_the_sum_of_what_expand_writes(ask, known):
    """coalesce has the bits of the entries of expand, added row by row in order. The positions of entries do not depend
    on other tables."""

    @settings(max_examples=2 if known.slow else 12)
    @given(st.data())
    def law(data):
        dtype = data.draw(st.sampled_from([F32, F64]))
        grads = [data.draw(row_grads(num_rows, dim, dtype)) for num_rows, dim in [(7, known.dims[1]), (1, 2)]]
        shapes = [(g.num_embeddings, g.dim) for g in grads]
        entries = ask("expand", terms_of(grads), shapes)
        summed = ask("coalesce", terms_of(grads), shapes)
        for g, (rows, terms), (distinct, sums, count, repeats) in zip(grads, entries, summed):
            assert_trees_close([(rows, terms)], ask("expand", terms_of([g]), [(g.num_embeddings, g.dim)]))
            want, times = torch.zeros(g.num_embeddings, g.dim, dtype=dtype), torch.zeros(g.num_embeddings, dtype=I64)
            for row, term in zip(rows.tolist(), terms):
                if row >= 0:
                    want[row] += term
                    times[row] += 1
            n = int((times > 0).sum())
            assert int(count) == n and distinct[:n].tolist() == times.nonzero().flatten().tolist()
            assert_trees_close([sums[:n], repeats[:n]], [want[times > 0], times[times > 0]])
            assert (distinct[n:] == -1).all() and not sums[n:].any() and not repeats[n:].any()

    law()


@pytest.mark.needs("gather_rows")
@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adam"])
def test_stochastic_rounding_is_of_the_f32_update(implementation, known, device, rule):
    """With a key, a 16-bit table is updated in f32, then rounded by the bits of the key for each row and column."""
    optimizer, key = optimizer_of(rule, {}), fr.key(3)
    if "key" in known.unsupported:
        g, tables = (
            RowGrads.from_entries(torch.tensor([0]), torch.ones(1, 4), num_embeddings=2),
            {"t": torch.ones(2, 4).half()},
        )
        if rule in known.rules:
            with pytest.raises(ValueError, match="key"):
                optimizer.update({"t": g}, optimizer.init(tables), tables, 0, implementation=implementation, key=key)
        return

    @settings(max_examples=1 if known.slow else 4)
    @given(st.data())
    def law(data):
        dtypes = [F16, BF16, F32]
        # the sums of sgd are then exact
        unit = 1 / 4 if rule == "sgd" else None
        grads = {
            n: data.draw(row_grads(9, dim, F32, unit)) for n, dim in zip("abc", data.draw(st.permutations(known.dims)))
        }
        tables, slots, named = state_of(optimizer, grads, dtypes, 4)
        plain = run(optimizer, grads, slots, cast(tables, F32), 4, implementation, device)
        got = run(optimizer, grads, slots, tables, 4, implementation, device, key)
        for n, x in plain[0].items():
            rows = named[n].nonzero().flatten()
            want = tables[n].clone()
            want[rows] = round_stochastic(
                x[rows], want.dtype, rows, draws_of(key, {n: grads[n]}, {n: tables[n]})[0]
            ).to(want.dtype)
            assert_trees_close(got[0][n], want)
        assert_trees_close(got[1], plain[1])
        if rule == "sgd":
            assert_trees_close(got, run(optimizer, grads, slots, tables, 4, key=key))

    law()


def everything(ask, implementation: str, num_ids: int) -> list:
    """Return the results of every operation of the implementation, on sizes that threads would share."""
    num_rows, num_bags, dim = num_ids // 40, num_ids // 25, 64
    table, rows = noise(num_rows, dim), rows_of(num_ids, num_rows, I64, 5)
    offsets = torch.randint(0, num_ids - 9, (num_bags + 1,), generator=generator(6)).sort().values
    weights, d = noise(num_ids, seed=7), noise(num_bags, 2 * dim, seed=8)
    features = [ops.Feature(0, 0, 0, 0, True, True, 0), ops.Feature(0, 0, 0, 8, False, False, dim)]
    segment = ops.Segment(0, 0, 0, 0, 0, 0, num_bags, 0, True, 0)
    terms = ops.Terms(
        [d], [rows], [offsets], [weights], [segment, segment._replace(column=dim, max_length=8, weights=-1)]
    )
    rule = (torch.tensor(0.1, dtype=F64), torch.tensor(0), None, "rowwise_adagrad", [1e-8, 0.0, 0.0, 0.0])
    count = torch.tensor(num_rows // 2)
    calls = {
        "pooled_lookup": ([table], [rows], offsets, weights, features, num_bags),
        "pooled_lookup_weights": (d, [table], [rows], offsets, weights, features),
        "gather_rows": (table, rows),
        "scatter_rows": (table, torch.randperm(num_rows, generator=generator(9)), count, -table),
        "expand": (terms, [(num_rows, dim)]), "coalesce": (terms, [(num_rows, dim)]),
        "fused_update": ([table], [[torch.ones(num_rows)]], terms, *rule),
        "take_ranges": (weights, offsets[:-1].flip(0), offsets.diff().flip(0), num_ids),
        "bucketize": (rows, offsets, weights, 7, num_rows // 6 + 1), "to_padded": (weights[:, None], offsets, 9),
        "from_padded": (d.reshape(num_bags, 8, 16), offsets, num_ids),
        "dot_interaction": ([d[:, None, :dim], d.view(num_bags, 2, dim)],),
        "dot_interaction_transpose": (d[:, :3], [d[:, None, :dim], d.view(num_bags, 2, dim)]),
        "bag_extrema": (weights.reshape(-1, 4), offsets // 4, True, True),
        "bag_extrema_transpose": (d[:, 0], offsets, offsets[:-1], num_ids),
    }  # fmt: skip
    return [ask(name, *args) for name, args in calls.items() if ops.has(name, implementation)]


@pytest.mark.needs("pooled_lookup")
def test_threads_and_repetition_change_no_bit(ask, implementation, known):
    """One, two and three threads, and a repeated call, give the same bits."""
    size = 100 if known.slow else 20_000
    answers = []
    for n in (1, 2) if known.slow else (1, 2, 3, 1):
        with on_threads(n):
            answers.append(everything(ask, implementation, size))
    for other in answers[1:]:
        assert_trees_close(other, answers[0])
