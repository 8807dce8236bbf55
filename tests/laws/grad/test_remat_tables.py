"""remat around losses that look rows up: row gradients, training, and steps on ranks are those without remat."""

import functools

import pytest
import torch
from programs.as_staged import staged_only

import funcrec as fr
from funcrec.testing import assert_trees_close

grad, jvp, vmap = torch.func.grad, torch.func.jvp, torch.func.vmap
assert_close = functools.partial(assert_trees_close, rtol=1e-10, atol=1e-12)
same = lambda f: f


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


FEATURES = (
    fr.FeatureConfig("a", table="t"),
    fr.FeatureConfig("b", table="t", column="a", pooling="mean"),
    fr.FeatureConfig("m", table="s", column="a", pooling="max"),
)
BAGS = fr.KeyedJaggedTensor.from_lists({"a": [[0, 2], [], [1, 1], [3]]})
TABLES = {"t": drawn(4, 2, seed=4), "s": drawn(4, 1, seed=5)}
PARAMS = fr.Params(TABLES, {"w": drawn(5, seed=6), "v": drawn(3, seed=7)})
LABEL = torch.tensor([1.0, 0.0, 1.0, 0.0]).double()
BATCH = fr.Batch(BAGS, LABEL)
WEIGHTED = fr.FeatureConfig("a", table="t", weighted=True)


def as_argument(wrap):
    def scores(params, ids):
        x = fr.lookup(params.tables, ids, FEATURES).values
        rows = fr.lookup_sequence(params.tables, ids, [fr.FeatureConfig("q", table="s", column="a", pooling="none")])
        return (x @ params.dense["w"]).tanh() + rows["q"].to_padded(2).sum((1, 2))

    return lambda p, b: fr.losses.bce(wrap(scores)(p, b.ids) * p.dense["v"].sum(), b.label)


def as_closure(wrap):
    def loss_fn(p, b):
        scores = lambda w: (fr.lookup(p.tables, b.ids, FEATURES).values @ w).tanh() * p.dense["v"].sum()
        return fr.losses.bce(wrap(scores)(p.dense["w"]) + wrap(scores)(p.dense["w"].sin()), b.label)

    return loss_fn


def whole(wrap):
    return wrap(as_argument(same))


def weights_of_ids(wrap):
    """The weights of ids depend on dense parameters."""

    def scores(tables, ids, w):
        weights = ids.values.double().sin() * w.sum()
        ids = fr.KeyedJaggedTensor(ids.values, ids.offsets, weights, None, ids.keys)
        return fr.lookup(tables, ids, [WEIGHTED]).values.sum(1)

    return lambda p, b: fr.losses.bce(wrap(scores)(p.tables, b.ids, p.dense["w"]), b.label)


def gradient_inside(wrap):
    """The loss has a derivative of its own, by weights of ids."""

    def penalty(p, b):
        total = lambda w: weights_of_ids(wrap)(fr.Params(p.tables, p.dense | {"w": w}), b)
        return grad(total)(p.dense["w"]).square().sum()

    return penalty


def rows_inside(wrap):
    """The wrapped function computes row gradients of its own, and looks up tables of the loss around it."""

    def inner(tables, ids):
        loss_fn = lambda p, ids: fr.lookup(p.tables, ids, FEATURES[:1]).values.square().sum()
        _, grads = fr.value_and_grad(loss_fn)(fr.Params({"t": TABLES["t"] * 2}, {}), ids)
        return grads.tables["t"].to_dense().sum() * fr.lookup(tables, ids, FEATURES).values.sin()

    return lambda p, b: wrap(inner)(p.tables, b.ids).sum() + p.dense["w"].sum()


def inner_of_closures(wrap):
    """An outer function closes over tables, and an inner one takes them as arguments."""
    scores = wrap(lambda tables, ids, w: (fr.lookup(tables, ids, FEATURES).values @ w).tanh())

    def loss_fn(p, b):
        outer = lambda v: scores(p.tables, b.ids, p.dense["w"]) * v.sum()
        return fr.losses.bce(wrap(outer)(p.dense["v"]) + scores(p.tables, b.ids, p.dense["w"].sin()), b.label)

    return loss_fn


OF_TABLES = {
    f.__name__: f
    for f in (as_argument, as_closure, inner_of_closures, whole, weights_of_ids, gradient_inside, rows_inside)
}


def dense_of(out):
    loss, grads = out
    return loss, grads.dense, {n: g.to_dense() for n, g in grads.tables.items()}


@pytest.mark.parametrize("loss", OF_TABLES)
def test_row_gradients(loss):
    """Row gradients are those of the loss itself: alone, as Hessian-vector products, of ensembles, of micro-batches, of
    examples, and in a staged program."""
    own, need = OF_TABLES[loss](fr.remat), OF_TABLES[loss](same)
    assert_close(dense_of(fr.value_and_grad(own)(PARAMS, BATCH)), dense_of(fr.value_and_grad(need)(PARAMS, BATCH)))
    direction = fr.tree.map(torch.cos, PARAMS.dense)

    def along(f):
        of = lambda dense: dense_of(fr.value_and_grad(f)(fr.Params(TABLES, dense), BATCH))
        return jvp(of, (PARAMS.dense,), (direction,))

    assert_close(along(own), along(need))
    many = fr.tree.map(lambda x: torch.stack([x, x.sin()]), PARAMS)
    each = lambda f: vmap(lambda p: dense_of(fr.value_and_grad(f)(p, BATCH)))(many)
    assert_close(each(own), each(need))
    with staged_only():
        staged = fr.jit(fr.value_and_grad(own))(PARAMS, BATCH)
    assert_close(dense_of(staged), dense_of(fr.value_and_grad(need)(PARAMS, BATCH)))
    if loss in ("as_argument", "as_closure", "whole"):
        parts = lambda f: dense_of(fr.accumulate_grads(f, 2)(PARAMS, BATCH))
        assert_close(parts(own), parts(need))
        examples = lambda f: fr.example_norms(fr.per_example_grads(f)(PARAMS, BATCH)[1])
        assert_close(examples(own), examples(need))


def steps(wrap, **how):
    dense = fr.optim.dense(torch.optim.Adam, lr=0.1)
    return fr.train_step(as_closure(wrap), sparse=fr.optim.adagrad(0.1), dense=dense, **how)


@pytest.mark.parametrize("how", [{}, {"micro_batches": 2}], ids=str)
def test_training(how):
    """Steps end with the same state: plain, in micro-batches, donated, and in `scan`."""
    need, own = steps(same, **how), steps(fr.remat, **how)
    start = lambda step: step.init(fr.copy(PARAMS))
    many = fr.tree.map(lambda x: torch.stack([x, x]), BATCH)
    assert_close(own(start(own), BATCH), need(start(need), BATCH))
    assert_close(fr.scan(own, start(own), many)[0], fr.scan(need, start(need), many)[0])
    with staged_only():
        assert_close(fr.jit(own, donate=("state",))(start(own), BATCH), need(start(need), BATCH))


@pytest.mark.parametrize("placement", ["row_wise", "column_wise", "replicated"])
def test_sharded(placement):
    """On an emulated mesh a step over sharded tables ends with the same state."""
    mesh = fr.Mesh.emulated(model=2)
    place = fr.replicated() if placement == "replicated" else getattr(fr, placement)("model")
    plan = fr.Plan({"t": place, "s": fr.replicated()})
    need, own = (steps(wrap, mesh=mesh, plan=plan) for wrap in (same, fr.remat))
    assert_close(own(own.init(fr.copy(PARAMS)), BATCH)[0], need(need.init(fr.copy(PARAMS)), BATCH)[0])


def test_a_function_that_looks_up_less_the_second_time_raises():
    """Another number of lookups in the second run raises."""
    count = []

    def read(p):
        count.append(0)
        return fr.lookup(p.tables, BAGS, FEATURES[:1]).values.sum() if len(count) < 3 else p.dense["w"].sum()

    with pytest.raises(ValueError, match="another number of lookups"):
        fr.value_and_grad(lambda p: fr.remat(read)(p))(PARAMS)
