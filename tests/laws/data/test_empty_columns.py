"""Columns without values, users without known items, and encodings that were cast.

Each of these is handled as documented, or raises."""

import pyarrow as pa
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.data import (
    Schema,
    bucketize,
    collate,
    encode,
    examples,
    fit_encoding,
    hashed,
    identity,
    known_items,
    popularity_negatives,
    uniform_negatives,
)

NAN = float("nan")
NOTHING = {
    "nulls": lambda n: [None] * n, "NaN": lambda n: [NAN] * n, "both": lambda n: [None, NAN][:n],
    "floats of pandas": lambda n: pa.nulls(n, pa.float64()),
    "categories of pandas": lambda n: pa.nulls(n).dictionary_encode(),
}  # fmt: skip
each_nothing = pytest.mark.parametrize("nothing", NOTHING)
ENCODERS = {"vocabulary": None, "identity": identity(5), "hashed": hashed(9), "bucketize": bucketize(edges=(1.0, 2.0))}
of_rows = lambda data: data.take(torch.arange(data.num_rows)).ids.to_lists()


@each_nothing
@pytest.mark.parametrize("encoder", ENCODERS)
def test_lists_that_are_all_missing_are_empty_bags(nothing, encoder):
    """A batch whose lists are all missing has empty bags, whatever the type of the empty column."""
    encoders = {} if ENCODERS[encoder] is None else {"h": ENCODERS[encoder]}
    encoding = fit_encoding({"h": [[1, 2], [], None]}, Schema(multivalued=("h",)), encoders)
    for num_rows in (1, 2):
        column = {"h": NOTHING[nothing](num_rows)}
        for table in (column, pa.table(column)):
            assert of_rows(encode(encoding, table)) == {"h": [[]] * num_rows}
    rows = [{"h": x.as_py() if isinstance(x, pa.Scalar) else x} for x in column["h"]]
    assert collate(encoding)(rows).ids.to_lists() == {"h": [[], []]}


@each_nothing
def test_weights_of_lists_that_are_all_missing(nothing):
    """For examples and for an encoding, the weights of all lists may also be missing."""
    schema = Schema(multivalued=("h",), weights={"h": "w"})
    encoding = fit_encoding({"h": [["a"]], "w": [[0.5]]}, schema)
    column = NOTHING[nothing](2)
    for data in (encode(encoding, {"h": column, "w": column}), examples({"h": column, "w": column}, schema)):
        assert of_rows(data) == {"h": [[], []]} and data.multivalued.weights.shape == (0,)


@each_nothing
@pytest.mark.parametrize("encoder", [e for e in ENCODERS if e != "identity"])
def test_ids_that_are_all_missing_are_unknown(nothing, encoder):
    """A column whose ids are all missing, of whatever type, has the unknown id in every row."""
    encoders = {} if ENCODERS[encoder] is None else {"item": ENCODERS[encoder]}
    encoding = fit_encoding({"item": [1, 2]}, Schema(categorical=("item",)), encoders)
    for table in ({"item": NOTHING[nothing](2)}, pa.table({"item": NOTHING[nothing](2)})):
        assert encode(encoding, table).categorical.tolist() == [[0], [0]]


@each_nothing
def test_ids_that_are_all_missing_where_none_may_be(nothing):
    """`identity` and `examples` have no id for a missing value. The error says so. With `missing` they have an
    id."""
    schema, table = Schema(categorical=("item",)), {"item": NOTHING[nothing](2)}
    encoding = fit_encoding({"item": [1, 2]}, schema, {"item": identity(5)})
    for call in (lambda: encode(encoding, table), lambda: examples(table, schema)):
        with pytest.raises(ValueError, match=r"row 0, column `item` cannot be read(.|\n)*a missing id"):
            call()
    assert examples(table, schema, missing=3).categorical.tolist() == [[3], [3]]


@each_nothing
def test_a_chunk_of_nothing_teaches_what_its_rows_do(nothing):
    """The same rows in any chunks give the same encoding, even if lists or ids are all missing in one chunk."""
    schema = Schema(categorical=("item",), multivalued=("h",))
    rows = {"item": ["a", "b", None, None], "h": [["x"], ["y", "y"], None, None]}
    nothing = NOTHING[nothing](2)
    whole = fit_encoding(rows, schema)
    chunks = [{n: x[:2] for n, x in rows.items()}, {"item": nothing, "h": nothing}]
    for parts in (chunks, chunks[::-1]):
        assert fr.tree.allclose(fit_encoding(parts, schema), whole, rtol=0, atol=0)
    assert whole.ids["h"].counts.tolist() == [0, 1, 2]


def test_numbers_are_no_ids_though_some_are_missing():
    """A column of floats with some missing values raises as ids if it holds one number."""
    encoding = fit_encoding({"item": ["a"], "h": [["a"]]}, Schema(categorical=("item",), multivalued=("h",)))
    for table in ({"item": ["a", "a"], "h": [NAN, 1.0]}, {"item": [None, 1.0], "h": [None, None]}):
        with pytest.raises(TypeError, match=r"column `(h|item)`"):
            encode(encoding, table)


@pytest.mark.parametrize("by", ["uniform", "popularity"])
def test_negatives_of_a_user_beyond_the_bags(by):
    """For a user without a bag, known items are unknown. The call raises, and returns -1 if the call is traced."""
    known = known_items(torch.tensor([0, 1]), torch.tensor([0, 1]))
    counts = torch.arange(1, 6)
    draw = uniform_negatives(5, known=known) if by == "uniform" else popularity_negatives(counts, known=known)
    run, users = lambda k, u, draw: draw(k, (4, 8), user=u), torch.tensor([-1, 2, 7, 1])
    for call in (run, fr.checked(run)):
        with pytest.raises(ValueError, match=r"without a bag of known ids(.|\n)*user -1"):
            call(fr.key(0), users, draw)
        with pytest.raises(ValueError, match=r"without a bag of known ids(.|\n)*user 7"):
            call(fr.key(0), users.clamp(min=0), draw)
    args = fr.key(0), users, draw
    found = make_fx(run, tracing_mode="fake")(*args)(*args)
    assert found[:3].eq(-1).all()
    assert torch.equal(found[3], run(fr.key(0), users.clamp(0, 1), draw)[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_encoding_that_was_cast_is_refused(dtype):
    """State learned from numbers is applied in f64. An encoding that was cast to another dtype raises."""
    schema = Schema(categorical=("age",), dense=("x",))
    rows = {"age": [1.0, 9.0, 5.0], "x": [1000003.0, 1000009.0, 1000006.0]}
    encoding = fit_encoding(rows, schema, {"age": bucketize(num_quantiles=2)})
    assert encode(fr.tree.to(encoding, torch.float64), rows).num_rows == 3
    cast = fr.tree.to(encoding, dtype)
    for state, column in ((cast.dense["x"], "x"), (cast.ids["age"], "age")):
        with pytest.raises(TypeError, match=r"was cast(.|\n)*need  f64"):
            state.apply(rows[column])
    with pytest.raises(TypeError, match=r"column `(age|x)`"):
        encode(cast, rows)


def test_a_label_is_no_weight_of_ids():
    """A schema whose label is a weight of ids raises, because the model sees those weights. The label may be a weight
    of examples."""
    with pytest.raises(ValueError, match=r"`label` is also an input(.|\n)*'y'"):
        Schema(label="y", categorical=("a",), weights={"a": "y"})
    assert Schema(label="y", categorical=("a",), weight="y").labels == ("y",)
