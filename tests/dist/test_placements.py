"""Sharded lookups and their gradients under every placement, on emulated meshes, against one process."""

import torch
from hypothesis import given
from placement_models import models, zeros_like

import funcrec as fr
from funcrec.testing import assert_trees_close


def sharded(model, **options):
    """(acts of the global batch, {table: dense gradient}) by a mapped function on the plan's mesh."""
    mesh, plan, tables, ids, features = model
    held = fr.shard_tables(tables, plan, mesh, **options)
    everywhere = fr.P(mesh.axis_names)

    def one_rank(held, ids, d):
        loss = lambda params, ids: (fr.lookup(params.tables, ids, features).values * d).sum()
        _, grads = fr.value_and_grad(loss)(fr.Params(held, {}), ids)
        dense = {b: g.coalesce().to_dense() for b, g in fr._sharded.sync_grads(grads.tables, held.layout).items()}
        return fr.lookup(held, ids, features).values, {b.name: dense.get(b.name, zeros_like(held[b.name])) for b in held.layout.banks}

    d = direction(model)
    f = fr.shard_map(one_rank, mesh=mesh, in_specs=(held.specs(), everywhere, everywhere), out_specs=(everywhere, held.layout.specs()))
    acts, grads = f(held, ids, d)
    return acts, fr._sharded.gather_banks(held.layout, grads, mesh)


def direction(model):
    out = fr.lookup(model[2], model[3], model[4]).values
    return (torch.arange(out.numel(), dtype=out.dtype) * 0.37 + 1).sin().reshape(out.shape)


def whole(model):
    """The same in one process, which adds the gradients of the ranks' batches."""
    mesh, _, tables, ids, features = model
    acts, per = fr.lookup(tables, ids, features), ids.num_bags // mesh.size
    total = None
    for r in range(mesh.size):
        mine = ids[r * per : (r + 1) * per]
        d = fr.KeyedTensor(direction(model)[r * per : (r + 1) * per], acts.keys, acts.dims)
        grads = fr.lookup_transpose(d, mine, features, tables)
        total = grads if total is None else {n: total[n] + g for n, g in grads.items()}
    return acts.values, {n: total[n].coalesce().to_dense() if n in total else zeros_like(t) for n, t in tables.items()}


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
