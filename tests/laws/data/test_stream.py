"""Files and tables are read whole and in batches. Every row comes once, in an order that can resume anywhere."""

import functools
import gzip
import itertools
import math
import operator
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcrec as fr
from funcrec.data import (
    Position,
    Schema,
    Text,
    batches,
    encode,
    examples,
    fit_encoding,
    read,
    stream,
    stream_loader,
)  # fmt: skip
from funcrec.testing import assert_trees_close

WORDS = st.text("ab ,\"'é\t\n", max_size=4)
KINDS = {
    "i": (pa.int64(), st.none() | st.integers(-(2**63), 2**63 - 1)), "f": (pa.float64(), st.none() | st.floats(-9, 9)),
    "s": (pa.string(), st.none() | WORDS), "b": (pa.bool_(), st.none() | st.booleans()),
    "l": (pa.list_(pa.int64()), st.none() | st.lists(st.integers(-9, 9), max_size=3)),
    "d": (pa.dictionary(pa.int32(), pa.string()), st.none() | st.sampled_from(["x", "yy"])),
}  # fmt: skip


@st.composite
def tables(draw, kinds="ifsbld", least=1):
    """Return a random table of several kinds of columns, with nulls, and a number for each row."""
    n = draw(st.integers(least, 40))
    of = lambda k: pa.array(draw(st.lists(KINDS[k][1], min_size=n, max_size=n)), KINDS[k][0])
    return pa.table({"n": pa.array(range(n), pa.int64()), **{k: of(k) for k in kinds}})


def written(folder, draw, table):
    """Write the table as Parquet: one file, several files, or hive partitions of the table's rows. The row groups have
    a drawn size."""
    n, k = table.num_rows, draw(st.integers(1, 3))
    cuts = sorted(draw(st.lists(st.integers(0, n), min_size=k - 1, max_size=k - 1)))
    pieces = [table.slice(a, b - a) for a, b in itertools.pairwise([0, *cuts, n])]
    hive = draw(st.booleans())
    for i, piece in enumerate(pieces):
        path = folder / (f"day={i}/name=p%20{i}" if hive else ".") / f"part-{i}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(
            piece, path, row_group_size=draw(st.integers(1, 20)), write_page_checksum=True,
            compression=draw(st.sampled_from(["none", "snappy", "zstd"])),
            data_page_size=draw(st.sampled_from([64, 9**9])),
        )  # fmt: skip
    (folder / "_SUCCESS").write_text("")
    return (pieces, hive)


@settings(max_examples=25)
@given(table=tables(), data=st.data())
def test_parquet_is_read_as_written(tmp_path_factory, table, data):
    """The files of a folder, hive partitions included, give their rows in the order of the file names. This holds for
    whole reads, for batches, and for all or some columns."""
    folder = tmp_path_factory.mktemp("p")
    pieces, hive = written(folder, data.draw, table)
    found = read(folder)
    assert found.select(table.column_names).to_pydict() == table.to_pydict()
    if hive:
        assert found["day"].to_pylist() == [i for i, p in enumerate(pieces) for _ in range(p.num_rows)]
        assert found["name"].to_pylist() == [f"p {i}" for i, p in enumerate(pieces) for _ in range(p.num_rows)]
        alone = read([*folder.glob("day=0"), *folder.glob("day=1/*/*")])
        assert set(alone.column_names) == set(found.column_names) and set(alone["day"].to_pylist()) <= {0, 1}
    columns = data.draw(st.permutations(found.column_names))[: data.draw(st.integers(1, 4))]
    size = data.draw(st.integers(1, 50))
    got = list(stream(folder, size, columns=columns))
    assert all(b.num_rows == size for b in got[:-1]) and all(b.schema.names == list(columns) for b in got)
    assert pa.Table.from_batches(got).to_pydict() == found.select(columns).to_pydict()


@pytest.mark.parametrize("end", [".parquet", ".csv"])
def test_partitions_alone_may_be_read(tmp_path, end):
    """A column that stands in the folders' names is read without any column of the files, one value for each row."""
    for day, rows in ((1, 3), (2, 2)):
        (tmp_path / f"day={day}").mkdir()
        table, path = pa.table({"x": list(range(rows))}), tmp_path / f"day={day}" / f"part{end}"
        parquet.write_table(table, path) if end == ".parquet" else pa_csv.write_csv(table, path)
    assert read(tmp_path, columns=["day"]).to_pydict() == {"day": [1, 1, 1, 2, 2]}
    got = pa.Table.from_batches(list(stream(tmp_path, 2, columns=["day"])))
    assert got.to_pydict() == {"day": [1, 1, 1, 2, 2]}
    with pytest.raises(ValueError, match="`columns` are none"):
        list(stream(tmp_path, 2, columns=[]))


@settings(max_examples=25)
@given(table=tables("ifsb"), data=st.data())
def test_text_is_read_as_written(tmp_path_factory, table, data):
    """Text with any delimiter, quoted or not, gzipped or not, gives its values. An empty field is missing. A quoted
    empty string is a string."""
    folder, packed = tmp_path_factory.mktemp("t"), data.draw(st.booleans())
    delimiter, end = data.draw(st.sampled_from([(",", ".csv"), ("\t", ".tsv"), ("|", ".txt")]))
    for i, at in enumerate((0, table.num_rows // 2)):
        piece = table.slice(at) if i else table.slice(0, table.num_rows // 2)
        path = folder / f"part-{i}{end}"
        pa_csv.write_csv(piece, path, pa_csv.WriteOptions(delimiter=delimiter, quoting_style="needed"))
        if packed:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    types = {"i": "int64", "f": "float64", "s": "string", "b": "bool"}
    form = Text(delimiter, types=types)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("funcrec.data.readers._files.BLOCK_BYTES", data.draw(st.sampled_from([200, 8 << 20])))
        assert read(folder, format=form).to_pydict() == table.to_pydict()
        got = list(stream(folder, 7, format=form))
        assert pa.Table.from_batches(got).to_pydict() == table.to_pydict()


class Capsule:
    """A table with the interface that pandas and polars export."""

    def __init__(self, table):
        self.table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


class Struct:
    def __init__(self, batch):
        self.batch = batch

    def __arrow_c_array__(self, requested_schema=None):
        return self.batch.__arrow_c_array__(requested_schema)


@settings(max_examples=10)
@given(table=tables())
def test_what_is_in_memory_is_read(table):
    """Tables, batches, objects with Arrow's capsules, and dicts of lists, arrays and tensors give the same table."""
    (batch,) = table.combine_chunks().to_batches()
    mapping = {name: table[name] for name in table.column_names} | {"n": torch.arange(table.num_rows)}
    sources = [table, batch, batch.to_reader() if hasattr(batch, "to_reader") else table, Capsule(table), Struct(batch),
        mapping, {**mapping, "n": np.arange(table.num_rows), "i": table["i"].to_pylist()}]  # fmt: skip
    for source in sources:
        assert read(source).to_pydict() == table.to_pydict()
    assert read(table, columns=["s", "n"]).column_names == ["s", "n"]
    rows = torch.arange(6.0).reshape(3, 2)
    assert read({"v": rows}).to_pydict() == read({"v": rows.numpy()}).to_pydict() == {"v": rows.tolist()}


@settings(max_examples=25)
@given(table=tables("il"), data=st.data())
def test_a_shuffled_epoch_has_every_row_once_and_begins_anywhere(tmp_path_factory, table, data):
    """For any key, window and batch size, every row comes once and whole. Another key gives another order. With `skip`,
    the batches are those that would have followed."""
    folder = tmp_path_factory.mktemp("p")
    written(folder, data.draw, table)
    source = data.draw(st.sampled_from([folder, table]))
    size, window, key = (
        data.draw(st.integers(1, 9)),
        data.draw(st.integers(1, 50)),
        fr.key(data.draw(st.integers(0, 9))),
    )
    options = {"columns": ["n", "i", "l"], "key": key, "window": window}
    got = [b.to_pylist() for b in stream(source, size, **options)]
    assert [len(b) for b in got] == [size] * (table.num_rows // size) + [table.num_rows % size][: table.num_rows % size]
    rows = sorted((row for b in got for row in b), key=lambda row: row["n"])
    assert rows == table.to_pylist()
    skip = data.draw(st.integers(0, len(got)))
    assert [b.to_pylist() for b in stream(source, size, skip=skip, **options)] == got[skip:]
    whole = table.num_rows // size
    if whole:
        full = [b.to_pylist() for b in stream(source, size, drop_last=True, **options)]
        assert full == got[:whole]


def test_a_shuffle_mixes(tmp_path):
    """Files and row groups are permuted, and so are rows within a window. Of 4,096 ordered rows few stay near their
    position, and two keys share few positions."""
    for i in range(4):
        part = pa.table({"n": pa.array(range(1024 * i, 1024 * (i + 1)))})
        parquet.write_table(part, tmp_path / f"{i}.parquet", row_group_size=64)
    order = lambda key: np.concatenate([b["n"].to_numpy() for b in stream(tmp_path, 100, key=key, window=512)])
    a, b = order(fr.key(0)), order(fr.key(1))
    assert sorted(a) == list(range(4096)) and (a == order(fr.key(0))).all()
    assert (a == b).mean() < 0.01 and abs(np.corrcoef(a, np.arange(4096))[0, 1]) < 0.4
    # the first 512 rows come from eight row groups, and consecutive rows are rare
    assert len(set(a[:512] // 64)) == 8
    assert (np.diff(a[:512]) == 1).mean() < 0.05


@settings(max_examples=15)
@given(data=st.data())
def test_a_loader_gives_an_epoch_from_any_position(tmp_path_factory, data):
    """The batches of a stream equal the batches of its examples. Each position gives the batches after it, over epochs
    with other orders."""
    n, size = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 9))
    table = pa.table(
        {"y": [i % 2 for i in range(n)], "a": range(n), "g": [list(range(i % 3)) for i in range(n)], "x": range(n)}
    )
    path = tmp_path_factory.mktemp("p") / "x.parquet"
    parquet.write_table(table, path, row_group_size=data.draw(st.integers(1, 9)))
    schema = Schema("y", dense=("x",), categorical=("a",), multivalued=("g",))
    key = data.draw(st.sampled_from([None, fr.key(3)]))
    bucket = data.draw(st.booleans())
    encode = data.draw(st.sampled_from([schema, lambda table: examples(table, schema)]))
    window, workers = data.draw(st.integers(1, 20)), data.draw(st.sampled_from([0, 0, 2]))
    load = stream_loader(path, encode, size, key=key, window=window, bucket=bucket, workers=workers)
    epochs = [list(load(Position(epoch))) for epoch in (0, 1)]
    for epoch, found in enumerate(epochs):
        count = math.ceil(n / size)
        assert operator.length_hint(load) == count
        assert [p for p, _ in found] == [Position(epoch, i + 1) for i in range(count - 1)] + [Position(epoch + 1, 0)]
        ids = [i for _, b in found for (i,) in b.ids.to_lists()["a"]]
        assert sorted(ids) == list(range(n)) and (key is not None or ids == list(range(n)))
        assert [x for _, b in found for x in b.dense[:, 0].tolist()] == ids
        assert [x for _, b in found for x in b.label.tolist()] == [i % 2 for i in ids]
        assert [bag for _, b in found for bag in b.ids.to_lists()["g"]] == [list(range(i % 3)) for i in ids]
        start = data.draw(st.integers(0, count - 1))
        for (p, b), (q, c) in zip(load(Position(epoch, start)), found[start:], strict=True):
            assert p == q and b.ids.to_lists() == c.ids.to_lists() and torch.equal(b.label, c.label)
            assert b.ids.capacity == c.ids.capacity and (not bucket or c.ids.capacity >= 16)


@pytest.mark.parametrize("key", [None, fr.key(3)], ids=["in order", "shuffled"])
def test_a_last_batch_is_filled_up(key):
    """With pad_last every batch has one shape. The last row of a batch is repeated with weight 0."""
    table = {"a": list(range(11)), "g": [list(range(i % 3)) for i in range(11)], "w": [2.0] * 11}
    plain = Schema(categorical=("a",), multivalued=("g",))
    for schema, weight in ((plain, 1.0), (fr.core.replace(plain, weight="w"), 2.0)):
        *whole, last = [b for _, b in stream_loader(table, schema, 4, key=key)()]
        *same, padded = [b for _, b in stream_loader(table, schema, 4, key=key, pad_last=True)()]
        assert [b.ids.to_lists() for b in same] == [b.ids.to_lists() for b in whole]
        assert [b.weight.tolist() for b in same] == [[weight] * 4] * 2
        again = {k: [*bags, bags[-1]] for k, bags in last.ids.to_lists().items()}
        assert padded.ids.to_lists() == again and padded.weight.tolist() == [weight] * 3 + [0.0]


def test_an_encoding_is_streamed(tmp_path):
    """An encoding learns strings, nulls and lists from a folder's stream, and encodes batch by batch as it encodes a
    whole table. This includes prediction without labels."""
    words = ["hat", None, "shoe", "hat", "sock"] * 8
    table = pa.table({"y": [0, 1] * 20, "item": words, "tags": [[w] if w else [] for w in words], "x": range(40)})
    for i, at in enumerate((0, 15)):
        parquet.write_table(table.slice(at, 15 if i == 0 else 25), tmp_path / f"{i}.parquet", row_group_size=4)
    encoding = fit_encoding(tmp_path, Schema("y", ("x",), ("item",), ("tags",)))
    whole = encode(encoding, table)
    for load in (stream_loader(tmp_path, encoding, 16), stream_loader(table, encoding, 16)):
        for (_, a), (_, b) in zip(load(), batches(whole, None, 16), strict=True):
            assert a.ids.to_lists() == b.ids.to_lists()
            assert torch.equal(a.label, b.label) and torch.equal(a.dense, b.dense)
    (_, unlabelled), *_ = stream_loader(table.drop_columns(["y"]), encoding, 40)()
    assert unlabelled.label is None and torch.equal(unlabelled.dense, whole.dense)


@pytest.mark.parametrize("of", ["table", "file", "files", "encoding", "function"])
def test_a_loader_that_was_pickled_gives_the_same_batches(tmp_path, of):
    """A pickled loader gives the same batches from any position. The pickle contains a table in memory once, and only
    the columns that it reads. A loader whose parts do not pickle raises."""
    table = {"y": [i % 2 for i in range(20_000)], "a": list(range(20_000)), "b": [["x"], []] * 10_000}
    path, schema = tmp_path / "x.parquet", Schema("y", categorical=("a",))
    parquet.write_table(pa.table(table), path, row_group_size=900)
    source = {"file": path, "files": [path]}.get(of, table)
    whole = Schema("y", categorical=("a",), multivalued=("b",))
    encoding = fit_encoding(table, whole)
    encode = {"encoding": encoding, "function": functools.partial(_examples, schema)}.get(of, schema)
    load = stream_loader(source, encode, 512, key=fr.key(3), window=2000, pad_last=True)
    packed = pickle.dumps(load)
    assert of != "table" or len(packed) < 2.5 * 8 * 20_000
    again = pickle.loads(packed)
    for position in (Position(1, 0), Position(2, 37)):
        for (p, x), (q, y) in zip(load(position), again(position), strict=True):
            assert p == q
            assert_trees_close(x, y)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(stream_loader(table, lambda t: None, 512))


def _examples(schema, table):
    return examples(table, schema)


def test_types_that_differ_are_widened(tmp_path):
    """If files differ in types, such as int32 and int64, or null and string, the wider type is read, whichever file
    comes first."""
    one = pa.table({"a": pa.array([1], pa.int32()), "s": pa.nulls(1)})
    two = pa.table({"s": ["x"], "a": pa.array([2**40]), "more": [0]})
    for first, second in ((one, two), (two.drop_columns(["more"]), one)):
        parquet.write_table(first, tmp_path / "0.parquet")
        parquet.write_table(second, tmp_path / "1.parquet")
        found = read([tmp_path / "0.parquet", tmp_path / "1.parquet"])
        assert found["a"].type == pa.int64() and sorted(found["a"].to_pylist()) == [1, 2**40]
        assert set(found["s"].to_pylist()) == {None, "x"} and set(found.column_names) == {"a", "s"}
    parts = list(stream(tmp_path, 1, columns=["a"]))
    assert {b.schema.field("a").type for b in parts} == {pa.int64()}


def test_text_keeps_the_first_files_types(tmp_path):
    """The types inferred from the first file hold for all files. Column names are in the first line, or given."""
    (tmp_path / "0.csv").write_text("a,b\n1,x\n2,\n")
    (tmp_path / "1.csv").write_text('b,a\n"",3\nNA,4\n')
    assert read(tmp_path).to_pydict() == {"a": [1, 2, 3, 4], "b": ["x", None, "", "NA"]}
    (tmp_path / "1.csv").write_text("a,b\n1.5,x\n")
    with pytest.raises(ValueError, match=r"1.csv`, line 2(.|\n)*1.5"):
        read(tmp_path)
    assert read(tmp_path, format=Text(types={"a": "float64"}))["a"].to_pylist() == [1, 2, 1.5]
    (tmp_path / "x.data").write_text("1|2\n3|?\n")
    form = Text("|", names=["p", "q"], nulls=["", "?"])
    assert read(tmp_path / "x.data", format=form).to_pydict() == {"p": [1, 3], "q": [2, None]}


FLAT = """
import resource, sys
import funcrec as fr
from funcrec.data import Schema, read, stream_loader

def peak_mb():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    status = open("/proc/self/status").read()  # ru_maxrss begins with the peak of the process that started this
    return int(status.split("VmHWM:")[1].split()[0]) / 1024

few, many = sys.argv[1:]
for key in (None, fr.key(0)):
    load = lambda folder: stream_loader(folder, Schema(categorical=("a", "b", "c", "d")), 4096, key=key, window=1 << 15)
    rows = sum(batch.ids.num_bags for _, batch in load(few)())
    before = peak_mb()
    rows += sum(batch.ids.num_bags for _, batch in load(many)())
    print(rows, peak_mb() - before)
before = peak_mb()
print(read(many).num_rows, peak_mb() - before)
"""


def test_a_folder_larger_than_the_memory_it_takes(tmp_path):
    """A stream of 18 files of 8 MB, in order or shuffled, takes at most 40 MB more memory than a stream of three. A
    read of the whole files takes at least 100 MB more."""
    numbers = np.random.default_rng(0).integers(0, 2**60, (4, 1 << 18))
    table = pa.table({name: pa.array(x) for name, x in zip("abcd", numbers, strict=True)})
    parquet.write_table(table, tmp_path / "x", row_group_size=1 << 15, compression="none", use_dictionary=False)
    for folder, count in (("few", 3), ("many", 18)):
        (tmp_path / folder).mkdir()
        for i in range(count):
            (tmp_path / folder / f"{i}.parquet").symlink_to(tmp_path / "x")
    command = [sys.executable, "-c", FLAT, str(tmp_path / "few"), str(tmp_path / "many")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    in_order, shuffled, whole = (tuple(map(float, line.split())) for line in out.splitlines())
    assert in_order[0] == shuffled[0] == 21 << 18 and in_order[1] < 40 and shuffled[1] < 40
    # this shows that the test can measure the difference
    assert whole[0] == 18 << 18 and whole[1] > 100


def as_text(table, path):
    pa_csv.write_csv(table, path)


@pytest.mark.parametrize("write", [as_text, parquet.write_table], ids=["text", "parquet"])
@pytest.mark.parametrize("change", ["cut", "longer", "another name", "a file more", "other values"])
def test_a_run_does_not_go_on_in_other_files(write, change, tmp_path):
    """A run that stopped in the middle of an epoch resumes from the same files, wherever they lie. It refuses files
    that were cut, grew, or have other names, and a folder with another number of files."""
    suffix = ".csv" if write is as_text else ".parquet"
    data, table = tmp_path / "data", pa.table({"a": list(range(30))})
    data.mkdir()
    write(table, data / f"1{suffix}")
    add, how = lambda total, batch: (total + batch.ids.values.sum(), {}), {"epochs": 1, "checkpoint": tmp_path / "run"}
    load = lambda: stream_loader(data, Schema(categorical=("a",)), 4, key=fr.key(0))
    stop = iter([0, 0, 1])
    fr.fit(add, torch.tensor(0), load(), stop=lambda: next(stop, 1), **how)
    saved = (tmp_path / "run").read_bytes()
    data = data.rename(tmp_path / "moved")
    assert fr.fit(add, torch.tensor(0), load(), resume=True, **how).state == sum(range(30))
    (tmp_path / "run").write_bytes(saved)
    if change == "another name":
        (data / f"1{suffix}").rename(data / f"2{suffix}")
    elif change == "a file more":
        write(table, data / f"2{suffix}")
    else:
        rows = {
            "cut": table[:20],
            "longer": pa.concat_tables([table, table]),
            "other values": pa.table({"a": [*range(1, 31)]}),
        }
        write(rows[change], data / f"1{suffix}")
    with pytest.raises(ValueError, match=r"(?s)in the midst of an epoch of other batches.*crc was"):
        fr.fit(add, torch.tensor(0), load(), resume=True, **how)
