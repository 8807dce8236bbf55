"""Tables of few rows in memory, on a mesh: a plan places these rows, and each rank has a part of every store."""

import pytest
import torch
from programs.as_staged import as_staged
from programs.cached_users import FEATURES, NUM_ROWS, Both, batches_of, loss_fn

import funcrec as fr
from funcrec.cached._table_store import read_own
from funcrec.testing import assert_trees_close

PLACEMENTS = {
    "row_wise": fr.row_wise("x"), "table_wise": fr.table_wise("x", rank=1), "column_wise": fr.column_wise("x"),
    "replicated": fr.replicated(), "table_row_wise": fr.table_row_wise(("x", "y"), rank=1),
    "table_column_wise": fr.table_column_wise(("x", "y"), rank=0), "grid": fr.grid(("x", "y")),
}  # fmt: skip


def plan_of(kind):
    return fr.Plan({"user": PLACEMENTS[kind], "user_bias": fr.row_wise("x"), "item": fr.row_wise("x")})


def train(both, batches, depth=None):
    """Train both on the batches, and return the losses."""
    own = lambda x: x if both.mesh.is_emulated else fr.shard(x, fr.P(both.mesh.axis_names), mesh=both.mesh)
    parts, losses = list(map(own, batches)), []
    seen = parts if depth is None else both.cached.ahead(both.state, parts)
    for batch, one in zip(parts, seen, strict=True):
        both.whole, want = both.step(both.whole, batch)
        both.state, got = both.cached(both.state, one)
        losses.append(got["loss"])
        assert torch.equal(got["loss"], want["loss"])
    return torch.stack(losses)


CASES = [
    ("row_wise", "clipped"), ("table_wise", "clipped"), ("replicated", "clipped"), ("table_row_wise", "clipped"),
    ("column_wise", "rounded by whole rows"), ("column_wise", "rowwise_adagrad"), ("table_column_wise", "rounded"),
    ("grid", "rounded"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_cache_changes_no_bit(kind, name):
    """Under every placement, losses, rows and slots are those of whole tables on the mesh, bit for bit. So they are
    with random rounding, and with gradients that are clipped by their norm."""
    dtype = torch.float32 if name == "rowwise_adagrad" else torch.bfloat16
    both = Both(name, dtype, mesh=fr.Mesh.emulated(x=2, y=2), plan=plan_of(kind))
    train(both, batches_of(2, 5))
    assert int(both.state.tables.rest.vocabularies["users"].num_ids) == 128
    both.check_all()


def test_rows_of_a_batch_are_read_on_a_mesh():
    """`read` gives plain tables, whose predictions are those of whole tables in one process."""
    both = Both(mesh=fr.Mesh.emulated(x=2), plan=plan_of("column_wise"))
    train(both, batches_of(4, 3))
    whole = fr.gather_state(both.whole, both.mesh)
    for batch in batches_of(5, 2):
        assert torch.equal(loss_fn(*both.cached.read(both.state.params, batch)), loss_fn(whole.params, batch))


def test_a_state_goes_on_by_another_plan():
    """Stores know nothing of plans: a resharded state goes on to the same bits, and so does a gathered one."""
    both = Both(mesh=fr.Mesh.emulated(x=2, y=2), plan=plan_of("row_wise"))
    train(both, batches_of(6, 3))
    how = {"mesh": both.mesh, "sparse": both.store.sparse, "exact": True}
    other = fr.reshard(both.state, plan_of("grid"), **how)
    assert_trees_close(fr.gather_state(other, both.mesh), fr.gather_state(both.state, both.mesh), rtol=0, atol=0)
    both.state, both.whole = other, fr.reshard(both.whole, plan_of("grid"), **how)
    train(both, batches_of(7, 2))
    both.check_all()


def on_ranks(kind, folder, sizes):
    """Train on real ranks, stop, go on from the saved state, and return what every rank has."""
    mesh = fr.Mesh.distributed(**sizes)
    both, batches = Both(mesh=mesh, plan=plan_of(kind), path=f"{folder}/rows", depth=2, look_ahead=1), batches_of(8, 6)
    first = train(both, batches[:3])
    both.cached.commit(both.state)
    fr.save(f"{folder}/state", both.state)
    train(both, batches[3:], depth=2)
    where = {"plan": plan_of(kind), "mesh": mesh, "sparse": both.store.sparse, "exact": True}
    both.state = fr.load(f"{folder}/state", **where)
    both.cached.rollback(both.state)
    again = Both(mesh=mesh, plan=plan_of(kind))
    train(again, batches[:3])
    both.whole = again.whole
    last = train(both, batches[3:], depth=2)
    both.check_all()
    own = fr.shard(batches_of(9, 1)[0], fr.P(mesh.axis_names), mesh=mesh)
    predicted = loss_fn(*both.cached.read(both.state.params, own))
    assert torch.equal(predicted, loss_fn(fr.gather_state(both.whole, mesh).params, own))
    whole, want = both.cached.gather(both.state.params).tables, fr.gather_state(both.whole, mesh).tables
    assert all(torch.equal(whole[n], want[n]) for n in want)
    records = read_own(both.store, torch.arange(NUM_ROWS))
    both.store.close()
    return torch.cat([first, last]), records


@pytest.mark.parametrize(("kind", "sizes"), [("row_wise", {"x": 2}), ("grid", {"x": 2, "y": 2})])
def test_gloo_ranks_have_the_emulations_bits(kind, sizes, ranks, tmp_path):
    """On gloo ranks, each with a store of its own rows, losses and records have the bits of the emulated mesh. A run
    returns to its saved state and goes on with the same bits."""
    both = Both(mesh=fr.Mesh.emulated(**sizes), plan=plan_of(kind))
    wanted = train(both, batches_of(8, 6))
    both.check_all()
    found = ranks(len(both.mesh.axes) * 2).run(on_ranks, kind, tmp_path, sizes)
    for rank, (losses, records) in enumerate(found):
        assert torch.equal(losses, wanted)
        assert torch.equal(records, both.store.store.read(torch.arange(rank, NUM_ROWS, len(found))))


def jitted():
    """Train by a jitted step that donates its state, and return whether it changed rows in place."""
    both = Both(mesh=fr.Mesh.distributed(x=2), plan=plan_of("column_wise"), depth=2)
    both.cached = fr.cached_step(fr.jit(both.cached.step, donate=("state",)), both.cached.stores, depth=2)
    both.state = both.cached.init(fr.Params(both.first, torch.ones((), dtype=torch.float64)))
    own = [fr.shard(x, fr.P("x"), mesh=both.mesh) for x in batches_of(3, 4)]
    before = both.state.tables.banks["user_bias"].data_ptr()
    for batch, one in zip(own, both.cached.ahead(both.state, own), strict=True):
        both.whole, want = both.step(both.whole, batch)
        both.state, got = both.cached(both.state, one)
        torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-6, atol=1e-6)
    both.cached.commit(both.state)
    rows = torch.arange(both.store.part[0], NUM_ROWS, 2)
    numbers = lambda records: records.contiguous().view(torch.float32)
    torch.testing.assert_close(numbers(read_own(both.store, rows)), numbers(both.records()[rows]), rtol=1e-5, atol=1e-6)
    return before == both.state.tables.banks["user_bias"].data_ptr()


def test_jitted_donated_steps_of_ranks_write_in_place(ranks):
    """On gloo ranks a jitted step that donates its state trains what the plain step trains, in place, with batches read
    ahead."""
    assert ranks(2).run(as_staged, jitted) == [True, True]


def with_errors():
    """Return what each rank raises where one of them is wrong."""
    mesh = fr.Mesh.distributed(x=2)
    both = Both(mesh=mesh, plan=plan_of("row_wise"))
    batch = fr.shard(batches_of(1, 1)[0], fr.P("x"), mesh=mesh)
    ids = fr.KeyedJaggedTensor.from_lists({"user": [[NUM_ROWS]] * 10, "item": [[0]] * 10}).pad_to(64)
    bad = fr.Batch(ids, torch.ones(10))
    is_last, said = mesh.coordinates["x"] == 1, []
    old = both.state
    both.state, _ = both.cached(both.state, batch)
    calls = [
        lambda: both.cached(both.state, bad if is_last else batch),
        lambda: both.cached(old if is_last else both.state, batch),
        lambda: both.cached.commit(old if is_last else both.state),
        lambda: next(both.cached.ahead(both.state, [bad if is_last else batch])),
        lambda: both.cached.read(both.state.params, bad if is_last else batch),
    ]
    for call in calls:
        try:
            call()
            said.append("nothing")
        except (ValueError, IndexError) as error:
            said.append(str(error))
    both.whole, _ = both.step(both.whole, batch)
    train(both, batches_of(2, 2))
    both.check_all()
    return said


def test_an_error_of_one_rank_is_raised_on_all(ranks):
    """An id outside the store, or a state to which it does not belong, on one rank raises on both, and the run goes
    on."""
    parts = ("not rows of its store", "belongs to", "belongs to", "not rows", "not rows")
    for said in ranks(2).run(with_errors):
        assert all(part in text for text, part in zip(said, parts, strict=True)), said


def doing_different_things(folder):
    """Return what each rank raises where one of them does another thing than the other."""
    mesh = fr.Mesh.distributed(x=2)
    is_last, said = mesh.coordinates["x"] == 1, []

    def uneven(both, parts):
        for batch in parts[: 1 if is_last else 2]:
            both.state, _ = both.cached(both.state, batch)
        both.cached.commit(both.state)

    def uneven_ahead(both, parts):
        for one in both.cached.ahead(both.state, parts[: 1 if is_last else 2]):
            both.state, _ = both.cached(both.state, one)

    for call in (uneven, uneven_ahead, lambda both, parts: both.cached.gather(both.state.params, f"{folder}/rows")):
        both = Both(mesh=mesh, plan=plan_of("row_wise"))
        try:
            call(both, [fr.shard(x, fr.P("x"), mesh=mesh) for x in batches_of(1, 2)])
            said.append("nothing")
        except (ValueError, OSError) as error:
            said.append(str(error))
    return said


def test_ranks_that_do_different_things_raise(ranks, tmp_path):
    """Ranks with different numbers of batches, or that gather into one folder, raise on every rank and do not wait."""
    parts = ("do different things", "do different things", "cannot be made")
    for said in ranks(2).run(doing_different_things, tmp_path):
        assert all(part in text for text, part in zip(said, parts, strict=True)), said


def test_copies_that_train_apart_are_refused():
    """A store has one record for a row, and a plan with replicas several rows."""
    mesh = fr.Mesh.emulated(group=2, x=2)
    plan = fr.Plan({n: fr.row_wise("x") for n in ("user", "user_bias", "item")}, replicas=("group",))
    both = Both(mesh=mesh, plan=plan)
    with pytest.raises(ValueError, match=r"copies of `state\.tables` train apart"):
        both.cached(both.state, batches_of(1, 1)[0])


def test_steps_that_admit_refuse_stored_rows_on_a_mesh():
    """Without `cached_step` a step that admits ids on a mesh raises."""
    mesh = fr.Mesh.emulated(x=2)
    both = Both(mesh=mesh, plan=plan_of("row_wise"))
    step = fr.train_step(loss_fn, sparse=both.store.sparse, mesh=mesh, plan=plan_of("row_wise"))
    with pytest.raises(ValueError, match=r"(?s)in stores.*cached_step"):
        step(both.state, batches_of(1, 1)[0])
    ids = batches_of(1, 1)[0].ids
    read = fr.shard_map(
        lambda tables, ids: fr.lookup(tables, ids, FEATURES).values, mesh=mesh,
        in_specs=(both.state.tables.specs(), fr.P("x")), out_specs=fr.P("x"),
    )  # fmt: skip
    assert read(both.state.tables, ids)[:, :3].isnan().any()
