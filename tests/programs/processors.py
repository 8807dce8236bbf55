"""Run the laws about bits and compiled values in surroundings like those of other processors: `make processors`, or

    PYTHONPATH=tests python -m programs.processors [--only NAME ...] [--jobs 2] [test ...]

The program prints a table of surroundings: tests passed, failed and skipped, and seconds. The program ends with 1 if a
test fails or if a surrounding differs from its row. A row says if this machine cannot provide the surrounding, or has
it already.

Two libraries are built with the C compiler (`CC`) and preloaded. One library makes MKL use its Intel kernels on every
processor. The other library makes a product's bits depend on its shape, as they may on any processor (by_shape.c). The
output of each run is written to build/processors.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from programs.surroundings import EXPECTED, THREADS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "processors"
INTEL = "int mkl_serv_intel_cpu_true(void) { return 1; }\nint mkl_serv_intel_cpu(void) { return 1; }\n"
PRELOADS = {"intel": INTEL, "by_shape": (Path(__file__).parent / "by_shape.c").read_text()}


class Surrounding(NamedTuple):
    """A surrounding. laws: groups of LAWS whose bits the surrounding may change. threads: the number in the tests'
    process and, by OpenMP's variable, in fresh processes. caches: whether the surrounding has its own compiled code."""

    laws: tuple[str, ...]
    threads: int = 1
    variables: dict[str, str] = {}
    preload: str = ""
    caches: bool = False


AVX2 = {
    "FUNCREC_CPU": "v3", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}  # fmt: skip
SURROUNDINGS = {
    "1 thread": Surrounding(("kernels", "products", "steps")),
    "2 threads": Surrounding(("kernels", "products", "steps"), threads=2),
    "4 threads": Surrounding(("kernels", "products", "steps"), threads=4),
    "kernels' base level": Surrounding(("kernels", "steps"), variables={"FUNCREC_CPU": "base"}),
    "MKL's Intel kernels": Surrounding(("products", "steps"), preload="intel"),
    "an AVX2 machine": Surrounding(
        ("kernels", "loops", "products", "steps"), variables=AVX2, preload="intel", caches=True
    ),
    "products by shape": Surrounding(("products", "steps"), preload="by_shape"),
}
LAWS = {  # loops: compiled loops, whose vectors depend only on the processor
    "kernels": {
        "kernels": ("levels", "update", "cpp_update", "generated", "quantized", "planned", "planned_floats", "top_k"),
        "laws/core": ("random",),
    },
    "loops": {"compile": ("wrapping", "decompositions", "raising")},
    "products": {"compile": ("products", "onednn"), "laws/grad": ("micro_batches",), "laws/train": ("ensemble",)},
    "steps": {
        "compile": ("step",),
        "laws/optim": ("rounding", "rules"),
        "laws/train": ("scan",),
        "laws/history": ("rewind",),
        "dist": ("stale", "rewind_ranks", "replicas"),
        "house": ("surroundings",),
    },
}
TOTALS = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SURROUNDINGS, default=list(SURROUNDINGS))
    parser.add_argument("--jobs", type=int, default=2, help="tests that run at once")
    parser.add_argument("tests", nargs="*", help="in place of the chosen laws")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    seen: dict[str, dict[str, Any]] = {"1 thread": probe(SURROUNDINGS["1 thread"])}
    rows, begin = [("surroundings", "passed", "failed", "skipped", "seconds", "")], time.monotonic()
    for name in args.only:
        row = run(name, seen, args.tests or laws(name), args.jobs)
        rows.append(row)
        print("  ".join(row), flush=True)
    print(f"\n{table(rows)}\n\n{time.monotonic() - begin:.0f} s in all; what each run printed: {FOLDER}", flush=True)
    return int(any(row[2] not in ("0", "-") for row in rows[1:]))


def run(name: str, seen: dict[str, dict], tests: list[str], jobs: int) -> tuple[str, ...]:
    """Return one row of the table, after a run of the row's tests."""
    chosen, plain = SURROUNDINGS[name], seen["1 thread"]
    if why := why_not_here(chosen, plain):
        return name, "-", "-", "-", "-", why
    found = probe(chosen)
    if wrong := list(not_in_force(chosen, found, plain)):
        return name, "-", "all", "-", "-", f"not in force: {'; '.join(wrong)}"
    if same := next((other for other, x in seen.items() if x == found and other != name), None):
        return name, "-", "-", "-", "-", f"on this machine as: {same}"
    seen[name] = found
    begin, path = time.monotonic(), FOLDER / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.txt"
    checked = {"PYTEST_PLUGINS": "programs.surroundings", EXPECTED: json.dumps(found)}
    how = ("-q", "-p", "no:cacheprovider", "-n", str(jobs), "--dist", "loadgroup", "--durations=15")
    with open(path, "w") as out:
        command = [sys.executable, "-m", "pytest", *how, *tests]
        done = subprocess.run(command, cwd=ROOT, env=environment(chosen) | checked, stdout=out, stderr=out, check=False)
    seconds, text = f"{time.monotonic() - begin:.0f}", path.read_text()
    failed = [line.split(" - ")[0].split()[1] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    for test in failed:
        print(f"  {name}: {test}", flush=True)
    count = {what.removesuffix("s"): n for n, what in TOTALS.findall(text.splitlines()[-1] if text else "")}
    if done.returncode not in (0, 1) or "passed" not in count:
        return name, "-", "all", "-", seconds, f"pytest ended with {done.returncode}: {path}"
    bad = str(int(count.get("failed", 0)) + int(count.get("error", 0)))
    return name, count["passed"], bad, count.get("skipped", "0"), seconds, ""


def environment(chosen: Surrounding) -> dict[str, str]:
    """Return the variables for every process of a run. The caller's values of these variables are left out."""
    own = {k: v for k, v in os.environ.items() if k not in (*AVX2, "LD_PRELOAD", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    own |= chosen.variables
    own |= {THREADS: str(chosen.threads), "OMP_NUM_THREADS": str(chosen.threads), "PYTHONPATH": str(ROOT / "tests")}
    own |= {"LD_PRELOAD": str(built(chosen.preload))} if chosen.preload else {}
    own |= {"TORCHINDUCTOR_CACHE_DIR": str(FOLDER / "caches")} if chosen.caches else {}
    return own


def built(preload: str) -> Path:
    """Return the library, built again if its source has changed."""
    source, out = FOLDER / f"{preload}.c", FOLDER / f"{preload}.so"
    if not out.exists() or source.read_text() != PRELOADS[preload]:
        source.write_text(PRELOADS[preload])
        command = (os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", source, "-o", out, "-ldl")
        subprocess.run([*map(str, command)], check=True)
    return out


def probe(chosen: Surrounding) -> dict[str, Any]:
    """Return the facts of a fresh process."""
    command = [sys.executable, "-m", "programs.surroundings"]
    done = subprocess.run(command, cwd=ROOT, env=environment(chosen), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def why_not_here(chosen: Surrounding, plain: dict[str, Any]) -> str:
    """Return what this machine lacks for the surrounding, or that the machine has the surrounding already."""
    if chosen.preload and not plain["mkl"]:
        return "this torch has no MKL"
    if "ATEN_CPU_CAPABILITY" in chosen.variables and not plain["capability"].startswith("AVX"):
        return f"this processor has no AVX2: {plain['capability']}"
    if chosen.preload == "intel" and not chosen.variables and plain["vendor"] == "GenuineIntel":
        return "an Intel processor, whose kernels MKL takes in every row"
    return ""


def not_in_force(chosen: Surrounding, found: dict[str, Any], plain: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of a surrounding that its process does not show."""
    if found["threads"] != chosen.threads:
        yield f"{found['threads']} threads"
    if (level := chosen.variables.get("FUNCREC_CPU", found["kernels"])) != found["kernels"]:
        yield f"the kernels' level is {found['kernels']}, not {level}"
    if (asked := chosen.variables.get("ATEN_CPU_CAPABILITY", found["capability"])).upper() != found["capability"]:
        yield f"torch's capability is {found['capability']}, not {asked}"
    is_new = chosen.preload == "by_shape" or plain["vendor"] != "GenuineIntel"
    if chosen.preload and is_new and found["products"] == plain["products"]:
        yield "products have the bits that they have without it"
    if chosen.preload == "by_shape" and found["alike"]:
        yield "a row's product is the same among any number of rows"


def laws(name: str) -> list[str]:
    """Return the files of a surrounding's groups. Each file must exist."""
    folders = [item for group in SURROUNDINGS[name].laws for item in LAWS[group].items()]
    paths = [f"tests/{folder}/test_{file}.py" for folder, files in folders for file in files]
    if lost := [path for path in paths if not (ROOT / path).exists()]:
        sys.exit(f"processors.py: {', '.join(lost)}: not there\n  try   another name in LAWS")
    return paths


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
