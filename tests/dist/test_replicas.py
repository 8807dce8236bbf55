"""Replicas of tables that train apart and are synchronized, emulated and on gloo ranks.

The laws compare them with a single group and with the synchronous plan."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import apart, training
from programs.apart import copy_of, leaves, plan_of, trained
from programs.as_staged import as_staged
from programs.moving import bits

import funcrec as fr
from funcrec.core._tree import map_tensors
from funcrec.testing import RankError, assert_trees_close

ONE_AXIS = ("table_wise", "row_wise", "column_wise", "replicated")
TWO_AXES = (*ONE_AXIS, "table_row_wise", "table_column_wise", "grid")
MESHES = [
    ({"r": 2, "x": 2}, ("r",)),
    ({"x": 2, "r": 3}, ("r",)),
    ({"r": 2, "x": 1, "s": 2}, ("s", "r")),
    ({"x": 2, "r": 2, "y": 2}, ("r",)),
]
NAMES = ("adam", "rowwise_adagrad", "partial", "by_table", "lamb", "user", "counter", "sgd")


@st.composite
def plans(draw):
    """Return random (axes, replicas, kind). Shrinks to table-wise, two copies on two ranks each."""
    axes, replicas = draw(st.sampled_from(MESHES))
    return axes, replicas, draw(st.sampled_from(TWO_AXES if len(axes) - len(replicas) > 1 else ONE_AXIS))


def batches(mesh, steps):
    return [training.batch(i, 2 * mesh.size) for i in range(steps)]


@settings(max_examples=6)
@given(plans(), st.sampled_from(NAMES), st.booleans())
def test_a_group_trains_as_if_it_were_alone(where, name, exact):
    """Between synchronizations, each copy's tables and slots have the bits of its group alone. The group's mesh gets
    the batches of the group."""
    axes, replicas, kind = where
    mesh, plan = fr.Mesh.emulated(**axes), plan_of(kind, axes, replicas)
    options = {"loss_fn": apart.plain_loss, "exact": exact}
    state, _ = trained(mesh, plan, batches(mesh, 3), apart.optimizers(name), **options)
    alone = fr.Mesh.emulated(**{a: n for a, n in axes.items() if a not in replicas})
    n = mesh.size // alone.size
    assert state.tables.layout.num_copies == n
    for copy in range(n):
        own = [apart.group_bags(b, axes, replicas, copy) for b in batches(mesh, 3)]
        want, _ = trained(alone, plan_of(kind, alone.shape, ()), own, apart.optimizers(name), **options)
        assert_trees_close(bits(copy_of(leaves(state), copy, n)), bits(leaves(want)))


@settings(max_examples=8)
@given(plans())
def test_synchronising_every_step_is_the_synchronous_plan(where):
    """With plain SGD and a synchronization after every step, all copies equal the tables of the same axes without
    replicas, up to rounding."""
    axes, replicas, kind = where
    mesh = fr.Mesh.emulated(**axes)
    options = apart.optimizers("sgd", dense_lr=0.1)
    got, losses = trained(mesh, plan_of(kind, axes, replicas), batches(mesh, 4), options, every=1)
    plain = fr.Plan(dict(plan_of(kind, axes, replicas).placements))
    want, plain_losses = trained(mesh, plain, batches(mesh, 4), options)
    assert_trees_close(fr.gather_tables(got.tables, mesh), fr.gather_tables(want.tables, mesh), rtol=2e-6, atol=2e-6)
    assert_trees_close((got.dense, losses), (want.dense, plain_losses), rtol=2e-6, atol=2e-6)


@settings(max_examples=15)
@given(
    plans(), st.sampled_from(NAMES), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.integers(0, 9)
)
def test_synchronised_copies_are_their_mean(where, name, dtype, seed):
    """A synchronization gives all copies the same bits: the mean of the copies, or the value that they share. A second
    synchronization changes no bit."""
    axes, replicas, kind = where
    mesh, g = fr.Mesh.emulated(**axes), torch.Generator().manual_seed(seed)
    params = training.params()
    params = fr.Params(map_tensors(lambda x: x.to(dtype), params.tables), params.dense)
    step = fr.train_step(training.loss_fn, **apart.optimizers(name), mesh=mesh, plan=plan_of(kind, axes, replicas))
    state = step.init(params)
    n = state.tables.layout.num_copies

    def differ(x):
        """Return x with most elements different between copies, and some elements equal, including -0.0 and
        infinity."""
        shape = (n, x.shape[0] // n, *x.shape[1:])
        apart, common = (torch.randn(shape, generator=g).to(x.dtype) for _ in range(2))
        common = common[:1].clone()
        common.view(-1)[:2] = torch.tensor([-0.0, torch.inf], dtype=x.dtype)
        is_common = torch.rand(shape[1:], generator=g) < 0.3
        is_common.view(-1)[:2] = True
        return torch.where(is_common, common, apart).flatten(0, 1)

    state = apart.with_leaves(state, map_tensors(differ, leaves(state)))
    got = fr.sync_replicas(state, mesh=mesh)
    after = leaves(got)
    for copy in range(n):
        assert_trees_close(bits(copy_of(after, copy, n)), bits(copy_of(after, 0, n)))
    for b, own in leaves(state).items():
        for k, x in own.items():
            x, y = (t.unflatten(0, (n, -1)) for t in (x, after[b][k]))
            want = x.amax(0) if k == "last" else x.double().mean(0).to(x.dtype)
            same = (x == x[:1]).all(0)
            assert torch.equal(bits(y[0][same]), bits(x[0][same]))
            few = {"rtol": 4 * torch.finfo(x.dtype).eps, "atol": 4 * torch.finfo(x.dtype).eps}
            assert_trees_close(y[0][~same], want[~same], **few)
    assert_trees_close(bits(leaves(fr.sync_replicas(got, mesh=mesh))), bits(after))
    assert_trees_close(bits(fr.gather_tables(got.tables, mesh)), bits(fr.gather_state(got, mesh).tables))


def test_slots_may_stay_apart():
    """With slots=False the tables become equal and every slot keeps its bits. Such a state cannot be gathered."""
    mesh = fr.Mesh.emulated(r=2, x=2)
    state, _ = trained(mesh, plan_of("row_wise", mesh.shape, ("r",)), batches(mesh, 2), apart.optimizers("adam"))
    got = fr.sync_replicas(state, mesh=mesh, slots=False)
    assert_trees_close(bits(got.slots), bits(state.slots))
    assert_trees_close(bits(got.tables), bits(fr.sync_replicas(state, mesh=mesh).tables))
    fr.gather_tables(got.tables, mesh)
    with pytest.raises(ValueError, match="slot 'mean' of 'a'"):
        fr.gather_state(got, mesh)


@pytest.mark.parametrize("kind", TWO_AXES)
@pytest.mark.parametrize("name", ["adam", "rowwise_adagrad"])
def test_one_copy_is_no_copy(kind, name):
    """A replica axis of one rank changes no bit of training. Its synchronization changes no bit, either."""
    axes = {"r": 1, "x": 2, "y": 2}
    mesh, options = fr.Mesh.emulated(**axes), apart.optimizers(name, 0.1)
    got = trained(mesh, plan_of(kind, axes, ("r",)), batches(mesh, 2), options, every=1)
    want = trained(mesh, fr.Plan(dict(plan_of(kind, axes, ("r",)).placements)), batches(mesh, 2), options)
    assert_trees_close(bits((leaves(got[0]), got[0].dense, got[1])), bits((leaves(want[0]), want[0].dense, want[1])))


@settings(max_examples=15)
@given(plans(), plans(), st.sampled_from(NAMES))
def test_a_state_is_moved_into_copies_and_out_of_them(first, second, name):
    """reshard puts a plain state into every copy, and equal copies into the copies of another plan. Each way keeps the
    bits."""
    sparse = apart.optimizers(name)["sparse"]
    tables = training.params().tables
    state = fr.TrainState(torch.tensor(3), tables, sparse.init(tables), {}, {}, fr.key(0))
    (axes, replicas, kind), (others, other_replicas, other) = first, second
    here, there = fr.Mesh.emulated(**axes), fr.Mesh.emulated(**others)
    one = fr.reshard(state, plan_of(kind, axes, replicas), mesh=here, sparse=sparse)
    held = fr.shard_tables(tables, plan_of(kind, axes, replicas), here, labels={n: sparse.label(n) for n in tables})
    assert_trees_close(bits(one.tables), bits(held))
    two = fr.reshard(one, plan_of(other, others, other_replicas), mesh=there, sparse=sparse, from_mesh=here)
    for got in (fr.gather_state(one, here), fr.gather_state(two, there)):
        assert_trees_close(bits(got), bits(state))


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "table_wise"])
def test_an_overflow_in_one_group_holds_all_groups(kind):
    """If the ids of one group find no place, no copy in any group changes a bit. The next capacity trains all
    groups."""
    axes = {"r": 2, "x": 2}
    mesh, plan, options = fr.Mesh.emulated(**axes), plan_of(kind, axes, ("r",)), apart.optimizers("adam", 0.1)
    # the first group has no ids
    lists = {"u": [[]] * 4 + [[0, 0, 0]] * 4, "v": [[]] * 8}
    batch = fr.Batch(fr.KeyedJaggedTensor.from_lists(lists, dtype=torch.int64), torch.ones(8))
    make = lambda capacity: fr.train_step(training.loss_fn, **options, mesh=mesh, plan=plan, capacity=capacity)
    state = make(1).init(training.params())
    after, metrics = make(1)(state, batch)
    assert int(metrics["overflow"]) > 0
    assert_trees_close(bits(after), bits(state))
    got, _ = fr.retry_overflow(make, capacity=1)(state, batch)
    assert_trees_close(bits(got), bits(make(None)(state, batch)[0]))
    assert_trees_close(bits(copy_of(leaves(got), 0, 2)), bits(copy_of(leaves(state), 0, 2)))
    with pytest.raises(AssertionError):
        assert_trees_close(copy_of(leaves(got), 1, 2), copy_of(leaves(state), 1, 2))


@pytest.mark.parametrize(
    "kind, name",
    [("row_wise", "adam"), ("column_wise", "rowwise_adagrad"), ("table_wise", "by_table"), ("replicated", "adam")],
)
def test_a_group_of_ranks_trains_as_if_it_were_alone(kind, name, ranks):
    """On 2 x 2 gloo ranks, each copy's tables and slots have the bits of two ranks alone with the batches of that
    group."""
    axes, alone = {"r": 2, "x": 2}, {"x": 2}
    want = ranks(2).run(apart.real_frozen, alone, kind, (), name, 3, 2)[0]
    for (got,) in ranks(4).run(apart.real_frozen, axes, kind, ("r",), name, 3, 2):
        for copy in (0, 1):
            assert_trees_close(bits(copy_of(got, copy, 2)), bits(want[copy]))


@pytest.mark.parametrize("axes, kind, name, compiled", [
    ({"x": 2, "r": 2}, "row_wise", "adam", False),
    ({"x": 2, "r": 2}, "column_wise", "rowwise_adagrad", False),
    ({"r": 2, "x": 1}, "row_wise", "rowwise_adagrad", True),
])  # fmt: skip
def test_ranks_synchronise_as_emulated_ones(axes, kind, name, compiled, ranks):
    """Five steps on gloo ranks, with a synchronization after every second step, agree with the emulated steps within
    1e-6. This includes staged and donated steps. A synchronization of the same copies gives the same bits. Dense
    parameters are equal on all ranks."""
    mesh, options = fr.Mesh.emulated(**axes), apart.optimizers(name, 0.1)
    want, losses = trained(
        mesh, plan_of(kind, axes, ("r",)), [training.batch(i, 8) for i in range(5)], options, every=2
    )
    found = ranks(mesh.size).run(as_staged, apart.real, axes, kind, ("r",), name, 5, 2, compiled, deadline_s=300)
    close = {"rtol": 1e-5, "atol": 1e-6} if compiled else {"rtol": 1e-6, "atol": 1e-6}
    for before, after, dense, real_losses in found:
        assert_trees_close((before, dense, real_losses), (leaves(want), want.dense, losses), **close)
        assert_trees_close(bits(dense), bits(found[0][2]))
        again = fr.sync_replicas(apart.with_leaves(want, before), mesh=mesh)
        assert_trees_close(bits(after), bits(leaves(again)))


def test_ranks_refuse_copies_that_differ(ranks):
    """A gather of copies that differ raises on every rank. The error says to synchronize first."""
    with pytest.raises(RankError) as raised:
        ranks(4).run(apart.real_refused, {"r": 2, "x": 2}, ("r",))
    for rank in range(4):
        assert f"rank {rank}: ValueError: funcrec.gather_state: the tables have copies that trained apart." in str(
            raised.value
        )
    assert "sync_replicas" in str(raised.value)


WRONG = {
    "groups share their gradients": lambda axes: (fr.train._rank_step, "gather_terms", shared),
    "the mean is of all ranks": lambda axes: (fr.train._step, "prod", lambda xs: 1),
}


def shared(grads, layout, *rest):
    """Return the gradients, summed as if the replica axes were ordinary axes."""
    return fr.sharding._gather_terms.gather_terms(grads, layout._replace(replicas=()), *rest)


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_rule_is_seen(which, monkeypatch):
    """The law of a group alone fails if groups share gradients. The law also fails if gradients are divided by the
    number of all ranks."""
    where = ({"r": 2, "x": 2}, ("r",), "row_wise")
    check = test_a_group_trains_as_if_it_were_alone.hypothesis.inner_test
    check(where, "sgd", False)
    monkeypatch.setattr(*WRONG[which](where[0]))
    with pytest.raises(AssertionError):
        check(where, "sgd", False)


@pytest.mark.parametrize("name, want", [("sgd", 1), ("adam", 1), ("counter", 2)])
def test_a_synchronisation_exchanges_once(name, want, monkeypatch):
    """All tables and slots of one dtype share one all_to_all and one all_gather. Slots that take the maximum share a
    second pair of exchanges.

    With small buckets the bits are the same, in more exchanges.
    """
    mesh = fr.Mesh.emulated(r=2, x=2)
    state, _ = trained(mesh, plan_of("row_wise", mesh.shape, ("r",)), [], apart.optimizers(name))
    calls = []
    for collective in ("all_to_all", "all_gather"):
        whole = getattr(fr.mesh._joined, collective)
        monkeypatch.setattr(
            fr.mesh._joined, collective, lambda *args, f=whole, **kwargs: calls.append(f.__name__) or f(*args, **kwargs)
        )
    at_once = fr.sync_replicas(state, mesh=mesh)
    assert calls == ["all_to_all", "all_gather"] * want
    monkeypatch.setattr(fr.train._replicas, "BUCKET", 7)
    assert_trees_close(fr.sync_replicas(state, mesh=mesh), at_once, rtol=0, atol=0)
    assert len(calls) > 4 * want
