"""Models with sequences, with lookups and gradients on a mesh and in one process."""

import torch
from hypothesis import strategies as st

import funcrec as fr
from funcrec.core._tree import replace
from funcrec.sharding import _gather_terms, _tables
from programs import lookup_transforms as lookups
from programs.placement_models import models, zeros_like


@st.composite
def sequence_models(draw):
    """Return a random model of `models` with at least one sequence among its features."""
    mesh, plan, tables, ids, features = draw(models())
    turned = [replace(f, pooling="none") if i == 0 or draw(st.booleans()) else f for i, f in enumerate(features)]
    return mesh, plan, tables, ids, turned


def activations(tables, ids, features):
    """Return {feature: f[...]} of pooled features and sequences, from two lookups."""
    out = {k: x.values for k, x in fr.lookup_sequence(tables, ids, features).items()}
    pooled = [f for f in features if f.pooling != "none"]
    return out | ({"pooled": fr.lookup(tables, ids, features).values} if pooled else {})


def loss(tables, ids, features):
    """Return a loss, a sum that weighs every element differently."""
    wave = lambda x: (torch.arange(x.numel(), device=x.device, dtype=x.dtype) * 0.37 + 1).sin().reshape(x.shape)
    return sum((x * wave(x)).sum() for x in activations(tables, ids, features).values())


def mapped(model, capacity=None, dedup=False):
    """Return (each rank's sequences as lists and offsets, {table: dense gradient}) of a mapped function on the
    plan's mesh."""
    mesh, plan, tables, ids, features = model
    held, everywhere = (
        fr.shard_tables(tables, plan, mesh, exact=not dedup, capacity=capacity, dedup=dedup),
        fr.P(mesh.axis_names),
    )

    def one_rank(held, ids):
        _, grads = fr.value_and_grad(lambda p, ids: loss(p.tables, ids, features))(fr.Params(held, {}), ids)
        gathered, _ = _gather_terms.gather_terms(grads.tables, held.layout)
        dense = {b: g.coalesce().to_dense() for b, g in gathered.items()}
        sequences = {k: (x.values[None], x.offsets[None]) for k, x in fr.lookup_sequence(held, ids, features).items()}
        return sequences, {b.name: dense.get(b.name, zeros_like(held[b.name])) for b in held.layout.banks}

    specs = {"in_specs": (held.specs(), everywhere), "out_specs": (everywhere, held.layout.specs())}
    sequences, grads = fr.shard_map(one_rank, mesh=mesh, **specs)(held, fr.shard(ids, everywhere, mesh=mesh))
    return fr.unshard(sequences, everywhere, mesh=mesh), _tables.gather_banks(held.layout, grads, mesh)


def whole(model):
    """Return the results of `mapped` from one process, rank after rank."""
    mesh, _, tables, ids, features = model
    stacked, total, sequences = fr.mesh._parts._stack_bags(ids, mesh.size), None, []
    for r in range(mesh.size):
        mine = fr.core._tree.tree_map(lambda x, r=r: x[r], stacked)
        sequences.append({k: (x.values, x.offsets) for k, x in fr.lookup_sequence(tables, mine, features).items()})
        _, grads = fr.value_and_grad(lambda p, ids: loss(p.tables, ids, features))(fr.Params(tables, {}), mine)
        total = grads.tables if total is None else {n: total[n] + g for n, g in grads.tables.items()}
    stacked = fr.core._tree.tree_map(lambda *xs: torch.stack(xs), *sequences)
    return stacked, {n: g.coalesce().to_dense() for n, g in total.items()}


FIXED = (
    *lookups.FEATURES,
    fr.FeatureConfig("s0", table="a", column="u", pooling="none", weighted=True),
    fr.FeatureConfig("s1", table="b", column="u", pooling="none", max_length=2),
    fr.FeatureConfig("s2", table="a", column="v", pooling="none", hash=fr.modulo()),
)


def fixed(mesh, kind):
    """Return a model with pooled and sequence features of the same tables."""
    tables = {n: t.float() for n, t in lookups.tables().items()}
    ids = lookups.batch(mesh.size)
    return mesh, fr.Plan.uniform(kind, tables, mesh), tables, replace(ids, weights=ids.weights.float()), FIXED
