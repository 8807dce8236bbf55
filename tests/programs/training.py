"""Small models, and the same training in one process, emulated, and on real ranks."""

import dataclasses

import pytest
import torch

import funcrec as fr
from funcrec.mesh import _joined
from funcrec.testing import garbage_padding

SHAPES = {"a": (11, 4), "b": (7, 5), "c": (5, 4)}
FEATURES = (
    fr.FeatureConfig("f0", table="a", column="u"),
    fr.FeatureConfig("f1", table="b", column="v", pooling="mean"),
    fr.FeatureConfig("f2", table="a", column="v"),
    fr.FeatureConfig("f3", table="c", column="u", pooling="mean", hash=fr.modulo()),
)
OPTIMIZERS = {
    "adam": lambda: fr.optim.adam(lr=0.01),
    "rowwise_adagrad": lambda: fr.optim.rowwise_adagrad(lr=0.1, weight_decay=0.01),
    "partial": lambda: fr.optim.partial_rowwise_adam(lr=0.01, weight_decay=0.01),
    "lamb": lambda: fr.optim.lamb(lr=0.01),
    "by_table": lambda: fr.optim.by_table({"b": fr.optim.rowwise_adagrad(lr=0.1)}, default=fr.optim.sgd(0.1)),
    "rounded": lambda: fr.optim.stochastic_rounding(fr.optim.partial_rowwise_adam(lr=0.01), key=fr.key(3)),
    "user": lambda: fr.optim.row_optimizer(
        init=lambda t: {"age": torch.zeros(t.shape[0])},
        rule=lambda row, grad, slots, hyper: (
            row - hyper.lr * grad / (1 + slots["age"]) / (1e-3 + grad.square().sum().sqrt()), {"age": slots["age"] + 1},
        ),
        lr=0.1,
    ),
}  # fmt: skip
WAITING = {
    "accumulate": lambda: fr.optim.accumulate(fr.optim.adam(lr=0.01), every=3, capacity=4096),
    "accumulate rows": lambda: fr.optim.accumulate(fr.optim.rowwise_adagrad(lr=0.1, weight_decay=0.01), every=2,
                                                   capacity={"a": 4096, "b": 2048, "c": 2048}),
    "accumulate lamb": lambda: fr.optim.clip(fr.optim.accumulate(fr.optim.lamb(lr=0.01), every=2, capacity=4096),
                                             max_value=0.01),
    "accumulate some": lambda: fr.optim.by_table(
        {"a": fr.optim.accumulate(fr.optim.clip(fr.optim.adam(lr=lambda step: 0.01 / (1 + step)), max_value=0.01),
                                  every=2, capacity=4096)},
        default=fr.optim.freeze(fr.optim.rowwise_adagrad(lr=0.1), tables=["c"])),
}  # fmt: skip


DTYPES = {"rounded": torch.bfloat16}  # dtypes of tables


def plan_of(kind, axes):
    """Return a plan that gives every table this placement. Tables that need a single rank take turns."""
    return fr.Plan.uniform(kind, SHAPES, fr.Mesh.emulated(**axes))


def loss_fn(params, batch):
    acts = fr.lookup(params.tables, batch.ids, FEATURES).values
    logits = (acts @ params.dense["w"]).relu() @ params.dense["v"]
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)


def params(name="adam"):
    dtype = DTYPES.get(name, torch.float32)
    tables = fr.init(fr.key(1), [fr.TableConfig(n, *s, dtype=dtype) for n, s in SHAPES.items()])
    w = torch.linspace(-1, 1, 17 * 6).sin().reshape(17, 6)
    return fr.Params(tables, {"w": w, "v": torch.linspace(-1, 1, 6)})


def batch(step, num_bags):
    """Return random bags of 0 to 3 ids, some ids outside their table."""
    g = torch.Generator().manual_seed(step)
    lists = {
        k: [
            torch.randint(-1, 12, (int(n),), generator=g).tolist()
            for n in torch.randint(0, 4, (num_bags,), generator=g)
        ]
        for k in "uv"
    }
    label = torch.randint(0, 2, (num_bags,), generator=g).float()
    return fr.Batch(fr.KeyedJaggedTensor.from_lists(lists, dtype=torch.int64).pad_to(8 * num_bags), label)


def part(whole, rank, ranks):
    """Return the bags of one rank."""
    per = whole.label.shape[0] // ranks
    return fr.Batch(whole.ids[rank * per : (rank + 1) * per], whole.label[rank * per : (rank + 1) * per])


def optimizers(name):
    return {"sparse": (OPTIMIZERS | WAITING)[name](), "dense": fr.optim.dense(torch.optim.Adam, lr=0.01)}


def alone(name, ranks, steps, num_bags):
    """Return (tables, slots, dense, losses) of one process that adds the gradients of the ranks' batches."""
    sparse, dense = optimizers(name)["sparse"], optimizers(name)["dense"]
    p = params(name)
    tables, slots, weights, state = p.tables, sparse.init(p.tables), p.dense, dense.init(p.dense)
    losses = []
    for step in range(steps):
        total, mean = None, 0.0
        for r in range(ranks):
            mine = part(batch(step, num_bags), r, ranks)
            loss, grads = fr.value_and_grad(lambda p, b: loss_fn(p, b) / ranks)(fr.Params(tables, weights), mine)
            mean += float(loss)
            rows = grads.tables if total is None else {n: total.tables[n] + g for n, g in grads.tables.items()}
            total = fr.Params(
                rows, grads.dense if total is None else {k: total.dense[k] + g for k, g in grads.dense.items()}
            )
        tables, slots = sparse.update(total.tables, slots, tables, step)
        weights, state = dense.update(total.dense, state, weights, step)
        losses.append(mean)
    return tables, slots, weights, torch.tensor(losses)


def together(name, mesh, plan, steps, num_bags, *, exact, compiled=False):
    """Return the results of `alone` from train_step on a mesh."""
    step = fr.train_step(loss_fn, **optimizers(name), mesh=mesh, plan=plan, exact=exact)
    state, losses = step.init(params(name)), []
    run = fr.jit(step, donate=("state",)) if compiled else step
    for i in range(steps):
        mine = fr.shard(batch(i, num_bags), fr.P(mesh.axis_names), mesh=mesh)
        if compiled:
            mine = fr.Batch(mine.ids.pad_to(8 * num_bags) if not mesh.is_emulated else mine.ids, mine.label)
        state, metrics = run(state, mine)
        losses.append(float(metrics["loss"]))
    layout = state.tables.layout
    gather = lambda banks: fr.sharding._tables.gather_banks(layout, banks, mesh)
    names = {k for own in state.slots.values() for k in own if not k.startswith("pending")}
    slots = {n: {} for n, _ in layout.shapes}
    for k in sorted(names):
        have = {b: own[k] for b, own in state.slots.items() if k in own}
        for n, _ in layout.shapes:
            if all(layout.banks[layout.shards[i].bank].name in have for i in layout.shards_of(n)):
                slots[n][k] = fr.sharding._tables.gather_banks(
                    layout._replace(shapes=tuple(s for s in layout.shapes if s[0] == n)),
                    {**state.tables.banks, **have},
                    mesh,
                )[n]
    return gather(state.tables.banks), slots, state.dense, torch.tensor(losses)


def real(name, axes, plan, steps, num_bags, exact, compiled=False):
    return together(name, fr.Mesh.distributed(**axes), plan, steps, num_bags, exact=exact, compiled=compiled)


def real_apart(name, axes, plan, steps, num_bags):
    """Return the results of training on real ranks without joined exchanges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_joined, "MOST_JOINED", 0)
        return real(name, axes, plan, steps, num_bags, True)


def some_weights(axes, kind, is_real):
    """Return the whole tables after a step on a mesh. Key u of the ids has weights. Key v has none, and garbage in its
    places."""
    mesh = (fr.Mesh.distributed if is_real else fr.Mesh.emulated)(**axes)
    features = [dataclasses.replace(f, weighted=f.key == "u") for f in FEATURES]
    loss = lambda params, batch: fr.lookup(params.tables, batch.ids, features).values.square().mean()
    step = fr.train_step(loss, **optimizers("adam"), mesh=mesh, plan=plan_of(kind, axes), exact=True)
    ids = batch(0, 8).ids
    weights = torch.linspace(-1, 1, ids.capacity)
    whole = garbage_padding(dataclasses.replace(ids, weights=weights, unweighted=("v",)))
    state, _ = step(step.init(params()), fr.shard(fr.Batch(whole), fr.P(mesh.axis_names), mesh=mesh))
    return fr.gather_tables(state.tables, mesh)
