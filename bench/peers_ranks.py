"""TorchRec's DistributedModelParallel on CPU ranks: the DLRM of `steps.py`, each table where the case places it."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense_models import DLRMDense
from peers import EPS, LR, quiet
from steps import DENSE_LR
from torch import Tensor, nn

TYPES = {"replicated": "data_parallel", "grid": "grid_shard"}  # the other kinds have the same name in TorchRec


def torchrec_model(features: list, params, rows: dict[str, int], dim: int) -> nn.Module:
    """Return a model logits(dense, ids) whose tables are not yet allocated."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    names = [f.name for f in features]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            configs = [
                EmbeddingBagConfig(
                    name=f.table, embedding_dim=dim, num_embeddings=rows[f.table], feature_names=[f.name]
                )
                for f in features
            ]
            self.bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
            self.over = DLRMDense(params.dense, len(features))

        def forward(self, dense: Tensor, ids) -> Tensor:
            pooled = self.bags(ids)  # a plan may change the order of the features
            if pooled.keys() == names:
                return self.over(dense, pooled.values())
            parts = pooled.to_dict()
            return self.over(dense, torch.cat([parts[n] for n in names], 1))

    return Model()


def sharded(case, model: nn.Module, names: list[str]):
    """Return `model`, wrapped in DistributedModelParallel."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.types import ShardingEnv

    kind, world = TYPES.get(case.placement, case.placement), dist.get_world_size()
    rule = {"rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "sgd": EmbOptimType.EXACT_SGD}[case.rule]
    kernel = "dense" if kind == "data_parallel" else "fused"
    if kernel == "dense" and case.rule != "sgd":
        raise NotImplementedError("data_parallel has no fused optimizer there, and no row-wise one")

    class Sharder(EmbeddingBagCollectionSharder):  # on CPUs TorchRec's sharder offers fewer kinds than work
        def sharding_types(self, compute_device_type):
            return [kind]

    sharder = Sharder(fused_params=None if kernel == "dense" else {"optimizer": rule, "learning_rate": LR, "eps": EPS})
    limits = {
        n: ParameterConstraints(sharding_types=[kind], compute_kernels=[kernel], min_partition=case.dim // world)
        for n in names
    }
    topology = Topology(world_size=world, compute_device="cpu", local_world_size=world)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=limits, batch_size=case.batch // world)
    return DistributedModelParallel(
        module=model, env=ShardingEnv.from_process_group(dist.group.WORLD), device=torch.device("cpu"),
        plan=planner.collective_plan(model, [sharder], dist.group.WORLD), sharders=[sharder], init_data_parallel=True,
    )  # fmt: skip


def table_parts(state: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Yield (table, (first row, first column), part) for each part that this rank holds."""
    for name, x in state.items():
        if ".embedding_bags." not in name:
            continue
        table = name.split(".embedding_bags.")[1].removesuffix(".weight")
        if hasattr(x, "local_shards"):
            for part in x.local_shards():
                yield table, tuple(part.metadata.shard_offsets), part.tensor.detach().view(part.metadata.shard_sizes)
        else:
            yield table, (0, 0), x.detach()


def whole_tables(state: dict[str, Any], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return {table: f[R, D]} on every rank. If several ranks hold a part, it takes the part of the last rank."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, [(n, at, x.clone()) for n, at, x in table_parts(state)])
    out = {n: torch.full_like(t, torch.nan) for n, t in like.items()}
    for name, (r, c), x in itertools.chain(*found):
        out[name][r : r + x.shape[0], c : c + x.shape[1]] = x
    return out


def torchrec_step(case, model, params, batches: list, *, compiled: bool):
    """Return (call, tables): `call` runs one step and returns this rank's loss; `tables` returns the whole tables."""
    with quiet():
        rows = {n: t.shape[0] for n, t in params.tables.items()}
        parallel = sharded(case, torchrec_model(model.features, params, rows, case.dim), list(params.tables))
        for name, (r, c), x in table_parts(parallel.state_dict()):
            x.copy_(params.tables[name][r : r + x.shape[0], c : c + x.shape[1]])
        if compiled:
            next(m for m in parallel.modules() if isinstance(m, DLRMDense)).compile()
        is_table = lambda n: ".embedding_bags." in n
        dense = [p for n, p in parallel.named_parameters() if not is_table(n)]
        optimizers = [torch.optim.SGD(dense, lr=DENSE_LR)]
        if case.placement == "replicated":
            optimizers.append(torch.optim.SGD([p for n, p in parallel.named_parameters() if is_table(n)], lr=LR))
    turn = itertools.cycle(batches)

    def call() -> Tensor:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        batch = next(turn)
        ids = KeyedJaggedTensor(
            list(batch.ids.keys), batch.ids.values, lengths=batch.ids.offsets.diff(), offsets=batch.ids.offsets
        )
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss = F.binary_cross_entropy_with_logits(parallel(batch.dense, ids), batch.label)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return call, lambda: whole_tables(parallel.state_dict(), params.tables)
