"""Measures a donated step for tables of three sizes. The time depends on the batch, and not on the table.

    python bench/donation.py

The step looks up 512 bags of 4 ids in one table of dim 64 with 100 k, 4 M or 16 M rows, and trains a small MLP with
row-wise Adagrad. Peak memory is read around the donated steps: no step may allocate memory of the table's size. The run
needs about 12 GB of memory.
"""

import resource
import time

import torch
from measure import explain, interleave, median_ms, median_ratio, record

import funcrec as fr

ROWS = {"100k": 100_000, "4M": 4_000_000, "16M": 16_000_000}
DIM, BATCH, BAG = 64, 512, 4


def make_step():
    clicked = fr.FeatureConfig("clicked", table="item", max_length=BAG)
    hidden = fr.nn.mlp((DIM, 64, 1))

    def loss_fn(params, batch):
        acts = fr.lookup(params.tables, batch.ids, [clicked])["clicked"]
        logits = hidden.apply(params.dense, acts).squeeze(-1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)

    dense = fr.optim.dense(torch.optim.SGD, lr=0.01)
    return fr.train_step(loss_fn, sparse=fr.optim.rowwise_adagrad(lr=0.01), dense=dense), hidden


def make_batch(rows: int, seed: int) -> fr.Batch:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, rows, (BATCH * BAG,), generator=generator)
    ids = fr.KeyedJaggedTensor.from_lengths(["clicked"], values, torch.full((BATCH,), BAG))
    return fr.Batch(ids, torch.rand(BATCH, generator=generator).round())


def main(rounds: int = 60) -> None:
    torch.set_num_threads(1)
    step, hidden = make_step()
    fast = fr.jit(step, donate=("state",))
    states, batches, counters = {}, {}, {}
    for name, rows in ROWS.items():
        table = torch.empty(rows, DIM).uniform_(-0.01, 0.01, generator=torch.Generator().manual_seed(0))
        states[name] = step.init(fr.Params({"item": table}, hidden.init(fr.key(0))))
        batches[name] = [make_batch(rows, seed) for seed in range(rounds + 8)]
        counters[name] = 0

    def call(name):
        def run():
            states[name], _ = fast(states[name], batches[name][counters[name]])
            counters[name] += 1

        return run

    cases = {name: call(name) for name in ROWS}
    for case in cases.values():
        case()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = interleave(cases, rounds=rounds)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024

    given = states["4M"].tables["item"]
    kept = given.clone()
    pure = fr.jit(step)
    pure(states["4M"], batches["4M"][0])
    began = time.perf_counter()
    pure(states["4M"], batches["4M"][1])
    record(
        "donation",
        {
            "step_ms": {name: round(median_ms(t), 3) for name, t in times.items()},
            "ratio_16M_to_4M": round(median_ratio(times["16M"], times["4M"]), 3),
            "ratio_4M_to_100k": round(median_ratio(times["4M"], times["100k"]), 3),
            "table_16M_mb": ROWS["16M"] * DIM * 4 // 2**20,
            "peak_memory_grown_mb": round(grown_mb, 1),
            "undonated_4M_ms": round((time.perf_counter() - began) * 1e3, 1),
            "undonated_input_unchanged": torch.equal(kept, given),
            "threads": 1,
            "rounds": rounds,
        },
    )


if __name__ == "__main__":
    explain(__doc__)
    main()
