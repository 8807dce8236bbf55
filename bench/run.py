"""Runs each case in a process of its own, and writes the results, the tables and the plots.

    python bench/run.py                         # the short list
    python bench/run.py --set full              # all cases
    python bench/run.py --groups update --cases 'b*' --threads 1
    python bench/run.py --list

A case runs funcrec and its peers in turn in one process. Its figures are appended to bench/results/GROUP.jsonl.
"""

import argparse
import contextlib
import fnmatch
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import measure
import torch
from contest import Setting
from funcrec.kernels import ops
from measure import RESULTS, machine, record

GROUPS = (
    "bandwidth", "lookup", "quantized", "update", "jagged", "steps", "on_device", "ranks", "overhead", "first_step",
)  # fmt: skip
ON_HOST = ("overhead", "first_step")  # one number of threads suffices
ON_RANKS = ("ranks",)  # one thread on each of two ranks
CASE_LIMIT_S = 1800  # includes compilation
GPU_LIMIT_S = 120


class Job(NamedTuple):
    group: str
    case: str
    threads: int


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("quick", "full", "gpu"), default="quick", help="which of the cases")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="which groups of cases")
    parser.add_argument("--cases", nargs="+", metavar="PATTERN", help="cases of these names, instead of the set's")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="numbers of torch's threads")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rounds", type=int, default=21, help="interleaved rounds of a case, at most")
    parser.add_argument("--seconds", type=float, default=8.0, help="time for the rounds of a case")
    parser.add_argument(
        "--clock", choices=measure.CLOCKS, default="clock",
        help="processor: the process's time, for one thread beside other jobs (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--implementation", help="of funcrec's kernels, instead of the device's own")
    parser.add_argument("--tiny", action="store_true", help="cut every shape: only to see that everything runs")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no case after so many seconds")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--report", action="store_true", help="then write the tables and the plots")
    parser.add_argument("--one", nargs=3, metavar=("GROUP", "CASE", "THREADS"), help=argparse.SUPPRESS)
    return parser.parse_args(words)


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return the jobs in the order of GROUPS, each case with each number of threads.

    ON_HOST cases run only with the last number.
    """
    threads = options.threads if torch.device(options.device).type == "cpu" else options.threads[:1]
    found = []
    for group in [g for g in GROUPS if g in options.groups]:
        module = importlib.import_module(group)
        short = getattr(module, "GPU", module.QUICK) if options.set == "gpu" else module.QUICK
        names = list(module.CASES) if options.set == "full" or options.cases else list(short)
        if options.cases:
            names = [n for n in names if any(fnmatch.fnmatch(n, p) for p in options.cases)]
        of_group = [1] if group in ON_RANKS else threads[-1:] if group in ON_HOST else threads
        found += [Job(group, name, n) for name in names for n in of_group]
    return found


def run_one(job: Job, options: argparse.Namespace) -> None:
    """Run one case in this process."""
    about = machine(options.device)  # the load before the case
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    measure.CLOCK = options.clock
    module = importlib.import_module(job.group)
    choice = options.implementation
    setting = Setting(options.device, job.threads, options.rounds, options.seconds, options.tiny, choice)
    with ops.using(choice) if choice else contextlib.nullcontext():
        figures = module.run(module.CASES[job.case], setting)
    head = {"group": job.group, "case": job.case, "device": options.device, "threads": job.threads}
    head |= {"implementation": choice, "tiny": options.tiny, "clock": options.clock}
    record(job.group, {**about, **head, **figures}, options.out)


def spawn(job: Job, options: argparse.Namespace) -> str | None:
    """Run one case in a process of its own, and return an error or None."""
    words = [sys.executable, __file__, "--one", job.group, job.case, str(job.threads), "--device", options.device]
    words += ["--rounds", str(options.rounds), "--seconds", str(options.seconds), "--out", str(options.out)]
    words += ["--clock", options.clock, *(["--tiny"] if options.tiny else [])]
    words += ["--implementation", options.implementation] if options.implementation else []
    # compiled code depends on the number of threads, so each number has its own cache
    cache = Path(tempfile.gettempdir()) / f"funcrec_bench_{os.getuid()}" / f"threads{job.threads}"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": str(job.threads)}
    # torch and FBGEMM have an OpenMP runtime each: idle threads of one that spin would take the core of the other
    environment["OMP_WAIT_POLICY"] = "passive"
    limit = CASE_LIMIT_S if torch.device(options.device).type == "cpu" else GPU_LIMIT_S
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer after {limit} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    line = json.loads(done.stdout[done.stdout.index("{\n") :])
    print(f"{job.group:10} {job.case:28} {job.threads} threads   {summary(line)}", flush=True)
    return None


def summary(line: dict) -> str:
    if line.get("law") == "red":
        return f"RED, no number: {'; '.join(line['red'])}"
    if "ms" not in line:
        return "  ".join(f"{k}={v}" for k, v in line.items() if isinstance(v, float))
    ratio = "  ".join(f"{name} {r['median']:.2f}x" for name, r in line.get("ratio", {}).items())
    speed = f"{line['gb_per_s']['funcrec']} GB/s  " if "gb_per_s" in line else ""
    return f"{line['ms']['funcrec']['median']:.3f} ms  {speed}{ratio}"


def main() -> int:
    options = parse()
    if options.one:
        group, case, threads = options.one
        run_one(Job(group, case, int(threads)), options)
        return 0
    todo = jobs(options)
    if options.list:
        print("\n".join(f"{j.group} {j.case} --threads {j.threads}" for j in todo))
        return 0
    failed, began = 0, time.monotonic()
    for i, job in enumerate(todo):
        if time.monotonic() - began > options.limit_s:
            print(f"{len(todo) - i} cases were not begun: the time was up")
            failed += len(todo) - i
            break
        wrong = spawn(job, options)
        if wrong is not None:
            failed += 1
            print(f"{job.group:10} {job.case:28} {job.threads} threads   FAILED: {wrong}", flush=True)
    if options.report:
        import report

        report.write(options.out)
    print(f"{len(todo) - failed} of {len(todo)} cases ran; results in {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
