"""The example of days on a few generated days, and on a small folder in MovieLens' format."""

import json

import pytest
from programs import small_movielens

from funcrec.examples import days

SMALL = ["--batch-size", "128", "--dim", "4", "--eager"]


def test_it_judges_four_tables(tmp_path, capsys):
    """A run prints a line for each day, and its file has the numbers of all rows, bit for bit. The vocabulary has a
    fifth of the rows, knows those who came the day before, and is better than a hash to as many rows. An id stays for
    a tenth of the days, so in fewer than 20 days nobody comes back."""
    more = ["--days", "20", "--users", "1200", "--items", "1200", "--examples", "2400", "--lr", "0.3"]
    assert days.main([*SMALL, *more, "--share", "0.2", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([x for x in lines if x.strip()[:1].isdigit()]) == 21
    result = json.loads((tmp_path / "result.json").read_text())
    found, late = result["found"], result["later_half"]
    assert found["file"]["auc"] == found["all"]["auc"]
    assert result["rows"]["vocabulary"] == result["rows"]["hashed"] < 0.25 * result["rows"]["all"]
    assert late["vocabulary"] > 0.55 and late["vocabulary"] > late["hashed"] + 0.02
    assert (tmp_path / "auc.png").stat().st_size and sorted(x.name for x in tmp_path.iterdir()) == [
        "auc.png",
        "result.json",
    ]


def test_movielens_runs_in_order_of_time(tmp_path, capsys):
    """The ratings of a folder are judged day by day."""
    (tmp_path / "ml-1m").mkdir()
    folder = small_movielens.write(tmp_path / "ml-1m")
    options = [*SMALL, "--data", "movielens", "--data-dir", str(folder), "--days", "3", "--out", str(tmp_path / "out")]
    assert days.main(options) == 0
    found = json.loads((tmp_path / "out" / "result.json").read_text())["found"]
    assert found["file"]["auc"] == found["all"]["auc"] and len(found["all"]["auc"]) == 3


def test_wrong_options_end_the_program(tmp_path, capsys):
    """A share of 0 ends the program with code 2 and the option's name."""
    with pytest.raises(SystemExit) as ended:
        days.main(["--share", "0", "--out", str(tmp_path)])
    assert ended.value.code == 2 and "--share must be in (0, 1]" in capsys.readouterr().err
