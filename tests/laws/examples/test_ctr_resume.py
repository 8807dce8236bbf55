"""How the main job starts and ends: folders that hold a run, signals, full disks, killed ranks, first batches."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from programs import small_movielens

import funcrec as fr
from funcrec.core._tree import replace
from funcrec.examples import _folder, ctr
from funcrec.loop import _fit, _run_state, _watch
from funcrec.testing import assert_trees_close

ROOT = Path(__file__).parents[3]
OPTIONS = ["--model", "lr", "--batch-size", "64", "--lr", "0.05", "--epochs", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_movielens.write(tmp_path_factory.mktemp("ml-1m"))


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """Return the folder of a finished run of one epoch."""
    out = tmp_path_factory.mktemp("finished")
    assert ctr.main([*OPTIONS, "--data", str(folder), "--out", str(out)]) == 0
    return out


@pytest.fixture
def no_data(monkeypatch):
    """Replace the data by data that fail the test when they are read."""

    def read(*args):
        raise AssertionError("data were read")

    monkeypatch.setattr(fr.data, "movielens_1m", read)


def files(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


# -- starting ----------------------------------------------------------------------------------------------------

HELD = {
    "again": ([],
        ["holds a run (checkpoint.pt, result.json, curve.png)", "--resume goes on", "--overwrite begins again"]),
    "both": (["--resume", "--overwrite"], ["not allowed with argument --resume"]),
    "both, auto": (["--overwrite", "--resume=auto"], ["not allowed with argument --overwrite"]),
    "another word": (["--resume=never"], ["invalid choice: 'never'"]),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_a_folder_that_holds_a_run_is_kept(name, finished, no_data, capsys):
    """Without --resume or --overwrite, a run does not start in a folder that holds a run. The error comes before data
    are read. Every file stays."""
    words, fragments = HELD[name]
    before = files(finished)
    with pytest.raises(SystemExit) as end:
        ctr.main([*OPTIONS, "--out", str(finished), *words])
    told = capsys.readouterr().err
    assert end.value.code == 2 and all(f in told for f in fragments), told
    assert files(finished) == before


@pytest.mark.parametrize("left", ["result.json", "curve.png"])
@pytest.mark.parametrize("words", [[], ["--resume=auto"]], ids=["plain", "auto"])
def test_results_without_a_checkpoint_are_kept(left, words, tmp_path, no_data, capsys):
    """The results of a run are not overwritten without --overwrite, even if the run's checkpoint is missing."""
    (tmp_path / left).write_text("kept")
    with pytest.raises(SystemExit):
        ctr.main([*OPTIONS, "--out", str(tmp_path), *words])
    assert f"holds a run ({left})" in capsys.readouterr().err
    assert files(tmp_path) == {left: b"kept"}


def test_overwrite_begins_again(folder, finished, tmp_path):
    """--overwrite trains from the start, to the bits of a run in an empty folder. No result of the old run remains."""
    fr.save(tmp_path / "checkpoint.pt", {"other": 1})
    (tmp_path / "result.json").write_text("old")
    assert ctr.main([*OPTIONS, "--data", str(folder), "--out", str(tmp_path), "--overwrite"]) == 0
    a, b = (fr.load(path / "checkpoint.pt") for path in (tmp_path, finished))
    assert_trees_close({k: a[k] for k in ("state", "best")}, {k: b[k] for k in ("state", "best")})
    assert (tmp_path / "result.json").read_text().startswith("{")


def test_results_of_the_old_run_are_gone_before_the_new_one_has_any(folder, tmp_path, monkeypatch):
    """After --overwrite, the folder of an interrupted run has the run's checkpoint and no results of another run."""
    for name in ("result.json", "curve.png"):
        (tmp_path / name).write_text("old")
    killed = lambda work, run, items, *ends: (os.kill(os.getpid(), signal.SIGTERM) or run, 0)
    monkeypatch.setattr(_fit, "train_epoch", killed)
    assert ctr.main([*OPTIONS, "--data", str(folder), "--out", str(tmp_path), "--overwrite"]) == 143
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_overwrite_is_not_for_restarts(tmp_path, monkeypatch, capsys):
    """--overwrite raises under torchrun --max-restarts, because each restart would lose the training so far."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(SystemExit):
        ctr.main([*OPTIONS, "--out", str(tmp_path), "--overwrite"])
    assert "--resume=auto" in capsys.readouterr().err


def test_resume_auto_begins_or_goes_on(folder, finished, tmp_path, capsys):
    """--resume=auto starts in an empty folder and resumes where there is a checkpoint. Both runs end with the same
    bits."""
    words = [*OPTIONS, "--data", str(folder), "--out", str(tmp_path), "--resume=auto"]
    assert ctr.main(words) == 0
    assert "resumed" not in capsys.readouterr().out
    assert ctr.main([*words, "--epochs", "2"]) == 0
    assert "resumed at epoch 1, batch 0" in capsys.readouterr().out
    assert [h["epoch"] for h in fr.load(tmp_path / "checkpoint.pt")["history"]] == [0, 1]


def test_a_folder_that_cannot_be_written_is_told_first(tmp_path, no_data, capsys, monkeypatch):
    """An --out that is no folder, or that is on a disk that refuses writes, ends the program at once with the
    reason."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(SystemExit):
        ctr.main([*OPTIONS, "--out", str(tmp_path / "file" / "out")])
    assert "cannot be written: Not a directory" in capsys.readouterr().err

    def refuse(**kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(_folder.tempfile, "TemporaryFile", refuse)
    with pytest.raises(SystemExit):
        ctr.main([*OPTIONS, "--out", str(tmp_path / "out")])
    assert "cannot be written: Read-only file system" in capsys.readouterr().err


DAMAGED = {
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "not a whole checkpoint"),
    "of another program": (lambda path: fr.save(path, {"x": 1}), "is not a checkpoint of fit"),
    "of no dict": (lambda path: fr.save(path, 3), "is not a checkpoint of fit"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_is_told(name, folder, finished, tmp_path):
    """--resume from a file that is no whole checkpoint of this program raises an error that says so. The file does not
    change."""
    damage, fragment = DAMAGED[name]
    path = tmp_path / "checkpoint.pt"
    path.write_bytes((finished / "checkpoint.pt").read_bytes())
    damage(path)
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=fragment):
        ctr.main([*OPTIONS, "--data", str(folder), "--out", str(tmp_path), "--resume=auto"])
    assert path.read_bytes() == before


def test_data_that_cannot_be_read_are_told_without_a_traceback(tmp_path):
    """A --data folder without the files ends the program with the error of the reader, without a traceback."""
    (tmp_path / "data").mkdir()
    with pytest.raises(SystemExit, match=r"`data_dir` lacks ml-1m.inter"):
        ctr.main([*OPTIONS, "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")])


FIRST = {
    "ids outside": (lambda d: replace(d,
            user_columns={**d.user_columns, "user_id": d.user_columns["user_id"] + 20_000}),
        "feature 'user_id_linear' has ids outside"),
    "ids below": (lambda d: replace(d, genre=d.genre - 50), "feature 'genre_linear' has ids outside"),
    "labels of five": (lambda d: replace(d, label=d.label * 5), "= 5.0"),
    "labels of nan": (lambda d: replace(d, label=d.label * torch.nan), "batch.label[0] = nan, 64 in all"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_the_first_batch_is_looked_at(name, folder, tmp_path, monkeypatch):
    """Ids outside their table, and labels that are no clicks, end the program before a step. No checkpoint is
    written."""
    change, fragment = FIRST[name]
    make = fr.data.ctr_dataset
    monkeypatch.setattr(fr.data, "ctr_dataset", lambda r, **kw: (s := make(r, **kw))._replace(data=change(s.data)))
    with pytest.raises(SystemExit, match=re.escape(fragment)):
        ctr.main([*OPTIONS, "--data", str(folder), "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_data_of_more_ids_than_the_model_has_rows_are_refused(tmp_path):
    """Data with more ids than a table has rows end the program before a step. The sizes decide, however rare the ids
    are."""
    data = small_movielens.write(tmp_path)
    with open(data / "ml-1m.item", "a") as items, open(data / "ml-1m.inter", "a") as ratings:
        items.write(f"61\tLast\t1990\t{' '.join(f'genre{i}' for i in range(20))}\n")
        ratings.write("80\t61\t5\t978400000\n")
    with pytest.raises(SystemExit, match=re.escape("table 'genre' has 19 rows, and the data 24 ids")):
        ctr.main([*OPTIONS, "--data", str(data), "--out", str(tmp_path / "out")])
    assert list((tmp_path / "out").iterdir()) == []


# -- disks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 1])
def test_a_full_disk_ends_the_run_and_is_told(room, folder, tmp_path, monkeypatch):
    """Without room for a first checkpoint the program does not train. Without room for a later checkpoint, the message
    names the previous checkpoint as whole."""
    save, calls = fr.save, []

    def full(path, tree, **how):
        calls.append(path)
        return save(path, tree, **how) if len(calls) <= room else broken(path)

    def broken(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_run_state, "save", full)
    if not room:
        monkeypatch.setattr(_fit, "train_epoch", None)
    with pytest.raises(SystemExit) as end:
        ctr.main([*OPTIONS, "--data", str(folder), "--out", str(tmp_path)])
    assert "No space left on device" in str(end.value)
    assert ("--resume goes on from it" in str(end.value)) == bool(room)
    assert len(list(tmp_path.iterdir())) == room


# -- signals -----------------------------------------------------------------------------------------------------

LISTENERS = """
import json, os, sys, time, torch
from funcrec.examples import _signals
_signals.LEAVE_S = 0.5

def listen(words):
    with _signals.listen(0.2) as heard:
        if "held" in words:
            heard.hold()
        print(os.getpid(), flush=True)
        if "in C" in words:
            torch.linalg.svd(torch.randn(6000, 6000))
        while not heard.asked():
            time.sleep(0.01)
        time.sleep(0.5)
    sys.exit(100 + heard.asked())

for line in sys.stdin:
    if (child := os.fork()) == 0:
        listen(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""  # one process imports torch, and each listener is a fork of it
INT, TERM = signal.SIGINT, signal.SIGTERM
ENDS = {  # the listener's arguments, the signals, the seconds between the signals, the exit code
    "nothing to save": ([], [INT], 0, 130),
    "nothing to save, in C": (["in C"], [TERM], 0, 143),
    "the first asks": (["held"], [INT], 0, 102),
    "twice at once is once": (["held"], [TERM, TERM], 0, 115),
    "the second ends": (["held", "in C"], [TERM, INT], 0.5, 130),
}


@pytest.fixture(scope="module")
def listeners():
    with subprocess.Popen(
        [sys.executable, "-c", LISTENERS],
        text=True,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        yield process
        process.stdin.close()
        assert process.wait(timeout=60) == 0


@pytest.mark.xdist_group("listeners")
@pytest.mark.parametrize("name", ENDS)
def test_signals_ask_and_then_end(name, listeners):
    """If nothing can be lost, a signal ends the program. Otherwise the first signal requests an end, and a later signal
    ends the program. Both kinds arrive even while the program is busy in C."""
    words, sent, wait, code = ENDS[name]
    listeners.stdin.write(json.dumps(words) + "\n")
    listeners.stdin.flush()
    listener, began = int(listeners.stdout.readline()), time.monotonic()
    for signum in sent:
        os.kill(listener, signum)
        time.sleep(wait)
    assert int(listeners.stdout.readline()) == code
    assert time.monotonic() - began < 15


def test_handlers_are_given_back(folder, tmp_path):
    """After the main job, signals have their previous handlers."""
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    assert ctr.main([*OPTIONS, "--data", str(folder), "--out", str(tmp_path)]) == 0
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_interrupts_at_random_moments_lose_nothing():
    """After SIGINT, SIGTERM or SIGKILL at random moments, every run resumes to the bits of an uninterrupted run."""
    command = [sys.executable, "-m", "programs.ctr_interrupts", "--count", "2"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all of them went on to the same bits" in done.stdout


# -- ranks -------------------------------------------------------------------------------------------------------


def children(pid):
    """Return {RANK: process} of the processes of a launcher."""
    found = {}
    for at in Path("/proc").iterdir():
        try:
            if int(at.joinpath("stat").read_text().rpartition(")")[2].split()[1]) == pid:
                variables = dict(v.partition("=")[::2] for v in at.joinpath("environ").read_text().split("\0"))
                found[int(variables["RANK"])] = int(at.name)
        except (OSError, ValueError, KeyError):
            continue
    return found


def read_until(process, fragment):
    lines = []
    while not lines or fragment not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], process.stderr.read()
    return "".join(lines)


@pytest.mark.xdist_group("ranks")
def test_ranks_that_are_killed_go_on_and_those_that_are_asked_save(folder, tmp_path):
    """When a rank is killed, the other rank reports which rank it was and how to resume. --max-restarts with
    --resume=auto resumes. SIGTERM to the launcher saves."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    # the step is that of the ranks in test_ctr, whose code on disk these ranks load
    same = ["--model", "fm", "--batch-size", "64", "--lr", "0.003", "--plan", "row_wise"]
    words = ["--data", str(folder), "--out", str(tmp_path), "--epochs", "9999", "--patience", "9999", "--resume=auto"]
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "funcrec.examples.ctr", *same, *words], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT,
    )  # fmt: skip
    read_until(process, "epoch   0 ")
    killed = children(process.pid)[1]
    os.kill(killed, signal.SIGKILL)
    read_until(process, "resumed at epoch")
    begun = int(re.search(r"epoch +(\d+) ", read_until(process, "valid AUC"))[1])
    process.terminate()
    output, errors = process.communicate(timeout=100)
    assert f"rank 1 (process {killed}) ended" in errors and "--resume goes on from" in errors, errors
    assert "interrupted; the same command with --resume goes on from" in output
    saved = fr.load(tmp_path / "checkpoint.pt")
    assert saved["position"][0] > begun
    assert [h["epoch"] for h in saved["history"]] == list(range(saved["position"][0]))


def test_a_process_that_ended_is_told_from_one_that_runs():
    """A process counts as running until it ends, and no longer, even if no process has collected its exit code."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = _watch.began(process.pid)
    assert _watch.is_running(process.pid, start) and _watch.is_running(os.getpid(), _watch.began(os.getpid()))
    assert not _watch.is_running(process.pid, start - 1), "another process that had its number"
    process.kill()
    end = time.monotonic() + 20
    while _watch.is_running(process.pid, start) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _watch.is_running(process.pid, start)
    process.wait()
    assert not _watch.is_running(process.pid, start)


@pytest.mark.parametrize("lr", ["nan", "inf", "-1"])
def test_a_learning_rate_that_is_none_is_a_usage_error(lr, capsys):
    """A --lr that is not finite, or that is negative, ends the program before anything is read."""
    with pytest.raises(SystemExit):
        ctr.main(["--lr", lr])
    assert "--lr must be a finite number of at least 0" in capsys.readouterr().err
