"""Measures what products of bf16 operands save, and what they lose.

    python bench/precision.py                             # steps and errors
    python bench/precision.py --parts auc --seeds 0 1 2   # a DeepFM on MovieLens-1M, in f32 and with the setting

The ways are f32; torch's setting `torch.backends.mkldnn.matmul.fp32_precision = "bf16"`, which rounds the operands of
products alone; and autocast, which keeps activations in bf16, too. Steps are jitted and donated, and take turns in one
process. Figures are processor and clock times of a step, and medians of the rounds' ratios. The error of a gradient is
the norm of its difference from that in f32, relative to its norm. The law: the losses of the first two steps agree
within an ulp of bf16.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import cases
import products
import steps
import torch
from contest import Closeness, differences
from measure import digits, record
from torch.utils._pytree import tree_leaves

import funcrec as fr
from funcrec.examples import ctr

BATCHES = (512, 2048, 8192)
CASES = {
    **{f"dlrm-d64-b{b}-l1": cases.STEPS[f"dlrm-d64-b{b}-l1"] for b in BATCHES},
    **{f"dcnv2-b{b}": cases.STEPS["dcnv2"]._replace(batch=b) for b in BATCHES},
}
MOST_ROWS = 50_000  # the most rows of a table: rows do not affect the products
MATMUL = torch.backends.mkldnn.matmul


@contextlib.contextmanager
def setting() -> Iterator[None]:
    """Return a context in which products round their operands to bf16. The setting is the process's."""
    MATMUL.fp32_precision = "bf16"
    try:
        yield
    finally:
        MATMUL.fp32_precision = "ieee"


WAYS: dict[str, Callable] = {
    "f32": contextlib.nullcontext,
    "bf16 products": setting,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def within(way: str, call: Callable) -> Callable:
    def run(*args):
        with WAYS[way]():
            return call(*args)

    return run


def rate(case: cases.StepCase, rounds: int) -> dict:
    """Return times and ratios of the steps of a case, and how far their losses are apart."""
    model = steps.make_model(case, False)
    batches = steps.make_batches(case, model, "cpu")
    calls, losses = {}, {}
    for way in WAYS:
        made = steps.funcrec_step(case, model, model.init(fr.key(0)), batches, "cpu")
        calls[way] = within(way, made.call)
        losses[way] = within(way, made.first)()
    close = Closeness(torch.finfo(torch.bfloat16).eps, 0.0)
    red = {way: found for way in WAYS if (found := differences(losses[way], losses["f32"], "f32", close))}
    if red:
        return {"law": "red", "red": red}
    times = products.turns(calls, rounds)
    ratio = lambda way, k: digits(statistics.median(a[k] / b[k] for a, b in zip(times["f32"], times[way], strict=True)))
    ms = {way: [digits(statistics.median(x[k] for x in t) * 1e3) for k in (0, 1)] for way, t in times.items()}
    ratios = {way: [ratio(way, k) for k in (0, 1)] for way in WAYS if way != "f32"}
    return {"law": "green", "cpu_ms, clock_ms": ms, "ratio_cpu, ratio_clock": ratios}


def errors(case: cases.StepCase) -> dict:
    """Return the greatest and the median relative error of the gradients of a first step, and of its loss."""
    model = steps.make_model(case, False)
    params, batch = model.init(fr.key(0)), steps.make_batches(case, model, "cpu")[0]
    call = fr.value_and_grad(fr.models.loss(model), has_aux=True)
    gradients = lambda: call(params, batch, key=fr.key(1))
    made = {way: within(way, gradients)() for way in WAYS}
    leaves = {way: [x for x in tree_leaves(out[1]) if x.is_floating_point()] for way, out in made.items()}
    loss = {way: float(tree_leaves(out[0])[0]) for way, out in made.items()}
    found = {}
    for way in WAYS:
        if way != "f32":
            off = sorted(map(relative_error, leaves[way], leaves["f32"]))
            own = {"greatest": off[-1], "median": statistics.median(off), "loss": abs(loss[way] / loss["f32"] - 1)}
            found[way] = {name: digits(x) for name, x in own.items()}
    return found


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def auc(seed: int, epochs: int) -> dict:
    """Return validation and test AUC of a DeepFM on MovieLens-1M, trained and tested in f32 and with the setting."""
    found = {}
    for way in ("f32", "bf16 products"):
        with tempfile.TemporaryDirectory() as folder:
            words = ["--model", "deepfm", "--seed", f"{seed}", "--epochs", f"{epochs}", "--patience", "3"]
            if within(way, ctr.main)([*words, "--out", folder]):
                raise SystemExit(f"{way}, seed {seed}: the training failed")
            result = json.loads((Path(folder) / "result.json").read_text())
        found[way] = {name: result[name] for name in ("best_epoch", "valid_auc", "test_auc", "test_log_loss")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("steps", "errors", "auc"), default=("steps", "errors"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.cases if {"steps", "errors"} & set(options.parts) else ():
        case = CASES[name]
        case = case._replace(num_rows=min(case.num_rows, MOST_ROWS))
        found = {"case": name, "threads": options.threads, "rounds": options.rounds}
        found |= rate(case, options.rounds) if "steps" in options.parts else {}
        found |= {"errors": errors(case)} if "errors" in options.parts else {}
        record("precision", found)
    for seed in options.seeds if "auc" in options.parts else ():
        record("precision", {"model": "deepfm", "seed": seed, "auc": auc(seed, options.epochs)})


if __name__ == "__main__":
    main()
