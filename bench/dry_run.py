"""Measures dry runs of 64, 1,024 and 4,096 ranks on table sets: their seconds and memory, and what the step would take.

    python bench/dry_run.py --sets FILE                            # every set of the file on 64, 1,024 and 4,096 ranks
    python bench/dry_run.py --sets FILE --tasks mlperf_dcnv2 --ranks 64 1024

Each case is `python -m funcrec dryrun` in a process of its own, for row-wise Adagrad and a batch of 65,536 in all, and
appends a line of JSON to results/dry_run.jsonl. A set that fits on no plan says so. FILE: as for bench/planner.py.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import RESULTS, digits, machine
from planner import BATCH, tables_of


def spec_of(task: dict) -> dict:
    """Return the file of `python -m funcrec dryrun` for a task."""
    tables = tables_of(task)
    return {
        "mesh": {"data": 64}, "batch_size": BATCH, "hardware": "h100", "optimizer": "rowwise_adagrad",
        "tables": [{"name": n, "num_embeddings": r, "embedding_dim": d} for n, r, d, _ in tables],
        "features": [{"name": f"f_{n}", "table": n} for n, *_ in tables],
        "constraints": {n: {"pooling_factor": ids, "zipf": 1.1} for n, _, _, ids in tables},
    }  # fmt: skip


def measured(name: str, task: dict, ranks: int) -> dict:
    """Return the figures of a dry run, from the lines that the command prints."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(json.dumps(spec_of(task)))
        begun = time.perf_counter()
        words = [sys.executable, "-m", "funcrec", "dryrun", str(path), "--ranks", str(ranks)]
        done = subprocess.run(words, capture_output=True, text=True)
        seconds = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    figures = {"group": "dry_run", "case": name, "ranks": ranks, "seconds": digits(seconds), "cpu_s": digits(cpu_s)}
    if done.returncode:
        return {**figures, "error": done.stderr.strip().splitlines()[0]}
    lines = done.stdout.splitlines()
    own = next(x for x in lines if x.startswith("this dry run:")).replace(",", "").split()
    total = next(x for x in lines if x.startswith("all ")).replace(",", "").split()
    held = {x[:26].strip(): float(x[26:].replace(",", "").split()[0]) for x in lines if x.endswith(" MB")}
    estimate = next(x for x in lines if x.startswith("estimate:")).split()
    return {
        **figures, "plan_s": float(own[3]), "program_s": float(own[8]), "peak_mb": float(own[-4]),
        "exchanges": sum(x.split()[1:2] == ["data"] for x in lines), "sent_mb": float(total[1]),
        "messages": int(total[2]), "step_ms": float(estimate[1]), "rank_mb": held,
    }  # fmt: skip


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--sets", type=Path, required=True)
    options.add_argument("--tasks", nargs="*")
    options.add_argument("--ranks", type=int, nargs="*", default=[64, 1024, 4096])
    how = options.parse_args()
    sets = json.loads(how.sets.read_text())
    for name in how.tasks or [n for n in sets if n != "about"]:
        for ranks in how.ranks:
            line = {**machine(), **measured(name, sets[name], ranks)}
            with (RESULTS / "dry_run.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)
