"""Metrics of several values have a name for each value in fr.evaluate, fr.evaluate_retrieval and fr.fit."""

import collections
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, roc_auc_score

import funcrec as fr
from funcrec import metrics
from funcrec.loop._numbers import named_numbers

N, T = 24, 3
SCORES = torch.rand(N, T, generator=torch.Generator().manual_seed(1))
LABELS = (torch.rand(N, T, generator=torch.Generator().manual_seed(2)) < 0.4).float()
SEGMENT = torch.arange(N) % 2
WEIGHTS = (torch.arange(N * T) % 4).reshape(N, T).float()


def batches(size, weights=None):
    return [
        {"p": SCORES[i : i + size], "y": LABELS[i : i + size], "g": SEGMENT[i : i + size],
         "w": None if weights is None else weights[i : i + size]}
        for i in range(0, N, size)
    ]  # fmt: skip


def evaluate(metrics, *, size=7, weights=None, label=lambda b: b["y"], predict=lambda params, b: b["p"]):
    return fr.evaluate(predict, None, batches(size, weights), metrics, label=label, weight=lambda b: b["w"])


@pytest.mark.parametrize("size", [1, 7, N])
def test_each_task_has_its_number(size):
    """A metric of several tasks gives the number of each task's column alone, under the task's index or name."""
    each = metrics.per_task(metrics.log_loss(), T)
    both = {"loss": each, "own": metrics.named(each, ["click", "like", "buy"]), "mean": lambda p, y, w: p.mean()}
    got = evaluate(both, size=size)
    assert list(got) == ["loss.0", "loss.1", "loss.2", "own.click", "own.like", "own.buy", "mean"]
    assert all(type(x) is float for x in got.values())
    for t, name in enumerate(("click", "like", "buy")):
        label, predict = (lambda b, t=t: b["y"][:, t]), (lambda _, b, t=t: b["p"][:, t])
        alone = evaluate({"loss": metrics.log_loss()}, size=size, label=label, predict=predict)
        assert got[f"loss.{t}"] == got[f"own.{name}"] == pytest.approx(alone["loss"], rel=1e-12)


def test_functions_of_all_examples_that_return_arrays():
    """scikit-learn's numbers of each label, given as an array, equal its number for that label alone."""
    f1 = lambda p, y, w: f1_score(y.numpy(), p.numpy() > 0.5, average=None)
    auc = lambda p, y, w: {f"label {t}": roc_auc_score(y[:, t], p[:, t]) for t in range(T)}
    got = evaluate({"f1": f1, "auc": auc})
    for t in range(T):
        y, p = LABELS[:, t].numpy(), SCORES[:, t].numpy()
        assert got[f"f1.{t}"] == f1_score(y, p > 0.5) and got[f"auc.label {t}"] == roc_auc_score(y, p)


def test_named_tuples_name_their_numbers():
    """A metric that returns a named tuple, such as scipy's tests do, has a number for each field."""
    Test = collections.namedtuple("Test", ["statistic", "pvalue"])
    got = evaluate({"test": lambda p, y, w: Test(p.mean(), (3, 4))})
    assert list(got) == ["test.statistic", "test.pvalue.0", "test.pvalue.1"] and got["test.pvalue.1"] == 4


def test_groups_of_tasks_have_both_names():
    """Values of more dimensions have the index of each, the outer one first; names may stand for either."""
    each = metrics.grouped(metrics.ctr(), 2)
    column = lambda b: (b["y"][:, 0], b["g"])
    nested = metrics.named(metrics.collect({"ctr": each, "mae": metrics.grouped(metrics.mae(), 2)}), ["new", "old"])
    got = evaluate({"x": each, "of": nested}, label=column, predict=lambda _, b: b["p"][:, 0])
    assert list(got) == ["x.0", "x.1", "of.new.ctr", "of.new.mae", "of.old.ctr", "of.old.mae"]
    for g, name in enumerate(("new", "old")):
        assert got[f"x.{g}"] == got[f"of.{name}.ctr"] == pytest.approx(float(LABELS[g == SEGMENT, 0].mean()))
    table = evaluate({"m": lambda p, y, w: torch.arange(6.0).reshape(2, 3)})
    assert table == {f"m.{i}.{j}": 3.0 * i + j for i in range(2) for j in range(3)}


def test_weights_of_each_task():
    """An example counts if any task's weight is not 0, also for a function of all examples."""
    weights = WEIGHTS * (torch.arange(N) % 3 > 0)[:, None]
    mean = lambda p, y, w: (p * w).sum(0) / w.sum(0)
    got = evaluate({"own": metrics.per_task(metrics.weighted_avg(), T), "mean": mean, "n": lambda p, y, w: len(p)},
                   weights=weights)  # fmt: skip
    want = ((SCORES * weights).sum(0) / weights.sum(0)).tolist()
    assert [got[f"own.{t}"] for t in range(T)] == pytest.approx(want)
    assert [got[f"mean.{t}"] for t in range(T)] == pytest.approx(want) and got["n"] == 16


VALUES = st.recursive(
    st.integers(-5, 5) | st.floats(-2, 2),
    lambda own: st.dictionaries(st.sampled_from("abc"), own, min_size=1) | st.lists(own, min_size=1, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from("xyz"), VALUES, min_size=1))
def test_a_name_is_the_path_to_its_number(values):
    """The parts of a name, split at the dots, lead from the metric's value to the number."""
    got = named_numbers("call", values, "{name}")
    for name, x in got.items():
        found = values
        for part in name.split("."):
            found = found[int(part)] if isinstance(found, list) else found[part]
        assert found == x and type(x) is float
    leaves = fr.tree.leaves(values)
    assert sorted(got.values()) == sorted(map(float, leaves))


@pytest.mark.parametrize("value", [torch.tensor([1, 2]), np.array([1, 2]), [1, 2.0], (1, np.float32(2)),
                                   [torch.tensor(1), 2], torch.tensor([1, 2], dtype=torch.bfloat16)])  # fmt: skip
def test_what_holds_numbers(value):
    """Tensors of any dtype, arrays and lists of numbers are the same numbers."""
    assert named_numbers("call", {"m": value}, "{name}") == {"m.0": 1.0, "m.1": 2.0}


@pytest.mark.parametrize("value", ["good", None, torch.ones(2, dtype=torch.complex64), torch.ones(0), {}, [],
                                   {"a": "high"}, [1.0, None], np.array(["a"]), torch.ones(2, 0)])  # fmt: skip
def test_what_holds_no_number(value):
    """A value without numbers, or with an entry that is not a number, raises with the name of its metric."""
    with pytest.raises(TypeError, match=r"(?s)`metrics\['m'\]` gave no number.*\n  need  a number"):
        evaluate({"m": lambda p, y, w: value})


def test_two_numbers_never_have_one_name():
    """If two metrics give one name to two values, an error is raised, so that no number is lost."""
    with pytest.raises(ValueError, match=r"one name to two numbers.\n  got   \['m.0'\]"):
        evaluate({"m": lambda p, y, w: [1.0], "m.0": lambda p, y, w: 2.0})


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_names_are_all_different(names):
    """named refuses no names and names that are not all different."""
    with pytest.raises(ValueError, match="not all different"):
        metrics.named(metrics.per_task(metrics.ctr(), 2), names)


@pytest.mark.parametrize("metric", [metrics.ctr(), metrics.per_task(metrics.ctr(), 3)])
def test_a_name_for_each_value(metric):
    """named refuses a metric that has another number of values than names."""
    m = metrics.named(metric, ["click", "buy"])
    with pytest.raises(ValueError, match="does not have a value for each name"):
        m.compute(m.init())


def test_named_is_mapped_and_compiled():
    """The named values of mapped states are those of each state, and those of a compiled compute."""
    m = metrics.named(metrics.per_task(metrics.mse(), T), [*"abc"])
    states = [m.update(m.init(), SCORES[i : i + 4], LABELS[i : i + 4]) for i in (0, 4)]
    mapped = torch.vmap(m.compute)(fr.tree.map(lambda *xs: torch.stack(xs), *states))
    for i, state in enumerate(states):
        want = m.compute(state)
        assert all(torch.equal(mapped[n][i], want[n]) for n in "abc")
        assert all(torch.equal(x, want[n]) for n, x in fr.jit(m.compute)(state).items())


def test_lists_at_several_lengths():
    """evaluate_retrieval names each value of a metric that has several, followed by the name of the group."""
    bags = {"user": [[0], [1]], "bought": [[2], [0]]}
    batch = fr.Batch(fr.KeyedJaggedTensor.from_lists(bags))
    query = lambda params, batch: fr.lookup(params, batch.ids, [fr.FeatureConfig("user", table="user")]).values
    items, params = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.9, 0.5]]), {"user": torch.eye(2)}
    given = {"hit": metrics.collect({"1": metrics.hit_rate(1), "2": metrics.hit_rate(2)}), "one": metrics.hit_rate(1)}
    groups = {"first": lambda batch: torch.tensor([True, False])}
    got = fr.evaluate_retrieval(query, params, [batch], items, "bought", k=2, metrics=given, groups=groups)
    assert list(got) == ["hit.1", "hit.2", "one", "hit.1 of first", "hit.2 of first", "one of first"]
    assert got["hit.1"] == got["one"] == 0.5 and got["hit.2"] == got["hit.2 of first"] == 1.0


TASKS = metrics.named(metrics.per_task(metrics.mse(), 2), ["up", "down"])
STEP = lambda w, batch: (w + 1.0, {"loss": w})


def judge(w, given=lambda: [None], metric=TASKS):
    predict = lambda w, b: torch.stack([w, -w]).expand(4, 2)
    label, weight = (lambda b: torch.tensor([3.0, 3.0]).expand(4, 2)), (lambda b: None)
    return fr.evaluate(predict, w, given(), {"mse": metric}, label=label, weight=weight)


def test_fit_keeps_each_value_and_follows_one():
    """The history of fit has a number for each value, its table and plot show them, and monitor names one of them."""
    done = fr.fit(STEP, torch.tensor(0.0), [None], epochs=5, evaluate=judge, monitor="mse.up", mode="min")
    assert [h["mse.up"] for h in done.history] == [4.0, 1.0, 0.0, 1.0, 4.0] and float(done.best) == 3.0
    assert [h["mse.down"] for h in done.history] == [16.0, 25.0, 36.0, 49.0, 64.0]
    assert "mse.up" in done._repr_html_() and "mse.down" in done._repr_html_()
    labels = [line.get_label() for line in done.plot().axes[1].get_lines()]
    assert labels == ["mse.up", "mse.down"]


def test_a_checkpoint_keeps_each_value(tmp_path):
    """A run that continues from a checkpoint has the values of earlier epochs."""
    how = {"evaluate": judge, "monitor": "mse.down", "mode": "min", "checkpoint": tmp_path / "run"}
    fr.fit(STEP, torch.tensor(0.0), [None], epochs=2, **how)
    done = fr.fit(STEP, torch.tensor(0.0), [None], epochs=3, resume="auto", **how)
    assert [h["mse.down"] for h in done.history] == [16.0, 25.0, 36.0] and float(done.best) == 1.0


@pytest.mark.parametrize("monitor", ["mse", "mse.left"])
def test_a_monitor_that_is_no_value_raises_before_the_first_step(monitor):
    """A monitor that names the whole metric, or no value of it, raises before the first step."""
    steps = []
    with pytest.raises(KeyError, match=r"(?s)`monitor` is not measured.*mse.up"):
        how = {"monitor": monitor, "mode": "min", "callbacks": [steps.append]}
        fr.fit(STEP, torch.tensor(0.0), [None], epochs=1, evaluate=judge, **how)
    assert not steps


def test_the_values_of_an_iterator_are_known_after_its_epoch():
    """A monitor may name a value of a metric whose batches come from an iterator, which the trial does not read."""
    once = lambda w: judge(w, lambda: iter([None]))
    done = fr.fit(STEP, torch.tensor(0.0), [None], epochs=2, evaluate=once, monitor="mse.up", mode="min")
    assert [h["mse.up"] for h in done.history] == [4.0, 1.0]
    with pytest.raises(KeyError, match="not measured in epoch 0"):
        fr.fit(STEP, torch.tensor(0.0), [None], epochs=2, evaluate=once, monitor="mse.left", mode="min")


def test_an_evaluation_of_ones_own_may_return_several_values():
    """Values of a user's own evaluation have the names that fr.evaluate gives."""
    done = fr.fit(STEP, torch.tensor(0.0), [None], epochs=1, evaluate=lambda w: {"x": w + torch.arange(2), "y": 1})
    assert [done.history[0][n] for n in ("x.0", "x.1", "y")] == [1.0, 2.0, 1.0]
    with pytest.raises(TypeError, match="`evaluate` gave a name that is not a string"):
        fr.fit(STEP, torch.tensor(0.0), [None], epochs=1, evaluate=lambda w: {3: 1.0})


def test_fit_with_a_model_of_several_tasks():
    """fit's own metrics of several tasks are those of fr.evaluate on the validation batches."""
    tables, features = (fr.TableConfig("item", 8, 1),), (fr.FeatureConfig("item", table="item"),)
    one = fr.models.lr(tables, features)
    model = one._replace(apply=lambda params, batch: torch.stack([one.apply(params, batch)] * 2, 1))
    ids = fr.KeyedJaggedTensor.from_lists({"item": [[i] for i in range(8)]})
    batch = fr.Batch(ids, (torch.arange(16) % 3 == 0).float().reshape(8, 2))
    loss = lambda params, batch: torch.nn.functional.binary_cross_entropy_with_logits(
        model.apply(params, batch), batch.label
    )
    step = fr.train_step(loss, sparse=fr.optim.sgd(0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1))
    auc = {"auc": metrics.named(metrics.per_task(metrics.auc(from_logits=True), 2), ["click", "buy"])}
    given = {"model": model, "validation": [batch], "metrics": auc, "monitor": "auc.click"}
    done = fr.fit(step, step.init(model.init(fr.key(0))), [batch], epochs=1, **given)
    want = fr.evaluate(model.apply, done.state.params, [batch], auc)
    assert {n: done.history[0][n] for n in want} == want and not math.isnan(want["auc.buy"])
