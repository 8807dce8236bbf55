"""Checkpoints that real ranks write and read. Each rank handles its own part. All ranks succeed, or no rank
succeeds."""

import pytest
import torch
from programs import moving, saving, training
from programs.as_staged import as_staged
from programs.moving import bits
from programs.training import plan_of

import funcrec as fr
from funcrec.testing import assert_trees_close

GRID = {"x": 2, "y": 2}


def test_two_ranks_save_and_load_any_plan(ranks, tmp_path):
    """Two ranks load the state that they saved under one plan under any other plan, to the bit. Dense parameters are
    sharded or not."""
    state = moving.full_state("by_table", torch.float32)
    saves = [({"x": 2}, kind, dense) for kind, dense in (("row_wise", ()), ("column_wise", ("x",)))]
    loads = [
        ({"x": 2}, kind, ("x",) if kind == "row_wise" else ())
        for kind in ("row_wise", "column_wise", "table_wise", "replicated")
    ]
    for own in ranks(2).run(saving.square, tmp_path, state, saves, loads, "by_table"):
        for got in own:
            assert_trees_close(bits(got), bits(state))


def test_four_ranks_save_and_any_number_loads(ranks, tmp_path):
    """One process, two ranks and an emulated mesh load, to the bit, the state that four ranks save in a grid. The
    folder equals the folder of an emulated mesh."""
    state = moving.full_state("adam", torch.bfloat16)
    paths = ranks(4).run(saving.saved, tmp_path / "four", state, GRID, "grid", "adam", ("y",))
    assert paths == [tmp_path / "four"] * 4
    tree = fr.load(tmp_path / "four")
    assert_trees_close(bits(tree["state"]), bits(state))
    assert tree["position"] == (1, 2) and tree["history"] == [{"loss": 0.5}]
    for got in ranks(2).run(saving.loaded, tmp_path / "four", {"z": 2}, "column_wise", "adam"):
        assert_trees_close(bits(got["state"]), bits(state))
    emulated = saving.saved(tmp_path / "emulated", state, GRID, "grid", "adam", ("y",), False)
    files = lambda at: [p.read_bytes() for p in sorted(at.iterdir()) if p.name.startswith("rank")]
    assert files(emulated) == files(tmp_path / "four") and len(files(emulated)) == 4


@pytest.mark.parametrize(
    ("stage", "kind", "fragment"),
    [
        ("tree", "TypeError", "`tree['bad']` cannot be saved"),
        ("apart", "ValueError", "`tree['rank']` is not the same on all ranks"),
        ("structure", "TypeError", "rank 1 saves another tree than rank 0"),
        ("write", "OSError", "No space left"),
        ("manifest", "OSError", "No space left"),
    ],
)
def test_all_ranks_hear_of_one_that_fails(stage, kind, fragment, ranks, tmp_path):
    """If one rank cannot save, all ranks raise the same type of error. The errors of the other ranks name that rank.
    The old checkpoint is whole, and no file of the new checkpoint remains."""
    state, failing = moving.full_state("adam", torch.float32), 0 if stage == "manifest" else 1
    heard = ranks(2).run(saving.told_of_failure, tmp_path / "a", state, failing, stage)
    for rank, (said, same, names) in enumerate(heard):
        assert said.startswith(f"{kind}: ") and fragment in said, said
        if rank != failing and stage not in ("apart", "structure"):
            assert f"rank {failing} could not " in said, said
        assert_trees_close(bits(same), bits(state))
        assert names[0] == "manifest" and len(names) == 3


def test_all_ranks_hear_of_a_call_that_one_makes_otherwise(ranks, tmp_path):
    """If one rank passes an argument of a wrong type, or another mesh, plan or shape, all ranks raise at once. The
    errors of the other ranks name the rank or the argument. The old checkpoint stays. A right call succeeds
    afterwards."""
    state = moving.full_state("adam", torch.float32)
    (first, same, path), (second, _, _) = ranks(2).run(saving.told_of_arguments, tmp_path / "a", state)
    shared = {"save asynchronous": "`asynchronous`", "save rows": "rank 1 saves another tree", "load plan": "`plan`"}
    for name in saving.WRONG:
        want = shared.get(name, "rank 1 could not ")
        assert second[name] and want in first[name], (name, first[name], second[name])
        assert first[name].split(":")[0] == second[name].split(":")[0], (name, first[name], second[name])
    assert_trees_close(bits(same), bits(state))
    assert_trees_close(fr.load_safetensors(path), state.tables)


def test_all_ranks_hear_of_damage(ranks, tmp_path):
    """The rank that reads a damaged part names file, table and rows. The error of the other rank names the first
    rank."""
    state, plan = moving.full_state("adam", torch.float32), plan_of("row_wise", {"x": 2})
    ranks(2).run(saving.saved, tmp_path / "a", state, {"x": 2}, "row_wise", "adam")
    first, second = ranks(2).run(saving.told_of_damage, tmp_path / "a", plan, 1)
    assert "tree['state'].tables['a'], rows 6 to 10, in `rank-1-of-2-" in second and "wrong checksum" in second
    assert "rank 1 could not load it" in first and "tables['a'], rows 6 to 10" in first


def test_copies_that_trained_apart_are_refused(ranks, tmp_path):
    """Replicas with equal bits are written once. If replicas differ, all ranks raise. The error says how to synchronize
    the replicas."""
    state = moving.full_state("adam", torch.float32)
    for said, same in ranks(2).run(saving.copies_apart, tmp_path / "a", state):
        assert "copies that trained apart" in said and "sync_replicas" in said
        assert_trees_close(bits(same), bits(state))
    table = sum(
        t.nbytes for t in [*state.tables.values(), *training.OPTIMIZERS["adam"]().init(state.tables)["a"].values()]
    )
    assert sum(p.stat().st_size for p in (tmp_path / "a").iterdir()) < 60 * table


@pytest.mark.parametrize("copy_bytes", [None, 300, 0])
def test_ranks_train_on_while_they_save(copy_bytes, ranks, tmp_path):
    """A save in the background of donated steps and their exchanges has the bits of the given state, for any limit of
    copied bytes."""
    for wants, loaded in ranks(2).run(as_staged, saving.saved_beside, tmp_path / "a", copy_bytes):
        for want, got in zip(wants, loaded, strict=True):
            assert_trees_close(bits(got), bits(want))
