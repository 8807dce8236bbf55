"""Readers of Criteo's formats on generated files."""

import gzip
import math
import string

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch

import funcrec as fr
from funcrec.data import batches, criteo_npy, criteo_parquet, criteo_tsv, transform_dense
from funcrec.data.datasets._criteo import hexadecimal
from funcrec.testing import assert_trees_close

NUM = 57


def lines():
    """Return rows (label, 13 integers or None, 26 numbers or None) and the text of the rows."""
    rng = np.random.default_rng(0)
    maybe = lambda x: None if rng.random() < 0.3 else int(x)
    rows = [
        (
            int(rng.integers(2)),
            [maybe(x) for x in rng.integers(-3, 900, 13)],
            [maybe(x) for x in rng.integers(2**32, size=26)],
        )
        for _ in range(NUM)
    ]
    show = lambda x, form: "" if x is None else format(x, form)
    text = [
        "\t".join([str(y), *(show(i, "d") for i in ints), *(show(c, "08x") for c in cats)]) for y, ints, cats in rows
    ]
    return rows, "\n".join(text) + "\n"


ROWS, TEXT = lines()


@pytest.fixture
def tsv(tmp_path):
    path = tmp_path / "day_0.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("size", [1, 10, NUM, 100])
@pytest.mark.parametrize("block", [2000, 8 << 20])
def test_tsv_is_the_file(tsv, size, block, monkeypatch):
    """Every field of every line comes once and in order, for any batch and block size."""
    monkeypatch.setattr("funcrec.data.readers._files.BLOCK_BYTES", block)
    found = list(criteo_tsv(tsv, size, transform=None))
    assert [b.label.shape[0] for b in found[:-1]] == [size] * (len(found) - 1)
    labels = [y for b in found for y in b.label.tolist()]
    dense = [x for b in found for x in b.dense.tolist()]
    bags = [b.ids.to_lists() for b in found]
    assert labels == [y for y, _, _ in ROWS] and dense == [[float(i or 0) for i in ints] for _, ints, _ in ROWS]
    for k in range(26):
        ids = [bag for b in bags for bag in b[f"cat_{k}"]]
        assert ids == [[0 if cats[k] is None else cats[k] + 1] for _, _, cats in ROWS]


def test_tsv_options(tsv, tmp_path):
    """skip and drop_last leave out batches. Keys have the caller's names. A .gz file is read. Hex digits may be
    capitals."""
    whole = list(criteo_tsv(tsv, 10))
    assert_trees_close(list(criteo_tsv(tsv, 10, skip=3)), whole[3:], rtol=0, atol=0)
    assert len(list(criteo_tsv(tsv, 10, drop_last=True))) == 5 and len(whole) == 6
    assert list(criteo_tsv(tsv, 10, skip=6)) == []
    names = tuple(map(str, range(26)))
    assert next(criteo_tsv(tsv, 10, keys=names)).ids.keys == names
    packed = tmp_path / "day_0.txt.gz"
    packed.write_bytes(gzip.compress(TEXT.upper().encode()))
    assert_trees_close(list(criteo_tsv(packed, 10)), whole, rtol=0, atol=0)


def test_several_files_are_one(tsv, tmp_path):
    """A folder of days is read as one file after the other. Batches may span two files. Errors name the file."""
    (tmp_path / "days").mkdir()
    for i in range(2):
        (tmp_path / "days" / f"day_{i}").write_text(TEXT)
    (tmp_path / "twice.txt").write_text(TEXT * 2)
    found = list(criteo_tsv(tmp_path / "days", 10))
    assert_trees_close(found, list(criteo_tsv(tmp_path / "twice.txt", 10)), rtol=0, atol=0)
    (tmp_path / "days" / "day_1").write_text(TEXT + "2" + TEXT[1:])
    with pytest.raises(ValueError, match=f"day_1`, line {NUM + 1}, column `label`"):
        list(criteo_tsv(tmp_path / "days", 10))


def test_tsv_nothing_missing(tmp_path):
    """A block without a missing category is cut into batches like any other."""
    path = tmp_path / "full.txt"
    path.write_text("".join("\t".join(["0", *["1"] * 13, *[format(i, "08x")] * 26]) + "\n" for i in range(20)))
    ids = [b.ids["cat_7"].unpad().values.tolist() for b in criteo_tsv(path, 8)]
    assert ids == [list(range(1, 9)), list(range(9, 17)), list(range(17, 21))]


@pytest.mark.parametrize("place", range(8))
def test_hexadecimal_digits_are_those_of_python(place):
    """hexadecimal accepts eight characters exactly where Python does, with the same number. The law covers every byte
    at every position."""
    text = np.frombuffer(b"09afAF5c" * 256, np.uint8).reshape(256, 8).copy()
    text[:, place] = np.arange(256)
    numbers, is_hex = hexadecimal(text.reshape(-1).view("<u8"))
    for row, number, known in zip(text, numbers.tolist(), is_hex.tolist(), strict=True):
        characters = bytes(row).decode("latin-1")
        assert known == all(c in string.hexdigits for c in characters)
        assert not known or number == int(characters, 16)


def test_tsv_static_shapes(tsv):
    """All full batches have the same shapes."""
    assert len({(b.ids.capacity, b.ids.offsets.shape, b.dense.shape) for b in criteo_tsv(tsv, 10, drop_last=True)}) == 1


def test_transforms():
    """log1 is log(x + 1), with negative numbers read as 0. log3 is log(x + 3), with numbers below -2 read as -2."""
    x = torch.tensor([-5.0, -2.0, 0.0, 7.0])
    logs = lambda *numbers: torch.tensor([math.log(n) for n in numbers])
    torch.testing.assert_close(transform_dense(x, "log1"), logs(1, 1, 1, 8))
    torch.testing.assert_close(transform_dense(x, "log3"), logs(1, 1, 3, 10))
    assert transform_dense(x, None) is x


@pytest.fixture
def npy(tmp_path):
    rng = np.random.default_rng(1)
    arrays = {
        "dense": rng.normal(size=(NUM, 13)).astype(np.float32),
        "sparse": rng.integers(0, 99, (NUM, 26)).astype(np.int32),
        "labels": rng.integers(0, 2, (NUM, 1)).astype(np.int32),
    }
    paths = {name: tmp_path / f"day_0_{name}.npy" for name in arrays}
    for name, x in arrays.items():
        np.save(paths[name], x)
    return arrays, list(paths.values())


def test_npy_is_the_arrays(npy):
    """Shuffled batches of the arrays contain the rows of the arrays."""
    arrays, paths = npy
    data = criteo_npy(*paths)
    rows = {tuple(d): (s, y) for d, s, y in zip(*(x.tolist() for x in arrays.values()), strict=True)}
    seen = 0
    for _, b in batches(data, None, 10, key=fr.key(0)):
        ids = torch.stack([b.ids[k].values[: len(b.label)] for k in b.ids.keys], 1)
        assert ids.dtype == torch.int32 and b.ids.keys[3] == "cat_3"
        for d, s, y in zip(b.dense.tolist(), ids.tolist(), b.label.tolist(), strict=True):
            assert rows[tuple(d)] == (s, [y])
            seen += 1
    assert seen == NUM == data.num_rows


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(2)
    lists = [None if i == 4 else rng.integers(0, 50, rng.integers(0, 4)).tolist() for i in range(NUM)]
    columns = {
        "cat_0": rng.integers(0, 9, NUM).astype(np.int32),
        "cat_1": pyarrow.array(lists, pyarrow.list_(pyarrow.int32())),
        "cat_2": pyarrow.array([None if i == 2 else i for i in range(NUM)], pyarrow.int64()),
        "int_0": pyarrow.array([None if i == 2 else i / 2 for i in range(NUM)], pyarrow.float64()),
        "int_1": rng.integers(0, 9, NUM),
        "label": rng.integers(0, 2, NUM).astype(np.int8),
    }
    path = tmp_path / "day_0.parquet"
    parquet.write_table(pyarrow.table(columns), path, row_group_size=11)
    return columns, path


@pytest.mark.parametrize("size", [1, 10, 100])
def test_parquet_is_the_file(table, size):
    """Every row comes once and in order. Lists are bags, a missing list is an empty bag, and a missing id becomes
    `missing`."""
    columns, path = table
    found = list(criteo_parquet(path, size, missing=77))
    bags = {k: [bag for b in found for bag in b.ids.to_lists()[k]] for k in ("cat_0", "cat_1", "cat_2")}
    assert bags["cat_0"] == [[i] for i in columns["cat_0"].tolist()]
    assert bags["cat_1"] == [x or [] for x in columns["cat_1"].to_pylist()]
    assert bags["cat_2"] == [[77 if x is None else x] for x in columns["cat_2"].to_pylist()]
    dense = torch.cat([b.dense for b in found])
    assert dense[:, 0].tolist() == [x or 0.0 for x in columns["int_0"].to_pylist()] and dense.shape == (NUM, 2)
    assert [y for b in found for y in b.label.tolist()] == columns["label"].tolist()


def test_parquet_options(table):
    """Columns can be named, skip and drop_last leave out batches, and bucket pads."""
    _, path = table
    whole = list(criteo_parquet(path, 10, sparse=["cat_1"], dense=[]))
    assert whole[0].dense is None and whole[0].ids.keys == ("cat_1",) and len(whole) == 6
    part = list(criteo_parquet(path, 10, sparse=["cat_1"], dense=[], skip=2, drop_last=True))
    assert_trees_close(part, whole[2:5], rtol=0, atol=0)
    padded = list(criteo_parquet(path, 10, sparse=["cat_1"], dense=[], bucket=True))
    assert [b.ids.capacity for b in padded] == [fr.pad_to_bucket(b.ids).capacity for b in whole]


def test_fixed_size_lists(tmp_path):
    """Lists of a fixed size are also bags."""
    ids = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(range(6)), 3)
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"label": [0.0, 1.0], "cat_0": ids}), path)
    assert next(criteo_parquet(path, 2)).ids.to_lists() == {"cat_0": [[0, 1, 2], [3, 4, 5]]}
