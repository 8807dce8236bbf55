"""Functions and steps at module level, which can therefore be imported and pickled."""

import torch

import funcrec as fr

ITEM, CLICKED = fr.TableConfig("item", 10, 2), fr.FeatureConfig("clicked", table="item")
IDS = fr.KeyedJaggedTensor.from_lists({"clicked": [[3], [4, 4]]})


def add(state, x):
    return state + x


@fr.jit
def decorated(x):
    return x * 3


def loss_fn(params, ids):
    return (fr.lookup(params.tables, ids, [CLICKED])["clicked"] * params.dense - 1).square().mean()


def plain():
    return fr.train_step(loss_fn, sparse=fr.optim.adam(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1))


def on_mesh():
    mesh, plan = fr.Mesh.emulated(x=2), fr.Plan({"item": fr.row_wise("x")})
    return fr.train_step(
        loss_fn, sparse=fr.optim.sgd(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1), mesh=mesh, plan=plan
    )


def state_of(step):
    return step.init(fr.Params(fr.init(fr.key(0), [ITEM]), torch.ones(1)))
