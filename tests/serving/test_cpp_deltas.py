"""Deltas in a process without Python give the newer weights bit for bit, or change nothing (kernels/serving)."""

import json
import os
import shutil
import struct
import zlib

import pytest
import torch
from programs import answers, every_dtype

import funcrec as fr
from funcrec.serve._weights import named
from funcrec.serve.freshness._delta_file import START, Change, write_file

pytestmark = pytest.mark.xdist_group("every_dtype")

# 67 rows of 8 bytes
TABLE = "['quantized'].tables['int4']"
SMALL = (TABLE, "['dense']['scale']", "['dense']['wide']", "['unread']['int16']")
PAGE = 4096


def written(path, folder, since, version, tensors, seed):
    """Write a delta from `tensors` to params(seed): all dense tensors and a third of the other rows. Update
    `tensors` too."""
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
    """Return weights.bin with these values, padded to whole pages."""
    out = bytearray((folder / "weights.bin").read_bytes())
    for e in json.loads((folder / "weights.json").read_text())["tensors"]:
        out[e["offset"] : e["offset"] + e["nbytes"]] = plain(tensors[e["name"]])
    return bytes(out) + bytes(-len(out) % PAGE)


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
    """package + deltas in C++ = Python's package with the deltas = the newer parameters, in every byte of rows and
    whole tensors of every dtype. The outputs have Python's bits, and the file on disk does not change."""
    package, tensors, batch = fr.load_package(folder), named(every_dtype.params()), every_dtype.batch(5)
    stored, since, ids = (folder / "weights.bin").read_bytes(), "first", batch.ids
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
    assert (folder / "weights.bin").read_bytes() == stored


def refused(running, path, data):
    path.write_bytes(data)
    with pytest.raises(answers.AnswersError, match=r"(?s)got .*need ") as error:
        running.apply(path)
    assert not error.value.failed
    return str(error.value)


def test_damage_changes_nothing_in_cpp(running, folder, good, tmp_path):
    """A file that is cut at any fifth byte, is longer, or has a flipped bit raises Bad, and no byte of the weights
    changes."""
    for n in range(0, len(good), 5):
        refused(running, tmp_path / "bad", good[:n])
        refused(running, tmp_path / "bad", good[:n] + bytes([good[n] ^ 1 << n % 8]) + good[n + 1 :])
    refused(running, tmp_path / "bad", good + b"\0")
    assert running.weights() == laid(folder, named(every_dtype.params()))


def crafted(whole, change):
    """Return the file with a changed header or body and right CRCs."""
    _, length, _, _ = START.unpack_from(whole)
    header, body = json.loads(whole[START.size :][:length]), bytearray(whole[START.size + length :])
    made = change(header, body)
    text = made if isinstance(made, bytes) else json.dumps(header).encode()
    return START.pack(b"FRDELTA1", len(text), zlib.crc32(text), 0) + text + bytes(body)


def entry(key, value, name=TABLE):
    return lambda header, _: next(e for e in header["tensors"] if e["name"] == name).__setitem__(key, value)


def top(key, value):
    return lambda header, _: header.__setitem__(key, value)


def row(i, value):
    def change(header, body):
        at = next(e["offset"] for e in header["tensors"] if e["name"] == TABLE)
        struct.pack_into("<q", body, at + 8 * i, value)
        header["crc32"] = zlib.crc32(body)

    return change


CRAFTED = {
    "another version": (top("from", "0"), "not the next"),
    "another package": (top("manifest", "0" * 64), "another package"),
    "another format": (top("format", 2), "format"),
    "a text for a number": (top("size", "1"), ""),
    "a number for a text": (top("to", 1), ""),
    "more entries": (top("more", 1), ""),
    "no entry": (lambda header, _: header.pop("to") and None, ""),
    "no list": (top("tensors", {}), ""),
    "no entries": (top("tensors", [1]), ""),
    "more of an entry": (entry("more", 1), ""),
    "no JSON": (lambda *_: b'{"format": 1,', ""),
    "no object": (lambda *_: b"[]", ""),
    "deep": (lambda *_: b"[" * 100_000, ""),
    "no such parameter": (entry("name", "x"), ""),
    "one twice": (lambda header, _: header["tensors"].append(header["tensors"][0]), ""),
    "rows below none": (entry("rows", -1), ""),
    "rows and bytes below none": (lambda h, b: [f(h, b) for f in (entry("rows", -1), entry("nbytes", -16))], ""),
    "more rows": (entry("rows", 24), ""),
    "rows beyond 64 bits": (entry("rows", 1 << 70), ""),
    "half a row": (entry("rows", 1.5), ""),
    "all of it": (entry("rows", None), ""),
    "rows of a number": (entry("rows", 1, "['dense']['scale']"), ""),
    "other bytes": (entry("nbytes", 16), ""),
    "bytes beyond 64 bits": (entry("nbytes", 1 << 63), ""),
    "before the body": (entry("offset", -8), ""),
    "behind the body": (entry("offset", 1 << 62), ""),
    "a row below 0": (row(0, -1), ""),
    "a far row": (row(22, 67), ""),
    "a very far row": (row(22, (1 << 63) - 1), ""),
    "a row twice": (row(1, 0), ""),
    "rows that descend": (row(0, 66), ""),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files_are_refused(running, folder, good, tmp_path, name):
    """A header or rows that do not belong in a delta, with right CRCs, raise Bad in C++ and ValueError in Python.
    Nothing changes."""
    change, said = CRAFTED[name]
    data = crafted(good, change)
    assert data != good and crafted(good, lambda *_: None)[START.size - 8 :] != data[START.size - 8 :]
    assert said in refused(running, tmp_path / "bad", data)
    assert running.weights() == laid(folder, named(every_dtype.params()))
    package = fr.load_package(folder)
    with pytest.raises(ValueError, match=rf"(?s)funcrec\.Package\.apply: .*{said}.*need "):
        package.apply(tmp_path / "bad")
    assert package.version == "first" and {n: plain(x) for n, x in package.params.items()} == {
        n: plain(x) for n, x in named(every_dtype.params()).items()
    }


def test_pages_that_cannot_be_had_are_told(program, folder, good, tmp_path):
    """If memory pages cannot be had (here because weights.bin was cut), a delta fails before anything changes, and
    the process goes on."""
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "good").write_bytes(good)
    weights = tmp_path / "copy" / "weights.bin"
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
