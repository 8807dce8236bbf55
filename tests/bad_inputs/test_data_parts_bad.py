"""Bad calls of what makes examples of one's own columns: splits."""

import numpy as np
import pyarrow as pa
import pytest
import torch

import funcrec as fr
from funcrec.data import k_core, leave_one_out, random_split, split_by_group, split_by_time

KEY = fr.key(0)
ROWS = torch.tensor([1, 1, 2, 2])
HALVES = (0.5, 0.5)
SPLITS = [
    ("shares of 0.9", lambda: random_split(9, (0.8, 0.1), key=KEY), ValueError, "together 0.9"),
    ("one share", lambda: random_split(9, 0.8, key=KEY), TypeError, "`fractions`"),
    ("no shares", lambda: random_split(9, (), key=KEY), TypeError, "`fractions` are not shares"),
    ("share 0", lambda: random_split(9, (1.0, 0.0), key=KEY), ValueError, "has a share that is none"),
    ("share NaN", lambda: split_by_time(ROWS, (float("nan"), 0.5)), ValueError, "has a share that is none"),
    ("share in words", lambda: split_by_time(ROWS, ("half", "half")), TypeError, "`fractions` are not shares"),
    ("empty train part", lambda: random_split(3, (0.1, 0.9), key=KEY), ValueError, "3 rows: parts of 0, 3"),
    ("no rows", lambda: random_split(0, HALVES, key=KEY), ValueError, "a row or more in each part"),
    ("seed for key", lambda: random_split(9, HALVES, key=3), TypeError, "`key` is not a key"),
    ("no key", lambda: split_by_group(ROWS, HALVES, key=None), TypeError, "`key` is not a key"),
    ("one time", lambda: split_by_time(torch.ones(4), HALVES), ValueError, "4 rows, 1 different times"),
    ("three parts of two times", lambda: split_by_time(ROWS, (0.4, 0.3, 0.3)), ValueError, "2 different times"),
    ("NaN for a time", lambda: split_by_time(torch.tensor([1.0, torch.nan]), HALVES), ValueError, "none in row 1"),
    ("no time", lambda: split_by_time(pa.array([3, None]), HALVES), ValueError, "`time` misses a value"),
    ("NaT", lambda: split_by_time(np.array(["NaT"], "datetime64[s]"), HALVES), ValueError, "none in row 0"),
    ("text for times", lambda: split_by_time(pa.array(["b", "a"]), HALVES), TypeError, "strptime"),
    ("list of times", lambda: split_by_time([3, 1], HALVES), TypeError, "torch.tensor(time)"),
    ("matrix of times", lambda: split_by_time(torch.ones(2, 2), HALVES), ValueError, "`time` is not a vector"),
    ("complex times", lambda: split_by_time(torch.ones(2) * 1j, HALVES), TypeError, "values of another kind"),
    ("table for a column", lambda: split_by_time(pa.table({"t": [1]}), HALVES), TypeError, "`time`"),
    ("no values", lambda: split_by_time(torch.ones(2, device="meta"), HALVES), ValueError, "values that can be read"),
    ("empty column", lambda: split_by_time(torch.ones(0), HALVES), ValueError, "`time` has no rows"),
    ("one group", lambda: split_by_group(torch.ones(4), HALVES, key=KEY), ValueError, "1 groups: parts of"),
    ("no group", lambda: split_by_group(pa.array(["a", None]), HALVES, key=KEY), ValueError, "`group` misses a value"),
    ("lists for groups", lambda: split_by_group(pa.array([[1], [2]]), HALVES, key=KEY), TypeError, "another kind"),
    ("all-null groups", lambda: split_by_group(pa.nulls(3), HALVES, key=KEY), ValueError, "none in row 0"),
    ("one row each", lambda: leave_one_out(torch.arange(4), ROWS), ValueError, "of at most 1 rows"),
    ("two rows each", lambda: leave_one_out(ROWS, ROWS), ValueError, "of at most 2 rows"),
    ("lengths", lambda: leave_one_out(ROWS, torch.arange(5)), ValueError, "`time` has another number of rows"),
    ("three held out", lambda: leave_one_out(ROWS, ROWS, held_out=3), ValueError, "`held_out` is neither 1 nor 2"),
    ("core of 0", lambda: k_core(ROWS, ROWS, 0), ValueError, "`k` is too small"),
    ("core of a half", lambda: k_core(ROWS, ROWS, 0.5), TypeError, "`k` is not a number of rows"),
    ("core of three", lambda: k_core(ROWS, ROWS, (1, 2, 3)), TypeError, "`k` is not a number of rows"),
    (
        "core of other lengths",
        lambda: k_core(ROWS, torch.arange(3), 1),
        ValueError,
        "`item` has another number of rows",
    ),
]


@pytest.mark.parametrize("name, call, kind, fragment", SPLITS, ids=[r[0] for r in SPLITS])
def test_bad_call_of_parts(name, call, kind, fragment):
    """A bad call fails at the call and names the argument, in four parts."""
    with pytest.raises(kind) as error:
        call()
    text = error.value.args[0]
    assert all(f in text for f in (fragment, "funcrec.data.", "\n  got   ", "\n  need  ", "\n  try   ")), text
