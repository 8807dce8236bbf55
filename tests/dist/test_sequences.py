"""Sharded sequences, alone and beside pooled features of the same tables, under every placement, against one process."""

import lookup_transforms as lookups
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placement_models import models, zeros_like

import funcrec as fr
from funcrec import _route as routing
from funcrec import _route_sequence as sequence
from funcrec import _sharded
from funcrec._tree import replace
from funcrec.testing import assert_trees_close

pytestmark = pytest.mark.xdist_group("ranks")


@st.composite
def sequence_models(draw):
    """`models` with at least one sequence among the features."""
    mesh, plan, tables, ids, features = draw(models())
    turned = [replace(f, pooling="none") if i == 0 or draw(st.booleans()) else f for i, f in enumerate(features)]
    return mesh, plan, tables, ids, turned


def activations(tables, ids, features):
    """{feature: f[...]}: pooled and sequences, by two lookups."""
    out = {k: x.values for k, x in fr.lookup_sequence(tables, ids, features).items()}
    pooled = [f for f in features if f.pooling != "none"]
    return out | ({"pooled": fr.lookup(tables, ids, features).values} if pooled else {})


def loss(tables, ids, features):
    """A sum that weighs every element differently."""
    wave = lambda x: (torch.arange(x.numel(), device=x.device, dtype=x.dtype) * 0.37 + 1).sin().reshape(x.shape)
    return sum((x * wave(x)).sum() for x in activations(tables, ids, features).values())


def mapped(model, capacity=None):
    """(each rank's sequences as lists and offsets, {table: dense gradient}) by a mapped function on the plan's mesh."""
    mesh, plan, tables, ids, features = model
    held, everywhere = fr.shard_tables(tables, plan, mesh, exact=True, capacity=capacity), fr.P(mesh.axis_names)

    def one_rank(held, ids):
        _, grads = fr.value_and_grad(lambda p, ids: loss(p.tables, ids, features))(fr.Params(held, {}), ids)
        dense = {b: g.coalesce().to_dense() for b, g in _sharded.sync_grads(grads.tables, held.layout).items()}
        sequences = {k: (x.values[None], x.offsets[None]) for k, x in fr.lookup_sequence(held, ids, features).items()}
        return sequences, {b.name: dense.get(b.name, zeros_like(held[b.name])) for b in held.layout.banks}

    specs = {"in_specs": (held.specs(), everywhere), "out_specs": (everywhere, held.layout.specs())}
    sequences, grads = fr.shard_map(one_rank, mesh=mesh, **specs)(held, fr.shard(ids, everywhere, mesh=mesh))
    return fr.unshard(sequences, everywhere, mesh=mesh), _sharded.gather_banks(held.layout, grads, mesh)


def whole(model):
    """The same in one process, rank after rank."""
    mesh, _, tables, ids, features = model
    stacked, total, sequences = fr._sharding._stack_bags(ids, mesh.size), None, []
    for r in range(mesh.size):
        mine = fr._tree.tree_map(lambda x, r=r: x[r], stacked)
        sequences.append({k: (x.values, x.offsets) for k, x in fr.lookup_sequence(tables, mine, features).items()})
        _, grads = fr.value_and_grad(lambda p, ids: loss(p.tables, ids, features))(fr.Params(tables, {}), mine)
        total = grads.tables if total is None else {n: total[n] + g for n, g in grads.tables.items()}
    stacked = fr._tree.tree_map(lambda *xs: torch.stack(xs), *sequences)
    return stacked, {n: g.coalesce().to_dense() for n, g in total.items()}


@given(sequence_models())
def test_sharded_sequences_have_one_processs_bits(model):
    """Sequences and the gradients of their tables, which pooled features share, have the plain lookup's bits under every placement."""
    got, want = mapped(model), whole(model)
    assert_trees_close(got[0], want[0])
    assert_trees_close(got[1], want[1])


FIXED = (
    *lookups.FEATURES,
    fr.FeatureConfig("s0", table="a", column="u", pooling="none", weighted=True),
    fr.FeatureConfig("s1", table="b", column="u", pooling="none", max_length=2),
    fr.FeatureConfig("s2", table="a", column="v", pooling="none", hash=fr.modulo()),
)


def fixed(mesh, kind):
    """One model with pooled and sequence features of the same tables."""
    tables = {n: t.float() for n, t in lookups.tables().items()}
    ids = lookups.batch(mesh.size)
    return mesh, lookups.plan(kind, mesh.shape), tables, replace(ids, weights=ids.weights.float()), FIXED


def real(axes, kind):
    return mapped(fixed(fr.Mesh.distributed(**axes), kind))


CASES = [({"x": 2}, k) for k in lookups.ONE_AXIS] + [({"x": 2, "y": 2}, k) for k in lookups.TWO_AXES]


@pytest.mark.parametrize("axes, kind", CASES, ids=str)
def test_sequences_on_ranks_have_one_processs_bits(axes, kind, ranks):
    """On gloo ranks, too, sequences and the gradients of their tables have one process's bits."""
    want = whole(fixed(fr.Mesh.emulated(**axes), kind))
    for got in ranks(torch.Size(axes.values()).numel()).run(real, axes, kind):
        assert_trees_close(got[0], want[0])
        assert_trees_close(got[1], want[1])


def _elsewhere(made):
    """Ids sent to the rank before their owner."""
    return lambda *args: (lambda x: torch.where(x < 0, x, (x + routing.NOWHERE) % (2 * routing.NOWHERE)))(made(*args))


WRONG = {
    "a mean's gradient is not divided": (routing, "_scaled", lambda made: lambda d, *args: d),
    "copies keep their own gradients": (_sharded, "sync_grads", lambda made: lambda grads, layout: grads),
    "ids go to another rank": (routing, "_owned_rows", _elsewhere),
    "a lane begins one id late": (sequence, "lane_places", lambda made: lambda *args: made(*args).roll(1, -1)),
    "weights are forgotten on the way back": (sequence, "weigh", lambda made: lambda rows, bags: rows),
    "a lane's rows are another lane's": (sequence, "lane_places", lambda made: lambda routed, i, n: made(routed, (i + 1) % 3, n)),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_rule_is_seen(which, monkeypatch):
    """The law fails when a rule of the way there or back is changed."""
    module, name, wrong = WRONG[which]
    kind = "replicated" if name == "sync_grads" else "row_wise"
    model = fixed(fr.Mesh.emulated(x=2), kind)
    want = whole(model)
    assert_trees_close(mapped(model), want)
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    with pytest.raises((AssertionError, ValueError)):
        assert_trees_close(mapped(model), want)


def test_terms_of_several_lookups_are_added_rank_by_rank(monkeypatch):
    """A table of two lookups gets rank 0's terms of both before rank 1's: in another order the sums are rounded otherwise."""
    mesh, plan, tables, _, features = fixed(fr.Mesh.emulated(x=2), "row_wise")
    lists = {k: [[(i * j) % 3 for j in range(5)] for i in range(8)] for k in "uv"}
    weights = {k: [[0.1 + 0.3 * j for j in range(5)] for _ in range(8)] for k in "uv"}
    ids = fr.KeyedJaggedTensor.from_lists(lists, weights=weights, dtype=torch.int64)
    model = mesh, plan, tables, ids, features
    want = whole(model)
    assert_trees_close(mapped(model), want)
    monkeypatch.setattr(_sharded, "sync_grads", lambda grads, layout: grads)
    with pytest.raises(AssertionError):
        assert_trees_close(mapped(model)[1], want[1])
    assert_trees_close(mapped(model)[1], want[1], rtol=1e-6, atol=1e-6)
