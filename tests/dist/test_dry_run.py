"""A dry run tells the exchanges that ranks make: as gloo ranks call them, and as an emulated mesh makes them."""

import pytest
from programs import on_paper, training

import funcrec as fr

KINDS = {"all_to_all": "all_to_all_single", "all_gather": "all_gather_into_tensor", "psum": "all_reduce"}
KINDS |= {"psum_invariant": "all_reduce", "psum_scatter": "reduce_scatter_tensor"}


def dry(axes, kind, backend, **how):
    plan = training.plan_of(kind, axes)
    size = fr.Mesh.emulated(**axes).size
    batch = on_paper.batch_of(size)[1]
    make = lambda mesh: on_paper.step_of(mesh, plan, how)
    return fr.dry_run(make, axes, training.params(), batch, hardware="cpu", backend=backend), plan


@pytest.mark.parametrize("axes, kind, how", [
    ({"x": 2}, "table_wise", {}),
    ({"x": 2}, "replicated", {}),
    ({"x": 2}, "row_wise", {}),
    ({"x": 2}, "column_wise", {"codec": fr.Codec("bfloat16", "int8")}),
    ({"a": 2, "b": 2}, "grid", {}),
])  # fmt: skip
def test_gloo_ranks_send_what_a_dry_run_tells(axes, kind, how, ranks):
    """Every rank calls the collectives of the dry run, in its order, with its bytes."""
    found, plan = dry(axes, kind, "gloo", **how)
    told = [(x.kind, x.axis, x.sent_bytes) for x in found.exchanges]
    size = fr.Mesh.emulated(**axes).size
    for seen in ranks(size).run(on_paper.counted_on_ranks, axes, plan, how, deadline_s=120):
        assert seen == told
    assert found.sent_bytes == sum(x[2] for x in told) > 0


@pytest.mark.parametrize("num, kind, how", [
    (4, "row_wise", {"capacity": 8}),
    (4, "table_wise", {}),
    (3, "row_wise", {"dedup": True}),
    (3, "replicated", {}),
])  # fmt: skip
def test_an_emulated_mesh_exchanges_what_a_dry_run_tells(num, kind, how):
    """An emulated step makes the exchanges of the dry run, with the bytes of each rank's operands. (The loss runs
    twice: first for its lookups, whose exchanges a program drops.)"""
    found, plan = dry({"x": num}, kind, "nccl", **how)
    told = [(x.kind, num, x.operand_bytes) for x in found.exchanges]
    seen = [(KINDS[k], n, b) for k, n, b in on_paper.counted_in_emulation({"x": num}, plan, how)]
    first = seen[: len(seen) - len(told)]
    assert seen[len(first) :] == told and first == told[: len(first)]
