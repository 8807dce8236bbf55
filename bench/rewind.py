"""Measures the cost of a log for a donated step, and the cost to undo steps, in processor time, in one process.

    python bench/rewind.py [--rounds 40]

The step is that of a DLRM of 26 tables, compiled and donated, on one thread: without a log, with a log of touched rows
for `delta` (steps=0), and with a log that can undo 20 steps. They take turns. Small: 26 x 1,000 x 16, batch 128, one id
per bag. Middle: 26 x 100,000 x 64, batch 512, two ids per bag.
"""

import argparse
import gc
import statistics
import time

import torch
from measure import record

import funcrec as fr

SHAPES = {"small": (1_000, 16, 128, 1), "middle": (100_000, 64, 512, 2)}
TABLES, STEPS = 26, 20


def make(rows: int, dim: int, batch: int, bag: int):
    names = [f"t{i}" for i in range(TABLES)]
    configs = [fr.TableConfig(n, num_embeddings=rows, embedding_dim=dim) for n in names]
    features = [fr.FeatureConfig(n, table=n, max_length=bag) for n in names]
    model = fr.models.dlrm(configs, features, num_dense=13, bottom=(64, dim), sizes=(128, 64))
    kind = {"sparse": fr.optim.rowwise_adagrad(lr=0.01), "dense": fr.optim.dense(torch.optim.Adam, lr=1e-3)}
    step = fr.train_step(fr.models.loss(model), **kind, has_aux=True)

    def one(seed: int) -> fr.Batch:
        draw = torch.Generator().manual_seed(seed)
        values = torch.randint(0, rows, (TABLES * batch * bag,), generator=draw)
        ids = fr.KeyedJaggedTensor.from_lengths(names, values, torch.full((TABLES * batch,), bag))
        label = torch.randint(0, 2, (batch,), generator=draw).float()
        return fr.Batch(ids, label, torch.rand(batch, 13, generator=draw))

    return model, step, one, min(rows, batch * bag)


def measured(shape: tuple, rounds: int, calls: int) -> dict:
    model, step, one, room = make(*shape)
    batches = [one(i) for i in range(8)]
    steps = {"alone": step, "delta": fr.logged(step, steps=0), "rewind": fr.logged(step, steps=STEPS, rows=room)}
    fast = {n: fr.jit(s, donate=("state",)) for n, s in steps.items()}
    params = model.init(fr.key(0))
    held = {n: s.init(fr.copy(params)) for n, s in steps.items()}
    times: dict[str, list[float]] = {n: [] for n in [*steps, "undo"]}

    def turn(n: str) -> float:
        began = time.process_time()
        for i in range(calls):
            held[n], _ = fast[n](held[n], batches[i % 8])
        return (time.process_time() - began) / calls * 1e3

    for n in steps:
        turn(n)
    gc.disable()
    for _ in range(rounds):
        for n in steps:
            times[n].append(turn(n))
        began = time.process_time()
        held["rewind"] = fr.rewind(held["rewind"], 4, donate=True)
        times["undo"].append((time.process_time() - began) / 4 * 1e3)
    same = all(torch.equal(held["alone"].tables[n], held["delta"].state.tables[n]) for n in params.tables)
    ratio = lambda n: round(statistics.median(a / b for a, b in zip(times[n], times["alone"], strict=True)), 3)
    nbytes = lambda x: round(fr.tree.nbytes(x) / 2**20, 1)
    return {
        "law": "green" if same else "red",
        "step_cpu_ms": {n: round(statistics.median(t), 3) for n, t in times.items()},
        "ratio_delta": ratio("delta"),
        "ratio_rewind": ratio("rewind"),
        "log_mb": {n: nbytes(held[n].log) for n in ("delta", "rewind")},
        "state_mb": nbytes(held["alone"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    found = {n: measured(s, rounds, 20 if n == "small" else 4) for n, s in SHAPES.items()}
    record("rewind", {**found, "steps": STEPS, "threads": 1, "rounds": rounds})


if __name__ == "__main__":
    main()
