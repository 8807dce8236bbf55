"""Logged training of a small model and copies of its earlier states, in one process and on ranks."""

import pytest
import torch

import funcrec as fr
from funcrec.compile import _program
from funcrec.optim._builtin import BUILTIN
from funcrec.serve.freshness._publish import gathered
from programs import training
from programs.moving import bits
from programs.overflow import own, skewed

O = fr.optim  # noqa: E741
USER = training.OPTIMIZERS["user"]
RULES = {n: getattr(O, n) for n in BUILTIN} | {
    "rowwise_adagrad_counter": lambda lr: O.rowwise_adagrad_counter(lr, half_life=3),
    "user": lambda lr: USER(),
}
OPTIMIZERS = {n: (lambda make=make: make(lr=0.05)) for n, make in RULES.items()} | {
    "by_table": lambda: O.by_table({"b": O.rowwise_adagrad(lr=0.1)}, default=O.momentum(lr=0.1)),
    "clip": lambda: O.clip(O.adam(lr=0.01), max_norm=0.1),
    "freeze": lambda: O.freeze(O.adam(lr=0.01), tables=["b"]),
    "schedule": lambda: O.adam(lr=O.schedule([O.Stage("linear", 7, value=0.1)], lr=0.1)),
    "stochastic_rounding": lambda: O.stochastic_rounding(O.adam(lr=0.01), key=fr.key(5)),
    "accumulate": lambda: O.accumulate(O.adam(lr=0.01), every=3, capacity=96),
    "by_table, accumulate": lambda: O.by_table(
        {"a": O.accumulate(O.rowwise_adagrad(lr=0.1), every=2, capacity=96)}, default=O.adagrad(lr=0.1)
    ),
}


def plain(name, dense=torch.optim.Adam, **where):
    dense = fr.optim.dense(dense, lr=0.01)
    return fr.train_step(training.loss_fn, sparse=OPTIMIZERS[name](), dense=dense, **where)


def logged(name, *, steps=4, rows=16, **options):
    return fr.logged(plain(name, **options), steps=steps, rows=rows)


def params(dtype=torch.float32):
    made = training.params()
    return fr.Params({n: t.to(dtype) for n, t in made.tables.items()}, made.dense)


def states(step, run, batches):
    """Return (copies of the states before each batch and of the last state, the last value)."""
    before = []
    for batch in batches:
        before.append(fr.copy(run.state))
        run, _ = step(run, batch)
    return [*before, fr.copy(run.state)], run


def sharded(name, axes, kind, compiled=False, is_real=True):
    """Return ([(the state after a rewind by k, the earlier state), ...] on a mesh, the error of a rewind by one more
    step). When compiled, the calls donate, and so does a last rewind. Staged graphs run uncompiled."""
    mesh = (fr.Mesh.distributed if is_real else fr.Mesh.emulated)(**axes)
    step = logged(name, steps=3, mesh=mesh, plan=training.plan_of(kind, axes))
    batches = [own(training.batch(i, 8), mesh) for i in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_program, "compile_graph", lambda graph, arguments: graph)
        before, run = states(fr.jit(step, donate=("state",)) if compiled else step, step.init(params()), batches)
        pairs = [(bits(fr.copy(fr.rewind(run, k, mesh=mesh).state)), bits(before[4 - k])) for k in range(4)]
        try:
            said = str(fr.rewind(run, 4, mesh=mesh))
        except ValueError as error:
            said = str(error)
        if compiled:
            pairs.append((bits(fr.rewind(run, 2, mesh=mesh, donate=True).state), bits(before[2])))
    return pairs, said


def crowded(axes, is_real=True):
    """Return, on every rank, (the error of a rewind, the state rewound over the first step, the initial state). The log
    of one rank overflows with rows."""
    mesh = (fr.Mesh.distributed if is_real else fr.Mesh.emulated)(**axes)
    step = logged("adam", rows=1, mesh=mesh, plan=training.plan_of("row_wise", axes))
    run = step.init(params())
    run, _ = step(run, own(skewed(0, 8), mesh))  # all ids are row 0, which rank 0 has
    one = fr.copy(run)
    values = torch.where(torch.arange(64) % 2 == 0, 0, 1)
    batch = skewed(1, 8)
    two_rows = fr.core._tree.replace(batch.ids, values=values[: batch.ids.values.shape[0]])
    run, _ = step(run, own(fr.Batch(two_rows, batch.label), mesh))
    try:
        said = str(fr.rewind(run, 1, mesh=mesh))
    except ValueError as error:
        said = str(error)
    return said, bits(fr.rewind(one, 1, mesh=mesh).state), bits(step.init(params()).state)


def changed(axes, kind):
    """Return (whole tables after one step and after three, the Delta between these states as this rank has it, and as
    `publish` has it)."""
    mesh = fr.Mesh.distributed(**axes)
    step = logged("adam", mesh=mesh, plan=training.plan_of(kind, axes))
    run = step.init(params())
    for i in range(3):
        run, _ = step(run, own(training.batch(i, 8), mesh))
        if i == 0:
            then = fr.gather_tables(fr.copy(run.state.tables), mesh)
    own_rows = fr.delta(run, 1, mesh=mesh)
    return then, fr.gather_tables(run.state.tables, mesh), own_rows, gathered(own_rows, run.state.tables, mesh)
