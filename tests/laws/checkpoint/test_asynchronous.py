"""Saves that run in the background save the given values, report errors, and are never cut short."""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import funcrec as fr
from funcrec.checkpoint import _asynchronous, _job
from funcrec.testing import assert_trees_close


@pytest.fixture
def gate(monkeypatch):
    """Stop each save just before the save renames its file, until the event is set."""
    opened = threading.Event()
    write = _job.write_whole

    def waiting(call, path, fill):
        def held(file):
            fill(file)
            assert opened.wait(20)

        write(call, path, held)

    monkeypatch.setattr(_job, "write_whole", waiting)
    yield opened
    opened.set()


def tree(value):
    return {"w": torch.full((100,), value), "more": [torch.full((3, 2), value), value]}


@pytest.mark.parametrize("copy_bytes", [None, 0, 24, 399, 400])
def test_what_was_given_is_saved(copy_bytes, tmp_path):
    """The file holds the values at the time of the call, not later values, whatever the size of the copy."""
    given = tree(1.0)
    saving = fr.save(tmp_path / "a.pt", given, asynchronous=True, copy_bytes=copy_bytes)
    given["w"].fill_(2)
    given["more"][0].fill_(2)
    assert isinstance(saving, fr.Saving) and saving.wait() == saving.wait() == tmp_path / "a.pt"
    assert_trees_close(fr.load(tmp_path / "a.pt"), tree(1.0))


def test_the_copy_is_bounded():
    """The first tensors are written directly from their memory. There are as many of them as are needed so that all
    other tensors fit into the copy."""
    sizes = [5, 3, 0, 8, 2]
    assert [_asynchronous.num_live(sizes, n) for n in (None, 18, 17, 13, 10, 9, 2, 1, 0)] == [0, 0, 1, 1, 2, 4, 4, 5, 5]


def test_the_call_returns_before_the_file_is_there(gate, tmp_path):
    """An asynchronous save returns before it is done. A load in the same process waits for the save."""
    saving = fr.save(tmp_path / "a.pt", tree(1.0), asynchronous=True)
    assert not saving.is_done and "going on" in repr(saving) and not (tmp_path / "a.pt").exists()
    threading.Timer(0.05, gate.set).start()
    assert_trees_close(fr.load(tmp_path / "a.pt"), tree(1.0))
    assert saving.is_done and "done" in repr(saving)


def test_an_interrupted_call_saves_nothing(tmp_path, monkeypatch):
    """Tensors may be written directly from their memory. If such a call is interrupted, no checkpoint has later values.
    The next call has no error."""
    interrupted, go, write = type("Event", (threading.Event,), {}), threading.Event(), _job.write_file

    def interrupt(self, timeout=None):
        raise KeyboardInterrupt

    def late(*args):
        assert go.wait(20)
        return write(*args)

    interrupted.wait, given = interrupt, tree(1.0)
    monkeypatch.setattr(_asynchronous, "threading", SimpleNamespace(Event=interrupted, Thread=threading.Thread))
    monkeypatch.setattr(_job, "write_file", late)
    with pytest.raises(KeyboardInterrupt):
        fr.save(tmp_path / "a.pt", given, asynchronous=True, copy_bytes=0)
    given["w"].fill_(2)
    go.set()
    fr.save(tmp_path / "b.pt", given)
    assert os.listdir(tmp_path) == ["b.pt"]


def test_saves_of_one_path_are_in_order(tmp_path):
    """After many saves to one path, the last saved checkpoint stays."""
    for n in range(10):
        saving = fr.save(tmp_path / "a.pt", {"n": n}, asynchronous=n % 3 != 0)
    assert fr.load(tmp_path / "a.pt") == {"n": 9}
    assert not isinstance(saving, fr.Saving)
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("told_at", ["wait", "save"])
def test_an_error_is_told_once(told_at, tmp_path, monkeypatch):
    """An error in the background is raised once: by wait, or by the next save. That save then does not start."""

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_job, "write_file", full)
        saving = fr.save(tmp_path / "a.pt", tree(1.0), asynchronous=True)
        saving._thread.join()
    with pytest.raises(OSError, match="is full"):
        saving.wait() if told_at == "wait" else fr.save(tmp_path / "a.pt", tree(2.0))
    assert list(tmp_path.iterdir()) == []
    fr.save(tmp_path / "a.pt", tree(3.0))
    assert_trees_close(fr.load(tmp_path / "a.pt"), tree(3.0))


def test_wrong_trees_are_told_at_once(tmp_path):
    """A tree that cannot be saved raises in the call, as without a thread. So does a bound without a copy."""
    with pytest.raises(TypeError, match=r"`tree\['x'\]` cannot be saved"):
        fr.save(tmp_path / "a.pt", {"x": object()}, asynchronous=True)
    with pytest.raises(ValueError, match="`copy_bytes` requires a copy"):
        fr.save(tmp_path / "a.pt", 1, copy_bytes=3)


def test_the_end_of_a_program_waits(tmp_path):
    """A program that ends first finishes its save, even if it ends with an error. What the save uses runs until then,
    such as the threads of a store's client."""
    slow = "time.sleep(0.3), ThreadPoolExecutor(1).submit(real, *paths).result()"
    lines = [
        "import os, sys, time, torch, funcrec as fr",
        "from concurrent.futures import ThreadPoolExecutor",
        f"real, os.replace = os.replace, lambda *paths: ({slow})",
        "fr.save(sys.argv[1], {'x': torch.ones(10**6)}, asynchronous=True)",
        "raise SystemExit(3)",
    ]
    code = "\n".join(lines)
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.pt")]).returncode == 3
    assert bool((fr.load(tmp_path / "a.pt")["x"] == 1).all())


def test_an_error_that_nobody_waited_for_is_told_at_the_end(tmp_path, capsys):
    """An error that was raised nowhere is printed when the program ends."""
    os.mkdir(tmp_path / "a")
    saving = fr.save(tmp_path / "a", 1, asynchronous=True)
    saving._thread.join()
    _asynchronous._report_last()
    assert "a was not saved: funcrec.save: " in capsys.readouterr().err
    with pytest.raises(IsADirectoryError):
        saving.wait()
