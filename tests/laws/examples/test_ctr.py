"""The main job, on a small generated folder in the format of MovieLens. The job trains, reports, stops and resumes."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from programs import small_movielens

import funcrec as fr
from funcrec.examples import ctr
from funcrec.testing import assert_trees_close

OPTIONS = ["--model", "fm", "--batch-size", "64", "--patience", "9", "--lr", "0.05"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}  # code on disk is that of as many threads as here


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_movielens.write(tmp_path_factory.mktemp("ml-1m"))


def run(folder, out, *more):
    return ctr.main([*OPTIONS, "--data", str(folder), "--out", str(out), *more])


def test_it_trains_reports_and_resumes_to_the_same_bits(folder, tmp_path, capsys):
    """Two epochs and a resumption equal four epochs at once. The report is complete."""
    assert run(folder, tmp_path / "whole", "--epochs", "4") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"test AUC [01]\.\d{4} \(published 0\.8935\)", last)
    assert run(folder, tmp_path / "parts", "--epochs", "2") == 0
    assert run(folder, tmp_path / "parts", "--epochs", "4", "--resume") == 0
    whole, parts = (fr.load(tmp_path / name / "checkpoint.pt") for name in ("whole", "parts"))
    for key in ("state", "best", "position", "loss_sum"):
        assert_trees_close(parts[key], whole[key])
    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert result["num_parameters"] == 171_004
    assert [h["epoch"] for h in result["history"]] == [0, 1, 2, 3]
    assert result["history"][-1]["loss"] < result["history"][0]["loss"]
    assert result["test_auc"] > 0.6, "the parities can be learnt"
    assert (tmp_path / "whole" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_leaves_a_checkpoint_in_the_middle_of_an_epoch(folder, tmp_path):
    """An interrupted process exits with 130. A resumption from its checkpoint gives the bits of an uninterrupted
    run."""
    command = [
        sys.executable,
        "-m",
        "funcrec.examples.ctr",
        *OPTIONS,
        "--data",
        str(folder),
        "--out",
        str(tmp_path / "cut"),
    ]
    process = subprocess.Popen([*command, "--epochs", "100"], stdout=subprocess.PIPE, text=True, env=ENV)
    assert "epoch   0" in process.stdout.readline()
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "--resume" in output
    cut = fr.load(tmp_path / "cut" / "checkpoint.pt")
    epochs = cut["position"][0] + 1
    assert run(folder, tmp_path / "cut", "--epochs", str(epochs), "--resume") == 0
    assert run(folder, tmp_path / "whole", "--epochs", str(epochs)) == 0
    whole, resumed = (fr.load(tmp_path / name / "checkpoint.pt") for name in ("whole", "cut"))
    for key in ("state", "best"):
        assert_trees_close(resumed[key], whole[key])


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# with this rate the AUC stays below 1
SLOWLY = ["--lr", "0.003", "--patience", "9"]


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """Return (out, result) of two epochs in one process, with the checkpoint of the first epoch in out/first."""
    out = tmp_path_factory.mktemp("alone")
    run(folder, out, *SLOWLY, "--epochs", "1")
    (out / "first").mkdir()
    (out / "first" / "checkpoint.pt").write_bytes((out / "checkpoint.pt").read_bytes())
    run(folder, out, *SLOWLY, "--epochs", "2", "--resume")
    return out, json.loads((out / "result.json").read_text())


def assert_same_run(out, alone):
    """Check that AUCs agree within 0.001, losses within the float32 rounding of some hundred steps, and states within
    0.001."""
    got, (whole, want) = json.loads((out / "result.json").read_text()), alone
    assert 0.6 < want["test_auc"] < 0.99, "it could not tell one training from another"
    assert got["test_auc"] == pytest.approx(want["test_auc"], abs=1e-3)
    for mine, theirs in zip(got["history"], want["history"], strict=True):
        assert mine["valid_auc"] == pytest.approx(theirs["valid_auc"], abs=1e-3)
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    checkpoints = [fr.load(path / "checkpoint.pt") for path in (out, whole)]
    assert_trees_close(*(c["state"] for c in checkpoints), atol=1e-3)
    return got


@pytest.mark.xdist_group("ranks")
def test_two_ranks_train_what_one_process_trains(folder, tmp_path, alone):
    """An epoch on two ranks of torchrun, and a second epoch in one process from their checkpoint, end as two epochs in
    one process."""
    words = [*OPTIONS, *SLOWLY, "--data", str(folder), "--out", str(tmp_path), "--epochs", "1", "--plan", "row_wise"]
    done = subprocess.run(
        [*TORCHRUN, "-m", "funcrec.examples.ctr", *words], capture_output=True, text=True, timeout=900, env=ENV
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch   0") == done.stdout.count("test AUC") == 1, "one rank prints"
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["mesh"], result["plan"]) == ({"data": 2}, "row_wise")
    assert run(folder, tmp_path, *SLOWLY, "--epochs", "2", "--resume") == 0
    assert assert_same_run(tmp_path, alone)["mesh"] is None


def test_emulated_ranks_go_on_from_a_lone_process(folder, tmp_path, alone, interpreted):
    """The second epoch on an emulated mesh with another plan ends as in one process. Its step is staged."""
    (tmp_path / "checkpoint.pt").write_bytes((alone[0] / "first" / "checkpoint.pt").read_bytes())
    ranks = ["--emulate", "data=2,model=2", "--plan", "grid"]
    assert run(folder, tmp_path, *SLOWLY, "--epochs", "2", "--resume", *ranks) == 0
    result = assert_same_run(tmp_path, alone)
    assert (result["mesh"], result["plan"]) == ({"data": 2, "model": 2}, "grid")


def test_copies_train_apart_and_go_on_in_one_process(folder, tmp_path, alone, interpreted):
    """An epoch of two emulated copies, synchronized every 5 steps, differs from plain training. One process can resume
    from the epoch's checkpoint and continues to learn. The steps are staged."""
    ranks = ["--emulate", "replica=2,model=1", "--replicas", "replica", "--sync-every", "5"]
    assert run(folder, tmp_path, *SLOWLY, "--epochs", "1", *ranks) == 0
    first = json.loads((tmp_path / "result.json").read_text())
    assert (first["replicas"], first["sync_every"], first["plan"]) == (["replica"], 5, "row_wise")
    assert run(folder, tmp_path, *SLOWLY, "--epochs", "2", "--resume") == 0
    one, two = json.loads((tmp_path / "result.json").read_text())["history"]
    assert one == first["history"][0]
    whole = alone[1]["history"]
    assert one["loss"] == pytest.approx(whole[0]["loss"], rel=1e-2)
    assert one["loss"] != pytest.approx(whole[0]["loss"], rel=1e-4)
    assert two["loss"] < one["loss"] - 0.01
    assert two["valid_auc"] > one["valid_auc"] + 0.05


BAD = {
    "replicas without ranks": (["--replicas", "replica"], "need distinct axes among []"),
    "replicas of no axis": (["--emulate", "data=2", "--replicas", "replica"], "need distinct axes among ['data']"),
    "only replicas": (["--emulate", "data=2", "--replicas", "data"], "has no axis besides --replicas"),
    "nothing to synchronise": (["--emulate", "data=2", "--sync-every", "3"], "--sync-every requires copies"),
    "never synchronised": (
        ["--emulate", "a=2,b=1", "--replicas", "a", "--sync-every", "0"],
        "--sync-every must be at least 1",
    ),
    "two axes of which one is a replica's": (
        ["--emulate", "a=2,b=2", "--replicas", "a", "--plan", "grid"],
        "mixes two axes",
    ),
    "a plan without ranks": (["--plan", "row_wise"], "there are no ranks; torchrun"),
    "a mesh without ranks": (["--mesh", "data=2"], "there are no ranks; torchrun"),
    "no axes": (["--emulate", "2"], "not of the form data=2,model=2"),
    "an empty axis": (["--emulate", "data=0"], "not of the form"),
    "an axis twice": (["--emulate", "data=2,data=2"], "names an axis twice"),
    "two meshes": (["--emulate", "data=2", "--mesh", "data=2"], "without torchrun and --mesh"),
    "one axis for two": (["--emulate", "data=2", "--plan", "grid"], "mixes two axes: --emulate data=2,model=2"),
    "a batch that ranks cannot share": (["--emulate", "data=3"], "--batch-size 4096 cannot be shared by 3 ranks"),
    "nothing to resume": (["--resume"], "there is no"),
    "no accelerator": (["--device", "cuda"], "no accelerator"),
    "unknown model": (["--model", "gpt"], "invalid choice"),
    "no epoch": (["--epochs", "0"], "at least 1"),
}


@pytest.mark.parametrize("words, fragment", BAD.values(), ids=BAD.keys())
def test_bad_options_are_told_before_any_work(words, fragment, tmp_path, capsys):
    """Wrong options end the program at once, with a message."""
    if "--device" in words and torch.accelerator.is_available():
        words = ["--device", "cuda", "--resume"]
        fragment = "there is no"
    with pytest.raises(SystemExit):
        ctr.main(["--out", str(tmp_path), *words])
    assert fragment in capsys.readouterr().err


def test_a_batch_larger_than_the_data_is_refused(folder, tmp_path):
    """A batch larger than the data raises before training."""
    with pytest.raises(SystemExit, match="--batch-size 5000"):
        run(folder, tmp_path, "--batch-size", "5000")


def test_a_checkpoint_of_another_run_is_refused(folder, tmp_path):
    """If settings differ from those of the checkpoint, --resume names these settings."""
    run(folder, tmp_path, "--epochs", "1")
    with pytest.raises(SystemExit, match=r"lr was 0.05 and is 0.1"):
        run(folder, tmp_path, "--lr", "0.1", "--resume")
