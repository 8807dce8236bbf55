"""Compares funcrec's solver with TorchRec's planner: both get TorchRec's options, and its NoopPerfModel scores both.

    python bench/planner.py --sets FILE                      # DCNv2, t180, t200, t510, t7 on 8, 16 and 128 devices
    python bench/planner.py --sets FILE --tasks mlperf_dcnv2 --ranks 8
    python bench/planner.py --generated 30 --ranks 8         # tables drawn by seeds 0 to 29
    python bench/planner.py --scale                          # 1,000 tables on 128 ranks, by fr.plan, without a peer

Each case appends a line of JSON to results/planner.jsonl: ratings in ms of the slowest rank, the lower bound for all
plans, the gap, CPU seconds. TorchRec's planner runs in a process of its own, which ends after --limit CPU seconds. No
device is needed. FILE: {task: {"dim", "groups": [[number of tables, ids per bag, rows]]}}.
"""

import argparse
import json
import logging
import multiprocessing
import random
import resource
import time
import warnings
from pathlib import Path

from measure import RESULTS, digits, machine

BATCH = 65_536
GB = 1024**3


def tables_of(task: dict) -> list[tuple[str, int, int, float]]:
    """Return [(name, rows, dim, ids per bag)] of a task."""
    groups = task.get("groups") or [[1, *t] for t in task["tables"]]
    flat = [
        (rows, task["dim"] if isinstance(task["dim"], int) else 0, ids) for n, ids, rows in groups for _ in range(n)
    ]
    return [(f"t{i}", rows, dim, float(ids)) for i, (rows, dim, ids) in enumerate(flat)]


def generated(seed: int) -> list[tuple[str, int, int, float]]:
    """Return 10 to 60 tables with dims 4 to 128, like the tasks of NeuroShard."""
    draw = random.Random(seed)
    num = draw.randint(10, 60)
    rows = [int(10 ** draw.uniform(2, 7.7)) for _ in range(num)]
    return [
        (f"t{i}", r, draw.choice([4, 8, 16, 32, 64, 128]), float(max(1, int(10 ** draw.uniform(0, 2)))))
        for i, r in enumerate(rows)
    ]


class Peer:
    """TorchRec's planner for a set of tables."""

    def __init__(self, tables, ranks: int, hbm_gb: float = 80):
        import torch
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        configs = [
            EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=d, feature_names=[f"f_{n}"])
            for n, r, d, _ in tables
        ]
        self.module = torch.nn.Module()
        self.module.ebc = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
        self.sharders = [EmbeddingBagCollectionSharder()]
        self.topology = Topology(
            world_size=ranks, compute_device="cuda", hbm_cap=int(hbm_gb * GB), local_world_size=min(8, ranks)
        )
        constraints = {n: ParameterConstraints(pooling_factors=[ids]) for n, _, _, ids in tables}
        self.planner = EmbeddingShardingPlanner(
            topology=self.topology, batch_size=BATCH // ranks, constraints=constraints, debug=False
        )

    def plan(self) -> float:
        """Return the rating of TorchRec's own plan, in ms."""
        self.planner.plan(self.module, self.sharders)
        return self.rate(self.planner._best_plan)

    def rate(self, plan) -> float:
        from torchrec.distributed.planner.perf_models import NoopPerfModel

        return float(NoopPerfModel(self.topology).rate(plan))

    def packing(self):
        """Return the packing of TorchRec's options, with the memory that TorchRec's own reservation leaves."""
        from funcrec.planner._packing import Cap, Item, Option, Packing

        planner = self.planner
        room = planner._storage_reservation.reserve(
            topology=self.topology, batch_size=planner._batch_size, module=self.module, sharders=self.sharders,
            constraints=planner._constraints,
        )  # fmt: skip
        options: dict[str, list] = {}
        for o in planner._enumerator.enumerate(self.module, self.sharders):
            options.setdefault(o.name, []).append(o)
        ranks, local = self.topology.world_size, self.topology.local_world_size
        single = tuple((r,) for r in range(ranks))
        hosts = tuple(tuple(range(h, h + local)) for h in range(0, ranks, local))
        cost = lambda s: (s.perf.total, float(s.storage.hbm), float(s.storage.ddr))

        def option(o):
            each = [cost(s) for s in o.shards]
            if o.partition_by == "uniform":
                return Option(o, tuple(each), single, "fixed")
            if o.partition_by == "device":
                return Option(o, tuple(each), single)
            # the last shard of a host has fewer rows: each rank is charged for the largest shard
            parts = tuple(tuple(map(max, zip(*each[i : i + local]))) for i in range(0, len(each), local))
            return Option(o, parts, hosts, "any" if o.partition_by == "host" else "apart")

        items = []
        for name, own in options.items():
            whole = [o for o in own if not (o.partition_by == "multi_host" and len(o.shards) // local > len(hosts))]
            items.append(Item(name, tuple(option(o) for o in whole)))
        least = [min(d.storage.hbm for d in room.devices), min(d.storage.ddr for d in room.devices)]
        caps = (Cap("hbm", (0.0, 1.0, 0.0), float(least[0])), Cap("ddr", (0.0, 0.0, 1.0), float(max(least[1], 1))))
        return Packing(tuple(items), ranks, (1.0, 0.0, 0.0), caps)

    def rated(self, packing, choices) -> float:
        """Return the rating of funcrec's plan by TorchRec's numbers, and assert that the plan fits by these numbers."""
        import copy

        local, plan = self.topology.local_world_size, []
        for item, choice in zip(packing.items, choices, strict=True):
            option = item.options[choice.option]
            o = copy.deepcopy(option.label)
            for i, s in enumerate(o.shards):
                if option.how == "fixed" or not choice.places:
                    s.rank = i % packing.num_ranks
                elif o.partition_by == "device":
                    s.rank = choice.places[i]
                else:
                    s.rank = choice.places[i // local] * local + i % local
            plan.append(o)
        used = [0] * packing.num_ranks
        for o in plan:
            for s in o.shards:
                used[s.rank] += s.storage.hbm
        assert max(used) <= packing.caps[0].limit, (max(used), packing.caps[0].limit)
        return self.rate(plan)


def torchrec_plan(tables, ranks: int, limit_s: int) -> dict:
    """Return the figures of TorchRec's plan, which takes at most so many CPU seconds."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(there, tables, ranks, limit_s))
    child.start()
    there.close()
    try:
        return here.recv()
    except EOFError:  # the system killed the process
        return {"torchrec_ms": None, "torchrec_error": f"no plan in {limit_s} s"}
    finally:
        child.join()


def _in_child(pipe, tables, ranks: int, limit_s: int) -> None:
    began = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (int(began) + limit_s, resource.RLIM_INFINITY))
    try:
        found = {"torchrec_ms": digits(Peer(tables, ranks).plan())}
    except Exception as error:
        found = {"torchrec_ms": None, "torchrec_error": f"{type(error).__name__}: {str(error)[:120]}"}
    pipe.send({**found, "torchrec_s": digits(time.process_time() - began)})


def compare(name: str, tables, ranks: int, effort: int, peers: dict) -> dict:
    """Return one line of figures. peers: the result of `torchrec_plan`, or {}."""
    from funcrec.planner._solve import solve

    peer = Peer(tables, ranks)
    began = time.process_time()
    packing = peer.packing()
    enumerated = time.process_time() - began
    began = time.process_time()
    found = solve(packing, effort)
    spent = time.process_time() - began
    line = {"group": "planner", "case": name, "ranks": ranks, "tables": len(tables)}
    line |= {"enumerate_s": digits(enumerated), "seconds": digits(spent)}
    if found.choices is None:
        return {**line, "error": "no plan", "excess": found.excess, **peers}
    line |= {
        "ms": digits(peer.rated(packing, found.choices)),
        "bound_ms": digits(found.bound),
        "gap": digits(found.gap),
    }
    line |= peers
    if peers.get("torchrec_ms"):
        line["ratio"] = digits(peers["torchrec_ms"] / line["ms"])
        line["law"] = "green" if line["ms"] <= peers["torchrec_ms"] * (1 + 1e-6) else "red"  # never worse than the peer
    return line


def scale(num_tables: int, ranks: int, effort: int) -> dict:
    """Return one line of figures of fr.plan with its own costs."""
    import funcrec as fr

    draw = random.Random(0)
    each = [(int(10 ** draw.uniform(2, 7.7)), draw.choice([16, 32, 64, 128]), int(10 ** draw.uniform(0, 2)))
        for _ in range(num_tables)]  # fmt: skip
    tables = [fr.TableConfig(f"t{i}", rows, dim) for i, (rows, dim, _) in enumerate(each)]
    features = [fr.FeatureConfig(t.name, table=t.name) for t in tables]
    used = {t.name: fr.TableConstraint(pooling_factor=float(ids), zipf=1.05) for t, (_, _, ids) in zip(tables, each)}
    began = time.process_time()
    plan = fr.plan(tables, features, {"model": ranks}, batch_size=BATCH, constraints=used, effort=effort)
    line = {"group": "planner", "case": "scale", "ranks": ranks, "tables": num_tables}
    spent = digits(time.process_time() - began)
    return line | {"seconds": spent, "ms": digits(plan.report.seconds * 1e3), "gap": digits(plan.gap)}


def write(line: dict, out: Path) -> None:
    line = {**machine(), **line}
    print(json.dumps(line), flush=True)
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=Path, help="a JSON file of tasks")
    parser.add_argument("--tasks", default="mlperf_dcnv2,t180,t200,t510,t7")
    parser.add_argument("--generated", type=int, default=0)
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--ranks", default="8,16,128")
    parser.add_argument("--effort", type=int, default=1)
    parser.add_argument("--limit", type=int, default=200, help="CPU seconds of TorchRec's planner; 0 for none of it")
    parser.add_argument("--out", type=Path, default=RESULTS / "planner.jsonl")
    options = parser.parse_args()
    if options.scale:
        return write(scale(1000, 128, options.effort), options.out)
    sets = {f"generated {i}": generated(i) for i in range(options.generated)}
    if not sets:
        if options.sets is None:
            parser.error("--sets FILE, --generated N or --scale")
        given = json.loads(options.sets.read_text())
        sets = {n: tables_of(given[n]) for n in options.tasks.split(",")}
    for name, tables in sets.items():
        for ranks in map(int, options.ranks.split(",")):
            peers = torchrec_plan(tables, ranks, options.limit) if options.limit else {}
            write(compare(name, tables, ranks, options.effort, peers), options.out)


if __name__ == "__main__":
    main()
