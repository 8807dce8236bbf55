"""save_safetensors writes the files of the safetensors library, byte for byte."""

import os
import sys

import pytest
import torch
from programs import moving, training
from safetensors.torch import load_file, save_file

import funcrec as fr
from funcrec.checkpoint import _safetensors
from funcrec.files import _whole_file
from funcrec.testing import assert_trees_close


def tensors():
    base = torch.arange(12.0).reshape(3, 4)
    made = {str(d): (base if d.itemsize > 1 else base % 2).to(d) for d in _safetensors.NAMES}
    return {**made, "transposed": base.T, "part": base[1:, ::2], "one": torch.tensor(3.0), "none": torch.ones(0, 3),
        "layer.\u03b8 \"w\"": base.half()}  # fmt: skip


@pytest.mark.parametrize("metadata", [None, {"step": "12"}])
def test_a_file_is_that_of_the_formats_own_library(metadata, tmp_path):
    """save_safetensors writes the bytes of safetensors for every dtype, shape and stride. Each library reads the file
    of the other library to the bit, mapped or not."""
    want = tensors()
    path = fr.save_safetensors(tmp_path / "ours", want, metadata=metadata)
    save_file({n: x.contiguous() for n, x in want.items()}, tmp_path / "theirs", metadata=metadata)
    assert path.read_bytes() == (tmp_path / "theirs").read_bytes()
    bits = lambda own: {n: x.reshape(-1).view(torch.uint8) for n, x in sorted(own.items())}
    for got in (load_file(path), fr.load_safetensors(path), fr.load_safetensors(path, mmap=True)):
        assert {n: (x.shape, x.dtype) for n, x in got.items()} == {n: (x.shape, x.dtype) for n, x in want.items()}
        assert_trees_close(bits(got), bits({n: x.contiguous() for n, x in want.items()}))
    empty = fr.save_safetensors(tmp_path / "empty", {})
    assert load_file(empty) == fr.load_safetensors(empty) == {}


def test_a_mapped_tensor_is_this_processs(tmp_path):
    """A write to a loaded tensor changes neither the file nor another load. A tensor stays valid after the file is
    removed."""
    path = fr.save_safetensors(tmp_path / "a", {"w": torch.ones(3000)})
    before = path.read_bytes()
    for how in (False, True):
        first, again = (fr.load_safetensors(path, mmap=how)["w"] for _ in range(2))
        first.fill_(7)
        assert path.read_bytes() == before and bool((again == 1).all())
    path.unlink()
    assert bool((again == 1).all())


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "replicated"])
def test_sharded_tables_are_written_whole(kind, tmp_path):
    """The file of a state's sharded tables equals that of the same tables in one process."""
    state, mesh = moving.full_state("adam", torch.bfloat16), fr.Mesh.emulated(x=2)
    own = fr.reshard(state, training.plan_of(kind, {"x": 2}), mesh=mesh, sparse=training.OPTIMIZERS["adam"]())
    calls = ((own.tables, mesh), (state.tables, None))
    paths = [fr.save_safetensors(tmp_path / f"{i}", t, mesh=m) for i, (t, m) in enumerate(calls)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    """A write that fails leaves the old file and no other file."""
    path = fr.save_safetensors(tmp_path / "a", {"w": torch.ones(3)})
    before = path.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_whole_file.os, "fsync", full)
    with pytest.raises(OSError, match="the disk of"):
        fr.save_safetensors(path, {"w": torch.zeros(3000)})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("cut", [0, 7, 30, -1])
def test_a_file_that_is_cut_off_is_refused(cut, tmp_path):
    """A file without its end, or with bytes after its end, raises a ValueError that names the file."""
    path = fr.save_safetensors(tmp_path / "a", {"w": torch.ones(3)})
    content = path.read_bytes()
    for damaged in (content[:cut], content + b"1"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="`a` is not a safetensors file"):
            fr.load_safetensors(path)


def test_without_the_package_it_is_named(tmp_path, monkeypatch):
    """Without safetensors, a file is still written. A read raises and says what to install."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    path = fr.save_safetensors(tmp_path / "a", {"w": torch.ones(3)})
    with pytest.raises(ModuleNotFoundError, match=r"funcrec\[safetensors\]"):
        fr.load_safetensors(path)
