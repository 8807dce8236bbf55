"""Measures what `fr.remat` saves: the memory and the time of the gradient of a deep MLP, eager and compiled.

    python bench/remat.py

Each of 12 layers is two products of 512 with a gelu and a residual; the batch has 4,096 rows, so a layer's argument is
8 MiB. Every case runs in a process of its own: the most memory that one gradient adds to parameters and batch, then CPU
times of interleaved gradients with and without `remat`.
"""

import json
import os
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from measure import explain, interleave, median_ms, median_ratio, peak_mb, record

import funcrec as fr

DEPTH, DIM, BATCH = 12, 512, 4096


def problem(rows: int):
    g = torch.Generator().manual_seed(0)
    drawn = lambda *shape: torch.randn(shape, generator=g) * 0.04
    layers = [{"a": drawn(DIM, DIM), "b": drawn(DIM), "c": drawn(DIM, DIM)} for _ in range(DEPTH)]
    return layers, torch.randn(rows, DIM, generator=g)


def layer(p, x):
    return x + F.gelu(x @ p["a"] + p["b"]) @ p["c"]


def gradient(is_kept_apart: bool):
    one = fr.remat(layer) if is_kept_apart else layer

    def loss_fn(layers, x):
        for p in layers:
            x = one(p, x)
        return x.square().mean()

    return torch.func.grad(loss_fn)


def call_of(name: str):
    own = gradient("remat" in name)
    own = fr.jit(own) if "jit" in name else own
    layers, x = problem(BATCH)
    return lambda: own(layers, x)


def peak(name: str) -> float:
    torch.set_num_threads(1)
    call = call_of(name)
    call()  # compiles, and loads what a first call loads
    return peak_mb(call, "cpu")


def times(kind: str) -> dict:
    torch.set_num_threads(1)
    calls = {n: call_of(f"{kind} {n}") for n in ("plain", "remat")}
    found = interleave(calls, rounds=5, warmup=1, clock=time.process_time)
    ms = {n: round(median_ms(t)) for n, t in found.items()}
    return {**ms, "ratio": round(median_ratio(found["remat"], found["plain"]), 3)}


def alone(option: str, name: str):
    """Return the figure of a process of its own, whose allocator gives every large block back at once."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": "0"}
    call = [sys.executable, __file__, option, name]
    return json.loads(subprocess.run(call, capture_output=True, text=True, check=True, env=env).stdout.splitlines()[-1])


def main() -> None:
    names = [f"{kind} {n}" for kind in ("eager", "jit") for n in ("plain", "remat")]
    record("remat", {"layers": DEPTH, "peak_mb": {n: alone("--peak", n) for n in names}})
    record("remat", {"layers": DEPTH, "ms": {kind: alone("--times", kind) for kind in ("eager", "jit")}})


if __name__ == "__main__":
    explain(__doc__)
    print(json.dumps((peak if sys.argv[1] == "--peak" else times)(sys.argv[2]))) if sys.argv[2:] else main()
