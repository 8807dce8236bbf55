"""Folders of checkpoints. A CRC covers every byte of every file. A load of any other folder says what the folder is."""

import random

import pytest
import torch

import funcrec as fr

MESH = fr.Mesh.emulated(model=2)
PLAN = fr.Plan({"a": fr.row_wise("model"), "b": fr.table_wise("model", rank=0)})


def a_state():
    sparse, dense = fr.optim.rowwise_adagrad(0.1), fr.optim.dense(torch.optim.SGD, lr=0.1)
    step = fr.train_step(lambda params, batch: 0.0, sparse=sparse, dense=dense, mesh=MESH, plan=PLAN)
    tables = {"a": torch.arange(12.0).reshape(6, 2), "b": torch.ones(3, 2)}
    return step.init(fr.Params(tables=tables, dense={"w": torch.ones(3)}))


@pytest.fixture
def folder(tmp_path):
    """Return a checkpoint folder of two ranks. Next to it is a folder in which a rank had no tensor to write."""
    path = fr.save(tmp_path / "state", {"state": a_state(), "epoch": 3})
    fr.save(tmp_path / "one", {"w": torch.ones(3)}, mesh=MESH)
    return path


def refusal(call):
    """Return the text of load's own error."""
    with pytest.raises(ValueError, match=r"^funcrec\.load: ") as told:
        call()
    assert all(f"\n  {word} " in str(told.value) for word in ("got", "need", "try"))
    return str(told.value)


def put(path, content):
    """Write the content to a new file. A file system may flush one that is truncated, which takes milliseconds."""
    path.unlink()
    path.write_bytes(content)


LOADS = {
    "whole": fr.load,
    "mapped": lambda path: fr.load(path, mmap=True),
    "planned": lambda path: fr.load(path, plan=PLAN, mesh=MESH),
}


@pytest.mark.parametrize(("which", "how"), [*(("state", how) for how in LOADS), ("one", "whole"), ("one", "mapped")])
def test_every_flipped_bit_of_a_folder_is_refused(which, how, folder):
    """load refuses a flipped bit in any byte of any file of a folder, and names the file. This covers tensors, gaps
    between tensors, a rank's index, and files without tensors. Mapped and planned loads try every third byte."""
    path, draw = folder.parent / which, random.Random(0)
    for name in sorted(p.name for p in path.iterdir()):
        good = (path / name).read_bytes()
        for i in range(0, len(good), 1 if how == "whole" else 3):
            put(path / name, good[:i] + bytes([good[i] ^ 1 << draw.randrange(8)]) + good[i + 1 :])
            assert name in refusal(lambda: LOADS[how](path)) or name == "manifest", (name, i)
        for bad in (good[:-1], good + b"\0", b""):
            put(path / name, bad)
            assert name in refusal(lambda: LOADS[how](path)) or name == "manifest"
        put(path / name, good)
    LOADS[how](path)


def test_a_file_of_no_tensor_is_missed(folder):
    """A rank's file without tensors belongs to the checkpoint. load reports the file when it is missing."""
    path = folder.parent / "one"
    (empty,) = [p for p in path.iterdir() if p.name.startswith("rank-1")]
    empty.unlink()
    assert f"`{empty.name}`" in refusal(lambda: fr.load(path))


def test_a_folder_that_is_no_checkpoint_says_what_it_is(tmp_path, folder):
    """A load of a folder of checkpoints, of a folder without its manifest, or of any other folder raises. The error
    says what the folder is and what to write."""
    kept = tmp_path / "kept"
    for step in (1, 2):
        fr.save(kept, {"epoch": step}, step=step, keep=2)
    with pytest.raises(IsADirectoryError, match="a folder of checkpoints") as told:
        fr.load(kept)
    assert "step-0000000002" in str(told.value) and "fr.load(fr.latest(" in str(told.value)
    (folder / "manifest").unlink()
    with pytest.raises(FileNotFoundError, match="has no manifest") as told:
        fr.load(folder)
    assert "rank-0-of-2" in str(told.value)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    with pytest.raises(IsADirectoryError, match="is not a file, nor a folder that holds a checkpoint") as told:
        fr.load(tmp_path / "other")


def test_the_manifest_alone_is_no_checkpoint(folder):
    """A load of a folder's manifest raises and names the folder, which is the checkpoint."""
    assert f"fr.load({str(folder)!r})" in refusal(lambda: fr.load(folder / "manifest"))
