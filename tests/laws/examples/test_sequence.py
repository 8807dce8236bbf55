"""The example of sequence models on a small folder in MovieLens' format, where each item follows another."""

import contextlib
import json
import random
import re

import pytest
from programs import small_movielens
from programs.as_staged import staged_only

from funcrec.examples import sequence


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder whose 80 users rate the 60 items in a cycle, each from another item on."""
    path, draw = small_movielens.write(tmp_path_factory.mktemp("ml-1m")), random.Random(0)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for user in range(1, 81):
        first, length = draw.randrange(60), draw.randrange(18, 26)  # batches of one bucket
        lines += [f"{user}\t{(first + i) % 60 + 1}\t5\t{978300000 + i}" for i in range(length)]
    (path / "ml-1m.inter").write_text("\n".join([lines[0], *draw.sample(lines[1:], len(lines) - 1)]) + "\n")
    return path


def run(folder, out, *more):
    small = ["--data", str(folder), "--dim", "16", "--blocks", "1", "--max-length", "20"]
    small += ["--lr", "0.02", "--batch-size", "16"]
    return sequence.main([*small, "--out", str(out), *more])


@pytest.mark.parametrize("model", sequence.MODELS)
def test_it_trains_and_reports(folder, tmp_path, capsys, model):
    """A run learns which item follows, prints a line for each epoch, and reports the best epoch's test. GRU4Rec's steps
    are compiled, and those of the others staged."""
    with contextlib.nullcontext() if model == "gru4rec" else staged_only():
        assert run(folder, tmp_path, "--model", model, "--epochs", "8") == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"[\d,]+ ratings, 80 users, 60 items", lines[0])
    assert len([x for x in lines if re.match(r"epoch +\d+  loss \d\.\d{4}  valid HR@10 [01]\.\d{4}", x)]) == 8
    assert re.match(r"best epoch \d, test HR@10 [01]\.\d{4}, NDCG@10 [01]\.\d{4}", lines[-1])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["test_hit_rate@10"] > 0.8, "10 of 60 items at random would hit 0.2"


def test_it_resumes_to_the_same_numbers(folder, tmp_path):
    """A run of two parts ends with the numbers of a whole one."""
    small = ("--model", "gru4rec", "--dim", "8")
    assert run(folder, tmp_path / "whole", *small, "--epochs", "2") == 0
    assert run(folder, tmp_path / "parts", *small, "--epochs", "1") == 0
    assert run(folder, tmp_path / "parts", *small, "--epochs", "2", "--resume") == 0
    of = lambda name: json.loads((tmp_path / name / "result.json").read_text())
    same = ("best_epoch", "test_hit_rate@10", "test_ndcg@10", "num_parameters")
    assert {k: of("parts")[k] for k in same} == {k: of("whole")[k] for k in same}


def test_wrong_options_end_the_program(tmp_path, capsys):
    """A dim of 0 ends the program with code 2 and the option's name."""
    with pytest.raises(SystemExit) as ended:
        sequence.main(["--dim", "0", "--out", str(tmp_path)])
    assert ended.value.code == 2 and "--dim must be at least 1" in capsys.readouterr().err
