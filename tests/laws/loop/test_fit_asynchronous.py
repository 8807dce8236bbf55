"""`fit` that trains while its checkpoint is written gives the same checkpoints and loses no error."""

import itertools

import pytest
import torch

import funcrec as fr
from funcrec.checkpoint import _job
from funcrec.core import tree_leaves
from funcrec.testing import assert_trees_close

ROWS = torch.arange(40.0).reshape(10, 4)


def uses_up(state, batch):
    """Return the result of a step that overwrites its argument state, as a donated step may."""
    new = {"w": state["w"] * 0.5 + batch, "steps": state["steps"] + 1}
    for x in tree_leaves(state):
        x.fill_(-1)
    return new, {"loss": new["w"].mean()}


def fit(path, **how):
    state = {"w": ROWS.clone(), "steps": torch.tensor(0)}
    how = {"epochs": 3, "checkpoint": path, "save_every_steps": 1, **how}
    return fr.fit(uses_up, state, [1.0, 2.0, 3.0], monitor="loss", mode="min", **how)


def content(path):
    tree = fr.load(path)
    return [tree[n] for n in ("state", "best", "position", "loss_sum")]


@pytest.mark.parametrize("keep", [None, 3])
def test_checkpoints_are_those_of_a_loop_that_waits(keep, tmp_path):
    """A run that saves in the background ends with the state and checkpoints of a run that waits for each save. After
    an interrupt at any step, the resumed run ends the same."""
    want = fit(tmp_path / "waits", keep=keep)
    got = fit(tmp_path / "beside", keep=keep, save_asynchronously=True)
    assert_trees_close((got.state, got.best), (want.state, want.best), rtol=0, atol=0)
    names = lambda at: sorted(p.name for p in at.glob("step-*")) if keep else [""]
    assert names(tmp_path / "beside") == names(tmp_path / "waits")
    for name in names(tmp_path / "waits"):
        assert_trees_close(content(tmp_path / "beside" / name), content(tmp_path / "waits" / name), rtol=0, atol=0)

    for last in (1, 2, 3, 7):

        def broken(record, last=last):
            if record.when == "step" and record.step == last:
                raise KeyError("of my own")

        path = tmp_path / f"broken{last}"
        with pytest.raises(KeyError):
            fit(path, keep=keep, save_asynchronously=True, callbacks=[broken])
        again = fit(path, keep=keep, save_asynchronously=True, resume=True)
        assert_trees_close((again.state, again.best), (want.state, want.best), rtol=0, atol=0)


@pytest.mark.parametrize("failing", [1, 4, 10])
def test_a_checkpoint_that_failed_ends_the_run(failing, tmp_path, monkeypatch):
    """A failed write is raised at the next checkpoint, or at the end if no checkpoint follows. The previous checkpoint
    is whole."""
    counted, write, seen = itertools.count(1), _job.write_whole, []

    def full(*args):
        if next(counted) == failing:
            raise OSError(28, "No space left on device")
        return write(*args)

    monkeypatch.setattr(_job, "write_whole", full)
    look = lambda record: seen.append(record.step) if record.when == "step" else None
    with pytest.raises(OSError, match="No space left"):
        fit(tmp_path / "run", keep=20, save_asynchronously=True, callbacks=[look])
    monkeypatch.undo()
    whole = [int(p.name[5:]) for p in sorted((tmp_path / "run").glob("step-*"))]
    assert len(seen) <= failing and (not whole or fr.latest(tmp_path / "run").name.endswith(str(whole[-1])))
    if whole:
        end = fit(tmp_path / "run", keep=20, resume=True)
        assert_trees_close(end.state, fit(tmp_path / "other").state, rtol=0, atol=0)


def test_it_is_of_a_checkpoint():
    """`save_asynchronously` requires `checkpoint` and must be a bool."""
    with pytest.raises(ValueError, match="`save_asynchronously` needs `checkpoint`"):
        fit(None, save_every_steps=None, save_asynchronously=True)
    with pytest.raises(TypeError, match="`save_asynchronously` is not a truth value"):
        fit(None, save_every_steps=None, save_asynchronously="yes")
