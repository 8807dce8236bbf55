"""A pipeline has the bits of the plain loop. However it ends, it leaves no thread and no open loader."""

import itertools
import sys
import threading

import pytest
import torch
from programs import training

import funcrec as fr
from funcrec.loop.pipelines import _ready_batches
from funcrec.loop.pipelines._pipeline import CALL
from funcrec.testing import assert_trees_close

MESH = fr.Mesh.emulated(x=2, y=2)


def add(total, batch):
    return total + batch, {"loss": total + batch}


def numbers(n):
    return map(torch.tensor, map(float, range(n)))


def is_alone():
    return not [t for t in threading.enumerate() if t.name == CALL]


def steps(kind):
    """Return (a step, its state)."""
    how = {"mesh": MESH, "plan": training.plan_of("grid", MESH.shape)} if kind == "emulated" else {}
    step = fr.train_step(training.loss_fn, **training.optimizers("adam"), **how)
    return step, step.init(training.params())


@pytest.mark.parametrize("kind", ["plain", "emulated"])
def test_a_pipeline_is_the_plain_loop(kind):
    """States and metrics have the bits of the plain loop, even on an emulated mesh."""
    batches = [training.batch(i, 4) for i in range(3)]
    step, state = steps(kind)
    want = []
    for batch in batches:
        state, metrics = step(state, batch)
        want.append(metrics)
    step, piped = steps(kind)
    got = []
    for state_, metrics in fr.pipeline(step, depth=2, mesh=MESH if kind == "emulated" else None).run(piped, batches):
        piped = state_
        got.append(metrics)
    assert_trees_close((piped, got), (state, want), rtol=0, atol=0)
    assert is_alone()


def test_depth_batches_are_ahead():
    """While a batch is computed, exactly `depth` more batches are taken from the loader."""
    for depth in (1, 3):
        made = []
        batches = (made.append(i) or torch.tensor(float(i)) for i in range(10))
        for i, _ in enumerate(fr.pipeline(add, depth=depth).run(torch.tensor(0.0), batches)):
            assert len(made) <= i + 1 + depth
            if i == 5:
                threading.Event().wait(0.05)
                assert len(made) == i + 1 + depth
    assert is_alone()


class LoaderError(Exception):
    pass


def test_an_error_of_the_loader_comes_at_its_place():
    """An error of the loader is raised after the batches before it. The states of these batches are whole."""

    def broken():
        yield from numbers(3)
        raise LoaderError

    seen = []
    with pytest.raises(LoaderError):
        for state, _ in fr.pipeline(add, depth=5).run(torch.tensor(0.0), broken()):
            seen.append(float(state))
    assert seen == [0.0, 1.0, 3.0] and is_alone()


def test_an_error_at_the_close_of_the_loader_is_raised():
    """A loader that fails where it closes its files raises after its last batch."""

    class Loader:
        left = iter([torch.tensor(1.0), torch.tensor(2.0)])

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.left)

        def close(self):
            raise LoaderError

    seen = []
    with pytest.raises(LoaderError):
        for state, _ in fr.pipeline(add).run(torch.tensor(0.0), Loader()):
            seen.append(float(state))
    assert seen == [1.0, 3.0] and is_alone()


def test_batches_move_to_a_device():
    """`device` moves each batch before its step."""
    seen = []
    list(fr.pipeline(lambda state, x: (state, seen.append(x.device)), device="meta").run(torch.zeros(()), numbers(2)))
    assert seen == [torch.device("meta")] * 2 and is_alone()


@pytest.mark.parametrize("make", [fr.pipeline, fr.stale_pipeline])
def test_a_pipeline_has_the_first_state_of_its_step(make):
    """pipe.init is the step's, so that a program may name the pipeline alone; its text names the step."""
    step, state = steps("plain")
    pipe = make(step, depth=3)
    assert_trees_close(pipe.init(training.params()), state, rtol=0, atol=0)
    assert repr(step) in repr(pipe) and "depth=3" in repr(pipe)


@pytest.mark.parametrize("ends", ["break", "close", "drop", "step raises", "interrupt", "ahead"])
def test_nothing_is_left_of_a_loop_that_ends_early(ends):
    """When a loop ends early (break, close, drop, an error or an interrupt of the step), no thread remains and the
    loader is closed. The given state does not change."""
    closed, first = [], torch.tensor(0.0)

    def loader():
        try:
            yield from numbers(100)
        finally:
            closed.append(True)

    def step(total, batch):
        if float(batch) == 2 and ends in ("step raises", "interrupt"):
            raise KeyboardInterrupt if ends == "interrupt" else LoaderError
        return add(total, batch)

    pipe = fr.pipeline(step)

    def loop():
        if ends == "ahead":
            for batch in pipe.ahead(loader()):
                return pipe(first, batch)
        run = pipe.run(first, loader())
        for i, _ in enumerate(run):
            if i == 2 and ends == "break":
                break
            if i == 2 and ends == "close":
                return run.close()
            if i == 2 and ends == "drop":
                return None

    if ends in ("step raises", "interrupt"):
        with pytest.raises((KeyboardInterrupt, LoaderError)):
            loop()
    else:
        loop()
    assert is_alone() and closed == [True] and float(first) == 0


# the events of a profiler at which CPython handles signals
MOMENTS = {"call", "c_return"}


def is_moment(frame, event):
    """Return whether the event is in the loop's code, or in threading's code that the loop calls. The time after the
    return of a thread's start is left out, because threading would list the thread for ever."""
    is_own = lambda frame: frame.f_code.co_filename == _ready_batches.__file__
    is_called = frame.f_code.co_filename == threading.__file__ and is_own(frame.f_back)
    return event in MOMENTS and (is_own(frame) or is_called) and (frame.f_code.co_name, event) != ("start", "c_return")


def interrupted(at):
    """Interrupt a run at its at-th such moment and run the pipeline again. Return whether the moment existed."""
    pipe, seen = fr.pipeline(add), [0]

    def on_event(frame, event, _):
        if is_moment(frame, event):
            seen[0] += 1
            if seen[0] == at:
                raise KeyboardInterrupt

    sys.setprofile(on_event)
    try:
        list(pipe.run(torch.tensor(0), numbers(3)))
    # an interrupt while a lock is awaited is a RuntimeError of threading
    except (KeyboardInterrupt, RuntimeError):
        pass
    finally:
        sys.setprofile(None)
    assert [m["loss"].item() for _, m in pipe.run(torch.tensor(0), numbers(3))] == [0, 1, 3]
    return seen[0] >= at


def test_interrupts_leave_no_lock_behind():
    """An interrupt at any moment at which a loop uses its thread ends the loop. No call waits for ever. The pipeline
    runs again."""
    found = []
    run = lambda: found.extend(itertools.takewhile(bool, map(interrupted, itertools.count(1))))
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and len(found) > 50 and is_alone(), len(found)


def test_batches_are_steps_of_a_loop_of_ones_own():
    """pipe(state, batch) takes any batches, from `ahead` or from elsewhere, in any order and number, like the step."""
    pipe = fr.pipeline(add)
    held = list(pipe.ahead(numbers(4)))
    state = torch.tensor(0.0)
    for batch in [held[3], torch.tensor(10.0), held[1]]:
        state, _ = pipe(state, batch)
    assert float(state) == 14 and is_alone()
    with pytest.raises(AttributeError, match=r"(?s)funcrec.pipeline: .*`.sum` of Ready.*try   batch.batch.sum"):
        held[0].sum()
    assert repr(held[0]) == "Ready(tensor(0.))"
    assert not hasattr(held[0], "label") and not hasattr(held[0], "__len__")
    one, two = pipe.ahead(numbers(2)), pipe.ahead(numbers(2))
    assert next(two) is not None
    with pytest.raises(RuntimeError, match="has begun with other batches"):
        next(one)
    assert [float(s) for s, _ in pipe.run(state, [])] == []


def test_fit_takes_a_pipeline():
    """fit(pipeline(step)) has the bits and the history of fit(step), over epochs and after a resumption in the middle
    of an epoch."""
    loader = [training.batch(i, 4) for i in range(3)]
    step, state = steps("plain")
    want = fr.fit(step, state, loader, epochs=2, validate=lambda batch: None)
    got = fr.fit(fr.pipeline(step), state, loader, epochs=2, validate=lambda batch: None)
    assert_trees_close(got.state, want.state, rtol=0, atol=0)
    assert [h["loss"] for h in got.history] == [h["loss"] for h in want.history] and is_alone()
    # the step's loss checks the first batch
    with pytest.raises(fr.CheckError, match="has ids outside table"):
        fr.fit(fr.pipeline(step), state, loader, epochs=1)
    bad = lambda position: iter([3])
    with pytest.raises(TypeError, match="gives no positions"):
        fr.fit(fr.pipeline(add), torch.tensor(0.0), bad, epochs=1)


def test_what_follows_a_ready_batch_is_refused():
    """For a ready batch, a state that requires grad, and a grad or vmap of the step, raise TypeError. For a plain batch
    the pipeline gives the results of the step."""
    pipe, x = fr.pipeline(add), torch.tensor(1.0)
    batch = next(pipe.ahead(numbers(1)))
    for call in (
        lambda: pipe(x.clone().requires_grad_(), batch),
        lambda: torch.func.grad(lambda s: pipe(s, batch)[0])(x),
        lambda: torch.func.vmap(lambda s: pipe(s, batch)[0])(x[None]),
    ):
        with pytest.raises(TypeError, match="is taken where something follows"):
            call()
    assert float(torch.func.grad(lambda s: pipe(s, x)[0])(x)) == 1
