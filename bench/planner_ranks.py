"""Plans on two gloo ranks of this machine: the step times that fr.plan estimates beside those that are measured.

    python bench/planner_ranks.py                # 6 sets of tables, 20 random plans of one set
    python bench/planner_ranks.py --sets 2 --plans 6 --rounds 5

For each set: a jitted donated step under fr.plan's plan (with `Hardware.measure` of these ranks), under TorchRec's
planner's (table-, row- and column-wise, at the ranks that it gives), and all tables row-wise, in turn, medians over the
rounds of the slower rank. For the random plans: Spearman's correlation of estimated and measured times. Lines of JSON
in results/planner.jsonl.
"""

import argparse
import contextlib
import random
import statistics
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from measure import RESULTS, digits, spread
from planner import write

import funcrec as fr
from funcrec.testing import RankPool

WORLD, BATCH, NUM_BATCHES = 2, 1024, 3
KINDS = ("table_wise", "row_wise", "column_wise", "replicated")


def small_set(seed: int) -> list[tuple[str, int, int, int]]:
    """6 to 14 tables: (name, rows, dim, ids per bag)."""
    draw = random.Random(seed)
    return [
        (f"t{i}", int(10 ** draw.uniform(2, 5)), draw.choice([8, 16, 32, 64]), int(10 ** draw.uniform(0, 1.5)))
        for i in range(draw.randint(6, 14))
    ]


def configs(tables) -> tuple:
    own = tuple(fr.TableConfig(n, rows, dim) for n, rows, dim, _ in tables)
    return own, tuple(fr.FeatureConfig(f"f_{t.name}", table=t.name) for t in own)


def planned(tables, hardware: fr.Hardware, kinds: dict | None = None) -> fr.Plan:
    """fr.plan's; with `kinds`, {table: (kind, ranks)}, the plan that lies so, with its estimate."""
    own, features = configs(tables)
    used = {n: {"pooling_factor": float(ids)} for n, _, _, ids in tables}
    for n, (kind, ranks) in (kinds or {}).items():
        used[n] |= {"kinds": (kind,)} | ({"ranks": ranks} if ranks else {})
    optimizer = fr.optim.rowwise_adagrad()
    return fr.plan(
        own, features, {"x": WORLD}, batch_size=BATCH, hardware=hardware, constraints=used, optimizer=optimizer
    )


def torchrec_kinds(tables) -> dict:
    """{table: (kind, ranks)} of TorchRec's planner for two CPU ranks."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    module = torch.nn.Module()
    made = [EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=d, feature_names=[n]) for n, r, d, _ in tables]
    module.ebc = EmbeddingBagCollection(device=torch.device("meta"), tables=made)
    kinds = ["table_wise", "row_wise", "column_wise"]
    told = {
        n: ParameterConstraints(sharding_types=kinds, compute_kernels=["fused"], pooling_factors=[float(ids)],
            min_partition=max(4, dim // WORLD))
        for n, _, dim, ids in tables
    }  # fmt: skip
    topology = Topology(world_size=WORLD, compute_device="cuda", local_world_size=WORLD)  # it offers less on CPUs
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=BATCH // WORLD, constraints=told)
    found = planner.plan(module, [EmbeddingBagCollectionSharder()]).plan["ebc"]
    out = {}
    for n, p in found.items():
        kind = p.sharding_type if len(set(p.ranks)) > 1 else "table_wise"  # columns may all lie on one rank there
        out[n] = (kind, None if kind == "row_wise" else tuple(dict.fromkeys(p.ranks)))
    return out


def random_kinds(tables, seed: int) -> dict:
    draw, out = random.Random(seed), {}
    for n, *_ in tables:
        kind = draw.choice(KINDS)
        out[n] = (kind, (draw.randrange(WORLD),) if kind == "table_wise" else None)
    return out


def hardware() -> fr.Hardware:
    return fr.Hardware.measure(fr.Mesh.distributed(device="cpu", x=WORLD))


def one_rank(tables, plans: list[str], rounds: int, eager: bool) -> list[list[float]]:
    """Seconds of each plan's steps on this rank, round by round, the plans in turn."""
    mesh = fr.Mesh.distributed(device="cpu", timeout_s=600, x=WORLD)
    calls = [step_of(tables, fr.Plan.from_json(text), mesh, eager) for text in plans]
    times: list[list[float]] = [[] for _ in calls]
    for r in range(rounds + 2):
        for i in range(len(calls)):
            i = (i + r) % len(calls)
            dist.barrier()
            began = time.perf_counter()
            calls[i](r)
            if r >= 2:
                times[i].append(time.perf_counter() - began)
    return times


def step_of(tables, plan: fr.Plan, mesh: fr.Mesh, eager: bool):
    own, features = configs(tables)
    draw = torch.Generator().manual_seed(dist.get_rank())
    per = BATCH // WORLD
    batches = []
    for _ in range(NUM_BATCHES):
        values = [torch.randint(rows, (per * ids,), generator=draw) for _, rows, _, ids in tables]
        lengths = torch.cat([torch.full((per,), ids) for *_, ids in tables])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        batches.append(fr.KeyedJaggedTensor(torch.cat(values), offsets, keys=tuple(f.name for f in features)))
    step = fr.train_step(
        lambda params, ids: (fr.lookup(params.tables, ids, features).values * params.dense).square().mean(),
        sparse=fr.optim.rowwise_adagrad(lr=0.01), dense=fr.optim.dense(torch.optim.SGD, lr=0.01), mesh=mesh, plan=plan,
    )  # fmt: skip
    dim = sum(d for _, _, d, _ in tables)
    held = {"state": step.init(fr.Params(fr.init(fr.key(0), own), torch.ones(dim)))}
    fast = step if eager else fr.jit(step, donate=("state",))

    def call(i: int) -> None:
        held["state"], _ = fast(held["state"], batches[i % NUM_BATCHES])

    return call


def measured(pool: RankPool, tables, plans: list[fr.Plan], rounds: int, eager: bool) -> list[list[float]]:
    """The slower rank's seconds of each round of each plan."""
    ranks = pool.run(one_rank, tables, [p.to_json() for p in plans], rounds, eager, deadline_s=1500)
    return [[max(pair) for pair in zip(*own, strict=True)] for own in zip(*ranks, strict=True)]


def beside(pool: RankPool, seed: int, found: fr.Hardware, rounds: int, eager: bool) -> dict:
    tables = small_set(seed)
    plans = {"funcrec": planned(tables, found)}
    with contextlib.suppress(ImportError):
        plans["torchrec"] = planned(tables, found, torchrec_kinds(tables))
    plans["row_wise"] = planned(tables, found, {n: ("row_wise", None) for n, *_ in tables})
    times = dict(zip(plans, measured(pool, tables, list(plans.values()), rounds, eager), strict=True))
    over = lambda t: statistics.median(x / y for x, y in zip(t, times["funcrec"], strict=True))
    line = {"group": "planner_ranks", "case": f"set {seed}", "tables": len(tables), "rounds": rounds, "eager": eager}
    line["estimated_ms"] = {n: digits(p.report.seconds * 1e3) for n, p in plans.items()}
    line |= {"ms": {n: spread(t, 1e3) for n, t in times.items()}}
    return line | {"ratio": {n: digits(over(t)) for n, t in times.items() if n != "funcrec"}}


def correlation(pool: RankPool, seed: int, found: fr.Hardware, num_plans: int, rounds: int, eager: bool) -> dict:
    from scipy.stats import spearmanr

    tables = small_set(seed)
    plans = [planned(tables, found, random_kinds(tables, i)) for i in range(num_plans)]
    estimated = [p.report.seconds * 1e3 for p in plans]
    times = [statistics.median(t) * 1e3 for t in measured(pool, tables, plans, rounds, eager)]
    line = {
        "group": "planner_ranks",
        "case": f"random plans of set {seed}",
        "plans": num_plans,
        "rounds": rounds,
        "eager": eager,
    }
    line |= {"estimated_ms": [digits(x) for x in estimated], "measured_ms": [digits(x) for x in times]}
    return line | {"spearman": digits(float(spearmanr(estimated, times).statistic))}


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=6)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="steps without jit: compiling 20 plans takes minutes")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS / "planner.jsonl")
    options = parser.parse_args()
    with RankPool(WORLD, timeout_s=600) as pool:
        found = pool.run(hardware)[0]
        about = {"memory_gb_per_s": digits(found.memory_bytes_per_s / 1e9)}
        about["link_gb_per_s"] = digits(found.link_bytes_per_s / 1e9)
        if options.plans:
            write({**correlation(pool, 0, found, options.plans, options.rounds, options.eager), **about}, options.out)
        for seed in range(options.sets):
            write({**beside(pool, seed, found, options.rounds, options.eager), **about}, options.out)


if __name__ == "__main__":
    main()
