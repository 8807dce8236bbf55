"""Files of checkpoints: many writers, full disks, damaged files and crafted files."""

import contextlib
import errno
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from programs import tensor_files

import funcrec as fr
from funcrec.checkpoint import _format
from funcrec.files import _whole_file


@pytest.fixture
def deadline():
    """Raise an error after 20 s. A call that waits for ever then fails the test."""

    def ring(signum, frame):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# -- many writers ------------------------------------------------------------------------------------------------


def test_many_writers_and_readers_of_one_path(tmp_path, monkeypatch):
    """When several savers share one path and one process id, all savers succeed. Readers see only whole files. The last
    saved file stays."""
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in containers
    path, failures, done = tmp_path / "a.pt", [], threading.Event()
    fr.save(path, {"n": -1, "x": torch.full((5000,), -1)})

    def guarded(work):
        try:
            work()
        except Exception as error:
            failures.append(error)

    def write(first):
        for n in range(first, first + 10):
            fr.save(path, {"n": n, "x": torch.full((5000,), n)})

    def read():
        while not done.is_set():
            found = fr.load(path)
            assert bool((found["x"] == found["n"]).all())

    writers = [threading.Thread(target=guarded, args=(lambda i=i: write(10 * i),)) for i in range(8)]
    readers = [threading.Thread(target=guarded, args=(read,)) for _ in range(2)]
    for thread in (*writers, *readers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert failures == []
    assert fr.load(path)["n"] % 10 == 9
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_what_killed_writers_left_is_removed(tmp_path):
    """A save removes old temporary files that no process holds. Young, locked and all other files stay."""
    old, young, held, pipe = (tmp_path / f".{name}{_whole_file.SUFFIX}" for name in ("old", "young", "held", "pipe"))
    other = tmp_path / ".other.tmp"
    for path in (old, young, held, other):
        path.write_bytes(b"half")
    os.mkfifo(pipe)
    long_ago = time.time() - 2 * _whole_file.STALE_S
    for path in (old, held, other, pipe):
        os.utime(path, (long_ago, long_ago))
    with open(held, "rb") as file:
        _whole_file.fcntl.flock(file, _whole_file.fcntl.LOCK_EX)
        fr.save(tmp_path / "a.pt", 1)
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"a.pt", young.name, held.name, pipe.name, other.name}


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    """After SIGKILL in the middle of a save, the file at the path is whole."""
    saves = "fr.save(sys.argv[1], {'n': n, 'x': torch.full((20000,), n)}); print(n, flush=True)"
    code = f"import sys, torch, funcrec as fr\nfor n in range(10**6): {saves}"
    for wait in (0.0, 0.006):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "a.pt")], stdout=subprocess.PIPE, text=True
        )
        process.stdout.readline()
        time.sleep(wait)
        process.kill()
        process.communicate()
        found = fr.load(tmp_path / "a.pt")
        assert bool((found["x"] == found["n"]).all())


# -- disks -------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_and_the_old_file_stays(tmp_path):
    """When the disk is full, the error says so in four parts. The old file is whole. No other file remains."""
    code = """
import resource, signal, sys, torch, funcrec as fr
fr.save(sys.argv[1], {"x": torch.ones(100)})
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    fr.save(sys.argv[1], {"x": torch.zeros(10**6)})
except OSError as error:
    print(type(error).__name__, error.errno, error)
print(fr.load(sys.argv[1])["x"].sum())
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.pt")], capture_output=True, text=True)
    first, *rest = done.stdout.splitlines()
    assert first.startswith(f"OSError {errno.EFBIG} funcrec.save: the disk of "), done.stderr
    assert [line.split()[0] for line in rest[:3]] == ["got", "need", "try"]
    assert "the file that is there is whole" in rest[2]
    assert rest[3] == "tensor(100.)"
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def make_socket(folder):
    """Return the path of a new socket in the folder, however long the folder's path is."""
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(folder):
        made.bind("socket")
    return folder / "socket"


PLACES = {  # a function that makes a path in a folder: (save's error, load's error, a part of both messages)
    "number": (lambda at: 3, TypeError, TypeError, "`path` is not a string"),
    "bytes": (lambda at: os.fsencode(at / "a.pt"), TypeError, TypeError, "`path` is not a string"),
    "none": (lambda at: None, TypeError, TypeError, "`path` is not a string"),
    "empty": (lambda at: "", ValueError, ValueError, "names no file"),
    "root": (lambda at: "/", ValueError, ValueError, "names no file"),
    "null byte": (lambda at: f"{at}/a\0b", ValueError, ValueError, "names no file"),
    "folder": (lambda at: at, IsADirectoryError, IsADirectoryError, "is not a file"),
    "pipe": (lambda at: os.mkfifo(at / "pipe") or at / "pipe", OSError, ValueError, "is not a file"),
    "socket": (make_socket, OSError, OSError, "socket` "),
    "no folder": (lambda at: at / "no" / "a.pt", FileNotFoundError, FileNotFoundError, "does not exist"),
    "a file as the folder": (lambda at: fr.save(at / "f", 1) / "a.pt", OSError, NotADirectoryError, "a.pt`"),
    "a long name": (lambda at: at / ("a" * 300), OSError, OSError, "cannot be"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_bad_path_is_told(name, tmp_path, deadline):
    """A path that is no path of a file raises an error in four parts, in save and in load. No call blocks. No file
    remains."""
    make, of_save, of_load, fragment = PLACES[name]
    place = make(tmp_path)
    before = {p.name for p in tmp_path.iterdir()}
    for call, kind in ((lambda: fr.save(place, 1), of_save), (lambda: fr.load(place), of_load)):
        with pytest.raises(kind) as error:
            call()
        text = str(error.value)
        assert text.startswith(("funcrec.save: ", "funcrec.load: ")) and fragment in text, text
        assert "\n  got   " in text and "\n  need  " in text
    assert {p.name for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_path_without_permission_is_told(call, tmp_path, monkeypatch):
    """When the system refuses a path, the error has the system's reason and the system's type of error."""
    path = fr.save(tmp_path / "a.pt", 1)

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match=rf"funcrec.{call}: [^$]*got   Permission denied") as error:
        fr.save(path, 2) if call == "save" else fr.load(path)
    assert error.value.errno == errno.EACCES


def test_a_new_file_has_the_usual_mode(tmp_path):
    """A checkpoint has the permissions of any new file."""
    (tmp_path / "plain").write_text("x")
    assert fr.save(tmp_path / "a.pt", 1).stat().st_mode == (tmp_path / "plain").stat().st_mode


# -- damage ------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """Return (path, the file's bytes) of a small checkpoint. A request for more memory than the file's size raises."""
    tree = {
        "w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True, False]), "n": [1, 2.5, None, ("x", {3: "é"})],
        "ids": fr.KeyedJaggedTensor.from_lists({"a": [[1], []]}),
    }  # fmt: skip
    path = fr.save(tmp_path / "a.pt", tree)
    empty_table = _format.empty_table

    def bounded(shape, **options):
        assert shape[0] * options["dtype"].itemsize <= os.path.getsize(path), "memory beyond the file's"
        return empty_table(shape, **options)

    monkeypatch.setattr(_format, "empty_table", bounded)
    return path, path.read_bytes()


def refused(path, content):
    """Return whether load refuses the content with its own error."""
    path.unlink()  # a file system may flush a file that is truncated, which takes milliseconds
    path.write_bytes(content)
    try:
        fr.load(path)
    except ValueError as error:
        assert str(error).startswith("funcrec.load: ") and "\n  got   " in str(error), str(error)
        return True
    return False


def test_every_damaged_file_is_refused(whole):
    """load refuses each changed byte, every cut, and inserted, removed or appended bytes, with its own error."""
    path, good = whole
    draw = random.Random(0)
    for i in range(len(good)):
        assert refused(path, good[:i] + bytes([good[i] ^ 1 << draw.randrange(8)]) + good[i + 1 :]), i
        assert refused(path, good[:i]), i
    for _ in range(1000):
        content = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            at, size = draw.randrange(len(content) + 1), draw.randrange(1, 20)
            match draw.randrange(4):
                case 0:
                    content[at:at] = draw.randbytes(size)
                case 1:
                    del content[at : at + size]
                case 2:
                    content[at : at + size] = draw.randbytes(size)
                case 3:
                    content += draw.randbytes(size)
        assert bytes(content) == good or refused(path, bytes(content))
    assert not refused(path, good)


def crafted(tree, *tensors):
    """Return a file with right checksums, of tensors (dtype, shape, bytes) and then the tree."""
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    content = {"__metadata__": {"format": _format.KIND, "crc32": "0" * 8, "crc32s": ""}}
    body = bytearray()
    for i, (dtype, shape, data) in enumerate([*tensors, ("U8", [len(text)], text)]):
        if gap := -len(body) % _format.ALIGN if data else 0:
            at = [len(body), len(body) + gap]
            content[f"__padding__{i}"] = {"dtype": "U8", "shape": [gap], "data_offsets": at}
            body += bytes(gap)
        at = [len(body), len(body) + len(data)]
        content[f"{i}" if i < len(tensors) else _format.TREE] = {"dtype": dtype, "shape": shape, "data_offsets": at}
        body += data
    return tensor_files.sealed(tensor_files.text_of(tensor_files.checked(content, body)), body, _format.ALIGN)


BOMB = ["f32", "float32", [1 << 40], [2**62, 4], [0, 2**62, 2**62], [-1], [True], 2**70, {}, [], "cpu", "cuda:99",
    "meta",
        "x" * 100, None, float("nan"), ["tensor"], ["list", []], ["dict", [[1, 2], [1, 3]]],
        ["dict", [[["list", []], 1]]],
        ["class", "os.system", ["a"], [1], ["tuple", []]], ["int", "zz"], ["int", "0x" + "f" * 5000], ["list"],
        ["class", "funcrec.Params", ["__class__", "__dict__"], [1, ["dict", []]], ["tuple", []]],
        ["class", "funcrec.Params", ["tables"], [1], ["tuple", []]],
        ["class", "funcrec.Params", ["tables", "dense"], [1, 2], ["tuple", [1]]],
        ["class", "funcrec.Params", [["list"], 3], [1, 2], 7], ["tuple", [[[]]]], ["tensor", 0]]  # fmt: skip


def replaced(draw, node, value):
    """Return the node with one part, at any depth, replaced by `value`, dropped or appended."""
    if isinstance(node, dict) and node and draw.random() < 0.9:
        key = draw.choice(list(node))
        return {**node, key: replaced(draw, node[key], value)}
    if isinstance(node, list) and node and draw.random() < 0.9:
        at = draw.randrange(len(node))
        match draw.randrange(8):
            case 0:
                return node[:at] + node[at + 1 :]
            case 1:
                return [*node, value]
        return [*node[:at], replaced(draw, node[at], value), *node[at + 1 :]]
    return value


def with_tree(content, body, tree):
    """Return the file with another tree after its tensors."""
    text = tensor_files.text_of(tree)
    own = {"dtype": "U8", "shape": [len(text)], "data_offsets": [len(body), len(body) + len(text)]}
    content = {**content, _format.TREE: own, "__metadata__": dict(content["__metadata__"])}
    made = tensor_files.checked(content, body + text)
    return tensor_files.sealed(tensor_files.text_of(made), body + text, _format.ALIGN)


def test_crafted_headers_are_refused_or_read(whole):
    """For a header or a tree with a right checksum but changed parts, load raises its own error or returns a tree. load
    requests no more memory than the file's size."""
    path, good = whole
    content, body = tensor_files.parts(good)
    first, end = tensor_files.places(content)[_format.TREE]
    tree, draw, outcomes = json.loads(body[first:end]), random.Random(1), {True: 0, False: 0}
    for i in range(1500):
        value = draw.choice(BOMB)
        if i % 2:
            made = tensor_files.sealed(tensor_files.text_of(replaced(draw, content, value)), body, _format.ALIGN)
        else:
            made = with_tree(content, body[:first], replaced(draw, tree, value))
        outcomes[refused(path, made)] += 1
    assert outcomes[True] > 1000 and outcomes[False] > 10, outcomes


BYTE, TENSOR = ("U8", [1], b"\0"), {"devices": ["cpu"], "tree": ["tensor"]}
CRAFTED = {
    "no header": tensor_files.sealed(b""),
    "no JSON": crafted(b"{"),
    "a list": crafted([]),
    "no tree": crafted({"devices": []}),
    "no devices": crafted({"tree": 1}),
    "no tensors": tensor_files.sealed(_format.beginning(_format.KIND) + b'00000000","crc32s":""}}'),
    "deep": crafted(b"[" * 100_000),
    "deep and closed": crafted(b'{"devices": [], "tree": ' + b'["list", [' * 400 + b"]]" * 400 + b"}"),
    "no text": crafted(b"\xff\xfe"),
    "a tebibyte": crafted(TENSOR, ("F32", [1 << 38], b"")),
    "more than all memory": crafted(TENSOR, ("F32", [1 << 40] * 9, b"")),
    "none of a size that torch has not": crafted(TENSOR, ("F32", [0, *[1 << 48] * 4], b"")),
    "a tensor twice": crafted({"devices": ["cpu"], "tree": ["list", [["tensor"]] * 2]}, BYTE),
    "a tensor nowhere": crafted({"devices": ["cpu"], "tree": 1}, BYTE),
    "a device for two": crafted(TENSOR, BYTE, BYTE),
    "no bool": crafted(TENSOR, ("BOOL", [1], b"\2")),
    "a device that is none": crafted({"devices": ["x:y"], "tree": ["tensor"]}, ("U8", [0], b"")),
    "a device that is a number": crafted({"devices": [0], "tree": ["tensor"]}, ("U8", [0], b"")),
    "a header beyond the file": struct.pack("<Q", 2**63) + _format.beginning(_format.KIND),
    "only the beginning": crafted(1)[:64],
    "nothing": b"",
    "zeros": bytes(1000),
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_file_is_refused(name, whole):
    """A misleading file raises load's own error before memory is requested."""
    assert refused(whole[0], CRAFTED[name])


class Runs:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize(
    "around", [lambda x: x, lambda x: {"format": "funcrec checkpoint 1", "tree": x, "tensors": []}]
)
def test_a_pickle_is_not_run(around, tmp_path):
    """load refuses files of torch.save as files of another program. No code in these files runs."""
    torch.save(around({"x": torch.ones(1)}), tmp_path / "a.pt")
    torch.save(around(Runs(str(tmp_path / "ran"))), tmp_path / "b.pt")
    for name in ("a.pt", "b.pt"):
        with pytest.raises(ValueError, match=rf"`{name}` is not a whole checkpoint"):
            fr.load(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_a_device_that_is_not_here_is_told(tmp_path):
    """A wrong device raises and suggests a device to use in its place."""
    path = fr.save(tmp_path / "a.pt", torch.ones(1))
    with pytest.raises(TypeError, match="`device` is not a device"):
        fr.load(path, device=3.5)
    for device in ("cuda:99", "nowhere"):
        with pytest.raises(ValueError, match=r"the device cannot be used[^$]*device=\"cpu\""):
            fr.load(path, device=device)
    assert fr.load(path, device="cpu").device.type == "cpu"


def test_a_link_is_followed(tmp_path):
    """A save to a symbolic link writes the target of the link, even if no target exists yet. The link stays."""
    (tmp_path / "there").mkdir()
    link = tmp_path / "latest.pt"
    link.symlink_to(tmp_path / "there" / "state.pt")
    for epoch in (1, 2):
        fr.save(link, {"epoch": epoch})
        assert link.is_symlink() and fr.load(tmp_path / "there" / "state.pt") == {"epoch": epoch}
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["state.pt"]


def test_keep_removes_its_own_checkpoints_only(tmp_path):
    """A user's file named like a checkpoint stays. Checkpoints of lower steps are removed. `step` alone raises."""
    (tmp_path / "step-0000000001").write_text("a user's")
    (tmp_path / "step-0000000002").mkdir()  # a killed save leaves this folder
    (tmp_path / "step-0000000002" / f".rank-0-of-2-{'0' * 16}.funcrec.tmp").touch()
    for step in (10, 20, 5):
        fr.save(tmp_path, {"step": step}, keep=2, step=step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000000001", "step-0000000005", "step-0000000020"]
    assert (tmp_path / "step-0000000001").read_text() == "a user's"
    with pytest.raises(ValueError, match="`step` requires `keep`"):
        fr.save(tmp_path / "a", {}, step=3)


def test_a_disk_that_may_not_be_written_to_is_told(tmp_path, monkeypatch):
    """On a read-only disk, a save to a folder raises the disk's OSError in four parts, even if temporary files cannot
    be removed."""
    opened, mesh = os.open, fr.Mesh.emulated(model=2)
    path = fr.save(tmp_path / "c", {"a": torch.ones(2)}, mesh=mesh)

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    only_read = lambda path, flags, *rest, **k: (refuse if flags & os.O_CREAT else opened)(path, flags, *rest, **k)
    monkeypatch.setattr(os, "open", only_read)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="cannot be written") as told:
        fr.save(path, {"a": torch.zeros(2)}, mesh=mesh)
    assert told.value.errno == errno.EROFS and all(f"\n  {w}" in str(told.value) for w in ("got", "need", "try"))
    assert torch.equal(fr.load(path)["a"], torch.ones(2))
