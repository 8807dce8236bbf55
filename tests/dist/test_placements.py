"""Sharded lookups and their gradients under every placement, on emulated meshes, against one process."""

from hypothesis import given
from programs.placement_models import models, sharded, whole

from funcrec.testing import assert_trees_close


@given(models())
def test_exact_sharded_lookups_have_one_processs_bits(model):
    """With exact=True a sharded lookup has the bits of the plain one under every placement, and so have the gradients of its tables."""
    acts, grads = sharded(model, exact=True)
    want_acts, want_grads = whole(model)
    assert_trees_close(acts, want_acts)
    assert_trees_close(grads, want_grads)


@given(models(kinds=("table_wise", "column_wise", "table_column_wise", "replicated")))
def test_lookups_of_whole_rows_have_one_processs_bits(model):
    """Where a row's bag is pooled on one rank, sums have the bits of the plain lookup without exact=True."""
    acts, _ = sharded(model)
    assert_trees_close(acts, whole(model)[0])


@given(models())
def test_row_wise_sums_differ_by_rounding_only(model):
    """Without exact=True row-wise sums are taken in another order: within 1e-6 of the plain lookup; the gradients keep their bits."""
    acts, grads = sharded(model)
    want_acts, want_grads = whole(model)
    assert_trees_close(acts, want_acts, rtol=1e-6, atol=1e-6)
    assert_trees_close(grads, want_grads)
