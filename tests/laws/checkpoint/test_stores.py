"""Checkpoints in stores, by URLs: whole or absent, whichever request of a save fails."""

import itertools

import fsspec
import pytest
import torch
from programs.failing_store import emptied, failing

import funcrec as fr
from funcrec.files import Url
from funcrec.testing import assert_trees_close

MESH = fr.Mesh.emulated(data=2)
TABLES = (fr.TableConfig("item", 40, 4), fr.TableConfig("user", 23, 4))
FEATURES = (fr.FeatureConfig("item", table="item"), fr.FeatureConfig("user", table="user"))
MODEL = fr.models.lr((fr.TableConfig("item", 40, 1),), (fr.FeatureConfig("item", table="item"),))
ROOT = "memory://runs"


@pytest.fixture(autouse=True)
def store():
    yield emptied()
    emptied()


def a_state(plan="row_wise"):
    how = {"sparse": fr.optim.rowwise_adagrad(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
    step = fr.train_step(lambda p, b: 0.0, **how, mesh=MESH, plan=fr.Plan.uniform(plan, TABLES, MESH))
    return step.init(fr.Params(fr.init(fr.key(3), TABLES), {"w": torch.ones(3)}))


def same(a, b):
    assert_trees_close(a, b, rtol=0, atol=0)


def test_what_is_saved_in_a_store_is_loaded():
    """load(save(url, x)) == x, for one file and for a folder of ranks, in any layout; latest and keep count by step."""
    tree, state = {"w": torch.arange(6.0).view(2, 3), "epoch": 3, "none": torch.zeros(0)}, a_state()
    path = fr.save(f"{ROOT}/state.pt", tree)
    same(fr.load(path), tree)
    same(fr.load(str(path), like=tree), tree)
    same(
        fr.load(fr.save(f"{ROOT}/ranks", state, mesh=MESH)),
        fr.load(fr.save(f"{ROOT}/one", fr.gather_state(state, MESH))),
    )
    same(fr.load(f"{ROOT}/ranks", like=state), state)
    plan = fr.Plan.uniform("table_wise", TABLES, fr.Mesh.emulated(data=3))
    other = fr.load(f"{ROOT}/ranks", plan=plan, mesh=fr.Mesh.emulated(data=3), sparse=fr.optim.rowwise_adagrad(0.1))
    same(fr.gather_state(other, fr.Mesh.emulated(data=3)), fr.gather_state(state, MESH))
    assert fr.latest(f"{ROOT}/kept") is None
    for step in (1, 2, 3):
        fr.save(f"{ROOT}/kept", {"state": state, "n": step}, step=step, keep=2, mesh=MESH)
    assert fr.latest(f"{ROOT}/kept").name == "step-0000000003" and fr.load(fr.latest(f"{ROOT}/kept"))["n"] == 3
    names = {x.split("/")[3] for x in fsspec.filesystem("memory").find("/runs/kept")}
    assert names == {"step-0000000002", "step-0000000003"}
    tables = {"a": torch.zeros(2), "b": torch.ones(1)}
    same(fr.load_safetensors(fr.save_safetensors(f"{ROOT}/x.safetensors", tables)), tables)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["file", "ranks", "asynchronous"])
def test_the_last_whole_checkpoint_stays_whichever_request_fails(store, kind, late):
    """A save that loses its store raises save's own error. The newest checkpoint is then whole: the one before, or the
    new one. The next save succeeds and leaves nothing else."""
    how = {"keep": 2, "mesh": None if kind == "file" else MESH, "asynchronous": kind == "asynchronous"}

    def save(step):
        done = fr.save(f"{ROOT}/kept", {"n": step, "w": torch.full((3,), float(step))}, step=step, **how)
        return done.wait() if kind == "asynchronous" else done

    for after in itertools.count():
        store.store.clear()
        save(1), save(2)
        with pytest.MonkeyPatch.context() as patch:
            failing(patch, after, late=late)
            try:
                save(3)
                error = None
            except OSError as failed:
                error = failed
        found = fr.load(fr.latest(f"{ROOT}/kept"))
        assert torch.equal(found["w"], torch.full((3,), float(found["n"])))
        assert found["n"] == 3 if error is None else found["n"] in (2, 3)
        if error is None:
            break
        assert str(error).startswith("funcrec.save: ") and "the store is gone" in str(error), error
        assert all(f"\n  {word} " in str(error) for word in ("got", "need", "try"))
    assert after >= 4
    save(4), save(5)
    steps = {x.split("/")[3] for x in store.find("/runs/kept")}
    assert steps == {"step-0000000004", "step-0000000005"}


def test_a_run_goes_on_from_a_store_with_the_same_bits():
    """A run whose store is lost in a save raises. Resumed from the newest whole checkpoint, it ends with the bits of an
    uninterrupted run."""
    data = fr.data.random_rows(fr.key(5), {"item": 40}, num_rows=60)
    step = fr.train_step(MODEL, sparse=fr.optim.adam(0.02), dense=fr.optim.dense(torch.optim.Adam, lr=0.02))

    def run(name, **how):
        load = fr.data.loader(data, None, 12, key=fr.key(3))
        where = {"checkpoint": f"{ROOT}/{name}", "save_every_steps": 2, "keep": 2, "resume": "auto"}
        return fr.fit(step, step.init(MODEL.init(fr.key(0))), load, epochs=3, model=MODEL, **where, **how)

    want = run("alone")

    def stop(record):
        if record.when == "step" and record.step == 9:
            failing(patch, 5)  # the first asks whose folder it is

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match=r"^funcrec\.save: .*cannot be"):
        run("lost", callbacks=[stop])
    assert fr.load(fr.latest(f"{ROOT}/lost"))["position"] == (1, 4)
    same(run("lost").state, want.state)


def test_requests_for_the_newest_checkpoint_do_not_grow_with_ranks(store, monkeypatch):
    """latest finds the newest whole checkpoint of any number of ranks by the same requests; one file less, and it is
    not whole."""
    asked, counts, real = [], [], Url.ask
    monkeypatch.setattr(Url, "ask", lambda self, *args, **how: asked.append(self) or real(self, *args, **how))
    for ranks in (2, 8):
        for step in (1, 2):
            fr.save(f"{ROOT}/{ranks}", {"w": torch.ones(3)}, step=step, keep=2, mesh=fr.Mesh.emulated(data=ranks))
        del asked[:]
        assert fr.latest(f"{ROOT}/{ranks}").name == "step-0000000002"
        counts.append(len(asked))
    assert counts[0] == counts[1] < 8
    store.rm_file(next(x for x in store.find("/runs/8/step-0000000002") if "/rank-7" in x))
    assert fr.latest(f"{ROOT}/8").name == "step-0000000001"


def test_a_replaced_file_is_read_again(monkeypatch):
    """A file that is replaced while it is read is read again from its beginning."""
    path = fr.save(f"{ROOT}/state.pt", {"w": torch.zeros(3_000_000)})
    real, once = Url.range, []

    def ranged(self, begin, end):
        out = real(self, begin, end)
        if not once:
            once.append(fr.save(path, {"w": torch.ones(3_000_000)}))
        return out

    monkeypatch.setattr(Url, "range", ranged)
    assert torch.equal(fr.load(path)["w"], torch.ones(3_000_000))


def test_a_damaged_object_is_refused(store):
    """A cut or changed object is reported as a file would be."""
    path = fr.save(f"{ROOT}/state.pt", {"w": torch.zeros(30)})
    good = path.read_bytes()
    for bad in (good[:-1], good + b"\0", b"", good[:200] + b"\1" + good[201:]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"^funcrec\.load: `state\.pt` is not a whole checkpoint"):
            fr.load(path)
