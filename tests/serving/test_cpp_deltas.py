"""Deltas in a process without Python give the newer weights bit for bit, or change nothing (kernels/serving)."""

import json
import os
import shutil
import struct

import pytest
import torch
from programs import answers, every_dtype, tensor_files

import funcrec as fr
from funcrec.serve._weights import FILE, named
from funcrec.serve.freshness._delta_file import Change, write_file

pytestmark = pytest.mark.xdist_group("every_dtype")

# 67 rows of 8 bytes
TABLE = "['quantized'].tables['int4']"
SMALL = (TABLE, "['dense']['scale']", "['dense']['wide']", "['unread']['int16']")
PAGE = 4096


def written(path, folder, since, version, tensors, seed):
    """Write a delta from `tensors` to params(seed): all dense tensors and a third of the rows of all other tensors.
    Update `tensors` to the new values."""
    newer, changes = named(every_dtype.params(seed)), {}
    random = torch.Generator().manual_seed(seed)
    for n, x in tensors.items():
        is_whole = x.dim() < 2 or "dense" in n
        rows = torch.arange(x.shape[0] if x.dim() else 1)
        if not is_whole:
            rows = torch.randperm(x.shape[0], generator=random)[: -(-x.shape[0] // 3)].sort().values
        changes[n] = Change(None if is_whole else rows, newer[n] if is_whole else newer[n][rows])
        tensors[n] = newer[n] if is_whole else x.index_copy(0, rows, newer[n][rows])
    write_file("test", path, json.loads((folder / "manifest.json").read_text())["digest"], since, version, changes)
    return path


def plain(x):
    return x.reshape(-1).view(torch.uint8).numpy().tobytes()


def laid(folder, tensors):
    """Return the file of the weights with these values, padded to whole pages."""
    content, body = tensor_files.parts((folder / FILE).read_bytes())
    for n, (begin, end) in tensor_files.places(content).items():
        body[begin:end] = plain(tensors[n])
    out = (folder / FILE).read_bytes()[: -len(body)] + body
    return out + bytes(-len(out) % PAGE)


@pytest.fixture(scope="module")
def program(built):
    return built / "funcrec-answers"


@pytest.fixture(scope="module")
def good(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("delta") / "good"
    own = {n: x for n, x in named(every_dtype.params()).items() if n in SMALL}
    return written(path, folder, "first", "1", own, 1).read_bytes()


@pytest.fixture(scope="module")
def running(program, folder):
    with answers.Answers(program, folder) as process:
        yield process


def test_deltas_in_cpp_are_pythons(program, folder, tmp_path):
    """package + deltas in C++ = Python's package with the deltas = the newer parameters. This holds in every byte of
    rows and whole tensors of every dtype. The outputs have the bits of Python. The file on disk does not change."""
    package, tensors, batch = fr.load_package(folder), named(every_dtype.params()), every_dtype.batch(5)
    stored, since, ids = (folder / FILE).read_bytes(), "first", batch.ids
    with answers.Answers(program, folder) as running:
        assert running.weights() == laid(folder, tensors)
        for version in "123":
            path = written(tmp_path / version, folder, since, version, tensors, int(version))
            package.apply(path), running.apply(path)
            assert running.weights() == laid(folder, tensors)
            assert {n: plain(x) for n, x in package.params.items()} == {n: plain(x) for n, x in tensors.items()}
            got = running.run(ids.num_bags, batch.dense, ids.values, ids.offsets, ids.weights)
            assert got.version == package.version == version
            assert all(torch.equal(x, y) for x, y in zip(got.outputs, package(batch).values(), strict=True))
            since = version
        running.swap(folder)
        assert running.weights() == laid(folder, named(every_dtype.params()))
    assert (folder / FILE).read_bytes() == stored


def refused(running, path, data):
    path.write_bytes(data)
    with pytest.raises(answers.AnswersError, match=r"(?s)got .*need ") as error:
        running.apply(path)
    assert not error.value.failed
    return str(error.value)


def test_damage_changes_nothing_in_cpp(running, folder, good, tmp_path):
    """A file that is cut at any fifth byte, is longer, or has a flipped bit raises Bad. No byte of the weights
    changes."""
    for n in range(0, len(good), 5):
        refused(running, tmp_path / "bad", good[:n])
        refused(running, tmp_path / "bad", good[:n] + bytes([good[n] ^ 1 << n % 8]) + good[n + 1 :])
    refused(running, tmp_path / "bad", good + b"\0")
    assert running.weights() == laid(folder, named(every_dtype.params()))


def entry(key, value, name=f"values/{TABLE}"):
    return lambda content, _: content[name].__setitem__(key, value)


def text(key, value):
    return lambda content, _: content["__metadata__"].__setitem__(key, value)


def row(i, value):
    def change(content, body):
        struct.pack_into("<q", body, content[f"rows/{TABLE}"]["data_offsets"][0] + 8 * i, value)
        tensor_files.checked(content, body)

    return change


def renamed(old, new):
    return lambda content, _: content.__setitem__(new, content.pop(old))


CRAFTED = {
    "another version": (text("from", "0"), "not the next"),
    "another package": (text("manifest", "0" * 64), "another package"),
    "another format": (text("format", "funcrec delta 9"), "format"),
    "a number for a text": (text("to", 1), "texts"),
    "no text": (lambda content, _: content["__metadata__"].pop("to") and None, "is damaged"),
    "no texts": (lambda content, _: content.__setitem__("__metadata__", {}), "format"),
    "no entry": (lambda content, _: content.__setitem__("x", 1), "cannot be"),
    "more of an entry": (entry("more", 1), "cannot be"),
    "no JSON": (lambda content, _: tensor_files.text_of(content)[:-1], "not JSON"),
    "deep": (lambda content, _: tensor_files.text_of(content)[:-1] + b',"x":' + b"[" * 100_000, "not JSON"),
    "no such parameter": (renamed(f"values/{TABLE}", "values/x"), "other parameters"),
    "no rows": (renamed(f"rows/{TABLE}", "whole/x"), "other parameters"),
    "no part": (renamed(f"rows/{TABLE}", TABLE), "other parameters"),
    "all of it": (renamed(f"values/{TABLE}", f"whole/{TABLE}"), "other parameters"),
    "rows of a number": (renamed("whole/['dense']['scale']", "values/['dense']['scale']"), "other parameters"),
    "a shape below none": (entry("shape", [-1, 8]), "cannot be"),
    "more rows": (entry("shape", [24, 8]), "cannot be"),
    "other rows": (entry("shape", [8, 23]), "other parameters"),
    "a shape beyond 64 bits": (entry("shape", [1 << 70]), "cannot be"),
    "a shape that wraps": (entry("shape", [1 << 48, 1 << 48, 184]), "cannot be"),
    "half a row": (entry("shape", [1.5]), "cannot be"),
    "another dtype": (entry("dtype", "I8"), "other parameters"),
    "no dtype": (entry("dtype", "Q8"), "cannot be"),
    "other bytes": (entry("data_offsets", [0, 16]), "cannot be"),
    "bytes beyond 64 bits": (entry("data_offsets", [0, 1 << 63]), "cannot be"),
    "before the body": (entry("data_offsets", [-184, 0]), "cannot be"),
    "behind the body": (entry("data_offsets", [1 << 40, (1 << 40) + 184]), " on"),
    "a row below 0": (row(0, -1), "has rows"),
    "a far row": (row(22, 67), "has rows"),
    "a very far row": (row(22, (1 << 63) - 1), "has rows"),
    "a row twice": (row(1, 0), "has rows"),
    "rows that descend": (row(0, 66), "has rows"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files_are_refused(running, folder, good, tmp_path, name):
    """A header or rows that do not belong in a delta, with right CRCs, raise Bad in C++ and ValueError in Python. No
    byte changes."""
    change, said = CRAFTED[name]
    data = tensor_files.changed(good, change)
    assert tensor_files.changed(good, lambda *_: None) == good != data
    assert said in refused(running, tmp_path / "bad", data)
    assert running.weights() == laid(folder, named(every_dtype.params()))
    package = fr.load_package(folder)
    with pytest.raises(ValueError, match=rf"(?s)funcrec\.Package\.apply: .*{said}.*need "):
        package.apply(tmp_path / "bad")
    assert package.version == "first" and {n: plain(x) for n, x in package.params.items()} == {
        n: plain(x) for n, x in named(every_dtype.params()).items()
    }


def test_pages_that_cannot_be_had_are_told(program, folder, good, tmp_path):
    """If memory pages are missing (here because the file was cut), a delta fails before any byte changes. The process
    continues."""
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "good").write_bytes(good)
    weights = tmp_path / "copy" / FILE
    with answers.Answers(program, tmp_path / "copy") as running:
        whole = weights.read_bytes()
        os.truncate(weights, PAGE)
        with pytest.raises(answers.AnswersError, match="no pages") as error:
            running.apply(tmp_path / "good")
        assert error.value.failed
        with open(weights, "r+b") as file:
            file.write(whole)
        assert running.weights() == laid(folder, named(every_dtype.params()))
        running.apply(tmp_path / "good")
