"""Run packages, exchange weights and apply deltas at the same time, under a sanitizer: part of `make sanitize`, or

    PYTHONPATH=tests python -m programs.at_once --mode address|thread [--seconds 10]

The program funcrec-at-once (kernels/serving/at_once.cpp) runs a package in three threads while two other threads
exchange its weights, go back, and apply deltas. Each answer must equal, bit for bit, the answer of the version that it
names. At the end, three threads read the bytes of the weights themselves. A sanitizer sees those reads. The compiled
program and torch are built without a sanitizer, and `ignore_noninstrumented_modules` ignores their accesses. Nothing is
suppressed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import funcrec as fr
from funcrec.history import ChangedRows
from programs import answers, packages

OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",
}


def files(folder: Path) -> list[Path]:
    """Return the files of a package, of other weights for the package, and of three successive deltas."""
    model, other = packages.export(folder / "model"), folder / "other"
    fr.save_weights(other, packages.params(1), version="other")
    package, found = fr.load_package(model), [model, other]
    for n in (2, 3, 4):
        newer, rows = packages.params(n), torch.arange(n, 50, 3)
        parts = {t: (ChangedRows(rows, x[rows], 0, tuple(x.shape)),) for t, x in newer.tables.items()}
        delta, file = fr.Delta(parts, torch.tensor(n)), folder / f"{n}.delta"
        fr.write_delta(file, delta, package, fr.Params({}, newer.dense), version=str(n))
        package.apply(file)
        found.append(file)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("address", "thread"), default="address")
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    sanitize = {"address": "address,undefined", "thread": "thread"}[options.mode]
    program = answers.build(sanitize, targets=("funcrec-at-once",)) / "funcrec-at-once"
    with tempfile.TemporaryDirectory() as folder:
        model, other, *deltas = files(Path(folder))
        command = [program, model, other, options.seconds, *deltas]
        return subprocess.run(list(map(str, command)), env={**os.environ, **OPTIONS}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
