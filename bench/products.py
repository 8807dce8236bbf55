"""Measures compiled training steps with matrix products of oneDNN and of BLAS, and the products alone.

    python bench/products.py [--threads 1] [--rounds 15] [--cases dlrm-d64-b512-l1 deepfm]

Steps are jitted and donated, and take turns in one process. Figures are the processor time and clock time of each step,
and medians of the rounds' ratios. The law: the losses of the first two steps agree. The products are x Wᵀ, dy W and dyᵀ
x in f32, in GFLOP/s of processor time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import cases
import steps
import torch
from contest import Closeness, Contender, differences
from measure import digits, record

import funcrec as fr
from funcrec.compile.backend import _onednn

DEEPFM = cases.StepCase("deepfm", 100_000, 16, 2048, 1)
CASES = {"deepfm": DEEPFM, **cases.STEPS}
SHORT = ("dlrm-d64-b512-l1", "dlrm-d64-b2048-l5", "deepfm", "dcnv2")
MOST_ROWS = 100_000  # the most rows of a table: rows do not affect the products
KINDS = {"BLAS": False, "oneDNN": True}
SHAPES = ((512, 13, 512), (512, 415, 512), (2048, 512, 256), (2048, 1024, 1024), (2048, 3456, 512))


def make_model(case: cases.StepCase) -> fr.models.Model:
    if case.model != "deepfm":
        return steps.make_model(case, False)
    tables = [fr.TableConfig(f"t{i}", case.num_rows, case.dim) for i in range(steps.NUM_TABLES)]
    features = [fr.FeatureConfig(f"f{i}", table=t.name, max_length=case.ids_per_bag) for i, t in enumerate(tables)]
    return fr.models.deepfm(tables, features, num_dense=steps.NUM_DENSE, sizes=(400, 400, 400))


def contender(case: cases.StepCase, model: fr.models.Model, batches: list, wide: bool) -> tuple[Contender, dict]:
    """Return a step that is compiled with products of oneDNN or of BLAS, and the losses of its first two calls."""
    made = steps.funcrec_step(case, model, model.init(fr.key(0)), batches, "cpu")
    with mock.patch.object(_onednn, "stays_away", lambda: wide):
        return made, made.first()


def compared(case: cases.StepCase, rounds: int) -> dict:
    case = case._replace(num_rows=min(case.num_rows, MOST_ROWS))
    model = make_model(case)
    batches = steps.make_batches(case, model, "cpu")
    made = {n: contender(case, model, batches, wide) for n, wide in KINDS.items()}
    red = differences(made["oneDNN"][1], made["BLAS"][1], "BLAS", Closeness(1e-4, 1e-5))
    if red:
        return {"law": "red", "red": red}
    times = turns({n: c.call for n, (c, _) in made.items()}, rounds)
    ratio = lambda k: digits(
        statistics.median(a[k] / b[k] for a, b in zip(times["BLAS"], times["oneDNN"], strict=True))
    )
    figures = {n: [digits(statistics.median(x[k] for x in t) * 1e3) for k in (0, 1)] for n, t in times.items()}
    return {"law": "green", "cpu_ms, clock_ms": figures, "ratio_cpu": ratio(0), "ratio_clock": ratio(1)}


def turns(calls: dict[str, Callable], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return {name: (processor, clock) seconds of each round}."""
    times: dict[str, list[tuple[float, float]]] = {n: [] for n in calls}
    for r in range(rounds + 1):
        for n in list(calls)[:: 1 - 2 * (r % 2)]:
            began = time.process_time(), time.perf_counter()
            calls[n]()
            times[n].append((time.process_time() - began[0], time.perf_counter() - began[1]))
    return {n: t[1:] for n, t in times.items()}


def speeds(rows: int, inner: int, outer: int, rounds: int) -> dict:
    """Return {product: [GFLOP/s of BLAS, GFLOP/s of oneDNN]}."""
    x, w, dy = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
    found, flop = {}, 2 * rows * inner * outer
    for name, pair in {"x Wᵀ": (x, w.t()), "dy W": (dy, w), "dyᵀ x": (dy.t(), x)}.items():
        calls = {"BLAS": lambda p=pair: torch.mm(*p), "oneDNN": lambda p=pair: _onednn.MM(*p)}
        times = turns(calls, rounds)
        found[name] = [digits(flop / statistics.median(t for t, _ in times[n]) / 1e9) for n in KINDS]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=SHORT, metavar="CASE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.no_grad():
        alone = {" x ".join(map(str, s)): speeds(*s, options.rounds) for s in SHAPES}
    for name in options.cases:
        rounds = options.rounds if name != "dcnv2" else min(options.rounds, 5)
        found = compared(CASES[name], rounds)
        chosen = "oneDNN" if _onednn.is_faster() else "BLAS"
        record("products", {"case": name, "threads": options.threads, "rounds": rounds, "chosen": chosen, **found})
    record("products", {"products": alone, "threads": options.threads, "rounds": options.rounds})


if __name__ == "__main__":
    main()
