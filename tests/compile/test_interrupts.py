"""Donated calls leave their arguments whole or gone if they are interrupted, fail, or run in several threads."""

import ctypes
import threading
import time

import pytest
import torch
from funcrec.kernels import ops
from funcrec.kernels.cpp import _native, _planned
from programs import interrupts
from programs.interrupts import AtAudit, AtEvent, AtOperation, Interrupt, Trial, first_state

import funcrec as fr
from funcrec.core._tree import tree_leaves
from funcrec.mesh import _axes
from funcrec.testing import assert_trees_close


def put(s):
    """Return the state with row 1 of w increased by one, in place. t is new."""
    return {"w": s["w"].index_put((torch.tensor([1]),), s["w"][1:2] + 1), "t": s["t"] + 1}


def state() -> dict:
    return {"w": torch.arange(4.0), "t": torch.zeros(2)}


pytestmark = pytest.mark.xdist_group("interrupts")  # the step is compiled once


@pytest.fixture(scope="module")
def trial():
    return Trial()


def test_interrupted_at_random_moments(trial):
    """After a signal at any moment of a donated step, the state is whole or gone. Every switch has its earlier value.
    The next call is right."""
    ends = interrupts.at_random(trial, 150)
    assert ends["whole"] + ends["gone"] > 30 and sum(ends.values()) == 150


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("moment", [AtEvent, AtOperation])
def test_interrupted_at_every_moment(trial, moment, follows):
    """After an exception where CPython may see a signal, the state is whole or gone (the test tries every second
    point)."""
    ends = interrupts.at_every(trial, moment, follows, step=2)
    assert ends["whole"] > 100 and ends["gone"] > 10


@pytest.mark.parametrize("times", [1, 3])
def test_interrupted_in_an_audit_hook(trial, times):
    """After an exception in an audit hook, the state is whole or gone. CPython calls the hook inside C code for each
    changed class."""
    count = len(tree_leaves(first_state()))
    assert {trial.run(AtAudit(n, times)) for n in range(count)} == {"gone"}
    assert trial.run(AtAudit(4 * count)) == "finished"


def test_interrupted_from_another_thread(trial):
    """After an exception that another thread sets, the state is whole or gone."""

    class Asynchronous:
        def __init__(self, after_s):
            me = ctypes.c_ulong(threading.get_ident())
            raise_here = lambda: ctypes.pythonapi.PyThreadState_SetAsyncExc(me, ctypes.py_object(Interrupt))
            self.timer = threading.Timer(after_s, raise_here)

        def __enter__(self):
            self.timer.start()

        def __exit__(self, *_):
            self.timer.join()
            for _ in range(100):
                # the exception may arrive here
                time.sleep(0)

    ends = [trial.run(Asynchronous(1.5 * trial.lasts_s * i / 40)) for i in range(40)]
    assert len(ends) == 40


def test_a_kernel_that_fails(trial, monkeypatch):
    """When a kernel runs out of memory, the state is whole before the writes and gone during the writes. The error says
    which."""
    run, planned, ends = _native._entry, _planned._runner, []
    for k in range(20):
        left = [k]

        def entry(name, left=left):
            left[0] -= 1
            return run(name) if left[0] >= 0 else lambda packed: 1  # "no memory"

        def runner(path, name, left=left):
            left[0] -= 1
            return planned(path, name) if left[0] >= 0 else (lambda *_: 1, 0)

        state, _ = trial.fast(fr.copy(trial.first), trial.batches[0])
        with monkeypatch.context() as patched:
            patched.setattr(_native, "_entry", entry)
            patched.setattr(_planned, "_runner", runner)
            try:
                trial.fast(state, trial.batches[1])
            except MemoryError as error:
                (gone,) = {interrupts.is_gone(x) for x in torch.utils._pytree.tree_leaves(state)}
                assert ("is gone" in "".join(getattr(error, "__notes__", ""))) == gone
                ends.append(gone)
        if left[0] >= 0:
            break
    assert set(ends) == {True, False} and left[0] >= 0


def test_a_write_that_fails(interpreted):
    """When a row is outside its leaf, the state is gone, not torn. The error says so."""
    at = torch.tensor([1, 9])
    fn = lambda s, at: {"w": s["w"].index_put((at,), s["t"]), "t": s["t"] + 1}
    step, given = fr.jit(fn, donate=("s",)), state()
    with pytest.raises((IndexError, RuntimeError)) as caught:
        step(given, at)
    assert "which is gone" in "".join(caught.value.__notes__)
    for x in given.values():
        with pytest.raises(fr.DonatedError):
            x + 1


def in_using():
    with ops.using("reference"):
        ops.gather_rows(torch.eye(2), torch.tensor([1]))


def in_bind():
    with _axes.bind([]), _axes.bind([_axes.Axis("data", 2, torch.zeros(2))]):
        _axes.bound_names()


SWITCHED = {"checked": fr.checked(lambda: torch.ones(2).sum()), "using": in_using, "bind": in_bind}


@pytest.mark.parametrize("moment", [AtEvent, AtOperation])
@pytest.mark.parametrize("call", SWITCHED.values(), ids=SWITCHED)
def test_switches_of_the_package(call, moment):
    """Wherever a call that sets a switch is interrupted, the switch has its earlier value after the exception is
    handled."""
    before, count = interrupts.switches(), 0
    while True:
        now = moment(count)
        try:
            with now:
                call()
        except Interrupt:
            pass
        assert interrupts.switches() == before
        if now.left >= 0:
            break
        count += 1
    assert count > 3


# -- threads -----------------------------------------------------------------------------------------------------


# the operation of one thread holds the state that another thread takes
@pytest.mark.filterwarnings("ignore:funcrec.jit")
def test_two_threads_with_one_state(interpreted):
    """When several threads pass one state to a call, one thread takes the state. All other threads get DonatedError.
    The state is written once."""
    step, rounds = fr.jit(put, donate=("s",)), 50
    step(state())
    for _ in range(rounds):
        given, ends, start = state(), [], threading.Barrier(3)

        def call(given=given, ends=ends, start=start):
            start.wait()
            try:
                ends.append(step(given))
            except fr.DonatedError as error:
                ends.append(error)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        (out,) = [x for x in ends if isinstance(x, dict)]
        assert len(ends) == 3
        assert_trees_close(out, put(state()))


def test_threads_with_a_state_each(interpreted):
    """Several threads use one jitted function, each thread with its own state."""
    step, results = fr.jit(put, donate=("s",)), {}
    step(state())

    def train(k):
        given = {"w": torch.arange(4.0) + k, "t": torch.zeros(2)}
        for _ in range(50):
            given = step(given)
        results[k] = given

    threads = [threading.Thread(target=train, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for k in range(3):
        need = torch.arange(4.0) + k
        need[1] += 50
        assert_trees_close(results[k]["w"], need)
