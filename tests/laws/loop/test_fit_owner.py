"""A folder of checkpoints has one run at a time: a second run raises, or the first one does. No run removes what
another one wrote."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from programs.failing_store import emptied, with_a_call

import funcrec as fr
from funcrec.files import _lock, as_path

ROOT = "memory://runs/kept"
GOES_ON, TAKEN = "is the folder of a run that goes on", "was taken by a newer run"

RUN = """
import sys, torch, funcrec as fr

def callback(record):
    if record.when == "step" and record.step == 3:
        print("third step", flush=True)
        sys.stdin.read()

add = lambda total, x: (total + x, {"loss": total.mean()})
how = {"checkpoint": sys.argv[1], "keep": 2, "save_every_steps": 1, "callbacks": [callback]}
fr.fit(add, torch.zeros(2), [1.0, 2.0], epochs=4, **how)
"""


def add(total, x):
    return total + x, {"loss": total.mean()}


def fit(path, epochs=4, begin=0.0, **how):
    """Return the end of a run of 2 · epochs steps: begin + 3 · epochs. A rival begins elsewhere, and so ends there."""
    how = {"keep": 2, "save_every_steps": 1, **how}
    return fr.fit(add, torch.full((2,), begin), [1.0, 2.0], epochs=epochs, checkpoint=path, **how).state[0].item()


def content(folder):
    """Return {name: bytes} of the checkpoints of a folder."""
    return {x.name: x.read_bytes() for x in folder.iterdir() if x.name.startswith("step-")}


def ends(folder):
    """Return {step: value of the state} of the checkpoints of a folder, all of which are whole."""
    return {int(x.name[5:]): fr.load(x)["state"][0].item() for x in folder.iterdir() if x.name.startswith("step-")}


@contextlib.contextmanager
def another(folder):
    """Run `fit` up to its third step in a process of its own, which is killed at the end."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", RUN, str(folder)], **pipes) as process:
        try:
            assert process.stdout.readline() == "third step\n"
            yield process
        finally:
            process.kill()


def test_a_second_process_raises_before_any_work(tmp_path):
    """While a process keeps checkpoints in a folder, a second process raises before its first step, with the name of
    the first, and changes nothing there. When the first is killed, the second goes on to its bits."""
    folder = tmp_path / "run"
    with another(folder) as process:
        there, steps = content(folder), []
        for how in ({"resume": True}, {"resume": "auto"}, {"overwrite": True}, {}):
            with pytest.raises(ValueError, match=GOES_ON) as error:
                fit(folder, callbacks=[steps.append], **how)
            for part in (f"got   process {process.pid} of ", "need  a folder for each run", "try   another folder"):
                assert f"\n  {part}" in str(error.value), error.value
        assert not steps and content(folder) == there and len(there) == 2
    seen = []
    assert fit(folder, resume=True, callbacks=[lambda r: seen.append(r.step)]) == 12.0
    assert seen[0] == 2 and sorted(ends(folder)) == [7, 8]


def test_a_run_within_a_run_raises(tmp_path):
    """A second run of one process raises while the first goes on, in a folder that is there and in a new one. The
    folder is free when a run has ended, and when it has raised."""
    errors = []

    def callback(record):
        if record.when == "step" and record.step == 3:
            with pytest.raises(ValueError, match=GOES_ON) as error:
                fit(tmp_path / "run", begin=100.0, overwrite=True)
            errors.append(error)

    def broken(record):
        raise KeyError("of my own")

    assert fit(tmp_path / "run", callbacks=[callback]) == 12.0 and len(errors) == 1
    with pytest.raises(KeyError):
        fit(tmp_path / "run", overwrite=True, callbacks=[broken])
    assert fit(tmp_path / "run", resume=True) == 12.0
    assert fit(tmp_path / "run", epochs=5, resume=True) == 15.0


def test_a_forked_process_does_not_hold_the_folder(tmp_path):
    """A process that a run forks, such as a data worker, does not hold the folder after the run."""
    children = []

    def callback(record):
        if record.when == "step" and not children:
            children.append(os.fork())
            if not children[0]:
                time.sleep(60)
                os._exit(0)

    try:
        fit(tmp_path / "run", callbacks=[callback])
        assert os.waitpid(children[0], os.WNOHANG) == (0, 0)
        assert fit(tmp_path / "run", epochs=5, resume=True) == 15.0
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def without_locks(monkeypatch):
    def none(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(_lock.fcntl, "flock", none)


@pytest.mark.parametrize("place", ["disk", "store"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newer_run_has_a_folder_without_locks(place, asynchronous, tmp_path, monkeypatch):
    """Without locks, a newer run takes the folder. The older run raises before its next checkpoint, and the folder has
    the checkpoints of the newer one, which a later run resumes."""
    emptied()
    if place == "disk":
        without_locks(monkeypatch)
    root = str(tmp_path / "run") if place == "disk" else ROOT
    folder, steps = as_path("test", root, remote=True), []

    def callback(record):
        steps.append(record.step)
        if record.when == "step" and record.step == 3:
            assert fit(root, epochs=5, begin=100.0, overwrite=True) == 115.0

    with pytest.raises(ValueError, match=TAKEN) as error:
        fit(root, callbacks=[callback], save_asynchronously=asynchronous)
    for part in (f"got   process {os.getpid()} of ", "need  one run at a time", "try   another folder"):
        assert f"\n  {part}" in str(error.value), error.value
    assert steps[-1] == 3 and ends(folder) == {9: 112.0 + 1.0, 10: 115.0}
    assert fit(root, epochs=6, begin=100.0, resume=True) == 118.0
    assert ends(folder) == {11: 116.0, 12: 118.0}


def test_a_folder_that_no_one_can_look_into_is_named(tmp_path):
    """A name that the disk refuses, as a folder without permission is, raises in four parts before the first step."""
    steps = []
    with pytest.raises(OSError, match="cannot be held") as error:
        fit(tmp_path / ("x" * 300), callbacks=[steps.append])
    assert "\n  try   another folder" in str(error.value) and not steps


def test_a_call_that_raises_takes_no_folder():
    """A second run whose arguments do not fit takes no folder in a store: the first run goes on."""
    emptied()

    def callback(record):
        if record.when == "step" and record.step == 3:
            for how, words in (({}, "holds a run"), ({"resume": True, "settings": {"a": 1}}, "belongs to another run")):
                with pytest.raises(ValueError, match=words):
                    fit(ROOT, **how)
            with pytest.raises(ZeroDivisionError):
                fit(ROOT, overwrite=True, validate=lambda batch: 1 / 0)

    assert fit(ROOT, callbacks=[callback]) == 12.0


@pytest.mark.parametrize("rival", ["begins anew", "goes on"])
def test_a_store_has_the_newest_runs_checkpoints_whichever_request_it_precedes(rival, monkeypatch):
    """A run is interrupted, before any one of its requests, by all of a newer run. Then all checkpoints that the newer
    run kept are whole, and a third run resumes the newest one."""
    how = {"overwrite": True, "begin": 100.0} if rival == "begins anew" else {"resume": "auto"}
    base, at, outcomes = (100.0 if rival == "begins anew" else 0.0), 0, set()
    while True:
        at += 1
        emptied()
        ended = []
        with monkeypatch.context() as patch:
            asked = with_a_call(patch, at, lambda said=ended: said.append(fit(ROOT, epochs=3, **how)))
            try:
                fit(ROOT, epochs=1)
                outcomes.add("ends")
            except (ValueError, FileNotFoundError) as error:
                outcomes.add(next((w for w in (TAKEN, "meanwhile", "holds a run") if w in str(error)), f"{error}"))
        if not ended:
            break
        kept = ends(as_path("test", ROOT, remote=True))
        assert {5: base + 7.0, 6: base + 9.0}.items() <= kept.items() and len(kept) <= 3, (at, kept)
        assert fit(ROOT, epochs=4, begin=base, resume=True) == base + 12.0
        assert ends(as_path("test", ROOT, remote=True)) == {7: base + 10.0, 8: base + 12.0}
    assert at == asked[0] + 1 and at > 20
    assert outcomes == {TAKEN, "meanwhile", "holds a run", "ends"}, outcomes
    emptied()


@pytest.mark.parametrize("keep", [1, 2])
def test_what_an_older_run_writes_last_does_not_stay(keep, tmp_path, monkeypatch):
    """An older run, which is writing a checkpoint when a newer one takes the folder, removes nothing. Its checkpoint of
    a higher step is removed by the newer run, so that nobody resumes it."""
    without_locks(monkeypatch)
    root, late = tmp_path / "run", []
    fit(tmp_path / "other", keep=1)
    (old,) = [x for x in (tmp_path / "other").iterdir() if x.name.startswith("step-")]

    def callback(record):
        if record.when == "step" and record.step == 1:
            shutil.copy(old, root / "step-0000000100")
            late.append(fr.latest(root).name)

    assert fit(root, begin=100.0, keep=keep, epochs=1, callbacks=[callback]) == 103.0
    assert late == ["step-0000000100"] and fr.latest(root).name == "step-0000000002"
    assert ends(root) == ({2: 103.0} if keep == 1 else {1: 101.0, 2: 103.0})


def test_a_removed_folder_is_made_again(tmp_path):
    """A run whose folder is removed while it trains makes it again, holds it, and goes on."""

    def callback(record):
        if record.when == "step" and record.step == 3:
            shutil.rmtree(tmp_path / "run")
        if record.when == "step" and record.step == 5:
            with pytest.raises(ValueError, match=GOES_ON):
                fit(tmp_path / "run", overwrite=True)

    assert fit(tmp_path / "run", callbacks=[callback]) == 12.0
    assert ends(tmp_path / "run") == {7: 10.0, 8: 12.0}
