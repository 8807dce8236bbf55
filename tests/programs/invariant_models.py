"""Eight models with their predictions, training steps and batches, for laws of `invariant`, and digests of their bits.

PYTHONPATH=tests python -m programs.invariant_models [NAME ...] prints {model: [predictions, step]} as JSON: digests of
the predictions of 37 examples, and of the state after two steps of 290 examples.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import funcrec as fr

KEYS, SIZES = ("user", "item", "tag"), (300, 40)
ROWS, FEW, MANY = 30, 37, 290  # rows of a table, examples of a prediction and of a step


class Model(NamedTuple):
    """init: key -> parameters. predict: (params, batch) -> tensor [B, ...]. loss: what `train_step` takes."""

    init: Callable
    predict: Callable
    loss: Any


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def configs(dim: int) -> tuple:
    tables = tuple(fr.TableConfig(k, ROWS, dim) for k in KEYS)
    return tables, tuple(fr.FeatureConfig(k, table=k, pooling="mean" if k == "tag" else "sum") for k in KEYS)


def batch_of(rows: Any) -> fr.Batch:
    """Return the examples of these numbers: bags of 0 to 3 ids, five numbers, a label."""
    ids = {k: [[(7 * r + 11 * j + i) % ROWS for i in range((r + j) % 4)] for r in rows] for j, k in enumerate(KEYS)}
    dense = torch.stack([noise(5, seed=r) for r in rows])
    return fr.Batch(fr.KeyedJaggedTensor.from_lists(ids), torch.tensor([float(r % 2) for r in rows]), dense)


def of_ids(batch: fr.Batch) -> fr.Batch:
    return fr.Batch(batch.ids, batch.label)


def two_towers() -> Model:
    tables, (user, item, tag) = configs(8)
    towers = fr.models.two_tower(tables, [user, tag], [item], sizes=SIZES)
    score = lambda p, b: (towers.query(p, of_ids(b)) * towers.candidate(p, of_ids(b))).sum(1)
    loss = fr.models.in_batch_softmax_loss(towers)
    return Model(towers.init, score, lambda p, b, *, key: loss(p, of_ids(b), key=key)[0])


def sequences(make: Callable) -> Model:
    item = fr.FeatureConfig("item", table="item", pooling="none")
    model = make(configs(8)[0][1:2], item, max_length=8)
    target = [fr.FeatureConfig("tag", table="item")]
    loss = lambda p, b: fr.losses.bce(
        (model.query(p, of_ids(b)) * fr.lookup(p.tables, b.ids, target).values).sum(1), b.label
    )
    return Model(model.init, lambda p, b: model.query(p, of_ids(b)), loss)


def clicks(make: Callable, dim: int = 8, **options: Any) -> Model:
    model = make(*configs(dim), num_dense=5, **options)
    return Model(model.init, lambda p, b: torch.sigmoid(model.apply(p, b)), model)


MODELS = {
    "lr": lambda: clicks(fr.models.lr, 1),
    "fm": lambda: clicks(fr.models.fm),
    "dlrm": lambda: clicks(fr.models.dlrm, bottom=(16, 8), sizes=SIZES),
    "deepfm": lambda: clicks(fr.models.deepfm, sizes=SIZES),
    "dcnv2": lambda: clicks(fr.models.dcnv2, sizes=SIZES, rank=4),
    "two towers": two_towers,
    "sasrec": lambda: sequences(fr.models.sasrec),
    "hstu": lambda: sequences(fr.models.hstu),
}


def trainer(model: Model, **options: Any) -> tuple[fr.TrainStep, Any]:
    """Return an invariant step with Adam, and its first state."""
    adam = {"sparse": fr.optim.adam(0.01), "dense": fr.optim.dense(torch.optim.Adam, lr=0.01)}
    step = fr.train_step(model.loss, **adam, invariant=True, **options)
    return step, step.init(model.init(fr.key(0)), fr.key(1))


def digest(tree: Any) -> str:
    data = b"".join(x.contiguous().numpy().tobytes() for x in fr.tree.leaves(tree) if isinstance(x, torch.Tensor))
    return hashlib.sha256(data).hexdigest()[:12]


def digests(name: str) -> list[str]:
    """Return the digests of a model's predictions and of its state after two steps."""
    model, batch = MODELS[name](), batch_of(range(MANY))
    predict, (step, state) = fr.invariant(model.predict), trainer(model)
    return [digest(predict(model.init(fr.key(0)), batch_of(range(FEW)))), digest(step(step(state, batch)[0], batch))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: digests(name) for name in sys.argv[1:] or MODELS}))
