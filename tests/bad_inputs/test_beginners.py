"""Code of newcomers: mistakes get an error in four parts, correct code succeeds, and nothing is silently wrong."""

from pathlib import Path

import pytest
from programs import beginners

RESULT = Path(__file__).parents[2] / "bench" / "results" / "BEGINNERS.txt"
FOUND: dict[str, beginners.Outcome] = {}


def found(code):
    if code not in FOUND:
        FOUND[code] = beginners.outcome(code)
    return FOUND[code]


@pytest.mark.parametrize("row", beginners.rows(), ids=lambda row: row[0])
def test_a_mistake_is_told(row):
    """A newcomer's code either succeeds, or raises or warns with got, need and try."""
    assert beginners.is_right(row, found(row[0])), found(row[0])


def test_the_table_of_mistakes():
    """There are at least 150 rows. 95 % of the errors and warnings have all four parts. No row is silently wrong."""
    outcomes = {row[0]: found(row[0]) for row in beginners.rows()}
    told = [o for o in outcomes.values() if o.kind != "returns"]
    assert len(outcomes) == len(beginners.rows()) >= 150
    assert sum(o.is_whole for o in told) / len(told) >= 0.95
    print(beginners.figures(outcomes))
    kept = RESULT.read_text()
    # the printed table has every row
    assert [code for code in outcomes if f"\n  {code}\n" not in kept] == []
