"""`python -m funcrec plan` makes a plan from a file."""

import argparse
import json
import subprocess
import sys

import pytest
import torch

import funcrec as fr
from funcrec.examples import _ranks as ranks
from funcrec.planner import main

SPEC = {
    "mesh": {"node": 2, "local": 4},
    "batch_size": 4096,
    "hardware": "a100",
    "optimizer": "rowwise_adagrad",
    "tables": [
        {"name": "item", "num_embeddings": 1_000_000, "embedding_dim": 64},
        {"name": "user", "num_embeddings": 1000, "embedding_dim": 32, "dtype": "bfloat16"},
    ],
    "features": [{"name": "clicked", "table": "item"}, {"name": "user", "table": "user"}],
    "constraints": {"item": {"pooling_factor": 20.0}},
    "codec": {"forward": "bfloat16"},
}


def run(tmp_path, spec, *more, name="spec.json"):
    path = tmp_path / name
    path.write_text(spec if isinstance(spec, str) else json.dumps(spec))
    return main(["plan", str(path), *more])


def test_the_command_prints_and_writes_the_plan_of_the_call(tmp_path, capsys):
    """The command gives the plan of fr.plan as text, JSON and picture."""
    out, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    assert run(tmp_path, SPEC, "--out", str(out), "--picture", str(picture)) == 0
    made = fr.Plan.from_json(out.read_text())
    tables = (fr.TableConfig("item", 1_000_000, 64), fr.TableConfig("user", 1000, 32, dtype=torch.bfloat16))
    features = (fr.FeatureConfig("clicked", table="item"), fr.FeatureConfig("user", table="user"))
    same = fr.plan(
        tables, features, SPEC["mesh"], batch_size=4096, hardware="a100", optimizer=fr.optim.rowwise_adagrad(),
        constraints={"item": fr.TableConstraint(pooling_factor=20.0)}, codec=fr.Codec("bfloat16"),
    )  # fmt: skip
    assert made == same and made.report == same.report
    assert capsys.readouterr().out.strip() == same.table().strip() and "<svg" in picture.read_text()


def test_the_file_of_a_dry_run_has_the_same_plan(tmp_path):
    """One file serves both commands: the model of a dry run changes no placement."""
    files = {"plan.json": SPEC, "dry.json": {**SPEC, "dense": {"num_dense": 13, "bottom": [64], "sizes": [512]}}}
    outs = [tmp_path / f"of-{name}" for name in files]
    assert [run(tmp_path, spec, "--out", f"{out}", name=n) for (n, spec), out in zip(files.items(), outs)] == [0, 0]
    assert outs[0].read_text() == outs[1].read_text()


def test_the_command_rates_the_placements_of_a_plan(tmp_path, capsys):
    """With the placements that `to_json` wrote, and hardware for each rank, the command rates this plan."""
    made = {"item": fr.row_wise("local"), "user": fr.table_wise(("node", "local"), rank=3)}
    own = json.loads(fr.Plan(made).to_json())["placements"]
    out = tmp_path / "plan.json"
    assert run(tmp_path, {**SPEC, "placements": own, "hardware": ["a100"] * 8}, "--out", str(out)) == 0
    assert fr.Plan.from_json(out.read_text()) == fr.Plan(made) and "row_wise" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, code, part",
    [
        ({"memory_bytes": 1000}, 1, "do not fit into memory"),
        ({"tabels": []}, 2, "'tables'"),
        ({"optimizer": "schedule"}, 2, "`optimizer` is unknown"),
        ({"tables": [{"name": "item", "rows": 3}]}, 2, "`tables[0]` has an unknown key"),
        ({"features": 3}, 2, "`features` is not a list of mappings"),
        ({"tables": [{"name": "item", "num_embeddings": 3, "embedding_dim": 2, "dtype": "nn"}]}, 2, "is not a dtype"),
        ({"placements": {"item": "row_wise"}}, 2, "is not a placement"),
        ({"placements": [1]}, 2, "`placements` is not a mapping"),
        ({"placements": {"item": {"kind": "row_wise", "axes": "x"}}}, 2, "is not a placement"),
        ({"hardware": ["a100"]}, 2, "one entry for each rank"),
        ({"codec": {"x": 1}}, 2, "`codec` has an unknown key"),
        ({"mesh": {}}, 2, "a mesh has no axes"),
        ("[1]", 2, "is not a mapping"),
        ("{", 2, "is not JSON"),
        ({"hardware": {"name": "x"}}, 2, "the arguments are not those that it takes"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_file_is_told(tmp_path, capsys, change, code, part):
    """For a file without a valid plan, the command exits with 1 if no plan fits and with 2 otherwise. The message on
    stderr says what is wrong."""
    assert run(tmp_path, change if isinstance(change, str) else SPEC | change) == code
    assert part in capsys.readouterr().err


def test_what_cannot_be_read_or_written_is_told(tmp_path, capsys):
    """A missing file, a folder, bytes that are no text, and paths that cannot be written exit with 2."""
    (tmp_path / "bytes").write_bytes(bytes(range(128, 256)))
    assert [main(["plan", str(tmp_path / n)]) for n in ("none", "", "bytes")] == [2, 2, 2]
    for option in ("--out", "--picture"):
        assert run(tmp_path, SPEC, option, str(tmp_path / "none" / "x.svg")) == 2
    assert run(tmp_path, SPEC, "--picture", str(tmp_path / "x.abc")) == 2
    assert "No such file" in capsys.readouterr().err


def damaged_texts():
    """Yield (path, new value, a plan's JSON with one value replaced or removed)."""
    made = fr.plan((fr.TableConfig("a", 100, 8),), (fr.FeatureConfig("a", table="a"),), {"m": 2}, batch_size=8)

    def paths(x, path=()):
        for k in x if isinstance(x, dict) else range(len(x)) if isinstance(x, list) else ():
            yield (*path, k)
            yield from paths(x[k], (*path, k))

    for path in paths(json.loads(made.to_json())):
        for new in (None, "x", -1, [], {}, 1.5, True, float("nan"), KeyError):
            text = at = json.loads(made.to_json())
            for k in path[:-1]:
                at = at[k]
            if new is KeyError:
                del at[path[-1]]
            else:
                at[path[-1]] = new
            yield path, new, json.dumps(text)


def test_a_damaged_plan_is_a_value_error():
    """If any value of the JSON of a plan is changed or removed, from_json raises a ValueError in four parts. Otherwise
    the plan can be shown."""
    for path, new, text in damaged_texts():
        try:
            plan = fr.Plan.from_json(text)
        except ValueError as error:
            assert "\n  got" in str(error), (path, new)
        else:
            assert not isinstance(new, list | dict | str) or path[-1] in (
                "table", "placement", "reason", "hardware", "ranks", "shapes", "report", "placements", "replicas",
                "axes", "mesh", "tables", 0), (path, new)  # fmt: skip
            if plan.report is not None:
                assert plan.table() and plan.draw() and plan.gap >= 0 and plan.reasons and plan.digest


def test_yaml_without_its_package_is_told(tmp_path, capsys, monkeypatch):
    """A YAML file requires PyYAML. The error says so. With PyYAML the file is read."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert run(tmp_path, "a: 1", name="spec.yaml") == 2
    assert "PyYAML" in capsys.readouterr().err
    fake = type(sys)("yaml")
    fake.safe_load = json.loads
    monkeypatch.setitem(sys.modules, "yaml", fake)
    assert run(tmp_path, SPEC, name="spec.yaml") == 0


def test_the_main_job_takes_its_plan_from_the_planner(capsys):
    """`--plan auto` uses and prints the plan of fr.plan. A plan by name has that kind of placement."""
    model, mesh, sparse = fr.models.ml1m("fm"), fr.Mesh.emulated(data=2, model=2), fr.optim.adam()
    own = {"batch_size": 256, "device": "cpu", "replicas": ()}
    made = ranks.plan_of(argparse.Namespace(plan="auto", **own), model, mesh, sparse)
    assert made.gap < 0.01 and capsys.readouterr().out.strip() == made.table().strip()
    by_name = ranks.plan_of(argparse.Namespace(plan="grid", **own), model, mesh, sparse)
    assert {p.kind for _, p in by_name.placements} == {"grid"}


def test_it_is_a_command():
    """`python -m funcrec plan --help` describes the file."""
    done = subprocess.run(
        [sys.executable, "-m", "funcrec", "plan", "--help"], capture_output=True, text=True, check=True
    )
    assert '"batch_size": 65536' in done.stdout


LOUD = """
import ctypes, functools, sys
from funcrec.planner import _command

quiet = _command.plan

@functools.wraps(quiet)
def loud(**arguments):
    ctypes.CDLL(None).printf(b"a line of the solver\\n")
    return quiet(**arguments)

_command.plan = loud
sys.exit(_command.main(["plan", sys.argv[1]]))
"""


def test_what_the_solver_prints_is_not_on_stdout(tmp_path):
    """Lines that C code prints while it solves go to stderr. The stdout of the command is the plan alone."""
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    done = subprocess.run(
        [sys.executable, "-c", LOUD, str(tmp_path / "spec.json")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "a line of the solver" in done.stderr
    assert done.stdout and "solver" not in done.stdout
