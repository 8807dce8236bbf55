"""Float cases for `sanitize_jit`, each with a number: the cells of the tests' transform tables, and training steps.

The training steps write into their tables.

    cells:  every function × every transform, of kernels, lookups, optimizers, collectives, sharded lookups and models
    steps:  lookups and two donated training steps of drawn tables, features and ids
"""

import functools
import random
from collections.abc import Callable

import torch

import funcrec as fr
from funcrec.core._tree import replace
from funcrec.testing._modes import COMPILED, EVERY, ZERO, along
from programs import lookup_transforms as lookups
from programs import transforms
from programs.float_functions import of_kernels, of_lookups, of_values
from programs.float_updates import RULES, of_dense, of_rows, of_steps
from programs.sanitize_jit import Case
from programs.small_models import MODELS, make, with_dense_bumps

# f64 sums in another order, and functions whose vectorised code rounds differently
EXACT = {"rtol": 1e-8, "atol": 1e-8}
# f32 products and sums in another order, over two steps
SINGLE = {"rtol": 2e-4, "atol": 2e-5}
Cell = tuple[str, Callable, tuple, dict]  # name, f, inputs, tolerances


def case(kind: str, number: int) -> Case:
    if kind == "steps":
        return step(number)
    name, f, inputs, close = cells()[number % len(cells())]()
    return Case(number, f, inputs, close, name=f"{name}:")


@functools.cache
def cells() -> list[Callable[[], Cell]]:
    """Return all cells, in an order in which the first cells always include every kind."""
    found = [
        functools.partial(derivative, c, which, mode)
        for c in (*of_kernels(), *of_lookups(), *of_values(), *of_rows(), *of_dense(), *of_steps())
        for which in c.inputs
        for mode in EVERY
        if mode not in COMPILED
    ]
    found += [
        functools.partial(collective, n, name, key)
        for n in (2, 4)
        for name in transforms.COLLECTIVES
        for key in transforms.TRANSFORMS
    ]
    found += [
        functools.partial(sharded, axes, name, key)
        for axes in ({"x": 2}, {"x": 2, "y": 2})
        for name in lookups.names(axes)
        for key in lookups.TRANSFORMS
    ]
    found += [functools.partial(model, name, key) for name in MODELS for key in ("apply", "gradients", "trained")]
    random.Random(0).shuffle(found)
    return found


def derivative(case, which: str, mode: str) -> Cell:
    f = lambda inputs: EVERY[mode][0](along(case._replace(inputs=inputs), which)) + ZERO
    return f"{case.name}, {which}, {mode}", f, (dict(case.inputs),), EXACT


def collective(n: int, name: str, key: str) -> Cell:
    mesh = fr.Mesh.emulated(x=n)
    one = lambda x: transforms.TRANSFORMS[key](transforms.COLLECTIVES[name], x[0])[None]
    f = fr.shard_map(one, mesh=mesh, in_specs=fr.P("x"), out_specs=fr.P("x"))
    return f"{name}, {n} ranks, {key}", f, (fr.shard(transforms.values(n), fr.P("x"), mesh=mesh),), EXACT


def sharded(axes: dict, name: str, key: str) -> Cell:
    mesh = fr.Mesh.emulated(**axes)
    made, inputs, specs = lookups.prepared(mesh, name)
    close = lookups.ROUNDED if "coded" in name else EXACT
    return f"{name}, {axes}, {key}", lookups.mapped(made, mesh, specs, (key,)), inputs, close


def model(name: str, key: str) -> Cell:
    own, params, batch = make(name)
    params, loss = with_dense_bumps(params), fr.models.loss(own)
    f = {"apply": own.apply, "gradients": fr.value_and_grad(loss, has_aux=True)}
    if key in f:
        return f"{name}, {key}", f[key], (params, batch), SINGLE
    dense = fr.optim.dense(torch.optim.SGD, lr=0.1)
    trainer = fr.train_step(loss, sparse=fr.optim.sgd(0.1), dense=dense, has_aux=True)
    return f"{name}, {key}", trainer, (trainer.init(params), batch), SINGLE


# -- steps -------------------------------------------------------------------------------------------------------------

POOLINGS = ("sum", "mean", "none")
DENSE = {"SGD": {"momentum": 0.9}, "Adam": {}, "Adagrad": {}}


def step(number: int) -> Case:
    """Return the training step with this number. The step has 1 to 3 tables of 1 to 60 rows and 1 to 20 columns, and 1
    to 24 bags of 0 to 5 ids."""
    draw = random.Random(number)
    dtype = draw.choice([torch.float32, torch.float32, torch.float64])
    tables = {f"t{i}": (draw.randint(1, 60), draw.randint(1, 20)) for i in range(draw.randint(1, 3))}
    features = [feature(draw, f"f{i}", draw.choice(list(tables))) for i in range(draw.randint(1, 4))]
    generator = torch.Generator().manual_seed(number)
    floats = lambda *shape: torch.rand(*shape, generator=generator, dtype=dtype) - 0.5
    width = sum(tables[f.table][1] for f in features)
    params = fr.Params({n: floats(*s) for n, s in tables.items()}, {"w": floats(width, 3), "b": floats(3)})
    name, dense = draw.choice(list(RULES)), draw.choice(list(DENSE))
    sparse = getattr(fr.optim, name)(lr=0.05, **RULES[name])
    sparse = fr.optim.clip(sparse, max_norm=0.5) if draw.random() < 0.2 else sparse

    def loss_fn(params, ids):
        acts = fr.lookup(params.tables, ids, features_of(features, "sum", "mean"))
        parts = [acts.values] if acts.keys else []
        sequences = fr.lookup_sequence(params.tables, ids, features_of(features, "none"))
        parts += [x.to_padded(4).sum(1) for x in sequences.values()]
        return (torch.cat(parts, 1) @ params.dense["w"] + params.dense["b"]).tanh().square().mean()

    whole = fr.optim.dense(getattr(torch.optim, dense), lr=0.05, **DENSE[dense])
    trainer = fr.train_step(loss_fn, sparse=sparse, dense=whole)
    close = SINGLE if dtype == torch.float32 else EXACT
    return Case(number, trainer, (trainer.init(params), batch(draw, features, tables, floats)), close, is_donated=True)


def features_of(features: list, *poolings: str) -> list:
    return [f for f in features if f.pooling in poolings]


def feature(draw: random.Random, name: str, table: str):
    length = draw.choice([None, None, 1, 2, 3])
    hashed = draw.choice([None, None, fr.modulo(), fr.multiply_shift(draw.randint(0, 9))])
    kind = {"pooling": draw.choice(POOLINGS), "weighted": draw.random() < 0.3, "hash": hashed, "max_length": length}
    return fr.FeatureConfig(name, table=table, **kind)


def batch(draw: random.Random, features: list, tables: dict, floats: Callable):
    """Return random ids, some outside their table, followed by invalid padding."""
    bags, lists = draw.randint(1, 24), {}
    for f in features:
        most = min(5, f.max_length or 5)
        id_of = lambda f=f: draw.randint(-(2**40), 2**40) if f.hash else draw.randint(-1, tables[f.table][0])
        lists[f.name] = [[id_of() for _ in range(draw.randint(0, most))] for _ in range(bags)]
    ids = fr.KeyedJaggedTensor.from_lists(lists, dtype=torch.int64)
    padding = draw.randint(0, 9)
    values = torch.cat([ids.values, torch.full((padding,), 10**15)])
    return replace(ids, values=values, weights=floats(len(values)))
