"""Measures a training step of SASRec over all items, at the lengths of MovieLens-1M, against the same model padded in
plain torch and against RecTools.

    .venv/bin/python bench/sequence.py [--rounds 9] [--threads 1] [--rectools SITE_PACKAGES]

The step is that of `python -m funcrec.examples.sequence`: 128 users, 200 positions, dim 64, two blocks, one head, Adam.
"padded" has a row of 200 places for each user and logits for all of them; "packed" computes logits for the positions
that have a next item only. Each runs in eager torch and under torch.compile, with fused Adam and
scaled_dot_product_attention. RecTools' SASRec and HSTU are what its trainer calls, without the trainer; its HSTU has
biases of positions and none of times. Calls take turns in one process, on the same batches; times are CPU times of the
process. A second process measures memory. The law: without dropout, ours, padded and packed have the same loss in three
steps of training.

`--rectools` names the site-packages of an environment with RecTools.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from measure import digits, interleave, peak_mb, ratios, record, spread
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import funcrec as fr
from funcrec.examples import sequence as example

LR = 1e-3


def loss_of(
    params: dict, items: Tensor, inputs: Tensor, targets: Tensor, places: Tensor | None, dropout: float
) -> Tensor:
    """Return SASRec's loss of padded histories in plain torch.

    Args:
      params: funcrec's dense parameters. items: f[R, D], its table.
      inputs, targets: i64[B, L]; targets are -100 in the padding.
      places: i64[N], the flat positions whose logits are computed, or None for all.
    """
    dim = items.shape[1]
    drop = lambda x: F.dropout(x, dropout) if dropout else x
    norm = lambda own, x: F.layer_norm(x, (dim,), own["weight"], own["bias"], 1e-8)
    linear = lambda own, x: F.linear(x, own["weight"], own["bias"])
    x = drop(F.embedding(inputs, items) * dim**0.5 + params["position"]["weight"])
    for own in params["blocks"]:
        q = norm(own["attention_norm"], x)
        (w_q, w), (b_q, b) = (own["in"][n].split([dim, 2 * dim]) for n in ("weight", "bias"))
        k, v = F.linear(x, w, b).chunk(2, -1)
        seen = F.scaled_dot_product_attention(F.linear(q, w_q, b_q)[:, None], k[:, None], v[:, None], is_causal=True)
        f = norm(own["norm"], q + drop(linear(own["out"], seen[:, 0])))
        x = f + drop(linear(own["second"], drop(linear(own["first"], f)).relu()))
    hidden, target = norm(params["norm"], x).flatten(0, 1), targets.flatten()
    if places is not None:
        hidden, target = hidden[places], target[places]
    return F.cross_entropy(hidden @ items.T, target, ignore_index=-100)


def padded_step(params: fr.Params, batches: list, packed: bool, compiled: bool, dropout: float) -> Callable:
    """Return a function of a batch's number that trains a copy of the parameters, and returns the loss."""
    dense, items = tree_map(lambda x: x.detach().clone().requires_grad_(), (params.dense, params.tables["item"]))
    optimizer = torch.optim.Adam(tree_leaves((dense, items)), lr=LR, fused=True)
    loss_fn = torch.compile(loss_of) if compiled else loss_of
    given = [(*rows, places if packed else None) for rows, places in map(in_rows, batches)]

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(dense, items, *given[i], dropout)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def in_rows(batch: fr.Batch, length: int = 200) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return ((inputs, targets), places) of a batch. As many places as the batch's capacity, so that batches of one
    bucket share a compiled program."""
    bags = batch.ids["history"]
    histories = [h[-length - 1 :] for h in bags.to_lists()]
    rows = torch.zeros(2, len(histories), length, dtype=torch.int64)
    rows[1] = -100
    for b, h in enumerate(histories):
        n = max(len(h) - 1, 0)
        rows[0, b, :n], rows[1, b, :n] = torch.tensor(h[:-1]), torch.tensor(h[1:])
    places = (rows[1] >= 0).flatten().nonzero()[:, 0]
    padding = (rows[1] < 0).flatten().nonzero()[: bags.capacity - len(places), 0]
    return (rows[0], rows[1]), torch.cat([places, padding])


def own_step(model: fr.models.SequenceModel, params: fr.Params, batches: list) -> Callable:
    dense = fr.optim.dense(torch.optim.Adam, lr=LR)
    step = fr.train_step(fr.models.next_item_loss(model), sparse=fr.optim.adam(LR), dense=dense)
    fast, state = fr.jit(step, donate=("state",)), [step.init(tree_map(torch.clone, params), fr.key(0))]

    def run(i: int) -> Tensor:
        state[0], metrics = fast(state[0], batches[i])
        return metrics["loss"]

    return run


def contenders(job: example.Job, params: fr.Params, batches: list) -> dict[str, Callable]:
    dropout = job.options.dropout
    cases = {"funcrec": own_step(job.model, params, batches)}
    for packed in (False, True):
        for compiled in (False, True):
            name = f"{'packed' if packed else 'padded'} torch{', compiled' if compiled else ''}"
            cases[name] = padded_step(params, batches, packed, compiled, dropout)
    return cases


def law(job: example.Job, params: fr.Params, batches: list) -> float:
    """Return the greatest difference of the losses of three steps without dropout."""
    options = argparse.Namespace(**{**vars(job.options), "dropout": 0.0})
    plain = example.MODELS["sasrec"](job.model.tables, job.model.features[0], options)
    steps = [own_step(plain, params, batches)] + [padded_step(params, batches, p, False, 0.0) for p in (False, True)]
    losses = torch.stack([torch.stack([step(i % len(batches)) for i in range(3)]) for step in steps])
    return float((losses - losses[:1]).abs().max())


def batches_of(job: example.Job, count: int) -> list:
    """Return some batches of the first epoch, all of the capacity that most of its batches have."""
    load = fr.data.loader(job.train, None, job.options.batch_size, key=fr.key(1), pad_last=True, bucket=True)
    made = [batch for _, batch in load()]
    sizes = [b.ids.values.shape[0] for b in made]
    usual = max(set(sizes), key=sizes.count)
    return [b for b in made if b.ids.values.shape[0] == usual][:count]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rectools", type=Path)
    parser.add_argument("--memory", action="store_true", help="print only the memory of a call, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.rectools:
        sys.path.insert(0, str(options.rectools))  # its pandas is older; torch and numpy are imported already
    with TemporaryDirectory() as folder:
        job = example.make_job(example.parse(["--out", folder]))
    params, batches = job.model.init(fr.key(0)), batches_of(job, 3)
    worst = law(job, params, batches)
    assert worst < 1e-4, f"the law is red: losses differ by {worst}"
    cases, absent = contenders(job, params, batches), {}
    if importlib.util.find_spec("rectools"):
        from sequence_peer import rectools_steps

        cases |= rectools_steps(job, [in_rows(b)[0] for b in batches], LR)
    else:
        absent = {f"rectools {name}": "not installed" for name in ("sasrec", "hstu")}
    turn = dict.fromkeys(cases, 0)

    def next_of(name: str) -> Callable:
        def run() -> None:
            turn[name] += 1
            cases[name](turn[name] % len(batches))

        return run

    calls = {name: next_of(name) for name in cases}
    if options.memory:
        interleave(calls, rounds=0, warmup=1)
        print(json.dumps({name: peak_mb(call, "cpu") for name, call in calls.items()}))
        return
    times = interleave(calls, rounds=options.rounds, warmup=len(batches), clock=time.process_time)
    lengths = [int(b.ids.offsets[-1]) - b.ids.num_bags for b in batches]
    record("sequence", {
        "users": job.options.batch_size, "items": job.num_items, "dim": job.options.dim, "positions": lengths,
        "capacity": batches[0].ids.values.shape[0], "padded_positions": job.options.batch_size * job.options.max_length,
        "threads": options.threads, "law": "green", "worst": digits(worst),
        "cpu_ms": {n: spread(x, 1e3) for n, x in times.items()},
        "ratio": {n: spread(ratios(x, times["funcrec"])) for n, x in times.items() if n != "funcrec"},
        "call_peak_mb": memory(), "absent": absent,
    })  # fmt: skip


def memory() -> dict[str, float]:
    """Return the most MiB that a step of each case adds, measured in a process whose allocator keeps no freed memory
    above 64 KiB."""
    run = subprocess.run(
        [sys.executable, *sys.argv, "--memory"], env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
