"""Compares step times of plans on two gloo ranks of this machine: the estimates of fr.plan, and measured times.

    python bench/planner_ranks.py                # all figures: 20 plans of each of two sets, 10 sets against TorchRec
    python bench/planner_ranks.py --sets 2 --of 0 --rounds 5

For each set it runs a jitted donated step under four plans: that of fr.plan (with `Hardware.measure` of these ranks),
that of fr.plan from costs of bytes alone, that of TorchRec's planner (table-, row- and column-wise, on the ranks that
it names), and all tables row-wise. The correlation takes 20 plans that differ in kind (`kinds_of`). It is Spearman's
correlation of estimated and measured times, for the present costs, for bytes alone at the same rates, and for `FORMER`.

The time of a step runs from a barrier to the end of the slower rank. Figures are medians over rounds in which every
plan has its turn. `ms` is clock time, which on a shared machine includes the turns of other processes. `cpu_ms` is the
processor time of the busier rank, over all its threads, also those of gloo: the work that a plan gives a rank, with
copies of exchanges, and without waits. On a quiet machine use `ms`. On a loaded machine only `cpu_ms` tells plans
apart. Lines of JSON go to results/planner.jsonl.
"""

import argparse
import contextlib
import dataclasses
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
NO_LATENCY = {"link_latency_s": 0.0, "host_latency_s": 0.0, "launch_s": 0.0}
# rates from `Hardware.measure` on two quiet ranks, for costs of bytes alone
FORMER = {"memory_bytes_per_s": 4.469e9, "link_bytes_per_s": 2.269e9, "host_bytes_per_s": 2.269e9, **NO_LATENCY}


def small_set(seed: int) -> list[tuple[str, int, int, int]]:
    """Return 6 to 14 tables: (name, rows, dim, ids per bag)."""
    draw = random.Random(seed)
    return [
        (f"t{i}", int(10 ** draw.uniform(2, 5)), draw.choice([8, 16, 32, 64]), int(10 ** draw.uniform(0, 1.5)))
        for i in range(draw.randint(6, 14))
    ]


def configs(tables) -> tuple:
    own = tuple(fr.TableConfig(n, rows, dim) for n, rows, dim, _ in tables)
    return own, tuple(fr.FeatureConfig(f"f_{t.name}", table=t.name) for t in own)


def planned(tables, hardware: fr.Hardware, kinds: dict | None = None) -> fr.Plan:
    """Return the plan of fr.plan.

    With `kinds`, {table: (kind, ranks)}, return the plan with these placements, and its estimate.
    """
    own, features = configs(tables)
    used = {n: {"pooling_factor": float(ids)} for n, _, _, ids in tables}
    for n, (kind, ranks) in (kinds or {}).items():
        used[n] |= {"kinds": (kind,)} | ({"ranks": ranks} if ranks else {})
    optimizer = fr.optim.rowwise_adagrad()
    return fr.plan(
        own, features, {"x": WORLD}, batch_size=BATCH, hardware=hardware, constraints=used, optimizer=optimizer
    )


def torchrec_kinds(tables) -> dict:
    """Return {table: (kind, ranks)} from TorchRec's planner for two CPU ranks."""
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
    topology = Topology(world_size=WORLD, compute_device="cuda", local_world_size=WORLD)  # "cpu" offers fewer kinds
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=BATCH // WORLD, constraints=told)
    found = planner.plan(module, [EmbeddingBagCollectionSharder()]).plan["ebc"]
    out = {}
    for n, p in found.items():
        kind = p.sharding_type if len(set(p.ranks)) > 1 else "table_wise"  # columns may all lie on one rank
        out[n] = (kind, None if kind == "row_wise" else tuple(dict.fromkeys(p.ranks)))
    return out


def kinds_of(tables, num_plans: int) -> dict[str, dict]:
    """Return {name: {table: (kind, ranks)}} of `num_plans` plans that differ in kind, and then random mixtures."""
    names, small = [t[0] for t in tables], {t[0] for t in sorted(tables, key=lambda t: t[1])[: len(tables) // 2]}
    work = {n: dim * ids for n, _, dim, ids in tables}
    heavy = sorted(names, key=lambda n: -work[n])
    half, on = set(heavy[: len(names) // 2]), lambda r: ("table_wise", (r,))
    row, column, copy = ("row_wise", None), ("column_wise", None), ("replicated", None)
    even, load = {}, [0.0] * WORLD
    for n in heavy:
        r = load.index(min(load))
        even[n], load[r] = on(r), load[r] + work[n]
    each = {
        "row_wise": lambda n: row,
        "column_wise": lambda n: column,
        "replicated": lambda n: copy,
        "rank 0": lambda n: on(0),
        "even": lambda n: even[n],
        "by turns": lambda n: on(names.index(n) % 2),
        "three quarters on rank 0": lambda n: on(int(heavy.index(n) >= 3 * len(names) // 4)),
        "the heaviest alone": lambda n: on(int(n != heavy[0])),
        "small replicated, row_wise": lambda n: copy if n in small else row,
        "small replicated, even": lambda n: copy if n in small else even[n],
        "small replicated, rank 0": lambda n: copy if n in small else on(0),
        "large replicated, row_wise": lambda n: row if n in small else copy,
        "heavy column_wise, even": lambda n: column if n in half else even[n],
        "heavy row_wise, even": lambda n: row if n in half else even[n],
        "heavy row_wise, rank 0": lambda n: row if n in half else on(0),
        "heavy replicated, even": lambda n: copy if n in half else even[n],
    }
    plans = {name: {n: kind(n) for n in names} for name, kind in each.items()}
    plans |= {f"random {i}": random_kinds(tables, i) for i in range(num_plans)}
    return dict(list(plans.items())[:num_plans])


def random_kinds(tables, seed: int) -> dict:
    draw, out = random.Random(seed), {}
    for n, *_ in tables:
        kind = draw.choice(KINDS)
        out[n] = (kind, (draw.randrange(WORLD),) if kind == "table_wise" else None)
    return out


def hardware() -> fr.Hardware:
    return fr.Hardware.measure(fr.Mesh.distributed(device="cpu", x=WORLD))


def one_rank(tables, plans: list[str], rounds: int, eager: bool) -> list[list[tuple[float, float]]]:
    """Return (seconds, processor seconds) of the steps of each plan on this rank, for each round.

    The plans take turns.
    """
    mesh = fr.Mesh.distributed(device="cpu", timeout_s=600, x=WORLD)
    calls = [step_of(tables, fr.Plan.from_json(text), mesh, eager) for text in plans]
    times: list[list[tuple[float, float]]] = [[] for _ in calls]
    for r in range(rounds + 2):
        for i in range(len(calls)):
            i = (i + r) % len(calls)
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            calls[i](r)
            if r >= 2:
                times[i].append((time.perf_counter() - began, time.process_time() - worked))
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


def measured(pool: RankPool, tables, plans: list[fr.Plan], rounds: int, eager: bool) -> list[dict[str, list[float]]]:
    """Return for each plan {"ms": the slower rank's seconds per round, "cpu_ms": the busier rank's CPU seconds}."""
    ranks = pool.run(one_rank, tables, [p.to_json() for p in plans], rounds, eager, deadline_s=3000)
    most = lambda own, k: [max(t[k] for t in turn) for turn in zip(*own, strict=True)]
    return [{"ms": most(own, 0), "cpu_ms": most(own, 1)} for own in zip(*ranks, strict=True)]


def beside(pool: RankPool, seed: int, found: fr.Hardware, rounds: int, eager: bool) -> dict:
    tables = small_set(seed)
    plans = {"funcrec": planned(tables, found)}
    lies = lambda p: {n: (x.kind, x.ranks or None) for n, x in p.placements}
    plans["funcrec, bytes alone"] = planned(
        tables, found, lies(planned(tables, dataclasses.replace(found, **NO_LATENCY)))
    )
    with contextlib.suppress(ImportError):
        plans["torchrec"] = planned(tables, found, torchrec_kinds(tables))
    plans["row_wise"] = planned(tables, found, {n: ("row_wise", None) for n, *_ in tables})
    times = dict(zip(plans, measured(pool, tables, list(plans.values()), rounds, eager), strict=True))
    line = {"group": "planner_ranks", "case": f"set {seed}", "tables": len(tables), "rounds": rounds, "eager": eager}
    line["estimated_ms"] = {n: digits(p.report.seconds * 1e3) for n, p in plans.items()}
    for what in ("ms", "cpu_ms"):
        line[what] = {n: spread(t[what], 1e3) for n, t in times.items()}
        over = lambda t: statistics.median(x / y for x, y in zip(t, times["funcrec"][what], strict=True))  # noqa: B023
        line[f"ratio_{what}"] = {n: digits(over(t[what])) for n, t in times.items() if n != "funcrec"}
    return line


def correlation(pool: RankPool, seed: int, found: fr.Hardware, num_plans: int, rounds: int, eager: bool) -> dict:
    from scipy.stats import spearmanr

    tables = small_set(seed)
    kinds = kinds_of(tables, num_plans - 1)
    costs = {"now": found, "bytes alone": dataclasses.replace(found, **NO_LATENCY)}
    costs["former"] = dataclasses.replace(found, **FORMER)
    chosen = planned(tables, found)
    kinds["fr.plan's"] = {n: (x.kind, x.ranks or None) for n, x in chosen.placements}
    plans = {how: [planned(tables, h, k) for k in kinds.values()] for how, h in costs.items()}
    times = measured(pool, tables, plans["now"], rounds, eager)
    line = {"group": "planner_ranks", "case": f"plans of set {seed}", "plans": len(kinds), "rounds": rounds}
    line |= {"eager": eager, "names": list(kinds)}
    line["estimated_ms"] = {how: [digits(p.report.seconds * 1e3) for p in own] for how, own in plans.items()}
    for what in ("ms", "cpu_ms"):
        line[what] = [digits(statistics.median(t[what]) * 1e3) for t in times]
        rank = lambda own: digits(float(spearmanr(own, line[what]).statistic))  # noqa: B023
        line[f"spearman_{what}"] = {how: rank(own) for how, own in line["estimated_ms"].items()}
    return line


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=10)
    parser.add_argument("--of", default="0,1", help="the sets of which many plans are compared; '' for none")
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="steps without jit: compiling 20 plans takes minutes")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS / "planner.jsonl")
    options = parser.parse_args()
    with RankPool(WORLD, timeout_s=600) as pool:
        found = pool.run(hardware)[0]
        about = {"memory_gb_per_s": digits(found.memory_bytes_per_s / 1e9)}
        about |= {"link_gb_per_s": digits(found.link_bytes_per_s / 1e9)}
        about |= {"latency_ms": digits(found.link_latency_s * 1e3), "launch_ms": digits(found.launch_s * 1e3)}
        for seed in map(int, filter(None, options.of.split(","))):
            write(
                {**correlation(pool, seed, found, options.plans, options.rounds, options.eager), **about}, options.out
            )
        for seed in range(options.sets):
            write({**beside(pool, seed, found, options.rounds, options.eager), **about}, options.out)


if __name__ == "__main__":
    main()
