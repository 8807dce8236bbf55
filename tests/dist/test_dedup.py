"""Lookups that send each row once equal lookups in one process, under every placement."""

import pytest
import torch
from hypothesis import given
from programs import training
from programs.as_staged import as_staged
from programs.placement_models import models, sharded
from programs.placement_models import whole as whole_pooled
from programs.sequence_models import mapped, sequence_models, whole

import funcrec as fr
from funcrec.testing import assert_trees_close

ONE_AXIS = ("table_wise", "row_wise", "column_wise", "replicated")
TWO_AXES = (*ONE_AXIS, "table_row_wise", "table_column_wise", "grid")
CASES = [({"x": 2}, k) for k in ONE_AXIS] + [({"x": 2, "y": 2}, k) for k in TWO_AXES[4:]]
BAGS, STEPS = 8, 5
TINY = {"rtol": 1e-6, "atol": 1e-6}


def close(tables):
    """Return the tolerances for the rounding of gradients."""
    return {"rtol": 1e-12, "atol": 1e-12} if all(t.dtype == torch.float64 for t in tables.values()) else TINY


@given(models())
def test_lookups_by_distinct_rows_are_lookups(model):
    """With dedup=True a sharded lookup has the bits of the plain lookup under every placement. Gradients differ only by
    rounding."""
    acts, grads = sharded(model, dedup=True)
    want_acts, want_grads = whole_pooled(model)
    assert_trees_close(acts, want_acts)
    assert_trees_close(grads, want_grads, **close(model[2]))


@given(sequence_models())
def test_sequences_by_distinct_rows_are_sequences(model):
    """With dedup=True sequences also keep their bits, even if pooled features share their tables."""
    got, want = mapped(model, dedup=True), whole(model)
    assert_trees_close(got[0], want[0])
    assert_trees_close(got[1], want[1], **close(model[2]))


# -- training ----------------------------------------------------------------------------------------------------


def counting():
    """Return an SGD optimizer that counts the ids of each row."""
    rule = lambda row, grad, slots, hyper: (row - hyper.lr * grad, {"ids": slots["ids"] + hyper.repeats})
    return fr.optim.row_optimizer(init=lambda t: {"ids": torch.zeros(t.shape[0])}, rule=rule, lr=0.1)


training.OPTIMIZERS["counting"] = counting


def options(mesh, name, kind, capacity):
    plan = training.plan_of(kind, mesh.shape)
    return {**training.optimizers(name), "mesh": mesh, "plan": plan, "capacity": capacity, "dedup": True}


def trained(mesh, name, kind, capacity):
    """Return (tables, slots, dense) after steps that start with a capacity. A step without enough capacity is repeated
    with a larger capacity."""
    make = lambda c: fr.train_step(training.loss_fn, **options(mesh, name, kind, c))
    run, state = fr.retry_overflow(make, capacity=capacity), make(1).init(training.params())
    for i in range(STEPS):
        state, _ = run(state, fr.shard(training.batch(i, BAGS), fr.P(mesh.axis_names), mesh=mesh))
    whole = fr.gather_state(state, mesh)
    return whole.tables, whole.slots, whole.dense


def real(name, axes, kind, capacity):
    return trained(fr.Mesh.distributed(**axes), name, kind, capacity)


def assert_trained(got, want, name):
    for part, a, b in zip(("tables", "slots", "dense"), got, want, strict=False):
        assert_trees_close({part: a}, {part: b}, **({} if (name, part) == ("counting", "slots") else TINY))


@pytest.mark.parametrize("axes, kind", CASES, ids=str)
def test_training_by_distinct_rows_is_training(axes, kind):
    """Steps with dedup=True and a capacity that is too small at first differ from steps in one process only by
    rounding. A rule gets the number of ids of a row."""
    mesh = fr.Mesh.emulated(**axes)
    assert_trained(trained(mesh, "counting", kind, 1), training.alone("counting", mesh.size, STEPS, BAGS), "counting")


@pytest.mark.parametrize("axes, kind, name", [
    ({"x": 2}, "row_wise", "adam"), ({"x": 2}, "column_wise", "counting"),
    ({"x": 2, "y": 2}, "grid", "rowwise_adagrad"),
], ids=str)  # fmt: skip
def test_training_by_distinct_rows_on_ranks_is_training(axes, kind, name, ranks):
    """Training with dedup=True also succeeds on gloo ranks."""
    n = torch.Size(axes.values()).numel()
    for got in ranks(n).run(real, name, axes, kind, 1):
        assert_trained(got, training.alone(name, n, STEPS, BAGS), name)


def test_a_capacity_is_of_distinct_rows():
    """metrics["needed"] is the largest number of distinct rows that one rank requests from another. Each row that
    exceeds the capacity is counted once."""
    mesh, plan = fr.Mesh.emulated(x=2), fr.Plan({"t": fr.table_wise("x", rank=1)})
    features = [fr.FeatureConfig("k", table="t"), fr.FeatureConfig("j", table="t", column="k", pooling="mean")]
    loss = lambda p, ids: fr.lookup(p.tables, ids, features).values.sum()
    kind = {
        "sparse": fr.optim.sgd(1.0),
        "dense": fr.optim.dense(torch.optim.SGD, lr=0.1),
        "mesh": mesh,
        "plan": plan,
        "dedup": True,
    }
    ids = fr.KeyedJaggedTensor.from_lists(
        {"k": [[0, 1, 2, 0, 2, 9, 3], [1, 1, -1]]}
        # 9 and -1 are no rows, so that one owner has 4 rows and the other has 1 row
    )
    for capacity, lost in ((1, 3), (3, 1), (4, 0), (50, 0)):
        step = fr.train_step(loss, **kind, capacity=capacity)
        _, metrics = step(step.init(fr.Params({"t": torch.zeros(4, 1)}, {})), ids)
        assert (int(metrics["overflow"]), int(metrics["needed"])) == (lost, 4)


def compiled(capacity):
    """Return (tables and dense after eager steps, the same after compiled steps, the bytes of each exchange of a
    step)."""
    mesh, out = fr.Mesh.distributed(x=2), []
    step = fr.train_step(training.loss_fn, **options(mesh, "adam", "row_wise", capacity))
    mine = [fr.shard(training.batch(i, BAGS), fr.P("x"), mesh=mesh) for i in range(2)]
    mine = [fr.Batch(x.ids.unpad().pad_to(64), x.label) for x in mine]
    lowered = fr.jit(step, donate=("state",)).lower(step.init(training.params()), mine[0])
    for run in (step, lowered.compile()):
        state = step.init(training.params())
        for own in mine:
            state, _ = run(state, own)
        out.append((fr.gather_tables(state.tables, mesh), state.dense))
    return *out, [x.sent_bytes for x in lowered.exchanges]


def test_a_staged_step_sends_rows_once(ranks):
    """A staged step gives the values of the eager step. It sends blocks of `capacity` rows, whatever the capacity of
    the ids. The blocks have row numbers, counts, vectors and cotangents."""
    # tables a and c have 4 columns, and b has 5
    room, banks = 20, 2
    # the weights and the loss
    rows, weights = [room * 4 * 4, room * 5 * 4], 17 * 6 + 6 + 1
    for eager, fast, sent in ranks(2).run(as_staged, compiled, room, deadline_s=300):
        assert_trees_close(fast, eager, rtol=1e-5, atol=1e-6)
        assert sent == [(2 * room + banks) * 4, *rows, *rows, 2 * 8, weights * 4]
