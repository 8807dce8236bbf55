"""Measures gradients of single examples: time and memory beside one gradient, beside vmap(grad) over dense tables, and
beside Opacus where it is installed.

    python bench/per_example.py

The batch has 4,096 examples of 26 features, one id in a bag on average, tables of 1 M rows of 16. The loss is a linear
model over the looked-up vectors, or has a hidden layer of 16. Dense peers hold a gradient [R, D] for each example and
table, so they are compared at 64 examples and tables of 200 rows.
"""

import functools
import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from measure import explain, interleave, median_ms, median_ratio, record

import funcrec as fr

FEATURES, DIM, LARGE, SMALL = 26, 16, (4096, 1_000_000), (64, 200)
READ = [fr.FeatureConfig(f"f{i}", table=f"t{i}") for i in range(FEATURES)]


def problem(size: tuple[int, int], hidden: int):
    """Return (loss, params, batch, the most ids of an example)."""
    (batch, rows), g = size, torch.Generator().manual_seed(0)
    tables = {f"t{i}": torch.randn(rows, DIM, generator=g) * 0.1 for i in range(FEATURES)}
    dense = {"w": torch.randn(FEATURES * DIM, hidden or 1, generator=g) * 0.05}
    if hidden:
        dense["v"] = torch.randn(hidden, 1, generator=g) * 0.1
    lengths = torch.randint(0, 3, (batch * FEATURES,), generator=g)
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=g)
    ids = fr.KeyedJaggedTensor.from_lengths([f"f{i}" for i in range(FEATURES)], values, lengths)
    label = torch.randint(0, 2, (batch,), generator=g).float()
    most = int(lengths.view(FEATURES, -1).sum(0).max())

    def loss_fn(params, batch):
        x = fr.lookup(params.tables, batch.ids, READ).values @ params.dense["w"]
        x = x.relu() @ params.dense["v"] if hidden else x
        return F.binary_cross_entropy_with_logits(x[:, 0], batch.label)

    return loss_fn, fr.Params(tables, dense), fr.Batch(ids, label), most


def clipped(loss_fn, most):
    def fn(params, batch):
        losses, grads = fr.per_example_grads(loss_fn, max_ids=most)(params, batch)
        return losses, fr.sum_examples(grads, 1 / fr.example_norms(grads).clamp(min=1.0))

    return fn


def times(hidden: int, rounds: int = 9) -> dict:
    loss_fn, params, batch, most = problem(LARGE, hidden)
    one, each = fr.value_and_grad(loss_fn), fr.per_example_grads(loss_fn, max_ids=most)
    cases = {"gradient": one, "per_example": each, "clipped_sum": clipped(loss_fn, most)}
    cases |= {f"{n}_jit": fr.jit(f) for n, f in cases.items()}
    calls = {n: functools.partial(f, params, batch) for n, f in cases.items()}
    found = interleave(calls, rounds=rounds, clock=time.process_time)
    over = lambda n, of: round(median_ratio(found[n], found[of]), 2)
    return {
        "hidden": hidden,
        "ms": {n: round(median_ms(t), 1) for n, t in found.items()},
        "over_one_gradient": {n: over(n, "gradient") for n in ("per_example", "clipped_sum")},
        "over_one_gradient_jit": {n: over(f"{n}_jit", "gradient_jit") for n in ("per_example", "clipped_sum")},
    }  # fmt: skip


def dense_vmap(loss_fn, params, batch):
    """Return per-example gradients of dense tables by torch.func alone: each bag padded to two ids."""
    lists, heights = batch.ids.to_dict(), {n: t.shape[0] for n, t in params.tables.items()}
    padded = torch.stack([lists[f"f{i}"].to_padded(2, heights[f"t{i}"]) for i in range(FEATURES)], 1)

    def one(tables, dense, ids, label):
        rows = [torch.cat([t, t.new_zeros(1, DIM)])[i].sum(0) for t, i in zip(tables.values(), ids, strict=True)]
        x = torch.cat(rows) @ dense["w"]
        x = x.relu() @ dense["v"] if "v" in dense else x
        return F.binary_cross_entropy_with_logits(x[0], label)

    grad = torch.func.vmap(torch.func.grad(one, argnums=(0, 1)), in_dims=(None, None, 0, 0))
    return lambda: grad(params.tables, params.dense, padded, batch.label)


def opacus(params, batch):
    """Return per-example gradients by Opacus' GradSampleModule, or None where Opacus is not installed."""
    try:
        from opacus import GradSampleModule
    except ImportError:
        return None
    lists = batch.ids.to_dict()
    bags = [(lists[f"f{i}"].unpad().values, lists[f"f{i}"].offsets[:-1]) for i in range(FEATURES)]

    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            make = lambda t: torch.nn.EmbeddingBag(*t.shape, mode="sum", _weight=t.clone())
            self.bags = torch.nn.ModuleList(map(make, params.tables.values()))
            self.top = torch.nn.Linear(FEATURES * DIM, 1, bias=False)
            self.top.weight.data = params.dense["w"].T.clone()

        def forward(self, bags):
            return self.top(torch.cat([bag(*x) for bag, x in zip(self.bags, bags, strict=True)], 1))

    model = GradSampleModule(Linear(), loss_reduction="mean")

    def run():
        model.zero_grad()
        F.binary_cross_entropy_with_logits(model(bags)[:, 0], batch.label).backward()
        return [p.grad_sample for p in model.parameters()]

    return run


def beside_peers(rounds: int = 9) -> dict:
    loss_fn, params, batch, _ = problem(SMALL, 0)
    ours = functools.partial(fr.per_example_grads(loss_fn), params, batch)
    calls = {"funcrec": ours, "dense vmap": dense_vmap(loss_fn, params, batch)}
    to_dense = torch.func.vmap(lambda grads: {n: g.to_dense() for n, g in grads.items()})
    dense, theirs = to_dense(ours()[1].tables), calls["dense vmap"]()
    apart = max(float((dense[n] - theirs[0][n]).abs().max()) for n in dense)
    if (peer := opacus(params, batch)) is not None:
        calls["opacus"] = peer
    found = interleave(calls, rounds=rounds, clock=time.process_time)
    ms = {n: round(median_ms(t), 2) for n, t in found.items()}
    return {"examples": SMALL[0], "rows": SMALL[1], "ms": ms, "apart": apart}


def peak_mb(which: str) -> float:
    """Return by how many MB a fresh process grows in one call, beyond the parameters and the batch."""
    out = subprocess.run([sys.executable, __file__, "--peak", which], capture_output=True, text=True, check=True)
    return float(out.stdout.split()[-1])


def peak(which: str) -> float:
    torch.set_num_threads(1)
    loss_fn, params, batch, _ = problem(LARGE, 0)
    small = problem((8, 100), 0)
    call = {"gradient": fr.value_and_grad, "per_example": fr.per_example_grads}[which]
    call(small[0])(*small[1:3])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call(loss_fn)(params, batch)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    torch.set_num_threads(1)
    memory = {n: round(peak_mb(n)) for n in ("gradient", "per_example")}
    record("per_example", {"peak_mb": memory, "large": [times(0), times(16)], "small": beside_peers()})


if __name__ == "__main__":
    explain(__doc__)
    print(peak(sys.argv[2])) if sys.argv[1:2] == ["--peak"] else main()
