"""fit checks every batch, every loss and, before its first step, the evaluation."""

import functools
import math
import signal
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import funcrec as fr
from funcrec.data import Position
from funcrec.loop._trial import uses
from funcrec.testing import assert_trees_close

TABLES = (fr.TableConfig("item", 30, 4), fr.TableConfig("small", 5, 4))
FEATURES = (fr.FeatureConfig("clicked", table="item"), fr.FeatureConfig("seen", table="small", pooling="mean"))
HASHED = fr.FeatureConfig("hashed", table="small", hash=fr.modulo())
KIND = {"sparse": fr.optim.sgd(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
LABEL = torch.tensor([1.0, 0.0])


def loss_fn(params, batch):
    acts = fr.lookup(params.tables, batch.ids, (*FEATURES, HASHED))
    return fr.losses.bce((acts["clicked"] + acts["seen"]).sum(1) + params.dense["b"], batch.label, batch.weight)


STEP = fr.train_step(loss_fn, **KIND)


def start():
    return STEP.init(fr.Params(fr.init(fr.key(0), TABLES), {"b": torch.zeros(())}))


def batch(clicked, seen=(0, 0), hashed=(10**9, 7)):
    """Return a batch with two bags of each key. The padding is garbage."""
    lists = {"seen": [[x] for x in seen], "clicked": [[x, x] for x in clicked], "hashed": [[x] for x in hashed]}
    ids = fr.KeyedJaggedTensor.from_lists(lists).pad_to(11)
    ids.values[8:] = -1
    return fr.Batch(ids, LABEL)


GOOD, WORSE, WORST = batch((1, 29)), batch((30, -1)), batch((0, 31), (4, 5))
# these batches have 0, 4 and 3 bad ids
BATCHES = [GOOD, WORSE, WORST]


def loader_of(batches):
    def load(position):
        count = len(batches)
        for i in range(position.batch, count):
            yield Position(position.epoch, i + 1) if i + 1 < count else Position(position.epoch + 1, 0), batches[i]

    return load


class Rows:
    """Rows of data in which each row is a batch."""

    num_rows = 3

    def take(self, rows):
        return BATCHES[int(rows[0])]


def rows_loader(**how):
    return fr.data.loader(Rows(), None, 1, **how)


LOADERS = {
    "a list": lambda: BATCHES,
    "a function": lambda: loader_of(BATCHES),
    "a loader": rows_loader,
    "a loader with threads": lambda: rows_loader(workers=2),
    "a loader with a thread for the device": lambda: rows_loader(device="cpu", depth=2),
}
STEPS = {"eager": STEP, "a pipeline": fr.pipeline(STEP)}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("step", STEPS)
def test_bad_ids_of_later_batches_are_counted(loader, step):
    """The entry of each epoch counts the ids outside their tables in all batches. Hashed ids and padding never
    count."""
    done = fr.fit(STEPS[step], start(), LOADERS[loader](), epochs=2, on_bad_ids="count")
    assert [h["bad_ids"] for h in done.history] == [7, 7]
    want = start()
    for one in BATCHES * 2:
        want, _ = STEP(want, one)
    assert_trees_close(done.state, want, rtol=0, atol=0)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("how", [{}, {"on_bad_ids": "raise"}])
def test_bad_ids_of_later_batches_raise(loader, how):
    """By default, a bad id raises before the step of its batch, with feature, bag, id and batch."""
    steps, note = [], lambda record: steps.append(record.step) if record.when == "step" else None
    words = r"(?s)feature 'clicked' has ids outside table 'item'.*id 30 in bag 0.*in batch 1 of epoch 0.*on_bad"
    with pytest.raises(fr.CheckError, match=words):
        fr.fit(STEP, start(), LOADERS[loader](), epochs=1, callbacks=[note], **how)
    assert steps == [1]
    with pytest.raises(fr.CheckError, match="in the last batch of epoch 0"):
        fr.fit(STEP, start(), [GOOD, WORSE], epochs=1, **how)


def test_bags_of_a_later_batch_that_end_before_they_begin_raise():
    """Offsets that descend in a later batch raise before its step."""
    ids = GOOD.ids
    turned = fr.Batch(replace(ids, offsets=ids.offsets.flip(0)), LABEL)
    with pytest.raises(fr.CheckError, match=r"batch\.ids\.offsets"):
        fr.fit(STEP, start(), [GOOD, turned], epochs=1)


def test_bad_ids_of_the_first_batch_are_counted_too():
    """Bad ids of the first batch are also counted. No value is written to the batch. Other faults of the batch
    still raise."""
    before = fr.copy(WORSE)
    done = fr.fit(STEP, start(), [WORSE, GOOD], epochs=1, on_bad_ids="count")
    assert done.history[0]["bad_ids"] == 4
    assert_trees_close(WORSE, before, rtol=0, atol=0)
    weighted = fr.Batch(WORSE.ids, LABEL, weight=torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="weight"):
        fr.fit(STEP, start(), [weighted], epochs=1, on_bad_ids="count")


def test_a_model_says_which_ids_are_bad():
    """For a user's own step, whose loss is unknown, `model` tells which ids are bad. Without a model, `on_bad_ids`
    raises there."""
    tables, features = (fr.TableConfig("item", 30, 1),), (fr.FeatureConfig("clicked", table="item"),)
    model = fr.models.lr(tables, features)
    own = fr.train_step(fr.models.loss(model), has_aux=True, **KIND)
    step, first = lambda state, batch: own(state, batch), own.init(model.init(fr.key(0)))
    assert fr.fit(step, first, BATCHES, epochs=1, model=model, on_bad_ids="count").history[0]["bad_ids"] == 6
    with pytest.raises(fr.CheckError, match="'clicked' has ids outside table 'item'"):
        fr.fit(step, first, BATCHES, epochs=1, model=model)
    assert "bad_ids" not in fr.fit(step, first, BATCHES, epochs=1).history[0]
    for mode in ("raise", "count"):
        with pytest.raises(ValueError, match=r"(?s)`on_bad_ids` knows no lookup.*model="):
            fr.fit(step, first, BATCHES, epochs=1, on_bad_ids=mode)


def test_what_is_asked_for_can_be_done():
    """An unknown value of `on_bad_ids`, and a monitor that is not counted, raise before any work."""
    for how, kind, words in (
        ({"on_bad_ids": "warn"}, ValueError, "`on_bad_ids` is unknown"),
        ({"on_bad_ids": 1}, TypeError, "`on_bad_ids` is unknown"),
        ({"monitor": "bad_ids", "mode": "min"}, KeyError, "`monitor` is measured by nothing"),
    ):
        with pytest.raises(kind, match=words):
            fr.fit(STEP, start(), BATCHES, epochs=1, **how)
    done = fr.fit(STEP, start(), BATCHES, epochs=1, on_bad_ids="count", monitor="bad_ids", mode="min")
    assert done.history[0]["bad_ids"] == 7


def test_the_count_goes_through_a_checkpoint(tmp_path):
    """A run that stops in the middle of an epoch and resumes has the count of the whole epoch."""
    asked = []
    stop = lambda: int(len(asked) == 3) if asked.append(1) is None else 0
    how = {"epochs": 2, "on_bad_ids": "count", "checkpoint": tmp_path / "run"}
    cut = fr.fit(STEP, start(), loader_of(BATCHES), stop=stop, **how)
    assert cut.stopped and not cut.history
    done = fr.fit(STEP, start(), loader_of(BATCHES), resume=True, **how)
    assert [h["bad_ids"] for h in done.history] == [7, 7]


def test_bad_ids_are_those_of_an_obvious_count():
    """The count of bad ids equals a plain count. The law covers keys with different batch sizes, several features of a
    key, int32 ids and empty bags."""
    from funcrec.loop._bad_ids import outside

    generator, shapes = np.random.default_rng(0), {"item": (30, 4), "small": (5, 4)}
    for trial in range(50):
        lists = {k: [generator.integers(-2, 33, generator.integers(0, 4)).tolist() for _ in range(n)]
                 for k, n in (("clicked", trial % 4), ("other", 2), ("seen", 3))}  # fmt: skip
        flat = [x for bags in lists.values() for bag in bags for x in bag]
        lengths = [len(bag) for bags in lists.values() for bag in bags]
        dtype = torch.int32 if trial % 2 else torch.int64
        ids = fr.KeyedJaggedTensor.from_lengths(
            tuple(lists), torch.tensor(flat, dtype=dtype), torch.tensor(lengths, dtype=torch.int64),
            strides=tuple(len(bags) for bags in lists.values()),
        )  # fmt: skip
        features = (*FEATURES, fr.FeatureConfig("again", table="small", column="clicked"))
        want = sum(not 0 <= x < shapes[f.table][0] for f in features for bag in lists[f.key] for x in bag)
        assert outside(ids, features, shapes).sum() == want


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e29])
@pytest.mark.parametrize("kind", ["tensor", "number", "all members"])
def test_a_loss_that_diverges_ends_the_run(loss, kind, tmp_path):
    """A diverged loss ends the run with an error that has the number of the step, the best parameters and the history.
    The checkpoint is the previous checkpoint."""
    given = {"tensor": torch.tensor, "number": float, "all members": lambda x: torch.tensor([x, math.nan])}[kind]
    losses = [3.0, 2.0, 1.0, 1.5, loss, 1.0]
    step = lambda state, i: (state + 1, {"loss": given(losses[int(state)])})
    how = {"epochs": 3, "monitor": "loss", "mode": "min", "checkpoint": tmp_path / "run"}
    seen = []
    with pytest.raises(fr.loop.DivergedError, match=r"(?s)the loss diverged in step 5\..*`best`") as error:
        fr.fit(step, torch.tensor(0), [0, 1], callbacks=[lambda r: seen.append(r.step)], **how)
    found = error.value
    # the other member makes the mean NaN, which is never best
    if kind == "all members":
        assert found.step == 5 and len(found.history) == 2
    else:
        assert (found.step, int(found.best), [h["loss"] for h in found.history]) == (5, 4, [2.5, 1.25])
    assert max(seen) == 5, "callbacks are told of it"
    assert fr.load(tmp_path / "run")["state"] == 4


def test_one_member_that_diverges_does_not_end_the_others():
    """An ensemble with one finite loss continues."""
    step = lambda state, i: (state, {"loss": torch.tensor([1.0, math.nan])})
    assert math.isnan(fr.fit(step, torch.tensor(0), [0], epochs=1).history[0]["loss"])


def broken(predictions, labels, weights):
    raise AttributeError("no such thing")


def first_steps(evaluate, **how):
    """Return (the recorded events before the error, the error)."""
    steps = []
    with pytest.raises(Exception) as error:
        fr.fit(STEP, start(), [GOOD], epochs=2, evaluate=evaluate, callbacks=[lambda r: steps.append(r.when)], **how)
    return steps, error.value


def predict(params, batch):
    return fr.lookup(params.tables, batch.ids, FEATURES[:1])["clicked"].sum(1)


def test_a_metric_that_cannot_work_raises_before_the_first_step():
    """A broken metric, predictions that fit no label, a metric that returns no number, and a monitor that nothing
    measures raise before the first step."""
    measure = lambda metric, p=predict: lambda params: fr.evaluate(p, params, [GOOD], {"m": metric})
    for evaluate, words, how in (
        (measure(broken), "no such thing", {}),
        (measure(lambda *xs: "good"), "gave no number", {}),
        (measure(fr.metrics.exact_auc, lambda params, batch: torch.ones(7)), "", {}),
        (lambda params: measure(fr.metrics.exact_auc)(params) | {"m": None}, "gave no number", {}),
        (lambda params: measure(fr.metrics.exact_auc)(params) | {"epoch": 1}, "a name that the history has", {}),
        (measure(fr.metrics.exact_auc), "`monitor` is not measured", {"monitor": "auc"}),
    ):
        steps, error = first_steps(evaluate, **how)
        assert steps == [] and words in str(error), (steps, error)


def test_a_monitor_that_an_evaluation_of_ones_own_does_not_give():
    """A monitor that a user's own evaluation does not give raises after the first epoch, when the gap is known."""
    with pytest.raises(KeyError, match=r"(?s)funcrec.fit: `monitor` is not measured in epoch 0.*'auc'"):
        fr.fit(STEP, start(), [GOOD], epochs=2, evaluate=lambda params: {"mine": 1.0}, monitor="auc")


def test_a_handlers_error_ends_the_trial():
    """An error that a signal's handler raises during the trial passes through. The evaluation is not blamed or run
    again."""
    runs, before = [], signal.getsignal(signal.SIGUSR1)

    def late(number, frame):
        raise ValueError("the handler's words")

    def measure(params):
        runs.append(1)
        signal.raise_signal(signal.SIGUSR1)
        return fr.evaluate(predict, params, [GOOD], {"auc": fr.metrics.exact_auc})

    signal.signal(signal.SIGUSR1, late)
    try:
        steps, error = first_steps(measure)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (steps, runs, str(error), getattr(error, "__notes__", [])) == ([], [1], "the handler's words", [])


def test_the_trial_takes_one_batch():
    """The trial takes one batch of each evaluation, and all batches if a batch raises an error. An iterator loses no
    batch."""
    taken = []

    def given():
        for one in (GOOD, GOOD, GOOD):
            taken.append(1)
            yield one

    metrics = {"auc": fr.metrics.exact_auc}
    measure = lambda params: fr.evaluate(predict, params, given, metrics)
    done = fr.fit(STEP, start(), [GOOD], epochs=1, evaluate=measure, monitor="auc")
    assert (
        len(taken) == 1 + 3 and done.history[0]["auc"] == fr.evaluate(predict, done.state.params, given, metrics)["auc"]
    )

    def picky(predictions, labels, weights):
        if len(labels) < 6:
            raise ValueError("only one class")
        return 1.0

    taken.clear()
    measure = lambda params: fr.evaluate(predict, params, given, {"picky": picky})
    assert fr.fit(STEP, start(), [GOOD], epochs=1, evaluate=measure).history[0]["picky"] == 1
    assert len(taken) == 1 + 3 + 3
    once, count = iter([GOOD, GOOD]), lambda predictions, labels, weights: len(labels)
    measure = lambda params: fr.evaluate(predict, params, once, {"count": count})
    assert fr.fit(STEP, start(), [GOOD], epochs=1, evaluate=measure, monitor="count").history[0]["count"] == 4


def own(params):
    return {f"valid_{n}": x for n, x in fr.evaluate(predict, params, [GOOD], {"auc": fr.metrics.exact_auc}).items()}


class Measure:
    def __call__(self, params):
        return own(params)

    def of(self, params):
        return own(params)


CALLING = {
    "a function": own,
    "one that calls it": lambda params: own(params),
    "in a comprehension": lambda params: {k: own(params)[k] for k in ("auc",)},
    "of a module": lambda params: fr.loop.evaluate(predict, params, [GOOD], {"auc": fr.metrics.exact_auc}),
    "an object": Measure(),
    "a method": Measure().of,
    "a partial function": functools.partial(own),
}


@pytest.mark.parametrize("name", CALLING)
def test_what_calls_evaluate_is_tried(name):
    """However an evaluation refers to `fr.evaluate`, its metric is tried before the first step."""
    assert uses(CALLING[name], fr.evaluate)


def test_an_evaluation_of_ones_own_is_run_behind_epochs_only():
    """An evaluation that does not call `fr.evaluate` may have its own state. Such an evaluation therefore runs only
    after epochs."""
    numbers = iter([0.5, 0.6])
    done = fr.fit(STEP, start(), [GOOD], epochs=2, evaluate=lambda params: {"x": next(numbers)}, monitor="x")
    assert [h["x"] for h in done.history] == [0.5, 0.6]
    assert not any(uses(f, fr.evaluate) for f in (len, print, None, lambda params: {}, predict))


def test_the_bar_shows_bad_ids(capsys):
    """The bar shows the number of bad ids next to the loss, and so does `print_epoch`."""
    with warnings.catch_warnings():
        fr.fit(STEP, start(), BATCHES, epochs=1, on_bad_ids="count", progress=True, callbacks=[fr.loop.print_epoch])
    out = capsys.readouterr()
    assert "bad_ids=" in out.err and "bad_ids 7" in out.out
