"""States moved between plans and meshes keep every bit. Training continues from these states."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import moving, training
from programs.moving import bits
from programs.training import plan_of

import funcrec as fr
from funcrec.core._tree import tree_structure
from funcrec.sharding.moves import _gather_rows
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

ONE_AXIS = ("table_wise", "row_wise", "column_wise", "replicated")
TWO_AXES = (*ONE_AXIS, "table_row_wise", "table_column_wise", "grid")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@st.composite
def laid_out(draw):
    """Return random (axes, plan) with a separate placement for each table. Shrinks to table-wise on one rank."""
    mesh = draw(frs.meshes())
    return mesh.shape, draw(frs.plans(training.SHAPES, mesh))


@given(
    st.sampled_from(list(training.OPTIMIZERS)),
    laid_out(),
    laid_out(),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 100, 1 << 26]),
)
def test_a_state_keeps_every_bit_on_its_way(name, first, second, dtype, block):
    """gather_state(reshard(state)) equals the state to the bit under every placement. The same equality holds after
    another reshard to any plan and mesh."""
    state, sparse = moving.full_state(name, dtype), training.OPTIMIZERS[name]()
    here, there = fr.Mesh.emulated(**first[0]), fr.Mesh.emulated(**second[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gather_rows, "BLOCK_BYTES", block)
        one = fr.reshard(state, first[1], mesh=here, sparse=sparse)
        two = fr.reshard(one, second[1], mesh=there, sparse=sparse, from_mesh=here)
    assert_trees_close(bits(fr.gather_state(one, here)), bits(state))
    assert_trees_close(bits(fr.gather_state(two, there)), bits(state))


@given(st.sampled_from(list(training.OPTIMIZERS)), laid_out(), laid_out())
def test_a_moved_state_is_laid_out_as_a_first_one(name, first, second):
    """reshard and train_step's init give the same layout and the same first state."""
    (axes, plan), (others, other) = first, second
    mesh, elsewhere, opts = fr.Mesh.emulated(**axes), fr.Mesh.emulated(**others), training.optimizers(name)
    make = lambda **where: fr.train_step(training.loss_fn, **opts, **where).init(training.params())
    want = make(mesh=mesh, plan=plan)
    for got in (
        fr.reshard(make(), plan, mesh=mesh, sparse=opts["sparse"]),
        fr.reshard(make(mesh=elsewhere, plan=other), plan, mesh=mesh, sparse=opts["sparse"], from_mesh=elsewhere),
    ):
        assert tree_structure(got) == tree_structure(want)
        assert_trees_close(bits(got.tables), bits(want.tables))


@pytest.mark.parametrize("name", ["adam", "rowwise_adagrad", "by_table"])
def test_emulated_training_goes_on_elsewhere(name):
    """Three steps under each of several plans differ from steps in one process only by the rounding of dense
    products."""
    kinds = [({"x": 4}, "row_wise"), ({"x": 2, "y": 2}, "grid"), ({"y": 4}, "column_wise"), ({"y": 4}, "table_wise")]
    got = moving.moved(name, kinds, 3, 8, False)
    tables, slots, dense, _ = training.alone(name, 4, 12, 8)
    assert_trees_close((got.tables, got.slots, got.dense), (tables, slots, dense), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["adam", "rowwise_adagrad", "lamb", "by_table"])
def test_training_on_two_ranks_goes_on_to_the_same_bits(name, ranks):
    """Steps on two ranks, moved from plan to plan, have the bits of one process that adds the same batches."""
    stations = [({"x": 2}, kind) for kind in ("column_wise", "row_wise", "table_wise", "replicated", "column_wise")]
    tables, slots, dense, _ = training.alone(name, 2, 10, 4)
    for got in ranks(2).run(moving.moved, name, stations, 2, 4, True):
        assert_trees_close(bits((got.tables, got.slots, got.dense)), bits((tables, slots, dense)))


STATIONS = [
    *(({"x": 2, "y": 2}, kind) for kind in ("table_wise", "grid", "row_wise", "table_column_wise", "replicated")),
    ({"z": 4}, "column_wise"),
    ({"z": 4}, "row_wise"),
]


@pytest.mark.parametrize("name", ["accumulate rows", "accumulate some"])
def test_gradients_that_wait_go_on_on_other_ranks(name, ranks, tmp_path):
    """Steps on four ranks have the bits of one process that adds the same batches. The plan and mesh change between the
    steps, by a move or by a save and a load. In half of the steps, gradients wait."""
    tables, slots, dense, _ = training.alone(name, 4, len(STATIONS), 8)
    for got in ranks(4).run(moving.moved, name, STATIONS, 1, 8, True, str(tmp_path / "at")):
        assert_trees_close(bits((got.tables, of_rows(got.slots), got.dense)), bits((tables, of_rows(slots), dense)))


@pytest.mark.parametrize("name", ["accumulate", "accumulate lamb"])
def test_gradients_that_wait_go_on_elsewhere(name, tmp_path):
    """On emulated meshes, steps with waiting gradients also equal those of one process, up to the rounding of dense
    products."""
    tables, slots, dense, _ = training.alone(name, 4, len(STATIONS), 8)
    got = moving.moved(name, STATIONS, 1, 8, False, str(tmp_path / "at"))
    got, want = (got.tables, of_rows(got.slots), got.dense), (tables, of_rows(slots), dense)
    assert_trees_close(got, want, rtol=2e-6, atol=2e-6)


def of_rows(slots):
    return {n: {k: s for k, s in own.items() if not k.startswith("pending")} for n, own in slots.items()}


def test_training_on_four_ranks_goes_on_over_other_axes(ranks):
    """Steps on four ranks in a grid, then a row, then another grid, have the bits of one process that adds the same
    batches."""
    axes = {"x": 2, "y": 2}
    stations = [
        (axes, "grid"),
        ({"z": 4}, "row_wise"),
        (axes, "table_column_wise"),
        (axes, "table_row_wise"),
        ({"y": 1, "x": 4}, "grid"),
    ]
    tables, slots, dense, _ = training.alone("rowwise_adagrad", 4, 10, 8)
    for got in ranks(4).run(moving.moved, "rowwise_adagrad", stations, 2, 8, True):
        assert_trees_close(bits((got.tables, got.slots, got.dense)), bits((tables, slots, dense)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TWO_AXES)
def test_ranks_keep_every_bit_of_a_state(kind, dtype, ranks):
    """On four ranks, a state that is laid out, moved and gathered keeps every bit on every rank, including negative
    zeros and NaN payloads."""
    state, axes = moving.full_state("by_table", dtype), {"x": 2, "y": 2}
    for got in ranks(4).run(moving.carried, state, axes, kind, {"z": 4}, "row_wise", "by_table"):
        for one in got:
            assert_trees_close(bits(one), bits(state))


COTANGENTS = {
    n: torch.linspace(-1, 1, r * d, dtype=torch.float64).reshape(r, d) for n, (r, d) in training.SHAPES.items()
}


def there_and_back(axes, plan, other, replicas=()):
    """Return {name: a function of tables with value ⟨tables, COTANGENTS⟩}. The tables pass through a sharded state."""
    mesh, sparse = fr.Mesh.emulated(**axes), fr.optim.adagrad(lr=0.1)
    apart = lambda plan: fr.Plan(dict(plan.placements), replicas=replicas)
    plan, other = apart(plan), apart(other)
    step = fr.train_step(
        lambda p, b: p.dense.sum(), sparse=sparse, dense=fr.optim.dense(torch.optim.SGD, lr=0.1), mesh=mesh, plan=plan
    )
    inner = lambda tables: sum((tables[n] * c).sum() for n, c in COTANGENTS.items())
    state = lambda tables: step.init(fr.Params(tables, torch.ones(1, dtype=torch.float64)))
    move = lambda s: fr.reshard(s, other, mesh=mesh, sparse=sparse)
    return {
        "gather_tables(shard_tables)": lambda t: inner(fr.gather_tables(fr.shard_tables(t, plan, mesh), mesh)),
        "gather_state(init)": lambda t: inner(fr.gather_state(state(t), mesh).tables),
        "reshard": lambda t: inner(fr.gather_state(move(state(t)), mesh).tables),
        "sync_replicas": lambda t: inner(fr.gather_tables(fr.sync_replicas(state(t), mesh=mesh).tables, mesh)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["gather_tables(shard_tables)", "gather_state(init)", "reshard", "sync_replicas"])
@pytest.mark.parametrize(
    "kinds", [("row_wise", "column_wise"), ("grid", "table_wise"), ("table_row_wise", "replicated")]
)
def test_moved_tables_have_derivatives(kinds, name):
    """Tables that are sharded, moved and gathered have the gradient, the tangent and the vmap of the identity."""
    axes, replicas = {"x": 2, "y": 2}, ("x",) if name == "sync_replicas" else ()
    own = {a: n for a, n in axes.items() if a not in replicas}
    first, second = (plan_of(k if len(own) > 1 or k in ONE_AXIS else "row_wise", own) for k in kinds)
    f = there_and_back(axes, first, second, replicas)[name]
    tables = {n: c.square() for n, c in COTANGENTS.items()}
    exact = {"rtol": 1e-12, "atol": 1e-12}
    assert_trees_close(torch.func.grad(f)(tables), COTANGENTS, **exact)
    assert_trees_close(torch.func.jvp(f, (tables,), (COTANGENTS,))[1], f(COTANGENTS), **exact)
    for batched in (set(tables), set(list(tables)[1:2])):
        stacked = {n: torch.stack([t, 2 * t, -t]) if n in batched else t for n, t in tables.items()}
        dims = {n: 0 if n in batched else None for n in tables}
        member = lambda i: {n: t[i] if n in batched else t for n, t in stacked.items()}  # noqa: B023
        want = torch.stack([f(member(i)) for i in range(3)])
        assert_trees_close(torch.func.vmap(f, in_dims=(dims,))(stacked), want, **exact)


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_a_derivative_of_moved_bits_is_refused(kind, ranks):
    """On real ranks, rows travel as bits, which have no derivative. A differentiated state therefore raises. No
    derivative is lost silently."""
    for said in ranks(2).run(moving.differentiated, kind):
        assert "is differentiated" in said


@st.composite
def on_ranks(draw, num_ranks):
    """Return random (axes, plan) on that many ranks, with replicas or without."""
    axes = draw(st.sampled_from([{"x": num_ranks}, {"y": 2, "z": num_ranks // 2}]))
    return axes, draw(frs.plans(training.SHAPES, fr.Mesh.emulated(**axes), replicas=True))


def held(axes, plan):
    """Return {rank: {number: how often the rank holds it}}. The elements of all tables are numbered from 1."""
    mesh, counts, total = fr.Mesh.emulated(**axes), {}, 1
    tables = {}
    for n, (r, d) in training.SHAPES.items():
        tables[n] = torch.arange(total, total + r * d, dtype=torch.float64).reshape(r, d)
        total += r * d
    laid = fr.shard_tables(tables, plan, mesh)
    for rank in range(mesh.size):
        where = fr.mesh.coordinates(rank, mesh.axis_names, mesh.shape)
        own = [
            laid[b.name].unflatten(0, (-1, b.rows))[fr.mesh.rank_at(where, (*b.replicas, *b.axes), mesh.shape)]
            for b in laid.layout.banks
        ]
        counts[rank] = torch.bincount(torch.cat([x.flatten() for x in own]).long(), minlength=total)[1:]
    return counts


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(["adam", "user"]), st.sampled_from(DTYPES), st.sampled_from([1, 96, 1 << 26]))
def test_each_row_travels_once_to_its_new_owner(ranks, data, name, dtype, block):
    """A rank receives exactly the elements that it needs and does not have, in rounds of bounded size. All bits arrive,
    between any two plans, even with replicas and other axes."""
    first, second = data.draw(on_ranks(4)), data.draw(on_ranks(4))
    state = moving.full_state(name, dtype)
    got = ranks(4).run(moving.sent, state, first, second, name, block)
    before, after = held(*first), held(*second)
    size = lambda x, wide: x.element_size() * (x.dim() > 1) if wide else x.element_size() * (x.dim() == 1)
    leaves = [state.tables["a"], *state.slots["a"].values()]
    each, narrow = sum(size(x, True) for x in leaves), sum(size(x, False) for x in leaves)
    for rank, (arrived, rounds) in enumerate(got):
        lacked = torch.where(before[rank] > 0, 0, after[rank])
        most = int(lacked.sum()) * each + narrow * int(after[rank].sum())
        came = sum(c for _, c in rounds)
        assert arrived and (came == most if not narrow else came <= most)
        assert all(max(pair) <= max(block, 3 * 8 * 5 * 4) for pair in rounds)
    assert sum(s for _, rounds in got for s, _ in rounds) == sum(c for _, rounds in got for _, c in rounds)


def test_members_of_an_ensemble_move_on_ranks(ranks):
    """Under vmap, the rows of each member arrive like those of a single state."""
    for pairs in ranks(2).run(moving.members, "row_wise", "column_wise"):
        for got, want in pairs:
            assert_trees_close(got, want)
