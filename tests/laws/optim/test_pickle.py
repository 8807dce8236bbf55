"""Optimizers pickle. A loaded optimizer gives the same bits."""

import copy
import functools
import pickle

import pytest
import torch

import funcrec as fr
from funcrec.optim._builtin import BUILTIN
from funcrec.optim.write import examples

TABLES = {"a": torch.arange(8.0).view(4, 2) / 8, "b": torch.ones(3, 2)}
GRADS = {
    n: fr.RowGrads.from_entries(torch.tensor([2, 0, 2]), torch.tensor([[1.0, -2.0], [0.5, 3.0], [4.0, 0.1]]),
        num_embeddings=len(t))
    for n, t in TABLES.items()
}  # fmt: skip


def rule(row, grad, slots, hyper):
    return row - hyper.lr * grad.sign() * hyper.gain, {"age": slots["age"] + 1}


def no_slots(table):
    return {"age": torch.zeros(table.shape[0])}


def with_net(net, row, grad, slots, hyper):
    return row - hyper.lr * net["w"] * torch.tanh(grad), slots


def halved(step):
    return 0.5 ** (step + 1).to(torch.float64)


RATE = fr.optim.schedule([fr.optim.Stage("linear", max_iters=4, value=0.5)], lr=0.1)
PAIRS = {
    **{n: getattr(fr.optim, n)(lr=0.1, **examples(n)[0]) for n in BUILTIN},
    "scheduled": fr.optim.adam(lr=RATE),
    "of a function": fr.optim.sgd(lr=halved),
    "of a tensor": fr.optim.sgd(lr=torch.tensor(0.3)),
    "of tensors": fr.optim.sgd(lr=0.1, weight_decay=torch.tensor(0.3)),
    "a user's": fr.optim.row_optimizer(init=no_slots, rule=rule, lr=0.1, gain=2.0),
    "learned": fr.optim.row_optimizer(
        init=no_slots, rule=functools.partial(with_net, {"w": torch.tensor([1.0, 2.0])}), lr=0.1
    ),
    "by table": fr.optim.by_table({"a": fr.optim.sgd(0.1)}, default=fr.optim.adam(0.1)),
    "clipped": fr.optim.clip(fr.optim.freeze(fr.optim.adagrad(0.1), tables=["b"]), max_norm=0.5),
    "rounded": fr.optim.stochastic_rounding(fr.optim.sgd(0.1), key=fr.key(3)),
    "accumulated": fr.optim.accumulate(fr.optim.sgd(0.1), every=2, capacity=4),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_a_row_optimizer_pickles(name):
    """A row optimizer that was pickled or copied makes the same slots and gives the same bits."""
    before = PAIRS[name]
    for after in (pickle.loads(pickle.dumps(before)), copy.deepcopy(before)):
        old, new = (o.update(GRADS, o.init(TABLES), TABLES, 1) for o in (before, after))
        torch.testing.assert_close(old, new, rtol=0, atol=0)
        assert after.is_joint == before.is_joint and after.waiting == before.waiting and after[3:7] == before[3:7]


@pytest.mark.parametrize(
    "hyper", [{"lr": 0.1}, {"lr": RATE}, {"lr": torch.tensor(0.1)}], ids=["number", "schedule", "tensor"]
)
def test_a_dense_optimizer_pickles(hyper):
    """A dense optimizer that was pickled gives the same bits."""
    before = fr.optim.dense(torch.optim.Adam, **hyper)
    params = {"w": torch.arange(3.0)}
    old, new = (
        o.update({"w": torch.ones(3)}, o.init(params), params, 0) for o in (before, pickle.loads(pickle.dumps(before)))
    )
    torch.testing.assert_close(old, new, rtol=0, atol=0)


def test_what_does_not_pickle_says_so():
    """A rule without an importable name raises, and so does an optimizer whose fields were replaced by hand. Neither
    pickles as another optimizer."""
    nameless = fr.optim.row_optimizer(init=no_slots, rule=lambda row, grad, slots, hyper: (row, slots))
    replaced = fr.optim.sgd(0.1)._replace(init=lambda tables: {})
    for optimizer in (nameless, replaced):
        with pytest.raises((pickle.PicklingError, AttributeError), match="pickle"):
            pickle.dumps(optimizer)
        copy.deepcopy(optimizer)
