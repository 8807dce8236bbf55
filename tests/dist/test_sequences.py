"""Sharded sequences equal those of one process under every placement, alone and with pooled features of the same
tables."""

import pytest
import torch
from hypothesis import given
from programs import lookup_transforms as lookups
from programs.sequence_models import fixed, mapped, sequence_models, whole

import funcrec as fr
from funcrec.sharding import _gather_terms
from funcrec.testing import assert_trees_close


@given(sequence_models())
def test_sharded_sequences_have_one_processs_bits(model):
    """Sequences have the bits of the plain lookup under every placement. So do the gradients of their tables, which
    pooled features share."""
    got, want = mapped(model), whole(model)
    assert_trees_close(got[0], want[0])
    assert_trees_close(got[1], want[1])


def real(axes, kind):
    return mapped(fixed(fr.Mesh.distributed(**axes), kind))


CASES = [({"x": 2}, k) for k in lookups.ONE_AXIS] + [({"x": 2, "y": 2}, k) for k in lookups.TWO_AXES]


@pytest.mark.parametrize("axes, kind", CASES, ids=str)
def test_sequences_on_ranks_have_one_processs_bits(axes, kind, ranks):
    """On gloo ranks, too, sequences and the gradients of their tables have the bits of one process."""
    want = whole(fixed(fr.Mesh.emulated(**axes), kind))
    for got in ranks(torch.Size(axes.values()).numel()).run(real, axes, kind):
        assert_trees_close(got[0], want[0])
        assert_trees_close(got[1], want[1])


def test_terms_of_several_lookups_are_added_rank_by_rank(monkeypatch):
    """A table of two lookups adds the terms of both lookups on rank 0 before those on rank 1. Another order would round
    differently."""
    mesh, plan, tables, _, features = fixed(fr.Mesh.emulated(x=2), "row_wise")
    lists = {k: [[(i * j) % 3 for j in range(5)] for i in range(8)] for k in "uv"}
    weights = {k: [[0.1 + 0.3 * j for j in range(5)] for _ in range(8)] for k in "uv"}
    ids = fr.KeyedJaggedTensor.from_lists(lists, weights=weights, dtype=torch.int64)
    model = mesh, plan, tables, ids, features
    want = whole(model)
    assert_trees_close(mapped(model), want)
    monkeypatch.setattr(_gather_terms, "gather_terms", lambda grads, layout: (grads, []))
    with pytest.raises(AssertionError):
        assert_trees_close(mapped(model)[1], want[1])
    assert_trees_close(mapped(model)[1], want[1], rtol=1e-6, atol=1e-6)


UNEQUAL = fr.KeyedJaggedTensor.from_lists({"u": [[0], [1]], "v": [[2], [3], [1]]})


@pytest.mark.parametrize(
    "lookup, pooling", [(fr.lookup, "sum"), (fr.lookup_sequence, "none")], ids=["pooled", "sequence"]
)
def test_features_of_different_numbers_of_bags_on_a_mesh(lookup, pooling):
    """A pooled lookup of keys with different numbers of bags raises, as in one process; sequences have their own bags.
    No bags are silently skipped. A lookup of no features does not raise."""
    mesh, plan, tables, _, _ = fixed(fr.Mesh.emulated(x=2), "row_wise")
    held = fr.shard_tables(tables, plan, mesh)
    features = [fr.FeatureConfig(k, table="b", pooling=pooling) for k in "uv"]
    look = lambda ids, features: fr.shard_map(
        lambda t: [x.values[None] for x in values(lookup(t, ids, features))], mesh=mesh, in_specs=(held.specs(),),
        out_specs=fr.P("x")
    )(held)  # fmt: skip
    values = lambda out: [out] if isinstance(out, fr.KeyedTensor) else list(out.values())
    if pooling == "sum":
        with pytest.raises(ValueError, match="different numbers of bags"):
            look(UNEQUAL, features)
    else:
        want = [x.values[None].expand(2, -1, -1) for x in values(lookup(tables, UNEQUAL, features))]
        assert_trees_close(look(UNEQUAL, features), want)
    assert_trees_close(
        look(UNEQUAL, features[:1]),
        [x.values[None].expand(2, -1, -1) for x in values(lookup(tables, UNEQUAL, features[:1]))],
    )
    assert [x.shape[-1] for x in look(UNEQUAL.permute(["u"]), [])] == ([0] if pooling == "sum" else [])
