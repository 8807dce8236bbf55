"""Measures a pipelined step and the plain loop on two gloo ranks of this machine, where ids arrive late.

    .venv/bin/python bench/pipeline.py [--late-ms 50] [--work-ms 60] [--steps 100]

Every exchange of ids is late by `late-ms`, and every step also waits `work-ms`, as for a device that computes. The
law comes first: over all steps the losses, and then the state, have the bits of the plain loop. Otherwise there is no
number. Rounds of both alternate, and each round leaves out its first batches. TorchRec's pipeline and plain loop
follow, with tables, batches and dense layers of these shapes (`pipeline_peer.py`). They wait where they await the ids.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pipeline_peer
import torch
from funcrec.kernels import library
from measure import digits, spread

import funcrec as fr
from funcrec.sharding import _route
from funcrec.testing import RankPool

TABLES, ROWS, DIM, BATCH, IDS = 8, 20_000, 32, 256, 4
ROUND = 20  # the steps of a round


def late(x: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return x.clone()


def loss_fn(params, batch):
    acts = fr.lookup(params.tables, batch.ids, FEATURES).values
    logits = (acts @ params.dense["w"]).relu() @ params.dense["v"]
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)


CONFIGS = [fr.TableConfig(f"t{i}", ROWS, DIM) for i in range(TABLES)]
FEATURES = tuple(fr.FeatureConfig(f"f{i}", table=f"t{i}") for i in range(TABLES))


def batch_of(number: int, rank: int):
    g = torch.Generator().manual_seed(1000 * number + rank)
    values = torch.randint(ROWS, (TABLES * BATCH * IDS,), generator=g)
    ids = fr.KeyedJaggedTensor.from_lengths([f.name for f in FEATURES], values, torch.full((TABLES * BATCH,), IDS))
    return fr.Batch(ids, torch.randint(2, (BATCH,), generator=g).float())


def problem(mesh: fr.Mesh, steps: int) -> tuple[Callable, list]:
    """Return (a function that makes a step and its first state, this rank's batches)."""
    plan = fr.Plan.uniform("row_wise", {c.name: (ROWS, DIM) for c in CONFIGS}, mesh)
    kind = {"sparse": fr.optim.rowwise_adagrad(0.05), "dense": fr.optim.dense(torch.optim.Adam, lr=1e-3)}
    dense = {"w": torch.linspace(-1, 1, TABLES * DIM * 64).sin().reshape(-1, 64) / 8, "v": torch.linspace(-1, 1, 64)}

    def start():
        step = fr.train_step(loss_fn, **kind, mesh=mesh, plan=plan)
        return step, step.init(fr.Params(fr.init(fr.key(0), CONFIGS), {k: x.clone() for k, x in dense.items()}))

    return start, [batch_of(i, mesh.coordinates["x"]) for i in range(steps)]


def plain(step: Callable, state: fr.TrainState, batches: list) -> Iterator[tuple]:
    for batch in batches:
        state, metrics = step(state, batch)
        yield state, metrics


def one_rank(late_s: float, work_s: float, steps: int) -> dict:
    torch.set_num_threads(1)
    mesh = fr.Mesh.distributed(x=2)
    library.define("bench_pipeline", "late", "(Tensor x, float s) -> Tensor", late, lambda x, s: torch.empty_like(x))
    send = _route.all_to_all
    _route.all_to_all = lambda xs, axes: send(tuple(torch.ops.bench_pipeline.late(x, late_s) for x in xs), axes)
    step_of, batches = problem(mesh, steps)

    def start():
        step, state = step_of()
        return fr.jit(step, donate=("state",)), state

    def timed(run):
        losses, times, state = [], [time.perf_counter()], None
        for state, metrics in run:  # noqa: B007
            losses.append(metrics["loss"])
            time.sleep(work_s)
            times.append(time.perf_counter())
        return state, losses, [b - a for a, b in itertools.pairwise(times)]

    step, a = start()
    other, b = start()
    pipe = fr.pipeline(other, mesh=mesh)
    out = {"plain_ms": [], "pipeline_ms": [], "is_same": True}
    for first in range(0, steps, ROUND):
        part = batches[first : first + ROUND]
        a, losses_a, times_a = timed(plain(step, a, part))
        b, losses_b, times_b = timed(pipe.run(b, part))
        out["is_same"] &= all(map(torch.equal, losses_a, losses_b))
        skipped = 2 if first else 4  # the first batch of a run is not routed ahead; the first run compiles
        out["plain_ms"] += [1e3 * t for t in times_a[skipped:]]
        out["pipeline_ms"] += [1e3 * t for t in times_b[skipped:]]
    out["is_same"] &= all(map(torch.equal, fr.tree.leaves(a), fr.tree.leaves(b)))
    return out | {"routed_bytes": pipe.routed_bytes}


def row_of(ranks: list[dict], late_s: float, work_s: float, steps: int) -> dict:
    with RankPool(2, timeout_s=300) as pool:
        how = (late_s, work_s, steps, (TABLES, ROWS, DIM, BATCH, IDS))
        theirs = pool.run(pipeline_peer.one_rank, *how, deadline_s=600)[0]
    first = ranks[0]
    plain, piped = statistics.median(first["plain_ms"]), statistics.median(first["pipeline_ms"])
    return {
        "plain_ms": spread(first["plain_ms"]), "pipeline_ms": spread(first["pipeline_ms"]),
        "ratio": digits(plain / piped), "hidden_share": digits(1e-3 * (plain - piped) / late_s) if late_s else None,
        "torchrec_plain_ms": spread(theirs["plain_ms"]), "torchrec_pipeline_ms": spread(theirs["pipeline_ms"]),
        "routed_bytes": first["routed_bytes"],
    }  # fmt: skip


def main(one_rank: Callable, row_of: Callable, *, steps: int) -> None:
    """Run one_rank(late_s, work_s, steps) on two ranks.

    If all ranks report `is_same`, append the row of row_of to a file.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--late-ms", type=float, default=50.0)
    parser.add_argument("--work-ms", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "pipeline.jsonl")
    args = parser.parse_args()
    how = args.late_ms / 1e3, args.work_ms / 1e3, args.steps
    with RankPool(2, timeout_s=300) as pool:
        ranks = pool.run(one_rank, *how, deadline_s=1200)
    if not all(r["is_same"] for r in ranks):
        raise SystemExit("red: a pipeline that is not its loop gives no number")
    row = {"late_ms": args.late_ms, "work_ms": args.work_ms, "steps": args.steps, "is_same": True}
    row |= row_of(ranks, *how) | {"torch": torch.__version__, "load": os.getloadavg()[0]}
    with args.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main(one_rank, row_of, steps=100)
