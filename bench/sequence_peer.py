"""RecTools' SASRec and HSTU with the loss over all items, as their trainer calls them. See sequence.py."""

import warnings
from collections.abc import Callable

import torch
from peers import quiet
from torch import Tensor

from funcrec.examples.sequence import Job


def rectools_steps(job: Job, rows: list[tuple[Tensor, Tensor]], lr: float) -> dict[str, Callable]:
    """Return {name: a function of a batch's number that trains the model}.

    rows: (inputs, targets) i64[B, L] of each batch, targets -100 in padding.
    """
    warnings.filterwarnings("ignore")
    with quiet():
        from rectools.models import HSTUModel, SASRecModel
    o = job.options
    same = {
        "n_blocks": o.blocks, "n_heads": o.heads, "n_factors": o.dim, "dropout_rate": o.dropout,
        "session_max_len": o.max_length, "loss": "softmax", "lr": lr, "batch_size": o.batch_size,
    }  # fmt: skip
    models = {"rectools sasrec": SASRecModel(**same), "rectools hstu": HSTUModel(**same, relative_time_attention=False)}
    dataset, batches = dataset_of(job), [flushed_right(*x) for x in rows]
    return {name: step_of(model, dataset, batches) for name, model in models.items()}


def step_of(model, dataset, batches: list[dict[str, Tensor]]) -> Callable:
    with quiet():
        model._build_model_from_dataset(dataset)
    module = model.lightning_model
    module.log = lambda *args, **how: None  # there is no trainer
    module._xavier_normal_init()
    module.train()
    optimizer = module.configure_optimizers()

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        loss = module.training_step(batches[i], i)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def dataset_of(job: Job):
    """Return a dataset with all items, in which each user has seen a part of them."""
    import pandas as pd
    from rectools import Columns
    from rectools.dataset import Dataset

    item = torch.arange(job.num_items)
    return Dataset.construct(
        pd.DataFrame({
            Columns.User: (item % 100).numpy(), Columns.Item: item.numpy(), Columns.Weight: 1.0,
            Columns.Datetime: pd.Timestamp("2000-01-01"),
        })
    )  # fmt: skip


def flushed_right(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return a batch of RecTools: items from 1 on, 0 in the padding, which comes first."""
    x, y = torch.zeros_like(inputs), torch.zeros_like(targets)
    for b, n in enumerate((targets >= 0).sum(1).tolist()):
        if n:
            x[b, -n:], y[b, -n:] = inputs[b, :n] + 1, targets[b, :n] + 1
    return {"x": x, "y": y, "yw": (y > 0).float()}
