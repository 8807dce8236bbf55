"""Sharded lookups and their gradients, under every placement on emulated meshes, equal those of one process."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.placement_models import models, sharded, whole

import funcrec as fr
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

UNIFORM = {
    "table_wise": lambda axes, i, sizes: fr.table_wise(axes, rank=i % torch.Size(sizes).numel()),
    "row_wise": lambda axes, i, sizes: fr.row_wise(axes),
    "column_wise": lambda axes, i, sizes: fr.column_wise(axes),
    "table_row_wise": lambda axes, i, sizes: fr.table_row_wise(axes, rank=i % sizes[0]),
    "table_column_wise": lambda axes, i, sizes: fr.table_column_wise(axes, rank=i % sizes[0]),
    "grid": lambda axes, i, sizes: fr.grid(axes),
    "replicated": lambda axes, i, sizes: fr.replicated(),
}


@pytest.mark.parametrize("kind", UNIFORM)
def test_a_uniform_plan_is_one_by_hand(kind):
    """Plan.uniform equals the function of the placement over all axes except the replicas. Table-wise tables are on
    each rank in turn."""
    tables = [fr.TableConfig(f"t{i}", 4, 2) for i in range(7)]
    mesh = fr.Mesh.emulated(y=2, r=2, x=3)
    made = fr.Plan({t.name: UNIFORM[kind](("y", "x"), i, [2, 3]) for i, t in enumerate(tables)}, replicas="r")
    assert fr.Plan.uniform(kind, tables, mesh, replicas="r") == made
    assert fr.Plan.uniform(kind, fr.init(fr.key(0), tables), mesh, replicas=("r",)) == made


@given(st.data())
def test_drawn_plans_fit_their_meshes(data):
    """For any drawn plan, even one with replicas, placed and gathered tables keep every bit."""
    mesh, tables = data.draw(frs.meshes(max_axes=3)), {"t": torch.randn(5, 3), "u": torch.randn(2, 1)}
    plan = data.draw(frs.plans(tables, mesh, replicas=True))
    assert_trees_close(fr.gather_tables(fr.shard_tables(tables, plan, mesh), mesh), tables)


@given(models())
def test_exact_sharded_lookups_have_one_processs_bits(model):
    """With exact=True a sharded lookup has the bits of the plain lookup under every placement. The gradients of its
    tables have the bits of the plain gradients."""
    acts, grads = sharded(model, exact=True)
    want_acts, want_grads = whole(model)
    assert_trees_close(acts, want_acts)
    assert_trees_close(grads, want_grads)


@pytest.mark.parametrize("placed", [fr.row_wise(("y", "x")), fr.table_wise(("y", "x"), rank=1)], ids=lambda p: p.kind)
def test_axes_named_in_another_order_change_no_bit(placed):
    """If a placement names its axes in another order than the mesh, a row's gradient is still summed in the order of
    the global batch."""
    ids = fr.KeyedJaggedTensor.from_lists({"u": [[]] * 7 + [[0] * 2, [], [0] * 4, [], []]}, dtype=torch.int64)
    tables, mesh = {"a": torch.tensor([[0.3661]])}, fr.Mesh.emulated(x=3, y=2)
    model = (mesh, fr.Plan({"a": placed}), tables, ids, [fr.FeatureConfig("f", table="a", column="u")])
    assert_trees_close(sharded(model)[1], whole(model)[1])


@given(models(kinds=("table_wise", "column_wise", "table_column_wise", "replicated")))
def test_lookups_of_whole_rows_have_one_processs_bits(model):
    """If one rank pools all rows of a bag, sums have the bits of the plain lookup even without exact=True."""
    acts, _ = sharded(model)
    assert_trees_close(acts, whole(model)[0])


@given(models())
def test_row_wise_sums_differ_by_rounding_only(model):
    """Without exact=True, row-wise sums have another order. These sums agree with the plain lookup within 1e-6. The
    gradients keep their bits."""
    acts, grads = sharded(model)
    want_acts, want_grads = whole(model)
    assert_trees_close(acts, want_acts, rtol=1e-6, atol=1e-6)
    assert_trees_close(grads, want_grads)
