"""Derivatives of a step's loss and tables on a mesh."""

import pytest
import torch

import funcrec as fr

PLANS = {"row_wise": fr.row_wise("data"), "column_wise": fr.column_wise("data"), "replicated": fr.replicated()}
IDS = fr.KeyedJaggedTensor.from_lists({"a": [[0], [1, 3], [4], [2, 2]]})


def loss_fn(params, ids):
    acts = fr.lookup(params.tables, ids, [fr.FeatureConfig("a", table="x")])["a"]
    return (acts @ params.dense).sin().mean()


@pytest.mark.parametrize("kind", PLANS)
def test_a_step_on_a_mesh_has_the_derivatives_of_its_loss_and_its_tables(kind, interpreted):
    """d(loss, tables)/d(table, dense, lr) of a step on two ranks equals central differences in one process. The same
    holds for a staged step."""
    torch.manual_seed(0)
    table, w, mesh = (
        torch.randn(6, 2, dtype=torch.float64),
        torch.randn(2, dtype=torch.float64),
        fr.Mesh.emulated(data=2),
    )

    def after(x, on_mesh):
        where = {"mesh": mesh, "plan": fr.Plan({"x": PLANS[kind]})} if on_mesh else {}
        dense = fr.optim.dense(torch.optim.SGD, lr=0.1)
        step = fr.train_step(loss_fn, sparse=fr.optim.sgd(x[14]), dense=dense, **where)
        state, metrics = step(step.init(fr.Params({"x": x[:12].view(6, 2)}, x[12:14])), IDS)
        tables = fr.gather_tables(state.tables, mesh) if on_mesh else state.tables
        return 3 * metrics["loss"] + tables["x"].square().sum() + state.dense.square().sum()

    x = torch.cat([table.flatten(), w, torch.tensor([0.1], dtype=torch.float64)])
    steps = 1e-5 * torch.eye(15, dtype=torch.float64)
    want = torch.stack([(after(x + e, False) - after(x - e, False)) / 2e-5 for e in steps])
    torch.testing.assert_close(torch.func.grad(lambda x: after(x, True))(x), want, rtol=1e-6, atol=1e-7)
    if kind == "row_wise":
        staged = fr.jit(torch.func.grad(lambda x: after(x, True)))
        torch.testing.assert_close(staged(x), want, rtol=1e-6, atol=1e-7)
    tangent = torch.func.jvp(lambda x: after(x, True), (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, want.sum(), rtol=1e-6, atol=1e-7)
