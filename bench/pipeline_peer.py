"""Measures TorchRec's TrainPipelineSparseDist and its plain loop, where ids arrive late: the peer of `pipeline.py`."""

import dataclasses
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def one_rank(late_s: float, work_s: float, steps: int, shapes: tuple[int, ...]) -> dict:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import dist_data
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.distributed.types import ShardingEnv
    from torchrec.streamable import Pipelineable

    tables, rows, dim, size, per_bag = shapes
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")

    @dataclasses.dataclass
    class Batch(Pipelineable):
        ids: Any
        label: torch.Tensor

        def to(self, device, non_blocking=False):
            return self

        def record_stream(self, stream):
            pass

        def pin_memory(self):
            return self

    names = [f"f{i}" for i in range(tables)]
    configs = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=rows, feature_names=[f])
        for i, f in enumerate(names)
    ]

    class Train(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
            self.top = torch.nn.Sequential(torch.nn.Linear(tables * dim, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

        def forward(self, batch: Batch):
            logits = self.top(self.bags(batch.ids).values()).squeeze(1)
            return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label), logits

    class Sharder(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type):
            return ["row_wise"]

    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05, "eps": 1e-8}
    sharders = [Sharder(fused_params=fused)]
    how = {c.name: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"]) for c in configs}
    place = Topology(world_size=2, compute_device="cpu", local_world_size=2)
    planner = EmbeddingShardingPlanner(topology=place, constraints=how, batch_size=size)
    model = Train()
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    env, cpu = ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu")
    model = DistributedModelParallel(module=model, env=env, device=cpu, plan=plan, sharders=sharders)
    opt = torch.optim.Adam([p for n, p in model.named_parameters() if "bags." not in n], lr=1e-3)

    sent = dist_data.KJTAllToAllTensorsAwaitable
    begin, finish = sent.__init__, sent._wait_impl

    def begun(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.late_until = time.perf_counter() + late_s

    def awaited(self):
        time.sleep(max(0.0, self.late_until - time.perf_counter()))
        return finish(self)

    sent.__init__, sent._wait_impl = begun, awaited

    def batches():
        g = torch.Generator().manual_seed(rank)
        while True:
            values = torch.randint(rows, (tables * size * per_bag,), generator=g)
            ids = KeyedJaggedTensor(keys=names, values=values, lengths=torch.full((tables * size,), per_bag))
            yield Batch(ids, torch.randint(2, (size,), generator=g).float())

    def timed(run: Callable[[], object]) -> list[float]:
        times = [time.perf_counter()]
        for _ in range(steps):
            run()
            time.sleep(work_s)
            times.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(times)][4:]

    source = batches()

    def plain() -> None:
        opt.zero_grad()
        loss, _ = model(next(source))
        loss.backward()
        opt.step()

    plain_ms = timed(plain)
    pipe = TrainPipelineSparseDist(model, opt, cpu, execute_all_batches=True)
    return {"plain_ms": plain_ms, "pipeline_ms": timed(lambda: pipe.progress(source))}
