"""Steps with a capacity. A batch that does not fit changes nothing and is counted.

After a rerun with a larger capacity, the batch trains."""

import pytest
import torch
from programs import training
from programs.as_staged import as_staged
from programs.overflow import assert_unchanged, overflown, own, real_overflown, skewed, step_of

import funcrec as fr
from funcrec.testing import assert_trees_close

ONE_AXIS = ("table_wise", "row_wise", "column_wise", "replicated")
TWO_AXES = (*ONE_AXIS, "table_row_wise", "table_column_wise", "grid")
CASES = [({"x": 2}, k) for k in ONE_AXIS] + [({"x": 2, "y": 2}, k) for k in TWO_AXES[4:]]


@pytest.mark.parametrize("axes, kind", [c for c in CASES if c[1] != "replicated"], ids=str)
def test_a_batch_that_does_not_fit_changes_no_bit(axes, kind):
    """A step with too small a capacity returns the given state bit for bit, the number of ids without a place, and a
    NaN loss."""
    assert_unchanged(*overflown(fr.Mesh.emulated(**axes), kind), kind)


@pytest.mark.parametrize("kind, compiled", [("row_wise", False), ("column_wise", False), ("row_wise", True)])
def test_a_batch_that_does_not_fit_changes_no_bit_on_ranks(kind, compiled, ranks):
    """On gloo ranks, too, a batch that does not fit changes no bit, staged and donated."""
    for got in ranks(2).run(as_staged, real_overflown, {"x": 2}, kind, compiled, deadline_s=300):
        assert_unchanged(*got, kind)


def test_the_overflow_is_the_ids_without_a_place():
    """metrics["overflow"] counts, over all ranks, the ids that exceed the capacity of each pair of sender and owner."""
    mesh = fr.Mesh.emulated(x=2)
    plan = fr.Plan({"t": fr.table_wise("x", rank=1)})
    loss = lambda p, ids: fr.lookup(p.tables, ids, [fr.FeatureConfig("k", table="t")]).values.sum()
    kind = {"sparse": fr.optim.sgd(1.0), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1), "mesh": mesh, "plan": plan}
    # 9 and -1 are no rows, so that one owner gets 4 ids and the other gets 1 id
    ids = fr.KeyedJaggedTensor.from_lists({"k": [[0, 1, 2, 3, 9], [1, -1]]})
    for capacity, lost in ((1, 3), (2, 2), (4, 0), (5, 0)):
        step = fr.train_step(loss, **kind, capacity=capacity)
        _, metrics = step(step.init(fr.Params({"t": torch.zeros(4, 1)}, {})), ids)
        assert (int(metrics["overflow"]), int(metrics["needed"])) == (lost, 4)


@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_copies_need_no_capacity(pooling):
    """Ids of replicated tables are not sent. Only other tables need capacity. Without other tables the need is 0."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[0] * 50] * 4, "u": [[0], [1], [2], [3]]})
    features = [fr.FeatureConfig(n, table=n, pooling=pooling) for n in ("a", "u")]

    def loss(params, ids):
        if pooling == "sum":
            return fr.lookup(params.tables, ids, features).values.sum()
        return sum(x.values.sum() for x in fr.lookup_sequence(params.tables, ids, features).values())

    for second, needed in ((fr.row_wise("x"), 2), (fr.replicated(), 0)):
        options = {"mesh": fr.Mesh.emulated(x=2), "plan": fr.Plan({"a": fr.replicated(), "u": second}), "capacity": 2}
        step = fr.train_step(loss, sparse=fr.optim.sgd(1.0), dense=fr.optim.dense(torch.optim.SGD, lr=0.1), **options)
        state = step.init(fr.Params({"a": torch.ones(3, 2), "u": torch.ones(4, 2)}, {}))
        metrics = step(state, ids)[1]
        assert (int(metrics["overflow"]), int(metrics["needed"])) == (0, needed)


@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_ids_without_a_place_are_counted_whatever_is_trained(pooling):
    """A lookup's overflow belongs to the exchange, not to a table. The overflow is counted even if the lookup's first
    table is constant in the loss, for bags and sequences."""
    mesh = fr.Mesh.emulated(x=2)
    tables = {"a": torch.ones(4, 1), "b": torch.ones(4, 2)}
    features = [fr.FeatureConfig(n, table=n, column="k", pooling=pooling) for n in tables]
    options = {"sparse": fr.optim.sgd(1.0), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1), "mesh": mesh}
    plan, ids = (
        fr.Plan(dict.fromkeys(tables, fr.row_wise("x"))),
        fr.KeyedJaggedTensor.from_lists({"k": [[0, 1, 0], [1]]}),
    )

    def loss(params, ids):
        constant = {n: torch.ones(2, d) for d, n in enumerate(tables, 1) if n in frozen}
        held = fr.core._tree.replace(params.tables, banks={**params.tables.banks, **constant})
        if pooling == "none":
            return sum(x.values.sum() for x in fr.lookup_sequence(held, ids, features).values())
        return fr.lookup(held, ids, features).values.sum()

    for frozen in ((), ("a",), ("b",)):
        step = fr.train_step(loss, plan=plan, **options, capacity=2)
        state, metrics = step(step.init(fr.Params(tables, {})), ids)
        assert (int(metrics["overflow"]), int(metrics["needed"])) == (4, 6), frozen
        assert_trees_close(fr.gather_tables(state.tables, mesh), tables)


def shared_out(pooling, capacity, wrap=lambda f: f, kept=lambda acts: acts, **how):
    """Return (acts of each of two ranks, their losses, {bank: the bank's gradient}). Rank 0 has 4 ids of its own rows,
    rank 1 has 2 ids."""
    mesh, tables = fr.Mesh.emulated(x=2), {"a": torch.ones(4, 1), "b": torch.ones(4, 2)}
    features = [fr.FeatureConfig(n, table=n, column="k", pooling=pooling) for n in tables]
    held = fr.shard_tables(tables, fr.Plan(dict.fromkeys(tables, fr.row_wise("x"))), mesh, capacity=capacity, **how)
    ids = fr.KeyedJaggedTensor.from_lists({"k": [[0], [1], [], [3]]}).pad_to(8)

    def loss_fn(params, ids):
        look = fr.lookup_sequence if pooling == "none" else fr.lookup
        out = look(params.tables, ids, features)
        acts = torch.cat([out[n].values for n in tables], 1) if pooling == "none" else out.values
        return kept(acts[:2]).sum(), acts

    def f(tables, ids):
        (loss, acts), grads = fr.value_and_grad(loss_fn, has_aux=True)(fr.Params(tables, {}), ids)
        bare = loss_fn(fr.Params(tables, {}), ids)[1]
        of_ranks = {n: g.to_dense() for n, g in grads.tables.items()}
        return acts[None], bare[None], loss[None], of_ranks

    specs = {"in_specs": (held.specs(), fr.P("x")), "out_specs": fr.P("x")}
    return wrap(fr.shard_map(f, mesh=mesh, **specs))(held, ids)


@pytest.mark.parametrize("pooling", ["sum", "none"])
@pytest.mark.parametrize("how", [{}, {"exact": True}, {"dedup": True}, {"codec": fr.Codec("int8", "int8")}], ids=str)
def test_what_lost_an_id_is_nan(pooling, how, interpreted):
    """If ids find no place, the lookup on that rank is NaN, and so are the loss and the gradients of the rank's other
    ids. This holds by value_and_grad, plainly, and in a jitted function. With enough capacity the bits equal those
    without capacity."""
    whole = shared_out(pooling, None, **how)
    assert_trees_close(shared_out(pooling, 4, **how), whole)
    for wrap in (lambda f: f, fr.jit) if how == {} and pooling == "sum" else (lambda f: f,):
        acts, bare, losses, grads = shared_out(pooling, 3, wrap, **how)
        for x, room in ((acts, whole[0]), (bare, whole[1]), (losses, whole[2])):
            assert x[0].isnan().all() and not room.isnan().any()
            assert_trees_close(x[1], room[1])
        # row 1 of b was not sent
        (a, b), (_, whole_b) = grads.values(), whole[3].values()
        assert a[:2].isnan().all() and b[0].isnan().all()
        assert_trees_close(b[2:], whole_b[2:])


def test_checked_tells_the_capacity_that_would_do():
    """On an emulated mesh, checked(value_and_grad) raises for ids without a place, with a sufficient capacity. Without
    such ids the checked function equals value_and_grad, and raises for a loss that is not finite. A checked step counts
    such ids as usual."""
    # a loss that removes NaN is also reported
    for kept in (torch.clone, torch.nan_to_num):
        with pytest.raises(fr.CheckError, match=r"1 ids without a place.*member 0(.|\n)*at least 4"):
            shared_out("sum", 3, fr.checked, kept)
    with pytest.raises(fr.CheckError, match="the loss is not finite"):
        shared_out("sum", 4, fr.checked, lambda acts: acts * torch.nan)
    assert_trees_close(shared_out("sum", 4, fr.checked), shared_out("sum", None))
    assert_unchanged(*overflown(fr.Mesh.emulated(x=2), "row_wise", fr.checked), "row_wise")


@pytest.mark.parametrize("pooling", ["sum", "max", "none"])
def test_a_checked_lookup_tells_the_ids_without_a_place(pooling):
    """A lookup of any pooling that nobody differentiates raises under `checked`, too."""
    mesh, feature = fr.Mesh.emulated(x=2), fr.FeatureConfig("k", table="a", pooling=pooling)
    held = fr.shard_tables({"a": torch.ones(4, 1)}, fr.Plan({"a": fr.row_wise("x")}), mesh, capacity=1)
    look = fr.lookup_sequence if pooling == "none" else fr.lookup
    of_ranks = fr.shard_map(
        lambda tables, ids: look(tables, ids, [feature])["k"], mesh=mesh, in_specs=(held.specs(), fr.P("x")),
        out_specs=fr.P("x"),
    )  # fmt: skip
    with pytest.raises(fr.CheckError, match=r"1 ids without a place.*member 0(.|\n)*at least 2"):
        fr.checked(of_ranks)(held, fr.KeyedJaggedTensor.from_lists({"k": [[0, 1], [3]]}))


def retried(mesh, kind, capacity, steps=4):
    """Return ([the state after each step], the capacities of the steps that were made)."""
    made = []
    run = fr.retry_overflow(lambda c: made.append(c) or step_of(mesh, kind, c), capacity=capacity, steps=2)
    state, out = step_of(mesh, kind, 1).init(training.params()), []
    for i in range(steps):
        state, _ = run(state, own((skewed if i % 2 else training.batch)(i, 8), mesh))
        out.append(state)
    return out, made


def unbounded(mesh, kind, steps=4):
    step = step_of(mesh, kind, None)
    state, out = step.init(training.params()), []
    for i in range(steps):
        state, _ = step(state, own((skewed if i % 2 else training.batch)(i, 8), mesh))
        out.append(state)
    return out


def real_pair(axes, kind, capacity):
    mesh = fr.Mesh.distributed(**axes)
    return retried(mesh, kind, capacity), unbounded(mesh, kind)


@pytest.mark.parametrize(
    "axes, kind, capacity", [*((*c, 1) for c in CASES), ({"x": 2}, "row_wise", "measure")], ids=str
)
def test_retried_training_is_training(axes, kind, capacity):
    """Training that starts with a small or a measured capacity on skewed batches gives the bits of training with enough
    capacity."""
    mesh = fr.Mesh.emulated(**axes)
    got, made = retried(mesh, kind, capacity)
    assert_trees_close(got, unbounded(mesh, kind))
    assert kind == "replicated" or len(made) > 1


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_retried_training_is_training_on_ranks(kind, ranks):
    """On gloo ranks, retried training also has these bits. The ranks agree when to run a step again."""
    for (got, made), want in ranks(2).run(real_pair, {"x": 2}, kind, 1):
        assert_trees_close(got, want)
        assert len(made) > 1


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_what_waits_stays_where_ids_find_no_place(kind):
    """If the last step of an accumulation does not fit, it applies nothing and keeps the waiting gradients to the bit.
    With a larger capacity the step updates."""
    before, after, metrics, wide = overflown(fr.Mesh.emulated(x=2), kind, name="accumulate rows")
    assert_unchanged(before, after, metrics, wide, kind)
    waits = lambda state: [int((own["pending_rows"] >= 0).sum()) for own in state.slots.values()]
    assert all(waits(after)) and not any(waits(wide[0]))
    moved = [(a != b).any() for a, b in zip(wide[0].tables.values(), before.tables.values(), strict=True)]
    assert all(moved)
