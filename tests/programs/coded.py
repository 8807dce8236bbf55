"""Coded lookups and their gradients, emulated and on ranks, and a model whose training is a convex problem."""

import torch

import funcrec as fr
from funcrec.core._tree import replace
from programs import lookup_transforms as lookups
from programs.placement_models import zeros_like
from programs.sequence_models import FIXED, activations


def looked_up(model, d, codec=None, exact=False):
    """Return (acts, {table: dense gradient}) of the global batch. The acts have cotangents d."""
    mesh, plan, tables, ids, features = model
    held, everywhere = fr.shard_tables(tables, plan, mesh, exact=exact, codec=codec), fr.P(mesh.axis_names)

    def one_rank(held, ids, d):
        loss = lambda p, ids: (fr.lookup(p.tables, ids, features).values * d).sum()
        _, grads = fr.value_and_grad(loss)(fr.Params(held, {}), ids)
        return fr.lookup(held, ids, features).values, dense(grads.tables, held)

    specs = {"in_specs": (held.specs(), everywhere, everywhere), "out_specs": (everywhere, held.layout.specs())}
    own = fr.shard((ids, d), everywhere, mesh=mesh)
    acts, grads = fr.shard_map(one_rank, mesh=mesh, **specs)(held, *own)
    return fr.unshard(acts, everywhere, mesh=mesh), fr.sharding._tables.gather_banks(held.layout, grads, mesh)


def dense(grads, held):
    """Return {bank: f[rows, dim]}, the dense gradients."""
    gathered, _ = fr.sharding._gather_terms.gather_terms(grads, held.layout)
    made = {b: g.coalesce().to_dense() for b, g in gathered.items()}
    return {b.name: made.get(b.name, zeros_like(held[b.name])) for b in held.layout.banks}


def fixed(mesh, kind):
    """Return a model of f32 tables with weighted, mean and sequence features."""
    tables = {n: t.float() for n, t in lookups.tables().items()}
    ids = lookups.batch(mesh.size)
    return mesh, fr.Plan.uniform(kind, tables, mesh), tables, replace(ids, weights=ids.weights.float()), FIXED


def sequences(mesh, kind, codec):
    """Return (each rank's sequences, {table: dense gradient}) of a model whose sequences and pooled features share
    tables. The cotangents depend on no value."""
    _, plan, tables, ids, features = fixed(mesh, kind)
    held, everywhere = fr.shard_tables(tables, plan, mesh, codec=codec), fr.P(mesh.axis_names)
    wave = lambda x: (torch.arange(x.numel(), dtype=x.dtype) * 0.37 + 1).sin().reshape(x.shape)

    def one_rank(held, ids):
        loss = lambda p, ids: sum((x * wave(x)).sum() for x in activations(p.tables, ids, features).values())
        _, grads = fr.value_and_grad(loss)(fr.Params(held, {}), ids)
        return {k: x[None] for k, x in activations(held, ids, features).items()}, dense(grads.tables, held)

    specs = {"in_specs": (held.specs(), everywhere), "out_specs": (everywhere, held.layout.specs())}
    got, grads = fr.shard_map(one_rank, mesh=mesh, **specs)(held, fr.shard(ids, everywhere, mesh=mesh))
    return fr.unshard(got, everywhere, mesh=mesh), fr.sharding._tables.gather_banks(held.layout, grads, mesh)


def cases(mesh, kinds, codecs):
    """Return all results for every placement and codec, to compare their bits."""
    out = {}
    for kind in kinds:
        model = fixed(mesh, kind)
        pooled = (*model[:4], [f for f in FIXED if f.pooling != "none"])
        d = (torch.arange(mesh.size * lookups.BAGS * 8) * 0.7).sin().reshape(-1, 8)
        for codec in codecs:
            both = [looked_up(pooled, d, codec, exact) for exact in (False, True)]
            out[f"{kind}, {codec}"] = (*both, sequences(mesh, kind, codec))
    return out


def real_cases(axes, kinds, codecs):
    return cases(fr.Mesh.distributed(**axes), kinds, codecs)
