"""Measures a DeepFM epoch on MovieLens-1M: funcrec's compiled, donated step against plain eager torch.

    python bench/ml1m_epoch.py

Both have the same data, batches of 4096, model and dropout rate. The peer is nn.Module, nn.Embedding, loss.backward()
and dense torch.optim.Adam. It indexes padded tensors, and uses 2 threads. funcrec's Adam is lazy: it updates only the
rows of the batch. Both times include the time to make the batches. The two take turns, 36 steps (a quarter epoch) at a
time.
"""

import torch
import torch.nn.functional as F
from measure import explain, interleave, median_ms, median_ratio, record
from torch import Tensor, nn

import funcrec as fr

BATCH, STEPS = 4096, 36
FIELDS, GENRES, DIM = 10_040, 19, 16


class PlainDeepFM(nn.Module):
    """A DeepFM: first-order weights, FM and an MLP (256-256-256) over seven vectors and a padded matrix of genres."""

    def __init__(self):
        super().__init__()
        self.fields, self.genres = nn.Embedding(FIELDS, DIM), nn.Embedding(GENRES, DIM)
        self.fields_linear, self.genres_linear = nn.Embedding(FIELDS, 1), nn.Embedding(GENRES, 1)
        self.bias = nn.Parameter(torch.zeros(1))
        layers = []
        for width in (7 * DIM, 256, 256):
            layers += [nn.Dropout(0.1), nn.Linear(width, 256), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(256, 1))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.xavier_normal_(module.weight)

    def forward(self, fields: Tensor, genres: Tensor) -> Tensor:
        mask = (genres != 0).float().unsqueeze(-1)
        mean = lambda table: (table(genres) * mask).sum(1) / (mask.sum(1) + 1e-8)
        linear = self.fields_linear(fields).sum(1) + mean(self.genres_linear) + self.bias
        vectors = torch.cat([mean(self.genres).unsqueeze(1), self.fields(fields)], 1)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True)
        return (linear + pairs + self.mlp(vectors.flatten(1))).squeeze(1)


def plain_quarter(split: fr.data.CtrSplit):
    """Return a function that trains the plain model for STEPS batches."""
    data, rows = split.data, split.train
    names = [c.name for c in data.columns if c.table == "fields"]
    users, items = data.user.long(), data.item.long()
    fields = torch.stack(
        [data.user_columns[n][users] if n in data.user_columns else data.item_columns[n][items] for n in names], 1
    )[rows]
    item, label = items[rows], data.label[rows]
    model = PlainDeepFM()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

    def run():
        order = torch.randperm(len(label))
        for chunk in order[: STEPS * BATCH].split(BATCH):
            logits = model(fields[chunk], data.genre[item[chunk]])
            loss = F.binary_cross_entropy_with_logits(logits, label[chunk])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            loss.item()

    return run


def funcrec_quarter(split: fr.data.CtrSplit):
    """Return a function that trains funcrec's model for STEPS batches."""
    model = fr.models.ml1m("deepfm")
    step = fr.train_step(
        fr.models.loss(model),
        sparse=fr.optim.adam(lr=0.005),
        dense=fr.optim.dense(torch.optim.Adam, lr=0.005),
        has_aux=True,
        merge=fr.models.merge_stats,
    )
    fast = fr.jit(step, donate=("state",))
    holder = {"state": step.init(model.init(fr.key(0)), fr.key(1)), "epoch": 0}

    def run():
        position = fr.data.Position(holder["epoch"], 0)
        holder["epoch"] += 1
        batches = fr.data.batches(split.data, split.train, BATCH, key=fr.key(2), position=position, drop_last=True)
        for _, (_, batch) in zip(range(STEPS), batches, strict=False):
            holder["state"], metrics = fast(holder["state"], batch)
            metrics["loss"].item()

    return run


def main(rounds: int = 8) -> None:
    split = fr.data.ctr_dataset(fr.data.movielens_1m())
    epoch = len(split.train) // BATCH / STEPS
    for threads in (2, 1):
        torch.set_num_threads(threads)
        times = interleave({"funcrec": funcrec_quarter(split), "plain torch": plain_quarter(split)}, rounds=rounds)
        record(
            "ml1m_epoch",
            {
                "threads": threads,
                "step_ms": {name: round(median_ms(t) / STEPS, 2) for name, t in times.items()},
                "epoch_s": {name: round(median_ms(t) / 1e3 * epoch, 2) for name, t in times.items()},
                "times_as_fast": round(median_ratio(times["plain torch"], times["funcrec"]), 2),
                "rounds": rounds,
            },
        )


if __name__ == "__main__":
    explain(__doc__)
    main()
