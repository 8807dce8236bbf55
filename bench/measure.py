"""Interleaved timing of several functions, and a place for the results.

ratio(a, b) = median over rounds of time(a) / time(b), a and b timed one after the other in each round
"""

import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def interleave(cases: dict[str, Callable[[], object]], *, rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """{case: seconds of each round}; every round runs every case once, in turn."""
    for _ in range(warmup):
        for call in cases.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, call in cases.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return times


def median_ms(times: list[float]) -> float:
    return statistics.median(times) * 1e3


def median_ratio(a: list[float], b: list[float]) -> float:
    """The median of the rounds' ratios a / b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def record(name: str, figures: dict) -> None:
    """Print the figures and append them to results/NAME.jsonl with machine and commit."""
    line = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        **figures,
    }
    print(json.dumps(line, indent=2))
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def commit() -> str:
    """The commit of the tree, with a + when it has changes."""
    run = lambda *words: subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()
    return run("rev-parse", "--short", "HEAD") + ("+" if run("status", "--porcelain", "--untracked-files=no") else "")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
