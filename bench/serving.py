"""Measures packages without Python, and TorchRec's quantised, scripted DLRM: one prediction, opening, memory.

    x = p50(TorchScript in C++) / p50(funcrec in C++)          in one process and thread, blocks of both in turn

    .venv/bin/python bench/serving.py                          # three minutes; needs the C++ library (make serving)
    .venv/bin/python bench/serving.py --seconds 20 --large 8   # quieter figures, 8 GB of weights
    .venv/bin/python bench/serving.py --tiny --out /tmp/x      # only checks that all code runs

Every answer is compared before the clock begins. `cpu` is the CPU time of the thread. `clock` includes other processes.
"""

import argparse
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from measure import RESULTS, digits, interleave, record
from peers import installed

import funcrec as fr

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "serving"
KEYS, DIM, DENSE = tuple(f"f{i}" for i in range(26)), 64, 13
SIZES = {"bottom": (512, 256, DIM), "sizes": (512, 256)}
CLOSE = 1e-5  # for probabilities, whose sums have another order
IDS = 300_000  # about so many ids in all requests of a case, so that rows come from memory, as in a server


class Case(NamedTuple):
    bags: int
    ids_per_bag: int
    block: int  # the calls of one library in a row

    def batches(self, rows: int) -> list[fr.Batch]:
        random = torch.Generator().manual_seed(self.bags)
        count = max(2, min(512, IDS // (self.bags * self.ids_per_bag * len(KEYS))))
        return [batch(self.bags, self.ids_per_bag, rows, random) for _ in range(count)]


CASES = [Case(b, n, k) for n in (20, 1) for b, k in ((1, 50), (64, 8), (512, 2))]


class Setting(NamedTuple):
    folder: Path
    program: Path
    rows: int
    seconds: float
    large_gb: float


def batch(bags: int, ids_per_bag: int, rows: int, random: torch.Generator) -> fr.Batch:
    """Return a batch of bags with 0 to 2 · ids_per_bag ids, or with one id each."""
    count = (len(KEYS) * bags,)
    lengths = torch.randint(0, 2 * ids_per_bag + 1, count, generator=random) if ids_per_bag > 1 else torch.ones(count)
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=random)
    ids = fr.KeyedJaggedTensor.from_lengths(KEYS, values, lengths.long())
    return fr.Batch(ids, dense=torch.randn(bags, DENSE, generator=random))


def dlrm(rows: int) -> tuple[fr.models.Model, Callable]:
    """Return the model, and the function that predicts with it."""
    tables = [fr.TableConfig(k, rows, DIM, initializer=fr.uniform(0.1)) for k in KEYS]
    features = [fr.FeatureConfig(k, table=k) for k in KEYS]
    model = fr.models.dlrm(tables, features, num_dense=DENSE, keep="dense", **SIZES)
    return model, lambda params, own: torch.sigmoid(model.apply(params, own))


def write_requests(path: Path, batches: Sequence[fr.Batch], block: int) -> Path:
    """Write requests in the format that funcrec-latency reads, and return the path."""
    parts = [struct.pack("<qq", block, len(batches))]
    for own in batches:
        parts.append(struct.pack("<q", own.ids.num_bags))
        for x in (own.dense, own.ids.values, own.ids.offsets, own.ids.lengths.int()):
            parts += [struct.pack("<q", x.numel()), x.contiguous().numpy().tobytes()]
    path.write_bytes(b"".join(parts))
    return path


def spoken(text: str) -> dict[str, list[float]]:
    """Return {name: numbers} of lines with a name and numbers."""
    return {n: [float(x) for x in numbers] for n, *numbers in map(str.split, text.splitlines())}


def run(*words: object) -> dict[str, list[float]]:
    return spoken(subprocess.run(list(map(str, words)), check=True, stdout=subprocess.PIPE, text=True).stdout)


# -- one prediction ----------------------------------------------------------------------------------------------


def latencies(setting: Setting, dtype: str) -> list[dict]:
    model, predict = dlrm(setting.rows)
    params = model.init(fr.key(0))
    quantised = fr.Params(fr.quantize(params.tables, dtype), params.dense)
    sample = CASES[1].batches(setting.rows)[0]
    path = fr.export(predict, quantised, sample, setting.folder / dtype)
    package, script, peer = fr.load_package(path), setting.folder / f"{dtype}.pt", None
    if installed("torchrec"):
        import serving_peer

        peer = serving_peer.scripted(params, sample, dtype, script)
    del params, quantised
    return [latency(setting, dtype, case, path, package, peer, script) for case in CASES]


def latency(setting: Setting, dtype: str, case: Case, path: Path, package: fr.Package, peer, script: Path) -> dict:
    batches = case.batches(setting.rows)
    requests = write_requests(setting.folder / "requests", batches, case.block)
    about = {"what": "latency", "dtype": dtype, "bags": case.bags, "ids_per_bag": case.ids_per_bag}
    about |= {"tables": [len(KEYS), setting.rows, DIM], "threads": 1}
    sides = {"funcrec, Python": lambda own: package(own)}
    others: list = []
    if peer is not None:
        import serving_peer

        others = [script, *serving_peer.libraries()]
        made = {id(own): serving_peer.inputs(own) for own in batches}
        sides["torchscript, Python"] = lambda own: peer(made[id(own)])["default"]
    found = run(setting.program, "runs", path, requests, setting.seconds, *others)
    with torch.inference_mode():
        apart = [float((package(own) - sides[n](own)).abs().max()) for own in batches for n in sides]
    worst = max([*found.pop("apart"), *apart])
    if not worst <= CLOSE:
        return {**about, "law": "red", "apart": worst}
    micros = found | python_times(sides, batches, setting.seconds)
    figures = {n: quantiles(x) for n, x in micros.items()}
    ratio = lambda a, b, q: digits(figures[f"{a}.clock"][q] / figures[f"{b}.clock"][q])
    more = {}
    if peer is not None:
        cpu = digits(figures["torchscript.cpu"]["p50"] / figures["funcrec.cpu"]["p50"])
        more["x"] = {"p50": ratio("torchscript", "funcrec", "p50"), "p99": ratio("torchscript", "funcrec", "p99")}
        more["x"] |= {"cpu_p50": cpu, "python_p50": ratio("torchscript, Python", "funcrec, Python", "p50")}
        more["x"]["cpp_over_peers_python_p50"] = ratio("torchscript, Python", "funcrec", "p50")
    return {**about, "law": "green", "apart": worst, **more, "us": figures}


def python_times(sides: dict[str, Callable], batches: Sequence[fr.Batch], seconds: float) -> dict[str, list[float]]:
    """Return {side: microseconds of each call}. Every round calls both sides, each with its next batch."""
    turn = [0]

    def call(side: Callable) -> Callable:
        def one() -> None:
            side(batches[turn[0] // len(sides) % len(batches)])
            turn[0] += 1

        return one

    calls = {f"{n}.clock": call(side) for n, side in sides.items()}
    with torch.inference_mode():
        began = time.perf_counter()
        interleave(calls, rounds=10)
        rounds = max(10, int(10 * seconds / (time.perf_counter() - began)))
        return {n: [x * 1e6 for x in times] for n, times in interleave(calls, rounds=rounds, warmup=0).items()}


def quantiles(micros: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(micros, n=100, method="inclusive")
    return {"p50": digits(cuts[49]), "p99": digits(cuts[98]), "calls": len(micros)}


# -- opening -----------------------------------------------------------------------------------------------------


class Opened:
    """A process with an open package. Memory is in MB."""

    def __init__(self, setting: Setting, path: Path, requests: Path):
        words = [str(setting.program), "opens", str(path), str(requests)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.times = spoken("".join(self.process.stdout.readline() for _ in range(3)))

    def run_all(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.process.stdout.readline()

    def memory(self) -> dict[str, float]:
        """Return the resident memory and the share of shared memory, of the whole process and of the weights."""
        every = Path(f"/proc/{self.process.pid}/smaps").read_text()
        weights = every[every.index("/weights.safetensors\n") :]
        whole = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        of = lambda text, n: digits(int(re.search(rf"^{n}: +(\d+)", text, re.M)[1]) / 1e3)
        parts = {"": whole, "weights_": weights}
        return {f"{part}{n.lower()}": of(text, n) for part, text in parts.items() for n in ("Rss", "Pss")}

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(20)


def opening(setting: Setting) -> dict:
    """Return the times until a package of `large_gb` of tables is open and answers, and the memory of two processes."""
    rows = int(setting.large_gb * 1e9 / len(KEYS) / (DIM + 4))
    _, predict = dlrm(rows)
    small, _ = dlrm(8)
    table = torch.randint(0, 256, (rows, DIM + 4), dtype=torch.uint8)
    table[:, :4] = torch.tensor([1 / 2550, -0.05], dtype=torch.float16).view(torch.uint8)  # scale and bias
    tables = fr.QuantizedTables(dict.fromkeys(KEYS, table), tuple((k, 8, DIM) for k in KEYS))
    params = fr.Params(tables, small.init(fr.key(0)).dense)
    sample = batch(64, 20, rows, torch.Generator().manual_seed(0))
    path = fr.export(predict, params, sample, setting.folder / "large", version="large")
    del params, table
    batches = [Case(1, 20, 1).batches(rows)[0], *Case(512, 20, 1).batches(rows)[:2]]
    requests = write_requests(setting.folder / "requests", batches, 1)
    sizes = {f.name: f.stat().st_size for f in path.iterdir()}
    weights = sizes.pop("weights.safetensors")
    times: dict[str, list[float]] = {}
    for _ in range(10):
        one = Opened(setting, path, requests)
        for name, (x,) in one.times.items():
            times.setdefault(name, []).append(x)
        one.close()
    both = [Opened(setting, path, requests) for _ in range(2)]
    memory = {"opened": [x.memory() for x in both]}
    for x in both:
        x.run_all()
    memory["after_1024_bags"] = [x.memory() for x in both]
    for x in both:
        x.close()
    about = {"what": "opening", "weights_gb": digits(weights / 1e9), "rest_mb": digits(sum(sizes.values()) / 1e6)}
    low = {n: {"least": digits(min(x) / 1e3), "median": digits(statistics.median(x) / 1e3)} for n, x in times.items()}
    return {**about, "ms": low, "two_processes_mb": memory}


def program() -> Path:
    """Build funcrec-latency if its sources changed, and return its path."""
    if not (BUILD / "CMakeCache.txt").exists():
        sys.exit("bench/serving.py: the C++ library is not built\n  try   make serving")
    subprocess.run(["cmake", "--build", str(BUILD), "--target", "funcrec-latency"], check=True, stdout=sys.stderr)
    return BUILD / "funcrec-latency"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each case, in C++ and in Python")
    parser.add_argument("--dtypes", default="int8,int4")
    parser.add_argument("--large", type=float, default=2.0, help="GB of weights of the package that is opened; 0: none")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    words = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows, seconds, large = (1000, 0.1, 0.01) if words.tiny else (100_000, words.seconds, words.large)
    with tempfile.TemporaryDirectory(dir=words.out if words.tiny else None) as folder:
        setting = Setting(Path(folder), program(), rows, seconds, large)
        for dtype in words.dtypes.split(","):
            for figures in latencies(setting, dtype) if dtype else ():
                record("serving", figures, words.out)
        if large:
            record("serving", opening(setting), words.out)


if __name__ == "__main__":
    main()
