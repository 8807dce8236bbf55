"""fr.fit: a loop over a step and a loader that stops, keeps the best parameters and resumes to the same bits."""

import csv
import json
import math
import os
import signal
import sys
from dataclasses import replace

import pytest
import torch

import funcrec as fr
from funcrec.data import Position, batches, random_rows
from funcrec.testing import assert_trees_close

TABLES = (fr.TableConfig("item", 30, 4), fr.TableConfig("user", 20, 4))
FEATURES = (fr.FeatureConfig("item", table="item"), fr.FeatureConfig("user", table="user"))
MODEL = fr.models.wide_deep(TABLES, FEATURES, sizes=(4,), dropout=0.2)
DATA = random_rows(fr.key(5), {"item": 30, "user": 20}, num_rows=30)
KIND = {"sparse": fr.optim.adam(0.02), "dense": fr.optim.dense(torch.optim.Adam, lr=0.02), "has_aux": True}
STEP = fr.train_step(fr.models.loss(MODEL), **KIND)
METRICS = {"auc": fr.metrics.exact_auc, "log_loss": fr.metrics.log_loss(from_logits=True)}


def loader(position):
    return batches(DATA, None, 10, key=fr.key(3), position=position)


def measure(params):
    return fr.evaluate(MODEL.apply, params, batches(DATA, None, 20), METRICS)


def start():
    return STEP.init(MODEL.init(fr.key(0)), fr.key(1))


def fit(step=STEP, **settings):
    settings = {"epochs": 2, "evaluate": measure, "monitor": "auc", "model": MODEL} | settings
    return fr.fit(step, start(), settings.pop("loader", loader), **settings)


def untimed(history):
    return [{n: x for n, x in h.items() if n not in ("seconds", "steps_per_s")} for h in history]


def assert_same(got, want):
    assert_trees_close((got.state, got.best), (want.state, want.best), rtol=0, atol=0)
    assert untimed(got.history) == untimed(want.history)


class Stop(Exception):
    pass


def stop_at(step, when="step"):
    def callback(record):
        if record.when == when and record.step == step:
            raise Stop

    return callback


@pytest.fixture(scope="module")
def whole():
    return fit()


def test_it_is_the_loop_that_one_would_write(whole):
    """fit takes steps in the order of the loader, records the mean loss and the metrics of each epoch, and copies the
    best parameters."""
    state, position, history, best, top = start(), Position(), [], None, -1
    for epoch in range(2):
        losses = []
        for position, batch in loader(position):  # noqa: B007, B020
            state, metrics = STEP(state, batch)
            losses.append(metrics["loss"].double())
        history.append({"epoch": epoch, "loss": float(sum(losses)) / 3, "steps": 3, **measure(state.params)})
        if history[-1]["auc"] > top:
            top, best = history[-1]["auc"], fr.copy(state.params)
    assert_same(whole, fr.Fitted(state, best, history))
    assert whole.stopped == 0 and all(h["seconds"] > 0 and h["steps_per_s"] > 0 for h in whole.history)


@pytest.mark.parametrize("every", [None, 1, 2])
def test_interrupted_anywhere_it_goes_on_to_the_same_bits(every, whole, tmp_path):
    """After an exception after any step, or after an epoch, a resumption gives the bits of an uninterrupted run."""
    how = {"checkpoint": tmp_path / "run.pt", "save_every_steps": every}
    ends = [(k, "step") for k in range(1, 7)] + [(k, "epoch") for k in (3, 6)]
    for i, (step, when) in enumerate(ends if every == 1 else ends[1::3]):
        with pytest.raises(Stop):
            fit(**how, callbacks=[stop_at(step, when)], overwrite=i > 0)
        if every == 1:
            assert fr.load(how["checkpoint"])["position"] == divmod(step - (when == "step" or step % 3 == 0), 3)
        assert_same(fit(**how, resume=True), whole)


def test_checkpoints_of_some_epochs(tmp_path):
    """With `save_every=n`, the file is written after every n-th epoch and the last epoch. An interrupt in between
    reports no checkpoint. A resumption from the previous checkpoint gives the same bits."""
    path, seen = tmp_path / "run.pt", []
    look = lambda record: seen.append(fr.load(path)["position"]) if record.when != "step" else None
    want = fit(epochs=5, checkpoint=path, save_every=2, callbacks=[look])
    assert seen == [(0, 0), (0, 0), (0, 0), (2, 0), (2, 0), (4, 0)] and fr.load(path)["position"] == (5, 0)
    with pytest.raises(Stop):
        fit(epochs=5, checkpoint=path, save_every=2, callbacks=[stop_at(11)], overwrite=True)
    assert_same(fit(epochs=5, checkpoint=path, save_every=2, resume=True), want)
    cut = fit(epochs=5, checkpoint=path, save_every=2, stop=lambda: 1, overwrite=True)
    assert cut.stopped == 1 and fr.load(path)["position"] == (0, 0)
    ended = []
    keep = lambda record: ended.append(1) if record.when == "epoch" else None
    fit(epochs=5, checkpoint=path, save_every=2, callbacks=[keep], stop=lambda: len(ended) == 3, overwrite=True)
    assert fr.load(path)["position"] == (3, 0), "who is asked to end has saved all"


def test_twice_interrupted_and_donated(tmp_path):
    """A compiled step that donates its state, interrupted twice, gives the same bits. The best parameters do not share
    the state's memory."""
    model = fr.models.lr((fr.TableConfig("item", 30, 1),), FEATURES[:1])
    step = fr.train_step(fr.models.loss(model), **KIND | {"sparse": fr.optim.sgd(0.1)})
    fast = fr.jit(step, donate=("state",))
    traced = []
    predict = fr.jit(lambda params, batch: traced.append(1) or model.apply(params, batch))
    padded = fr.data.loader(DATA, None, 20, pad_last=True)
    measure = lambda params: fr.evaluate(predict, params, padded, METRICS)
    run = lambda **how: fr.fit(
        fast, step.init(model.init(fr.key(0))), loader, epochs=2, evaluate=measure, monitor="auc", model=model, **how
    )
    predict(model.init(fr.key(0)), next(padded())[1])
    count, path, want = len(traced), tmp_path / "run.pt", run()
    for at in (2, 5):
        with pytest.raises(Stop):
            run(checkpoint=path, save_every_steps=2, callbacks=[stop_at(at)], resume="auto")
    got = run(checkpoint=path, resume=True)
    assert_same(got, want)
    assert run(checkpoint=path, resume=True).history == got.history, "a finished run has nothing to do"
    assert len(traced) == count, "one shape is compiled"
    before = fr.copy(got.best)
    fast(got.state, next(loader(Position()))[1])
    assert_trees_close(got.best, before, rtol=0, atol=0)
    whole = fr.evaluate(model.apply, before, [DATA.take(torch.arange(30))], METRICS)
    assert fr.evaluate(predict, before, padded, METRICS) == pytest.approx(whole)


@pytest.mark.parametrize("numbers, mode, patience, epochs, best", [
    ([0.5, 0.6, 0.55, 0.6, 0.7], "max", 2, 4, 1), ([0.5, 0.6, 0.55, 0.6, 0.7], "max", 3, 5, 4),
    ([math.nan, 0.5, math.nan, math.nan], "max", 2, 4, 1), ([3.0, 2.0, 2.0, 2.5], "min", 2, 4, 1),
    ([math.nan] * 4, "min", 2, 3, None), ([1.0, math.inf, 2.0, 3.0], "min", 9, 4, 0),
])  # fmt: skip
def test_it_stops_early_and_nan_is_never_best(numbers, mode, patience, epochs, best):
    """A run ends `patience` epochs after the first best epoch, whose parameters are kept. NaN is never best."""
    given = iter(numbers)
    add = lambda state, batch: (state + 1, {"loss": state})
    how = {"evaluate": lambda params: {"x": next(given)}, "monitor": "x", "mode": mode, "patience": patience}
    done = fr.fit(add, torch.zeros(()), [1, 2], epochs=len(numbers), **how)
    assert len(done.history) == epochs
    assert float(done.best) == 2 * (epochs if best is None else best + 1)
    assert fr.loop.best_epoch(done.history, "x", mode) == best


def test_on_a_mesh(tmp_path):
    """Sharded tables are evaluated and saved whole. The run resumes to the same bits, on the mesh or in one process."""
    mesh = fr.Mesh.emulated(data=2)
    plan = fr.Plan.uniform("row_wise", TABLES, mesh)
    step = fr.train_step(fr.models.loss(MODEL), **KIND, mesh=mesh, plan=plan)
    first = lambda: step.init(MODEL.init(fr.key(0)), fr.key(1))
    how = {"epochs": 2, "evaluate": measure, "monitor": "auc", "mesh": mesh, "model": MODEL}
    want, path = fr.fit(step, first(), loader, **how), tmp_path / "run.pt"
    with pytest.raises(Stop):
        fr.fit(step, first(), loader, **how, checkpoint=path, save_every_steps=2, callbacks=[stop_at(6)])
    assert fr.load(path)["state"].tables["item"].shape == (30, 4)
    place = lambda state: fr.reshard(state, plan, mesh=mesh, sparse=KIND["sparse"])
    broken = path.read_bytes()
    assert_same(fr.fit(step, first(), loader, **how, checkpoint=path, resume=True), want)
    path.write_bytes(broken)
    assert_same(fr.fit(step, first(), loader, **how, checkpoint=path, resume=True, place=place), want)
    with pytest.raises(TypeError, match="`mesh` is missing"):
        fr.fit(step, first(), loader, epochs=1)
    assert len(fit(epochs=3, checkpoint=path, resume=True).history) == 3


def test_copies_are_made_one_before_they_are_read(tmp_path):
    """`sync` runs before a state is evaluated or saved. Training continues from the result of `sync`."""
    seen = []
    sync = lambda state: seen.append(int(state.step)) or state
    fit(sync=sync, checkpoint=tmp_path / "run.pt", save_every_steps=2)
    assert seen == [2, 3, 5, 6]


@pytest.mark.parametrize("signum, error", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_leaves_a_checkpoint(signum, error, whole, tmp_path):
    """After a signal, the step ends, the checkpoint is written, and the signal is raised. The handlers are restored.
    The run can resume."""
    send = lambda record: os.kill(os.getpid(), signum) if record.when == "step" and record.step == 5 else None
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(error) as raised:
        fit(checkpoint=tmp_path / "run.pt", callbacks=[send])
    assert error is KeyboardInterrupt or raised.value.code == 143
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    assert fr.load(tmp_path / "run.pt")["position"] == (1, 2)
    assert_same(fit(checkpoint=tmp_path / "run.pt", resume=True), whole)


def test_a_second_signal_does_not_wait(request):
    """A second signal does not wait for the step. Without a checkpoint, `fit` does not handle signals."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start without this handler
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises(KeyboardInterrupt), fr.loop.listen() as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked() == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
    steps = []
    interrupt = lambda record: (steps.append(record.step), os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        fit(callbacks=[interrupt])
    assert steps == [0]


def test_stop_ends_it(whole, tmp_path):
    """A nonzero result of `stop` ends the run after a step, and is reported. The checkpoint can be resumed."""
    seen = []
    how = {"callbacks": [seen.append], "checkpoint": tmp_path / "run.pt"}
    cut = fit(**how, stop=lambda: 7 * (len(seen) == 6))  # the beginning, four steps and an epoch
    assert cut.stopped == 7 and len(cut.history) == 1 and int(cut.state.step) == 4
    assert_same(fit(checkpoint=tmp_path / "run.pt", resume=True), whole)


def test_records_tell_what_happened(tmp_path, capsys):
    """A callback gets the metrics of the step and the entry of the epoch. json_lines, csv_lines, tensorboard and
    print_epoch write both."""
    seen, scalars = [], []

    class Writer:
        def add_scalar(self, name, number, at):
            scalars.append((name, number, at))

        def flush(self):
            scalars.append("flushed")

    log, table = tmp_path / "log.jsonl", tmp_path / "log.csv"
    written = [fr.loop.json_lines(log), fr.loop.csv_lines(table), fr.loop.tensorboard(Writer(), every=3)]
    done = fit(callbacks=[seen.append, *written, fr.loop.print_epoch])
    assert [(r.when, r.step) for r in seen[:5]] == [("begin", 0), *(("step", k) for k in (1, 2, 3)), ("epoch", 3)]
    assert float(seen[1].metrics["loss"]) > 0 and seen[1].params is None
    assert seen[4].metrics == done.history[0] and seen[4].is_best and seen[4].is_chief
    assert_trees_close(seen[-1].params, done.state.params)
    assert [json.loads(line) for line in log.read_text().splitlines()] == done.history
    rows = list(csv.DictReader(table.open()))
    assert [float(r["auc"]) for r in rows] == [h["auc"] for h in done.history]
    with pytest.raises(ValueError, match="has other columns"):
        written[1](fr.loop.Record("epoch", 2, 9, {"epoch": 2, "loss": 0.5}, None))
    written[0](fr.loop.Record("epoch", 2, 9, {"epoch": 2, "loss": math.inf}, None))
    assert json.loads(log.read_text().splitlines()[2]) == {"epoch": 2, "loss": None}
    assert ("epoch/auc", done.history[1]["auc"], 1) in scalars
    kinds = [x if x == "flushed" else x[0] for x in scalars]
    assert kinds.count("flushed") == 2 and kinds[-1] == "flushed"  # an epoch's numbers can be seen at its end
    assert [x[2] for x in scalars if x[0] == "step/loss"] == [3, 6]
    assert capsys.readouterr().out.splitlines()[1].startswith("epoch   1  loss 0.")


def test_tensorboard_is_asked_for_late(monkeypatch, tmp_path):
    """Without tensorboard, the error says what to install. With tensorboard, the writer gets the folder."""
    record = fr.loop.Record("epoch", 0, 4, {"epoch": 0, "auc": 0.5}, None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"(?s)tensorboard is missing.*pip install tensorboard"):
        fr.loop.tensorboard(tmp_path)(record)
    made = []

    class Module:
        class SummaryWriter:
            def __init__(self, folder):
                made.append(folder)

            def add_scalar(self, *scalar):
                made.append(scalar)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Module)
    fr.loop.tensorboard(tmp_path)(record)
    assert made == [str(tmp_path), ("epoch/auc", 0.5, 0)]


def test_the_first_batch_is_looked_at(tmp_path):
    """Ids outside their table, a model of other tables than the state's, or a batch that `validate` refuses, end the
    run before a step and before a checkpoint."""
    steps, path = [], tmp_path / "run.pt"
    small = MODEL._replace(tables=(fr.TableConfig("item", 3, 4), TABLES[1]))
    refuse = lambda batch: (_ for _ in ()).throw(Stop())
    moved = lambda batch: replace(batch, ids=replace(batch.ids, values=batch.ids.values + 100))
    outside = lambda position: ((after, moved(batch)) for after, batch in loader(position))
    ways = ({"loader": outside}, fr.CheckError), ({"model": small}, ValueError)
    for how, error in (*ways, ({"model": None, "validate": refuse}, Stop)):
        with pytest.raises(error):
            fit(lambda state, batch: steps.append(1), **how, checkpoint=path)
    assert steps == [] and not path.exists()


def test_loaders_of_other_kinds(whole, tmp_path):
    """A list of batches is used in every epoch. Other iterables that can be repeated are also accepted, but cannot
    resume in the middle of an epoch."""
    add = lambda state, batch: (state + batch, {"loss": torch.tensor(float(batch))})
    for again in ([1, 2, 3], {1: 0, 2: 0, 3: 0}.keys()):
        done = fr.fit(add, torch.tensor(0), again, epochs=2)
        assert int(done.state) == 12 and [h["loss"] for h in done.history] == [2.0, 2.0]
    for again in ([1, 2, 3], {1: 0, 2: 0, 3: 0}.keys()):
        path = tmp_path / f"{type(again).__name__}.pt"
        how = {"epochs": 2, "checkpoint": path}
        cut = fr.fit(add, torch.tensor(0), again, **how, stop=lambda: 1, callbacks=[])
        assert int(cut.state) == 0
        seen = []
        two = {"callbacks": [seen.append], "stop": lambda seen=seen: len(seen) == 3}
        fr.fit(add, torch.tensor(0), again, **how, resume=True, **two)
        if isinstance(again, list):
            assert int(fr.fit(add, torch.tensor(0), again, **how, resume=True).state) == 12
        else:
            with pytest.raises(ValueError, match="cannot begin in the midst"):
                fr.fit(add, torch.tensor(0), again, **how, resume=True)


@pytest.mark.parametrize("name", ["loader", "workers", "stream_loader"])
def test_the_loaders_of_the_library(name, tmp_path):
    """A run from any loader, interrupted in the middle of an epoch, resumes to the same bits. A short last batch is
    padded."""
    columns = {"click": [1, 0, 1, 1, 0] * 4, "item": [*range(20)], "user": [*range(20)]}
    schema = fr.data.Schema(label="click", categorical=("item", "user"))
    how = {"key": fr.key(2), "pad_last": True}
    data = lambda: fr.data.examples(columns, schema)
    load = {
        "loader": lambda: fr.data.loader(data(), None, 8, **how),
        "workers": lambda: fr.data.loader(data(), None, 8, **how, workers=2),
        "stream_loader": lambda: fr.data.stream_loader(columns, schema, 8, **how),
    }[name]()
    want, path = fit(loader=load), tmp_path / "run.pt"
    assert [h["steps"] for h in want.history] == [3, 3]
    with pytest.raises(Stop):
        fit(loader=load, checkpoint=path, save_every_steps=1, callbacks=[stop_at(5)])
    assert fr.load(path)["position"] == (1, 1)
    assert_same(fit(loader=load, checkpoint=path, resume=True), want)


def test_the_bar_is_for_terminals(monkeypatch, capsys):
    """The progress bar is on stderr if stderr is a terminal, or if the caller requests the bar."""
    fit(epochs=1)
    assert capsys.readouterr().err == ""
    fit(epochs=1, progress=True)
    assert "epoch   0" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fit(epochs=1)
    assert "epoch   0" in capsys.readouterr().err
    fit(epochs=1, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("how, error, part", [
    ({"epochs": 0}, ValueError, "`epochs`"), ({"epochs": 2.0}, TypeError, "`epochs`"),
    ({"patience": 2, "monitor": None}, ValueError, "`patience` needs `monitor`"),
    ({"mode": "most"}, ValueError, "`mode` is unknown"), ({"monitor": "acc"}, KeyError, "among ['epoch', 'loss'"),
    ({"loader": iter([1])}, TypeError, "an iterator, which one epoch uses up"),
    ({"loader": 3}, TypeError, "a function or an iterable"), ({"loader": []}, ValueError, "`loader` has no batch"),
    ({"loader": lambda position: [3]}, TypeError, "`loader` gives no positions"),
    ({"loader": lambda _: [(Position(0, 1), next(loader(Position()))[1])]}, ValueError, "in the midst of epoch 0"),
    ({"loader": lambda position: [(Position(3, 1), 3)]}, ValueError, "to another position than the next"),
    ({"callbacks": [3]}, TypeError, "`callbacks[0]` is not a function"),
    ({"model": 3}, TypeError, "`model` has no features"), ({"validate": len}, ValueError, "exclude each other"),
    ({"resume": True}, ValueError, "`resume` needs `checkpoint`"),
    ({"resume": "yes"}, ValueError, "`resume` is unknown"),
    ({"save_every": 0}, ValueError, "`save_every` is out of range"),
    ({"save_every_steps": 2}, ValueError, "`save_every_steps` needs `checkpoint`"),
    ({"evaluate": lambda p: 0.5}, TypeError, "`evaluate` gave no numbers by name"),
    ({"evaluate": lambda p: {"loss": 0.5}}, ValueError, "a name that the history has"),
    ({"evaluate": lambda p: {"x": "high"}}, TypeError, "gave no number for 'x'"),
    ({"step": lambda s, b: s}, TypeError, "`step` returned no pair"),
    ({"step": 3}, TypeError, "`step` is not a function"),
])  # fmt: skip
def test_bad_input(how, error, part):
    """Wrong arguments, and wrong results of the given functions, raise in four parts."""
    with pytest.raises(error) as raised:
        fit(**how)
    text = str(raised.value)
    assert part in text and "\n  got   " in text and "\n  need  " in text


def test_checkpoints_that_are_not_this_runs(tmp_path):
    """An existing checkpoint is not overwritten without `overwrite`. A checkpoint of other settings, one of another
    state, and a missing checkpoint each raise."""
    path = tmp_path / "run.pt"
    fit(epochs=1, checkpoint=path, settings={"lr": 0.02})
    before = path.read_bytes()
    for how, part in (
        ({}, "`checkpoint` holds a run"), ({"resume": True, "settings": {"lr": 0.1}}, "lr was 0.02 and is 0.1"),
        ({"resume": True}, "lr was 0.02 and is None"), ({"resume": True, "overwrite": True}, "exclude each other"),
        ({"resume": True, "settings": {"lr": 0.02}, "monitor": "log_loss", "mode": "min"}, "`monitor` is another"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=part):
            fit(checkpoint=path, **how)
    other = fr.models.lr((fr.TableConfig("item", 30, 1),), FEATURES[:1])
    with pytest.raises(
        ValueError, match=r"(?s)another state.*tables\['user'\]` is not expected \(f32\[20, 4\] for nothing\).*more"
    ):
        step = fr.train_step(fr.models.loss(other), **KIND)
        fr.fit(step, step.init(other.init(fr.key(0))), loader, epochs=2, monitor="auc", evaluate=measure,
               checkpoint=path, resume=True, settings={"lr": 0.02})  # fmt: skip
    assert path.read_bytes() == before
    fr.save(tmp_path / "other.pt", {"x": 1})
    with pytest.raises(ValueError, match="is not a checkpoint of fit"):
        fit(checkpoint=tmp_path / "other.pt", resume=True)
    with pytest.raises(ValueError, match="`checkpoint` does not exist"):
        fit(checkpoint=tmp_path / "none.pt", resume=True)
    assert len(fit(epochs=1, checkpoint=path, overwrite=True).history) == 1
