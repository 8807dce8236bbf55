"""Measures eager calls under `invariant`, by processor time on one thread: functions, and predictions of few rows.

    .venv/bin/python bench/invariant_eager.py [--rounds 9]          # four minutes

Functions: microseconds of the loop in C++, of the composition that it replaces, and of torch's own function, of 64,
4,096 and 4 million numbers of f32. The law: the loop has the composition's bits. Predictions: the time with `invariant`
over the time without, the two in turns. The law: they agree within 1e-5. Lines go to results/invariant.jsonl.
"""

import argparse
import statistics
from collections.abc import Callable

import invariant_cost
import products
import torch
from funcrec.kernels import ops
from funcrec.kernels.invariant import FUNCTIONS
from measure import digits, record

import funcrec as fr
from funcrec.invariance._replaced import functions

SIZES, ROWS, CLOSE = (64, 4096, 4_000_000), 100_000, 1e-5


def composed(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return the function by torch's operations, piece by piece, so that what they leave stays in the cache."""
    with ops.using("reference"):
        return torch.cat([functions[name](piece) for piece in x.split(1 << 14)])


def micros(calls: dict[str, Callable], repeats: int, rounds: int) -> dict[str, float]:
    times = products.turns({n: lambda f=f: [f() for _ in range(repeats)] for n, f in calls.items()}, rounds)
    return {n: digits(statistics.median(cpu for cpu, _ in t) / repeats * 1e6) for n, t in times.items()}


def of_function(name: str, size: int, rounds: int) -> dict:
    x = torch.rand(size) * 0.8 + (1.1 if name == "acosh" else 0.1)
    calls = {"loop": lambda: functions[name](x), "composition": lambda: composed(name, x)}
    calls["torch"] = lambda: getattr(torch, name)(x)
    law = "green" if torch.equal(calls["loop"](), calls["composition"]()) else "red"
    repeats = max(1, 40_000 // size)
    few = 2 if size > 100_000 else rounds
    return {"function": name, "numbers": size, "law": law, "cpu_us": micros(calls, repeats, few)}


def predictions() -> dict[str, tuple[Callable, tuple, int]]:
    """Return {name: (the prediction, its arguments, calls of a round)}."""
    model, predict = invariant_cost.deepfm(ROWS)
    params = model.init(fr.key(0))
    weights = [torch.randn(a, b) / a**0.5 for a, b in ((64, 64), (64, 32), (32, 1))]

    def mlp(x: torch.Tensor) -> torch.Tensor:
        for w in weights[:-1]:
            x = torch.relu(x @ w)
        return torch.sigmoid(x @ weights[-1])

    norm = lambda x: torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (64,)))
    found = {f"deepfm, {n} rows": (predict, (params, invariant_cost.batches(n, ROWS)[0]), 20) for n in (1, 64)}
    found |= {f"mlp of 3 layers, {n} rows": (mlp, (torch.randn(n, 64),), 200) for n in (1, 64)}
    return found | {"layer norm and gelu, 1 row": (norm, (torch.randn(1, 64),), 200)}


def of_prediction(name: str, predict: Callable, args: tuple, repeats: int, rounds: int) -> dict:
    calls = {"ordinary": lambda: predict(*args), "invariant": lambda: fr.invariant(predict)(*args)}
    apart = float((calls["ordinary"]() - calls["invariant"]()).abs().max())
    times = products.turns({n: lambda f=f: [f() for _ in range(repeats)] for n, f in calls.items()}, rounds)
    us = {n: digits(statistics.median(cpu for cpu, _ in t) / repeats * 1e6) for n, t in times.items()}
    pairs = zip(times["invariant"], times["ordinary"], strict=True)
    over = digits(statistics.median(a / b for (a, _), (b, _) in pairs))
    return {"eager": name, "law": "green" if apart < CLOSE else "red", "cpu_us": us, "over_ordinary": over}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    told = {"threads": 1, "rounds": options.rounds}
    with torch.no_grad():
        for name, (predict, args, repeats) in predictions().items():
            record("invariant", {**told, **of_prediction(name, predict, args, repeats, options.rounds)})
        for name in FUNCTIONS:
            for size in SIZES:
                record("invariant", {**told, **of_function(name, size, options.rounds)})


if __name__ == "__main__":
    main()
