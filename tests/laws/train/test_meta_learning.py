"""Derivatives through a training step: MAML, a learned rate for each table, weights of examples.

All of them agree with central differences in f64."""

import functools
from unittest import mock

import pytest
import torch

import funcrec as fr
from funcrec.compile import _program
from funcrec.core._tree import map_tensors

F64 = torch.float64
H = 1e-6
TABLES = {
    "user": torch.linspace(-1, 1, 8, dtype=F64).view(4, 2),
    "item": torch.linspace(0.5, -0.7, 10, dtype=F64).view(5, 2),
}
FEATURES = [fr.FeatureConfig("user", table="user"), fr.FeatureConfig("item", table="item", pooling="mean")]
DENSE = {"w": torch.tensor([0.7, -0.4, 0.3, 0.9], dtype=F64), "b": torch.tensor(0.1, dtype=F64)}
SPARSE = {n: getattr(fr.optim, n) for n in ("sgd", "adagrad", "adam", "rowwise_adagrad")}


def batch(users, items, labels):
    ids = fr.KeyedJaggedTensor.from_lists({"user": users, "item": items})
    return fr.Batch(ids, torch.tensor(labels, dtype=F64))


# rows repeat, and a bag is empty
SUPPORT = batch([[1], [3, 3], [0]], [[2, 2, 4], [0], []], [1.0, 0.0, 1.0])
QUERY = batch([[3], [1, 0]], [[2], [0, 4]], [0.0, 1.0])


def losses(params, data):
    acts = fr.lookup(params.tables, data.ids, FEATURES).values
    logits = torch.tanh(acts) @ params.dense["w"] + params.dense["b"]
    return (logits - data.label).square()


def loss_fn(params, data):
    return losses(params, data).mean()


def weighted_loss(params, data):
    examples, weights = data
    return (losses(params, examples) * weights).sum()


def step_of(sparse, dense_lr=0.1, loss=loss_fn, dense=torch.optim.Adam):
    hyper = {"eps": 1e-3} if dense is torch.optim.Adam else {}
    return fr.train_step(loss, sparse=sparse, dense=fr.optim.dense(dense, lr=dense_lr, **hyper))


def by_step(step, params, data, steps=2):
    """Return Params after some steps of train_step."""
    state = step.init(params)
    for _ in range(steps):
        state, _ = step(state, data)
    return state.params


def by_hand(sparse, params, data, lr, loss=loss_fn, steps=2):
    """Return the result of `by_step` for SGD's dense parameters, by value_and_grad and the row optimizer alone."""
    tables, dense, slots = params.tables, params.dense, sparse.init(params.tables)
    for t in range(steps):
        _, grads = fr.value_and_grad(loss)(fr.Params(tables, dense), data)
        tables, slots = sparse.update(grads.tables, slots, tables, t)
        dense = {k: x - lr * grads.dense[k] for k, x in dense.items()}
    return fr.Params(tables, dense)


def differences(f, x):
    unit = torch.eye(x.numel(), dtype=F64).view(-1, *x.shape)
    return torch.stack([(f(x + H * e) - f(x - H * e)) / (2 * H) for e in unit]).view(x.shape)


def assert_differences(f, x, need=None):
    """Check grad, jacfwd and plain autograd of f at x against central differences, element by element."""
    need = differences(f, x) if need is None else need
    assert bool((need.abs() > 1e-5).any())
    leaf = x.clone().requires_grad_()
    f(leaf).backward()
    for got in (torch.func.grad(f)(x), torch.func.jacfwd(f)(x), leaf.grad):
        torch.testing.assert_close(got, need, rtol=1e-6, atol=1e-8)


def adapted(how, sparse, params, lr):
    if how == "train_step":
        return by_step(step_of(sparse, lr), params, SUPPORT)
    return by_hand(sparse, params, SUPPORT, lr)


@pytest.mark.parametrize("how", ["train_step", "by hand"])
@pytest.mark.parametrize("rule", SPARSE)
def test_maml(rule, how):
    """The loss after two steps is differentiated by the first parameters: tables, through repeated rows, and dense
    parameters."""
    sparse = SPARSE[rule](lr=0.3)

    def outer(which, x):
        tables = {**TABLES, "item": x} if which == "item" else TABLES
        dense = {**DENSE, "w": x} if which == "w" else DENSE
        return loss_fn(adapted(how, sparse, fr.Params(tables, dense), 0.1), QUERY)

    assert_differences(functools.partial(outer, "item"), TABLES["item"])
    assert_differences(functools.partial(outer, "w"), DENSE["w"])


@pytest.mark.parametrize("how", ["train_step", "by hand"])
def test_a_learned_rate_for_each_table(how):
    """The loss after two steps is differentiated by a learning rate for each table and one for the dense parameters."""

    def outer(rates):
        sparse = fr.optim.by_table({"user": fr.optim.adagrad(lr=rates[0])}, default=fr.optim.sgd(lr=rates[1]))
        return loss_fn(adapted(how, sparse, fr.Params(TABLES, DENSE), rates[2]), QUERY)

    assert_differences(outer, torch.tensor([0.2, 0.3, 0.05], dtype=F64))


@pytest.mark.parametrize("how", ["train_step", "by hand"])
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_learning_to_reweight(rule, how):
    """The loss of other examples after two steps is differentiated by the weights of the training examples."""

    def outer(weights):
        params, data, sparse = fr.Params(TABLES, DENSE), (SUPPORT, weights), SPARSE[rule](lr=0.3)
        if how == "train_step":
            after = by_step(step_of(sparse, loss=weighted_loss, dense=torch.optim.SGD), params, data)
        else:
            after = by_hand(sparse, params, data, 0.1, weighted_loss)
        return loss_fn(after, QUERY)

    assert_differences(outer, torch.tensor([0.5, 0.2, 0.3], dtype=F64))


# -- through jit and scan ----------------------------------------------------------------------------------------

RUNS = {  # a step on a batch, or two steps
    "once": lambda step, state, data: step(state, data)[0],
    "eager": lambda step, state, data: step(step(state, data)[0], data)[0],
    "jit": lambda step, state, data: fr.jit(step)(fr.jit(step)(state, data)[0], data)[0],
    "scan": lambda step, state, data: fr.scan(step, state, twice(data))[0],
    "scan of jit": lambda step, state, data: fr.scan(fr.jit(step), state, twice(data))[0],
    "scan of a donating jit": lambda step, state, data: fr.scan(fr.jit(step, donate="state"), state, twice(data))[0],
}
LEARNT = {"item": TABLES["item"], "w": DENSE["w"], "rates": torch.tensor([0.2, 0.3, 0.05], dtype=F64)}
LEARNT["weights"] = torch.tensor([0.5, 0.2, 0.3], dtype=F64)
AT = torch.cat([x.flatten() for x in LEARNT.values()])


def twice(data):
    return map_tensors(lambda x: torch.stack([x, x]), data)


def learnt(how, dense=torch.optim.SGD):
    """Return x -> the loss after the steps. One vector x holds a table, dense parameters, a rate for each table and
    weights of examples."""

    def outer(flat):
        parts = flat.split([x.numel() for x in LEARNT.values()])
        item, w, rates, weights = (p.view(x.shape) for p, x in zip(parts, LEARNT.values(), strict=True))
        sparse = fr.optim.by_table({"user": fr.optim.adagrad(lr=rates[0])}, default=fr.optim.sgd(lr=rates[1]))
        step = step_of(sparse, rates[2], weighted_loss, dense)
        state = step.init(fr.Params({**TABLES, "item": item}, {**DENSE, "w": w}))
        return loss_fn(RUNS[how](step, state, (SUPPORT, weights)).params, QUERY)

    return outer


def test_meta_gradients_of_jitted_and_scanned_steps():
    """Derivatives for MAML, learned rates and weights of examples pass through `fr.jit` and `fr.scan`. autograd through
    a donating step raises."""
    need = differences(learnt("eager"), AT)
    for how in ("jit", "scan", "scan of jit"):
        assert_differences(learnt(how), AT, need)
    donating = learnt("scan of a donating jit")
    torch.testing.assert_close(torch.func.grad(donating)(AT), need, rtol=1e-6, atol=1e-8)
    with pytest.raises(TypeError, match=r"a donating call is followed by autograd"):
        donating(AT.clone().requires_grad_())


def test_meta_gradients_are_compiled():
    """jit of all these gradients, which makes an optimizer with a learned rate inside, compiles once and gives the
    values of the gradients: compiled for the rates of SGD, staged for all."""
    rates = torch.tensor([0.3, 0.1], dtype=F64)
    small = lambda x: loss_fn(
        by_step(step_of(fr.optim.sgd(lr=x[0]), x[1], dense=torch.optim.SGD), fr.Params(TABLES, DENSE), SUPPORT, 1),
        QUERY,
    )
    by_rates = torch.func.grad(small)
    torch.testing.assert_close(fr.jit(by_rates)(rates), by_rates(rates), rtol=1e-10, atol=1e-12)
    grad = torch.func.grad(learnt("once"))
    with mock.patch.object(_program, "compile_graph", lambda graph, args: graph):
        compiled = fr.jit(grad)
        for x in (AT, AT * 0.9):
            torch.testing.assert_close(compiled(x), grad(x), rtol=1e-10, atol=1e-12)
    assert compiled.num_compiled() == 1
    for how, cls in (("scan", torch.optim.SGD), ("once", torch.optim.Adam)):
        grad = torch.func.grad(learnt(how, cls))
        # the staged graph itself runs
        with mock.patch.object(_program, "compile_graph", lambda graph, args: graph):
            torch.testing.assert_close(fr.jit(grad)(AT), grad(AT), rtol=1e-10, atol=1e-12)


def test_the_derivative_of_many_tasks():
    """MAML over a batch of tasks by vmap is the mean over single tasks. Over many initial tables, MAML gives the
    gradient of each table."""
    step = step_of(fr.optim.sgd(lr=0.3))
    labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.3, 2.0]], dtype=F64)

    def outer(item, label):
        params = by_step(step, fr.Params({**TABLES, "item": item}, DENSE), fr.Batch(SUPPORT.ids, label))
        return loss_fn(params, QUERY)

    item = TABLES["item"]
    many = torch.func.grad(lambda x: torch.func.vmap(outer, in_dims=(None, 0))(x, labels).mean())(item)
    alone = torch.stack([torch.func.grad(outer)(item, label) for label in labels]).mean(0)
    torch.testing.assert_close(many, alone, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(outer), in_dims=(None, 0))(item, labels).mean(0), alone)
    items = torch.stack([item, 2 * item])
    each = torch.stack([torch.func.grad(outer)(x, labels[0]) for x in items])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(outer), in_dims=(0, None))(items, labels[0]), each)


def test_rates_of_an_ensemble():
    """Steps with vmapped learning rates, including `step.init`, equal the steps of each rate alone."""

    def run(rate):
        return by_step(step_of(fr.optim.adagrad(lr=rate), rate), fr.Params(TABLES, DENSE), SUPPORT)

    rates = torch.tensor([0.1, 0.3], dtype=F64)
    together = torch.func.vmap(run)(rates)
    for i, rate in enumerate(rates):
        torch.testing.assert_close(together.tables["item"][i], run(rate).tables["item"], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(together.dense["w"][i], run(rate).dense["w"], rtol=1e-10, atol=1e-12)
    held = lambda rate: step_of(fr.optim.sgd(lr=0.1), rate, dense=torch.optim.ASGD).init(fr.Params(TABLES, DENSE))
    with pytest.raises(TypeError, match=r"`init` outside of the transform"):
        torch.func.vmap(held)(rates)
