"""Tables that cannot make examples: the error's type, and the fragments that name column, row and what to try."""

import datetime
import decimal
import sys

import pyarrow as pa
import pytest
import torch

from funcrec.data import Schema, examples, fit_encoding

NAN, INF = float("nan"), float("inf")
GOOD = {"y": [1, 0], "x": [0.5, 1.0], "a": [3, 4], "g": [[1, 2], []], "s": [[0.5, 1.0], []], "w": [1.0, 2.0]}
ALL = Schema("y", ("x",), ("a",), ("g",), {"g": "s"}, "w")
of = lambda **columns: lambda: examples({**GOOD, **columns}, ALL)


class Strange:
    """A stream with the methods of a stream. It returns a column or raises."""

    def __init__(self, column):
        self.column = column

    def __arrow_c_stream__(self, requested_schema=None):
        if self.column is None:
            raise TypeError("Sparse data (column a) not supported.")
        return self.column.__arrow_c_stream__(requested_schema)


ROWS = [
    ("label 5", of(y=[1, 5]), ValueError, ("row 1, column `y`", "label 5", "[0, 1]", 'label_kind="number"')),
    ("label -1", of(y=[-1, 0]), ValueError, ("row 0, column `y`", "label -1")),
    ("label NaN", of(y=[0.5, NAN]), ValueError, ("row 1, column `y`", "label nan")),
    ("no label", of(y=[None, 1]), ValueError, ("row 0, column `y`", "no label", "label=None")),
    ("label in words", of(y=["yes", "no"]), TypeError, ("column `y` does not hold numbers", "string")),
    ("class 1.5", lambda: examples(GOOD, Schema("x", categorical=("a",), label_kind="class")), ValueError,
        ("row 0, column `x`", "label 0.5", "a class 0, 1, 2")),
    ("infinite label", lambda: examples({"y": [INF], "a": [1]}, Schema("y", categorical=("a",), label_kind="number")),
        ValueError, ("row 0, column `y`", "inf")),
    ("ids in words", of(a=["u", "v"]), TypeError, ("column `a` does not hold ids", "string", "encode")),
    ("ids in a dictionary of words", of(a=pa.array(["u", "v"]).dictionary_encode()), TypeError,
        ("column `a` does not hold ids", "dictionary", "encode")),
    ("ids in a string view", of(a=pa.array(["u", "v"], pa.string_view())), TypeError, ("string_view", "encode")),
    ("floats for ids", of(a=[1.0, 2.0]), TypeError, ("column `a` does not hold ids", "double", "Int64")),
    ("decimals for ids", of(a=[decimal.Decimal(1), decimal.Decimal(2)]), TypeError, ("decimal", "encode")),
    ("timestamps for ids", of(a=[datetime.datetime(2020, 1, 1)] * 2), TypeError, ("timestamp", "encode")),
    ("missing id", of(a=[1, None]), ValueError, ("row 1, column `a`", "a missing id", "encode", "missing=0")),
    ("only missing ids", of(a=[None, None]), ValueError, ("row 0, column `a`", "a missing id")),
    ("uint64 beyond i64", of(a=pa.array([1, 2**63], pa.uint64())), ValueError, ("row 1, column `a`", f"{2**63}")),
    ("lists for one id", of(a=[[1], [2]]), TypeError, ("column `a` does not hold ids", 'multivalued=("a",)')),
    ("one id for lists", of(g=[1, 2]), TypeError, ("column `g` does not hold lists of ids", 'categorical=("g",)')),
    ("lists of words", of(g=[["u"], []]), TypeError, ("column `g` does not hold lists of ids", "string", "encode")),
    ("lists of lists", of(g=[[[1]], []]), TypeError, ("column `g` does not hold lists of ids",)),
    ("missing id in a list", of(g=[[], [1, None]], s=[[], [1, 1]]), ValueError, ("row 1, column `g`", "a missing id")),
    ("uint64 in a list", of(g=pa.array([[], [1, 2**64 - 1]], pa.list_(pa.uint64()))), ValueError,
        ("row 1, column `g`",)),
    ("weights of another length", of(s=[[0.5], []]), ValueError, ("row 0, column `s`", "1 weights", "2, one for each")),
    ("weight of an id NaN", of(s=[[0.5, NAN], []]), ValueError, ("row 0, column `s`", "nan")),
    ("one weight for a list", of(s=[0.5, 1.0]), TypeError, ("column `s` does not hold lists of numbers",)),
    ("number NaN", of(x=[1.0, NAN]), ValueError, ("row 1, column `x`", "nan", "finite")),
    ("number beyond f32", of(x=[1e39, 0.0]), ValueError, ("row 0, column `x`", "1e+39", "finite f32")),
    ("no number", of(x=[None, 0.0]), ValueError, ("row 0, column `x`", "no number", "fill_null")),
    ("number in words", of(x=["1", "2"]), TypeError, ("column `x` does not hold numbers", "string", "cast")),
    ("numbers in lists", of(x=[[1.0], [2.0]]), TypeError, ("column `x` does not hold numbers", "list")),
    ("no vector", of(x=pa.array([[1.0], None], pa.list_(pa.float32(), 1))), ValueError, ("row 1, column `x`",)),
    ("weight -1", of(w=[1.0, -1.0]), ValueError, ("row 1, column `w`", "weight -1.0", ">= 0")),
    ("time in words", lambda: examples({"a": [1], "t": ["now"]}, Schema(categorical=("a",), time="t")), TypeError,
        ("column `t` does not hold times",)),
    ("time NaN", lambda: examples({"a": [1], "t": [NAN]}, Schema(categorical=("a",), time="t")), ValueError,
        ("row 0, column `t`", "nan")),
    ("id beyond its table", lambda: examples(GOOD, ALL, vocabularies={"g": 2}), ValueError,
        ("row 0, column `g`", "id 2")),
    ("id below its table", lambda: examples({"a": [0, -1]}, Schema(categorical=("a",)), vocabularies={"a": 2}),
        ValueError, ("row 1, column `a`", "id -1", "0 <= id < 2")),
    ("vocabulary of no ids", lambda: examples(GOOD, ALL, vocabularies={"x": 2}), ValueError, ("not read", "['x']")),
    ("no label in the table", lambda: examples({"a": [1]}, Schema("y", categorical=("a",))), ValueError,
        ("lacks columns", "['y']", "label=None")),
    ("no column", lambda: examples({"y": [1]}, Schema("y", categorical=("a",))), ValueError,
        ("lacks columns", "['a']")),
    ("a column twice", lambda: examples(pa.table([[1], [2]], names=["a", "a"]), Schema(categorical=("a",))), ValueError,
        ("has a column twice", "['a']")),
    ("columns of two lengths", lambda: examples({"a": [1], "b": [1, 2]}, Schema(categorical=("a", "b"))), ValueError,
        ("one length",)),
    ("a column of two kinds", lambda: examples({"a": [1, "x"]}, Schema(categorical=("a",))), TypeError,
        ("column `a` cannot be read", "one kind")),
    ("a series for a table", lambda: examples(Strange(pa.chunked_array([[1]])), Schema(categorical=("a",))), TypeError,
        ("the table cannot be read", "non-struct", "to_frame")),
    ("a table that makes no columns", lambda: examples(Strange(None), Schema(categorical=("a",))), TypeError,
        ("the table cannot be read", "Sparse data (column a)", "one kind")),
    ("a list for a table", lambda: examples([1, 2], Schema(categorical=("a",))), TypeError,
        ("is not a table",)),
    ("row behind the last", lambda: examples(GOOD, ALL).take(torch.tensor([2])), ValueError, ("row 2", "0 <= row < 2")),
    ("no ids", lambda: Schema("y", ("x",)), ValueError, ("`categorical` and `multivalued` are empty",)),
    ("unknown kind", lambda: Schema("y", categorical=("a",), label_kind="regression"), ValueError, ("'number'",)),
    ("kinds of other labels", lambda: Schema("y", categorical=("a",), label_kind=("binary",) * 2), ValueError,
        ("`label_kind` does not match",)),
    ("weights of no ids", lambda: Schema("y", categorical=("a",), weights={"b": "c"}), ValueError, ("['b']",)),
    ("a key twice", lambda: Schema("y", categorical=("a",), multivalued=("a",)), ValueError, ("named twice", "['a']")),
    ("times of the day for numbers", of(x=[datetime.time(1, 2)] * 2), TypeError,
        ("column `x` does not hold numbers", "time64", '[60 * t.hour + t.minute for t in df["x"]]')),
    ("times of the day for times", lambda: examples({"a": [1], "t": [datetime.time(1)]},
        Schema(categorical=("a",), time="t")), TypeError, ("column `t` does not hold times", "t.minute for t in")),
    ("times of the day for kinds", lambda: fit_encoding({"t": [datetime.time(1)]}, Schema(categorical=("t",))),
        TypeError, ("column `t` has values of another kind", "t.minute for t in")),
    ("durations for numbers", of(x=[datetime.timedelta(1)] * 2), TypeError,
        ("duration", 'df["x"].dt.total_seconds() for a number')),
    ("dates for numbers", of(x=[datetime.date(2020, 1, 1)] * 2), TypeError,
        ("date32", 'pd.to_datetime(df["x"]).dt.dayofweek as categorical', 'time="x"')),
    ("label among the ids", lambda: Schema("a", categorical=("a",)), ValueError, ("also an input", "['a']")),
]  # fmt: skip


@pytest.mark.parametrize("call, kind, fragments", [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_bad_table(call, kind, fragments):
    """A schema or a table without a valid meaning raises with column and row, in four parts."""
    with pytest.raises(kind) as error:
        call()
    text = error.value.args[0]
    assert all(f in text for f in (*fragments, "funcrec.data.", "\n  got   ", "\n  need  ")), text


def test_no_pyarrow(monkeypatch):
    """Without pyarrow the error says what to install."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install funcrec\[data\]"):
        examples(GOOD, ALL)


def test_the_advice_for_times_can_be_followed():
    """What the errors propose for times of the day, dates and durations makes columns that are read."""
    pd = pytest.importorskip("pandas")
    days, hours = [datetime.date(2020, 1, 1), datetime.date(2020, 1, 5)], [datetime.time(1, 2), datetime.time(3, 4)]
    df = pd.DataFrame({"t": hours, "d": days, "l": [datetime.timedelta(hours=1), datetime.timedelta(2)]})
    df["minutes"] = [60 * t.hour + t.minute for t in df["t"]]
    df["age"] = (pd.to_datetime(df["d"]) - pd.to_datetime(df["d"]).min()).dt.total_seconds()
    df["weekday"] = pd.to_datetime(df["d"]).dt.dayofweek
    df["length"] = df["l"].dt.total_seconds()
    found = examples(df, Schema(dense=("minutes", "age", "length"), categorical=("weekday",), time="d"))
    assert found.dense.tolist() == [[62.0, 0.0, 3600.0], [184.0, 345600.0, 172800.0]]
    assert found.categorical.tolist() == [[2], [6]] and found.time.diff().tolist() == [345_600_000_000]
