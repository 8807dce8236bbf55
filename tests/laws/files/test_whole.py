"""Files and folders are whole or absent: their modes, the leftovers of killed writers, and the system's errors."""

import errno
import os
import stat
import time
from unittest import mock

import pytest
import torch

import funcrec as fr
from funcrec.files import _whole_file

WEIGHTS = fr.Params({"item": torch.ones(3, 2)}, {})


def write(kind, path):
    """Write a checkpoint, or a folder of weights, over an existing checkpoint or folder."""
    fr.save(path, {"x": 1}) if kind == "file" else fr.save_weights(path, WEIGHTS, overwrite=True)


def is_there(kind, path):
    return bool(fr.load(path)) if kind == "file" else [x.name for x in path.iterdir()] == ["weights.safetensors"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_replaces_has_the_mode_of_what_was_there(kind, tmp_path):
    """A file or folder that only its owner can read keeps that mode when it is written again."""
    path = tmp_path / "kept"
    write(kind, path)
    mode = stat.S_IMODE(path.stat().st_mode)
    path.chmod(0o700)
    seen = []
    with mock.patch.object(_whole_file.os, "fsync", lambda fd: seen.append(stat.S_IMODE(os.fstat(fd).st_mode))):
        write(kind, path)
    # the mode is set before the rename, and the last fsync for a folder is that of its parent
    assert seen[0] == 0o700 if kind == "file" else seen[-2] == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o700 != mode and is_there(kind, path)


@pytest.mark.parametrize("writer", ["file", "folder"])
def test_what_killed_writers_left_goes(writer, tmp_path):
    """The next write removes an old file or folder next to it that no process holds. Young files and held files
    stay."""
    names = {n: tmp_path / f".{n}{_whole_file.SUFFIX}" for n in ("file", "folder", "young", "held")}
    names["file"].write_bytes(b"1")
    for n in ("folder", "young", "held"):
        names[n].mkdir()
        (names[n] / "weights.safetensors").write_bytes(b"1")
    long_ago = time.time() - 2 * _whole_file.STALE_S
    for n in ("file", "folder", "held"):
        os.utime(names[n], (long_ago, long_ago))
    fd = os.open(names["held"], os.O_RDONLY)
    try:
        _whole_file.fcntl.flock(fd, _whole_file.fcntl.LOCK_EX)
        write(writer, tmp_path / "new")
    finally:
        os.close(fd)
    assert {n for n, p in names.items() if p.exists()} == {"young", "held"}
    assert is_there(writer, tmp_path / "new")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_full_disk_is_told_and_leaves_what_was(kind, tmp_path, monkeypatch):
    """When the disk is full, the error has the system's number and says what exists. No temporary file stays."""
    path = tmp_path / "kept"
    write(kind, path)

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_whole_file.os, "fsync", full)
    with pytest.raises(OSError, match=f"(?s)disk of .* is full.*the {kind} that is there is whole") as raised:
        write(kind, path)
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["kept"] and is_there(kind, path)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_name_that_is_too_long_is_told(kind, tmp_path):
    """A name that is too long raises an error in four parts. No file stays."""
    with pytest.raises(OSError, match=r"(?s)cannot be written.*got .*need .*try .*nothing is there|as it was"):
        write(kind, tmp_path / ("x" * 300))
    assert os.listdir(tmp_path) == []
