"""`fit` under torchrun's agent, killed and restarted, ends with the bits of an uninterrupted run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import funcrec as fr
from funcrec.testing import assert_trees_close

pytestmark = pytest.mark.xdist_group("ranks")
PARTS = ("state", "best", "position", "loss_sum")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("restarts")
    code = f"from programs import restarts; restarts.main({str(folder)!r})"
    paths = os.pathsep.join(str(Path(file).parents[1]) for file in (__file__, fr.__file__))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def end_of(folder):
    tree = fr.load(fr.latest(folder / "run"))
    return [tree[name] for name in PARTS], [(h["epoch"], h["steps"]) for h in tree["history"]], tree["history"]


def begun(folder):
    """Return (first step, process) of each start of the first rank."""
    return [tuple(map(int, line.split())) for line in (folder / "began0").read_text().splitlines()]


def test_killed_three_times_it_ends_with_the_same_bits(folder):
    """Kill -9 hits one of two ranks three times at random moments, sent by that rank or by the other rank. The agent
    restarts both ranks from the last checkpoint. The final bits are those of an uninterrupted run."""
    tree, steps, history = end_of(folder / "killed")
    want, of_alone, alone = end_of(folder / "alone")
    assert_trees_close(tree, want, rtol=0, atol=0)
    assert steps == of_alone and [h["loss"] for h in history] == [h["loss"] for h in alone]
    assert len((folder / "killed" / "killed").read_text().split()) == 3
    starts = [step for step, _ in begun(folder / "killed")]
    assert len(starts) == 4 and starts == sorted(starts) and starts[-1] > 9, starts
    assert not any(Path(f"/proc/{pid}").exists() for name in ("alone", "killed") for _, pid in begun(folder / name))


def test_other_ranks_go_on_with_it(folder):
    """Three ranks resume from the checkpoint of two ranks in the middle of an epoch, and save in the background. The
    three ranks end within 1e-6 of the two ranks. Their last checkpoint is whole."""
    tree, steps, _ = end_of(folder / "three")
    want, of_alone, _ = end_of(folder / "alone")
    assert [step for step, _ in begun(folder / "three")] == [13] and steps == of_alone
    assert_trees_close(tree, want, rtol=1e-6, atol=1e-6)
