"""Column-wise tables, updated in place, equal updates of joined rows and updates in one process.

update(columns of a row, the row's gradient)  =  columns of update(row, the row's gradient)
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import training
from programs.as_staged import as_staged
from programs.placement_models import models
from programs.sequence_models import loss as loss_with_sequences

import funcrec as fr
from funcrec.core._tree import replace, tree_map
from funcrec.sharding import _update
from funcrec.sharding.placement._layout import layout_of
from funcrec.testing import assert_trees_close

KINDS = ("column_wise", "column_wise", "table_column_wise", "grid", "row_wise")
OPTIMIZERS = {
    "rowwise_adagrad": lambda: fr.optim.rowwise_adagrad(lr=0.1),
    "decoupled": lambda: fr.optim.rowwise_adagrad(lr=0.1, weight_decay=0.1, decay="decoupled"),
    "counter": lambda: fr.optim.rowwise_adagrad_counter(lr=0.1, half_life=2.0),
    "partial": lambda: fr.optim.partial_rowwise_adam(lr=0.1, weight_decay=0.1),
    "by_table": lambda: fr.optim.by_table({"a": fr.optim.rowwise_adagrad(lr=0.1)}, default=fr.optim.sgd(0.1)),
    "frozen": lambda: fr.optim.freeze(fr.optim.adagrad(lr=0.1), tables=["a"]),
}
OPTIONS = [
    {"exact": True},
    {},
    {"dedup": True},
    {"capacity": 3},
    {"dedup": True, "capacity": 2},
    {"codec": fr.Codec("bfloat16", "float16")},
]
STEPS = 2


@st.composite
def column_models(draw):
    """Return random models of `models` with column-wise tables, some of them with sequence features."""
    mesh, plan, tables, ids, features = draw(models(KINDS))
    turned = [replace(f, pooling="none") if draw(st.integers(0, 2)) == 0 else f for f in features]
    return mesh, plan, tables, ids, turned


def loss(tables, ids, features):
    """Return a sum that weights every element differently, with sequences or without."""
    if any(f.pooling == "none" for f in features):
        return loss_with_sequences(tables, ids, features)
    x = fr.lookup(tables, ids, features).values
    return (x * (torch.arange(x.numel(), dtype=x.dtype) * 0.37 + 1).sin().reshape(x.shape)).sum()


def trained(model, name, **options):
    """Return (tables, slots) after some steps on the same bags."""
    mesh, plan, tables, ids, features = model
    loss_fn = lambda params, ids: loss(params.tables, ids, features)
    dense = fr.optim.dense(torch.optim.SGD, lr=0.0)
    step = fr.train_step(loss_fn, sparse=OPTIMIZERS[name](), dense=dense, mesh=mesh, plan=plan, **options)
    state = step.init(fr.Params(tables, torch.zeros(1)))
    for _ in range(STEPS):
        state, _ = step(state, fr.shard(ids, fr.P(mesh.axis_names), mesh=mesh))
    whole = fr.gather_state(state, mesh)
    return whole.tables, whole.slots


def alone(model, name):
    """Return the results of `trained` from one process that adds the gradients of the bags of all ranks."""
    mesh, _, tables, ids, features = model
    sparse, stacked = OPTIMIZERS[name](), fr.mesh._parts._stack_bags(ids, mesh.size)
    slots = sparse.init(tables)
    for step in range(STEPS):
        total = None
        for r in range(mesh.size):
            mine = tree_map(lambda x, r=r: x[r], stacked)
            one = lambda p, ids: loss(p.tables, ids, features) / mesh.size
            grads = fr.value_and_grad(one)(fr.Params(tables, {}), mine)[1].tables
            total = grads if total is None else {n: total[n] + g for n, g in grads.items()}
        tables, slots = sparse.update(total, slots, tables, step)
    return tables, slots


@settings(max_examples=20)
@given(column_models(), st.sampled_from(list(OPTIMIZERS)), st.sampled_from(OPTIONS))
def test_columns_in_place_are_rows_put_together(model, name, options):
    """Owners that update their columns from whole gradients give the bits of owners that receive whole rows. This holds
    for pooled features and sequences, and for every exchange. With exact=True both give the bits of one process."""
    got = trained(model, name, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_update, "tables_in_place", lambda sparse, columns, layout: [])
        assert_trees_close(got, trained(model, name, **options))
    if options.get("exact"):
        assert_trees_close(got, alone(model, name))


def test_which_tables_are_updated_in_place():
    """Elementwise optimizers update all column-wise tables in place. Gradient-wise optimizers do so if no rank has two
    blocks of a table in one bank. The rows of other tables are joined."""
    mesh, shapes = fr.Mesh.emulated(x=2), {"a": (5, 8), "b": (5, 9), "c": (5, 4)}
    plan = fr.Plan({"a": fr.column_wise("x"), "b": fr.column_wise("x", ranks=(0, 0, 1)), "c": fr.row_wise("x")})
    layout = layout_of("", shapes, dict.fromkeys(shapes, torch.float32), plan, mesh)
    in_place = lambda sparse: _update.tables_in_place(sparse, _update.column_banks(sparse, layout), layout)
    elementwise = fr.optim.freeze(fr.optim.adagrad(), tables=["a"])
    assert in_place(elementwise) == ["a", "b"] and _update.whole_banks(elementwise, layout) == ()
    gradient_wise = fr.optim.rowwise_adagrad()
    assert in_place(gradient_wise) == ["a"] and _update.whole_banks(gradient_wise, layout) == ("a[0:4]",)
    for sparse in (fr.optim.lamb(), fr.optim.rowwise_adagrad(max_norm=1.0), fr.optim.rowwise_adagrad(weight_decay=0.1)):
        assert in_place(sparse) == [] and _update.whole_banks(sparse, layout) == ()


@pytest.mark.parametrize("kind", ["column_wise", "grid"])
def test_frozen_and_named_tables_keep_their_names(kind):
    """Column-wise tables that an optimizer knows by name train as in one process. So do tables that no feature
    reads."""
    mesh = fr.Mesh.emulated(x=2, y=2)
    sparse = fr.optim.by_table(
        {"unread": fr.optim.partial_rowwise_adam(), "a": fr.optim.rowwise_adagrad(0.1)}, default=fr.optim.sgd(0.1)
    )
    axes = {"column_wise": lambda: fr.column_wise(("x", "y")), "grid": lambda: fr.grid(("x", "y"))}[kind]
    params = training.params()
    tables = {**params.tables, "unread": torch.ones(3, 6)}
    options = {"sparse": sparse, "dense": fr.optim.dense(torch.optim.SGD, lr=0.0)}
    on_mesh = fr.train_step(training.loss_fn, **options, mesh=mesh, plan=fr.Plan({n: axes() for n in tables}))
    plain = fr.train_step(training.loss_fn, **options)
    got, want = (s.init(fr.Params(tables, params.dense)) for s in (on_mesh, plain))
    for i in range(3):
        got, want = on_mesh(got, training.batch(i, 8))[0], plain(want, training.batch(i, 8))[0]
    got = fr.gather_state(got, mesh)
    assert_trees_close((got.tables, got.slots), (want.tables, want.slots), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["column_wise", "table_column_wise", "grid"])
def test_columns_in_place_change_no_bit_on_ranks(kind, ranks):
    """20 steps on 2 x 2 ranks give the bits of one process. The optimizer has a mean per element and one number per
    row."""
    axes = {"x": 2, "y": 2}
    want = training.alone("partial", 4, 20, 8)
    for got in ranks(4).run(training.real, "partial", axes, training.plan_of(kind, axes), 20, 8, True):
        assert_trees_close(got[:3], want[:3])


def test_staged_columns_in_place_are_columns_in_place(ranks):
    """jit with donation changes a step only by the rounding of dense parts. The step updates columns in place after the
    staged graph."""
    axes = {"x": 2}
    want = training.alone("partial", 2, 5, 4)
    plan = training.plan_of("column_wise", axes)
    got = ranks(2).run(as_staged, training.real, "partial", axes, plan, 5, 4, True, True, deadline_s=300)[0]
    assert_trees_close(got[:3], want[:3], rtol=1e-5, atol=1e-6)
