"""With a different placement for each table, lookups and steps equal plain torch in one process.

jit accepts these steps."""

import warnings

import torch
from hypothesis import given, settings
from programs.float_ranks import DENSE, PLAN, STAGED, TABLES, WEIGHTS, ids, loss_fn
from programs.placement_models import models

import funcrec as fr
from funcrec.core._tree import replace
from funcrec.testing import assert_trees_close


def bag_sum(table, feature, bag, weights):
    """Return Σ w · table[id] over the first ids of the bag. Ids outside the table count as zeros. A mean divides by the
    number of all these ids."""
    bag = bag[: feature.max_length]
    total = table.new_zeros(table.shape[1])
    for i, w in zip(bag, weights, strict=False):
        if 0 <= i < table.shape[0]:
            total = total + (w if feature.weighted else 1.0) * table[i]
    return total / max(len(bag), 1) if feature.pooling == "mean" else total


def in_plain_torch(tables, ids, features):
    """Return the pooled features f[B, ΣD], computed bag by bag."""
    bags = ids.to_lists()
    weights = iter([1.0] * ids.capacity if ids.weights is None else ids.weights.tolist())
    own = {k: [[next(weights) for _ in bag] for bag in column] for k, column in bags.items()}
    column = lambda f: [bag_sum(tables[f.table], f, b, w) for b, w in zip(bags[f.key], own[f.key], strict=True)]
    return torch.cat([torch.stack(column(f)) for f in features], 1)


@settings(max_examples=12)
@given(models())
def test_a_step_of_any_plan_is_plain_torchs(model):
    """For any placement of each table, loss, tables and dense parameters after a step of SGD equal those of plain
    torch."""
    mesh, plan, tables, ids, features = model
    tables = {n: t.double() for n, t in tables.items()}
    ids = ids if ids.weights is None else replace(ids, weights=ids.weights.double())
    features = [replace(f, hash=None) for f in features]
    w = torch.linspace(-1, 1, sum(tables[f.table].shape[1] for f in features), dtype=torch.float64)

    def loss_fn(params, ids, look=lambda *args: fr.lookup(*args).values):
        return torch.sin(look(params.tables, ids, features) * params.dense).sum(1).mean()

    options = {"sparse": fr.optim.sgd(0.3), "dense": fr.optim.dense(torch.optim.SGD, lr=0.2)}
    step = fr.train_step(loss_fn, **options, mesh=mesh, plan=plan)
    state, metrics = step(step.init(fr.Params(tables, w)), ids)
    followed = {n: t.clone().requires_grad_() for n, t in tables.items()}
    dense = w.clone().requires_grad_()
    loss = loss_fn(fr.Params(followed, dense), ids, in_plain_torch)
    loss.backward()
    close = {"rtol": 1e-9, "atol": 1e-9}
    assert_trees_close(metrics["loss"], loss.detach(), **close)
    assert_trees_close(state.dense, w - 0.2 * dense.grad, **close)
    moved = {n: t if followed[n].grad is None else t - 0.3 * followed[n].grad for n, t in tables.items()}
    assert_trees_close(fr.gather_tables(state.tables, mesh), moved, **close)


def test_a_step_with_copies_beside_cut_tables_is_staged(interpreted):
    """jit proves that the copies of a replicated table stay equal, although one kernel also updates sharded tables."""
    mesh = fr.Mesh.emulated(x=2)
    options = {"sparse": fr.optim.adagrad(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
    step = fr.train_step(loss_fn, **options, mesh=mesh, plan=PLAN)
    state = step.init(fr.Params(TABLES, DENSE))
    assert_trees_close(fr.jit(step)(state, ids(WEIGHTS)), step(state, ids(WEIGHTS)), rtol=1e-12, atol=1e-12)


def test_a_step_with_a_capacity_is_staged_under_a_mixed_plan():
    """jit also proves equal copies for a step with a capacity, which tests whether the ids of two lookups found a
    place."""
    mesh, plan = fr.Mesh.emulated(x=2, y=2), fr.Plan({"a": fr.row_wise("x"), "b": fr.replicated()})
    features = {k: [fr.FeatureConfig(n, table=n, column="k", pooling=k) for n in "ab"] for k in ("sum", "none")}

    def loss(params, ids):
        rows = fr.lookup_sequence(params.tables, ids, features["none"]).values()
        return sum(x.values.sum() for x in [fr.lookup(params.tables, ids, features["sum"]), *rows])

    options = {"sparse": fr.optim.adagrad(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
    step = fr.train_step(loss, **options, mesh=mesh, plan=plan, capacity=3)
    state = step.init(fr.Params({n: torch.ones(4, 2) for n in "ab"}, {}))
    bags = fr.KeyedJaggedTensor.from_lists({"k": [[0, 1], [3], [2, 2, 1], []]})
    with STAGED:
        staged = fr.jit(step)(state, bags)
    assert_trees_close(staged, step(state, bags), rtol=1e-6, atol=1e-6)


def test_nothing_warns_of_an_emulated_step():
    """A step on an emulated mesh causes no warnings of torch, even with columns that travel together."""
    mesh = fr.Mesh.emulated(x=2)
    torch.set_warn_always(True)
    try:
        options = {
            "sparse": fr.optim.rowwise_adagrad(0.1, max_norm=1.0),
            "dense": fr.optim.dense(torch.optim.SGD, lr=0.1),
        }
        step = fr.train_step(
            loss_fn, **options, mesh=mesh, plan=fr.Plan({**dict(PLAN.placements), "d": fr.column_wise("x")})
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(step.init(fr.Params(TABLES, DENSE)), ids(WEIGHTS))
    finally:
        torch.set_warn_always(False)
