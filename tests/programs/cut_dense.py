"""Training with dense parameters sharded over ranks, and with all of them on every rank."""

import torch

import funcrec as fr
from programs import training

DENSE = {
    "sgd": lambda: fr.optim.dense(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": lambda: fr.optim.dense(
        torch.optim.AdamW, lr=fr.optim.schedule([fr.optim.Stage("linear", max_iters=3, value=0.0)], lr=0.01)
    ),
    "adagrad": lambda: fr.optim.dense(torch.optim.Adagrad, lr=0.1),
    "groups": lambda: fr.optim.ema(
        fr.optim.by_path(
            {"scale": fr.optim.dense(torch.optim.SGD, lr=0.1)},
            default=fr.optim.freeze(fr.optim.dense(torch.optim.AdamW, lr=0.01), paths=["running"]),
        ),
        decay=0.9,
    ),
}


def loss_fn(params, batch):
    """Return the loss of `training` times a scalar parameter, plus one that counts nothing."""
    loss = training.loss_fn(params, batch) * params.dense["scale"]
    return loss, {"mean": batch.label.mean()}


def merge(dense, aux):
    """Return dense parameters with a running mean, which no gradient moves. The keys are in another order."""
    return {
        "running": 0.9 * dense["running"] + 0.1 * aux["mean"].to(dense["running"].dtype),
        **{k: x for k, x in dense.items() if k != "running"},
    }


def params():
    made = training.params()
    more = {"scale": torch.tensor(0.5), "running": torch.zeros(3, dtype=torch.float64)}
    return fr.Params(made.tables, {**made.dense, **more})


def options(name, mesh, axes, **more):
    plan = training.plan_of("row_wise", mesh.shape)
    kind = {"sparse": fr.optim.adagrad(lr=0.1), "dense": DENSE[name](), "has_aux": True, "merge": merge, "exact": True}
    return {**kind, "mesh": mesh, "plan": plan, "dense_axes": axes, **more}


def trained(name, mesh, axes, steps, *, compiled=False, state=None, first=0, **more):
    """Return (the state, the metrics of the last step) after steps on 2 bags per rank."""
    step = fr.train_step(loss_fn, **options(name, mesh, axes, **more))
    state = step.init(params()) if state is None else state
    run = fr.jit(step, donate=("state",)) if compiled else step
    for i in range(first, first + steps):
        mine = fr.shard(training.batch(i, 2 * mesh.size), fr.P(mesh.axis_names), mesh=mesh)
        if compiled:
            mine = fr.Batch(mine.ids.unpad().pad_to(32), mine.label)
        state, metrics = run(state, mine)
    return state, metrics


def real(name, sizes, axes, steps, compiled):
    """Return, on this process's ranks, (the whole state, the number of elements of each leaf on this rank, the last
    loss)."""
    mesh = fr.Mesh.distributed(**sizes)
    state, metrics = trained(name, mesh, axes, steps, compiled=compiled)
    kept = {k: x.flat.numel() if isinstance(x, fr.DenseShard) else x.numel() for k, x in state.dense.items()}
    return fr.gather_state(state, mesh), kept, metrics["loss"]
