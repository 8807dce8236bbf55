"""If every step names every row, row optimizers equal torch.optim in float64."""

import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

ROWS, DIM, STEPS, LR = 5, 3, 8, 0.05
PAIRS = {
    "sgd": (fr.optim.sgd(LR, weight_decay=0.1), torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (
        fr.optim.momentum(LR, momentum=0.9, weight_decay=0.1),
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 0.1},
    ),
    "nesterov": (
        fr.optim.momentum(LR, momentum=0.9, nesterov=True),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
    ),
    "adagrad": (
        fr.optim.adagrad(LR, eps=1e-10, weight_decay=0.1, initial_accumulator=0.2),
        torch.optim.Adagrad,
        {"weight_decay": 0.1, "initial_accumulator_value": 0.2},
    ),
    "adam": (fr.optim.adam(LR, weight_decay=0.1), torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (fr.optim.adamw(LR), torch.optim.AdamW, {}),
    "rmsprop": (
        fr.optim.rmsprop(LR, weight_decay=0.1, momentum=0.5),
        torch.optim.RMSprop,
        {"weight_decay": 0.1, "momentum": 0.5},
    ),
    "rmsprop_plain": (fr.optim.rmsprop(LR), torch.optim.RMSprop, {}),
}


def generated():
    """Return a table and, for each step, a gradient whose entries name every row."""
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64)
    ids = torch.cat([torch.arange(ROWS), torch.tensor([3, 0, 3])])
    grads = [fr.RowGrads.from_entries(ids, normal(len(ids), DIM), num_embeddings=ROWS) for _ in range(STEPS)]
    return normal(ROWS, DIM), grads


@pytest.mark.parametrize("name", PAIRS)
def test_rows_are_elements(name):
    """If every step names every row, k steps on rows equal k steps of torch.optim on the table."""
    ours, cls, hyper = PAIRS[name]
    table, grads = generated()
    theirs = torch.nn.Parameter(table.clone())
    opt = cls([theirs], lr=LR, **hyper)
    tables, slots = {"t": table}, ours.init({"t": table})
    for step, g in enumerate(grads):
        tables, slots = ours.update({"t": g}, slots, tables, step)
        theirs.grad = g.to_dense()
        opt.step()
    # torch.optim computes counters and powers in another order, which costs a few roundings per step
    assert_trees_close(tables["t"], theirs.detach(), rtol=1e-12, atol=1e-13)


def test_lazy_adam_is_sparse_adam():
    """If rows are left out, Adam on rows equals torch.optim.SparseAdam on the sparse gradient."""
    table, grads = generated()
    theirs = torch.nn.Parameter(table.clone())
    opt = torch.optim.SparseAdam([theirs], lr=LR)
    ours = fr.optim.adam(LR)
    tables, slots = {"t": table}, ours.init({"t": table})
    for step, g in enumerate(grads):
        rows, values = g.rows[step % 3 :: 3], g.grads[step % 3 :: 3]
        g = fr.RowGrads.from_entries(rows, values, num_embeddings=ROWS)
        tables, slots = ours.update({"t": g}, slots, tables, step)
        theirs.grad = torch.sparse_coo_tensor(rows[None], values, table.shape, check_invariants=True)
        opt.step()
    # SparseAdam adds eps before it corrects the square. eps therefore counts for 1e-8 of a step.
    assert_trees_close(tables["t"], theirs.detach(), rtol=0, atol=2e-6)
