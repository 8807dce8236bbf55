"""Stale pipelines on real ranks. Each rank compares a pipeline with a plain loop of the same staleness."""

import functools
import operator

import torch

import funcrec as fr
from funcrec.train import stale_of
from programs import piped, training


def alone(name, batches, ranks=1, model=training):
    """Return (tables, dense parameters, losses) of the loop in one process on the batches of all ranks."""
    sparse, dense = training.optimizers(name).values()
    p = model.params(name)
    tables, slots, weights, state, before, losses = (
        p.tables,
        sparse.init(p.tables),
        p.dense,
        dense.init(p.dense),
        p.tables,
        [],
    )
    for step, whole in enumerate(batches):
        parts = [training.part(whole, r, ranks) for r in range(ranks)] if ranks > 1 else [whole]
        share = fr.value_and_grad(lambda p, b: model.loss_fn(p, b) / ranks)
        made = [share(fr.Params(before, weights), b) for b in parts]
        rows = {n: functools.reduce(operator.add, [g.tables[n] for _, g in made]) for n in tables}
        d_dense = {k: functools.reduce(torch.add, [g.dense[k] for _, g in made]) for k in weights}
        before = tables
        tables, slots = sparse.update(rows, slots, tables, step)
        weights, state = dense.update(d_dense, state, weights, step)
        losses.append(functools.reduce(torch.add, [loss for loss, _ in made]))
    return tables, weights, losses


def whole(mesh, state, metrics):
    """Return the results in the form of `alone`."""
    tables = state.tables if mesh is None else fr.gather_tables(state.tables, mesh)
    return tables, state.dense, [m["loss"] for m in metrics]


def loop(step, state, batches, compiled=False):
    """Return the results of a loop in which each batch's lookups read the tables of the previous state."""
    stale, tables, out = stale_of(step).update, state.tables, []
    stale = fr.jit(stale) if compiled else stale
    for batch in batches:
        before, tables = tables, state.tables
        state, metrics = stale(state, before, batch)
        out.append(metrics)
    return state, out


def beside_one_process(axes, plan):
    """Return whether ranks end with the bits of one process, for the small model."""
    mesh = piped.mesh_of(axes)
    step, state = piped.small_step(mesh, plan, exact=True)
    got = piped.run(fr.stale_pipeline(step, mesh=mesh), state, [piped.own(mesh, i) for i in range(4)])
    want = alone("adam", [training.batch(i, piped.BAGS) for i in range(4)], mesh.size, piped)
    return piped.is_same(whole(mesh, *got), want)


def beside_a_loop(axes, plan, count, how):
    """Return (whether states and metrics equal those of the loop, whether they equal those of plain steps, the bytes
    held, threads left)."""
    mesh = piped.mesh_of(axes)
    batches = [piped.own(mesh, i) for i in range(count)]
    step, state = piped.step_of(mesh, plan, **how)
    want, fresh = loop(step, state, batches), piped.loop(step, state, batches)
    stale = fr.stale_pipeline(step, mesh=mesh)
    got = piped.run(stale, state, iter(batches))
    return piped.is_same(got, want), piped.is_same(got, fresh), stale.held_bytes, piped.threads()


def donated():
    """Return (whether a jitted step that donates its state equals a compiled loop, whether a second run does, the
    number of programs, threads left), or None if the first state was not donated. The last batch has another size."""
    mesh, plan = piped.mesh_of({"x": 2}), fr.Plan({"a": fr.row_wise("x")})
    loss = lambda p, b: (fr.lookup(p.tables, b.ids, training.FEATURES[:1]).values @ p.dense).square().mean()
    kind = {"sparse": fr.optim.rowwise_adagrad(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
    batches = [piped.own(mesh, i) for i in range(4)] + [piped.own(mesh, 4, 2, 16)]
    step = fr.train_step(loss, **kind, mesh=mesh, plan=plan)
    state = step.init(fr.Params(fr.init(fr.key(1), [fr.TableConfig("a", 11, 4)]), torch.ones(4)))
    want = loop(step, fr.copy(state), batches, compiled=True)
    again = loop(step, want[0], batches[:3], compiled=True)
    stale = fr.stale_pipeline(fr.jit(step, donate=("state",)), mesh=mesh)
    now, out = piped.run(stale, state, iter(batches))
    first = piped.is_same((now, out), want)
    second = piped.is_same(piped.run(stale, now, batches[:3]), again)
    try:
        state.tables["a"] + 1
    except fr.DonatedError:
        return first, second, len(stale.programs), piped.threads()


def uneven():
    """Return (whether the states equal a loop in which rank 1 gets blank batches, threads left). Rank 1 has three
    batches, rank 0 five."""
    mesh, plan = piped.mesh_of({"x": 2}), piped.plan_of("row_wise")
    count = 5 if mesh.coordinates["x"] == 0 else 3
    (step, state), batches = piped.small_step(mesh, plan), [piped.own(mesh, i) for i in range(5)]
    batches = [fr.Batch(b.ids, b.label, weight=torch.tensor([1.0, 2.0])) for b in batches]
    blank = fr.Batch(piped.no_ids(), torch.zeros(2), weight=torch.zeros(2))
    want = loop(step, state, [b if i < count else blank for i, b in enumerate(batches)])
    got = piped.run(fr.stale_pipeline(step, mesh=mesh), state, batches[:count])
    return piped.is_same(got, want), piped.threads()


def ended(how):
    """Run until both ranks leave after the second batch, or until the third batch raises on rank 1. Then run three
    batches.

    Return (the steps of the first run, the first run's error, whether the second run equals the loop, threads left)."""
    mesh, plan = piped.mesh_of({"x": 2}), piped.plan_of("row_wise")
    step, state = piped.small_step(mesh, plan)
    stale, batches, seen, told = fr.stale_pipeline(step, mesh=mesh), [piped.own(mesh, i) for i in range(5)], 0, ""

    def loader():
        for i, batch in enumerate(batches):
            if i == 2 and how == "raises" and mesh.coordinates["x"] == 1:
                raise LookupError("no such file")
            yield batch

    try:
        for now, _ in stale.run(state, loader()):
            seen += 1
            state = now
            if seen == 2 and how == "left":
                break
    except (LookupError, RuntimeError) as error:
        told = type(error).__name__
    got = piped.run(stale, state, batches[:3])
    return seen, told, piped.is_same(got, loop(step, state, batches[:3])), piped.threads()
