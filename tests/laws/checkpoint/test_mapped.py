"""Checkpoints mapped from their files: the same bits, a CRC check of every byte, and files that never change."""

import gc
from pathlib import Path

import pytest
import torch

import funcrec as fr
from funcrec.checkpoint import _folder
from funcrec.testing import assert_trees_close


def tree():
    big = torch.arange(40_000.0).reshape(1000, 40)
    return {"w": big, "b": torch.tensor([True, False]), "none": torch.ones(0, 3), "n": 3, "h": big[:3].bfloat16(),
        "one": torch.tensor(2.0)}  # fmt: skip


def sharded(plan):
    mesh, sparse = fr.Mesh.emulated(x=2), fr.optim.adagrad(lr=0.1)
    tables = {"a": tree()["w"]}
    state = fr.TrainState(torch.tensor(1), tables, sparse.init(tables), {}, {}, fr.key(0))
    return state, fr.reshard(state, plan, mesh=mesh, sparse=sparse)


def is_mapped(x, path):
    """Return whether x lies in a mapping of the file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(n, 16) for n in line.split()[0].split("-"))
        if first <= x.data_ptr() < last:
            return str(path) in line
    return False


def test_a_mapped_tree_is_the_tree(tmp_path):
    """load(mmap=True) gives the bits of load. A write to a tensor changes neither the file nor another load. Tensors
    stay valid when the file is replaced or removed."""
    path = fr.save(tmp_path / "a.pt", tree())
    before, found = path.read_bytes(), fr.load(path, mmap=True)
    assert_trees_close(found, tree())
    assert is_mapped(found["w"], path) and is_mapped(found["one"], path) and found["w"].data_ptr() % 64 == 0
    found["w"].fill_(7)
    assert path.read_bytes() == before
    assert_trees_close(fr.load(path, mmap=True), tree())
    again = fr.load(path, mmap=True)
    fr.save(path, 1)
    path.unlink()
    gc.collect()
    assert_trees_close(again, tree())


@pytest.mark.parametrize("plan", [fr.table_wise("x", rank=1), fr.row_wise("x"), fr.column_wise("x")])
def test_a_folder_is_mapped_where_a_table_lies_in_one_run(plan, tmp_path, monkeypatch):
    """From the files of ranks, a table of one rank is mapped, in any number of blocks. A table cut over ranks is
    read."""
    monkeypatch.setattr(_folder, "BLOCK_BYTES", 20_000)
    state, own = sharded(fr.Plan({"a": plan}))
    path = fr.save(tmp_path / "a", own)
    found = fr.load(path, mmap=True)
    assert_trees_close(found, state)
    assert is_mapped(found.tables["a"], path) == (plan.kind == "table_wise")


def test_a_damaged_file_is_not_mapped(tmp_path):
    """A changed byte is found before a mapped tensor is returned."""
    path = fr.save(tmp_path / "a.pt", tree())
    content = bytearray(path.read_bytes())
    first = content.index(tree()["w"].numpy().tobytes())
    for at in (64, first, first + 160_000, first + 160_000 + 64):
        content[at] ^= 1
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"wrong checksum|is not a whole checkpoint"):
            fr.load(path, mmap=True)
        content[at] ^= 1


def test_a_mapped_state_is_donated(tmp_path):
    """A donated step of a mapped state equals that of a state that was read. The step does not change the file."""
    tables = {"t": torch.ones(8, 2)}
    step = fr.train_step(
        lambda p, ids: fr.lookup(p.tables, ids, [fr.FeatureConfig("k", table="t")]).values.sum() * p.dense["w"],
        sparse=fr.optim.adagrad(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    path = fr.save(tmp_path / "a.pt", step.init(fr.Params(tables, {"w": torch.tensor(2.0)})))
    before, ids = path.read_bytes(), fr.KeyedJaggedTensor.from_lists({"k": [[1, 2], [3]]})
    fast = fr.jit(step, donate=("state",))
    got, _ = fast(fr.load(path, mmap=True), ids)
    want, _ = step(fr.load(path), ids)
    assert_trees_close(got, want, rtol=1e-6)
    assert path.read_bytes() == before
