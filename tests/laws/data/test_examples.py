"""Tables become examples. Every value in a batch is the table's value, or an error names its column and row."""

import datetime
import decimal
import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

import funcrec as fr
from funcrec.data import Examples, Schema, batches, examples, take

I64 = st.integers(-(2**63), 2**63 - 1)
SMALL = st.integers(-9, 99)
ONE = {  # how a column of one id may be stored, and which values the column can hold
    "int64": (pa.int64(), I64), "int8": (pa.int8(), st.integers(-128, 127)),
    "uint64": (pa.uint64(), st.integers(0, 2**63 - 1)),
    "bool": (pa.bool_(), st.booleans()), "dictionary": (pa.dictionary(pa.int8(), pa.int64()), I64),
    "run ends": (pa.run_end_encoded(pa.int32(), pa.int64()), SMALL),
}  # fmt: skip
MANY = {
    "list": (pa.list_(pa.int64()), st.none() | st.lists(I64, max_size=3)),
    "large list": (pa.large_list(pa.int32()), st.lists(SMALL, max_size=3)),
    "fixed list": (pa.list_(pa.uint8(), 2), st.none() | st.lists(st.integers(0, 255), min_size=2, max_size=2)),
    "list view": (pa.list_view(pa.int64()), st.none() | st.lists(I64, max_size=3)),
    "list of dictionary": (pa.list_(pa.dictionary(pa.int8(), pa.int64())), st.lists(SMALL, max_size=3)),
}
NUMBERS = {
    "float": (pa.float64(), st.floats(-1e6, 1e6, width=32)), "half": (pa.float16(), st.floats(-9, 9, width=16)),
    "int": (pa.int16(), SMALL), "bool": (pa.bool_(), st.booleans()),
    "decimal": (pa.decimal128(9, 2), st.integers(-999, 999).map(lambda n: decimal.Decimal(n) / 4)),
    "vector": (pa.list_(pa.float32(), 3), st.lists(st.floats(-9, 9, width=32), min_size=3, max_size=3)),
}  # fmt: skip


def column(draw, n, kinds, make):
    kind, values = kinds[draw(st.sampled_from(sorted(kinds)))]
    rows = draw(st.lists(values, min_size=n, max_size=n))
    cut, whole = draw(st.integers(0, n)), make(rows, kind)
    # the offsets of slices do not begin at 0
    return rows, pa.chunked_array([whole[:cut], whole[cut:]], whole.type)


def array(rows, kind):
    if pa.types.is_run_end_encoded(kind):
        return pa.compute.run_end_encode(pa.array(rows, kind.value_type), run_end_type=kind.run_end_type)
    if pa.types.is_list(kind) and pa.types.is_dictionary(kind.value_type):
        plain = pa.array(rows, pa.list_(kind.value_type.value_type))
        return pa.ListArray.from_arrays(plain.offsets, plain.values.dictionary_encode())
    return pa.array(rows, kind)


@st.composite
def tables(draw):
    """Return random (schema, pyarrow's table, the table's rows as Python's values)."""
    n = draw(st.integers(1, 8))
    rows, columns = {}, {}
    for name, kinds in (("one", ONE), ("two", ONE), ("many", MANY), ("more", MANY), ("x", NUMBERS), ("y", NUMBERS)):
        rows[name], columns[name] = column(draw, n, kinds, array)
    rows["label"] = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=n, max_size=n))
    rows["weight"] = draw(st.lists(st.sampled_from([0.0, 2.0]), min_size=n, max_size=n))
    rows["scales"] = [None if ids is None else [0.5 * i for i in range(len(ids))] for ids in rows["many"]]
    rows["time"] = draw(st.lists(I64, min_size=n, max_size=n))
    columns |= {name: pa.array(rows[name]) for name in ("label", "weight", "time")}
    columns["scales"] = pa.array(rows["scales"], pa.list_(pa.float64()))
    weights = {"many": "scales"} if draw(st.booleans()) else {}
    singles = draw(st.sampled_from([(), ("one",), ("two", "one")]))
    lists = draw(st.sampled_from([("many",), ("more", "many")])) if weights or not singles else ()
    schema = Schema(
        label=draw(st.sampled_from([None, "label", ("label", "weight")])), label_kind="number", dense=("x", "y"),
        categorical=singles, multivalued=lists, weights=weights, weight="weight", time="time",
    )  # fmt: skip
    return schema, pa.table({name: columns[name] for name in draw(st.permutations(sorted(columns)))}), rows


def listed(x):
    return x if isinstance(x, list) else [] if x is None else [x]


@settings(max_examples=30)
@given(made=tables(), data=st.data())
def test_examples_are_the_tables_values(made, data):
    """A batch of rows holds the values of the table in these rows, for any types, chunks and order of columns."""
    schema, table, rows = made
    found = examples(table, schema)
    assert isinstance(found, Examples) and found.num_rows == table.num_rows
    at = data.draw(st.lists(st.integers(0, table.num_rows - 1), max_size=6))
    batch = take(found, torch.tensor(at, dtype=torch.int64))
    assert batch.ids.keys == schema.keys
    lists = {name: [listed(rows[name][r]) for r in at] for name in schema.keys}
    assert batch.ids.to_lists() == lists and batch.ids.capacity == sum(len(bag) for x in lists.values() for bag in x)
    dense = [[float(v) for name in ("x", "y") for v in listed(rows[name][r])] for r in at]
    assert batch.dense.tolist() == np.array(dense, np.float32).reshape(len(at), batch.dense.shape[1]).tolist()
    label = {None: None, "label": [rows["label"][r] for r in at]}
    both = [[rows["label"][r], rows["weight"][r]] for r in at]
    assert (None if batch.label is None else batch.label.tolist()) == label.get(schema.label, both)
    assert found.weight.tolist() == rows["weight"] and found.time.tolist() == rows["time"]
    if schema.weights:
        many = [[0.5 * i for i in range(len(listed(rows["many"][r])))] for r in at]
        assert batch.ids["many"].unpad().weights.tolist() == [w for bag in many for w in bag]
        assert batch.ids.unweighted == found.take(torch.tensor([0])).ids.unweighted
        assert {k: batch.ids[k].weights is None for k in schema.keys} == {k: k != "many" for k in schema.keys}


@settings(max_examples=3)
@given(made=tables())
def test_rows_inside_jit_are_the_same_rows(made):
    """In a traced call, which reads no value, rows give the same bags, labels and numbers. A row that is out of range
    gives empty bags, id -1, and NaN for numbers."""
    schema, table, _ = made
    found = examples(table, schema)
    rows = torch.tensor([0, found.num_rows - 1, 0])
    here = found.take(rows)
    structure = tree_flatten(here)[1]
    traced = make_fx(lambda r: tree_flatten(found.take(r))[0])(rows)
    there = tree_unflatten(traced(rows), structure)
    assert there.ids.to_lists() == here.ids.to_lists() and torch.equal(there.dense, here.dense)
    odd = tree_unflatten(traced(torch.tensor([found.num_rows, 0, -1])), structure)
    for name in schema.categorical:
        assert [odd.ids.to_lists()[name][i] for i in (0, 2)] == [[-1], [-1]]
    for name in schema.multivalued:
        assert [odd.ids.to_lists()[name][i] for i in (0, 2)] == [[], []]
    assert odd.dense[[0, 2]].isnan().all() and torch.equal(odd.dense[1], here.dense[0])


def test_examples_are_a_tree_that_is_saved(tmp_path):
    """Examples can be pickled and checkpointed, and `batches` reads them."""
    lists = [[1, 2], [], [3]]
    table = {"click": [1, 0, 1], "price": [0.5, 2, 1], "item": [7, 8, 7], "genres": lists, "w": lists}
    schema = Schema("click", dense=["price"], categorical=["item"], multivalued=["genres"], weights={"genres": "w"})
    data = examples(table, schema)
    fr.save(tmp_path / "data", data)
    for same in (fr.load(tmp_path / "data"), pickle.loads(pickle.dumps(data))):
        assert same.schema == schema and hash(same.schema) == hash(schema)
        read = [b.ids.to_lists() for _, b in batches(same, None, 2)]
        assert read == [{"item": [[7], [8]], "genres": [[1, 2], []]}, {"item": [[7]], "genres": [[3]]}]


def test_lists_that_are_all_missing_are_empty_bags():
    """A column whose lists are all missing, or that has no rows, has no list type. The bags of the column are empty."""
    schema = Schema(categorical=("a",), multivalued=("g",), weights={"g": "w"})
    data = examples({"a": [1, 2], "g": [None, None], "w": [None, None]}, schema)
    assert data.take(torch.tensor([0, 1])).ids.to_lists() == {"a": [[1], [2]], "g": [[], []]}
    assert examples({"a": [], "g": [], "w": []}, schema).num_rows == 0


def test_times_have_one_unit():
    """Timestamps of any unit and zone, and dates, become microseconds since 1970."""
    noon = datetime.datetime(2020, 1, 2, 12, tzinfo=datetime.UTC)
    us = int(noon.timestamp()) * 10**6
    schema = Schema(categorical=("a",), time="t")
    for unit in ("s", "ms", "us", "ns"):
        for zone in (None, "UTC", "Asia/Tokyo"):
            when = pa.array([noon], pa.timestamp(unit, "UTC")).cast(pa.timestamp(unit, zone))
            assert examples({"a": [1], "t": when}, schema).time.tolist() == [us]
    day = pa.array([noon.date()])
    assert examples({"a": [1], "t": day}, schema).time.tolist() == [us - 12 * 3600 * 10**6]


def test_single_ids_have_weights():
    """A column of single ids may have weights, next to bags with weights and columns without weights."""
    table = {"a": [1, 2], "b": [3, 4], "g": [[5, 6], []], "wa": [0.5, 2.0], "wg": [[0.25, 4.0], []]}
    for weights in ({"a": "wa"}, {"a": "wa", "g": "wg"}):
        data = examples(table, Schema(categorical=("b", "a"), multivalued=("g",), weights=weights))
        ids = data.take(torch.tensor([1, 0])).ids
        assert ids["a"].unpad().weights.tolist() == [2.0, 0.5] and ids["b"].weights is None
        assert (ids["g"].unpad().weights.tolist() == [0.25, 4.0]) if "g" in weights else ids["g"].weights is None
        assert ids.to_lists() == {"b": [[4], [3]], "a": [[2], [1]], "g": [[], [5, 6]]}


def test_labels_are_of_their_kind():
    """Each label is checked by its kind. Classes are integers, binary labels lie in [0, 1], and numbers are
    unchanged."""
    table = {"a": [1, 2], "click": [1, 0], "stars": [4, 2], "time": [3.5, -1.0]}
    schema = Schema(label=("click", "stars", "time"), categorical=("a",), label_kind=("binary", "class", "number"))
    assert examples(table, schema).label.tolist() == [[1, 4, 3.5], [0, 2, -1]]
    with pytest.raises(ValueError, match=r"row 0, column `time`.*\n.*label 3\.5"):
        examples(table, Schema(label=("stars", "time"), categorical=("a",), label_kind=("number", "binary")))
