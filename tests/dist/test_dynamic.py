"""Tables of ids that come and go, on a mesh: all ranks have the same vocabularies, and each renews its own rows."""

import pytest
import torch
from programs import daily_ids as daily
from programs.daily_ids import ONE_AXIS, PAIRS, SPARSE, TWO_AXES

import funcrec as fr
from funcrec.testing import assert_trees_close

ROOMY = {"users": fr.vocabulary(1024), "items": fr.vocabulary(1024, policy="lfu", unknown=2)}


def plan_of(placement):
    return fr.Plan({"user": placement, "item": fr.row_wise("x"), "day": fr.replicated()})


def trained(mesh, placement, tables, sparse, count=3):
    """Return (losses, the whole state, the last step's counts)."""
    step = daily.step(sparse, mesh=mesh, plan=plan_of(placement))
    own = lambda x: x if mesh.is_emulated else fr.shard(x, fr.P("x"), mesh=mesh)
    losses, state, metrics = daily.run(step, tables, map(own, daily.batches(11, count)))
    return losses, fr.gather_state(state, mesh), metrics.get("vocabularies")


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_with_room_for_all_ids_training_is_that_of_static_tables(kind, name):
    """Under every placement, with room for all ids, losses are those of sharded tables with a row for each id, bit for
    bit."""
    mesh = fr.Mesh.emulated(x=2) if kind in ONE_AXIS else fr.Mesh.emulated(x=2, y=2)
    placement = (ONE_AXIS | TWO_AXES)[kind]
    wanted, _, _ = trained(mesh, placement, daily.static(), SPARSE[name])
    got, _, _ = trained(mesh, placement, daily.dynamic(**ROOMY), SPARSE[name])
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", [*ONE_AXIS, *TWO_AXES])
def test_vocabularies_are_those_of_one_process(kind):
    """When rows change hands, vocabularies and counts are those of one process with the whole batch, and rows and slots
    agree within rounding."""
    mesh = fr.Mesh.emulated(x=2) if kind in ONE_AXIS else fr.Mesh.emulated(x=2, y=2)
    step, given = daily.step(SPARSE["adam"]), list(daily.batches(12, 4, size=64))
    _, one, alone = daily.run(step, daily.dynamic(), given)
    many = daily.step(SPARSE["adam"], mesh=mesh, plan=plan_of((ONE_AXIS | TWO_AXES)[kind]))
    _, state, metrics = daily.run(many, daily.dynamic(), given)
    state = fr.gather_state(state, mesh)
    assert_trees_close(metrics["vocabularies"], alone["vocabularies"], rtol=0, atol=0)
    assert_trees_close(state.tables.vocabularies, one.tables.vocabularies, rtol=0, atol=0)
    assert int(alone["vocabularies"]["users"]["evicted"])
    assert_trees_close((state.tables.tables, state.slots), (one.tables.tables, one.slots), rtol=1e-3, atol=1e-4)


def on_ranks(kind):
    return trained(fr.Mesh.distributed(x=2), ONE_AXIS[kind], daily.dynamic(), SPARSE["adam"])


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_gloo_ranks_have_the_emulations_bits(kind, ranks):
    """On gloo ranks, losses, tables, slots and vocabularies have the bits of the emulated mesh."""
    wanted = trained(fr.Mesh.emulated(x=2), ONE_AXIS[kind], daily.dynamic(), SPARSE["adam"])
    for got in ranks(2).run(on_ranks, kind):
        assert_trees_close(got, wanted, rtol=0, atol=0)


def test_a_state_moves_to_another_plan(tmp_path):
    """A sharded state is gathered, saved, loaded and placed by another plan, and goes on to the same bits."""
    mesh, given = fr.Mesh.emulated(x=2), list(daily.batches(13, 4))
    step = daily.step(SPARSE["adam"], mesh=mesh, plan=plan_of(ONE_AXIS["row_wise"]))
    _, wanted, _ = daily.run(step, daily.dynamic(), given)
    _, state, _ = daily.run(step, daily.dynamic(), given[:2])
    fr.save(tmp_path / "state.pt", fr.gather_state(state, mesh))
    plan = plan_of(ONE_AXIS["column_wise"])
    state = fr.reshard(fr.load(tmp_path / "state.pt"), plan, mesh=mesh, sparse=SPARSE["adam"])
    for batch in given[2:]:
        state, _ = step(state, batch)
    assert_trees_close(fr.gather_state(state, mesh), fr.gather_state(wanted, mesh), rtol=0, atol=0)


def test_admission_apart_is_that_of_the_step():
    """On a mesh, `admission` and a step with admit=False give the state of the step that admits, bit for bit."""
    mesh, given = fr.Mesh.emulated(x=2), list(daily.batches(14, 3))
    where = {"mesh": mesh, "plan": plan_of(ONE_AXIS["row_wise"])}
    _, wanted, _ = daily.run(daily.step(SPARSE["adam"], **where), daily.dynamic(), given)
    apart = daily.step(SPARSE["adam"], **where, admit=False)
    admit, state = fr.admission(apart), apart.init(fr.Params(daily.dynamic(), torch.ones(())))
    for batch in given:
        state, _ = apart(admit(state, batch)[0], batch)
    assert_trees_close(fr.gather_state(state, mesh), fr.gather_state(wanted, mesh), rtol=0, atol=0)


def test_a_capacity_is_refused():
    """A step with a capacity raises: without room it would have admitted ids that it does not train."""
    mesh = fr.Mesh.emulated(x=2)
    step = daily.step(SPARSE["adam"], mesh=mesh, plan=plan_of(ONE_AXIS["row_wise"]), capacity=8)
    with pytest.raises(ValueError, match="`capacity` does not go with vocabularies"):
        daily.run(step, daily.dynamic(), daily.batches(0, 1))
