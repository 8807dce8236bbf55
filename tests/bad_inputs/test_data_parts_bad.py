"""Bad calls of the functions that make examples from a user's columns: splits, encoders, loaders, negatives."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from programs.refused import assert_refused

import funcrec as fr
from funcrec.data import (
    Schema,
    batches,
    bucketize,
    chain,
    collate,
    configs,
    encode,
    fit_encoding,
    hashed,
    identity,
    k_core,
    known_items,
    leave_one_out,
    loader,
    log1p,
    log_q,
    normalize,
    popularity_negatives,
    random_rows,
    random_split,
    split_by_group,
    split_by_time,
    uniform_negatives,
    vocabulary,
)

KEY, bags = fr.key(0), fr.JaggedTensor.from_lists
ROWS = torch.tensor([1, 1, 2, 2])
HALVES = (0.5, 0.5)
TRACKED = torch.tensor([1.0, 2.0], requires_grad=True)
SPLITS = [
    ("shares of 0.9", lambda: random_split(9, (0.8, 0.1), key=KEY), ValueError, "do not sum to 1"),
    ("no shares", lambda: random_split(9, (), key=KEY), ValueError, "`fractions` is empty"),
    ("share 0", lambda: random_split(9, (1.0, 0.0), key=KEY), ValueError, "`fractions[1]` is out of range"),
    ("share NaN", lambda: split_by_time(ROWS, (float("nan"), 0.5)), ValueError, "`fractions[0]` is out of range"),
    ("empty train part", lambda: random_split(3, (0.1, 0.9), key=KEY), ValueError, "3 rows: parts of 0, 3"),
    ("no rows", lambda: random_split(0, HALVES, key=KEY), ValueError, "a row or more in each part"),
    ("one time", lambda: split_by_time(torch.ones(4), HALVES), ValueError, "4 rows, 1 different times"),
    ("three parts of two times", lambda: split_by_time(ROWS, (0.4, 0.3, 0.3)), ValueError, "2 different times"),
    ("NaN for a time", lambda: split_by_time(torch.tensor([1.0, torch.nan]), HALVES), ValueError, "none in row 1"),
    ("no time", lambda: split_by_time(pa.array([3, None]), HALVES), ValueError, "`time` misses a value"),
    ("NaT", lambda: split_by_time(np.array(["NaT"], "datetime64[s]"), HALVES), ValueError, "none in row 0"),
    ("text for times", lambda: split_by_time(pa.array(["b", "a"]), HALVES), TypeError, "strptime"),
    ("list of mixed times", lambda: split_by_time([3, "a"], HALVES), TypeError, "`time` is not a column"),
    ("empty list", lambda: split_by_time([], HALVES), ValueError, "`time` has no rows"),
    ("matrix of times", lambda: split_by_time(torch.ones(2, 2), HALVES), ValueError, "`time` is not a vector"),
    ("complex times", lambda: split_by_time(torch.ones(2) * 1j, HALVES), TypeError, "values of another kind"),
    ("table for a column", lambda: split_by_time(pa.table({"t": [1]}), HALVES), TypeError, "`time`"),
    ("no values", lambda: split_by_time(torch.ones(2, device="meta"), HALVES), ValueError, "values that can be read"),
    ("tracked times", lambda: split_by_time(TRACKED, HALVES), ValueError, "that is differentiated"),
    ("empty column", lambda: split_by_time(torch.ones(0), HALVES), ValueError, "`time` has no rows"),
    ("one group", lambda: split_by_group(torch.ones(4), HALVES, key=KEY), ValueError, "1 groups: parts of"),
    ("no group", lambda: split_by_group(pa.array(["a", None]), HALVES, key=KEY), ValueError, "`group` misses a value"),
    ("lists for groups", lambda: split_by_group(pa.array([[1], [2]]), HALVES, key=KEY), TypeError, "another kind"),
    ("all-null groups", lambda: split_by_group(pa.nulls(3), HALVES, key=KEY), ValueError, "none in row 0"),
    ("one row each", lambda: leave_one_out(torch.arange(4), ROWS), ValueError, "of at most 1 rows"),
    ("two rows each", lambda: leave_one_out(ROWS, ROWS), ValueError, "of at most 2 rows"),
    ("lengths", lambda: leave_one_out(ROWS, torch.arange(5)), ValueError, "`time` has another number of rows"),
    ("three held out", lambda: leave_one_out(ROWS, ROWS, held_out=3), ValueError, "`held_out` is unknown"),
    ("core of 0", lambda: k_core(ROWS, ROWS, 0), ValueError, "`k` is out of range"),
    ("core of three", lambda: k_core(ROWS, ROWS, (1, 2, 3)), ValueError, "`k` has another length"),
    (
        "core of other lengths",
        lambda: k_core(ROWS, torch.arange(3), 1),
        ValueError,
        "`item` has another number of rows",
    ),
]


TABLE = {"click": [0, 1], "item": ["a", "b"], "price": [1.0, 2.0], "tags": [["x"], []]}
SCHEMA = Schema(label="click", dense=("price",), categorical=("item",), multivalued=("tags",))
ENCODING = fit_encoding(TABLE, SCHEMA)
ITEM = Schema(categorical=("item",))
fit = lambda encoders, schema=SCHEMA, **more: fit_encoding(TABLE, schema, encoders, **more)
ENCODERS = [
    ("nothing is kept", lambda: vocabulary(min_count=0), ValueError, "`min_count`"),
    ("size 0", lambda: vocabulary(max_size=0), ValueError, "`max_size`"),
    ("one row to hash to", lambda: hashed(1), ValueError, "need  an int in [2, 2³¹)"),
    ("huge hash", lambda: hashed(2**31), ValueError, "need  an int in [2, 2³¹)"),
    ("no ids", lambda: identity(0), ValueError, "`num_embeddings`"),
    ("neither edges nor quantiles", lambda: bucketize(), ValueError, "neither"),
    ("edges and quantiles", lambda: bucketize((1.0,), num_quantiles=2), ValueError, "both"),
    ("falling edges", lambda: bucketize((2.0, 1.0)), ValueError, "`edges` do not ascend"),
    ("NaN for an edge", lambda: bucketize((float("nan"),)), ValueError, "`edges` do not ascend"),
    ("no edges", lambda: bucketize(()), ValueError, "`edges` are none"),
    ("one quantile", lambda: bucketize(num_quantiles=1), ValueError, "`num_quantiles` is too small"),
    ("empty chain", lambda: chain(), ValueError, "`encoders` are none"),
    ("two that learn", lambda: chain(normalize(), vocabulary()), ValueError, "two of `encoders` learn"),
    ("floats for ids", lambda: vocabulary().fit([1.5, 2.0]), TypeError, "Int64"),
    ("times for ids", lambda: vocabulary().fit(np.array([1], "datetime64[s]")), TypeError, "timestamp"),
    ("mixed column", lambda: vocabulary().fit(["a", 1]), TypeError, "`column` cannot be read"),
    ("mixed chunks", lambda: vocabulary().fit(pa.array(x) for x in (["a"], [1])), TypeError, "one type for all chunks"),
    ("mixed to hash", lambda: hashed(9).fit(pa.array(x) for x in (["a"], [1])), TypeError, "one type for all chunks"),
    ("a number for a column", lambda: vocabulary().fit(3), TypeError, "`column` is not a column"),
    ("lists of lists", lambda: vocabulary().fit([[[1]]]), TypeError, "list_flatten"),
    ("integers for text", lambda: vocabulary().fit(["a"]).apply([1]), TypeError, "as the vocabulary was learned from"),
    ("text for integers", lambda: vocabulary().fit([1]).apply(["a"]), TypeError, "as the vocabulary was learned from"),
    ("integers for hashed text", lambda: hashed(9).fit(["a"]).apply([1]), TypeError, "text, as was learned"),
    ("id -1 as it is", lambda: identity(3).fit([]).apply([0, -1]), ValueError, "row 1, column `column`"),
    ("id 3 of 3", lambda: identity(3).fit([]).apply([[0], [], [1, 3]]), ValueError, "row 2, column `column`"),
    ("a missing id", lambda: identity(3).fit([]).apply([0, None]), ValueError, "a missing id"),
    ("text for numbers", lambda: normalize().fit(["1"]), TypeError, 'column.cast("float64")'),
    ("numbers too large", lambda: normalize().fit([1e155, 2e155]), ValueError, "squares of the numbers are infinite"),
    ("no numbers", lambda: normalize().fit([None]), ValueError, "no numbers to learn from"),
    ("all-null column", lambda: bucketize(num_quantiles=2).fit(pa.nulls(3)), ValueError, "no numbers to learn from"),
    ("tracked numbers", lambda: normalize().fit(TRACKED), ValueError, "that is differentiated"),
    ("numbers in a transform", lambda: torch.func.grad(normalize().fit)(torch.ones(2)), ValueError, "`column`"),
    ("infinity", lambda: normalize().fit([1.0, float("inf")]), ValueError, "row 1, column `column`"),
    ("log of -1", lambda: log1p().fit([]).apply([0, -1]), ValueError, "row 1, column `column`"),
    ("id 9", lambda: ENCODING.ids["item"].decode(torch.tensor([9])), ValueError, "0 <= id < 3"),
    ("no table", lambda: fit_encoding(3, SCHEMA), TypeError, "not a table"),
    ("column absent", lambda: fit_encoding({"item": [1]}, SCHEMA), ValueError, "['tags', 'price']"),
    ("no rows", lambda: fit_encoding({"item": []}, ITEM), ValueError, "`source` has no rows"),
    ("a generator that was read", lambda: fit_encoding(iter(()), ITEM), ValueError, "`source` has no rows"),
    ("encoder of no column", lambda: fit({"price2": None}), ValueError, "to a column that is not encoded"),
    ("encoder of the label", lambda: fit({"click": vocabulary()}), ValueError, "to a column that is not encoded"),
    ("no encoder for ids", lambda: fit({"item": None}), TypeError, "identity(num_embeddings)"),
    ("ids for a dense column", lambda: fit({"price": vocabulary()}), ValueError, "makes ids, of a dense column"),
    ("numbers for ids", lambda: fit({"item": normalize()}), ValueError, "makes numbers, of a column of ids"),
    ("a shared column's encoder", lambda: fit({"tags": vocabulary()}, share={"tags": "item"}), ValueError, "'item'"),
    ("table of no column", lambda: fit({}, share={"tags": "genre"}), ValueError, "columns that are not ids"),
    ("a table sent on", lambda: fit({}, share={"tags": "item", "item": "tags"}), ValueError, "that shares another"),
    ("a string of numbers", lambda: fit({"item": identity(3)}), TypeError, "column `item`"),
    ("time as a number too", lambda: fit({}, replace(SCHEMA, time="price")), ValueError, "['price']"),
    ("ids that are numbers too", lambda: fit({}, replace(SCHEMA, dense=("item",))), ValueError, "['item']"),
    ("no numbers of a column", lambda: fit_encoding(TABLE | {"price": [None, None]}, SCHEMA), ValueError, "no numbers"),
    ("encode half", lambda: encode(ENCODING, {"item": ["a"], "price": [1.0]}), ValueError, "['tags']"),
    ("encode other text", lambda: encode(ENCODING, TABLE | {"item": [1, 2]}), TypeError, "column `item`"),
    ("encode a label 5", lambda: encode(ENCODING, TABLE | {"click": [1, 5]}), ValueError, "row 1, column `click`"),
    ("dim of no table", lambda: configs(ENCODING, {"user": 4}), ValueError, "`embedding_dim` names no table"),
    ("dim 0", lambda: configs(ENCODING, 0), ValueError, "`embedding_dim`"),
    ("pooling median", lambda: configs(ENCODING, pooling="median"), ValueError, "`pooling`"),
]
DATA = random_rows(KEY, {"item": 9}, num_rows=5)
NO_BATCH = SimpleNamespace(num_rows=5, take=lambda rows: rows)
LOADERS = [
    (
        "two ways with the last",
        lambda: batches(DATA, None, 2, drop_last=True, pad_last=True),
        ValueError,
        "one of them",
    ),
    ("padding of no batch", lambda: next(batches(NO_BATCH, None, 2, pad_last=True)), TypeError, "pad_last=False"),
    ("loader of a list", lambda: loader([1], None, 2), TypeError, "`data` has no rows"),
    ("loader of row -1", lambda: loader(DATA, torch.tensor([-1]), 2), ValueError, "row -1"),
    ("loader of row 5", lambda: loader(DATA, torch.tensor([5]), 2), ValueError, "row 5"),
    ("loader of no full batch", lambda: loader(DATA, None, 6, drop_last=True), ValueError, "do not make a batch"),
    ("workers of -1", lambda: loader(DATA, None, 2, workers=-1), ValueError, "`workers` is out of range"),
    ("depth 0", lambda: loader(DATA, None, 2, depth=0), ValueError, "`depth` is out of range"),
    ("no device", lambda: loader(DATA, None, 2, device="gpu9"), ValueError, "`device` is not a device"),
    ("position behind the end", lambda: loader(DATA, None, 2)((0, 3)), ValueError, "past the end"),
    ("collate alone", lambda: collate([1, 2]), TypeError, "`source` does not make batches"),
    ("collate of examples as rows", lambda: collate(DATA)([{"item": 3}]), TypeError, "the items are not rows"),
    ("collate of row 5", lambda: collate(DATA)([1, 5]), ValueError, "row 5"),
    ("collate of rows as examples", lambda: collate(ITEM)([1, 2]), TypeError, "the items are not examples"),
    ("collate of other columns", lambda: collate(ITEM)([{"item": 1}, {"user": 1}]), TypeError, "the same columns"),
    ("collate of text", lambda: collate(ITEM)([{"item": "a"}]), TypeError, "column `item`"),
]
USER = torch.tensor([0, 1])
KNOWN = known_items(USER, torch.tensor([0, 0]))
DRAW = uniform_negatives(1, known=KNOWN)
CUT = fr.JaggedTensor(torch.tensor([1]), torch.tensor([0, 2]))
NEGATIVES = [
    ("no ids to draw", lambda: uniform_negatives(0), ValueError, "`num_ids`"),
    ("first behind the last", lambda: uniform_negatives(3, first=3), ValueError, "`first` leaves no id"),
    ("known id 3 of 3", lambda: uniform_negatives(3, known=bags([[1, 3]])), ValueError, "an id that does not exist"),
    ("known twice", lambda: uniform_negatives(3, known=bags([[0], [1, 1]])), ValueError, "does not ascend"),
    ("known behind the end", lambda: uniform_negatives(3, known=CUT), ValueError, "`known.offsets` ends beyond"),
    ("known floats", lambda: uniform_negatives(3, known=bags([[0.5]])), TypeError, "`known.values`"),
    ("no user", lambda: DRAW(KEY, (2, 3)), ValueError, "`user` is missing"),
    ("user of nothing known", lambda: uniform_negatives(3)(KEY, (2,), USER), ValueError, "no known ids"),
    ("other users", lambda: DRAW(KEY, (3, 2), USER), ValueError, "`shape` does not match `user`"),
    ("user 2 of 2", lambda: DRAW(KEY, (2,), USER + 1), ValueError, "user 2"),
    ("user -1", lambda: DRAW(KEY, (2,), USER - 1), ValueError, "user -1"),
    ("a user who knows all", lambda: DRAW(KEY, (2,), USER), ValueError, "who knows all ids"),
    ("counts of -1", lambda: popularity_negatives(torch.tensor([1, -1])), ValueError, "a value that is not a count"),
    ("counts of NaN", lambda: popularity_negatives(torch.tensor([1, torch.nan])), ValueError, "that is not a count"),
    ("tracked counts", lambda: popularity_negatives(TRACKED), TypeError, "which ids are drawn has no derivative"),
    ("no counts", lambda: popularity_negatives(torch.zeros(0)), ValueError, "`counts` are none"),
    ("nothing counted", lambda: popularity_negatives(torch.zeros(3)), ValueError, "`counts` are all 0"),
    ("matrix of counts", lambda: log_q(torch.ones(2, 2)), ValueError, "`counts` is not a tensor of these"),
    ("exponent -1", lambda: log_q(torch.ones(2), exponent=-1.0), ValueError, "`exponent`"),
    ("known of -1", lambda: known_items(USER, torch.tensor([0, -1])), ValueError, "`item` has a negative id"),
    ("known of other lengths", lambda: known_items(USER, torch.arange(3)), ValueError, "`item` does not match `user`"),
    ("no bag for a user", lambda: known_items(USER, USER, num_users=1), ValueError, "`num_users` has no place"),
]
ALL = [*SPLITS, *ENCODERS, *LOADERS, *NEGATIVES]


@pytest.mark.parametrize("name, call, kind, fragment", ALL, ids=[r[0] for r in ALL])
def test_bad_call_of_parts(name, call, kind, fragment):
    """A bad call fails at the call and names the argument or the column, in four parts."""
    assert_refused(call, kind, fragment, "funcrec.data.", parts=("got", "need", "try"))
