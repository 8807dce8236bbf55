"""Measures a stale pipeline, `fr.pipeline` and the plain loop on two gloo ranks, where every all-to-all arrives late.

    .venv/bin/python bench/pipeline_stale.py [--late-ms 50] [--work-ms 60] [--steps 60]

Ids, rows and cotangents each travel for `late-ms`, and every step also waits `work-ms`, as for a device that computes.
A step of the plain loop waits for all three. A step of the pipeline waits for rows and cotangents, and a step of the
stale pipeline for cotangents.
The law comes first, bit for bit: the pipeline has the losses and states of the plain loop, and the stale pipeline those
of a loop that reads the tables before the last update. Otherwise there is no number. Rounds of the three alternate, and
each round leaves out its first batches.
"""

import itertools
import statistics
import time

import torch
from funcrec.kernels import library
from measure import digits, explain, spread
from pipeline import ROUND, main, plain, problem

import funcrec as fr
from funcrec.sharding import _combine, _route
from funcrec.train import stale_of


def left(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(time.monotonic(), dtype=torch.float64)


def arrived(x: torch.Tensor, left: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(max(0.0, left.item() + seconds - time.monotonic()))
    return x.clone()


def make_links_late(seconds: float) -> None:
    define = lambda *how: library.define("bench_stale", *how)
    define("left", "(Tensor x) -> Tensor", left, lambda x: torch.empty((), dtype=torch.float64, device=x.device))
    define("arrived", "(Tensor x, Tensor left, float s) -> Tensor", arrived, lambda x, left, s: torch.empty_like(x))
    ops = torch.ops.bench_stale

    def slow(send, xs_of):
        def run(*args):
            now = ops.left(xs_of(args)[0])
            return tuple(ops.arrived(y, now, seconds) for y in send(*args))

        return run

    _route.all_to_all = slow(_route.all_to_all, lambda args: args[0])
    _combine.send = slow(_combine.send, lambda args: args[1])


def one_rank(late_s: float, work_s: float, steps: int) -> dict:
    torch.set_num_threads(1)
    mesh = fr.Mesh.distributed(x=2)
    start, batches = problem(mesh, steps)

    def written(step, state, batches):
        """Yield (state, metrics) of a plain loop.

        It reads the tables before the last update, as a stale pipeline does.
        """
        stale, tables = fr.jit(stale_of(step).update), state.tables
        for batch in batches:
            before, tables = tables, state.tables
            state, metrics = stale(state, before, batch)
            yield state, metrics

    def timed(run, wait_s=work_s):
        losses, times, cpu, state = [], [time.perf_counter()], [time.process_time()], None
        for state, metrics in run:  # noqa: B007
            losses.append(metrics["loss"])
            time.sleep(wait_s)
            times.append(time.perf_counter())
            cpu.append(time.process_time())
        each = lambda xs: [1e3 * (b - a) for a, b in itertools.pairwise(xs)]
        return state, losses, each(times), each(cpu)

    parts = [batches[i : i + ROUND] for i in range(0, steps, ROUND)]
    wants, (step, state) = [], start()
    for part in parts:
        state, losses, *_ = timed(written(step, state, part), 0)
        wants.append((losses, fr.tree.leaves(state)))
    make_links_late(late_s)
    jitted = lambda step: fr.jit(step, donate=("state",))
    stepping = [(jitted(step), state) for step, state in (start(), start(), start())]
    states = [state for _, state in stepping]
    pipe = fr.pipeline(stepping[1][0], mesh=mesh)
    stale = fr.stale_pipeline(stepping[2][0], mesh=mesh)
    runs = {"plain": lambda *xs: plain(stepping[0][0], *xs), "pipeline": pipe.run, "stale": stale.run}
    out = {f"{n}_{what}": [] for n in runs for what in ("ms", "cpu_ms")} | {"is_same": True}
    for k, part in enumerate(parts):
        losses = {}
        for j, (name, run) in enumerate(runs.items()):
            states[j], losses[name], clock, cpu = timed(run(states[j], part))
            skipped = 4 if k == 0 else 2  # the first batch of a run is not routed ahead; the first run compiles
            out[f"{name}_ms"] += clock[skipped:]
            out[f"{name}_cpu_ms"] += cpu[skipped:]
        out["is_same"] &= all(map(torch.equal, losses["plain"], losses["pipeline"]))
        out["is_same"] &= all(map(torch.equal, losses["stale"], wants[k][0]))
        out["is_same"] &= all(map(torch.equal, fr.tree.leaves(states[0]), fr.tree.leaves(states[1])))
        out["is_same"] &= all(map(torch.equal, fr.tree.leaves(states[2]), wants[k][1]))
    return out | {"held_bytes": stale.held_bytes, "routed_bytes": pipe.routed_bytes}


def row_of(ranks: list[dict], late_s: float, work_s: float, steps: int) -> dict:
    first = ranks[0]
    ms = {name: statistics.median(first[f"{name}_ms"]) for name in ("plain", "pipeline", "stale")}
    return {
        "case": "stale",
        **{f"{name}_{what}": spread(first[f"{name}_{what}"]) for what in ("ms", "cpu_ms") for name in ms},
        "ratio_to_plain": digits(ms["plain"] / ms["stale"]), "ratio_to_pipeline": digits(ms["pipeline"] / ms["stale"]),
        "hidden_share": digits(1e-3 * (ms["pipeline"] - ms["stale"]) / late_s) if late_s else None,
        "held_bytes": first["held_bytes"], "routed_bytes": first["routed_bytes"],
    }  # fmt: skip


if __name__ == "__main__":
    explain(__doc__)
    main(one_rank, row_of, steps=60)
