"""Files and folders in stores, by URLs: complete or absent, whichever request fails."""

import io
import itertools
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs.failing_store import emptied, failing

from funcrec.files import Folder, Url, as_path, local_copy, open_file, read_folder, write_folder, write_whole
from funcrec.files._urls import LEAST, StoreFile

CALL = "funcrec.test"


@pytest.fixture(autouse=True)
def store():
    yield emptied()
    emptied()


def url(text="memory://runs/model"):
    return as_path(CALL, text, remote=True)


def texts_in(path):
    names = ("a.txt", "b.txt")
    return read_folder(CALL, path, lambda folder: {n: folder.open(n).text() for n in names if folder.has(n)})


def put(path, content):
    write_folder(CALL, path, lambda own: [(own / n).write_text(text) for n, text in content.items()])


def test_a_url_has_the_parts_of_its_path():
    """name, parent and / are those of pathlib; a local file's URL is a Path; a URL goes through pickle and fspath."""
    own = url("memory://bucket/run/step-3/")
    assert (own.name, str(own.parent), str(own / "x")) == (
        "step-3",
        "memory://bucket/run",
        "memory://bucket/run/step-3/x",
    )
    assert as_path(CALL, "file:///tmp/x", remote=True) == Path("/tmp/x")
    assert as_path(CALL, own, remote=True) == own == pickle.loads(pickle.dumps(own))
    assert hash(own) == hash(url("memory://bucket/run/step-3")) and own != url("memory://bucket/run/step-4")


@given(data=st.binary(max_size=60), cuts=st.lists(st.tuples(st.integers(0, 70), st.integers(-1, 70)), max_size=8))
def test_an_open_object_reads_as_a_file(data, cuts):
    """seek and read give the bytes that a local file gives, whatever was read before."""
    path = url()
    path.write_bytes(data)
    file, want = StoreFile(path, len(data)), io.BytesIO(data)
    for at, count in cuts:
        file.seek(at), want.seek(at)
        assert file.read(count) == want.read(count)


def test_requests_grow_while_an_object_is_read_in_order(monkeypatch):
    """Reads in order share requests, which double up to READ bytes. A read elsewhere begins with LEAST, and a read of
    more is one request. Nothing is kept after its last byte."""
    path, asked = url(), []
    path.write_bytes(bytes(40 * LEAST))
    real = Url.range
    monkeypatch.setattr(Url, "range", lambda self, a, b: asked.append((a // LEAST, b // LEAST)) or real(self, a, b))
    file = open_file(CALL, path)
    for _ in range(2 * 14):
        file.read(LEAST // 2)
    assert asked == [(0, 2), (2, 6), (6, 14)] and file.held == b""
    del asked[:]
    file.seek(30 * LEAST)
    file.read(3)
    file.seek(LEAST)
    file.read(9 * LEAST)
    assert asked == [(30, 31), (1, 10)]


def test_a_write_that_fails_leaves_the_old_file():
    """If write(file) raises, the object keeps its old bytes, and no other object is there."""
    path = url()
    write_whole(CALL, path, lambda file: file.write(b"old"))

    def write(file):
        file.write(b"new, but not")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(CALL, path, write)
    assert path.read_bytes() == b"old" and [str(x) for x in path.parent.files()] == [str(path)]


@pytest.mark.parametrize("late", [False, True])
def test_a_folder_is_the_old_or_the_new_one_whichever_request_fails(store, late):
    """After a failure of any request of a replacement, readers find all of the old files or all of the new ones. The
    next replacement succeeds, and the store then holds one folder."""
    old, new = {"a.txt": "old"}, {"a.txt": "new", "b.txt": "more"}
    for after in itertools.count():
        store.store.clear()
        put(url(), old)
        with pytest.MonkeyPatch.context() as patch:
            failing(patch, after, late=late)
            try:
                put(url(), new)
                error = None
            except OSError as failed:
                error = failed
        found = texts_in(url())
        assert found == new if error is None else found in (old, new)
        if error is None and after > 20:
            break
        if error is not None:
            assert str(error).startswith(CALL) and "the store is gone" in str(error) and "  need  " in str(error)
    put(url(), new)
    assert texts_in(url()) == new and len(store.find("/runs/model")) == 3


def test_a_reader_of_a_replaced_folder_gets_the_new_one(monkeypatch):
    """If the folder is replaced after its index was read, the reader returns the new files."""
    put(url(), {"a.txt": "old"})
    real, once = Url.get, []

    def get(self, path):
        if not once:
            once.append(put(url(), {"a.txt": "new"}))
        return real(self, path)

    monkeypatch.setattr(Url, "get", get)
    assert texts_in(url()) == {"a.txt": "new"}


def test_a_changed_file_is_refused(store):
    """A file with other bytes than its index says raises an error that names it."""
    put(url(), {"a.txt": "old"})
    (place,) = [x for x in store.find("/runs/model") if x.endswith("a.txt")]
    store.pipe_file(place, b"odd")
    with pytest.raises(ValueError, match=r"^funcrec.test: `memory://runs/model/files-.*/a.txt` was changed"):
        texts_in(url())
    (url() / "index-of-files").write_bytes(json.dumps({"files": {"../x": ["files-0/../x", 1, 2]}}).encode())
    with pytest.raises(ValueError, match="is damaged"):
        texts_in(url())


def test_a_missing_folder_has_no_files():
    """A folder that is not there opens no file, as a local one."""
    with pytest.raises(FileNotFoundError, match="memory://runs/model"):
        read_folder(CALL, url(), lambda folder: folder.open("a.txt"))
    assert not read_folder(CALL, url(), lambda folder: folder.has("a.txt"))
    assert isinstance(read_folder(CALL, url(), lambda folder: folder), Folder)


def test_a_local_copy_has_the_bytes_and_leaves_nothing(tmp_path):
    """The copy is a file with the name and the bytes of the object, and it is removed after the block."""
    url().write_bytes(b"abc")
    with local_copy(url()) as own:
        assert own.name == "model" and own.read_bytes() == b"abc"
    assert not own.exists()
    with local_copy(tmp_path) as own:
        assert own == tmp_path
