"""One table of row optimizers, one list of laws. R rows, D dim, M entries."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from funcrec.kernels import ops
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.optim import row_optimizer
from funcrec.optim._builtin import BUILTIN
from funcrec.testing import assert_trees_close, garbage_padding

STEPS = 6
LR = 0.05


# -- references: whole matrices in float64, plain formulas; (w, slots, g, t, repeats) -> (w, slots) ------------------


def sgd(w, s, g, t, n):
    return w - LR * (g + 0.1 * w), {}


def momentum(w, s, g, t, n):
    m = 0.8 * s["momentum"] + (g + 0.1 * w)
    return w - LR * m, {"momentum": m}


def nesterov(w, s, g, t, n):
    m = 0.8 * s["momentum"] + g
    return w - LR * (g + 0.8 * m), {"momentum": m}


def lars(w, s, g, t, n):
    lw, lg = length(w), length(g)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where((lw > 0) & (lg + 0.1 * lw > 0), 0.02 * lw / (lg + 0.1 * lw), 1.0)
    m = 0.8 * s["momentum"] + LR * ratio * (g + 0.1 * w)
    return w - m, {"momentum": m}


def lion(w, s, g, t, n):
    m = s["mean"]
    return w - LR * (np.sign(0.9 * m + (1 - 0.9) * g) + 0.1 * w), {"mean": 0.7 * m + (1 - 0.7) * g}


def adagrad(w, s, g, t, n):
    g = g + 0.1 * w
    total = s["sum"] + g**2
    return w - LR * g / (np.sqrt(total) + 1e-3), {"sum": total}


def rowwise(w, s, g, t, n):
    g = g + 0.1 * w
    total = s["sum"] + (g**2).mean(1)
    return w - LR * g / (np.sqrt(total)[:, None] + 1e-3), {"sum": total}


def rowwise_decoupled(w, s, g, t, n):
    total = s["sum"] + (g**2).mean(1)
    return w * (1 - LR * 0.1) - LR * g / (np.sqrt(total)[:, None] + 1e-8), {"sum": total}


def rowwise_max_norm(w, s, g, t, n):
    total = s["sum"] + (g**2).mean(1)
    w = w - LR * g / (np.sqrt(total)[:, None] + 1e-8)
    return w * np.minimum(1, 1.2 / np.maximum(length(w), 1e-30)), {"sum": total}


def counter(decay):
    def step(w, s, g, t, n):
        since = np.where(s["last"] == 0, 1, t - s["last"])
        count = 1 + s["counter"] * 0.5 ** (since / 3)
        seen = g + 0.1 * w if decay == "l2" else g
        total = s["sum"] + (seen**2).mean(1)
        k = LR / (np.sqrt(total) + 1e-8)
        shrink = 1 - (k if decay == "l2" else LR) * (3 / count) * 0.1
        new = {"sum": total, "counter": count, "last": np.full_like(count, t)}
        return shrink[:, None] * w - k[:, None] * g, new

    return step


def cowclip(w, s, g, t, n):
    g = g + 0.1 * w
    total = s["sum"] + (g**2).mean(1)
    threshold = n[:, None] * np.maximum(0.3 * length(w), 1e-2)
    with np.errstate(invalid="ignore", divide="ignore"):
        clipped = g * np.fmin(1, threshold / length(g))
    return w - LR * np.nan_to_num(clipped) / (np.sqrt(total)[:, None] + 1e-8), {"sum": total}


def rmsprop(w, s, g, t, n):
    g = g + 0.1 * w
    v = 0.9 * s["square"] + (1 - 0.9) * g**2
    m = 0.5 * s["momentum"] + g / (np.sqrt(v) + 1e-3)
    return w - LR * m, {"square": v, "momentum": m}


def ftrl(w, s, g, t, n):
    z = s["z"] + g - (np.sqrt(s["sum"] + g**2) - np.sqrt(s["sum"])) / LR * w
    total = s["sum"] + g**2
    w = -(z - np.sign(z) * 0.2) / ((1 + np.sqrt(total)) / LR + 0.1)
    return np.where(np.abs(z) <= 0.2, 0, w), {"z": z, "sum": total}


def adam_direction(s, g, t, rowwise):
    m = 0.7 * s["mean"] + (1 - 0.7) * g
    v = 0.95 * s["square"] + (1 - 0.95) * ((g**2).mean(1) if rowwise else g**2)
    root = np.sqrt(v / (1 - 0.95**t))
    return m / (1 - 0.7**t) / ((root[:, None] if rowwise else root) + 1e-3), {"mean": m, "square": v}


def adam(w, s, g, t, n):
    u, s = adam_direction(s, g + 0.1 * w, t, False)
    return w - LR * u, s


def adamw(rowwise):
    def step(w, s, g, t, n):
        u, s = adam_direction(s, g, t, rowwise)
        return w - LR * (u + 0.1 * w), s

    return step


def lamb(rowwise):
    def step(w, s, g, t, n):
        u, s = adam_direction(s, g, t, rowwise)
        r = u + 0.1 * w
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where((length(w) > 0) & (length(r) > 0), length(w) / length(r), 1.0)
        return w - LR * ratio * r, s

    return step


def length(x):
    return np.sqrt((x**2).sum(1, keepdims=True))


ADAM = {"lr": LR, "b1": 0.7, "b2": 0.95, "eps": 1e-3, "weight_decay": 0.1}
COUNTER = {"lr": LR, "half_life": 3.0, "weight_decay": 0.1}
OPTIMIZERS = {  # name -> (optimizer, the reference of the optimizer)
    "sgd": (fr.optim.sgd(LR, weight_decay=0.1), sgd),
    "momentum": (fr.optim.momentum(LR, momentum=0.8, weight_decay=0.1), momentum),
    "nesterov": (fr.optim.momentum(LR, momentum=0.8, nesterov=True), nesterov),
    "lars_sgd": (fr.optim.lars_sgd(LR, eta=0.02, momentum=0.8, weight_decay=0.1), lars),
    "lion": (fr.optim.lion(LR, b1=0.9, b2=0.7, weight_decay=0.1), lion),
    "adagrad": (fr.optim.adagrad(LR, eps=1e-3, weight_decay=0.1, initial_accumulator=0.5), adagrad),
    "rowwise_adagrad": (fr.optim.rowwise_adagrad(LR, eps=1e-3, weight_decay=0.1, initial_accumulator=0.5), rowwise),
    "rowwise_decoupled": (fr.optim.rowwise_adagrad(LR, weight_decay=0.1, decay="decoupled"), rowwise_decoupled),
    "rowwise_max_norm": (fr.optim.rowwise_adagrad(LR, max_norm=1.2), rowwise_max_norm),
    "counter_l2": (fr.optim.rowwise_adagrad_counter(**COUNTER), counter("l2")),
    "counter_decoupled": (fr.optim.rowwise_adagrad_counter(**COUNTER, decay="decoupled"), counter("decoupled")),
    "cowclip": (fr.optim.rowwise_adagrad_cowclip(LR, clip_ratio=0.3, lower_bound=1e-2, weight_decay=0.1), cowclip),
    "rmsprop": (fr.optim.rmsprop(LR, b2=0.9, eps=1e-3, momentum=0.5, weight_decay=0.1), rmsprop),
    "ftrl": (fr.optim.ftrl(LR, beta=1.0, l1=0.2, l2=0.1), ftrl),
    "adam": (fr.optim.adam(**ADAM), adam),
    "adamw": (fr.optim.adamw(**ADAM), adamw(False)),
    "partial_rowwise_adam": (fr.optim.partial_rowwise_adam(**ADAM), adamw(True)),
    "lamb": (fr.optim.lamb(**ADAM), lamb(False)),
    "partial_rowwise_lamb": (fr.optim.partial_rowwise_lamb(**ADAM), lamb(True)),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def generated(seed: int, *, entries: int = 7, padding: int = 2, rows: int = 6, dim: int = 3):
    """Return a table and STEPS row gradients in f32: repeats, a row of zeros, a zero gradient, rows outside the table,
    padding."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.randn(rows, dim, generator=draw)
    table[0] = 0
    grads = []
    for _ in range(STEPS):
        # no gradient names the last row
        ids = torch.randint(-1, rows - 1, (entries + padding,), generator=draw)
        values = torch.randn(entries + padding, dim, generator=draw)
        values[0] = 0
        grads.append(fr.RowGrads.from_entries(ids, values, num_embeddings=rows, count=torch.tensor(entries)))
    return table, grads


def cast_grads(g, dtype):
    return fr.RowGrads.from_entries(g.rows, g.grads.to(dtype), num_embeddings=g.num_embeddings, count=g.count)


def cast(table, grads, dtype):
    return table.to(dtype), [cast_grads(g, dtype) for g in grads]


def run(opt, table, grads, slots=None):
    tables, slots = {"t": table}, opt.init({"t": table}) if slots is None else slots
    for step, g in enumerate(grads):
        tables, slots = opt.update({"t": g}, slots, tables, step)
    return tables["t"], slots["t"]


def run_reference(opt, reference, table, grads):
    w = table.double().numpy()
    slots = {k: s.double().numpy() for k, s in opt.init({"t": table})["t"].items()}
    for step, g in enumerate(grads):
        dense = g.to_dense().double().numpy()
        repeats = np.bincount(g.rows[g.valid].numpy(), minlength=len(w)).astype(float)
        named = repeats > 0
        new_w, new_slots = reference(w, slots, dense, step + 1, repeats)
        assert new_slots.keys() == slots.keys(), "the reference returns the slots that the optimizer's `slots` names"
        keep = lambda new, old: np.where(named.reshape(-1, *[1] * (old.ndim - 1)), new, old)  # noqa: B023
        w, slots = keep(new_w, w), {k: keep(new_slots[k], slots[k]) for k in slots}
    return torch.tensor(w), {k: torch.tensor(s) for k, s in slots.items()}


def test_every_optimizer_has_a_reference():
    """Each built-in optimizer has a row in OPTIMIZERS, with a reference in numpy."""
    missing = BUILTIN.keys() - set(re.findall(r": \(fr\.optim\.(\w+)\(", Path(__file__).read_text()))
    assert not missing, f"add rows for {sorted(missing)} to OPTIMIZERS in this file, each with its formula in numpy"


@every_optimizer
@settings(max_examples=6)
@given(seed=st.integers(0, 10**6))
def test_reference(name, seed):
    """k steps equal k steps of the formula on the dense gradient, for the rows that the batch names."""
    opt, reference = OPTIMIZERS[name]
    table, grads = cast(*generated(seed), torch.float64)
    got, need = run(opt, table, grads), run_reference(opt, reference, table, grads)
    assert_trees_close(got, need, rtol=1e-12, atol=1e-14)


@every_optimizer
def test_f32_is_near_f64(name):
    """An f32 table stays within 1e-5 of the f64 table."""
    opt, reference = OPTIMIZERS[name]
    table, grads = generated(3)
    got, _ = run(opt, table, grads)
    need, _ = run_reference(opt, reference, table, grads)
    assert got.dtype == torch.float32
    assert float((got - need).abs().max()) <= 1e-5 * float(need.abs().max())


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_keeps_types_arguments_and_other_rows(name, dtype):
    """An update keeps structure, dtypes and shapes, changes no argument, and leaves rows without an entry bit for
    bit."""
    opt, _ = OPTIMIZERS[name]
    table, grads = cast(*generated(5), dtype)
    tables, slots = {"t": table, "idle": torch.randn(2, 2)}, opt.init({"t": table, "idle": torch.randn(2, 2)})
    before = torch.utils._pytree.tree_map(torch.clone, (tables, slots, grads[0]))
    new_tables, new_slots = opt.update({"t": grads[0]}, slots, tables, 0)
    assert_trees_close((tables, slots, grads[0]), before)
    kinds = torch.utils._pytree.tree_map(lambda x: (x.shape, x.dtype), (tables, slots))
    assert torch.utils._pytree.tree_map(lambda x: (x.shape, x.dtype), (new_tables, new_slots)) == kinds
    assert all(s.dtype == torch.promote_types(dtype, torch.float32) for s in slots["t"].values())
    assert new_tables["idle"] is tables["idle"]
    named = torch.zeros(6, dtype=torch.bool).index_fill(0, grads[0].rows[grads[0].valid], True)
    assert 0 < named.sum() < 6
    rest = lambda x: {k: s[~named] for k, s in x.items()}
    assert torch.equal(new_tables["t"][~named], table[~named])
    assert_trees_close(rest(new_slots["t"]), rest(slots["t"]))
    assert not torch.equal(new_tables["t"][named], table[named])


@every_optimizer
def test_low_precision_rounds_once(name):
    """A bf16 table after one step equals the f32 step on the table's values, rounded once."""
    opt, _ = OPTIMIZERS[name]
    table, grads = generated(7)
    table = table.bfloat16()
    low, low_slots = run(opt, table, grads[:1])
    high, high_slots = run(opt, table.float(), grads[:1])
    assert torch.equal(low, high.bfloat16())
    assert_trees_close(low_slots, high_slots)


@every_optimizer
def test_coalesced_and_padding(name):
    """Garbage in the padding gives the same bits, and so do coalesced gradients. A rule that counts ids runs by the
    reference for coalesced gradients."""
    opt, _ = OPTIMIZERS[name]
    table, grads = generated(11)
    need = run(opt, table, grads)
    assert_trees_close(run(opt, table, [garbage_padding(g) for g in grads]), need)
    coalesced = [g.coalesce() for g in grads]
    with ops.using("reference" if name == "cowclip" else ops.chosen(None, table.device)):
        need = run(opt, table, grads)
        assert_trees_close(run(opt, table, coalesced), need)
        assert_trees_close(run(opt, table, [garbage_padding(g) for g in coalesced]), need)


@every_optimizer
def test_traced(name):
    """The update staged on shapes gives the eager bits. The step and the gradients are inputs of the graph."""
    opt, _ = OPTIMIZERS[name]
    table, grads = generated(13)
    tables, slots = {"t": table}, opt.init({"t": table})
    staged = make_fx(lambda *args: opt.update(*args), tracing_mode="fake", _allow_non_fake_inputs=True)(
        {"t": grads[0]}, slots, tables, torch.tensor(0)
    )
    for step, g in enumerate(grads):
        got = staged({"t": g}, slots, tables, torch.tensor(step))
        tables, slots = opt.update({"t": g}, slots, tables, step)
        assert_trees_close(got, (tables, slots))


@every_optimizer
def test_vmap(name):
    """An update mapped over stacked tables, slots, gradients and steps equals the update of each member."""
    opt, _ = OPTIMIZERS[name]
    (a, grads_a), (b, grads_b) = generated(17), generated(19)
    stack = lambda *xs: torch.utils._pytree.tree_map(lambda *y: torch.stack(y), *xs)
    alone = []
    for table, grads in [(a, grads_a), (b, grads_b)]:
        tables = {"t": table}
        alone.append((*opt.update({"t": grads[0]}, opt.init(tables), tables, 0), {"t": grads[1]}))
    tables, slots, grads = zip(*alone, strict=True)
    got = torch.func.vmap(opt.update)(stack(*grads), stack(*slots), stack(*tables), torch.tensor([1, 4]))
    need = [opt.update(g, s, t, step) for t, s, g, step in zip(tables, slots, grads, [1, 4], strict=True)]
    assert_trees_close(got, stack(*need))


@every_optimizer
def test_empty_gradient(name):
    """A gradient without entries changes no bit, with or without capacity."""
    opt, _ = OPTIMIZERS[name]
    table, grads = generated(23)
    table, own = run(opt, table, grads)
    none = fr.RowGrads.from_entries(grads[0].rows, grads[0].grads, num_embeddings=6, count=torch.tensor(0))
    for g in (none, fr.RowGrads.zeros((6, 3))):
        tables, slots = opt.update({"t": g}, {"t": own}, {"t": table}, STEPS)
        assert_trees_close((tables["t"], slots["t"]), (table, own))


def test_a_row_with_a_zero_gradient_is_touched():
    """Adam moves a named row by the row's momentum even if its gradient is zero, and leaves all other rows."""
    opt = fr.optim.adam(lr=0.1)
    one = lambda row, value: fr.RowGrads.from_entries(torch.tensor([row]), torch.full((1, 2), value), num_embeddings=2)
    tables = {"t": torch.zeros(2, 2)}
    tables, slots = opt.update({"t": one(0, 1.0)}, opt.init(tables), tables, 0)
    moved, _ = opt.update({"t": one(0, 0.0)}, slots, tables, 1)
    assert (moved["t"][0] < tables["t"][0]).all() and torch.equal(moved["t"][1], tables["t"][1])


def test_rates():
    """A number, a tensor and a function of the step with the same rate give the same bits."""
    table, grads = generated(29)
    rates = [0.125, torch.tensor(0.125), lambda step: torch.where(step >= 0, 0.125, 0.0), lambda step: 0.125]
    need = run(fr.optim.adam(0.125), table, grads)
    for rate in rates:
        assert_trees_close(run(fr.optim.adam(rate), table, grads), need)
    seen = []
    run(fr.optim.sgd(lambda step: seen.append(int(step)) or 0.1), table, grads)
    assert seen == list(range(STEPS))


def test_hyper():
    """A rule gets one row, its summed gradient, its slots, the rate, the step and the number of summed entries."""

    def rule(row, grad, slots, hyper):
        assert row.shape == grad.shape == slots["wide"].shape == (3,) and slots["own"].shape == (2, 2)
        assert hyper._fields == ("lr", "step", "repeats", "power")
        return row + grad**hyper.power, {
            "own": slots["own"] + hyper.repeats,
            "wide": slots["wide"] + hyper.step * hyper.lr,
        }

    init = lambda table: {"own": torch.zeros(len(table), 2, 2), "wide": torch.zeros_like(table)}
    opt = row_optimizer(init=init, rule=rule, lr=0.5, power=2)
    ids, values = torch.tensor([1, 4, 1]), torch.ones(3, 3)
    tables = {"t": torch.zeros(6, 3)}
    grads = {"t": fr.RowGrads.from_entries(ids, values, num_embeddings=6)}
    tables, slots = opt.update(grads, opt.init(tables), tables, torch.tensor(9))
    assert tables["t"][:, 0].tolist() == [0, 4, 0, 0, 1, 0]
    assert slots["t"]["own"][:, 1, 0].tolist() == [0, 2, 0, 0, 1, 0]
    assert slots["t"]["wide"][:, 0].tolist() == [0, 5, 0, 0, 5, 0]


def test_slots_of_another_precision_are_cast():
    """Slots are f32, or f64 for f64 tables, whatever dtype a user's `init` returns."""
    opt = row_optimizer(init=lambda t: {"m": torch.zeros_like(t)}, rule=lambda w, g, s, h: (w, s))
    tables = {"half": torch.zeros(2, 1, dtype=torch.bfloat16), "double": torch.zeros(2, 1, dtype=torch.float64)}
    assert {n: s["m"].dtype for n, s in opt.init(tables).items()} == {"half": torch.float32, "double": torch.float64}


@pytest.mark.parametrize("implementation", ["cpp", "reference"])
def test_lars_at_a_zero_gradient(implementation):
    """A zero gradient moves a row by the limit of small gradients. In FBGEMM the limit is lr · eta · ‖w‖ / (‖g‖ + decay
    · ‖w‖) · decay · w."""
    lr, eta, decay, w = 0.1, 0.001, 0.01, torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    optimizer, tables = fr.optim.lars_sgd(lr, eta=eta, momentum=0.0, weight_decay=decay), {"t": w}

    def moved(size):
        grads = fr.RowGrads.from_entries(torch.tensor([0, 1]), torch.full((2, 2), size), num_embeddings=2)
        return (
            w - optimizer.update({"t": grads}, optimizer.init(tables), tables, 0, implementation=implementation)[0]["t"]
        )

    need = lr * eta * 5 / (decay * 5) * decay * w
    torch.testing.assert_close(moved(0.0), need, rtol=2e-3, atol=1e-12)
    torch.testing.assert_close(moved(1e-9), need + torch.tensor([[0.0, 0.0], [1e-10, 1e-10]]), rtol=2e-3, atol=1e-12)
    still = fr.optim.lars_sgd(lr, eta=eta)
    grads = {"t": fr.RowGrads.from_entries(torch.tensor([0]), torch.zeros(1, 2), num_embeddings=2)}
    assert torch.equal(still.update(grads, still.init(tables), tables, 0, implementation=implementation)[0]["t"], w)
