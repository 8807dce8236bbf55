"""Functions that ranks run: training whose loss reads sharded tables as if quantised, with every way to run a step."""

import torch

import funcrec as fr
from programs import piped, stale, training

DTYPES, KEY = {"a": "int4", "b": "int8", "c": "bfloat16"}, fr.key(3)
PLAN = fr.Plan({"a": fr.row_wise("x"), "b": fr.row_wise("x"), "c": fr.table_wise("x", rank=1)})
CONFIGS = [fr.TableConfig(n, rows, 4) for n, rows in {"a": 11, "b": 7, "c": 5}.items()]  # one bank for a and b
FEATURES = (
    fr.FeatureConfig("f", table="a", column="u"), fr.FeatureConfig("g", table="b", column="v", pooling="mean"),
    fr.FeatureConfig("h", table="c", column="u"),
)  # fmt: skip
KIND = {"sparse": fr.optim.rowwise_adagrad(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}


def loss_fn(params, batch):
    acts = fr.lookup(fr.fake_quantize(params.tables, DTYPES, key=KEY), batch.ids, FEATURES).values
    return (acts @ params.dense).square().mean()


def params():
    return fr.Params(fr.init(fr.key(1), CONFIGS), torch.linspace(-1, 1, 12))


def alone(count, ranks):
    """Return (tables, dense parameters) of one process that adds the gradients of the batches of all ranks."""
    sparse, dense = KIND.values()
    tables, weights = params().tables, params().dense
    slots, state, share = sparse.init(tables), dense.init(weights), lambda p, b: loss_fn(p, b) / ranks
    for step in range(count):
        whole = training.batch(step, piped.BAGS)
        made = [fr.value_and_grad(share)(fr.Params(tables, weights), training.part(whole, r, ranks))[1]
                for r in range(ranks)]  # fmt: skip
        rows = {n: sum((g.tables[n] for g in made[1:]), made[0].tables[n]) for n in tables}
        tables, slots = sparse.update(rows, slots, tables, step)
        weights, state = dense.update(sum(g.dense for g in made), state, weights, step)
    return tables, weights


def every_way(how, ways, count=3):
    """Return {way: whether the way has the bits of its plain loop}. For "alone", the value is whether the plain loop
    has the bits of one process. A compiled step donates its state and sums in another order, so that each step must be
    within 1e-6."""
    mesh = piped.mesh_of({"x": 2})
    step = fr.train_step(loss_fn, **KIND, mesh=mesh, plan=PLAN, **how)
    state, batches = step.init(params()), [piped.own(mesh, i) for i in range(count)]
    states, fast = [state], fr.jit(step, donate=("state",))
    for batch in batches:
        states.append(step(states[-1], batch)[0])
    same = lambda pipe, want: piped.is_same(piped.run(pipe, state, batches), want)
    end = lambda: (fr.gather_tables(states[-1].tables, mesh), states[-1].dense)
    compiled = lambda: [fast(fr.copy(x), batch)[0] for x, batch in zip(states, batches, strict=False)]
    found = {
        "alone": lambda: piped.is_same(end(), alone(count, 2)),
        "jit": lambda: all(fr.tree.allclose(x, y, atol=1e-6) for x, y in zip(compiled(), states[1:], strict=True)),
        "pipeline": lambda: same(fr.pipeline(step, mesh=mesh), piped.loop(step, state, batches)),
        "stale": lambda: same(fr.stale_pipeline(step, mesh=mesh), stale.loop(step, state, batches)),
    }
    return {way: found[way]() for way in ways}
