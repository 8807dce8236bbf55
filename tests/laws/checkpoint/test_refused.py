"""What cannot be saved or loaded raises with what is wrong. Sharded tables are saved whole, and other files stay."""

from typing import Any

import pytest
import torch
from programs.refused import assert_refused

import funcrec as fr
from funcrec.checkpoint import _folder, _safetensors
from funcrec.testing import assert_trees_close

MESH = fr.Mesh.emulated(x=2)
PLAN = fr.Plan({"a": fr.row_wise("x"), "b": fr.table_wise("x", rank=1)})
TABLES = {"a": torch.arange(12.0).view(6, 2), "b": torch.ones(3, 4)}


@fr.pytree(static=("function",))
class Named:
    x: torch.Tensor
    function: Any


def loaded(folder, tables, slots):
    """Return a saved state of these tables and slots, loaded under a plan."""
    path = fr.save(folder / "state", fr.TrainState(torch.tensor(0), tables, slots, {}, {}, fr.key(0)))
    return fr.load(path, plan=PLAN, mesh=MESH, sparse=fr.optim.sgd())


REFUSED = {
    "codes on ranks": (
        lambda at: fr.save(at / "x", fr.shard_tables(fr.quantize(TABLES, "int8"), PLAN, MESH)), TypeError,
        "`tree` has quantised tables on a mesh", "['a', 'b']"),
    "a static function": (
        lambda at: fr.save(at / "x", [Named(torch.ones(1), len)]), TypeError, "`tree[0]` cannot be saved",
        "numbers, strings and tuples as static fields"),
    "tables in a tuple": (lambda at: loaded(at, (torch.ones(3, 2),), {}), ValueError, "without tables by name",
        "tuple"),
    "slots in a list": (lambda at: loaded(at, TABLES, [3]), ValueError, "without slots by name", "list"),
    "no slots of a table": (lambda at: loaded(at, TABLES, {"a": {}}), ValueError,
        "table 'b' of the checkpoint has no slots", "NoneType"),
    "a map of a store": (lambda at: fr.load("memory://run/x", mmap=True), ValueError,
        "`mmap` requires a file of this machine", "memory://run/x"),
    "a name that is not text": (lambda at: fr.save_safetensors(at / "x", {"a\udc80": torch.ones(1)}), ValueError,
        "is not text", "surrogates not allowed"),
    "a text that is not text": (
        lambda at: fr.save_safetensors(at / "x", {"a": torch.ones(1)}, metadata={"k": "\udc80"}), ValueError,
        "metadata['k']", "is not text"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    """Each call raises in four parts, and leaves no half of a file."""
    call, *rest = REFUSED[name]
    assert_refused(lambda: call(tmp_path), *rest)
    assert not (tmp_path / "x").exists()


def test_a_header_beyond_the_formats_is_refused(tmp_path, monkeypatch):
    """Names beyond the format's largest header raise, and leave no file. (That size is 100 MB.)"""
    monkeypatch.setattr(_safetensors, "MOST_HEADER", 100)
    with pytest.raises(ValueError, match="the names do not fit into the header"):
        fr.save_safetensors(tmp_path / "x", {"a" * 100: torch.ones(1)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", [{}, {"mesh": MESH}], ids=["alone", "mesh"])
def test_sharded_tables_without_a_state_are_saved_whole(how, tmp_path):
    """Sharded tables, anywhere in a tree, load as the whole tables, also with one open file at a time."""
    tree = {"now": fr.shard_tables(TABLES, PLAN, MESH), "epoch": 3}
    path = fr.save(tmp_path / "x", tree, **how)
    assert_trees_close(fr.load(path), {"now": TABLES, "epoch": 3}, rtol=0, atol=0)


def test_few_files_are_open_at_a_time(tmp_path, monkeypatch):
    """A folder of many ranks' files loads with few of them open."""
    path = fr.save(tmp_path / "x", fr.shard_tables(TABLES, PLAN, MESH))
    monkeypatch.setattr(_folder, "MOST_OPEN", 1)
    assert_trees_close(fr.load(path), TABLES, rtol=0, atol=0)


def test_a_folder_of_another_program_is_not_removed(tmp_path):
    """`keep` removes old checkpoints, and no folder with a step's name that holds other files."""
    other = tmp_path / "step-0000000000" / "notes.txt"
    other.parent.mkdir()
    other.write_text("mine")
    for step in (1, 2, 3):
        fr.save(tmp_path, {"x": torch.ones(2)}, keep=1, step=step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000000000", "step-0000000003"]
    assert other.read_text() == "mine"
