"""Quantised tables on a mesh: the rows that its ranks look up for their own bags, and the gathered tables."""

import torch

import funcrec as fr

FEATURES = (
    fr.FeatureConfig("sum", table="a", column="x", weighted=True),
    fr.FeatureConfig("mean", table="b", column="y", pooling="mean", hash=fr.modulo()),
    fr.FeatureConfig("short", table="a", column="y", hash=fr.multiply_shift(3), max_length=2),
    fr.FeatureConfig("wide", table="c", column="x", pooling="mean", weighted=True),
    fr.FeatureConfig("again", table="d", column="y"),
)
SEQUENCES = (fr.FeatureConfig("seq", table="a", column="x", pooling="none", weighted=True, max_length=2),)
DTYPES = {"a": "int4", "b": "int8", "c": "float16", "d": "int2"}
BAGS = 8


def tables():
    draw = torch.Generator().manual_seed(0)
    return {n: torch.randn(9, d, generator=draw) for n, d in {"a": 5, "b": 8, "c": 4, "d": 7}.items()}


def ids():
    draw = torch.Generator().manual_seed(1)
    lists = {k: [torch.randint(-1, 11, (n,), generator=draw).tolist() for n in (3, 0, 1, 2, 5, 0, 1, 4)] for k in "xy"}
    weights = {k: [[0.1 + 0.3 * i for i, _ in enumerate(bag)] for bag in bags] for k, bags in lists.items()}
    return fr.KeyedJaggedTensor.from_lists(lists, weights=weights, dtype=torch.int64)


def plan_of(kind, mesh):
    return fr.Plan.uniform(kind, [fr.TableConfig(n, *t.shape) for n, t in tables().items()], mesh)


def values(held, batch):
    """Return (f[B, D] of the pooled features, f[B, L, D] of each sequence)."""
    rows = fr.lookup_sequence(held, batch, SEQUENCES)
    return fr.lookup(held, batch, FEATURES).values, {k: x.to_padded(2) for k, x in rows.items()}


def whole():
    return values(fr.quantize(tables(), DTYPES), ids())


def looked_up(axes, kind, how, *, real=False, late=None, dtypes=DTYPES):
    """Return (the values that all ranks look up for their bags, the gathered tables). late: a dtype to which the
    placed tables are quantised."""
    mesh = (fr.Mesh.distributed if real else fr.Mesh.emulated)(**axes)
    given = tables() if late else fr.quantize(tables(), dtypes)
    held = fr.shard_tables(given, plan_of(kind, mesh), mesh, **how)
    held = fr.quantize(held, late) if late else held
    spec = fr.P(mesh.axis_names)
    run = fr.shard_map(values, mesh=mesh, in_specs=(held.specs(), spec), out_specs=spec)
    out = run(held, fr.shard(ids(), spec, mesh=mesh))
    return fr.unshard(out, spec, mesh=mesh), fr.gather_tables(held, mesh)


def on_ranks(axes, kind, how):
    return looked_up(axes, kind, how, real=True)


def loss_of(params, batch, how=None):
    """Return a loss over bags that reads tables fake-quantised to DTYPES, or to `how`. Each bag weighs the same on
    every mesh."""
    acts, rows = values(params.tables if how is None else fr.fake_quantize(params.tables, how, key=KEY), batch)
    return (acts.cos().sum(1) + sum(x.sin().sum((1, 2)) for x in rows.values())).mean() * params.dense


KEY = fr.key(3)


def trained(axes, kind, how, dtypes, *, real=False):
    """Return (the values that all ranks read from rows rounded with a key, loss, tables after a step). With axes None,
    one process computes them."""
    make = {"sparse": fr.optim.sgd(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
    loss_fn, params = (lambda p, batch: loss_of(p, batch, dtypes)), fr.Params(tables(), torch.tensor(1.0))
    read = lambda held, batch: values(fr.fake_quantize(held, dtypes, key=KEY), batch)
    if axes is None:
        step = fr.train_step(loss_fn, **make)
        state, metrics = step(step.init(params), ids())
        return read(tables(), ids()), metrics["loss"], state.tables
    mesh = (fr.Mesh.distributed if real else fr.Mesh.emulated)(**axes)
    spec, plan = fr.P(mesh.axis_names), plan_of(kind, mesh)
    held, batch = fr.shard_tables(tables(), plan, mesh, **how), fr.shard(ids(), spec, mesh=mesh)
    run = fr.shard_map(read, mesh=mesh, in_specs=(held.specs(), spec), out_specs=spec)
    step = fr.train_step(loss_fn, **make, mesh=mesh, plan=plan, **how)
    state, metrics = step(step.init(params), batch)
    return fr.unshard(run(held, batch), spec, mesh=mesh), metrics["loss"], fr.gather_tables(state.tables, mesh)


def trained_on_ranks(axes, kind, how, dtypes):
    return trained(axes, kind, how, dtypes, real=True)
