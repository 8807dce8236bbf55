"""Combinators of row optimizers, and schedules."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.optim import (
    Stage,
    accumulate,
    adagrad,
    adam,
    by_table,
    clip,
    freeze,
    momentum,
    row_optimizer,
    rowwise_adagrad_cowclip,
    schedule,
    sgd,
)  # fmt: skip
from funcrec.testing import assert_trees_close, garbage_padding

NAMES = ("user", "item", "page")
ROWS, DIM, ENTRIES = 5, 2, 4


def generated(seed: int, steps: int = 6):
    """Return three tables, and gradients for two or three of the tables per step."""
    draw = torch.Generator().manual_seed(seed)
    tables = {n: torch.randn(ROWS, DIM, generator=draw) for n in NAMES}
    ids = lambda: torch.randint(-1, ROWS - 1, (ENTRIES,), generator=draw)
    one = lambda: fr.RowGrads.from_entries(
        ids(), torch.randn(ENTRIES, DIM, generator=draw), num_embeddings=ROWS, count=torch.tensor(3)
    )
    return tables, [{n: one() for n in (NAMES if i % 2 else NAMES[:2])} for i in range(steps)]


def run(opt, tables, grads, start=0):
    slots = opt.init(tables)
    for step, g in enumerate(grads):
        tables, slots = opt.update(g, slots, tables, start + step)
    return tables, slots


def only(x, names):
    return {n: x[n] for n in names if n in x}


def test_by_table():
    """Each table moves as its own optimizer would move it alone."""
    tables, grads = generated(0)
    opts = {"user": adam(0.1), "item": adagrad(0.2), "page": sgd(0.3)}
    got = run(by_table({"user": opts["user"], "item": opts["item"]}, default=opts["page"]), tables, grads)
    for n, opt in opts.items():
        need = run(opt, {n: tables[n]}, [only(g, [n]) for g in grads])
        assert_trees_close(tuple(only(x, [n]) for x in got), need)
    assert list(got[0]) == list(NAMES)


def test_by_table_keeps_the_default_together():
    """The tables of the default are updated together. A clip in the default therefore uses the norm over all these
    tables."""
    tables, grads = generated(6)
    opt = clip(sgd(0.1), max_norm=0.2)
    got = run(by_table({"user": sgd(0.1)}, default=opt), tables, grads)
    need = run(opt, only(tables, NAMES[1:]), [only(g, NAMES[1:]) for g in grads])
    assert_trees_close(tuple(only(x, NAMES[1:]) for x in got), need)


def test_freeze():
    """Frozen tables are returned as the same tensors, without slots. Other tables move as if they were alone."""
    tables, grads = generated(1)
    got, slots = run(freeze(adam(0.1), tables=["user"]), tables, grads)
    assert got["user"] is tables["user"] and slots["user"] == {}
    need = run(adam(0.1), only(tables, NAMES[1:]), [only(g, NAMES[1:]) for g in grads])
    assert_trees_close((only(got, NAMES[1:]), only(slots, NAMES[1:])), need)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clip_norm(max_norm):
    """clip scales the gradient by min(1, max_norm / norm), where norm is over all tables. The direction stays."""
    tables, grads = generated(2, 1)
    moved, _ = run(clip(sgd(1.0), max_norm=max_norm), tables, [{n: garbage_padding(g) for n, g in grads[0].items()}])
    dense = torch.cat([grads[0][n].to_dense() for n in NAMES[:2]])
    step = torch.cat([tables[n] - moved[n] for n in NAMES[:2]])
    factor = min(1.0, max_norm / float(dense.norm()))
    torch.testing.assert_close(step, dense * factor, rtol=1e-5, atol=1e-6)
    assert (factor < 1) == (max_norm < 1)


def test_clip_value():
    """Elements of the summed gradient of a row are clipped to [-max_value, max_value]. Then the norm is clipped."""
    tables, grads = generated(3, 1)
    cut = {n: g.to_dense().clamp(-0.3, 0.3) for n, g in grads[0].items()}
    moved, _ = run(clip(sgd(1.0), max_value=0.3), tables, grads)
    for n, d in cut.items():
        torch.testing.assert_close(tables[n] - moved[n], d, rtol=0, atol=1e-6)
    moved, _ = run(clip(sgd(1.0), max_value=0.3, max_norm=0.1), tables, grads)
    norm = torch.cat(list(cut.values())).norm()
    for n, d in cut.items():
        torch.testing.assert_close(tables[n] - moved[n], d * (0.1 / norm), rtol=1e-4, atol=1e-6)


def test_frozen_tables_do_not_wait():
    """freeze(accumulate(f)) updates the other tables as accumulate(f) does, in two halves as in one update."""
    tables, grads = generated(3, 4)
    inner = accumulate(momentum(0.1), every=2, capacity=ENTRIES)
    opt, rest = freeze(inner, tables=NAMES[:1]), NAMES[1:]
    slots, halves, own, need = opt.init(tables), opt.init(tables), inner.init(only(tables, rest)), only(tables, rest)
    got = by_halves = tables
    for step, g in enumerate(grads):
        got, slots = opt.update(g, slots, got, step)
        held, halves = opt.hold(g, halves, by_halves, step)
        by_halves, halves = opt.due(held, halves, by_halves, step)
        need, own = inner.update(only(g, rest), own, need, step)
    assert_trees_close((got, slots), (by_halves, halves))
    assert_trees_close((got, only(slots, rest)), ({NAMES[0]: tables[NAMES[0]], **need}, own))


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), every=st.integers(1, 4), rounds=st.integers(1, 2))
def test_accumulate(seed, every, rounds):
    """k steps equal one update with the mean of their gradients, bit for bit. No row moves before the k-th step."""
    tables, grads = generated(seed, every * rounds)
    inner = momentum(0.1)
    opt = accumulate(inner, every=every, capacity={n: ENTRIES + i for i, n in enumerate(NAMES)})
    slots, own = opt.init(tables), inner.init(tables)
    need = tables
    for step, g in enumerate(grads):
        before = tables
        tables, slots = opt.update(g, slots, tables, step)
        if (step + 1) % every:
            assert_trees_close(tables, before)
            continue
        window = grads[step + 1 - every : step + 1]
        total = {n: sum_of([x[n] for x in window if n in x]) for n in NAMES}
        mean = {n: t.coalesce().scale(1 / every) for n, t in total.items() if t is not None}
        need, own = inner.update(mean, own, need, step // every)
        assert_trees_close(tables, need)
        assert_trees_close({n: {"momentum": slots[n]["momentum"]} for n in NAMES}, own)


def sum_of(grads):
    total = None
    for g in grads:
        total = g if total is None else total + g
    return total


def test_accumulate_keeps_no_counts():
    """Under an optimizer that may count entries, entries that stand for several ids raise. Single entries are counted.
    Other optimizers accept both."""
    tables, grads = generated(3, 2)
    summed, own = {n: g.coalesce() for n, g in grads[0].items()}, rowwise_adagrad_cowclip(0.1)
    mine = row_optimizer(init=lambda t: {}, rule=lambda row, grad, slots, hyper: (row - grad / hyper.repeats, slots))
    for counting in (own, mine, by_table({"user": own}, default=sgd(0.1)), freeze(own, tables=["page"])):
        opt = accumulate(counting, every=1, capacity=ENTRIES)
        with pytest.raises(TypeError, match="entries that stand for several ids"):
            opt.update(summed, opt.init(tables), tables, 0)
        clipped = clip(opt, max_norm=1.0)
        with pytest.raises(TypeError, match="entries that stand for several ids"):
            clipped.update(grads[0], clipped.init(tables), tables, 0)
    opt = accumulate(own, every=1, capacity=ENTRIES)
    assert_trees_close(opt.update(grads[0], opt.init(tables), tables, 0)[0], run(own, tables, grads[:1])[0])
    plain = accumulate(adam(0.1), every=1, capacity=ENTRIES)
    plain.update(summed, plain.init(tables), tables, 0)


def test_accumulate_counts_updates():
    """The step of the inner optimizer is the number of updates. Schedules and bias corrections see 0, 1, 2, ..."""
    seen = []
    opt = accumulate(sgd(lambda step: seen.append(int(step)) or 0.1), every=2, capacity=ENTRIES)
    run(opt, *generated(4))
    assert sorted(set(seen)) == [0, 1, 2] and seen == sorted(seen)


def test_accumulate_keeps_zeros_in_its_padding(interpreted):
    """Entries without a row have gradients of zero, whatever lies in a gradient's padding, eager and staged."""
    sparse = fr.optim.accumulate(fr.optim.sgd(1.0), every=2, capacity=5)
    tables = {"t": torch.zeros(3, 2)}
    rows, grads = torch.tensor([1, -1, 1, 7]), torch.full((4, 2), torch.nan)
    given = {"t": fr.RowGrads.from_entries(rows, grads.index_fill(0, torch.tensor([0, 2]), 1.0), num_embeddings=3)}
    update = lambda g, slots: sparse.update(g, slots, tables, torch.tensor(0))[1]["t"]
    for got in (update(given, sparse.init(tables)), fr.jit(update)(given, sparse.init(tables))):
        free = got["pending_rows"] < 0
        assert not bool(got["pending_grads"][free].any())
        assert got["pending_grads"][0].sum() == 4.0


def test_a_row_of_infinity_becomes_nan():
    """SGD's rule adds weight_decay · w to the gradient, and 0 · inf is NaN; a row that is not named stays infinite."""
    tables = {"t": torch.full((2, 1), torch.inf)}
    grads = {"t": fr.RowGrads.from_entries(torch.tensor([0]), torch.zeros(1, 1), num_embeddings=2)}
    made, _ = fr.optim.sgd(0.1).update(grads, {"t": {}}, tables, step=0)
    assert bool(made["t"][0].isnan()) and bool(made["t"][1].isinf())


def test_accumulate_forgets_what_it_applied():
    """Applied gradients are dropped. After a jump to the last step of a later window, only the gradient of that step
    counts."""
    tables, grads = generated(7)
    opt = accumulate(sgd(1.0), every=2, capacity=ENTRIES)
    tables, slots = run(opt, tables, grads[:2])
    moved, _ = opt.update(grads[2], slots, tables, 3)
    need, _ = sgd(1.0).update(
        {n: g.coalesce().scale(0.5) for n, g in grads[2].items()}, {n: {} for n in NAMES}, tables, 1
    )
    assert_trees_close(moved, need)


def test_accumulate_bf16_gradients_wait_in_f32():
    """Pending gradients of a bf16 table are f32."""
    slots = accumulate(sgd(), every=2, capacity=3).init({"t": torch.zeros(4, 2, dtype=torch.bfloat16)})
    assert slots["t"]["pending_grads"].dtype == torch.float32 and slots["t"]["pending_grads"].shape == (2, 3, 2)


def combined():
    rate = schedule([Stage("linear", 3, value=0.1), Stage("poly", 8, value=2.0)], lr=0.2)
    return {
        "by_table": by_table({"user": adam(rate)}, default=adagrad(rate)),
        "clip": clip(adam(rate), max_norm=0.5, max_value=0.4),
        "freeze": freeze(adam(rate), tables=["item"]),
        "accumulate": accumulate(adam(rate), every=2, capacity=ENTRIES),
        "nested": accumulate(
            clip(by_table({"user": sgd(rate)}, default=freeze(adam(rate), tables=["page"])), max_norm=0.1),
            every=3, capacity=ENTRIES,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", combined())
def test_traced_and_pure(name):
    """The update staged on shapes gives the eager bits at every step. The update changes no argument and reads no
    padding."""
    opt = combined()[name]
    tables, grads = generated(5)
    grads = [grads[1]] * 5
    slots = opt.init(tables)
    staged = make_fx(lambda *args: opt.update(*args), tracing_mode="fake", _allow_non_fake_inputs=True)(
        grads[0], slots, tables, torch.tensor(0)
    )
    for step, g in enumerate(grads):
        before = torch.utils._pytree.tree_map(torch.clone, (g, slots, tables))
        got = staged(g, slots, tables, torch.tensor(step))
        garbage = opt.update({n: garbage_padding(x) for n, x in g.items()}, slots, tables, step)
        need = opt.update(g, slots, tables, step)
        assert_trees_close((g, slots, tables), before)
        assert_trees_close(got, need)
        assert_trees_close(garbage[0], need[0])
        tables, slots = need


# -- schedules ---------------------------------------------------------------------------------------------------


FACTORS = {  # (stage, the factor of the stage as a function of the step in plain Python)
    "none": (Stage("none", 9, lr_scale=3.0), lambda t: 3.0),
    "linear": (Stage("linear", 9, value=0.25), lambda t: 0.25 + 0.75 * t / 9),
    "constant": (Stage("constant", 9, value=0.5, lr_scale=2.0), lambda t: 1.0),
    "poly": (Stage("poly", 9, value=1.5, decay_iters=6), lambda t: max(0.0, 1 - t / 6) ** 1.5),
    "poly_default": (Stage("poly", 9, value=2.0), lambda t: (1 - t / 9) ** 2),
    "step": (Stage("step", 9, value=0.5, decay_iters=3), lambda t: 0.5 ** (t // 3)),
    "step_default": (Stage("step", 9, value=0.9), lambda t: 0.9**t),
    "inv_sqrt": (Stage("inv_sqrt", 9), lambda t: 1 / math.sqrt(max(t, 1))),
    "cosine": (
        Stage("cosine_annealing_warm_restarts", 9, value=0.1, sgdr_period=4),
        lambda t: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (t % 4) / 4)),
    ),
    "interpolate": (
        Stage("interpolate", 9, value=0.2, start_interpolating_iters=1, end_value=0.8),
        lambda t: 0.2 + 0.6 * (t - 1) / 8,
    ),
}


@pytest.mark.parametrize("name", FACTORS)
def test_policies(name):
    """The factor of a stage follows the formula of the stage up to and including max_iters. After that, the rate is
    lr."""
    stage, factor = FACTORS[name]
    rate = schedule([stage], lr=0.1)
    for t in range(10):
        assert float(rate(t)) == pytest.approx(0.1 * factor(t), rel=1e-12, abs=1e-15)
        assert torch.equal(rate(torch.tensor(t)), rate(t))
    assert float(rate(10)) == float(rate(10**12)) == 0.1


def test_stages_follow_each_other():
    """The first stage whose max_iters has not passed is used. Steps count from the start of training."""
    rate = schedule([Stage("constant", 2, value=0.5), Stage("linear", 4, value=0.0), Stage("step", 6, value=0.5)])
    assert [float(rate(t)) for t in range(8)] == [0.5, 0.5, 0.5, 0.75, 1.0, 2**-5, 2**-6, 1.0]
    assert float(schedule([])(0)) == 1.0


def test_schedule_is_staged():
    """A staged schedule takes the step as an input. One graph serves all steps. vmap over steps gives each rate."""
    rate = schedule([s for s, _ in [FACTORS["linear"]]] + [Stage("inv_sqrt", 20)], lr=0.3)
    graph = make_fx(rate, tracing_mode="fake")(torch.tensor(0))
    steps = torch.arange(25)
    assert torch.equal(torch.stack([graph(t) for t in steps]), torch.stack([rate(t) for t in steps]))
    assert torch.equal(torch.func.vmap(rate)(steps), torch.stack([rate(t) for t in steps]))
