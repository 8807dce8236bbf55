"""More ranks than have operations of their own: one operation for all of them has the bits of one for each."""

import pytest
import torch
from programs import training

import funcrec as fr
from funcrec.mesh import _joined
from funcrec.sharding import _combine, _lanes

NUM = 9
PLANS = {
    "mixed": fr.Plan({"a": fr.row_wise("x"), "b": fr.table_wise("x", rank=2), "c": fr.row_wise("x")}),
    "row_wise": training.plan_of("row_wise", {"x": NUM}),
    "column_wise": fr.Plan({"a": fr.column_wise("x", ranks=(8, 0)), "b": fr.row_wise("x"), "c": fr.replicated()}),
    "grid": fr.Plan.uniform("grid", training.SHAPES, fr.Mesh.emulated(x=2, y=NUM)),
}


def trained(plan, mesh, **how):
    step = fr.train_step(training.loss_fn, **training.optimizers("adam"), mesh=mesh, plan=plan, **how)
    state, losses = step.init(training.params()), []
    for i in range(2):
        state, metrics = step(state, training.batch(i, 2 * mesh.size))
        losses.append(metrics["loss"])
    return [*losses, *fr.core.tree_leaves((state.tables.banks, state.slots, state.dense))]


@pytest.mark.parametrize("kind", PLANS)
def test_sums_and_blocks_of_many_ranks_have_the_bits_of_one_by_one(kind, monkeypatch):
    """Sums over many owners are added in their order, and cotangents and small tensors of many ranks are the same."""
    mesh = fr.Mesh.emulated(x=2, y=NUM) if kind == "grid" else fr.Mesh.emulated(x=NUM)
    together = trained(PLANS[kind], mesh)
    monkeypatch.setattr(_combine, "MOST_ADDED", 99)
    monkeypatch.setattr(_joined, "MOST_APART", 99)
    for x, y in zip(together, trained(PLANS[kind], mesh), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("how", [{}, {"exact": True}, {"dedup": True}], ids=str)
def test_emulated_blocks_have_the_room_of_the_fullest(how, monkeypatch):
    """An emulated mesh makes blocks for the fullest block of its ids. The bits are those of blocks with room for all
    ids of a rank, as real ranks make them."""
    seen, room_for = [], _lanes.room_for
    mesh = fr.Mesh.emulated(x=NUM)
    small = trained(PLANS["mixed"], mesh, **how)

    def with_all(capacity, most, routes, counts):
        seen.append((most, room_for(capacity, most, routes, counts)))
        return most

    for module in ("_route", "_route_distinct"):
        monkeypatch.setattr(f"funcrec.sharding.{module}.room_for", with_all)
    for x, y in zip(small, trained(PLANS["mixed"], mesh, **how), strict=True):
        assert torch.equal(x, y)
    assert seen and all(room <= most for most, room in seen) and any(room < most for most, room in seen)
