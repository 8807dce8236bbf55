"""Maxima of sharded tables have the bits of one process under every placement."""

import pytest
import torch
from hypothesis import given
from programs import lookup_transforms as lookups
from programs.sequence_models import fixed, mapped, sequence_models, whole

import funcrec as fr
from funcrec.core._tree import replace
from funcrec.testing import assert_trees_close


def with_maxima(model):
    *rest, features = model
    return *rest, [f if f.pooling == "none" else replace(f, pooling="max") for f in features]


@given(sequence_models())
def test_gradients_of_sharded_maxima_have_one_processs_bits(model):
    """The gradients of tables that maxima and sequences share have the bits of one process, rank after rank."""
    model = with_maxima(model)
    assert_trees_close(mapped(model), whole(model))


def placed_lookup(axes, kind, mesh=None, **how):
    mesh, plan, tables, ids, features = with_maxima(fixed(mesh or fr.Mesh.emulated(**axes), kind))
    held, everywhere = fr.shard_tables(tables, plan, mesh, **how), fr.P(mesh.axis_names)
    read = fr.shard_map(lambda t, i: fr.lookup(t, i, features).values, mesh=mesh, in_specs=(held.specs(), everywhere),
                        out_specs=everywhere)  # fmt: skip
    return read(held, fr.shard(ids, everywhere, mesh=mesh)), fr.lookup(tables, ids, features).values


CASES = [({"x": 2}, k) for k in lookups.ONE_AXIS] + [({"x": 2, "y": 2}, k) for k in lookups.TWO_AXES]


@pytest.mark.parametrize("axes, kind", CASES, ids=str)
@pytest.mark.parametrize("how", [{}, {"exact": True}, {"dedup": True}, {"capacity": 64}], ids=str)
def test_sharded_maxima_have_one_processs_bits(axes, kind, how):
    """Ranks exchange rows, so every placement and every kind of exchange gives the bits of the plain lookup."""
    got, want = placed_lookup(axes, kind, **how)
    assert torch.equal(got, want)


def on_ranks(axes, kind):
    mesh = fr.Mesh.distributed(**axes)
    got, want = placed_lookup(axes, kind, mesh)
    return torch.equal(fr.unshard(got, fr.P(mesh.axis_names), mesh=mesh), want)


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_real_ranks_have_them_too(kind, ranks):
    """On gloo ranks the values are those of one process."""
    assert all(ranks(2).run(on_ranks, {"x": 2}, kind))
