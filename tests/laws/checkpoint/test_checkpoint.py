"""Checkpoints are whole or absent, and load the same bits."""

import errno
import os
import zipfile

import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close


def tree():
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[1], []], "b": [[2], [3, 4]]})
    params = fr.Params(
        {"t": torch.randn(4, 3, dtype=torch.bfloat16)}, {"w": [torch.randn(2), torch.tensor(float("nan"))]}
    )
    return {"params": params, "ids": ids, "epoch": 3, "names": ("x", None, True, 0.1), "empty": {}}


def test_load_undoes_save(tmp_path):
    """load(save(x)) == x bit for bit, structure, dtypes and static fields included."""
    before = tree()
    assert_trees_close(fr.load(fr.save(tmp_path / "a.pt", before)), before)
    assert fr.load(tmp_path / "a.pt", like=before)["names"] == before["names"]
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    """A save that fails leaves the old checkpoint and no other file."""
    fr.save(tmp_path / "a.pt", {"x": torch.ones(2)})
    with pytest.raises(TypeError, match=r"`tree\['f'\]` cannot be saved"):
        fr.save(tmp_path / "a.pt", {"f": object()})

    def broken(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match=r"the disk of .* is full[^$]*the file that is there is whole") as error:
        fr.save(tmp_path / "a.pt", {"x": torch.zeros(2)})
    assert error.value.errno == errno.ENOSPC
    assert_trees_close(fr.load(tmp_path / "a.pt"), {"x": torch.ones(2)})
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("where", [0.1, 0.5, 0.999])
def test_truncated_files_are_refused(tmp_path, where):
    """A file that is cut anywhere raises an error: it is no whole checkpoint."""
    path = fr.save(tmp_path / "a.pt", {"x": torch.randn(1000)})
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * where)])
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        fr.load(path)


def test_a_flipped_bit_is_refused(tmp_path):
    """A checksum finds a damaged tensor."""
    path = fr.save(tmp_path / "a.pt", {"x": torch.zeros(1000)})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        fr.load(path)


def test_other_files_are_refused(tmp_path):
    """A file of another program and a file of another format raise ValueError. A missing file raises
    FileNotFoundError."""
    (tmp_path / "text").write_text("hello")
    torch.save({"x": torch.ones(1)}, tmp_path / "other.pt")
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("a", "b")
    for name in ("text", "other.pt", "zip"):
        with pytest.raises(ValueError, match="not a whole checkpoint"):
            fr.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        fr.load(tmp_path / "nothing")


def test_a_state_of_another_config_is_refused(tmp_path):
    """`like` reports every leaf that differs in path, shape or dtype."""
    path = fr.save(tmp_path / "a.pt", {"w": torch.ones(2), "v": torch.ones(1), "old": torch.ones(1)})
    with pytest.raises(ValueError) as error:
        fr.load(path, like={"w": torch.ones(3), "v": torch.ones(1, dtype=torch.float64), "new": torch.ones(1)})
    for fragment in ("['w']", "['v']", "`['new']` is missing", "`['old']` is not expected"):
        assert fragment in str(error.value)


LIKE = {
    "a list for a tuple": ([1], (1,), "`tree` is another kind of value", "list", "tuple"),
    "a number for a tensor": ({"n": 1}, {"n": torch.ones(1)}, "`['n']` has another shape or dtype", "int", "f32[1]"),
    "a tensor for a number": ({"n": torch.ones(1)}, {"n": 1}, "`['n']` has another shape or dtype", "f32[1]", "int"),
    "an empty dict for a list": ({"n": {}}, {"n": []}, "`['n']` has another", "dict", "list"),
    "other static fields": (
        fr.KeyedJaggedTensor.from_lists({"a": [[1]]}),
        fr.KeyedJaggedTensor.from_lists({"b": [[1]]}),
        "`tree` is another kind",
        "'a'",
        "'b'",
    ),
}


@pytest.mark.parametrize("name", LIKE)
def test_like_compares_more_than_shapes(tmp_path, name):
    """`like` reports nodes of another kind and other static fields, as it reports shapes."""
    found, wanted, *fragments = LIKE[name]
    path = fr.save(tmp_path / "a.pt", found)
    assert_trees_close(fr.load(path, like=found), found)
    with pytest.raises(ValueError) as error:
        fr.load(path, like=wanted)
    for fragment in fragments:
        assert fragment in str(error.value)
