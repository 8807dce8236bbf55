"""Checkpoints of sharded states: from any plan and number of ranks to any other, and interrupted or damaged saves."""

import contextlib
import errno
import os
import random
import signal
import tempfile
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import moving, training
from programs.moving import bits
from programs.training import plan_of

import funcrec as fr
from funcrec.checkpoint import _folder, _format, _place, _rank_parts
from funcrec.core._tree import tree_structure
from funcrec.files import _tensors, _whole_file
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@st.composite
def laid_out(draw, replicas=False):
    """Return random (axes, plan, dense_axes) on one to four ranks. Shrinks to replicated tables on one rank."""
    mesh = draw(frs.meshes(max_ranks=4))
    dense_axes = draw(st.lists(st.sampled_from(mesh.axis_names), unique=True))
    return mesh.shape, draw(frs.plans(training.SHAPES, mesh, replicas=replicas)), tuple(dense_axes)


@given(
    st.sampled_from(list(training.OPTIMIZERS)),
    laid_out(replicas=True),
    laid_out(replicas=True),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 100, 1 << 24]),
    st.sampled_from([1, 1 << 20]),
)
def test_every_plan_is_loaded_under_every_other(tmp_path_factory, name, first, second, dtype, block, split):
    """A state saved under one plan loads to the bit under any other plan, in one process, and from one file into a
    plan. The loaded layout equals the layout of train_step's init."""
    folder, state, sparse = (
        tmp_path_factory.mktemp("square"),
        moving.full_state(name, dtype),
        training.OPTIMIZERS[name](),
    )
    (axes, plan, dense), (others, other, other_dense) = first, second
    here, there = fr.Mesh.emulated(**axes), fr.Mesh.emulated(**others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_folder, "BLOCK_BYTES", block)
        patch.setattr(_folder, "ROWS", 1)
        patch.setattr(_rank_parts, "SPLIT_BYTES", split)
        patch.setattr(_format, "CHUNK", max(16, block))
        own = fr.reshard(state, plan, mesh=here, sparse=sparse, dense_axes=dense)
        path = fr.save(folder / "a", {"state": own, "more": [1, torch.arange(3)]})
        whole = fr.load(path)
        same = fr.load(path, plan=plan, mesh=here, sparse=sparse, dense_axes=dense)["state"]
        moved = fr.load(path, plan=other, mesh=there, dense_axes=other_dense)["state"]
        one = fr.save(folder / "one.pt", {"state": state})
        placed = fr.load(one, plan=plan, mesh=here, sparse=sparse, dense_axes=dense)["state"]
    assert_trees_close(bits(whole["state"]), bits(state))
    assert whole["more"][0] == 1 and whole["more"][1].tolist() == [0, 1, 2]
    for got in (same, placed):
        assert tree_structure(got) == tree_structure(own)
        assert_trees_close(bits(got), bits(own))
    assert_trees_close(bits(fr.gather_state(moved, there)), bits(state))
    if "lamb" not in name or not any(p.kind.endswith("column_wise") or p.kind == "grid" for _, p in other.placements):
        want = fr.reshard(state, other, mesh=there, sparse=sparse, dense_axes=other_dense)
        got = fr.load(path, plan=other, mesh=there, sparse=sparse, dense_axes=other_dense)["state"]
        assert_trees_close(bits(got), bits(want))


def test_training_goes_on_from_a_checkpoint():
    """A loaded state, with or without its optimizer, trains to the bits of the saved state."""
    axes, opts = {"x": 2}, training.optimizers("by_table")
    mesh, plan = fr.Mesh.emulated(**axes), plan_of("row_wise", axes)
    step = fr.train_step(training.loss_fn, **opts, mesh=mesh, plan=plan)
    state, _ = step(step.init(training.params()), training.batch(0, 4))
    with tempfile.TemporaryDirectory() as folder:
        path = fr.save(f"{folder}/a", state)
        loaded = [fr.load(path, plan=plan, mesh=mesh, **how) for how in ({}, {"sparse": opts["sparse"]})]
    want = fr.gather_state(step(state, training.batch(1, 4))[0], mesh)
    for one in loaded:
        got = fr.gather_state(step(one, training.batch(1, 4))[0], mesh)
        assert_trees_close(bits(got), bits(want))


# -- interrupted saves -------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """The error of a stopped simulated machine."""


def small(value):
    """Return a state on two emulated ranks. All values of the state are one number."""
    tables = {"a": torch.full((9, 2), value), "b": torch.full((5, 3), value)}
    sparse = fr.optim.adagrad(lr=0.1)
    state = fr.TrainState(
        torch.tensor(int(value)), tables, sparse.init(tables), {"w": torch.full((3,), value)}, {}, fr.key(0)
    )
    return fr.reshard(state, plan_of_two(), mesh=fr.Mesh.emulated(x=2), sparse=sparse)


def plan_of_two():
    return fr.Plan({"a": fr.row_wise("x"), "b": fr.column_wise("x")})


def stopping(patch, after):
    """Return the count of completed operations, in a list of one item. After `after` operations, the file system fails
    for good."""
    done = [0]

    def counted(function):
        def run(*args, **kwargs):
            if done[0] == after:
                raise Stopped
            done[0] += 1
            return function(*args, **kwargs)

        return run

    for name in ("replace", "fsync", "unlink", "mkdir", "rmdir", "utime", "open"):
        patch.setattr(_whole_file.os, name, counted(getattr(os, name)))
    patch.setattr(_folder, "write_file", counted(_folder.write_file))
    for name in ("header_of", "write_bytes"):
        patch.setattr(_tensors, name, counted(getattr(_tensors, name)))
    patch.setattr(_whole_file.Path, "unlink", counted(_whole_file.Path.unlink))
    return done


@pytest.mark.parametrize("keep", [None, 1])
def test_a_file_system_that_stops_after_write_n_leaves_a_whole_checkpoint(keep, tmp_path):
    """Wherever the disk operations of a save stop for good, the newest whole checkpoint loads: the old or the new
    checkpoint. The next save succeeds as without the failure."""
    at = lambda path: path if keep is None else fr.latest(path)
    seen = set()
    for n in range(200):
        path = tmp_path / f"{n}"
        how = {} if keep is None else {"keep": keep}
        fr.save(path, small(1.0), **how)
        with pytest.MonkeyPatch.context() as patch:
            stopping(patch, n)
            with contextlib.suppress(Stopped):
                fr.save(path, small(2.0), **how)
                break
        found = fr.load(at(path))
        value = int(found.step)
        assert set(found.tables["a"].unique().tolist()) == set(found.tables["b"].unique().tolist()) == {value}
        seen.add(value)
        last = fr.save(path, small(3.0), **how)
        assert int(fr.load(at(path)).step) == 3 and at(path) == last
    assert seen == {1, 2} and n > 20


def save_for_ever(folder, pipe):
    """Save again and again until the process is killed. A separate process runs this function."""
    try:
        for n in range(10**6):
            own = small(float(n))
            fr.save(folder / "one", own)
            fr.save(folder / "kept", own, keep=2)
            os.write(pipe, b".")
    finally:
        os._exit(1)


def test_kill_9_at_random_moments_leaves_a_whole_checkpoint(tmp_path):
    """After SIGKILL at any of 20 moments of saving, the checkpoint loads and comes from one save."""
    draw, steps = random.Random(0), set()
    for i in range(20):
        folder, (reader, writer) = tmp_path / f"{i}", os.pipe()
        folder.mkdir()
        pid = os.fork()
        if not pid:
            save_for_ever(folder, writer)
        os.close(writer)
        for _ in range(1 + i % 2):
            assert os.read(reader, 1) == b"."
        time.sleep(draw.random() * 0.04)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        for path in (folder / "one", fr.latest(folder / "kept")):
            found = fr.load(path)
            assert all(bool((x == found.step).all()) for x in (*found.tables.values(), found.dense["w"]))
            steps.add(int(found.step))
    assert len(steps) > 1


def test_all_is_flushed_before_the_name_changes(tmp_path, monkeypatch):
    """When the manifest gets its name, every file of the ranks is flushed to disk, and so is the file's name."""
    done, paths = [], {}
    fsync, replace = os.fsync, os.replace

    def sync(fd):
        done.append(("sync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def rename(old, new):
        paths[str(new)] = str(old)
        done.append(("name", str(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    folder = str(fr.save(tmp_path / "a", small(1.0)))
    last = done.index(("name", f"{folder}/manifest"))
    named = [new for kind, new in done[:last] if kind == "name"]
    assert len(named) == 2
    for new in named:
        at = done.index(("name", new))
        assert ("sync", paths[new]) in done[:at] and ("sync", folder) in done[at:last]
    assert ("sync", paths[f"{folder}/manifest"]) in done[:last] and ("sync", folder) in done[last:]
    assert ("sync", str(tmp_path)) in done[:last]


# -- damage ------------------------------------------------------------------------------------------------------


def test_every_damaged_folder_is_refused_or_whole(tmp_path):
    """A folder with a changed byte, or with a file that is cut, missing or from another save, raises with the file's
    name. Or the folder loads as the saved tree."""
    path, want = fr.save(tmp_path / "a", small(1.0)), fr.load(fr.save(tmp_path / "b", small(1.0)))
    draw, refused = random.Random(0), 0
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        changed = [good[:i] + bytes([good[i] ^ 1 << draw.randrange(8)]) + good[i + 1 :] for i in range(0, len(good), 5)]
        for content in [*changed, good[:-1], b"", good + b"x"]:
            file.write_bytes(content)
            try:
                assert_trees_close(bits(fr.load(path)), bits(want))
            except ValueError as error:
                refused += 1
                assert str(error).startswith("funcrec.load: `a` is not a whole checkpoint") and "\n  got   " in str(
                    error
                )
                if file.name != "manifest":
                    assert file.name in str(error), str(error)
        file.write_bytes(good)
    assert refused > 300
    file = next(p for p in path.iterdir() if p.name.startswith("rank-1"))
    other = next(p for p in (tmp_path / "b").iterdir() if p.name.startswith("rank-0"))
    file.write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match="rank-1-of-2-"):
        fr.load(path)
    file.unlink()
    with pytest.raises(
        ValueError, match=r"`a` is not a whole checkpoint[^$]*tables\['a'\], rows 5 to 8, in `rank-1-of-2-"
    ):
        fr.load(path)


def test_a_reader_beside_a_writer_reads_one_save(tmp_path):
    """A folder that is replaced during a read is read again. The tree comes from one save. No file is missing."""
    path = fr.save(tmp_path / "a", small(1.0))
    read = _folder.Files.file
    again = []

    def replaced(self, name, label):
        if len(again) < 3 and not self.opened:
            again.append(fr.save(path, small(float(len(again) + 2))))
        return read(self, name, label)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_folder.Files, "file", replaced)
        found = fr.load(path)
    assert len(again) == 3 and int(found.step) == 4 and bool((found.tables["a"] == 4).all())
    assert len(list(path.iterdir())) == 3


# -- names -------------------------------------------------------------------------------------------------------


def test_latest_is_the_newest_whole_one(tmp_path):
    """keep=n leaves the n newest checkpoints. `latest` skips checkpoints that are not whole. The checkpoint that was
    just written stays, even if it is older than other checkpoints."""
    assert fr.latest(tmp_path) is None and fr.latest(tmp_path / "nowhere") is None
    state = fr.gather_state(small(1.0), fr.Mesh.emulated(x=2))
    for step in (1, 2, 3):
        fr.save(tmp_path, {"state": small(float(step))}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000000002", "step-0000000003"]
    fr.save(tmp_path, state, keep=3, step=10)
    assert fr.latest(tmp_path).name == "step-0000000010" and fr.latest(tmp_path).is_file()
    fr.latest(tmp_path).write_bytes(fr.latest(tmp_path).read_bytes()[:-1])
    assert fr.latest(tmp_path).name == "step-0000000003"
    next(p for p in fr.latest(tmp_path).iterdir() if p.name.startswith("rank-1")).unlink()
    assert fr.latest(tmp_path).name == "step-0000000002"
    fr.save(tmp_path, state, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000000001"]
    with pytest.raises(ValueError, match="has no step to be called by"):
        fr.save(tmp_path, {"x": 1}, keep=1)


def test_a_folder_takes_no_files_place(tmp_path):
    """A checkpoint of ranks at a file's path raises, and so does one where no folder can be made. The error says what
    to do. The file stays."""
    fr.save(tmp_path / "a.pt", {"x": 1})
    for path in (tmp_path / "a.pt", tmp_path / "nowhere" / "a"):
        with pytest.raises(OSError, match="cannot be made") as error:
            fr.save(path, small(1.0))
        assert error.value.errno in (errno.EEXIST, errno.ENOENT) and "\n  try " in str(error.value)
    assert fr.load(tmp_path / "a.pt") == {"x": 1}


def test_a_rank_reads_only_its_rows(tmp_path, monkeypatch):
    """When a table is loaded row-wise, a rank reads only the blocks that contain its rows."""
    monkeypatch.setattr(_folder, "BLOCK_BYTES", 64)
    monkeypatch.setattr(_folder, "ROWS", 1)
    table, sparse = {"a": torch.arange(4096.0).reshape(256, 16)}, fr.optim.sgd(0.1)
    state = fr.TrainState(torch.tensor(0), table, sparse.init(table), {}, {}, fr.key(0))
    mesh = fr.Mesh.emulated(x=4)
    path = fr.save(tmp_path / "a", fr.reshard(state, fr.Plan({"a": fr.row_wise("x")}), mesh=mesh, sparse=sparse))
    read = []
    fill, places = _place.fill, _place.places
    monkeypatch.setattr(
        _place, "fill", lambda file, x, block, wants: read.append(block.first) or fill(file, x, block, wants)
    )
    # the rows of the first of two ranks
    first = lambda *a: (p for p in places(*a) if p[3].start < 128)
    monkeypatch.setattr(_place, "places", first)
    fr.load(path, plan=fr.Plan({"a": fr.row_wise("y")}), mesh=fr.Mesh.emulated(y=2))
    assert sorted(read[:-2]) == list(range(128))
