"""Steps with private gradients, in one process and on meshes."""

import functools

import torch

import funcrec as fr

READ = (fr.FeatureConfig("a", table="item"), fr.FeatureConfig("b", table="user", pooling="mean"))
SHAPES = {"item": (11, 4), "user": (5, 2)}
HOW = {"max_norm": 0.7, "noise_multiplier": 1.3, "max_ids": 8}
SPARSE = {
    "sgd": lambda: fr.optim.sgd(0.1),
    "rowwise_adagrad": lambda: fr.optim.rowwise_adagrad(0.1),
    "adam": lambda: fr.optim.adam(0.1),
}


def params(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    tables = {n: torch.randn(shape, generator=g, dtype=dtype) for n, shape in SHAPES.items()}
    return fr.Params(tables, {"w": torch.randn(6, generator=g, dtype=dtype)})


def batch(seed, num_examples=8, most=3):
    g = torch.Generator().manual_seed(seed)
    lengths = lambda: torch.randint(0, most, (num_examples,), generator=g).tolist()
    bags = lambda n: [torch.randint(0, n, (k,), generator=g).tolist() for k in lengths()]
    ids = fr.KeyedJaggedTensor.from_lists({"a": bags(11), "b": bags(5)}, dtype=torch.int64)
    number = functools.partial(torch.randn, num_examples, generator=g, dtype=torch.float64)
    return fr.Batch(ids, number(), weight=number().abs())


def loss_fn(p, b, *, key):
    """Return a weighted loss with dropout that an example's own key draws."""
    acts = fr.lookup(p.tables, b.ids, READ).values
    kept = fr.random.bernoulli(key, 0.7, tuple(acts.shape[-1:]))
    errors = ((acts * kept * p.dense["w"]).sum(1) - b.label).square()
    return fr.losses.weighted_mean(errors, b.weight)


def step(sparse="sgd", loss_fn=loss_fn, mesh=None, plan=None, more=None, **how):
    grad = functools.partial(fr.private_grads, **{**HOW, **how})
    dense = fr.optim.dense(torch.optim.Adam, lr=0.1)
    return fr.train_step(loss_fn, sparse=SPARSE[sparse](), dense=dense, grad=grad, mesh=mesh, plan=plan, **(more or {}))


def trained(made, seeds=(0, 1), start=None, most=3, mesh=None):
    """Return (the state, the losses) after steps on batches; on real ranks each rank passes its part."""
    state, losses = made.init(start or params()), []
    for seed in seeds:
        b = batch(seed, most=most)
        state, metrics = made(state, b if mesh is None else fr.shard(b, fr.P(mesh.axis_names), mesh=mesh))
        losses.append(metrics["loss"])
    return state, torch.stack(losses)


def on_ranks(axes, kind, **how):
    """Return the whole state and the losses on real ranks."""
    mesh = fr.Mesh.distributed(**axes)
    state, losses = trained(step(mesh=mesh, plan=fr.Plan.uniform(kind, SHAPES, mesh), **how), mesh=mesh)
    return fr.gather_state(state, mesh), losses
