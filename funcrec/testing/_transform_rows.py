"""Rows of the transform table: losses by their weights, models, and each optimizer's update.

row: a function, and example arguments whose floats are its inputs
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec import models, optim
from funcrec.core import split, tree_map
from funcrec.jagged import KeyedJaggedTensor
from funcrec.losses import (
    bce,
    contrastive,
    cross_entropy,
    full_softmax,
    gbce,
    huber,
    in_batch_softmax,
    mse,
    multi_task,
    sampled_softmax,
    weighted_mean,
)
from funcrec.tables import Batch, FeatureConfig, RowGrads, TableConfig
from funcrec.testing._modes import COMPILED, ZERO, Case, draw, sweep
from funcrec.testing._transforms import case_of


class Row(NamedTuple):
    """A function, and example arguments whose floats are its inputs.

    smooth: f without its rounding, for differences; rtol: the rounding allowed.
    """

    f: Callable
    args: tuple[Any, ...]
    smooth: Callable[..., Any] | None = None
    rtol: float = 0.0

    def cells(self, modes: tuple[str, ...], together: Collection[str] = COMPILED) -> dict[tuple[str, str], str]:
        """Return {(path of an input, mode): outcome}. In the modes `together`, one input moves all floats at once."""
        case = case_of(self.f, *self.args)
        smooth = None if self.smooth is None else case_of(self.smooth, *self.args).f
        along = lambda f: lambda t: f(**{n: x + t * draw(f"{n}, moved", x.shape) for n, x in case.inputs.items()})
        at = ZERO.clone()  # make_fx is called with ZERO, and would take an input that is ZERO for its argument
        moved = Case(case.name, along(case.f), {"t": at}, smooth=smooth and along(smooth), rtol=self.rtol)
        alone = sweep(case._replace(smooth=smooth, rtol=self.rtol), tuple(m for m in modes if m not in together))
        return alone | sweep(moved, tuple(m for m in modes if m in together))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LENGTHS = torch.tensor([2, 0, 3, 1])
IDS = KeyedJaggedTensor.from_lengths(["a"], torch.tensor([0, 2, 1, 1, 3, 2]), LENGTHS)
TABLE, LABEL = drawn(4, 3), torch.tensor([1.0, 0.0, 1.0, 0.0]).double()
OPTIMIZERS = (
    "sgd", "adagrad", "adam", "lamb", "momentum", "rowwise_adagrad",
    "rowwise_adagrad_cowclip", "adamw", "partial_rowwise_adam", "partial_rowwise_lamb", "lars_sgd", "ftrl", "rmsprop",
    "lion",
)  # fmt: skip


def of_losses() -> dict[str, Row]:
    """Return the rows of losses: by scores, and by the weights of examples."""
    scores, w, wide = drawn(4, seed=4), drawn(4, seed=8), drawn(2, 3, seed=9)
    two, three = (drawn(3, 2, seed=i) for i in (1, 2))
    positive = lambda w: w.abs() + 0.1
    target = torch.tensor([1, 3])
    both = multi_task([bce, mse], weights=[1.0, 0.5])
    return {
        "bce": Row(lambda x, w: bce(x, LABEL, positive(w)), (scores, w)),
        "mse": Row(lambda x, w: mse(x, LABEL, positive(w)), (scores, w)),
        "huber": Row(lambda x, w, d: huber(x, LABEL, positive(w), delta=positive(d)), (scores, w, drawn(1)[0])),
        "cross_entropy": Row(lambda x, w: cross_entropy(x, torch.tensor([0, 2]), positive(w)), (wide, w[:2])),
        "full_softmax": Row(lambda q, t, w: full_softmax(q, t, target, positive(w)), (wide, TABLE, w[:2])),
        "contrastive": Row(lambda x, y, w: contrastive(x, y, positive(w)), (two, three, w[:3])),
        "in_batch_softmax": Row(
            lambda x, y, w: in_batch_softmax(x, y, positive(w), log_q=None), (two, three, w[:3])),
        "sampled_softmax": Row(
            lambda x, y, n, w: sampled_softmax(x, y, n, positive(w)), (two, three, drawn(4, 2), w[:3])),
        "gbce": Row(
            lambda x, y, n, w: gbce(x, y, n, positive(w), num_items=9), (two, three, drawn(4, 2), w[:3])),
        "multi_task": Row(
            lambda x, w: both(x, torch.stack([LABEL, LABEL], 1), positive(w)), (drawn(4, 2), w)),
        "weighted_mean": Row(lambda x, w: weighted_mean(x, positive(w)), (scores, w)),
    }  # fmt: skip


def of_model(make: Callable[..., Any], **given: Any) -> Row:
    tables = [TableConfig("t", 4, 3)]
    model = make(tables, [FeatureConfig("a", table="t"), FeatureConfig("b", table="t", column="a")])
    whole = models.loss(model)
    batch = Batch(IDS, LABEL, **given)
    return of_params(model, lambda params: whole(params, batch, key=torch.tensor(5))[0])


def of_params(model: Any, f: Callable[..., Any]) -> Row:
    # Biases of 0 and an empty bag would meet in the kink of a ReLU, where differences are no derivatives.
    return Row(f, (tree_map(lambda x: x.double() + 0.1, model.init(split(torch.tensor(3), 1)[0])),))


def of_sequences(make: Callable[..., Any]) -> Row:
    history = FeatureConfig("a", table="t", pooling="none")
    model = make([TableConfig("t", 4, 4)], history, max_length=3)
    whole, batch = models.next_item_loss(model), Batch(IDS)
    return of_params(model, lambda params: whole(params, batch, key=torch.tensor(5)))


def of_towers() -> Row:
    read = lambda name: [FeatureConfig(name, table="t", column="a")]
    model = models.two_tower([TableConfig("t", 4, 3)], read("q"), read("c"), sizes=(4, 2), temperature=1.0)
    whole = models.in_batch_softmax_loss(model)
    return of_params(model, lambda params: whole(params, Batch(IDS, LABEL), key=torch.tensor(5))[0])


def of_ranker() -> Row:
    feature = lambda name: [FeatureConfig(name, table="t", pooling="none")]
    model = models.hstu_ranker(
        [TableConfig("t", 4, 3)], history=feature("a"), candidates=feature("b"), dim=3, hidden=3, head=3, qk_dim=2,
        linear_dim=3, num_heads=1, num_layers=1, num_positions=2, input_dropout=0.0, dropout=0.0,
    )  # fmt: skip
    batch = Batch(KeyedJaggedTensor.from_lists({"a": [[0, 2], []], "b": [[3], [1]]}), drawn(2, 1, seed=4).sigmoid())
    whole = models.ranker_loss(model)
    return of_params(model, lambda params: whole(params, batch, key=torch.tensor(5))[0])


def of_models() -> dict[str, Row]:
    """Return the rows of models: their losses by tables and dense parameters."""
    small = {"sizes": (4,)}
    past = [FeatureConfig("h", table="t", column="a", pooling="none")]
    return {
        "lr": of_params(lr := models.lr([TableConfig("t", 4, 1)], [FeatureConfig("a", table="t")]),
            lambda params: models.loss(lr)(params, Batch(IDS, LABEL), key=torch.tensor(5))[0]),
        "fm": of_model(models.fm), "deepfm": of_model(lambda *a: models.deepfm(*a, **small)),
        "wide_deep": of_model(lambda *a: models.wide_deep(*a, **small)),
        "dlrm": of_model(lambda *a: models.dlrm(*a, **small)),
        "dcnv2": of_model(lambda *a: models.dcnv2(*a, num_cross=1, rank=1, **small)),
        "dlrm_dcnv2": of_model(
            lambda *a: models.dlrm_dcnv2(*a, num_dense=1, bottom=(3,), num_cross=1, rank=1, **small),
            dense=drawn(4, 1, seed=3)),
        "din": of_model(lambda *a: models.din(*a, history=past, target=["a"], attention=(2,), **small)),
        "two_tower": of_towers(),
        "sasrec": of_sequences(lambda *a, **k: models.sasrec(*a, blocks=1, dropout=0.0, **k)),
        "gru4rec": of_sequences(lambda *a, **k: models.gru4rec(*a, num_hidden=2, **k)),
        "hstu_ranker": of_ranker(),
        "hstu": of_sequences(lambda *a, **k: models.hstu(*a, layers=1, dropout=0.0, **k)),
    }  # fmt: skip


def updated(optimizer: Callable[..., Any]) -> Row:
    def f(table, grads):
        rule, g = optimizer(lr=0.1), RowGrads.from_entries(torch.tensor([1, 3, 1]), grads, num_embeddings=4)
        return rule.update({"t": g}, rule.init({"t": table}), {"t": table}, torch.tensor(0))

    return Row(f, (TABLE, drawn(3, 3)))


def of_updates() -> dict[str, Row]:
    """Return a row for each built-in row optimizer."""
    counter = partial(optim.rowwise_adagrad_counter, half_life=9.0)
    makers = {n: getattr(optim, n) for n in OPTIMIZERS} | {"rowwise_adagrad_counter": counter}
    return {f"update, {n}": updated(make) for n, make in makers.items()}
