"""Sweeps: K models with hyper-parameters of their own, trained as one, are K runs."""

import inspect
import math
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import funcrec as fr
from funcrec import optim
from funcrec.core._tree import tree_leaves
from funcrec.optim._builtin import BUILTIN
from funcrec.testing import assert_trees_close

F64 = torch.float64
TABLES = (fr.TableConfig("u", 6, 3, dtype=F64), fr.TableConfig("i", 5, 3, dtype=F64))
FEATURES = (fr.FeatureConfig("u", table="u"), fr.FeatureConfig("i", table="i", pooling="mean"))
IDS = fr.KeyedJaggedTensor.from_lists({"u": [[1], [3, 3], [0], [2]], "i": [[2, 2, 4], [0], [], [1]]})
BATCHES = [fr.Batch(IDS, torch.arange(4.0, dtype=F64) / (3 + t)) for t in range(3)]
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
DENSE = {
    SGD: ("momentum", "dampening", "weight_decay"),
    Adam: ("eps", "weight_decay"),
    AdamW: ("eps", "weight_decay"),
    Adagrad: ("lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
    RMSprop: ("alpha", "eps", "weight_decay", "momentum"),
}
hypers_of = lambda name: [
    p.name
    for p in inspect.signature(BUILTIN[name].declare).parameters.values()
    if p.name != "lr" and not isinstance(p.default, bool | str)
]


def loss_fn(params, batch):
    acts = fr.lookup(params.tables, batch.ids, FEATURES).values
    return ((acts * params.dense["w"]).sum(1) - batch.label).square().mean()


def params_of(seed=0):
    w = torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return fr.Params(fr.init(fr.key(seed), TABLES), {"w": w})


def make_step(lr=0.1, momentum=0.5):
    return fr.train_step(loss_fn, sparse=optim.adagrad(lr=lr), dense=optim.dense(SGD, lr=lr, momentum=momentum))


def noisy_step(lr):
    """A step whose loss draws from the state's key."""
    noise = lambda p, b, *, key: loss_fn(p, b) + (fr.random.normal(key, (6,), dtype=F64) * p.dense["w"]).sum()
    return fr.train_step(noise, sparse=optim.sgd(lr=lr), dense=optim.dense(SGD, lr=lr))


def run(step, state, batches=BATCHES):
    """Return (the state after the batches, the losses)."""
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, torch.stack(losses)


@st.composite
def sweeps(draw):
    """Return (make_step, hyper, what init gets). They shrink to SGD, one hyper-parameter and shared parameters."""
    row = draw(st.sampled_from(sorted(BUILTIN, key=lambda n: (n != "sgd", n))))
    cls = draw(st.sampled_from(list(DENSE)))
    k = draw(st.integers(1, 3))
    numbers = st.lists(st.floats(0.01, 0.9), min_size=k, max_size=k)
    own = [n for n in hypers_of(row) if draw(st.booleans())]
    of_dense = [n for n in DENSE[cls] if draw(st.booleans())]
    needed = {"half_life": 2.0} if row == "rowwise_adagrad_counter" and "half_life" not in own else {}

    def make(lr, **hyper):
        mine = {n: hyper[f"row_{n}"] for n in own}
        theirs = {n: hyper[f"dense_{n}"] for n in of_dense}
        sparse = getattr(optim, row)(lr=lr, **needed, **mine)
        return fr.train_step(loss_fn, sparse=sparse, dense=optim.dense(cls, lr=lr, **theirs))

    names = ["lr", *(f"row_{n}" for n in own), *(f"dense_{n}" for n in of_dense)]
    hyper = {n: draw(numbers) for n in names}
    each = draw(st.booleans())
    params = [params_of(i) for i in range(k)] if each else params_of()
    return make, hyper, (params, fr.split(fr.key(7), k) if draw(st.booleans()) else fr.key(3))


@settings(max_examples=40, deadline=None)
@given(sweeps())
def test_each_member_is_its_own_run(drawn):
    """Members of a sweep over numbers of any row and dense optimizer equal runs with these numbers, parameters and
    keys."""
    make, hyper, (params, key) = drawn
    swept = fr.sweep(make, hyper)
    states, losses = run(swept, swept.init(params, key))
    for i in range(losses.shape[1]):
        step = make(**{n: x[i] for n, x in hyper.items()})
        first = step.init(params[i] if isinstance(params, list) else params, key[i] if key.dim() else key)
        alone, own = run(step, first)
        assert_trees_close((fr.member(states, i), losses[:, i]), (alone, own), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_tables_of_members_have_the_bits_of_their_runs(name):
    """Where the loss gives the same cotangents, tables and slots have the bits of the members' runs."""
    own = [n for n in hypers_of(name) if n not in ("max_norm",) and (name, n) != ("rmsprop", "momentum")]
    numbers = {n: [0.1, 0.3, 0.7] for n in ("lr", *own)}
    loss = lambda p, b: (fr.lookup(p.tables, b.ids, FEATURES).values.sin()).sum()
    make = lambda **hyper: fr.train_step(loss, sparse=getattr(optim, name)(**hyper), dense=optim.dense(SGD))
    swept, params = fr.sweep(make, numbers), fr.Params(params_of().tables, {})
    states, _ = run(swept, swept.init(params))
    for i in range(3):
        step = make(**{n: x[i] for n, x in numbers.items()})
        alone, _ = run(step, step.init(params))
        assert_trees_close(fr.member(states, i), alone, rtol=0, atol=0)


def test_keys_and_parameters_are_shared_or_each_members_own():
    """Members with one key draw the same noise, and members with keys of their own draw as their runs do. hyper may be
    empty then."""
    keys, lr = fr.split(fr.key(1), 3), 0.1
    swept = fr.sweep(lambda: noisy_step(lr), {})
    states, _ = run(swept, swept.init(params_of(), keys))
    for i in range(3):
        assert_trees_close(
            fr.member(states, i), run(noisy_step(lr), noisy_step(lr).init(params_of(), keys[i]))[0], **CLOSE
        )
    together = fr.sweep(noisy_step, {"lr": [lr, lr]})
    states, _ = run(together, together.init([params_of(0), params_of(0)], fr.key(5)))
    assert_trees_close(fr.member(states, 0), fr.member(states, 1))


def test_a_compiled_donated_sweep_is_the_sweep(interpreted):
    """A donated sweep stays in place, is staged once, and gives what the sweep gives; `scan` gives all its metrics."""
    swept = fr.sweep(make_step, {"lr": [0.1, 0.3, 0.2], "momentum": [0.5, 0.9, 0.0]})
    need, losses = run(swept, swept.init(params_of()))
    compiled = fr.jit(swept, donate=("state",))
    state = compiled.init(params_of())
    places = [x.data_ptr() for x in tree_leaves((state.tables, state.slots))]
    got, own = run(compiled, state)
    assert_trees_close((got, own), (need, losses), **CLOSE)
    assert [x.data_ptr() for x in tree_leaves((got.tables, got.slots))] == places and compiled.num_compiled() == 1
    stacked = fr.tree.map(lambda *x: torch.stack(x), *BATCHES)
    scanned, metrics = fr.scan(swept, swept.init(params_of()), stacked)
    assert_trees_close((scanned, metrics["loss"]), (need, losses), rtol=0, atol=0)


def test_a_sweep_is_saved_and_a_member_trains_on_alone(tmp_path):
    """A loaded state has the bits of the saved one. A member's state belongs to its own step, and shares no memory."""
    swept = fr.sweep(make_step, {"lr": [0.1, 0.3]})
    states, _ = run(swept, swept.init(params_of()))
    fr.save(tmp_path / "states", states)
    assert fr.tree.equal(fr.load(tmp_path / "states", like=states), states)
    alone = fr.member(states, 1)
    before = fr.copy(states)
    assert not {x.data_ptr() for x in tree_leaves(alone) if x.numel()} & {x.data_ptr() for x in tree_leaves(states)}
    on, _ = run(make_step(lr=0.3), alone)
    assert_trees_close(fr.member(run(swept, states)[0], 1), on, **CLOSE)
    assert_trees_close(states, before)


def test_a_member_that_diverges_changes_no_other():
    """Members beside one with NaN have the bits that they have beside a member that stays finite."""
    batches = BATCHES * 2
    both = [fr.sweep(make_step, {"lr": [0.1, lr, 0.2]}) for lr in (1e300, 0.3)]
    (bad, losses), (good, others) = (run(swept, swept.init(params_of()), batches) for swept in both)
    assert not bool(losses[-1, 1].isfinite())
    for i in (0, 2):
        assert_trees_close((fr.member(bad, i), losses[:, i]), (fr.member(good, i), others[:, i]), rtol=0, atol=0)
    table = fr.sweep_table(both[0], {"loss": losses})
    assert table.best() == int(others[-1, [0, 2]].argmin()) * 2


def test_the_gradient_by_rates_of_a_sweep():
    """A sweep is differentiated by its hyper-parameters: the gradient of each member's loss by its own rate."""

    def final(rates):
        swept = fr.sweep(make_step, {"lr": rates})
        return run(swept, swept.init(params_of()))[1][-1]

    rates = torch.tensor([0.05, 0.1], dtype=F64)
    got, h = torch.func.jacrev(final)(rates), 1e-6
    need = torch.diag((final(rates + h) - final(rates - h)) / (2 * h))
    torch.testing.assert_close(got, need, rtol=1e-5, atol=1e-9)


def test_products_of_hyper_parameters():
    """product=True gives every combination, the last name's numbers varying fastest."""
    swept = fr.sweep(make_step, {"lr": [0.1, 0.2], "momentum": [0.0, 0.5, 0.9]}, product=True)
    rows = fr.sweep_table(swept, {"loss": torch.zeros(6)}).rows
    assert [(r["lr"], r["momentum"]) for r in rows] == [(a, b) for a in (0.1, 0.2) for b in (0.0, 0.5, 0.9)]


def test_fit_trains_a_sweep():
    """`fit` takes a sweep and its states: its loss is the mean over the members."""
    swept = fr.sweep(make_step, {"lr": [0.1, 0.3]})
    done = fr.fit(swept, swept.init(params_of()), BATCHES, epochs=2)
    need, losses = run(swept, swept.init(params_of()), BATCHES * 2)
    assert_trees_close(done.state, need)
    assert math.isclose(done.history[1]["loss"], float(losses[3:].mean()), rel_tol=1e-6)


def test_a_sweep_is_pickled():
    """A sweep of a function with a name is pickled by its call."""
    swept = fr.sweep(make_step, {"lr": [0.1, 0.3]})
    again = pickle.loads(pickle.dumps(swept))
    assert_trees_close(run(again, again.init(params_of())), run(swept, swept.init(params_of())))


# -- the table ---------------------------------------------------------------------------------------------------

CURVES = {
    "loss": torch.tensor([[4.0, 4.0, 4.0], [2.5, math.nan, 0.5]]),
    "aux.auc": torch.tensor([[0.5] * 3, [0.6] * 3]),
}
TABLE = fr.SweepTable({"lr": torch.tensor([0.01, 1.0, 0.1], dtype=F64)}, CURVES)


def test_a_table_has_what_the_step_gave():
    """Metrics of a list of steps and of `scan` give the same table. Tensors of another form are left out."""
    swept = fr.sweep(make_step, {"lr": [0.01, 1.0, 0.1]})
    one = lambda t: {"loss": CURVES["loss"][t], "aux": {"auc": CURVES["aux.auc"][t], "logits": torch.zeros(3, 3)}}
    whole = {"loss": CURVES["loss"], "aux": {"auc": CURVES["aux.auc"], "logits": torch.zeros(2, 3, 3)}}
    full = fr.tree.map(torch.nan_to_num, TABLE)
    for metrics in ([one(0), one(1)], whole):
        assert_trees_close(fr.tree.map(torch.nan_to_num, fr.sweep_table(fr.jit(swept), metrics)), full)
    assert fr.sweep_table(swept, one(1)).rows[2] == {
        "member": 2,
        "lr": 0.1,
        "loss": 0.5,
        "aux.auc": TABLE.rows[2]["aux.auc"],
    }
    assert [r["lr"] for r in TABLE.rows] == [0.01, 1.0, 0.1] and TABLE.rows[2]["loss"] == 0.5
    assert (TABLE.best(), TABLE.best("aux.auc", "max")) == (2, 0)
    assert fr.SweepTable({}, {"loss": torch.full((1, 2), math.nan)}).best() is None
    lines = TABLE.text().splitlines()
    assert lines[0].split() == ["member", "lr", "loss", "aux.auc"] and lines[2].split() == ["1", "1", "nan", "0.6"]


def test_a_table_is_drawn():
    """The metric is drawn over the hyper-parameter, in order and with a logarithmic axis, and each member by step."""
    figure = TABLE.plot()
    last, curves = figure.axes
    assert last.lines[0].get_xdata().tolist() == [0.01, 0.1, 1.0] and last.get_xscale() == "log"
    assert len(curves.lines) == 3 and curves.get_legend().get_title().get_text() == "lr"
    assert len(TABLE._replace(curves={"loss": CURVES["loss"][1:]}).plot().axes) == 1
    assert TABLE._replace(hyper={}).plot("aux.auc").axes[0].get_xlabel() == "member"


def test_trials_for_optuna(monkeypatch):
    """Each member becomes a trial with its numbers and its metric. A metric that is NaN makes a failed trial."""
    added = []
    ranges = SimpleNamespace(FloatDistribution=lambda low, high: (low, high))
    trial = SimpleNamespace(
        create_trial=lambda **given: given, TrialState=SimpleNamespace(COMPLETE="done", FAIL="failed")
    )
    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace(distributions=ranges, trial=trial))
    TABLE.add_trials(SimpleNamespace(add_trial=added.append))
    assert [(t["state"], t["value"], t["params"]) for t in added] == [
        ("done", 2.5, {"lr": 0.01}), ("failed", None, {"lr": 1.0}), ("done", 0.5, {"lr": 0.1}),
    ]  # fmt: skip
    assert added[0]["distributions"] == {"lr": (0.01, 1.0)}
    TABLE.add_trials(SimpleNamespace(add_trial=added.append), distributions={"lr": "own"})
    assert added[3]["distributions"] == {"lr": "own"}
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"funcrec.SweepTable.add_trials: optuna is not installed"):
        TABLE.add_trials(None)
