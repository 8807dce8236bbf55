"""Stochastic rounding under any plan equals stochastic rounding in one process.

bits of an element  =  a function of (key, table, row of the table, column of the table)
"""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from programs import training
from programs.placement_models import models

import funcrec as fr
from funcrec.testing import assert_trees_close

RULES = {
    "sgd": lambda: fr.optim.sgd(lr=0.1),
    "adam": lambda: fr.optim.adam(lr=0.1),
    "by the row's gradient": lambda: fr.optim.rowwise_adagrad(lr=0.1),
    "by whole rows": lambda: fr.optim.rowwise_adagrad(lr=0.1, max_norm=1.0),
    "by names": lambda: fr.optim.by_table({"b": fr.optim.adam(lr=0.1)}, default=fr.optim.sgd(lr=0.1)),
    "clipped": lambda: fr.optim.clip(fr.optim.sgd(lr=0.1), max_value=0.5),
    "by the norm of all rows": lambda: fr.optim.clip(fr.optim.sgd(lr=0.1), max_norm=0.5),
}
WHOLE_ROWS = ("row_wise", "table_wise", "table_row_wise", "replicated")
HALF = (torch.bfloat16, torch.float16)
STEPS = 2


def loss(params, ids, features):
    """Return a sum that weights every element differently. Compiled or not, the gradient of the sum is the same."""
    x = fr.lookup(params.tables, ids, features).values
    return (x.float() * (torch.arange(x.numel()).reshape(x.shape) % 7 - 2.75)).sum()


def trained(model, name, compiled=False):
    """Return (the mesh's tables, the tables of one process that adds the ranks' gradients), after some steps on the
    same bags."""
    mesh, plan, tables, ids, features = model
    sparse = fr.optim.stochastic_rounding(RULES[name](), key=fr.key(3))
    step = fr.train_step(
        lambda p, b: loss(p, b, features), sparse=sparse, dense=fr.optim.dense(torch.optim.SGD, lr=0.0), mesh=mesh,
        plan=plan, exact=True,
    )  # fmt: skip
    state, slots = step.init(fr.Params(tables, torch.zeros(1))), sparse.init(tables)
    step = fr.jit(step, donate=("state",)) if compiled else step
    stacked = fr.mesh._parts._stack_bags(ids, mesh.size)
    for i in range(STEPS):
        state, _ = step(state, fr.shard(ids, fr.P(mesh.axis_names), mesh=mesh))
        total = None
        for r in range(mesh.size):
            mine = fr.tree.map(lambda x, r=r: x[r], stacked)
            one = lambda p, b: loss(p, b, features) / mesh.size
            grads = fr.value_and_grad(one)(fr.Params(tables, {}), mine)[1].tables
            total = grads if total is None else {n: total[n] + g for n, g in grads.items()}
        tables, slots = sparse.update(total, slots, tables, i)
    return fr.gather_state(state, mesh).tables, tables


@settings(max_examples=25)
@given(models(), st.sampled_from(list(RULES)), st.sampled_from(HALF))
def test_random_rounding_is_the_same_under_every_plan(model, name, dtype):
    """16-bit tables, rounded at random on a mesh under any plan, have the bits of one process. So do 32-bit tables
    whose gradients are clipped by the norm of all rows, under any plan of whole rows."""
    mesh, plan, tables, ids, features = model
    assume(name != "by names" or "b" in tables)
    if name == "by the norm of all rows":
        assume(all(p.kind in WHOLE_ROWS for _, p in plan.placements))
        dtype = torch.float32
    tables = {n: t.to(dtype) for n, t in tables.items()}
    assert_trees_close(*trained((mesh, plan, tables, ids, features), name))


PLACEMENTS = {
    "a": fr.column_wise("x", ranks=(0, 1, 0)),
    "b": fr.row_wise("x"),
    "c": fr.row_wise("x"),
    "d": fr.table_wise("x", rank=1),
}


def odd_model(names="abcd"):
    """Return a model with tables of one width that share a bank, columns that start anywhere, and two blocks of one
    table on a rank."""
    mesh, shapes = fr.Mesh.emulated(x=2), {"a": (9, 21), "b": (7, 5), "c": (6, 5), "d": (5, 5)}
    shapes = {n: shapes[n] for n in names}
    tables = fr.init(fr.key(1), [fr.TableConfig(n, *s, dtype=torch.bfloat16) for n, s in shapes.items()])
    ids = fr.KeyedJaggedTensor.from_lists({"u": [[0, 1, 4], [2, 2, 3], [5], [1, 0, 4]]}, dtype=torch.int64)
    return (
        mesh,
        fr.Plan({n: PLACEMENTS[n] for n in names}),
        tables,
        ids,
        [fr.FeatureConfig(n, table=n, column="u") for n in shapes],
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_columns_that_begin_anywhere_and_banks_of_several_tables(compiled):
    """Three blocks of a row, two of them in one rank's bank, and three tables in one bank are rounded as in one
    process. So are the tables of a compiled donated step."""
    for name in ("adam", "by the row's gradient") if not compiled else ("by the row's gradient",):
        assert_trees_close(*trained(odd_model("ab" if compiled else "abcd"), name, compiled))


def test_ranks_round_as_one_process(ranks):
    """On two real ranks, 16-bit tables equal those of one process. The columns of each rank come with one number per
    row."""
    axes = {"x": 2}
    want = training.alone("rounded", 2, 4, 8)
    for got in ranks(2).run(training.real, "rounded", axes, training.plan_of("column_wise", axes), 4, 8, True):
        assert_trees_close(got[:2], want[:2])
