"""Measures several functions in interleaved rounds, measures memory, and records the results.

ratio(a, b) = median over rounds of time(a) / time(b); in each round a and b are timed one after the other
"""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
CLOCKS = {"clock": time.perf_counter, "processor": time.process_time}
CLOCK = "clock"  # `run.py --clock` sets it in the process of a case
MB = 2**20
Call = Callable[[], object]


def wait_for(device: str) -> Callable[[], None]:
    """Return a function that returns when the device has finished all work."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None


def interleave(
    cases: dict[str, Call],
    *,
    rounds: int,
    warmup: int = 2,
    wait: Callable[[], None] = lambda: None,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Return {case: seconds of each round}. Every round runs every case once, and starts with the next case."""
    clock = clock or CLOCKS[CLOCK]
    for _ in range(warmup):
        for call in cases.values():
            call()
    wait()
    times: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for r in range(rounds):
        first = r % len(names)
        for name in names[first:] + names[:first]:
            began = clock()
            cases[name]()
            wait()
            times[name].append(clock() - began)
    return times


def seconds(call: Call, wait: Callable[[], None] = lambda: None) -> float:
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def median_ms(times: list[float]) -> float:
    return statistics.median(times) * 1e3


def median_ratio(a: list[float], b: list[float]) -> float:
    """Return the median of the rounds' ratios a / b."""
    return statistics.median(ratios(a, b))


def ratios(a: list[float], b: list[float]) -> list[float]:
    return [x / y for x, y in zip(a, b, strict=True)]


def spread(numbers: list[float], scale: float = 1.0) -> dict[str, float]:
    """Return the median and the quartiles, times `scale`, to four digits."""
    ends = statistics.quantiles(numbers, n=4) if len(numbers) > 1 else numbers * 3
    parts = {"median": statistics.median(numbers), "q1": ends[0], "q3": ends[2]}
    return {name: digits(x * scale) for name, x in parts.items()}


def digits(x: float) -> float:
    """Return x to four significant digits."""
    return float(f"{x:.4g}")


def peak_mb(call: Call, device: str) -> float | None:
    """Return the most MiB that one call adds to the used memory; None if the system does not report it."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return digits((torch.cuda.max_memory_allocated() - before) / MB)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # this resets the peak of resident memory
        before = _status_kb("VmRSS")
        call()
        return digits((_status_kb("VmHWM") - before) / 1024)
    except (OSError, StopIteration):
        return None


def _status_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def explain(text: str | None) -> None:
    """Print what a script without options measures, and end, if its caller asks for help."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(text)
        raise SystemExit


def record(name: str, figures: dict, folder: Path = RESULTS) -> None:
    """Print the figures, and append them to folder/NAME.jsonl, with machine and commit."""
    line = {**machine(figures.get("device", "cpu")), **figures}
    print(json.dumps(line, indent=2))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def machine(device: str = "cpu") -> dict:
    """Return the date, the commit, the processor, the processor's load before the run, and the versions."""
    about = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
    }
    if torch.device(device).type == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    return about


def commit() -> str:
    """Return the commit of the tree, with a + if the tree has changes."""
    run = lambda *words: subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()
    return run("rev-parse", "--short", "HEAD") + ("+" if run("status", "--porcelain", "--untracked-files=no") else "")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
