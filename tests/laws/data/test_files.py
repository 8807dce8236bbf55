"""Files of click logs from any writer. Every value is read as the file holds it, or an error names the value's
place."""

import gzip
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcrec as fr
from funcrec.data import batches, criteo_npy, criteo_parquet, criteo_tsv, take

NAN = float("nan")
IDS = st.integers(-(2**63), 2**63 - 1)
KINDS = {  # how a column of ids may be stored, and which ids the column can hold
    "int64": (pa.int64(), IDS),
    "int32": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "uint8": (pa.uint8(), st.integers(0, 255)),
    "uint32": (pa.uint32(), st.integers(0, 2**32 - 1)),
    "uint64": (pa.uint64(), st.integers(0, 2**63 - 1)),
    "list": (pa.list_(pa.int64()), st.lists(IDS, max_size=3)),
    "large_list": (pa.large_list(pa.int32()), st.lists(st.integers(-9, 9), max_size=3)),
    "fixed list": (pa.list_(pa.int64(), 2), st.none() | st.lists(IDS, min_size=2, max_size=2)),
    "list of uint64": (pa.list_(pa.uint64()), st.none() | st.lists(st.integers(0, 2**63 - 1), max_size=3)),
}


@st.composite
def tables(draw):
    """Return random (pyarrow's table, the table's rows as Python's values): labels, dense, and ids of two drawn kinds,
    with columns in a drawn order."""
    n, kinds = draw(st.integers(1, 12)), draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=2))
    of = lambda elements: draw(st.lists(elements, min_size=n, max_size=n))
    rows = {"label": of(st.sampled_from([0.0, 0.25, 1.0])), "int_0": of(st.none() | st.integers(-9, 99))}
    columns = {"label": pa.array(rows["label"]), "int_0": pa.array(rows["int_0"], pa.int16())}
    for i, kind in enumerate(kinds):
        rows[f"cat_{i}"] = of(KINDS[kind][1])
        columns[f"cat_{i}"] = pa.array(rows[f"cat_{i}"], KINDS[kind][0])
    order = draw(st.permutations(sorted(columns)))
    return pa.table({name: columns[name] for name in order}), rows


def test_booleans_are_numbers(tmp_path):
    """A dense column of booleans is read as 0 and 1, with missing values as 0."""
    dense = pa.array([True, None, False])
    parquet.write_table(pa.table({"label": [1, 0, 1], "int_0": dense, "cat_0": [1, 2, 3]}), tmp_path / "x.parquet")
    (batch,) = criteo_parquet(tmp_path / "x.parquet", 3)
    assert batch.dense.tolist() == [[1.0], [0.0], [0.0]]


@settings(max_examples=60)
@given(made=tables(), data=st.data())
def test_parquet_is_read_as_written(tmp_path_factory, made, data):
    """For all types, column orders, encodings, compressions, pages and row groups, batches hold the values of the
    file."""
    table, rows = made
    path = tmp_path_factory.mktemp("p") / "x.parquet"
    parquet.write_table(
        table, path, compression=data.draw(st.sampled_from(["none", "snappy", "gzip", "zstd"])),
        use_dictionary=data.draw(st.booleans()), row_group_size=data.draw(st.integers(1, 12)),
        data_page_size=data.draw(st.sampled_from([64, 200, 10**6])), write_page_checksum=data.draw(st.booleans()),
        data_page_version=data.draw(st.sampled_from(["1.0", "2.0"])),
    )  # fmt: skip
    found = list(criteo_parquet(path, data.draw(st.integers(1, 14))))
    keys = [n for n in table.column_names if n.startswith("cat_")]
    assert [y for b in found for y in b.label.tolist()] == rows["label"]
    assert [x for b in found for x in b.dense[:, 0].tolist()] == [float(x or 0) for x in rows["int_0"]]
    for key in keys:
        bags = [bag for b in found for bag in b.ids.to_lists()[key]]
        assert bags == [[] if x is None else x if isinstance(x, list) else [x] for x in rows[key]]


def write(path, columns, **options):
    parquet.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)


DICTIONARY = pa.array(["a", "a", "b"]).dictionary_encode()
TWICE = pa.Table.from_arrays([pa.array([1.0]), pa.array([1]), pa.array([2])], names=["label", "cat_0", "cat_0"])
BAD_PARQUET = {  # columns, options of the reader, parts of the error
    "uint64 beyond i64": ({"label": [0, 1], "cat_0": pa.array([1, 2**63 + 1], pa.uint64())}, {},
        ("row 1", "9223372036854775809")),
    "uint64 in a list": ({"label": [0, 1], "cat_0": pa.array([[1], [3, 2**64 - 1]], pa.list_(pa.uint64()))}, {},
        ("row 1", "cat_0")),
    "NaN label": ({"label": [0.0, NAN], "cat_0": [1, 2]}, {}, ("row 1", "`label`", "nan")),
    "label 5": ({"label": [0, 5], "cat_0": [1, 2]}, {}, ("row 1", "label 5", "[0, 1]")),
    "label -1": ({"label": [-1, 0], "cat_0": [1, 2]}, {}, ("row 0", "label -1")),
    "infinite label": ({"label": [0.0, float("inf")], "cat_0": [1, 2]}, {}, ("row 1", "inf")),
    "NaN dense": ({"label": [0, 1], "int_0": [0.5, NAN], "cat_0": [1, 2]}, {}, ("row 1", "`int_0`", "nan")),
    "dense beyond f32": ({"label": [0, 1], "int_0": [1e39, 0.0], "cat_0": [1, 2]}, {}, ("row 0", "`int_0`", "inf")),
    "dictionary": ({"label": [0, 1, 1], "cat_0": DICTIONARY}, {}, ("`cat_0` does not hold ids", "dictionary")),
    "floats for ids": ({"label": [0], "cat_0": [1.0]}, {}, ("`cat_0` does not hold ids",)),
    "a column twice": (TWICE, {}, ("twice", "cat_0")),
    "a name twice": ({"label": [0], "cat_0": [1]}, {"sparse": ["cat_0", "cat_0"]}, ("twice", "cat_0")),
    "names in a string": ({"label": [0], "c": [1]}, {"sparse": "c"}, ("`sparse` is not a sequence", "each a string")),
    "no rows": ({"label": pa.array([], pa.int64()), "cat_0": pa.array([], pa.int64())}, {},
        ("does not make a batch", "0 rows")),
    "no full batch": ({"label": [0], "cat_0": [1]}, {"drop_last": True}, ("does not make a batch", "1 rows")),
    "skip beyond the file": ({"label": [0], "cat_0": [1]}, {"skip": 2},
        ("does not make a batch", "at least 2 batches")),
    "id beyond the table": ({"label": [0, 1], "cat_0": [[], [3, 7]]}, {"vocabularies": {"cat_0": 7}},
        ("row 1", "id 7", "0 <= id < 7")),
    "id below the table": ({"label": [0, 1], "cat_0": [0, -1]}, {"vocabularies": {"cat_0": 7}},
        ("row 1", "id -1", "hash")),
    "vocabulary of nothing": ({"label": [0], "cat_0": [1]}, {"vocabularies": {"cat_1": 7}}, ("not read", "cat_1")),
    "missing in words": ({"label": [0], "cat_0": [1]}, {"missing": "x"}, ("`missing` is not an integer", "missing=0")),
    "bucket in words": ({"label": [0], "cat_0": [1]}, {"bucket": "no"},
        ("`bucket` is not a truth value", "True or False")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PARQUET)
def test_what_parquet_cannot_give_is_named(tmp_path, name):
    """A value that no batch can hold, or that has no meaning, raises an error with file, row and column."""
    columns, options, fragments = BAD_PARQUET[name]
    write(tmp_path / "x.parquet", columns)
    with pytest.raises((ValueError, TypeError)) as error:
        list(criteo_parquet(tmp_path / "x.parquet", 4, **options))
    text = str(error.value)
    assert all(f in text for f in (*fragments, "funcrec.data.criteo_parquet", "  got   ", "  need  ")), text


def test_no_row_is_lost(tmp_path):
    """If pyarrow returns fewer rows of a column than the file holds, the file raises, because the file's columns would
    not match."""
    columns = {
        "label": pa.array([0.0]),
        "int_0": pa.array([None], pa.int16()),
        "cat_0": pa.array([None], pa.list_(pa.int64(), 2)),
    }
    # pyarrow 26 returns no row of cat_0
    write(tmp_path / "x.parquet", columns, data_page_size=1)
    try:
        (batch,) = criteo_parquet(tmp_path / "x.parquet", 1)
    except ValueError as error:
        assert "0 rows of 1" in str(error)
    else:
        assert batch.ids.to_lists() == {"cat_0": [[]]}


def test_damaged_pages_are_found(tmp_path):
    """In a file with checksums, a flipped byte never changes values. The batches are the same, or an error is
    raised."""
    path, n = tmp_path / "x.parquet", 300
    rng = np.random.default_rng(0)
    columns = {"label": rng.integers(0, 2, n), "int_0": rng.integers(0, 99, n), "cat_0": rng.integers(0, 2**40, n)}
    write(path, columns, compression="none", use_dictionary=False, write_page_checksum=True)
    whole, good = path.read_bytes(), list(criteo_parquet(path, 64))
    found = 0
    for at in range(8, len(whole), max(len(whole) // 120, 1)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            read = list(criteo_parquet(path, 64))
        except (ValueError, TypeError) as error:
            assert "funcrec.data.criteo_parquet" in str(error) and "  got   " in str(error)
            found += 1
        else:
            assert all(
                torch.equal(a.label, b.label) and torch.equal(a.dense, b.dense) for a, b in zip(read, good, strict=True)
            )
            assert all(a.ids.to_lists() == b.ids.to_lists() for a, b in zip(read, good, strict=True))
    assert found > 100


# -- arrays -------------------------------------------------------------------------------------------------------


def arrays(folder, dense, sparse, label, **options):
    names = [folder / f"{n}.npy" for n in ("dense", "sparse", "label")]
    for path, x in zip(names, (dense, sparse, label), strict=True):
        np.save(path, x)
    return criteo_npy(*names, **options)


@pytest.mark.parametrize(
    "label", [np.array([0, 1, 1, 0], np.int8), np.array([[0.0], [1], [1], [0]]), np.array([False, True, True, False])]
)
@pytest.mark.parametrize("order", "CF")
def test_npy_is_read_as_written(tmp_path, label, order):
    """Arrays of any number dtype, in C or Fortran order, give their values. Ids keep their dtype."""
    for dense, ids in itertools.product((np.float16, np.float64, np.int32, ">f4"), (np.int32, np.int64)):
        x = np.array([[1, 2], [3, 4], [5, 6], [7, 8]])
        data = arrays(tmp_path, np.asarray(x, dense, order=order), np.asarray(x, ids, order=order), label)
        batch = take(data, torch.tensor([2, 0]))
        assert batch.dense.tolist() == [[5, 6], [1, 2]] and batch.label.tolist() == [1, 0]
        assert batch.ids.to_lists() == {"cat_0": [[5], [1]], "cat_1": [[6], [2]]}
        assert batch.ids.values.dtype == torch.from_numpy(np.zeros(1, ids)).dtype


ONE = np.ones((2, 1), np.float32)
TWO = np.array([[1], [2]])
BAD_NPY = {
    "NaN label": ((ONE, TWO, np.array([0, NAN])), {}, ("row 1", "`label`", "nan")),
    "label 5": ((ONE, TWO, np.array([0, 5])), {}, ("row 1", "label 5")),
    "NaN dense": ((np.array([[1.0], [NAN]]), TWO, np.zeros(2)), {}, ("row 1", "`dense[0]`", "nan")),
    "dense beyond f32": ((np.array([[1.0], [1e39]]), TWO, np.zeros(2)), {}, ("row 1", "`dense[0]`", "inf")),
    "id beyond the table": ((ONE, TWO, np.zeros(2)), {"vocabularies": {"cat_0": 2}}, ("row 1", "id 2", "0 <= id < 2")),
    "uint64 ids": ((ONE, TWO.astype(np.uint64), np.zeros(2)), {}, ("`sparse` does not hold ids",)),
    "float ids": ((ONE, ONE, np.zeros(2)), {}, ("`sparse` does not hold ids",)),
    "keys in a string": ((ONE, TWO, np.zeros(2)), {"keys": "a"}, ("`keys` is not a sequence",)),
    "complex label": ((ONE, TWO, np.zeros(2, complex)), {}, ("`label` does not match",)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_NPY)
def test_what_npy_cannot_give_is_named(tmp_path, name):
    """Invalid labels, dense values that f32 cannot hold and ids outside their table raise an error with row and
    array."""
    x, options, fragments = BAD_NPY[name]
    with pytest.raises((ValueError, TypeError)) as error:
        list(batches(arrays(tmp_path, *x, **options), None, 2))
    assert all(f in str(error.value) for f in (*fragments, "  got   ", "  need  ")), str(error.value)


# -- text ---------------------------------------------------------------------------------------------------------

LINE = "\t".join(["1", *["5"] * 13, *["0000ffff"] * 26])


def test_tsv_is_read_as_written(tmp_path):
    """Plain or gzipped text, with or without a final line end, and with Windows' line ends, gives the same batch."""
    for i, text in enumerate([LINE, LINE + "\n", LINE + "\r\n"]):
        (tmp_path / f"{i}.txt").write_bytes(text.encode())
        (tmp_path / f"{i}.gz").write_bytes(gzip.compress(text.encode()))
        for end in ("txt", "gz"):
            (batch,) = criteo_tsv(tmp_path / f"{i}.{end}", 3, transform=None)
            assert set(batch.ids.values.tolist()) == {0x10000} and batch.dense.tolist() == [[5.0] * 13]


def test_what_tsv_cannot_give_is_named(tmp_path):
    """Ids outside the table, too few lines for a batch, an integer of more than 64 bits and a cut file each raise."""
    path = tmp_path / "x.txt"
    path.write_text(f"{LINE}\n{LINE}\n")
    sizes = {"cat_3": 0x10000}
    for options, fragments in [
        ({"vocabularies": sizes}, ("line 1", "cat_3", "id 65536", "hash")),
        ({"drop_last": True}, ("does not make a batch",)),
        ({"skip": 3}, ("does not make a batch",)),
        ({"drop_last": "no"}, ("`drop_last` is not a truth value",)),
    ]:
        with pytest.raises((ValueError, TypeError)) as error:
            list(criteo_tsv(path, 4, **options))
        assert all(f in str(error.value) for f in (*fragments, "  got   ", "  need  ")), str(error.value)
    assert len(list(criteo_tsv(path, 4, vocabularies={"cat_3": 0x10001}))) == 1
    path.write_text(LINE.replace("\t5", "\t" + "9" * 20, 1))
    with pytest.raises(ValueError, match="line 1"):
        list(criteo_tsv(path, 4))
    whole = gzip.compress((LINE + "\n").encode() * 50)
    (tmp_path / "x.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"x\.gz"):
        list(criteo_tsv(tmp_path / "x.gz", 4))


def test_raw_ids_are_named(tmp_path):
    """Raw Criteo ids for a table without a hash raise, in the reader with vocabularies and in `validate`. Hashed ids
    pass."""
    path = tmp_path / "x.txt"
    path.write_text(f"{LINE}\n")
    table = fr.TableConfig("t", 1000, 4)
    raw = [fr.FeatureConfig(f"cat_{i}", table="t") for i in range(26)]
    hashed = [fr.FeatureConfig(f"cat_{i}", table="t", hash=fr.modulo()) for i in range(26)]
    with pytest.raises(ValueError, match="id 65536"):
        list(criteo_tsv(path, 1, vocabularies=fr.data.vocabularies_of([table], raw)))
    (batch,) = criteo_tsv(path, 1)
    with pytest.raises(fr.CheckError, match=r"id 65536(.|\n)*hash=fr\.modulo"):
        fr.validate(batch, raw, [table])
    assert fr.validate(batch, hashed, [table]) is batch
