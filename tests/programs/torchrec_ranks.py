"""The same small training by DistributedModelParallel of TorchRec and by train_step, on this process's ranks."""

import os
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

import funcrec as fr

SHAPES = {"a": (20, 8), "b": (12, 8), "c": (17, 8)}
KINDS = {  # {our placement: (TorchRec's name of the placement, the rule of the tables)}
    "table_wise": ("table_wise", "rowwise_adagrad"),
    "row_wise": ("row_wise", "rowwise_adagrad"),
    "table_row_wise": ("table_row_wise", "rowwise_adagrad"),
    # TorchRec keeps a second moment for each part of a row. Another optimizer results.
    "column_wise": ("column_wise", "sgd"),
    "table_column_wise": ("table_column_wise", "sgd"),
    "grid": ("grid_shard", "sgd"),
    "replicated": ("data_parallel", "sgd"),
}
LR, EPS, DENSE_LR = 0.1, 1e-8, 0.1


def features(kind):
    """Return the features. Table b's feature is a mean, except under grid, where a mean in TorchRec differs."""
    return [
        fr.FeatureConfig(f"f{t}", table=t, pooling="mean" if t == "b" and kind != "grid" else "sum") for t in SHAPES
    ]


def params():
    tables = {
        n: torch.linspace(-1, 1, r * d).mul(37 * (i + 1)).sin().reshape(r, d)
        for i, (n, (r, d)) in enumerate(SHAPES.items())
    }
    return fr.Params(tables, {"w": torch.linspace(-1, 1, 24)})


def batch(step, rank, bags=5):
    g = torch.Generator().manual_seed(10 * step + rank)
    lists = {f"f{t}": [torch.randint(0, r, (int(n),), generator=g).tolist() for n in torch.randint(0, 5, (bags,),
                generator=g)]
             for t, (r, _) in SHAPES.items()}  # fmt: skip
    return fr.Batch(
        fr.KeyedJaggedTensor.from_lists(lists).pad_to(64), torch.randint(0, 2, (bags,), generator=g).float()
    )


def loss_of(pooled, w, label):
    return F.binary_cross_entropy_with_logits(pooled @ w, label)


def ours(kind, steps):
    """Return (losses of the global batch, whole tables)."""
    axes = {"node": 1, "local": 2} if kind in ("table_row_wise", "table_column_wise", "grid") else {"x": 2}
    mesh = fr.Mesh.distributed(**axes)
    sparse = {"rowwise_adagrad": lambda: fr.optim.rowwise_adagrad(lr=LR, eps=EPS), "sgd": lambda: fr.optim.sgd(lr=LR)}[
        KINDS[kind][1]
    ]()
    step = fr.train_step(
        lambda p, b: loss_of(fr.lookup(p.tables, b.ids, features(kind)).values, p.dense["w"], b.label), sparse=sparse,
        dense=fr.optim.dense(torch.optim.SGD, lr=DENSE_LR), mesh=mesh, plan=fr.Plan.uniform(kind, SHAPES, mesh),
    )  # fmt: skip
    state, losses = step.init(params()), []
    for i in range(steps):
        state, metrics = step(state, batch(i, dist.get_rank()))
        losses.append(metrics["loss"])
    return torch.stack(losses), fr.gather_tables(state.tables, mesh)


def theirs(kind, steps):
    """Return the results of `ours` from TorchRec."""
    fr.Mesh.distributed(x=2)
    rank = dist.get_rank()
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    warnings.simplefilter("ignore")
    model = parallel(*KINDS[kind], {f.table: f.pooling for f in features(kind)})
    for name, (r, c), x in parts(model):
        x.copy_(params().tables[name][r : r + x.shape[0], c : c + x.shape[1]])
    w = params().dense["w"].requires_grad_()
    held = [p for p in model.parameters() if p.requires_grad] if kind == "replicated" else []
    losses = []
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    for i in range(steps):
        b = batch(i, rank)
        ids = b.ids.unpad()
        pooled = model(KeyedJaggedTensor(list(ids.keys), ids.values, lengths=ids.lengths)).to_dict()
        loss = loss_of(torch.cat([pooled[f.name] for f in features(kind)], 1), w, b.label)
        loss.backward()
        total = torch.stack([loss.detach(), *w.grad]) / 2
        dist.all_reduce(total)
        with torch.no_grad():
            w -= DENSE_LR * total[1:]
            for p in held:
                p -= LR * p.grad
        w.grad = None
        for p in held:
            p.grad = None
        losses.append(total[0])
    found: list = [None, None]
    dist.all_gather_object(found, [(n, at, x.clone()) for n, at, x in parts(model)])
    tables = {n: torch.full(s, torch.nan) for n, s in SHAPES.items()}
    for name, (r, c), x in (y for own in found for y in own):
        tables[name][r : r + x.shape[0], c : c + x.shape[1]] = x
    return torch.stack(losses), tables


def parallel(kind, rule, pooling):
    """Return TorchRec's EmbeddingBagCollection, wrapped in DistributedModelParallel."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    class Sharder(EmbeddingBagCollectionSharder):  # by default, Sharder offers fewer kinds on CPU than can run
        def sharding_types(self, compute_device_type):
            return [kind]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            configs = [
                EmbeddingBagConfig(
                    name=n, embedding_dim=d, num_embeddings=r, feature_names=[f"f{n}"],
                    pooling=PoolingType[pooling[n].upper()],
                )
                for n, (r, d) in SHAPES.items()
            ]  # fmt: skip
            self.bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

        def forward(self, ids):
            return self.bags(ids)

    kernel = "dense" if kind == "data_parallel" else "fused"
    fused = {
        "optimizer": {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}[rule],
        "learning_rate": LR,
        "eps": EPS,
    }
    sharder, model = Sharder(fused_params=None if kernel == "dense" else fused), Model()
    limits = {n: ParameterConstraints(sharding_types=[kind], compute_kernels=[kernel], min_partition=4) for n in SHAPES}
    topology = Topology(world_size=2, compute_device="cpu", local_world_size=2)
    plan = EmbeddingShardingPlanner(topology=topology, constraints=limits, batch_size=5).collective_plan(
        model, [sharder], dist.group.WORLD
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(
        module=model, env=env, device=torch.device("cpu"), plan=plan, sharders=[sharder], init_data_parallel=True
    )


def parts(model):
    """Yield (table, (first row, first column), part) of each part that this rank holds."""
    for name, x in model.state_dict().items():
        table = name.split(".embedding_bags.")[1].removesuffix(".weight")
        if hasattr(x, "local_shards"):
            for s in x.local_shards():
                yield table, tuple(s.metadata.shard_offsets), s.tensor.detach().view(s.metadata.shard_sizes)
        elif isinstance(x, torch.Tensor):
            yield table, (0, 0), x.detach()
