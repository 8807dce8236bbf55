"""Files that cannot be read: the error's type, and the fragments that name file, line, row and column."""

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

import funcrec as fr
from funcrec.data import Position, Schema, Text, examples, read, stream, stream_loader

SCHEMA = Schema("y", categorical=("a",))
GOOD = "y,a\n" + "".join(f"{i % 2},{i}\n" for i in range(50))
TEXTS = {  # the file's text, and parts of the error
    "a field less": (GOOD + "1\n", ("x.csv`, line 52", "Expected 2 columns, got 1")),
    "a field more": (GOOD + "1,2,3\n", ("x.csv`, line 52", "Expected 2 columns, got 3")),
    "an empty line": ("y,a\n1,2\n\n1,2\n", ("x.csv`, line 3", "a missing id")),
    "a word among integers": (GOOD.replace("0,30\n", "0,thirty\n"), ("column `a` does not hold ids", "string")),
    "nothing": ("", ("x.csv`, line 1", "Empty CSV file")),
    "no rows": ("y,a\n", ("does not hold",)),
    "a missing id": (GOOD + "1,\n", ("x.csv`, line 52, column `a`", "a missing id")),
    "label 3": (GOOD + "3,1\n", ("x.csv`, line 52, column `y`", "label 3", "[0, 1]")),
    "no column a": (GOOD.replace("y,a", "y,b"), ("`x.csv` lacks columns", "['a']")),
    "a column twice": (GOOD.replace("y,a", "a,a"), ("`x.csv` has a column twice", "['a']")),
}


def said(call, *fragments):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    text = error.value.args[0]
    assert all(f in text for f in (*fragments, "funcrec.data.", "\n  got   ", "\n  need  ")), text


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("key", [None, fr.key(0)], ids=["in order", "shuffled"])
def test_bad_text(tmp_path, name, key):
    """An error for a line that cannot be read, or that makes no example, names file and line number. This holds in any
    order of lines."""
    text, fragments = TEXTS[name]
    (tmp_path / "x.csv").write_text(text)
    said(lambda: list(stream_loader(tmp_path, SCHEMA, 8, key=key)()), *fragments)


def test_bad_value_beyond_the_first_block(tmp_path, monkeypatch):
    """An error for a value that does not fit the inferred type names file, line and column."""
    monkeypatch.setattr("funcrec.data.readers._files.BLOCK_BYTES", 100)
    (tmp_path / "x.csv").write_text(GOOD + "1,ten\n")
    said(lambda: read(tmp_path), "x.csv`, line 52, column `a`", "invalid value 'ten'", 'types={"a": "string"}')
    assert read(tmp_path, format=Text(types={"a": "string"}))["a"][-1].as_py() == "ten"


@pytest.mark.parametrize(
    ("first", "value", "kind"),
    [("7", "2.5", "float64"), ("7", "1e3", "float64"), ("7", "nan", "float64"), ("7", "ten", "string"),
     ("7", "9" * 30, "string"), ("2.5", "ten", "string")],
)  # fmt: skip
def test_the_type_for_a_value_of_a_later_file(first, value, kind, tmp_path):
    """An error for a value of a later file proposes a type that reads all files: float64 for a number with a fraction
    after integers, string for words."""
    (tmp_path / "1.csv").write_text(f"y,a\n1,{first}\n")
    (tmp_path / "2.csv").write_text(f"y,a\n0,{value}\n")
    said(lambda: read(tmp_path), "2.csv`, line 2, column `a`", f'types={{"a": "{kind}"}}')
    assert len(read(tmp_path, format=Text(types={"a": kind}))) == 2


OPEN = {  # a file, and the line of its open quote (None without an open quote)
    "in the last column": ('a,b\n1,x\n2,"y\n3,z\n', 3),
    "in the last line": ('a,b\n1,x\n2,"y\n', 3),
    "behind a closed one": ('a,b\n0,"x"\n1,"y\n2,z', 3),
    "lines that end in CR": ('a,b\r1,x\r2,"y\r3,z\r', 3),
    "closed, with a line break": ('a,b\n1,"x\n"\n2,"y""\n"', None),
    "inches": ('a,b\n1,5"\n2,"7"" \n"\n', None),
}


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize("columns", [None, ["a"]], ids=["all", "another column"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_quote_that_nothing_closes(tmp_path, name, columns, packed):
    """An unclosed quote swallows no row. The error names file and line, whether or not the column of the quote is
    read."""
    text, line = OPEN[name]
    path = tmp_path / ("x.csv.gz" if packed else "x.csv")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    if line is None:
        assert read(path, columns=columns)["a"].to_pylist() == [1, 2]
    else:
        said(lambda: read(path, columns=columns), f"`{path.name}`, line {line} has a quote that nothing closes")
        assert read(path, format=Text(quotes=False))["b"][1].as_py() == '"y'


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, -(2**63) - 2**12])
def test_integers_beyond_64_bits_in_text(tmp_path, number):
    """Integers outside i64 are not read as floats. The error names the column. A stated type accepts the integers."""
    path, large = tmp_path / "x.csv", "1e19"
    path.write_text(f"y,a\n0,\n1,{number}\n0,5\n")
    said(lambda: read(path), "`x.csv`, column `a` has integers", f"{number}", 'Text(types={"a": "uint64"})')
    assert read(path, columns=["y"]).num_rows == 3
    assert read(path, format=Text(types={"a": "string"}))["a"].to_pylist() == [None, f"{number}", "5"]
    path.write_text(f"y,a\n0,{large}\n1,{number}\n")
    assert read(path)["a"].to_pylist() == [1e19, float(number)]


def test_damaged_gzip(tmp_path, monkeypatch):
    """If a gzip file is cut short or has a changed byte, the error names the file and the first line that is not
    whole."""
    monkeypatch.setattr("funcrec.data.readers._files.BLOCK_BYTES", 1000)
    rows = np.random.default_rng(0).integers(0, 2**40, 3000)
    packed = gzip.compress(("y,a\n" + "".join(f"1,{i}\n" for i in rows)).encode())
    path = tmp_path / "x.csv.gz"
    for at in (1, len(packed) // 2, len(packed) - 1):
        path.write_bytes(packed[:at])
        said(lambda: list(stream(path, 8)), "x.csv.gz`, line ")
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=r"line 1\d\d\d cannot be read"):
        list(stream(path, 8))
    path.write_bytes(packed[:-6] + bytes([packed[-6] ^ 1]) + packed[-5:])
    said(lambda: list(stream(path, 8)), "x.csv.gz`, line ")


def test_bad_parquet_in_a_folder(tmp_path):
    """Among many files, the error names the file that is cut short, is damaged, or has other columns or types."""
    table = pa.table({"y": [0, 1] * 50, "a": range(100)})
    write = lambda i, t: parquet.write_table(
        t, tmp_path / f"{i}.parquet", compression="none", use_dictionary=False, write_page_checksum=True,
        row_group_size=50,
    )  # fmt: skip
    write(0, table)
    write(1, table)
    path = tmp_path / "1.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    said(lambda: read(tmp_path), "`1.parquet` is not a whole parquet file")
    at = whole.index(np.arange(60, 70).tobytes())
    path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    for key in (None, fr.key(0)):
        said(lambda key=key: list(stream(tmp_path, 7, key=key)), "`1.parquet` is damaged")
        assert list(stream(tmp_path / "0.parquet", 7, key=key))
    write(1, table.rename_columns(["y", "b"]))
    said(lambda: read(tmp_path), "`1.parquet` lacks columns", "['a']")
    write(1, pa.table({"y": [0], "a": ["x"]}))
    said(lambda: read(tmp_path), "column `a` of `1.parquet` has another type than in `0.parquet`", "string", "int64")
    (tmp_path / "typed.csv").write_text("zip,y\n00123,1\n")
    mistyped = fr.data.Text(types={"zpi": "string"})
    said(lambda: read(tmp_path / "typed.csv", format=mistyped), "`types` names a column", "'zpi'", "try   'zip'")
    (tmp_path / "typed.csv").unlink()
    write(1, pa.table({"y": [0, 1, 7], "a": [1, 2, 3]}))
    for key in (None, fr.key(0)):
        said(lambda key=key: list(stream_loader(tmp_path, SCHEMA, 9, key=key)()), "`1.parquet`, row 2, column `y`", "7")
    write(1, pa.table({"y": [0, 1], "a": pa.array([1, 2**63], pa.uint64())}))
    said(lambda: read(tmp_path), "`1.parquet`")


TABLE = {"y": [1, 0, 1], "a": [1, 2, 3]}
LOAD = stream_loader(TABLE, SCHEMA, 2)
CALLS = [
    ("a folder without files", lambda at: read(at), ValueError, "there is no file in the folder"),
    ("no file", lambda at: read(at / "x.csv"), FileNotFoundError, "there is no such file"),
    ("an unknown end", lambda at: (at / "x.abc").write_text("a\n1\n") and read(at), ValueError, "not show the format"),
    ("two formats", lambda at: [(at / n).write_text("a\n1\n") for n in ("x.csv", "x.tsv")] and read(at), ValueError,
        "show two formats"),
    ("numbers for paths", lambda at: read([1, 2]), TypeError, "is not a table"),
    ("no paths", lambda at: read([]), TypeError, "is not a table"),
    ("a column that is not there", lambda at: read(TABLE, columns=["b"]), ValueError, "lacks columns"),
    ("a column twice", lambda at: read(TABLE, columns=["a", "a"]), ValueError, "`columns` name a column twice"),
    ("no columns", lambda at: read(TABLE, columns=[]), ValueError, "`columns` are none"),
    ("UTF-16", lambda at: (at / "x.csv").write_text("a\n1\n", "utf-16") and read(at), ValueError, "text in UTF-8"),
    ("UTF-16 of many columns", lambda at: (at / "x.csv").write_text("a,b\n1,2\n", "utf-16") and read(at), ValueError,
        "text in UTF-8"),
    ("Latin-1", lambda at: (at / "x.csv").write_text("a\nx\nZürich\n", "latin-1") and read(at), ValueError,
        "line 3, column `a` is not text in UTF-8"),
    ("Latin-1 far behind", lambda at: (at / "x.csv").write_text("a\n" + "x" * 2**23 + "\nZürich\n", "latin-1")
        and read(at), ValueError, "text in UTF-8"),
    ("a tensor that is followed", lambda at: read({"a": torch.ones(2, requires_grad=True)}), TypeError, "a.detach()"),
    ("one of a jvp", lambda at: torch.func.jvp(lambda x: read({"a": x}), (torch.ones(2),), (torch.ones(2),)), TypeError,
        "is differentiated"),
    ("one of a vmap", lambda at: torch.func.vmap(lambda x: read({"a": x}))(torch.ones(2, 3)), TypeError, "a.detach()"),
    ("a tensor on meta", lambda at: read({"a": torch.ones(2, device="meta")}), TypeError, "column `a` cannot be read"),
    ("a sparse tensor", lambda at: read({"a": torch.eye(2).to_sparse()}), TypeError, "column `a` cannot be read"),
    ("an integer of 64 bits", lambda at: read({"a": [2**63]}), TypeError, "pa.uint64()"),
    ("a type that is none", lambda at: (at / "x.csv").write_text("a\n1\n") and read(at, format=Text(types={"a": "i6"})),
        ValueError, "`types['a']` is not a type"),
    ("two characters", lambda at: (at / "x.csv").write_text("a\n1\n") and read(at, format=Text(", ")), ValueError,
        "`delimiter` is not one character"),
    ("no full batch", lambda at: list(stream(TABLE, 4, drop_last=True)), ValueError, "does not make a batch"),
    ("no rows", lambda at: list(stream({"a": []}, 4)), ValueError, "does not make a batch"),
    ("skip beyond the end", lambda at: list(stream(TABLE, 2, skip=3)), ValueError, "at least 3 batches"),
    ("position behind the end", lambda at: next(LOAD(Position(0, 2))), ValueError, "past the end of its epoch"),
    ("encode to a table", lambda at: next(stream_loader(TABLE, lambda t: t, 2)()), TypeError, "did not make examples"),
    ("no last batch to fill up", lambda at: stream_loader(TABLE, SCHEMA, 2, drop_last=True, pad_last=True), ValueError,
        "`pad_last` has no last batch"),
    ("strings without an encoding", lambda at: stream_loader({"y": [1], "a": ["x"]}, SCHEMA, 2), TypeError, "encode"),
    ("no label", lambda at: stream_loader({"a": [1]}, SCHEMA, 2), ValueError, "label=None"),
    ("examples of a file", lambda at: (at / "x.csv").write_text("y,a\n1,x\n") and examples(at / "x.csv", SCHEMA),
        TypeError, "column `a` does not hold ids"),
]  # fmt: skip


@pytest.mark.parametrize("call, kind, fragment", [r[1:] for r in CALLS], ids=[r[0] for r in CALLS])
def test_bad_call(tmp_path, call, kind, fragment):
    """A call raises in four parts if names and types already show that the source cannot be read."""
    with pytest.raises(kind) as error:
        call(tmp_path)
    text = error.value.args[0]
    assert all(f in text for f in (fragment, "funcrec.data.", "\n  got   ", "\n  need  ")), text
