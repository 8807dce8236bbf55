"""Measures what `invariant` costs: training steps, and packages in Python and in C++, on one thread and on two.

    x = median over rounds of time(invariant) / time(ordinary)        the two in turns, in one process

    .venv/bin/python bench/invariant_cost.py                   # ten minutes; needs the C++ library (make serving)
    .venv/bin/python bench/invariant_cost.py --parts serving --threads 1 --seconds 10

Each line of results/invariant.jsonl has the ratios of processor time and of clock time. The law: losses and predictions
agree. MKL takes its Intel kernels on Intel's processors only. On others, all is measured twice, the second time with a
library before MKL that says the processor is Intel's ("kernels": "Intel's").
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cases
import invariant
import products
import serving
import torch
from measure import cpu_name, digits, record

import funcrec as fr

INTEL = "int mkl_serv_intel_cpu_true(void) { return 1; }\nint mkl_serv_intel_cpu(void) { return 1; }\n"
PARTS, STEPS, BAGS = ("steps", "serving"), ("dlrm-d64-b512-l1", "deepfm"), (1, 2, 8, 64, 512)
NAMES = ("ordinary", "invariant")
CLOSE = 1e-5  # for probabilities, whose sums have another order
CALLS = 200  # of a package in a round, in all examples of a batch


def deepfm(rows: int) -> tuple[fr.models.Model, Callable]:
    model = products.make_model(cases.StepCase("deepfm", rows, 16, 2048, 1))
    return model, lambda params, own: torch.sigmoid(model.apply(params, own))


MODELS = {"dlrm": serving.dlrm, "deepfm": deepfm}


def exported(folder: Path, model: str, rows: int) -> None:
    """Write the packages of a model to folder/model/NAME."""
    made, predict = MODELS[model](rows)
    params, sample = made.init(fr.key(0)), batches(8, rows)[0]
    (folder / model).mkdir()
    for name, own in zip(NAMES, (predict, fr.invariant(predict)), strict=True):
        fr.export(own, params, sample, folder / model / name)


def batches(bags: int, rows: int) -> list[fr.Batch]:
    random = torch.Generator().manual_seed(bags)
    return [serving.batch(bags, 1, rows, random) for _ in range(max(2, 256 // bags))]


def over(times: dict[str, list[tuple[float, float]]]) -> list[float]:
    """Return the medians of the rounds' ratios: of processor time, and of clock time."""
    pairs = [*zip(times["invariant"], times["ordinary"], strict=True)]
    return [digits(statistics.median(a[k] / b[k] for a, b in pairs)) for k in (0, 1)]


def in_python(place: Path, given: list[fr.Batch], rounds: int) -> dict:
    packages = {n: fr.load_package(place / n, checksums=False) for n in NAMES}
    apart = max(float((packages["ordinary"](b) - packages["invariant"](b)).abs().max()) for b in given)
    count = max(4, CALLS // given[0].ids.num_bags)
    many = lambda package: lambda: [package(given[i % len(given)]) for i in range(count)]
    times = products.turns({n: many(p) for n, p in packages.items()}, rounds)
    micros = {n: [digits(statistics.median(x[k] for x in t) / count * 1e6) for k in (0, 1)] for n, t in times.items()}
    return told(apart, micros, over(times))


def in_cpp(program: Path, place: Path, requests: Path, seconds: float, threads: int) -> dict:
    found = serving.run(program, "pair", *(place / n for n in NAMES), requests, seconds, threads)
    micros = {
        n: [found[f"{side}.{k}"] for k in ("cpu", "clock")] for n, side in zip(NAMES, ("first", "second"), strict=True)
    }
    middle = {n: [digits(statistics.median(x)) for x in both] for n, both in micros.items()}
    ratios = [
        digits(statistics.median(micros["invariant"][k]) / statistics.median(micros["ordinary"][k])) for k in (0, 1)
    ]
    return told(found["apart"][0], middle, ratios)


def told(apart: float, micros: dict, ratios: list[float]) -> dict:
    if not apart <= CLOSE:
        return {"law": "red", "apart": apart}
    return {"law": "green", "cpu_us, clock_us": micros, "over_ordinary_cpu, clock": ratios}


def measured(words: argparse.Namespace) -> None:
    """Record one process's measurements, with its number of threads and MKL's kernels."""
    torch.set_num_threads(words.threads[0])
    about = {"threads": words.threads[0], "kernels": words.kernels}
    for name in STEPS if "steps" in words.parts else ():
        record("invariant", {"what": "step", "case": name, **about, "rounds": words.rounds,
            **invariant.compared(products.CASES[name], words.rounds)}, words.out)  # fmt: skip
    program, requests = serving.BUILD / "funcrec-latency", words.folder / "requests"
    for model in MODELS if "serving" in words.parts else ():
        for bags in BAGS:
            given, place = batches(bags, words.rows), words.folder / model
            serving.write_requests(requests, given, 50 if bags < 16 else 8)
            line = {"what": "serving", "model": model, "bags": bags, **about}
            found = in_python(place, given, words.rounds)
            record("invariant", {**line, "in": "Python", **found}, words.out)
            found = in_cpp(program, place, requests, words.seconds, words.threads[0])
            record("invariant", {**line, "in": "C++", **found}, words.out)


def preload(folder: Path) -> dict[str, str]:
    """Return the variables with which MKL takes its Intel kernels on any processor."""
    (folder / "intel.c").write_text(INTEL)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "intel.so", folder / "intel.c"], check=True)
    return {"LD_PRELOAD": str(folder / "intel.so")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--threads", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each number of bags in C++")
    parser.add_argument("--rows", type=int, default=100_000, help="of each table of a package")
    parser.add_argument("--out", type=Path, default=serving.RESULTS)
    parser.add_argument("--kernels", help=argparse.SUPPRESS)  # of a process that measures
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.kernels:
        return measured(words)
    with tempfile.TemporaryDirectory() as path:
        folder, began = Path(path), time.perf_counter()
        if "serving" in words.parts:
            serving.program()
            for model in MODELS:
                exported(folder, model, words.rows)
        intel = "Intel" in cpu_name()
        kinds = {"Intel's": {}} if intel else {"MKL's choice": {}, "Intel's": preload(folder)}
        given = [x for n in ("rounds", "seconds", "rows", "out") for x in (f"--{n}", str(getattr(words, n)))]
        for kernels, more in kinds.items():
            for threads in words.threads:
                command = [sys.executable, __file__, "--kernels", kernels, "--folder", path, "--threads", str(threads)]
                environ = {**os.environ, **more, "OMP_NUM_THREADS": str(threads)}
                subprocess.run([*command, *given, "--parts", *words.parts], check=True, env=environ)
        print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
