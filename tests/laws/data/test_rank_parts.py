"""Each rank reads its own row groups, here and in stores: no row is lost or read twice, and all take equal steps."""

import gzip
import io
import operator

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.failing_store import emptied, failing

import funcrec as fr
from funcrec.data import Position, Schema, Text, examples, read, stream, stream_loader
from funcrec.data.readers._rank_parts import split_parts
from funcrec.files import as_path
from funcrec.testing import assert_trees_close

SCHEMA = Schema(label="y", categorical=("n",))


def url(text):
    return as_path("funcrec.test", text, remote=True)


def write(path, rows, first=0, size=3):
    """Write rows numbered from `first` on, in row groups of `size`, to a path or a Url."""
    table = pa.table({"n": range(first, first + rows), "y": [0.0] * rows})
    out = io.BytesIO()
    parquet.write_table(table, out, row_group_size=size)
    path.write_bytes(out.getvalue())
    return table


@given(sizes=st.lists(st.integers(0, 50), max_size=20), ranks=st.integers(1, 6))
def test_every_part_is_one_ranks(sizes, ranks):
    """Every part is one rank's, in order, and two ranks differ by at most the largest part."""
    own = split_parts(sizes, ranks)
    assert sorted(i for x in own for i in x) == list(range(len(sizes))) and all(x == sorted(x) for x in own)
    rows = [sum(sizes[i] for i in x) for x in own]
    assert max(rows) - min(rows) <= max(sizes, default=0)


@given(data=st.data())
def test_ranks_read_every_row_once_in_equal_steps(data, tmp_path_factory):
    """Over all ranks, the rows of weight 1 are all rows of the files, each once. Every rank takes as many batches. A
    loader resumes at any batch. With drop_last the rows are distinct, and all batches are full."""
    folder, draw = tmp_path_factory.mktemp("parts"), data.draw
    ranks, size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rows = [draw(st.integers(1, 12)) for _ in range(draw(st.integers(1, 3)))]
    groups = sum(-(-n // 3) for n in rows)
    for i, n in enumerate(rows):
        write(folder / f"{i}.parquet", n, sum(rows[:i]))
    key, last = draw(st.sampled_from([None, fr.key(1)])), draw(st.sampled_from(["pad_last", "drop_last"]))
    how = {"key": key, last: True, "window": 4}
    if groups < ranks:
        with pytest.raises(ValueError, match=r"has no rows for some ranks(.|\n)*none for ranks \["):
            stream_loader(folder, SCHEMA, size, rank_of=(0, ranks), **how)
        return
    sizes = [min(3, n - a) for n in rows for a in range(0, n, 3)]
    least = min(sum(sizes[i] for i in x) for x in split_parts(sizes, ranks))
    if last == "drop_last" and least < size:
        with pytest.raises(ValueError, match="does not make a batch on each rank"):
            stream_loader(folder, SCHEMA, size, rank_of=(0, ranks), **how)
        return
    seen, counts = [], set()
    for rank in range(ranks):
        load = stream_loader(folder, SCHEMA, size, rank_of=(rank, ranks), **how)
        own = list(load())
        counts |= {len(own), operator.length_hint(load)}
        assert [position for position, _ in own] == [*(Position(0, i) for i in range(1, len(own))), Position(1, 0)]
        for _, batch in own:
            counted = torch.ones(size) if batch.weight is None else batch.weight
            assert batch.ids.num_bags == size
            seen += batch.ids["n"].values[counted > 0].tolist()
        at = draw(st.integers(0, len(own) - 1))
        assert_trees_close([b for _, b in load(Position(0, at))], [b for _, b in own[at:]], rtol=0, atol=0)
    assert len(counts) == 1 and len(seen) == len(set(seen))
    assert sorted(seen) == list(range(sum(rows))) if last == "pad_last" else set(seen) <= set(range(sum(rows)))
    raw = [n for rank in range(ranks) for b in stream(folder, size, key=key, rank_of=(rank, ranks)) for n in b["n"]]
    assert sorted(n.as_py() for n in raw) == list(range(sum(rows)))


def test_the_order_names_the_number_of_ranks():
    """All ranks have one `order`, which differs from that of another number of ranks."""
    table = {"n": list(range(20_000)), "y": [0.0] * 20_000}
    loads = [stream_loader(table, SCHEMA, 8, rank_of=(r, n), pad_last=True) for r, n in ((0, 2), (1, 2), (0, 3))]
    assert loads[0].order == loads[1].order != loads[2].order and loads[0].order["rows"] == 20_000


BAD = {
    "rank": (lambda: stream({"n": [1]}, 1, rank_of=(2, 2)), "`rank_of` is not a rank"),
    "steps": (lambda: stream_loader({"n": [1]}, SCHEMA, 1, rank_of=(0, 1)), "`rank_of` requires whole batches"),
    "rows": (lambda: stream({"n": [1]}, 1, rank_of=(0, 2)), "has no rows for some ranks"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_ranks_cannot_read_is_refused(name):
    """A rank outside, batches of other numbers, and ranks without rows raise before any row is read."""
    call, what = BAD[name]
    with pytest.raises(ValueError, match=what):
        call()


def test_text_has_no_parts_of_known_size(tmp_path):
    """Text raises: its rows are not counted before they are read."""
    (tmp_path / "a.csv").write_text("n,y\n1,0\n")
    with pytest.raises(ValueError, match="`rank_of` requires parts whose rows are known"):
        stream(tmp_path / "a.csv", 1, rank_of=(0, 1))


def test_files_in_a_store_are_read_as_those_of_this_machine(tmp_path):
    """Parquet in folders and partitions, text, packed text, and errors by line have the same rows and words by URL."""
    emptied()
    for i in range(3):
        for root in (tmp_path / f"day={i}", url(f"memory://data/day={i}")):
            root.mkdir(exist_ok=True)
            write(root / "a.parquet", 4 + i, 10 * i)
            write(root / "_hidden.parquet", 1)
    assert read("memory://data").equals(read(tmp_path)) and read("memory://data").num_rows == 15
    assert read("memory://data/day=1")["day"].to_pylist() == [1] * 5
    load = lambda source: stream_loader(source, SCHEMA, 4, key=fr.key(1), rank_of=(1, 2), pad_last=True)
    near, far = load(tmp_path), load("memory://data")
    assert_trees_close([b for _, b in far()], [b for _, b in near()], rtol=0, atol=0)
    assert far.order == near.order
    text = b"n,y\n" + b"".join(b"%d,0.5\n" % i for i in range(999))
    for name, content in (("a.csv", text), ("a.csv.gz", gzip.compress(text)), ("bad.csv", text + b"x\n")):
        (tmp_path / name).write_bytes(content)
        url(f"memory://text/{name}").write_bytes(content)
    for name in ("a.csv", "a.csv.gz"):
        assert read(f"memory://text/{name}").equals(read(tmp_path / name))
    told = []
    for path in (tmp_path / "bad.csv", "memory://text/bad.csv"):
        with pytest.raises(ValueError, match="line 1001") as error:
            read(path)
        told.append(str(error.value))
    assert told[0] == told[1]
    assert examples("memory://text/a.csv", SCHEMA).num_rows == 999
    with pytest.raises(FileNotFoundError, match=r"there is no such file(.|\n)*another URL"):
        read("memory://nowhere/a.csv")
    emptied()


def test_a_store_that_fails_is_named(monkeypatch):
    """If the store fails while rows are read, the error is the store's, and says which file."""
    emptied()
    write(url("memory://data/a.parquet"), 40)
    load = stream_loader("memory://data/a.parquet", SCHEMA, 4, drop_last=True)
    (url("memory://text/a.csv")).write_bytes(b"n,y\n1,0\n")
    with monkeypatch.context() as patch:
        failing(patch, 0)
        for call in (lambda: list(load()), lambda: read("memory://text/a.csv", format=Text())):
            with pytest.raises(
                OSError, match=r"^funcrec\.data\.\w+: `memory://.*` cannot be read(.|\n)*the store is gone"
            ):
                call()
    emptied()
