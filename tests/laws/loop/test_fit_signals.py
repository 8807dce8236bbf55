"""The end of fit: signals after the last step, which number is best, and a loader that differs from the run's
loader."""

import os
import signal
import threading

import pytest
import torch

import funcrec as fr
from funcrec.loop import _run_state, _signals
from funcrec.testing import assert_trees_close

LABELS = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])


class Rows:
    """A source of five examples."""

    num_rows = 5

    def take(self, rows):
        return fr.Batch(fr.KeyedJaggedTensor.from_lists({"item": [[int(r)] for r in rows]}), LABELS[rows])


def add(total, batch):
    return total + batch.label.sum(), {"loss": 1 / (1 + total)}


def load(batch_size=2, key=1, **how):
    return fr.data.loader(Rows(), None, batch_size, key=fr.key(key), **how)


@pytest.mark.parametrize("where", ["step", "evaluate", "epoch"])
@pytest.mark.parametrize(("signum", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_behind_the_last_step_is_raised(tmp_path, where, signum, raised):
    """A signal in the last step, in its evaluation or in its last callback is raised after the checkpoint is
    written."""
    path = tmp_path / "run.pt"
    kill = lambda: os.kill(os.getpid(), signum)

    def callback(record):
        if record.when == where and record.step == 6:
            kill()

    def measure(params):
        if where == "evaluate" and float(params) == 6.0:
            kill()
        return {"sum": float(params)}

    with pytest.raises(raised):
        fr.fit(add, torch.tensor(0.0), load(), epochs=2, evaluate=measure, checkpoint=path, callbacks=[callback])
    done = fr.fit(add, torch.tensor(0.0), load(), epochs=2, evaluate=measure, checkpoint=path, resume=True)
    assert float(done.state) == 6.0 and len(done.history) == 2


def test_minutes_are_counted_from_the_last_checkpoint(tmp_path, monkeypatch):
    """With `save_every_minutes`, the file is written between two steps when the last write is that old, whatever wrote
    it. A killed run resumes from the file to the same bits."""
    path, now, seen = tmp_path / "run.pt", [0.0], []
    monkeypatch.setattr(_run_state.time, "monotonic", lambda: now[0])

    def callback(record):
        if record.when == "step":
            now[0] += 25.0
            seen.append(tuple(fr.load(path)["position"]))

    how = {"epochs": 2, "checkpoint": path, "save_every_minutes": 1}
    want = fr.fit(add, torch.tensor(0.0), load(1), **how, callbacks=[callback])
    assert seen == [*[(0, 0)] * 3, *[(0, 3)] * 2, *[(1, 0)] * 3, *[(1, 3)] * 2]

    def killed(record):
        callback(record)
        if len(seen) == 15:
            raise KeyError("killed")

    with pytest.raises(KeyError):
        fr.fit(add, torch.tensor(0.0), load(1), **how, callbacks=[killed], overwrite=True)
    done = fr.fit(add, torch.tensor(0.0), load(1), **how, callbacks=[callback], resume="auto")
    assert float(done.state) == float(want.state) and done.history[0]["loss"] == want.history[0]["loss"]
    assert len(seen) == 15 + 7, "it began at (0, 3)"


@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=["alone", "mesh"])
def test_the_newest_are_kept(tmp_path, axes):
    """With `keep`, a folder has that many checkpoints, named by their steps. A run resumes from the newest whole
    checkpoint to the same bits, on its mesh or in one process. A new run removes the checkpoints of the old run."""
    model = fr.models.lr((fr.TableConfig("item", 5, 1),), (fr.FeatureConfig("item", table="item"),))
    mesh = fr.Mesh.emulated(**axes) if axes else None
    place = {"mesh": mesh, "plan": fr.Plan.uniform("row_wise", model.tables, mesh)} if axes else {}
    kind = {"sparse": fr.optim.adam(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1), "has_aux": True}
    step, alone = (fr.train_step(fr.models.loss(model), **kind, **how) for how in (place, {}))
    path, begin = tmp_path / "run", lambda step=step: step.init(model.init(fr.key(0)))
    how = {"epochs": 3, "checkpoint": path, "save_every_steps": 1, "keep": 2, "monitor": "loss", "mode": "min"}
    load_two = load(2, drop_last=True)
    whole = lambda done: (fr.gather_state(done.state, mesh) if axes else done.state, done.best)

    def stop_at(k):
        def callback(record):
            if record.when == "step" and record.step == k:
                raise KeyError("killed")

        return callback

    want = fr.fit(step, begin(), load_two, **how, mesh=mesh)
    assert sorted(p.name for p in path.iterdir()) == [".run", "step-0000000005", "step-0000000006"]
    with pytest.raises(KeyError):
        fr.fit(step, begin(), load_two, **how, mesh=mesh, callbacks=[stop_at(4)], overwrite=True)
    assert sorted(p.name for p in path.iterdir()) == [".run", "step-0000000002", "step-0000000003"]
    newest = fr.latest(path)
    (newest / "manifest" if axes else newest).write_bytes(b"half")
    done = fr.fit(step, begin(), load_two, **how, mesh=mesh, callbacks=[stop_at(9)], resume="auto")
    assert_trees_close(whole(done), whole(want), rtol=0, atol=0)
    more = how | {"epochs": 4}
    longer = fr.fit(alone, begin(alone), load_two, **more, resume=True)
    want = fr.fit(step, begin(), load_two, **more | {"checkpoint": tmp_path / "other"}, mesh=mesh)
    assert_trees_close((longer.state, longer.best), whole(want), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("how", "said"), [
    ({"keep": 0}, "`keep` is out of range"),
    ({"keep": 2, "checkpoint": None}, "`keep` needs `checkpoint`"),
    ({"keep": 2, "checkpoint": __file__}, "is a file"),
    ({"checkpoint": os.path.dirname(__file__)}, "is a folder"),
    ({"save_every_minutes": 0}, "out of range"),
    ({"save_every_minutes": float("nan")}, "out of range"),
    ({"save_every_minutes": "5"}, "is not a number"),
    ({"save_every_minutes": float("inf")}, "need  a finite number > 0"),
    ({"save_every_minutes": 5, "checkpoint": None}, "`save_every_minutes` needs `checkpoint`"),
    ({"save_every_minutes": 5, "sync": lambda state: state}, "when a clock says so"),
])  # fmt: skip
def test_what_does_not_fit_a_checkpoint_is_refused(tmp_path, how, said):
    """A value that is no time, an option that requires `checkpoint`, and a clock that would change the training each
    raise before any work."""
    with pytest.raises((TypeError, ValueError), match=said):
        fr.fit(add, torch.tensor(0.0), load(), epochs=1, **{"checkpoint": tmp_path / "run.pt"} | how)


def test_one_request_may_come_twice_under_a_launcher(monkeypatch):
    """Under a launcher, the signals of a scheduler and of the launcher, seconds apart, count as one request to end. A
    much later signal ends the run."""
    now = [100.0]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(_signals.time, "monotonic", lambda: now[0])
    with pytest.raises(SystemExit), fr.loop.listen() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] += 4.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked() == signal.SIGTERM
        now[0] += 2.0
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("monitor", ["loss", "valid_log_loss", "MSE", "mean_error"])
def test_the_least_of_a_loss_is_not_taken_for_the_worst(monitor):
    """A number named like a loss or an error is monitored only with an explicit `mode`."""
    how = {"epochs": 2, "evaluate": lambda x: {} if monitor == "loss" else {monitor: float(x)}, "monitor": monitor}
    with pytest.raises(ValueError, match=r"(?s)`mode`.*got.*need.*try.*mode='min'"):
        fr.fit(add, torch.tensor(0.0), load(), **how)
    done = fr.fit(add, torch.tensor(0.0), load(), **how, mode="min")
    assert float(done.best) == (6.0 if monitor == "loss" else 3.0)


def test_a_monitor_that_nothing_measures_is_told_before_work():
    """Without `evaluate`, `monitor` must be a number that every epoch has. Otherwise it raises before the first
    step."""
    steps = []
    step = lambda x, batch: steps.append(batch) or add(x, batch)
    with pytest.raises(
        KeyError, match=r"(?s)`monitor` is measured by nothing.*'auc'.*among \['epoch', 'loss'.*evaluate="
    ):
        fr.fit(step, torch.tensor(0.0), load(), epochs=2, monitor="auc")
    assert not steps
    done = fr.fit(step, torch.tensor(0.0), load(), epochs=2, monitor="steps_per_s")
    assert set(done.history[0]) - {"loss"} == {"epoch", "steps", "seconds", "steps_per_s"}


@pytest.mark.parametrize("other", [{"batch_size": 1}, {"key": 2}, {"drop_last": True}], ids=str)
def test_the_rest_of_an_epoch_is_of_the_same_order(tmp_path, other):
    """In the middle of an epoch, a run resumes only with a loader of the same order. At the end of an epoch, it resumes
    with any loader."""
    path, stop = tmp_path / "run.pt", iter([0, 0, 1])
    fr.fit(add, torch.tensor(0.0), load(), epochs=2, checkpoint=path, stop=lambda: next(stop, 1))
    with pytest.raises(ValueError, match=r"(?s)in the midst of an epoch.*got.*was.*need"):
        fr.fit(add, torch.tensor(0.0), load(**other), epochs=2, checkpoint=path, resume=True)
    done = fr.fit(add, torch.tensor(0.0), load(), epochs=1, checkpoint=path, resume=True)
    assert float(done.state) == 3.0 and done.history[0]["steps"] == 3
    fr.fit(add, torch.tensor(0.0), load(**other), epochs=2, checkpoint=path, resume=True)


def test_a_monitor_is_not_begun_in_the_midst_of_a_run(tmp_path):
    """A run without a monitor cannot resume with a monitor, because no best parameters of the run's earlier epochs were
    kept."""
    path, how = tmp_path / "run.pt", {"evaluate": lambda x: {"sum": -float(x)}, "checkpoint": tmp_path / "run.pt"}
    fr.fit(add, torch.tensor(0.0), load(), epochs=2, **how)
    with pytest.raises(ValueError, match="`monitor` is another than the checkpoint's"):
        fr.fit(add, torch.tensor(0.0), load(), epochs=4, monitor="sum", resume=True, **how)
    done = fr.fit(add, torch.tensor(0.0), load(), epochs=4, resume=True, **how)
    assert path.exists() and float(done.best) == float(done.state) == 12.0


def test_a_function_sees_what_counts_and_is_not_broadcast():
    """A metric that is a function gets the examples whose weight is not 0. Scores [B, 1] with labels [B] raise, because
    they would broadcast."""
    scores = torch.tensor([0.1, 0.9, 0.8, 0.2, 0.6])
    predict = lambda params, batch: scores[batch.ids.values]
    metrics = {"count": lambda s, y, w: len(s), "mse": lambda s, y, w: ((s - y) ** 2).mean()}
    found = fr.evaluate(predict, None, load(pad_last=True), metrics)
    assert found == {"count": 5.0, "mse": pytest.approx(float(((scores - LABELS) ** 2).mean()))}
    for wide in (lambda p, b: predict(p, b)[:, None], predict):
        label = (lambda b: b.label[:, None]) if wide is predict else (lambda b: b.label)
        with pytest.raises(ValueError, match=r"(?s)broadcast.*got.*need.*try"):
            fr.evaluate(wide, None, load(), metrics, label=label)


@pytest.fixture
def handlers():
    """Restore the signal handlers of the process after the test."""
    before = {s: signal.getsignal(s) for s in _signals.SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def killed(path, signum, **how):
    kill = lambda record: record.when == "step" and record.step == 2 and os.kill(os.getpid(), signum)
    return fr.fit(add, torch.tensor(0.0), load(), epochs=2, checkpoint=path, callbacks=[kill], **how)


def test_an_ignored_signal_stays_ignored(tmp_path, handlers):
    """A process that ignores a signal continues to train, as a shell's background job ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    done = killed(tmp_path / "run.pt", signal.SIGINT)
    assert done.stopped == 0 and len(done.history) == 2


def test_a_handler_of_ones_own_ends_the_run(tmp_path, handlers):
    """After the checkpoint is written, a signal goes to the previous handler of the process, and `fit` returns."""
    heard = []
    signal.signal(signal.SIGTERM, lambda signum, frame: heard.append(signum))
    done = killed(tmp_path / "run.pt", signal.SIGTERM)
    assert heard == [signal.SIGTERM] == [done.stopped] and done.history == []
    assert len(killed(tmp_path / "run.pt", 0, resume=True).history) == 2


def test_a_monitor_is_not_dropped_in_the_midst_of_a_run(tmp_path):
    """A run with a monitor resumes only with the same monitor. Without it, the best parameters would stay those of the
    earlier epochs."""
    path, state = tmp_path / "run.pt", torch.tensor(0.0)
    fr.fit(add, state, load(), epochs=1, monitor="loss", mode="min", checkpoint=path)
    for how in ({}, {"monitor": "loss", "mode": "max"}):
        with pytest.raises(ValueError, match=r"(?s)`monitor` is another.*try   monitor='loss', mode='min'"):
            fr.fit(add, state, load(), epochs=2, checkpoint=path, resume=True, **how)


def test_settings_are_plain_values(tmp_path):
    """A tensor among the settings raises before any work. NaN counts as equal to itself."""
    path, run = tmp_path / "run.pt", lambda **how: fr.fit(add, torch.tensor(0.0), load(), checkpoint=path, **how)
    with pytest.raises(TypeError, match=r"`settings\['a'\]` is not a plain value"):
        run(epochs=1, settings={"a": torch.ones(2)})
    own = {"a": float("nan"), "b": [1, None, {"c": True}]}
    run(epochs=1, settings=own)
    assert len(run(epochs=2, settings=own, resume=True).history) == 2


def test_parameters_are_no_state():
    """Parameters passed as the state raise an error before the first step."""
    step = fr.train_step(lambda params, batch: params.dense.square())
    with pytest.raises(TypeError, match=r"(?s)`state` is not a TrainState.*step.init\(params\)"):
        fr.fit(step, fr.Params({}, torch.tensor(2.0)), [None], epochs=1)


def test_other_threads_hear_no_signal():
    """Signals reach the main thread only: elsewhere the number is 0, and no handler changes."""
    before, found = signal.getsignal(signal.SIGINT), []

    def ask():
        with fr.loop.listen() as asked:
            found.append((asked(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [(0, before)]
