"""Towers, plans and meshes for laws of towers, and the towers' outputs and gradients on a mesh and in one process."""

import torch
from hypothesis import strategies as st

import funcrec as fr

SUM = fr.nn.Layer(lambda key: {}, lambda params, x: x[:, :1] + x[:, -1:])
SAME = fr.nn.Layer(lambda key: {}, lambda params, x: x)
# Its derivative is infinite where all columns are equal, as they are for a node without such a tower.
SINGULAR = fr.nn.Layer(
    lambda key: {"scale": torch.ones(())},
    lambda params, x: params["scale"] * (x - x[:, :1]).square().sum(1, keepdim=True).log(),
)


def placed(node, sizes, i, kind):
    """Return a placement on one node of a mesh with these sizes."""
    if kind == "table_wise":
        return fr.table_wise(("node", "local"), rank=node * sizes[1] + i % sizes[1])
    if kind == "of copies":  # the ranks of a node hold one table each
        return fr.table_wise("node", rank=node)
    if kind == "replicated":
        return fr.replicated()
    if kind == "of other order":
        return fr.table_wise(("local", "node"), rank=i % sizes[1] * sizes[0] + node)
    return {"table_row_wise": fr.table_row_wise, "table_column_wise": fr.table_column_wise}[kind](
        ("node", "local"), rank=node
    )


KINDS = ("table_wise", "table_row_wise", "table_column_wise", "of copies", "of other order", "replicated")
POOLINGS = ("sum", "mean", "sum", "mean", "max")
MESHES = ((1, 1), (2, 1), (2, 2), (1, 2), (3, 2), (2, 4))


@st.composite
def models(draw, layers=(SAME, SUM, "mlp"), kinds=KINDS, dtypes=((torch.float64,),), poolings=POOLINGS, alike=None):
    """Return random (mesh, plan, tables, ids, towers). It shrinks to one tower on one rank."""
    sizes = draw(st.sampled_from(MESHES))
    mesh = fr.Mesh.emulated(node=sizes[0], local=sizes[1])
    own_dtypes = draw(st.sampled_from(dtypes))
    alike = draw(st.booleans()) if alike is None else alike
    num_towers = draw(st.integers(1, 4))
    dims = st.lists(st.sampled_from([1, 2, 5]), min_size=1, max_size=3)
    each = [draw(dims)] * num_towers if alike else [draw(dims) for _ in range(num_towers)]
    shared = {w: fr.nn.mlp((w, 3, 2)) for w in set(map(sum, each))}
    tables, plan, towers, columns = [], {}, {}, ["u", "v"]
    weighted = draw(st.booleans())
    for t, widths in enumerate(each):
        node, features = draw(st.integers(0, sizes[0] - 1)), []
        for i, dim in enumerate(widths):
            name = f"t{len(tables)}"
            tables.append(fr.TableConfig(name, draw(st.integers(1, 9)), dim, dtype=draw(st.sampled_from(own_dtypes))))
            plan[name] = placed(node, sizes, i, draw(st.sampled_from(kinds)))
            hashed = draw(st.sampled_from([None, None, fr.modulo(), fr.multiply_shift(3)]))
            features.append(
                fr.FeatureConfig(
                    f"f{len(tables)}", table=name, column=draw(st.sampled_from(columns)), hash=hashed,
                    pooling=draw(st.sampled_from(poolings)),
                    weighted=weighted and draw(st.booleans()), max_length=draw(st.sampled_from([None, None, 2])),
                )
            )  # fmt: skip
        layer = draw(st.sampled_from(layers[-1:] if alike else layers))
        own = fr.nn.mlp((sum(widths), 2)) if layer == "mlp" and not alike and draw(st.booleans()) else layer
        towers[f"tower{t}"] = fr.Tower(features, shared[sum(widths)] if own == "mlp" else own)
    num_bags = mesh.size * draw(st.integers(0, 2))
    bags = st.lists(st.integers(-1, 10), max_size=3)
    lists = {c: draw(st.lists(bags, min_size=num_bags, max_size=num_bags)) for c in columns}
    weights = {c: [[0.5 + 0.25 * (i % 5) for i in bag] for bag in b] for c, b in lists.items()} if weighted else None
    ids = fr.KeyedJaggedTensor.from_lists(lists, weights=weights, dtype=torch.int64)
    return mesh, fr.Plan(plan), fr.init(fr.key(draw(st.integers(0, 5))), tables), ids, towers


def towers_of(num_nodes, per_node, layers, nodes=None, dims=(2, 1), dtype=torch.float64, mesh=None, least=0):
    """Return (mesh, plan, tables, ids, towers): a tower for each layer, on node i mod n or those of `nodes`, whose
    tables lie on ranks in turn."""
    nodes = nodes or [t % num_nodes for t in range(len(layers))]
    named = {f"t{t}{j}": (t, j, dim) for t in range(len(layers)) for j, dim in enumerate(dims)}
    rank = lambda t, j: nodes[t] * per_node + j % per_node
    plan = fr.Plan({n: fr.table_wise(("node", "local"), rank=rank(t, j)) for n, (t, j, _) in named.items()})
    feature = lambda t, j: fr.FeatureConfig(f"f{t}{j}", table=f"t{t}{j}", column="uv"[j % 2])
    towers = {f"w{t}": fr.Tower([feature(t, j) for j in range(len(dims))], x) for t, x in enumerate(layers)}
    tables = fr.init(fr.key(0), [fr.TableConfig(n, 6, dim, dtype=dtype) for n, (_, _, dim) in named.items()])
    mesh = fr.Mesh.emulated(node=num_nodes, local=per_node) if mesh is None else mesh
    return mesh, plan, tables, some_ids(4 * num_nodes * per_node, least=least), towers


def some_ids(num_bags, seed=0, least=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda most, size: torch.randint(0, most, (size,), generator=g).tolist()
    lists = {c: [draw(6, least + draw(4 - least, 1)[0]) for _ in range(num_bags)] for c in "uv"}
    return fr.KeyedJaggedTensor.from_lists(lists, dtype=torch.int64).pad_to(4 * num_bags * 2)


def params_of(towers, dtype=torch.float64):
    return fr.tree.to(fr.towers(towers).init(fr.key(1)), dtype=dtype)


def direction(num_bags, width, dtype):
    return (torch.arange(num_bags * width, dtype=dtype) * 0.37 + 1).sin().reshape(num_bags, width)


def loss_of(model, d):
    return lambda params, ids, d: (model.apply(params.dense, params.tables, ids) * d).sum()


def whole(model, axis="node"):
    """Return (outputs, {table: dense gradient}, gradients of the layers) in one process, on plain tables."""
    _, _, tables, ids, towers = model
    layer, params = fr.towers(towers, axis=axis), params_of(towers)
    out = layer.apply(params, tables, ids)
    d = direction(*out.shape, torch.float64)
    grads = fr.value_and_grad(loss_of(layer, d))(fr.Params(tables, params), ids, d)[1]
    wide = lambda t: torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
    return (
        out,
        {n: grads.tables[n].to_dense() if n in grads.tables else wide(t) for n, t in tables.items()},
        grads.dense,
    )


def on_mesh(model, axis="node", through=lambda f: f, **options):
    """Return the results of `whole` from the ranks of a mesh."""
    mesh, plan, tables, ids, towers = model
    layer, params, everywhere = fr.towers(towers, axis=axis), params_of(towers), fr.P(mesh.axis_names)
    held = fr.shard_tables(tables, plan, mesh, **options)
    width = layer.apply(params, tables, ids).shape
    d = fr.shard(direction(*width, torch.float64), everywhere, mesh=mesh)

    def one_rank(held, params, ids, d):
        out = layer.apply(params, held, ids)
        grads = fr.value_and_grad(loss_of(layer, d))(fr.Params(held, params), ids, d)[1]
        rows = fr.sharding._gather_terms.gather_terms(grads.tables, held.layout)[0]
        blank = lambda b: torch.zeros_like(held[b], dtype=torch.promote_types(held[b].dtype, torch.float32))
        of_banks = {b.name: b.name in rows and rows[b.name].to_dense() for b in held.layout.banks}
        return (
            out,
            {b: blank(b) if g is False else g for b, g in of_banks.items()},
            fr.psum(grads.dense, mesh.axis_names),
        )

    specs = (held.specs(), fr.P(), everywhere, everywhere), (everywhere, held.layout.specs(), fr.P())
    f = fr.shard_map(one_rank, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
    out, grads, dense = through(f)(held, params, fr.shard(ids, everywhere, mesh=mesh), d)
    return fr.unshard(out, everywhere, mesh=mesh), fr.sharding._tables.gather_banks(held.layout, grads, mesh), dense


def trained(mesh, kind, layers, through=lambda step, donate: step, num_steps=3, **options):
    """Return {table: rows}, the dense parameters and the metrics of the last of the steps, on a mesh or, without one,
    in one process."""
    _, _, tables, _, towers = towers_of(2, 1, layers, dtype=torch.float32)
    model, top = fr.towers(towers), fr.nn.linear(2 * len(layers), 1)

    def loss(params, batch):
        y = model.apply(params.dense["towers"], params.tables, batch.ids).relu()
        return fr.losses.bce(top.apply(params.dense["top"], y)[:, 0], batch.label)

    options |= {"sparse": fr.optim.rowwise_adagrad(0.1), "dense": fr.optim.dense(torch.optim.Adam, lr=0.01)}
    if mesh is not None:
        options |= {"mesh": mesh, "plan": fr.Plan(fr.tower_placements(towers, mesh, kind=kind))}
    step = fr.train_step(loss, **options)
    run = through(step, donate=("state",))
    state, metrics = step.init(fr.Params(tables, {"towers": model.init(fr.key(1)), "top": top.init(fr.key(2))})), {}
    for i in range(num_steps):
        batch = fr.Batch(some_ids(16, seed=i), (torch.arange(16) % (i + 2) == 0).float())
        state, metrics = run(state, batch if mesh is None else fr.shard(batch, fr.P(mesh.axis_names), mesh=mesh))
    return dict(state.tables) if mesh is None else fr.gather_tables(state.tables, mesh), state.dense, metrics


def two_layers():
    shared = fr.nn.mlp((3, 4, 2))
    return [shared, fr.nn.linear(3, 2), shared]


def results(mesh):
    return on_mesh(towers_of(2, 2, two_layers(), mesh=mesh))


def real_results():
    return results(fr.Mesh.distributed(node=2, local=2))


def real_trained():
    return trained(fr.Mesh.distributed(node=2), "table_wise", two_layers(), fr.jit)


def sent_bytes():
    """Return ({axis: bytes} of lookups without towers, {axis: bytes} of two towers), of a rank of 2 x 2 gloo ranks."""
    mesh = fr.Mesh.distributed(node=2, local=2)
    features = [fr.FeatureConfig(f"f{i}", table=f"t{i}", max_length=1) for i in range(26)]
    layer = fr.nn.linear(13 * 16, 40)
    towers = {"a": fr.Tower(features[:13], layer), "b": fr.Tower(features[13:], layer)}
    tables = fr.init(fr.key(0), [fr.TableConfig(f.table, 9, 16) for f in features])
    held = fr.shard_tables(tables, fr.Plan(fr.tower_placements(towers, mesh)), mesh)
    model, everywhere = fr.towers(towers), fr.P(("node", "local"))
    ids = fr.KeyedJaggedTensor.from_lists({f.name: [[1]] * 32 for f in features})
    params = model.init(fr.key(1))
    names = {a.group: a.name for a in mesh.bound_axes(("node", "local"), torch.device("cpu"))}

    def bytes_of(f):
        specs = {"in_specs": (fr.P(), held.specs(), everywhere), "out_specs": everywhere}
        program = fr.jit(fr.shard_map(f, mesh=mesh, **specs)).lower(params, held, ids)
        nodes = [n for n in program.graph.graph.nodes if n.target in fr.mesh.LEAVES]
        found = dict.fromkeys(names.values(), 0)
        for node, sent in zip(nodes, program.exchanges, strict=True):
            found[names[node.args[-1]]] += sent.sent_bytes
        return found

    return bytes_of(lambda p, t, i: fr.lookup(t, i, features).values), bytes_of(model.apply)
