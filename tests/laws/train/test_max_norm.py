"""train_step(max_norm=...): one norm over the gradients of tables and dense parameters, on every rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close

ITEM, CLICKED = fr.TableConfig("item", 11, 3), fr.FeatureConfig("clicked", table="item")
IDS = fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2], [3], [], [5, 5, 10]]})
PARAMS = fr.Params(fr.init(fr.key(0), [ITEM]), {"w": torch.linspace(-1, 2, 3), "b": torch.tensor(0.5)})
SGD = {"sparse": fr.optim.sgd(1.0), "dense": fr.optim.dense(torch.optim.SGD, lr=1.0)}


def loss_fn(params, ids):
    rows = fr.lookup(params.tables, ids, [CLICKED])["clicked"]
    return 30 * (rows * params.dense["w"] + params.dense["b"]).square().mean()


def moved(max_norm, **how):
    step = fr.train_step(loss_fn, **{**SGD, **how}, max_norm=max_norm)
    return step(step.init(PARAMS), IDS)[0]


def distance(state):
    pairs = zip(fr.tree.leaves((state.tables, state.dense)), fr.tree.leaves((PARAMS.tables, PARAMS.dense)), strict=True)
    return float(sum((x - y).square().sum() for x, y in pairs)) ** 0.5


@settings(max_examples=10)
@given(max_norm=st.floats(0.01, 60))
def test_one_norm(max_norm):
    """A step of SGD moves all parameters together by min(max_norm, norm), in the direction of the unclipped step. It
    has the bits of a step with the gradients that `clip_by_global_norm` gives."""
    own = lambda loss: (
        lambda p, ids: (lambda v, g: (v, fr.clip_by_global_norm(g, max_norm)))(*fr.value_and_grad(loss)(p, ids))
    )
    free, clipped = moved(None), moved(max_norm)
    assert distance(clipped) == pytest.approx(min(max_norm, distance(free)), rel=1e-4)
    assert_trees_close(clipped, moved(None, grad=own))
    norm = fr.global_norm(fr.value_and_grad(loss_fn)(PARAMS, IDS)[1])
    assert float(norm) == pytest.approx(distance(free), rel=1e-5)


@pytest.mark.parametrize("dense_axes", [(), ("data",)], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_ranks(kind, dense_axes):
    """Two ranks clip by the norm of the global batch, whichever rank holds a row or a part of a dense parameter."""
    mesh = fr.Mesh.emulated(data=2)
    how = {"mesh": mesh, "plan": fr.Plan.uniform(kind, {"item": (11, 3)}, mesh), "dense_axes": dense_axes}
    got = fr.gather_state(moved(0.5, **how), mesh)
    assert_trees_close((got.tables, got.dense), (lambda s: (s.tables, s.dense))(moved(0.5)), rtol=1e-5, atol=1e-6)


def test_columns():
    """Rows cut by columns have one norm for optimizers of single elements; for others the step raises."""
    mesh = fr.Mesh.emulated(data=2)
    how = {"mesh": mesh, "plan": fr.Plan({"item": fr.column_wise("data")})}
    config = fr.TableConfig("item", 11, 4)
    params = fr.Params(fr.init(fr.key(0), [config]), {"w": torch.linspace(-1, 2, 4), "b": torch.tensor(0.5)})
    steps = [fr.train_step(loss_fn, **SGD, max_norm=0.5, **more) for more in ({}, how)]
    whole, cut = (step(step.init(params), IDS)[0] for step in steps)
    assert_trees_close(fr.gather_state(cut, mesh).tables, whole.tables, rtol=1e-5, atol=1e-6)
    step = fr.train_step(loss_fn, sparse=fr.optim.rowwise_adagrad(), max_norm=0.5, **how)
    with pytest.raises(ValueError, match="a norm of all gradients and rows cut by columns do not go together"):
        step(step.init(params), IDS)


def test_a_sweep_of_bounds():
    """vmap over the bound gives each member's own step."""
    got = torch.func.vmap(lambda c: moved(c).dense)(torch.tensor([0.5, 2.0]))
    for i, c in enumerate((0.5, 2.0)):
        member = fr.tree.map(lambda x: x[i], got)  # noqa: B023
        assert_trees_close(member, moved(c).dense, rtol=1e-6, atol=1e-6)


def test_derivative_by_the_bound():
    """The derivative of the parameters by the bound is their direction: distance = max_norm where it clips."""
    of = lambda c: sum(
        (x - y).square().sum() for x, y in zip(fr.tree.leaves(moved(c).dense), fr.tree.leaves(PARAMS.dense))
    )
    one = torch.tensor(0.5, dtype=torch.float64)
    near = (of(one + 1e-2) - of(one - 1e-2)) / 2e-2
    torch.testing.assert_close(torch.func.grad(of)(one), near.to(torch.float64), rtol=1e-3, atol=1e-5)


def test_rewind():
    """A logged step with a norm is undone bit for bit."""
    step = fr.logged(fr.train_step(loss_fn, **SGD, max_norm=0.5), steps=2, rows=8)
    first = step.init(PARAMS)
    last = step(first, IDS)[0]
    assert_trees_close(fr.rewind(last, 1).state, first.state)


def test_norms_of_params():
    """`global_norm` and `clip_by_global_norm` of Params count the dense leaves; without tables, those alone.
    Gradients of a smaller norm keep their bits."""
    grads = fr.Params({}, {"a": torch.tensor([3.0]), "b": [torch.tensor([[4.0]])]})
    assert float(fr.global_norm(grads)) == 5.0 and float(fr.global_norm(grads, torch.tensor(12.0))) == 13.0
    need = {"a": torch.tensor([0.6]), "b": [torch.tensor([[0.8]])]}
    assert_trees_close(fr.clip_by_global_norm(grads, 1.0).dense, need, rtol=1e-5)
    tiny = fr.tree.map(lambda x: x * 1e-8, grads)
    assert all(fr.tree.equal(fr.clip_by_global_norm(g, 9.0), g) for g in (grads, tiny))
    assert float(fr.global_norm(fr.Params({}, {}))) == 0
