"""Steps on ranks can be undone. Each rank restores its own changes. All ranks agree on steps that cannot be undone."""

import pytest
import torch
from programs import rewinding, training
from programs.as_staged import as_staged
from programs.moving import bits
from programs.overflow import own, skewed, step_of

import funcrec as fr
from funcrec.testing import assert_trees_close

KINDS = [
    ({"x": 2}, "row_wise", "adam"),
    ({"x": 2}, "column_wise", "lamb"),
    ({"x": 2}, "column_wise", "rowwise_adagrad"),
    ({"x": 2}, "table_wise", "by_table"),
    ({"x": 2}, "replicated", "stochastic_rounding"),
    ({"x": 2, "y": 2}, "grid", "partial_rowwise_adam"),
    ({"x": 2, "y": 2}, "table_row_wise", "user"),
]


def assert_undone(pairs, said):
    for got, want in pairs:
        assert_trees_close(got, want)
    assert "4 steps cannot be undone" in said and "3 steps held" in said


@pytest.mark.parametrize("axes, kind, name", KINDS, ids=str)
def test_steps_on_an_emulated_mesh_are_undone(axes, kind, name):
    """Under every placement, rewind of k steps gives the sharded state before these steps, bit for bit."""
    assert_undone(*rewinding.sharded(name, axes, kind, is_real=False))


@pytest.mark.parametrize("kind, name, compiled", [("row_wise", "adam", True), ("column_wise", "lamb", False)])
def test_steps_on_ranks_are_undone(kind, name, compiled, ranks):
    """On gloo ranks, rewind also gives the earlier state, even a donated state. Each rank undoes its own part."""
    for got in ranks(2).run(as_staged, rewinding.sharded, name, {"x": 2}, kind, compiled, deadline_s=300):
        assert_undone(*got)


def test_one_rank_without_room_is_told_by_all(ranks):
    """If one rank alone has no room for its rows, every rank raises. No rank undoes a part."""
    for said, one, first in [*ranks(2).run(rewinding.crowded, {"x": 2}), rewinding.crowded({"x": 2}, False)]:
        assert "a step touched more rows than were kept" in said
        assert_trees_close(one, first)


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "table_wise"])
def test_the_ranks_parts_of_a_delta_are_the_whole(kind, ranks):
    """Each rank returns the changed rows that it holds. Together, in any order, these rows give the present tables."""
    (then, now, first, _), (_, _, second, _) = ranks(2).run(rewinding.changed, {"x": 2}, kind)
    for one, other in ((first, second), (second, first)):
        assert_trees_close(bits(fr.apply_delta(fr.apply_delta(then, one), other)), bits(now))
        assert any(not torch.equal(t, now[n]) for n, t in fr.apply_delta(then, one).items())


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "replicated"])
def test_what_ranks_publish_is_gathered(kind, ranks):
    """After a gather, every rank has all changed rows once. These rows give the present tables."""
    for then, now, _, whole in ranks(2).run(rewinding.changed, {"x": 2}, kind):
        assert_trees_close(bits(fr.apply_delta(then, whole)), bits(now))
        for parts in whole.tables.values():
            assert all((p.rows[1:] > p.rows[:-1]).all() for p in parts)
            assert len({p.first for p in parts}) == len(parts) == (2 if kind == "column_wise" else 1)


def test_a_step_that_overflows_is_no_step():
    """A batch that does not fit changes neither state nor log. rewind undoes the steps before this batch.
    retry_overflow accepts logged steps."""
    mesh = fr.Mesh.emulated(x=2)
    wide, narrow = (fr.logged(step_of(mesh, "row_wise", c), steps=2, rows=8) for c in (100, 1))
    batches = [own(training.batch(i, 8), mesh) for i in range(3)]
    before, run = rewinding.states(wide, wide.init(training.params()), batches)
    for _ in range(3):
        run, metrics = narrow(run, own(skewed(1, 8), mesh))
        assert int(metrics["overflow"]) > 0
    assert_trees_close(bits(fr.rewind(run, 1, mesh=mesh).state), bits(before[2]))
    # the batch that did not fit used the place of the oldest step
    with pytest.raises(ValueError, match="1 steps held"):
        fr.rewind(run, 2, mesh=mesh)
    make = lambda c: fr.logged(step_of(mesh, "row_wise", c), steps=2, rows=8)
    step = fr.retry_overflow(make, capacity=1)
    again, _ = step(run, own(skewed(1, 8), mesh))
    assert_trees_close(bits(fr.rewind(again, 1, mesh=mesh).state), bits(run.state))


@pytest.mark.parametrize("make", [lambda state: state, lambda state: None], ids=["init(state)", "init(params)"])
def test_copies_that_train_apart_have_no_log(make):
    """A plan with replicas raises, because sync_replicas changes rows that no step names."""
    mesh, plan = fr.Mesh.emulated(x=2), fr.Plan(dict.fromkeys(training.SHAPES, fr.replicated()), replicas=("x",))
    step = rewinding.plain("adam", mesh=mesh, plan=plan)
    first = make(step.init(rewinding.params())) or rewinding.params()
    with pytest.raises(ValueError, match="copies that train apart have no log"):
        fr.logged(step, rows=8).init(first)


def test_a_mesh_is_the_states():
    """A sharded state is rewound with its mesh. A log that starts at a moved state is right."""
    mesh = fr.Mesh.emulated(x=2)
    sparse, plan = rewinding.OPTIMIZERS["adam"](), training.plan_of("row_wise", {"x": 2})
    alone, step = rewinding.logged("adam"), rewinding.logged("adam", mesh=mesh, plan=plan)
    run, _ = alone(alone.init(rewinding.params()), training.batch(0, 8))
    moved = step.init(fr.reshard(run.state, plan, mesh=mesh, sparse=sparse))
    after, _ = step(moved, training.batch(1, 8))
    back = fr.rewind(after, mesh=mesh).state
    assert_trees_close(bits(fr.gather_state(back, mesh)), bits(run.state))
    with pytest.raises(TypeError, match="the state lies on a mesh"):
        fr.rewind(after)
    with pytest.raises(ValueError, match="lies on another mesh"):
        fr.rewind(after, mesh=fr.Mesh.emulated(y=2))
    with pytest.raises(TypeError, match="lies on no mesh"):
        step.init(run.state)
    assert torch.equal(after.log.kept, torch.tensor(1))
