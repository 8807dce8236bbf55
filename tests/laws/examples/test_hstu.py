"""The example of the HSTU ranker on a few users."""

import json

import pytest

from funcrec.examples import hstu

SIZES = {"users": 40, "items": 1792, "timestamps": 14, "length": 4, "history": 16, "eval-users": 20, "batch-size": 16}
SMALL = [word for name, size in SIZES.items() for word in (f"--{name}", f"{size}")]


def run(out, *more):
    assert hstu.main([*SMALL, "--out", str(out), *more]) == 0
    return json.loads((out / "result.json").read_text())


def test_it_trains_and_reports(tmp_path, capsys):
    """A run prints a line for each timestamp of training and each predictor. The generator, which knows the chances, is
    ahead of all. A second run has the same losses and scores."""
    result = run(tmp_path / "a")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [["timestamp", f"{t}"] for t in range(4)]
    held_out = result["held_out"]
    assert set(held_out) == {"hstu", "share of likes", "likes by category", "likes by item", "the generator"}
    assert all(any(line.startswith(name) for line in lines) for name in held_out)
    others = [x for name, x in held_out.items() if name != "the generator"]
    best = held_out["the generator"]
    assert best["ne"] < min(x["ne"] for x in others) and best["auc"] > max(x["auc"] for x in others)
    assert result["trained"][-1]["loss"] < result["trained"][0]["loss"]
    again = run(tmp_path / "b")
    assert (again["trained"], again["held_out"]) == (result["trained"], held_out)


@pytest.mark.parametrize(
    ("words", "told"), [("--timestamps 10", "more than 10"), ("--users 0", "--users must be at least 1")]
)
def test_words_that_no_run_follows(tmp_path, capsys, words, told):
    """The error names the option, and no folder is made."""
    with pytest.raises(SystemExit):
        hstu.main([*words.split(), "--out", str(tmp_path / "out")])
    assert told in capsys.readouterr().err and not (tmp_path / "out").exists()
