"""Checkpoints that are laid out as a state at hand is."""

import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

TABLES = [fr.TableConfig("item", 10, 4), fr.TableConfig("user", 6, 4)]
FEATURES = [fr.FeatureConfig(t.name, table=t.name) for t in TABLES]
BATCH = fr.KeyedJaggedTensor.from_lists({"item": [[1, 2], [9], [], [3]], "user": [[0], [5, 5], [1], []]})
PLANS = {
    "rows": ({"x": 2}, {"item": fr.row_wise("x"), "user": fr.row_wise("x")}),
    "columns": ({"x": 2}, {"item": fr.column_wise("x"), "user": fr.table_wise("x", rank=1)}),
    "grid": ({"x": 2, "y": 2}, {"item": fr.grid(("x", "y")), "user": fr.replicated()}),
    "copies": ({"x": 2}, {"item": fr.replicated(), "user": fr.replicated()}),
}


def trained(plan: str | None) -> tuple[fr.TrainStep, fr.TrainState]:
    """Return a step and a state that it made: whole, or under a plan."""
    axes, placements = PLANS[plan] if plan else ({}, {})
    how = {"mesh": fr.Mesh.emulated(**axes), "plan": fr.Plan(placements)} if plan else {}
    loss = lambda params, ids: fr.lookup(params.tables, ids, FEATURES).values.square().mean() + params.dense.sum()
    step = fr.train_step(loss, sparse=fr.optim.adam(0.1), dense=fr.optim.dense(torch.optim.Adam, lr=0.1), **how)
    state = step.init(fr.Params(fr.init(fr.key(0), TABLES), torch.ones(2)))
    return step, step(state, BATCH)[0]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("saved", [None, *PLANS])
def test_a_checkpoint_is_laid_out_like_the_state_at_hand(saved, plan, tmp_path):
    """load(path, like=state) has the layout of `state` and, gathered, the bits that were saved, whatever plan saved
    them. The step goes on from it."""
    source, (step, state) = trained(saved)[1], trained(plan)
    path = fr.save(tmp_path / "run", {"state": source, "epoch": 3})
    tree = fr.load(path, like={"state": state, "epoch": 0})
    got, mesh = tree["state"], fr.Mesh.emulated(**PLANS[plan][0])
    assert got.tables.layout == state.tables.layout and tree["epoch"] == 3
    whole = source if saved is None else fr.gather_state(source, fr.Mesh.emulated(**PLANS[saved][0]))
    assert_trees_close(fr.gather_state(got, mesh), whole, rtol=0, atol=0)
    assert int(step(got, BATCH)[0].step) == 2
    assert_trees_close(fr.load(path, like={"state": state, "epoch": 0}, mesh=mesh), tree, rtol=0, atol=0)


@pytest.mark.parametrize("plan", [None, "rows", "grid"])
@pytest.mark.parametrize("saved", [None, "columns"])
def test_a_checkpoint_is_laid_out_for_a_step(saved, plan, tmp_path):
    """load(path, like=step) is laid out as the step's own states are, with the bits that were saved, and so it is for
    `jit` of the step."""
    source, (step, state) = trained(saved)[1], trained(plan)
    path = fr.save(tmp_path / "run", {"state": source, "epoch": 3})
    tree = fr.load(path, like=step)
    alone = lambda x, plan: fr.gather_state(x, fr.Mesh.emulated(**PLANS[plan][0])) if plan else x
    assert_trees_close(alone(tree["state"], plan), alone(source, saved), rtol=0, atol=0)
    assert_trees_close(fr.load(path, like={"state": state, "epoch": 0}), tree, rtol=0, atol=0)
    assert plan is None or tree["state"].tables.layout == state.tables.layout
    assert int(step(tree["state"], BATCH)[0].step) == 2
    assert_trees_close(fr.load(path, like=fr.jit(step)), tree, rtol=0, atol=0)


@pytest.mark.parametrize("plan", [None, "rows"])
def test_what_does_not_fit_a_step_is_refused(plan, tmp_path):
    """A step with arguments that it has itself, slots of another optimizer, and a file without a state raise."""
    step, state = trained(plan)
    path = fr.save(tmp_path / "run", state)
    with pytest.raises(TypeError, match="also mesh, exact"):
        fr.load(path, like=step, mesh=fr.Mesh.emulated(x=2), exact=True)
    how = {"mesh": fr.Mesh.emulated(x=2), "plan": fr.Plan(PLANS["rows"][1])} if plan else {}
    other = fr.train_step(lambda params, ids: params.dense.sum(), sparse=fr.optim.sgd(0.1), **how)
    with pytest.raises(ValueError, match="another optimizer than that of the slots of 'item'"):
        fr.load(path, like=other)
    with pytest.raises(ValueError, match="no state"):
        fr.load(fr.save(tmp_path / "other.pt", {"w": state.step}), like=step)


@pytest.mark.parametrize("axes", [None, (), ("x",)])
def test_another_dense_optimizers_state_is_refused(axes, tmp_path):
    """Each pair of dense optimizers whose states have other names raises when it is loaded, and each optimizer loads
    its own, alone, on a mesh, with dense parameters that are cut, and as an ensemble."""
    where = {} if axes is None else {"mesh": fr.Mesh.emulated(x=2), "plan": fr.Plan({}), "dense_axes": axes}
    params = fr.Params({}, {"w": torch.ones(3), "b": torch.ones(2)})
    made = {"SGD": fr.optim.dense(torch.optim.SGD, lr=0.1), "Adam": fr.optim.dense(torch.optim.Adam, lr=0.1)}
    made["momentum"] = fr.optim.dense(torch.optim.SGD, lr=0.1, momentum=0.9)
    made["groups"] = fr.optim.by_path({"w": made["Adam"]}, default=made["SGD"])
    made["average"] = fr.optim.ema(made["Adam"])
    loss = lambda params, batch: params.dense["w"].sum() + params.dense["b"].sum()
    steps = {n: fr.train_step(loss, sparse=fr.optim.sgd(0.1), dense=dense, **where) for n, dense in made.items()}
    saved = {n: fr.save(tmp_path / n, step.init(params)) for n, step in steps.items()}
    for own, path in saved.items():
        for name, step in steps.items():
            if name == own:
                fr.load(path, like=step)
                continue
            with pytest.raises(ValueError, match="is another optimizer's"):
                fr.load(path, like=step)
    if axes is None:
        many = torch.func.vmap(lambda w: steps["Adam"].init(fr.Params({}, {"w": w, "b": w})))(torch.ones(2, 3))
        assert fr.load(fr.save(tmp_path / "many", many), like=steps["Adam"]).step.shape == (2,)


def test_what_does_not_fit_the_state_at_hand_is_refused(tmp_path):
    """Another mesh, a map of the file, other tables, and a state of real ranks without its mesh raise."""
    state = trained("rows")[1]
    path = fr.save(tmp_path / "run", state)
    with pytest.raises(ValueError, match="`mesh` is not that of `like`"):
        fr.load(path, like=state, mesh=fr.Mesh.emulated(x=4))
    with pytest.raises(ValueError, match="`mmap` requires whole tensors"):
        fr.load(path, like=state, mmap=True)
    of_rank = fr.tree.map(lambda x: x[: x.shape[0] // 2] if x.dim() == 2 else x, state)
    with pytest.raises(ValueError, match="`mesh` is missing"):
        fr.load(path, like=of_rank)
    with pytest.raises(ValueError, match="no state to lay out"):
        fr.load(fr.save(tmp_path / "other.pt", {"w": state.step}), like=state)
