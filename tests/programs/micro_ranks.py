"""Steps in micro-batches on ranks whose bags differ in length, and in one process that loops over all parts."""

import torch

import funcrec as fr
from programs import ordered

KINDS = ("table_wise", "row_wise", "column_wise", "replicated", "table_row_wise", "table_column_wise", "grid")
EXAMPLES = 16


def shapes_of(kinds):
    """Return two tables of 8 columns and one of 6, or one table for each placement."""
    dims = {"a": 8, "b": 8, "c": 6} if isinstance(kinds, str) else {f"t{i}": 4 + 2 * (i % 2) for i in range(len(kinds))}
    return {n: (9 + i, d) for i, (n, d) in enumerate(dims.items())}


def plan_of(kinds, axes):
    """Return a plan that places all tables alike, or each table by its own placement."""
    mesh, shapes = fr.Mesh.emulated(**axes), shapes_of(kinds)
    if isinstance(kinds, str):
        return fr.Plan.uniform(kinds, shapes, mesh)
    each = zip(shapes.items(), kinds, strict=True)
    return fr.Plan({n: dict(fr.Plan.uniform(kind, {n: s}, mesh).placements)[n] for (n, s), kind in each})


def features_of(shapes, pooling):
    """Return one feature for each table, and one more feature. The latter looks up the second column's ids in the first
    table."""
    first, second = list(shapes)[:2]
    own = [fr.FeatureConfig(n, table=n, pooling=pooling) for n in shapes]
    return [*own, fr.FeatureConfig("more", table=first, column=second, pooling="mean", weighted=True)]


def drawn(seed, shapes):
    """Return a random batch whose ranks and parts have different numbers of ids, sometimes none. Each pair of examples
    draws its own limit."""
    g = torch.Generator().manual_seed(seed)
    most = torch.randint(0, 6, (EXAMPLES // 2,), generator=g).repeat_interleave(2)
    bag = lambda m, n: torch.randint(-1, n + 1, (int(torch.randint(0, int(m) + 1, (), generator=g)),), generator=g)
    lists = {n: [bag(m, s[0]).tolist() for m in most] for n, s in shapes.items()}
    ids = fr.KeyedJaggedTensor.from_lists(lists, dtype=torch.int64)
    weights = torch.rand(ids.capacity, generator=g)
    ids = fr.KeyedJaggedTensor(ids.values, ids.offsets, weights, None, ids.keys).pad_to(80 * len(shapes))
    return fr.Batch(ids, torch.rand(EXAMPLES, generator=g), weight=torch.rand(EXAMPLES, generator=g))


def loss_of(shapes, pooling):
    """Return a loss whose sums are in one order for any number of examples."""
    features = features_of(shapes, pooling)

    def loss_fn(params, batch):
        logits = ordered.total(fr.lookup(params.tables, batch.ids, features).values * params.dense["w"], 1)
        return fr.losses.mse(logits, batch.label)

    return loss_fn


def params_of(shapes):
    tables = fr.init(fr.key(1), [fr.TableConfig(n, *s) for n, s in shapes.items()])
    width = sum(d for _, d in shapes.values()) + next(iter(shapes.values()))[1]
    return fr.Params(tables, {"w": torch.linspace(-1, 1, width).sin()})


def optimizers():
    return {"sparse": fr.optim.adam(lr=0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}


def looped(kinds, pooling, seed, ranks, k):
    """Return (tables, dense, loss) of one process that takes the parts of all ranks one after the other."""
    shapes = shapes_of(kinds)
    params, batch, per = params_of(shapes), drawn(seed, shapes), EXAMPLES // ranks
    loss_fn, sparse, dense = loss_of(shapes, pooling), *optimizers().values()
    differentiated = fr.accumulate_grads(lambda p, b: loss_fn(p, b) / ranks, k)
    total, rows, losses = None, {}, 0.0
    for r in range(ranks):
        mine = slice(r * per, (r + 1) * per)
        own = fr.Batch(batch.ids[mine], batch.label[mine], weight=batch.weight[mine])
        loss, grads = differentiated(params, own)
        losses += float(loss)
        total = grads.dense if total is None else {n: total[n] + g for n, g in grads.dense.items()}
        rows = {n: rows[n] + g if n in rows else g for n, g in grads.tables.items()}
    tables, _ = sparse.update(rows, sparse.init(params.tables), params.tables, 0)
    weights, _ = dense.update(total, dense.init(params.dense), params.dense, 0)
    return tables, weights, torch.tensor(losses)


def stepped(kinds, pooling, seeds, axes, k, is_real, compiled=False):
    """Return [(tables, dense, loss)], the first step of train_step on a mesh for each seed."""
    mesh = (fr.Mesh.distributed if is_real else fr.Mesh.emulated)(**axes)
    shapes = shapes_of(kinds)
    where = {"mesh": mesh, "plan": plan_of(kinds, axes), "exact": True}
    step = fr.train_step(loss_of(shapes, pooling), **optimizers(), **where, micro_batches=k)
    state, run, made = step.init(params_of(shapes)), fr.jit(step) if compiled else step, []
    for seed in seeds:
        batch = drawn(seed, shapes)
        mine = fr.shard(batch, fr.P(mesh.axis_names), mesh=mesh)
        mine = fr.Batch(mine.ids.pad_to(batch.ids.capacity), mine.label, weight=mine.weight) if is_real else mine
        new, metrics = run(state, mine)
        made.append((fr.gather_tables(new.tables, mesh), new.dense, metrics["loss"]))
    return made


def nested(mesh):
    """Return sums of all ids over a grid. The rows of ranks of the grid have 2 and 80 ids. A call on one axis is nested
    in a call on the other axis."""
    whole = fr.KeyedJaggedTensor.from_lists({"a": [[1], [2], [3] * 40, [4] * 40]}).pad_to(100)
    used = lambda ids: torch.where(torch.arange(ids.capacity) < ids.offsets[-1], ids.values, 0)
    inner = lambda ids: (fr.all_gather(used(ids), ("x", "y")).sum()[None], fr.psum(ids.lengths.sum()[None], "y"))
    on_y = lambda ids: fr.shard_map(inner, mesh=mesh, in_specs=fr.P("y"), out_specs=fr.P())(ids)
    on_x = fr.shard_map(on_y, mesh=mesh, in_specs=fr.P("x"), out_specs=(fr.P(), fr.P("x")), axis_names={"x"})
    return fr.unshard(on_x(fr.shard(whole, fr.P("x"), mesh=mesh)), (fr.P(), fr.P("x")), mesh=mesh)


def real_nested():
    return nested(fr.Mesh.distributed(x=2, y=2))


def joined_unlike():
    """Return the errors of `unshard` on two ranks for two trees. The shards of a tree differ in form: a tensor, and
    ids."""
    mesh, more = fr.Mesh.distributed(x=2), torch.distributed.get_rank()
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[1]]}).pad_to(16 + 8 * more)
    return [why(lambda x=x: fr.unshard(x, fr.P("x"), mesh=mesh)) for x in (torch.zeros(2 + more), ids)]


def why(fn):
    try:
        fn()
    except ValueError as error:
        return str(error)
    return ""


def uncut(k):
    """Return the error of a step in k micro-batches on two ranks for a batch that k does not divide."""
    return why(lambda: stepped("row_wise", "sum", [0], {"x": 2}, k, True))
