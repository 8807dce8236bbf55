"""Models, plans and meshes for laws of placements, and the models' lookups on a mesh and in one process."""

import torch
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import strategies as frs


@st.composite
def models(draw, kinds=frs.PLACEMENTS):
    """Return random (mesh, plan, tables, ids, features): a few tables of odd sizes, with several features each. Shrinks
    to one table on one rank."""
    mesh = draw(frs.meshes())
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    shapes = {n: (draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 5, 8]))) for n in names}
    plan = draw(frs.plans(shapes, mesh, kinds=kinds))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]))
    tables = fr.init(fr.key(draw(st.integers(0, 5))), [fr.TableConfig(n, *s, dtype=dtype) for n, s in shapes.items()])
    num_bags = mesh.size * draw(st.integers(1, 2))
    columns = ["u", "v"][: draw(st.integers(1, 2))]
    bags = st.lists(st.integers(-1, 10), max_size=4)
    lists = {c: draw(st.lists(bags, min_size=num_bags, max_size=num_bags)) for c in columns}
    weighted = draw(st.booleans())
    weights = {c: [[0.5 + 0.25 * (i % 5) for i in bag] for bag in b] for c, b in lists.items()} if weighted else None
    features = [
        fr.FeatureConfig(
            f"f{i}", table=draw(st.sampled_from(names)), column=draw(st.sampled_from(columns)),
            pooling=draw(st.sampled_from(["sum", "mean"])), weighted=weighted and draw(st.booleans()),
            hash=draw(st.sampled_from([None, None, fr.modulo(), fr.multiply_shift(3)])),
            max_length=draw(st.sampled_from([None, None, 2])),
        )
        for i in range(draw(st.integers(1, 4)))
    ]  # fmt: skip
    ids = fr.KeyedJaggedTensor.from_lists(lists, weights=weights, dtype=torch.int64)
    return mesh, plan, tables, ids, features


def zeros_like(table):
    return torch.zeros_like(table, dtype=torch.promote_types(table.dtype, torch.float32))


def sharded(model, **options):
    """Return (acts of the global batch, {table: dense gradient}) of a mapped function on the plan's mesh."""
    mesh, plan, tables, ids, features = model
    held = fr.shard_tables(tables, plan, mesh, **options)
    everywhere = fr.P(mesh.axis_names)

    def one_rank(held, ids, d):
        loss = lambda params, ids: (fr.lookup(params.tables, ids, features).values * d).sum()
        _, grads = fr.value_and_grad(loss)(fr.Params(held, {}), ids)
        dense = {
            b: g.coalesce().to_dense()
            for b, g in fr.sharding._gather_terms.gather_terms(grads.tables, held.layout)[0].items()
        }
        return fr.lookup(held, ids, features).values, {
            b.name: dense.get(b.name, zeros_like(held[b.name])) for b in held.layout.banks
        }

    d = direction(model)
    f = fr.shard_map(
        one_rank,
        mesh=mesh,
        in_specs=(held.specs(), everywhere, everywhere),
        out_specs=(everywhere, held.layout.specs()),
    )
    acts, grads = f(held, ids, d)
    return acts, fr.sharding._tables.gather_banks(held.layout, grads, mesh)


def direction(model):
    out = fr.lookup(model[2], model[3], model[4]).values
    return (torch.arange(out.numel(), dtype=out.dtype) * 0.37 + 1).sin().reshape(out.shape)


def whole(model):
    """Return the results of `sharded` from one process, which adds the gradients of the ranks' batches."""
    mesh, _, tables, ids, features = model
    acts, per = fr.lookup(tables, ids, features), ids.num_examples // mesh.size
    total = None
    for r in range(mesh.size):
        mine = ids[r * per : (r + 1) * per]
        d = fr.KeyedTensor(direction(model)[r * per : (r + 1) * per], acts.keys, acts.dims)
        grads = fr.lookup_transpose(d, mine, features, tables)
        total = grads if total is None else {n: total[n] + g for n, g in grads.items()}
    return acts.values, {n: total[n].coalesce().to_dense() if n in total else zeros_like(t) for n, t in tables.items()}
