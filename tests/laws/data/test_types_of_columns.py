"""Unusual types of columns: lists of numbers, folders' names, large integers, plain lists."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from sklearn.preprocessing import StandardScaler

import funcrec as fr
from funcrec.data import (
    Schema,
    bucketize,
    chain,
    encode,
    fit_encoding,
    k_core,
    leave_one_out,
    log1p,
    normalize,
    read,
    split_by_group,
    split_by_time,
)

PAIRS = lambda rows: pa.array(rows, pa.list_(pa.float64(), 2))
DENSE = Schema(categorical=("c",), dense=("v",))


def said(kind, call, *fragments):
    with pytest.raises(kind) as error:
        call()
    text = error.value.args[0]
    assert all(f in text for f in (*fragments, "funcrec.data.", "\n  got   ", "\n  need  ")), text


def test_lists_of_numbers_have_a_mean_for_each_position():
    """A column of lists of k numbers is normalized as k columns are, in any chunks, with missing numbers and rows."""
    x = np.random.default_rng(0).normal((3.0, 1e4), (1.0, 300.0), (70_000, 2))
    table = pa.table({"c": ["a"] * len(x), "v": PAIRS(list(x))})
    expected = torch.from_numpy(StandardScaler().fit_transform(x)).float()
    whole = fit_encoding(table, DENSE)
    torch.testing.assert_close(encode(whole, table).dense, expected, rtol=1e-6, atol=1e-6)
    nothing = {"c": ["a"], "v": [None]}
    chunked = fit_encoding([nothing, table[:9], table[9:66_000], table[66_000:]], DENSE)
    assert chunked.dense["v"].mean.equal(whole.dense["v"].mean) and whole.dense["v"].mean.shape == (2,)
    state = chain(log1p(), normalize()).fit(PAIRS([[0.0, None], None, [np.e**2 - 1, 5.0], [None, 5.0]]))
    found = state.apply(PAIRS([[0.0, None], None, [np.e**2 - 1, 6.0]])).to_pylist()
    assert found == [[-1.0, 0.0], None, [pytest.approx(1.0), pytest.approx(np.log(7 / 6))]]


def test_lists_of_another_size_are_refused():
    """An encoding of lists of two numbers accepts neither lists of three nor single numbers, in any chunk."""
    table = {"c": ["a", "b"], "v": PAIRS([[1.0, 2.0], [3.0, 10.0]])}
    three = {"c": ["a"], "v": pa.array([[1.0, 2.0, 3.0]], pa.list_(pa.float64(), 3))}
    for other in (three, {"c": ["a"], "v": [1.0]}, {"c": ["a"], "v": [None]}):
        said(
            TypeError, lambda other=other: encode(fit_encoding(table, DENSE), other), "column `v`", "lists of 2 numbers"
        )
    said(TypeError, lambda: fit_encoding([table, three], DENSE), "column `v`", "lists of 3 numbers")
    said(TypeError, lambda: encode(fit_encoding({"c": ["a"], "v": [1.0]}, DENSE), three), "one number of each row")


def test_a_folder_and_a_column_of_one_name(tmp_path):
    """A column that is also in the folder's name is read where both agree. Where the column and the name differ, an
    error names the file."""
    for a, values in (("7", [7, 7]), ("08", [8])):
        (tmp_path / f"a={a}").mkdir()
        parquet.write_table(pa.table({"a": values, "b": values}), tmp_path / f"a={a}" / "x.parquet")
    assert read(tmp_path).to_pydict() == {"a": [8, 7, 7], "b": [8, 7, 7]}
    parquet.write_table(pa.table({"a": [7, 9], "b": [1, 2]}), tmp_path / "a=7" / "y.parquet")
    said(ValueError, lambda: read(tmp_path), "`y.parquet` has a column `a`", "9 in a row", "a=7")
    assert read(tmp_path, columns=["b"]).num_rows == 5
    # the first file does not have the column
    parquet.write_table(pa.table({"b": [1]}), tmp_path / "a=08" / "a.parquet")
    said(ValueError, lambda: read(tmp_path), "`x.parquet` has columns that folders' names give", "['a']")
    (tmp_path / "t" / "c=1").mkdir(parents=True)
    (tmp_path / "t" / "c=1" / "z.csv").write_text("c,d\n2,3\n")
    said(ValueError, lambda: read(tmp_path / "t"), "`z.csv` has a column `c`", "2 in a row")


def test_a_value_that_the_common_type_does_not_hold(tmp_path):
    """A value that does not fit the files' common type raises an error that says so. The error does not call the file
    damaged."""
    for name, first, second in (("u", [1], pa.array([2**63], pa.uint64())), ("f", [0.5], [2**53 + 1])):
        (tmp_path / name).mkdir()
        parquet.write_table(pa.table({"id": first}), tmp_path / name / "a.parquet")
        parquet.write_table(pa.table({"id": second}), tmp_path / name / "b.parquet")
        said(ValueError, lambda name=name: read(tmp_path / name), "column `id` of `b.parquet`", "does not hold")


def test_lists_are_columns_of_splits():
    """Lists of numbers, dates and text are split like tensors and arrays of the same values."""
    groups, times, halves = ["u", "u", "u", "v", "v"], [3, 1, 2, 5, 6], (0.5, 0.5)
    text, numbers = pa.array(groups), torch.tensor(times)
    days = [datetime.date(2020, 1, t) for t in times]
    equal = lambda found, expected: all(a.equal(b) for a, b in zip(found, expected, strict=True))
    assert equal(split_by_time(times, halves), split_by_time(numbers, halves))
    assert equal(split_by_time(days, halves), split_by_time(numbers, halves))
    assert equal(leave_one_out(groups, tuple(times)), leave_one_out(text, numbers))
    assert k_core(groups, [1, 2, 1, 1, 2], 2).equal(k_core(text, torch.tensor([1, 2, 1, 1, 2]), 2))
    assert equal(split_by_group(groups, halves, key=fr.key(0)), split_by_group(text, halves, key=fr.key(0)))


def test_buckets_of_integers_beyond_f64():
    """Integers above 2**53 are compared exactly with the edges. Quantiles of integers that f64 would round raise."""
    state = bucketize(edges=(2.0**53, 2.0**60)).fit([0])
    x = [2**53 - 1, 2**53, 2**53 + 1, 2**60 - 1, 2**60, None, -(2**60) - 1]
    assert state.apply(x).to_pylist() == [1, 2, 2, 2, 3, 0, 1]
    assert state.apply(pa.array([2**64 - 1, 2**60 - 1], pa.uint64())).to_pylist() == [3, 2]
    said(ValueError, lambda: bucketize(num_quantiles=2).fit([0, 2**60, 2**60 + 1]), "row 2", f"{2**60 + 1}", "f64")
    assert bucketize(num_quantiles=2).fit([2**60, 2**61]).num_ids == 3
    said(ValueError, lambda: bucketize(edges=(2**53 + 1,)), f"{2**53 + 1}", "f64 does not hold")


class Interval(pa.ExtensionType):
    def __init__(self):
        super().__init__(pa.struct([("left", pa.int64())]), "interval")

    def __arrow_ext_serialize__(self):
        return b""


def test_dictionaries_of_another_librarys_types_are_refused():
    """A column of categories that are intervals raises with its name."""
    intervals = pa.ExtensionArray.from_storage(Interval(), pa.array([{"left": 1}]))
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0]), intervals)
    said(TypeError, lambda: fit_encoding({"c": column}, Schema(categorical=("c",))), "column `c`", "struct")
