"""Measures products with second derivatives by the rows that a batch reads: time and memory beside one gradient, and
beside torch.func's product over dense tables.

    python bench/curvature.py

The model has 26 features, one id in a bag on average, tables of rows of 16, and a hidden layer of 16. The batch grows
at tables of 1 M rows (1.7 GB), and the tables grow at a batch of 1,024. The direction is a gradient. The law comes
first, on small tables in f64: a product is the dense one, and the central difference of two gradients.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure import MB, digits, explain, interleave, median_ms, median_ratio, record
from torch.profiler import ProfilerActivity, profile

import funcrec as fr

FEATURES, DIM, HIDDEN = 26, 16, 16
READ = [fr.FeatureConfig(f"f{i}", table=f"t{i}") for i in range(FEATURES)]
BATCHES, ROWS = (256, 1024, 4096), (10_000, 100_000, 1_000_000)
PRODUCTS = ("gradient", "of_rows", "hvp", "gauss_newton", "fisher")
DENSE_ROWS = (10_000, 100_000)  # a dense product of 1 M rows holds five tables: 8 GB


def predict(params: fr.Params, batch: fr.Batch) -> torch.Tensor:
    x = fr.lookup(params.tables, batch.ids, READ).values @ params.dense["w"]
    return (x.tanh() @ params.dense["v"])[:, 0]


def losses_of(logits: torch.Tensor, batch: fr.Batch) -> torch.Tensor:
    return F.softplus(logits) - batch.label * logits


def loss_fn(params: fr.Params, batch: fr.Batch) -> torch.Tensor:
    return losses_of(predict(params, batch), batch).mean()


def problem(examples: int, rows: int, dtype: torch.dtype = torch.float32) -> tuple[fr.Params, fr.Batch, fr.Params]:
    """Return (params, batch, a direction: the gradient of another batch)."""
    g = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=g, dtype=dtype) * 0.1
    dense = {"w": normal(FEATURES * DIM, HIDDEN), "v": normal(HIDDEN, 1)}
    params = fr.Params({f"t{i}": normal(rows, DIM) for i in range(FEATURES)}, dense)

    def draw() -> fr.Batch:
        lengths = torch.randint(0, 3, (examples * FEATURES,), generator=g)
        values = torch.randint(0, rows, (int(lengths.sum()),), generator=g)
        ids = fr.KeyedJaggedTensor.from_lengths([f"f{i}" for i in range(FEATURES)], values, lengths)
        return fr.Batch(ids, torch.randint(0, 2, (examples,), generator=g).to(dtype))

    return params, draw(), fr.value_and_grad(loss_fn)(params, draw())[1]


def call_of(which: str, params: fr.Params, batch: fr.Batch, direction: fr.Params) -> Callable[[], object]:
    losses = lambda p, b: losses_of(predict(p, b), b)
    mean = lambda y, b: losses_of(y, b).mean()
    return {
        "gradient": lambda: fr.value_and_grad(loss_fn)(params, batch),
        "of_rows": lambda: fr.of_rows(loss_fn, params, batch),
        "hvp": lambda: fr.hvp(loss_fn)(params, direction, batch),
        "gauss_newton": lambda: fr.gauss_newton_product(predict, mean)(params, direction, batch),
        "fisher": lambda: fr.fisher_product(losses)(params, direction, batch),
        "dense": lambda: dense_product(params, to_dense(direction), batch),
    }[which]


def to_dense(direction: fr.Params) -> fr.Params:
    return fr.Params({n: g.to_dense() for n, g in direction.tables.items()}, direction.dense)


def dense_product(params: fr.Params, direction: fr.Params, batch: fr.Batch) -> fr.Params:
    """Return torch.func's jvp of grad by whole tables: a gather, and a sum of each bag's rows."""
    lists = batch.ids.to_dict()

    def loss(p: fr.Params) -> torch.Tensor:
        bags = []
        for f in READ:
            own = lists[f.name].unpad()
            bag = torch.repeat_interleave(own.offsets.diff(), output_size=own.values.shape[0])
            out = p.dense["w"].new_zeros(batch.label.shape[0], DIM)
            bags.append(out.index_add(0, bag, p.tables[f.table][own.values]))
        return losses_of(((torch.cat(bags, 1) @ p.dense["w"]).tanh() @ p.dense["v"])[:, 0], batch).mean()

    return torch.func.jvp(torch.func.grad(loss), (params,), (direction,))[1]


def apart(a: fr.Params, b: fr.Params) -> float:
    """Return the largest difference of two trees, by the largest number of the second tree."""
    pairs = list(zip(fr.tree.leaves(a), fr.tree.leaves(b), strict=True))
    return float(max((x - y).abs().max() for x, y in pairs) / max(y.abs().max() for _, y in pairs))


def law() -> dict:
    """Return how far a product is from the dense product and from a central difference, in f64."""
    params, batch, direction = problem(64, 100, torch.float64)
    found, along, t = to_dense(fr.hvp(loss_fn)(params, direction, batch)), to_dense(direction), 1e-3
    moved = lambda by: fr.tree.map(lambda x, v: x + by * v, params, along)
    gradient = lambda by: to_dense(fr.value_and_grad(loss_fn)(moved(by), batch)[1])
    difference = fr.tree.map(lambda a, b: (a - b) / (2 * t), gradient(t), gradient(-t))
    figures = {
        "dense": apart(found, dense_product(params, along, batch)), "central difference": apart(found, difference)
    }  # fmt: skip
    assert figures["dense"] < 1e-12 and figures["central difference"] < 1e-6, figures
    return figures


def peak_mb(call: Callable[[], object]) -> float:
    """Return the most MiB that torch's allocator holds at once for one call, beyond what it held before."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        call()
    held = most = 0
    for event in p.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return digits(most / MB)


def case(examples: int, rows: int, rounds: int = 9) -> dict:
    names, given = (*PRODUCTS, "dense") if rows in DENSE_ROWS else PRODUCTS, problem(examples, rows)
    calls = {n: call_of(n, *given) for n in names}
    found = interleave(calls, rounds=rounds, clock=time.process_time)
    over = {n: round(median_ratio(found[n], found["gradient"]), 2) for n in names if n != "gradient"}
    ms = {n: round(median_ms(t), 1) for n, t in found.items()}
    memory = {n: peak_mb(f) for n, f in calls.items()}
    return {"batch": examples, "rows": rows, "peak_mb": memory, "ms": ms, "over_one_gradient": over}


def main() -> None:
    torch.set_num_threads(1)
    shape = {"tables": FEATURES, "dim": DIM, "hidden": HIDDEN, "threads": 1, "law": law()}
    sizes = [(b, ROWS[-1]) for b in BATCHES] + [(BATCHES[1], r) for r in ROWS[:-1]]
    record("curvature", {**shape, "cases": [case(*size) for size in sizes]})


if __name__ == "__main__":
    explain(__doc__)
    main()
