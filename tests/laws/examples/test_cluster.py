"""The job for many machines trains from a store and resumes to the same bits. The recipes give it options it has."""

import ast
import io
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
import yaml
from programs.failing_store import emptied

import funcrec as fr
from funcrec.examples import cluster
from funcrec.files import as_path
from funcrec.testing import assert_trees_close

PAGE = (Path(fr.__file__).parent / "examples" / "CLUSTERS.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
JOBS = [yaml.safe_load(text) for kind, text in BLOCKS if kind == "yaml"]
SCRIPTS = [text for kind, text in BLOCKS if kind == "sh"]
PROGRAM = "-m funcrec.examples.cluster"


def write():
    random = torch.Generator().manual_seed(0)
    rows = {n: torch.randint(0, 1 << 40, (120,), generator=random).numpy() for n in ("user", "item")}
    out = io.BytesIO()
    label = torch.randint(0, 2, (120,), generator=random).numpy()
    parquet.write_table(pa.table({"label": label, **rows}), out, row_group_size=25)
    as_path("test", "memory://data/a.parquet", remote=True).write_bytes(out.getvalue())


def run(out, epochs, **more):
    words = ["--data", "memory://data", "--out", f"memory://{out}", "--epochs", str(epochs), "--eager", "--rows", "50"]
    return cluster.main([*words, "--batch-size", "16", *more.get("words", ())])


def test_the_job_continues_to_the_same_bits(capsys):
    """A job of one epoch that is started again with two ends with the bits of a job of two epochs."""
    emptied()
    write()
    want = run("alone", 2)
    run("again", 1)
    done = run("again", 2)
    assert_trees_close(done.state, want.state, rtol=0, atol=0)
    assert [h["loss"] for h in done.history] == [h["loss"] for h in want.history]
    assert "2 epochs, loss" in capsys.readouterr().out
    emptied()


def words_of(command):
    """Return the words after the name of the program."""
    words = command if isinstance(command, list) else shlex.split(command.replace("\\\n", " "))
    at = words.index("funcrec.examples.cluster")
    assert words[at - 1] == "-m" and "torchrun" in words[:at]
    return words[at + 1 :]


def test_the_recipes_start_the_job():
    """Each recipe names the program and gives it options that it has; all recipes start the same job."""
    first, second = JOBS
    pods = first["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    trainer = second["spec"]["trainer"]
    found = [words_of([*x["command"], *x["args"]]) for x in (pods[0], trainer)]
    found += [words_of(next(x for x in re.split(r"\n(?=\w)", s) if PROGRAM in x)) for s in SCRIPTS]
    (python,) = [text for kind, text in BLOCKS if kind == "python"]
    (given,) = [x.value for x in ast.parse(python).body if isinstance(x, ast.Assign) and x.targets[0].id == "words"]
    options = [cluster.options_of(x) for x in (*found, ast.literal_eval(given))]
    assert len(options) == 5 and all(x == options[0] for x in options) and options[0].epochs == 3
    assert (first["kind"], second["kind"]) == ("PyTorchJob", "TrainJob") and len(SCRIPTS) == 2


def test_a_batch_that_ranks_cannot_share_is_refused(monkeypatch):
    """A batch size that the ranks do not divide ends the program before any data is read."""
    mesh = fr.Mesh.emulated(data=3)
    monkeypatch.setattr(cluster, "mesh_of", lambda options: mesh)
    monkeypatch.setattr(cluster.dist, "get_rank", lambda: 0)
    with pytest.raises(SystemExit, match="cannot be shared by 3 ranks"):
        run("shared", 1)
