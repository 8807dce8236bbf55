"""Measures what `invariant` costs a package that serves: one DLRM, exported with and without, in Python and in C++.

    .venv/bin/python bench/invariant_serving.py [--seconds 2] [--rounds 9]      # needs the C++ library (make serving)

One thread; the two packages answer in turns. Figures are medians, and the median of the rounds' ratios. The law: the
probabilities of the two agree within 1e-5.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import products
import serving
import torch
from measure import digits, record

import funcrec as fr

ROWS, BAGS = 10_000, (1, 64, 512)


def packages(folder: Path) -> dict[str, Path]:
    """Export the model in both ways, and return the paths."""
    model, predict = serving.dlrm(ROWS)
    params = model.init(fr.key(0))
    sample = serving.CASES[1].batches(ROWS)[0]
    how = {"ordinary": predict, "invariant": fr.invariant(predict)}
    return {n: fr.export(f, params, sample, folder / n) for n, f in how.items()}


def in_cpp(
    program: Path, paths: dict[str, Path], requests: Path, seconds: float, rounds: int
) -> dict[str, list[float]]:
    """Return the medians of the processor's microseconds for a call, of each round."""
    found: dict[str, list[float]] = {n: [] for n in paths}
    for _ in range(rounds):
        for n, path in paths.items():
            found[n].append(statistics.median(serving.run(program, "runs", path, requests, seconds)["funcrec.cpu"]))
    return found


def in_python(opened: dict, batches: list, rounds: int) -> dict[str, list[float]]:
    """Return the processor's microseconds for a call, of each round."""
    block = max(1, 64 // batches[0].ids.num_bags)
    calls = {n: lambda p=p: [p(b) for b in batches[:block] for _ in range(8)] for n, p in opened.items()}
    times = products.turns(calls, rounds)
    return {n: [t / 8 / min(block, len(batches)) * 1e6 for t, _ in found] for n, found in times.items()}


def told(found: dict[str, list[float]]) -> dict:
    over = statistics.median(a / b for a, b in zip(found["invariant"], found["ordinary"], strict=True))
    return {"cpu_us": {n: digits(statistics.median(x)) for n, x in found.items()}, "over_ordinary": digits(over)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round in C++")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        program, paths = serving.program(), packages(Path(folder))
        opened = {n: fr.load_package(p) for n, p in paths.items()}
        for bags in BAGS:
            batches = serving.Case(bags, 20, 8).batches(ROWS)
            requests = serving.write_requests(Path(folder) / "requests", batches, 8)
            apart = max(float((opened["invariant"](b) - opened["ordinary"](b)).abs().max()) for b in batches)
            about = {"what": "served DLRM", "bags": bags, "law": "green" if apart <= serving.CLOSE else "red"}
            python = told(in_python(opened, batches, options.rounds))
            cpp = told(in_cpp(program, paths, requests, options.seconds, min(options.rounds, 5)))
            record("invariant", {**about, "apart": digits(apart), "Python": python, "C++": cpp})


if __name__ == "__main__":
    main()
