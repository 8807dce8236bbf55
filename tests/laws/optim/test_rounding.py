"""Stochastic rounding of 16-bit tables is right on average, exact where possible, and has the same bits everywhere."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.surroundings import on_threads

import funcrec as fr
from funcrec.core.random import GAMMA, MIX, wrap
from funcrec.optim._rounding import round_stochastic, row_bits
from funcrec.tables import BEHIND, name_number, origin_of
from funcrec.testing import assert_trees_close

HALF = (torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("dtype", HALF, ids=str)
# bits of the fraction of f32 that the dtype lacks
DROPPED = {torch.bfloat16: 16, torch.float16: 13}
LR = 2.0**-3


def rounded(x, dtype, seed=0, rows=None):
    rows = torch.arange(x.shape[0]) if rows is None else rows
    return round_stochastic(x, dtype, rows, draws(fr.key(seed), x.shape[1]))


def draws(key, dim, *more):
    """Return the draw parameters of a table with this key, whose rows are not moved."""
    return torch.tensor([[int(key), 0, 0, -(-dim // 4)], *more, [0, 2**63 - 1, 0, 0]])


def neighbours(x, dtype):
    """Return the values of the dtype below and above in size."""
    keep = ~((1 << DROPPED[dtype]) - 1)
    low = (x.view(torch.int32) & keep).view(torch.float32)
    high = ((x.view(torch.int32) & keep) + (1 << DROPPED[dtype])).view(torch.float32)
    return low, high


@by_dtype
def test_the_mean_over_keys_is_the_value(dtype):
    """Over 1000 keys, the mean of the rounded value is the value within five standard errors. Each result is one of
    two neighbours."""
    x = torch.tensor([[1.001, -3.14159, 0.1, 1000.3, 2.0**-13 * 1.3, -1.0]])
    low, high = neighbours(x, dtype)
    draws = torch.cat([rounded(x, dtype, seed) for seed in range(1000)])
    assert bool(((draws == low) | (draws == high)).all())
    deviation = (high - low).abs() / 2 / 1000**0.5
    assert bool(((draws.double().mean(0) - x).abs() <= 5 * deviation).all())


@by_dtype
@settings(max_examples=20)
@given(seed=st.integers(0, 10**9))
def test_what_the_dtype_holds_is_not_changed(dtype, seed):
    """A value that the 16-bit dtype holds, of any size, does not change. NaN and infinities do not change either."""
    bits = torch.randint(-(2**15), 2**15, (40, 5), generator=torch.Generator().manual_seed(seed)).to(torch.int16)
    x = bits.view(dtype).to(torch.float32)
    assert_trees_close(rounded(x, dtype, seed).to(dtype).to(torch.float32), x)
    odd = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0]])
    assert_trees_close(rounded(odd, dtype, seed), odd)


def test_other_dtypes_are_not_rounded():
    """f32 and f64 rows are returned as the same tensor."""
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(2, 3, dtype=dtype)
        assert rounded(x, dtype) is x


@pytest.mark.parametrize("dim", [1, 3, 4, 9])
def test_bits_are_those_of_the_counter(dim):
    """Element (r, c) uses 16 bits of the hash of key + GAMMA · (r · ceil(D / 4) + c // 4 + 1), computed here in
    Python's integers."""
    key, rows = fr.key(3), torch.tensor([0, 5, 2**40])

    def mix(z):
        for shift, factor in (*MIX, (31, 1)):
            z = ((z ^ (z >> shift)) * factor) % 2**64
        return z

    hashed = lambda r, c: mix((int(key) + GAMMA * (r * -(-dim // 4) + c // 4 + 1)) % 2**64)
    need = [[(hashed(r, c) >> (16 * (c % 4))) & 0xFFFF for c in range(dim)] for r in rows.tolist()]
    assert row_bits(draws(key, dim), rows, dim).tolist() == need
    assert wrap(2**63) == -(2**63)


def tables_and_grads(names, dtype, seed=0, dim=5):
    """Return tables of 30 rows, and gradients of 40 entries with repeats. Sums of the entries are exact in any
    order."""
    out = {}
    for k, n in enumerate(names):
        draw = torch.Generator().manual_seed(seed + ord(n[0]))
        rows = torch.randint(0, 30, (40,), generator=draw)
        grads = torch.randint(-99, 99, (40, dim + k), generator=draw) / 2.0**9
        table = torch.randn(30, dim + k, generator=draw).to(dtype)
        out[n] = table, fr.RowGrads.from_entries(rows, grads, num_embeddings=30)
    return {n: t for n, (t, _) in out.items()}, {n: g for n, (_, g) in out.items()}


def update(optimizer, tables, grads, step=0, key=0, **kernel):
    opt = fr.optim.stochastic_rounding(optimizer, key=fr.key(key))
    return opt.update(grads, opt.init(tables), tables, step, **kernel)


OPTIMIZERS = {
    "sgd": fr.optim.sgd(LR),
    "rowwise_adagrad": fr.optim.rowwise_adagrad(LR),
    "adam": fr.optim.adam(LR),
    "own rule": fr.optim.row_optimizer(
        init=lambda t: {}, rule=lambda row, grad, s, hyper: (row - hyper.lr * grad, s), lr=LR
    ),
}


@by_dtype
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_implementation_rounds_with_the_same_bits(dtype, name):
    """The C++ kernel and the reference give the same tables for sgd and a user's rule. The f32 rows of other rules
    differ by a rounding, and at most one element of their tables differs."""
    tables, grads = tables_and_grads(("a", "b"), dtype)
    (cpp, _), (reference, _) = (update(OPTIMIZERS[name], tables, grads, implementation=i) for i in ("cpp", "reference"))
    if name in ("sgd", "own rule"):
        assert_trees_close(cpp, reference)
    differ = sum(int((cpp[n] != reference[n]).sum()) for n in tables)
    assert differ <= 1
    nearest, _ = OPTIMIZERS[name].update(grads, OPTIMIZERS[name].init(tables), tables, 0)
    assert any(not torch.equal(nearest[n], cpp[n]) for n in tables), "nothing was rounded at random"


@by_dtype
def test_rows_of_several_tables_are_rounded_as_theirs(dtype):
    """Rows that a bank has of two tables are rounded with the bits that they have in these tables."""
    tables, grads = tables_and_grads("a", dtype)
    segments = [origin_of("u", 5), origin_of("v", 5, row=3, begin=12), BEHIND]
    moved = {"a": replace(grads["a"], origin=torch.tensor(segments))}
    results = [update(fr.optim.sgd(LR), tables, moved, implementation=i)[0]["a"] for i in ("cpp", "reference")]
    assert_trees_close(*results)
    dense = grads["a"].to_dense()
    for name, first, rows in (("u", 0, slice(0, 12)), ("v", 3, slice(12, 30))):
        at = torch.arange(30)[first : first + rows.stop - rows.start]
        own = {name: torch.zeros(30, 5, dtype=dtype).index_copy(0, at, tables["a"][rows])}
        alone = {name: fr.RowGrads.from_entries(at, dense[rows], num_embeddings=30)}
        assert_trees_close(update(fr.optim.sgd(LR), own, alone)[0][name][at], results[0][rows])


@by_dtype
def test_the_derivative_of_a_rounded_row_is_one(dtype):
    """The mean of rounded rows is the rows, so their derivative is 1, in reverse and in forward mode."""
    x = torch.linspace(-1, 1, 12).view(3, 4)
    assert torch.equal(torch.func.grad(lambda x: rounded(x, dtype).sum())(x), torch.ones(3, 4))
    out, slope = torch.func.jvp(lambda x: rounded(x, dtype), (x,), (2 * x,))
    assert torch.equal(slope, (2 * x).to(dtype).to(x.dtype)) and torch.equal(out, rounded(x, dtype))


@by_dtype
def test_one_and_two_threads_round_alike(dtype):
    """The bits do not depend on the number of threads."""
    tables, grads = tables_and_grads(("a", "b"), dtype)
    results = []
    for threads in (1, 2):
        with on_threads(threads):
            results.append(update(fr.optim.adam(LR), tables, grads))
    assert_trees_close(*results)


@pytest.mark.parametrize("implementation", ["cpp", "reference"])
@by_dtype
def test_a_tables_bits_are_its_own(dtype, implementation):
    """A table is rounded as if it were alone, whatever other tables of any dtype are in the call, and in any order."""
    tables, grads = tables_and_grads(("a", "b", "c"), dtype)
    tables["b"] = tables["b"].float()
    go = functools.partial(update, fr.optim.sgd(LR), implementation=implementation)
    together = go(tables, grads)[0]
    turned = go({n: tables[n] for n in "cba"}, {n: grads[n] for n in "cba"})[0]
    for n in tables:
        alone = go({n: tables[n]}, {n: grads[n]})[0]
        assert_trees_close((together[n], turned[n]), (alone[n], alone[n]))


def test_a_rows_bits_are_its_own():
    """A row is rounded as if it were the only touched row."""
    tables, grads = tables_and_grads(("a",), torch.bfloat16)
    together = update(fr.optim.sgd(LR), tables, grads)[0]["a"]
    dense = grads["a"].to_dense()
    for r in range(30):
        g = fr.RowGrads.from_entries(torch.tensor([r]), dense[r : r + 1], num_embeddings=30)
        assert_trees_close(update(fr.optim.sgd(LR), tables, {"a": g})[0]["a"][r], together[r])


def test_keys_steps_and_names_draw_differently():
    """Another key, step or table name gives other bits. The same key, step and name give the same bits."""
    tables, grads = tables_and_grads(("a",), torch.bfloat16)
    go = lambda **given: update(fr.optim.sgd(LR), tables, grads, **given)[0]["a"]
    assert torch.equal(go(), go())
    assert not torch.equal(go(), go(key=1)) and not torch.equal(go(), go(step=1))
    assert name_number("a") != name_number("b")


def test_small_updates_add_up():
    """600 steps of a 256th of a rounding unit move a bf16 table by 600 / 256 units on average. Rounding to nearest
    would not move the table."""
    tables = {"t": torch.ones(1, 4000, dtype=torch.bfloat16)}
    grads = {"t": fr.RowGrads.from_entries(torch.tensor([0]), -torch.ones(1, 4000), num_embeddings=1)}
    moved = nearest = tables
    for step in range(600):
        moved = update(fr.optim.sgd(2.0**-15), moved, grads, step)[0]
        nearest = fr.optim.sgd(2.0**-15).update(grads, {"t": {}}, nearest, step)[0]
    assert_trees_close(nearest, tables)
    units = (moved["t"].double() - 1) * 2.0**7
    assert abs(float(units.mean()) - 600 / 256) < 5 * (600 / 256 / 4000) ** 0.5


@pytest.mark.parametrize("dim", range(1, 10))
def test_rows_share_no_random_word(dim):
    """A row takes its words after those of the row before it: four columns a word, whole words for each row."""
    last, first = origin_of("t", dim, row=6, column=dim - 1), origin_of("t", dim, row=7)
    assert first[1] == last[1] + 1 and first[1] == 7 * first[4]
    assert last[1] * 4 + last[3] == 6 * 4 * last[4] + dim - 1
