"""Vocabularies that are cut by buckets over a mesh: every bit of training is that of whole vocabularies."""

import pytest
import torch
from programs import daily_ids as daily
from programs.daily_ids import ONE_AXIS, SPARSE, TWO_AXES

import funcrec as fr
from funcrec.kinds import VocabularyShard, _batches, _dynamic
from funcrec.testing import assert_trees_close

MESHES = {"x": fr.Mesh.emulated(x=2), "xy": fr.Mesh.emulated(x=2, y=2)}


def plan_of(placement, buckets=(), replicas=()):
    return fr.Plan({"user": placement, "item": fr.row_wise("x"), "day": fr.replicated()}, replicas, buckets=buckets)


def mesh_of(kind):
    return MESHES["x" if kind in ONE_AXIS else "xy"]


def trained(mesh, plan, tables=None, seed=12, count=4, size=64, sparse=SPARSE["adam"], **where):
    """Return (losses, the state, the counts of each step)."""
    step = daily.step(sparse, mesh=mesh, plan=plan, **where)
    own = lambda x: x if mesh.is_emulated else fr.shard(x, fr.P(mesh.axis_names), mesh=mesh)
    state, out = step.init(fr.Params(daily.dynamic() if tables is None else tables, torch.ones(()))), []
    for batch in daily.batches(seed, count, size=size):
        state, metrics = step(state, own(batch))
        out.append((metrics["loss"], dict(metrics["vocabularies"].items())))
    return out, state


@pytest.mark.parametrize("kind", [*ONE_AXIS, *TWO_AXES])
def test_every_placement_keeps_every_bit(kind):
    """Under every placement, losses, counts, tables, slots and vocabularies are those of whole vocabularies, while rows
    change hands."""
    mesh, placement = mesh_of(kind), (ONE_AXIS | TWO_AXES)[kind]
    wanted, whole = trained(mesh, plan_of(placement))
    got, state = trained(mesh, plan_of(placement, mesh.axis_names))
    assert_trees_close(got, wanted, rtol=0, atol=0)
    assert_trees_close(fr.gather_state(state, mesh), fr.gather_state(whole, mesh), rtol=0, atol=0)
    assert int(got[-1][1]["users"]["evicted"])


ROOMY = {"users": fr.vocabulary(512, policy="distance_lfu", ttl=2), "items": fr.vocabulary(384, admit=0.5)}


def test_rows_may_lie_beside_their_buckets(monkeypatch):
    """Where each rank has the buckets of its rows, new rows are not sent, and every bit stays."""
    seen, admit = [], _batches.admit_on_ranks
    monkeypatch.setattr(_batches, "admit_on_ranks", lambda *x: seen.append(x[2]) or admit(*x))
    mesh, (wanted, whole) = MESHES["x"], trained(MESHES["x"], plan_of(fr.row_wise("x")), daily.dynamic(**ROOMY))
    plan = plan_of(fr.row_wise("x"), "x")
    got, state = trained(mesh, plan, daily.dynamic(**ROOMY))
    assert_trees_close(got, wanted, rtol=0, atol=0)
    assert_trees_close(fr.gather_state(state, mesh), fr.gather_state(whole, mesh), rtol=0, atol=0)
    assert seen == [[0]] * 4  # items have three buckets, which two ranks do not share evenly


def test_rounding_at_random_follows_the_id():
    """Tables in 16 bits, whose bits are drawn by the id of a row, have the bits of whole vocabularies, cut by columns
    too."""
    for placement in (fr.row_wise("x"), fr.column_wise("x")):
        for sparse in (fr.optim.stochastic_rounding(fr.optim.adam(0.1), key=fr.key(3)), SPARSE["rowwise_adagrad"]):
            tables = daily.dynamic(dtype=torch.bfloat16)
            wanted, whole = trained(MESHES["x"], plan_of(placement), tables, count=2, sparse=sparse)
            got, state = trained(MESHES["x"], plan_of(placement, "x"), tables, count=2, sparse=sparse)
            assert_trees_close(got, wanted, rtol=0, atol=0)
            a, b = (fr.gather_state(s, MESHES["x"]) for s in (state, whole))
            assert_trees_close((a.tables, a.slots), (b.tables, b.slots), rtol=0, atol=0)


@pytest.mark.parametrize("how", [{"exact": True}, {"dedup": True}, {"micro_batches": 2}, {"admit": False}], ids=str)
def test_steps_of_every_form_keep_every_bit(how):
    """With exact sums, distinct rows, micro-batches, and admission apart from the step, every bit is that of whole
    vocabularies."""
    mesh, given = MESHES["xy"], list(daily.batches(14, 3))
    out = []
    for buckets in ((), ("x", "y")):
        step = daily.step(SPARSE["adam"], mesh=mesh, plan=plan_of(fr.row_wise(("x", "y")), buckets), **how)
        admit = fr.admission(step) if how == {"admit": False} else lambda state, batch: (state, {})
        state, losses = step.init(fr.Params(daily.dynamic(), torch.ones(()))), []
        for batch in given:
            state, metrics = step(admit(state, batch)[0], batch)
            losses.append(metrics["loss"])
        out.append((torch.stack(losses), fr.gather_state(state, mesh)))
    assert_trees_close(*out, rtol=0, atol=0)


def test_copies_that_train_apart_have_one_vocabulary():
    """With `replicas`, every group draws the rows of new ids, and every bit is that of whole vocabularies."""
    out = []
    for buckets in ((), ("x", "y")):
        counts, state = trained(MESHES["xy"], plan_of(fr.table_wise("x", rank=1), buckets, "y"), count=2)
        out.append((counts, fr.gather_state(fr.sync_replicas(state, mesh=MESHES["xy"]), MESHES["xy"])))
    assert_trees_close(*out, rtol=0, atol=0)


def test_lookups_outside_of_steps_find_the_rows():
    """Evaluation inside `shard_map` reads the rows of whole vocabularies, also of ids that have none."""
    mesh, (batch,) = MESHES["xy"], daily.batches(20, 1, size=32)
    outs = []
    for buckets in ((), ("y", "x")):
        _, state = trained(mesh, plan_of(fr.row_wise("x"), buckets), batch_axes=("x", "y"))
        params = state.params
        specs = fr.Params(params.tables.specs(), fr.P())
        run = fr.shard_map(daily.predict, mesh=mesh, in_specs=(specs, fr.P(("x", "y"))), out_specs=fr.P(("x", "y")))
        outs.append((run(params, batch), fr.gather_tables(params.tables, mesh)))
    assert_trees_close(*outs, rtol=0, atol=0)


def test_the_step_searches_its_ids_once(monkeypatch):
    """Lookups of the ids that the step admitted take the rows that their ranks answered, and search nothing."""
    monkeypatch.setattr(_dynamic, "find_on_ranks", lambda *given: pytest.fail("searched again"))
    trained(MESHES["x"], plan_of(fr.row_wise("x"), "x"), count=1)


def moved(state, mesh, path, save):
    """Return the state moved to another plan and back, through a checkpoint: (its parts before, and after)."""
    sparse, by_columns = SPARSE["adam"], fr.column_wise("x")
    save(path, state, mesh=mesh)
    wanted, out = fr.gather_state(state, mesh), [fr.load(path)]
    for plan in (plan_of(by_columns), plan_of(by_columns, "x")):
        out.append(loaded := fr.load(path, plan=plan, mesh=mesh, sparse=sparse))
        out.append(fr.reshard(loaded, plan_of(fr.row_wise("x"), "x"), mesh=mesh, sparse=sparse))
        assert isinstance(out[-1].tables.rest.vocabularies["users"], VocabularyShard)
    out.append(fr.reshard(out[-1], plan_of(by_columns), mesh=mesh, sparse=sparse))
    out.append(fr.reshard(fr.load(path), plan_of(by_columns, "x"), mesh=mesh, sparse=sparse))
    return wanted, [out[0], *(fr.gather_state(x, mesh) for x in out[1:])]


def test_states_move_between_plans(tmp_path):
    """A checkpoint of shards holds whole vocabularies. It loads without a plan, and by plans with or without `buckets`.
    `reshard` moves states between all of these. Every bit stays, and a state on more ranks trains on to the same bits.
    """
    mesh = MESHES["x"]
    _, state = trained(mesh, plan_of(fr.row_wise("x"), "x"), count=2)
    wanted, found = moved(state, mesh, tmp_path / "state", fr.save)
    for got in found:
        assert_trees_close(got, wanted, rtol=0, atol=0)
    four, ends = MESHES["xy"], []
    for buckets in ((), ("x", "y")):
        step = daily.step(SPARSE["adam"], mesh=four, plan=plan_of(fr.row_wise("x"), buckets))
        begun = fr.reshard(state, plan_of(fr.row_wise("x"), buckets), mesh=four, sparse=SPARSE["adam"], from_mesh=mesh)
        ends.append(fr.gather_state(step(begun, next(daily.batches(3, 1)))[0], four))
    assert_trees_close(*ends, rtol=0, atol=0)


def on_ranks(path):
    mesh = fr.Mesh.distributed(x=2)
    out, state = trained(mesh, plan_of(fr.row_wise("x"), "x"))
    sizes = [x.shape[0] for x in fr.tree.leaves(state.tables.rest.vocabularies["users"]) if x.dim()]
    return out, *moved(state, mesh, path, fr.save), sizes


def test_gloo_ranks_have_the_emulations_bits(ranks, tmp_path):
    """On gloo ranks, each with half of the rows of a vocabulary, training, checkpoints and moves have the bits of the
    emulated mesh with whole vocabularies."""
    wanted, whole = trained(MESHES["x"], plan_of(fr.row_wise("x")))
    state = fr.gather_state(whole, MESHES["x"])
    for out, before, after, sizes in ranks(2).run(on_ranks, tmp_path / "state"):
        assert sizes == [128, 128]
        assert_trees_close(out, wanted, rtol=0, atol=0)
        for got in (before, *after):
            assert_trees_close(got, state, rtol=0, atol=0)


def test_a_compiled_step_keeps_every_bit(interpreted):
    """A staged, donated step with shards has the vocabularies and counts of the eager step."""
    mesh, (batch,) = MESHES["x"], daily.batches(12, 1, size=64)
    step = daily.step(SPARSE["adam"], mesh=mesh, plan=plan_of(fr.row_wise("x"), "x"))
    state = step.init(fr.Params(daily.dynamic(), torch.ones(())))
    wanted, metrics = step(state, batch)
    got, own = fr.jit(step, donate=("state",))(state, batch)
    assert_trees_close(dict(own["vocabularies"].items()), dict(metrics["vocabularies"].items()), rtol=0, atol=0)
    assert_trees_close(got.tables.rest, wanted.tables.rest, rtol=0, atol=0)
