"""Encodings of whole tables: the same for any chunks, after saving and loading, and for unseen rows."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.data import Schema, bucketize, chain, configs, encode, fit_encoding, hashed, identity, log1p, vocabulary
from funcrec.testing import assert_trees_close

SCHEMA = Schema(
    label="click", dense=("price", "clicks"), categorical=("user", "item", "age"), multivalued=("history", "tags"),
    weights={"tags": "tag_weights"}, weight="importance", time="when",
)  # fmt: skip
ENCODERS = {"age": bucketize(edges=(18, 40)), "clicks": chain(log1p()), "tags": hashed(50), "price": None}
SHARED = {"history": "item"}
ITEMS = ["hat", "shoe", "sock", None, "日本"]
same = lambda a, b: assert_trees_close(a, b, rtol=0, atol=0)


def table_of(seed, num_rows=30):
    draw = np.random.default_rng(seed)
    lists = [draw.integers(0, 5, n).tolist() for n in draw.integers(0, 4, num_rows)]
    maybe = lambda x: [None if hide else v for v, hide in zip(x, draw.random(num_rows) < 0.2)]
    return pa.table({
        "click": draw.integers(0, 2, num_rows), "price": draw.random(num_rows),
        "clicks": maybe(draw.integers(0, 99, num_rows).tolist()),
        "user": maybe(draw.integers(-9, 9, num_rows).tolist()),
        "item": pa.array([ITEMS[i] for i in draw.integers(0, 5, num_rows)]).dictionary_encode(),
        "age": pa.array(maybe(draw.integers(0, 90, num_rows).tolist()), pa.int8()),
        "history": pa.array([[ITEMS[i] for i in bag] for bag in lists], pa.list_(pa.string())), "tags": lists,
        "tag_weights": [[0.5] * len(bag) for bag in lists], "importance": draw.random(num_rows),
        "when": pa.array(draw.integers(0, 10**9, num_rows), pa.timestamp("s")),
    })  # fmt: skip


TABLE = table_of(0)
FIT = lambda source: fit_encoding(
    source, SCHEMA, ENCODERS | {"clicks": chain(log1p(), fr.data.normalize())}, share=SHARED
)
ENCODING = FIT(TABLE)


@given(size=st.integers(1, 31))
def test_an_encoding_does_not_depend_on_chunks(size):
    """A table, its record batches, a reader and an iterable of tables give the same encoding, bit for bit."""
    same(ENCODING, FIT(TABLE.to_batches(max_chunksize=size)))
    same(ENCODING, FIT(pa.RecordBatchReader.from_batches(TABLE.schema, TABLE.to_batches(max_chunksize=size))))
    same(ENCODING, FIT(TABLE.slice(i, size) for i in range(0, 30, size)))


def test_files_are_learned_from_as_tables_are(tmp_path):
    """A folder of files gives the encoding of its rows. Errors name file and row. A path can be encoded."""
    from pyarrow import parquet

    for i in range(3):
        parquet.write_table(TABLE.slice(10 * i, 10), tmp_path / f"part-{i}.parquet", row_group_size=4)
    same(ENCODING, FIT(tmp_path))
    same(encode(ENCODING, tmp_path), encode(ENCODING, TABLE))
    parquet.write_table(
        TABLE.slice(0, 3).set_column(1, "price", pa.array([1.0, -2.0, 3.0])), tmp_path / "part-3.parquet"
    )
    with pytest.raises(ValueError, match=r"part-3.parquet`, row 1, column `price`"):
        fit_encoding(tmp_path, SCHEMA, ENCODERS | {"price": log1p()})


def test_rows_are_encoded_one_by_one():
    """Encoding a table in parts gives the parts of the encoded table."""
    new = table_of(1)
    whole = encode(ENCODING, new).take(torch.arange(30))
    for rows in (torch.arange(7, 19), torch.tensor([29])):
        part = encode(ENCODING, new.slice(int(rows[0]), len(rows)))
        assert_trees_close(
            part.take(torch.arange(len(rows))), fr.data.take(encode(ENCODING, new), rows), rtol=0, atol=0
        )
    assert whole.ids.keys == SCHEMA.keys and whole.dense.shape == (30, 2)


def test_columns_of_one_table_share_its_ids():
    """An item has one id in both columns that share a table. Both columns teach the item. A table has one config."""
    ids = encode(ENCODING, TABLE).take(torch.arange(30)).ids.to_lists()
    number = {None: 0, "hat": 1, "shoe": 2, "sock": 3, "日本": 4}
    assert ids["item"] == [[number[x]] for x in TABLE["item"].to_pylist()]
    assert ids["history"] == [[number[x] for x in bag] for bag in TABLE["history"].to_pylist()]
    tables, features = configs(ENCODING, {"item": 4, "user": 2}, pooling={"history": "mean"})
    shapes = {t.name: t.shape for t in tables}
    assert list(shapes) == ["user", "item", "age", "tags"]
    assert shapes["item"] == (5, 4) and shapes["age"] == (4, 16) and shapes["tags"] == (50, 16)
    found = {f.name: (f.table, f.pooling, f.weighted) for f in features}
    assert found["history"] == ("item", "mean", False) and found["tags"] == ("tags", "sum", True)


def test_an_encoding_is_learned_from_the_training_rows_only():
    """An encoding does not change when it encodes other rows. The unseen values of these rows are unknown, id 0."""
    encoding = fit_encoding({"item": ["a", "b"]}, Schema(categorical=("item",)))
    assert encode(encoding, {"item": ["b", "c", None]}).categorical.tolist() == [[2], [0], [0]]
    assert encode(encoding, {"item": pa.nulls(2)}).categorical.tolist() == [[0], [0]]
    assert encoding.num_ids == {"item": 3}


def test_an_encoding_goes_through_a_file(tmp_path):
    """An encoding that was saved next to the parameters and loaded gives the same examples from new data."""
    found = fr.load(fr.save(tmp_path / "model", {"encoding": ENCODING, "params": fr.Params({}, {})}))["encoding"]
    same(found, ENCODING)
    assert found.schema == SCHEMA and found.num_ids == ENCODING.num_ids
    new = table_of(2)
    same(encode(found, new), encode(ENCODING, new))


def test_prediction_needs_no_label():
    """A table without labels is encoded for prediction, without label, weight and time."""
    new = TABLE.drop_columns(["click", "importance", "when"])
    a, b = encode(ENCODING, new).take(torch.arange(30)), encode(ENCODING, TABLE).take(torch.arange(30))
    assert a.label is None and a.weight is None
    same((a.ids, a.dense), (b.ids, b.dense))


def test_what_is_encoded_is_what_a_model_reads():
    """Every id of an encoded table is inside its table. A model can read the batch."""
    data, (tables, features) = encode(ENCODING, TABLE), configs(ENCODING, 4)
    batch = data.take(torch.arange(30))
    fr.validate(batch, features, tables)
    model = fr.models.deepfm(tables, features, num_dense=2, sizes=(8,), dropout=0.0)
    params = model.init(fr.key(0))
    assert model.apply(params, batch).shape == (30,)


@pytest.mark.parametrize("kind", ["dense", "ids"])
def test_columns_stay_where_that_is_said(kind):
    """Encoder None leaves numbers unchanged, and `identity` leaves ids unchanged."""
    table = {"x": [3, 1, 2]}
    if kind == "dense":
        schema = Schema(categorical=("i",), dense=("x",))
        encoding = fit_encoding({"i": [0, 0, 0], **table}, schema, {"x": None})
        assert encode(encoding, {"i": [0, 1, 0], **table}).dense.tolist() == [[3.0], [1.0], [2.0]]
    else:
        encoding = fit_encoding(table, Schema(categorical=("x",)), {"x": identity(4)})
        assert encode(encoding, table).categorical.tolist() == [[3], [1], [2]] and encoding.num_ids == {"x": 4}


def test_a_vocabulary_has_an_order_of_its_own():
    """The kept values of a vocabulary and their ids do not depend on the order of rows, even among equally frequent
    values."""
    schema, few = Schema(categorical=("x",)), {"x": vocabulary(max_size=2)}
    values = ["b", "c", "a", "c"]
    same(fit_encoding({"x": values}, schema, few), fit_encoding({"x": values[::-1]}, schema, few))
    assert fit_encoding({"x": values}, schema, few).ids["x"].decode(torch.tensor([1, 2])).to_pylist() == ["a", "c"]


PAIRS = pa.table({
    "y": [1, 0, 1], "x": [0.5, 1.5, 2.0], "z": [1.0, 2.0, 4.0], "user": ["u", "v", None], "item": [3, 4, 3],
    "tags": [["a"], [], ["b", "a"]], "w": [[0.5], [], [1.0, 2.0]],
})  # fmt: skip
LEARNED = fit_encoding(PAIRS, Schema("y", ("x", "z"), ("user", "item"), ("tags",), {"tags": "w"}))


@pytest.mark.parametrize("own", [["item"], ["tags", "x"], ["z", "item", "tags"]], ids=str)
def test_some_columns_are_encoded_alone(own):
    """encode(columns=...) of a table with only these columns has the ids and numbers that all columns give. Weights of
    ids come along, and the label may be absent."""
    rows, of_ids = torch.arange(3), [n for n in ("user", "item", "tags") if n in own]
    whole = encode(LEARNED, PAIRS).take(rows)
    part = encode(LEARNED, PAIRS.select([*own, *(["w"] if "tags" in own else [])]), columns=own).take(rows)
    assert part.ids.keys == tuple(of_ids) and part.label is None
    for key in of_ids:
        assert part.ids[key].to_lists() == whole.ids[key].to_lists()
    if "tags" in own:
        assert part.ids["tags"].weights[:3].tolist() == [0.5, 1.0, 2.0]
    numbers = [i for i, n in enumerate(("x", "z")) if n in own]
    assert (part.dense is None) if not numbers else torch.equal(part.dense, whole.dense[:, numbers])
    assert torch.equal(encode(LEARNED, PAIRS, columns=own).take(rows).label, whole.label)


def test_columns_that_cannot_be_encoded_alone():
    """A column that the encoding lacks, and columns without ids, raise. For a table that lacks columns, the error
    names the columns that could be encoded alone."""
    for columns, words in ((["hat"], "'hat'"), (["x"], "no column of ids"), ([], "no column of ids")):
        with pytest.raises((ValueError, KeyError), match=f"(?s)funcrec.data.encode.*{words}"):
            encode(LEARNED, PAIRS, columns=columns)
    with pytest.raises(ValueError, match=r"(?s)lacks columns.*\['user'.*columns=\['item', 'x'\] encodes these alone"):
        encode(LEARNED, PAIRS.select(["item", "x"]))
