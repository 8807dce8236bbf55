"""Training on ranks that starts in TorchRec, continues in funcrec and goes back.

tests/dist/test_interop_ranks.py runs these functions."""

import os
import warnings

import torch
import torch.distributed as dist

import funcrec as fr
from programs import torchrec_ranks as peers

KINDS = [k for k in peers.KINDS if k != "grid"]  # under grid, a mean in TorchRec differs
load, to = fr.interop.load_torchrec_state_dict, fr.interop.to_torchrec_state_dict


def model_of(kind):
    rank = str(dist.get_rank())
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": "2"}
    warnings.simplefilter("ignore")
    return peers.parallel(*peers.KINDS[kind], {f.table: f.pooling for f in peers.features(kind)})


def their_steps(kind, model, w, steps):
    """Return the losses of the global batch in TorchRec. Tables and w change in place."""
    held = [p for p in model.parameters() if p.requires_grad] if kind == "replicated" else []
    losses = []
    for i in steps:
        b = peers.batch(i, dist.get_rank())
        pooled = model(fr.interop.to_torchrec(b.ids)).to_dict()
        loss = peers.loss_of(torch.cat([pooled[f.name] for f in peers.features(kind)], 1), w, b.label)
        loss.backward()
        total = torch.stack([loss.detach(), *w.grad]) / 2
        dist.all_reduce(total)
        with torch.no_grad():
            w -= peers.DENSE_LR * total[1:]
            for p in held:
                p -= peers.LR * p.grad
        w.grad = None
        for p in held:
            p.grad = None
        losses.append(total[0])
    return losses


def goes_on(kind):
    """Return (losses of each side, tables of each side, whether every row and slot came back). TorchRec makes three
    steps, then both sides make three. Then both make three more, TorchRec in a new module loaded from our state."""
    axes = {"node": 1, "local": 2} if kind in ("table_row_wise", "table_column_wise") else {"x": 2}
    mesh = fr.Mesh.distributed(**axes)
    rule = peers.KINDS[kind][1]
    rules = {"rowwise_adagrad": lambda: fr.optim.rowwise_adagrad(lr=peers.LR, eps=peers.EPS),
             "sgd": lambda: fr.optim.sgd(lr=peers.LR)}  # fmt: skip
    own = {"sparse": rules[rule](), "dense": fr.optim.dense(torch.optim.SGD, lr=peers.DENSE_LR)}
    loss_fn = lambda p, b: peers.loss_of(fr.lookup(p.tables, b.ids, peers.features(kind)).values, p.dense["w"], b.label)
    plan = fr.Plan.uniform(kind, peers.SHAPES, mesh)
    step, alone = fr.train_step(loss_fn, **own, mesh=mesh, plan=plan), fr.train_step(loss_fn, **own)
    model, w = model_of(kind), torch.linspace(-1, 1, 24).requires_grad_()
    their_steps(kind, model, w, range(3))

    state = alone.init(fr.Params(peers.params().tables, {"w": w.detach().clone()}))
    state = load(state, {**model.state_dict(), "w": w.detach()})
    if kind != "replicated":  # the replicated optimizer is not fused
        state = load(state, model.fused_optimizer.state_dict(), step=3, group=dist.group.WORLD)
    losses, tables = [], []
    for steps in (range(3, 6), range(6, 9)):
        want = their_steps(kind, model, w, steps)
        sharded, got = fr.reshard(state, plan, mesh=mesh, sparse=own["sparse"]), []
        for i in steps:
            sharded, metrics = step(sharded, peers.batch(i, dist.get_rank()))
            got.append(metrics["loss"])
        state = fr.gather_state(sharded, mesh)
        held = load(fr.Params(state.tables, {}), model.state_dict()).tables
        losses.append((torch.stack(got), torch.stack(want)))
        tables.append((dict(state.tables), held))
        model = model_of(kind)
        model.load_state_dict({k: v for k, v in to(state, {**model.state_dict(), "w": w}).items() if k != "w"})
        if kind != "replicated":
            model.fused_optimizer.load_state_dict(to(state, model.fused_optimizer.state_dict()))
        with torch.no_grad():
            w.copy_(state.dense["w"])
    again = load(state, {**model.state_dict(), "w": w.detach()})
    if kind != "replicated":
        again = load(again, model.fused_optimizer.state_dict(), step=9, group=dist.group.WORLD)
    same = lambda a, b: all(torch.equal(x, y) for x, y in zip(*map(torch.utils._pytree.tree_leaves, (a, b))))
    return losses, tables, same((again.tables, again.slots), (state.tables, state.slots))


def dtensors():
    """Return (the loaded tables, the expected tables, this rank's returned parts, the expected parts). The tables come
    from DTensors, one with torch's shards and one with TorchRec's shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torchrec.distributed.shards_wrapper import LocalShardsWrapper

    fr.Mesh.distributed(x=2)
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    item, user = torch.arange(20.0).reshape(5, 4), torch.arange(24.0).reshape(6, 4)
    cut = (0, 4) if rank == 0 else (4, 6)  # uneven parts

    def form(item, user):
        own = LocalShardsWrapper([user[slice(*cut)].clone()], [[cut[0], 0]])
        held = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=user.shape, stride=user.stride())
        return {"embedding_bags.item.weight": distribute_tensor(item, mesh, [Shard(0)]),
                "embedding_bags.user.weight": held}  # fmt: skip

    zeros = fr.Params({"item": torch.zeros(5, 4), "user": torch.zeros(6, 4)}, {})
    got = load(zeros, form(item, user))
    back = to(got, form(torch.zeros(5, 4), torch.zeros(6, 4)))
    a, b = back.values()
    parts = {"item": a.full_tensor(), "user": b.to_local().local_shards()[0]}
    return dict(got.tables), {"item": item, "user": user}, parts, {"item": item, "user": user[slice(*cut)]}
