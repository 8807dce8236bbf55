"""KeyedTensor: a dict of matrices in one matrix."""

import pytest
import torch
from hypothesis import given

import funcrec as fr
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs


@given(frs.keyed_tensors())
def test_dict_round_trip(x):
    """from_dict(x.to_dict()) == x."""
    assert_trees_close(fr.KeyedTensor.from_dict(x.to_dict()), x)


@given(frs.keyed_tensors())
def test_it_reads_like_a_dict(x):
    """kt[k], items, iteration, len and `in` equal those of to_dict()."""
    plain = x.to_dict()
    assert list(x) == list(plain) == [k for k, _ in x.items()] and len(x) == len(plain)
    for k in x:
        assert_trees_close(x[k], plain[k])
        assert k in x and x[k].shape == (x.values.shape[0], dict(zip(x.keys, x.dims))[k])
    assert "no such key" not in x


@given(frs.keyed_tensors(keys=("a",), num_rows=2), frs.keyed_tensors(keys=("b", "c"), num_rows=2))
def test_concat_has_the_keys_of_all(x, y):
    """concat([x, y]) is {**x, **y}, for parts with different keys."""
    x, y = (fr.KeyedTensor(k.values.float(), k.keys, k.dims) for k in (x, y))
    assert_trees_close(fr.KeyedTensor.concat([x, y]).to_dict(), {**x.to_dict(), **y.to_dict()})


def test_concat_loses_no_key():
    """concat of parts that share a key raises. No key is dropped."""
    x = fr.KeyedTensor.from_dict({"a": torch.zeros(1, 1)})
    with pytest.raises(ValueError):
        fr.KeyedTensor.concat([x, x])


@given(frs.keyed_tensors(keys=("a", "b"), num_rows=3, dtypes=(torch.float32,)))
def test_regroup_gathers_columns(x):
    """regroup joins the features of each group by columns. A key may be in several groups."""
    parts = [fr.KeyedTensor(x["a"], ("a",), x.dims[:1]), fr.KeyedTensor(x["b"], ("b",), x.dims[1:])]
    got = fr.regroup(parts, [["b", "a"], ["a"], ["b", "b"]])
    want = [torch.cat([x[k] for k in group], 1) for group in ("ba", "a", "bb")]
    assert_trees_close(got, want)


def test_stack_lays_features_out():
    """stack()[:, f] is feature f."""
    x = fr.KeyedTensor.from_dict({"a": torch.ones(2, 3), "b": torch.zeros(2, 3)})
    assert_trees_close(x.stack(), torch.stack([x["a"], x["b"]], 1))


def test_an_outer_dimension_is_kept():
    """Features [P, B, D] of an ensemble are split along the last dimension."""
    x = fr.KeyedTensor.from_dict({"a": torch.ones(5, 2, 3), "b": torch.zeros(5, 2, 1)})
    assert x["b"].shape == (5, 2, 1) and x.to_dict()["a"].shape == (5, 2, 3)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((("a",), (1.0,)), r"dims` are not widths.\n  got   \(1.0,\)"),
        (((3,), (1,)), r"keys` are not names.\n  got   \(3,\)"),
        ((["a"], (1,)), r"keys` are not names.\n  got   \['a'\]"),
    ],
)
def test_fields_made_by_hand_are_refused_where_they_are_read(fields, text):
    """Keys that are not a tuple of names, and dims that are not a tuple of integers, raise in what takes the value."""
    with pytest.raises(TypeError, match=text):
        fr.regroup([fr.KeyedTensor(torch.zeros(1, 1), *fields)], [["a"]])
