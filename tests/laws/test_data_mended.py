"""Tables that were read as something else: lists of numbers, folders' names, large integers, plain lists."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.preprocessing import StandardScaler

from funcrec.data import Schema, chain, encode, fit_encoding, log1p, normalize

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
    """What learned from lists of two numbers takes neither lists of three nor single numbers, in any chunk."""
    table = {"c": ["a", "b"], "v": PAIRS([[1.0, 2.0], [3.0, 10.0]])}
    three = {"c": ["a"], "v": pa.array([[1.0, 2.0, 3.0]], pa.list_(pa.float64(), 3))}
    for other in (three, {"c": ["a"], "v": [1.0]}, {"c": ["a"], "v": [None]}):
        said(
            TypeError, lambda other=other: encode(fit_encoding(table, DENSE), other), "column `v`", "lists of 2 numbers"
        )
    said(TypeError, lambda: fit_encoding([table, three], DENSE), "column `v`", "lists of 3 numbers")
    said(TypeError, lambda: encode(fit_encoding({"c": ["a"], "v": [1.0]}, DENSE), three), "one number of each row")
