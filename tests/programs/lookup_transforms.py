"""Route, combine and sharded lookups under every transform: the programs that the laws compare.

A program is a function of one rank's tree x of f64 tensors, together with the same function of all ranks' trees in
plain torch. x["banks"] has the banks of one rank, or the whole tables for all ranks. Each rank has its own other
leaves. For all ranks, these leaves are stacked.
"""

from typing import Any, NamedTuple

import torch

import funcrec as fr
from funcrec.core._tree import replace, tree_map
from funcrec.mesh._parts import _stack_bags
from funcrec.sharding import _tables
from funcrec.sharding._combine import combine
from funcrec.sharding._lanes import lane_bags, routes_of
from funcrec.sharding._route import route
from funcrec.sharding._transport import transport_of
from programs.transforms import direction

SHAPES = {"a": (7, 3), "b": (4, 2)}
FEATURES = (
    fr.FeatureConfig("f0", table="a", column="u", weighted=True),
    fr.FeatureConfig("f1", table="b", column="v", pooling="mean"),
    fr.FeatureConfig("f2", table="a", column="v", pooling="mean", weighted=True),
)
# Tables read as if quantised: two dtypes in a bank, and a key.
ROUNDED_SHAPES = {**SHAPES, "c": (5, 3)}
ROUNDED_FEATURES = (*FEATURES, fr.FeatureConfig("f3", table="c", column="u", pooling="mean", weighted=True))
DTYPES, KEY = {"a": "int4", "b": "int2", "c": "bfloat16"}, fr.key(5)
BAGS = 2  # per rank
ONE_AXIS = ("table_wise", "row_wise", "column_wise", "replicated")
TWO_AXES = (*ONE_AXIS, "table_row_wise", "table_column_wise", "grid")
CODEC = fr.Codec(forward="float16", backward="bfloat16")
# several roundings of 2^-8 each, in sums of a few terms
ROUNDED = {"rtol": 0.02, "atol": 0.02}


class Program(NamedTuple):
    """A program for one rank and for all. one: (x, ids) -> a tensor, on one rank. whole: X -> [n, ...], the results of
    all ranks. x: X. layout: the banks' layout, if any."""

    one: Any
    whole: Any
    x: dict
    layout: Any


def tables(shapes=SHAPES):
    make = lambda i, shape: (torch.arange(shape[0] * shape[1], dtype=torch.float64) * 0.9 + i).sin().reshape(shape)
    return {n: make(i, s) for i, (n, s) in enumerate(shapes.items())}


def batch(n):
    """Return the random ids of n ranks: bags of 0 to 3, some ids outside their table."""
    bag = lambda i, k: [(i * 5 + j * 3 + k) % 9 - 1 for j in range((i * 2 + k) % 4)]
    lists = {key: [bag(i, k) for i in range(n * BAGS)] for k, key in enumerate("uv")}
    weights = {key: [[0.6 + 0.25 * (j + len(b)) for j in range(len(b))] for b in bags] for key, bags in lists.items()}
    ids = fr.KeyedJaggedTensor.from_lists(lists, weights=weights, dtype=torch.int64)
    return replace(ids, weights=ids.weights.double())


def parts(n):
    """Return each rank's ids."""
    stacked = _stack_bags(batch(n), n)
    return [tree_map(lambda x, r=r: x[r], stacked) for r in range(n)]


def with_weights(ids, weights):
    """Return the ids with these weights. A longer buffer of weights, as inside jit, is cut to the ids' length."""
    return replace(ids, values=ids.values[: weights.shape[0]], weights=weights)


def names(axes):
    """Return the names of the programs for a mesh of these axes."""
    kinds = [*(TWO_AXES if len(axes) > 1 else ONE_AXIS)]
    kinds += ["row_wise, exact", "row_wise, coded", "row_wise, dedup"]
    more = ["grid, exact", "grid, coded", "grid, dedup"] if len(axes) > 1 else ["row_wise, exact, coded"]
    return ["route", "combine", *kinds, *more]


def program(name, mesh):
    """Return the program with that name."""
    n, kind = mesh.size, name.split(", ")[0]
    is_rounded = "rounded" in name
    shapes, features = (ROUNDED_SHAPES, ROUNDED_FEATURES) if is_rounded else (SHAPES, FEATURES)
    layout_of = lambda kind: (
        fr.shard_tables(tables(shapes), fr.Plan.uniform(kind, shapes, mesh), fr.Mesh.emulated(**mesh.shape)).layout
    )
    mine = parts(n)
    weights = torch.stack([p.weights for p in mine])
    if name == "route":
        return route_program(layout_of("row_wise"), mine)
    if name == "combine":
        return combine_program(layout_of("row_wise"), mine)
    layout, codec = layout_of(kind), CODEC if "coded" in name else None

    read = lambda held: fr.fake_quantize(held, DTYPES, key=KEY) if is_rounded else held

    def one(x, ids):
        held = fr.ShardedTables(x["banks"], layout, transport_of("exact" in name, "dedup" in name, codec=codec))
        return fr.lookup(read(held), with_weights(ids, x["weights"]), features).values

    def whole(x):
        own, held = [replace(p, weights=w) for p, w in zip(mine, x["weights"], strict=True)], read(x["banks"])
        return torch.stack([fr.lookup(held, ids, features, implementation="reference").values for ids in own])

    return Program(one, whole, {"banks": tables(shapes), "weights": weights}, layout)


def route_program(layout, mine):
    """Return a program from the weights of ids to the weights that the owners of their rows receive."""
    (routes,) = routes_of(layout, FEATURES)
    used = [x.feature for x in routes.lanes]

    def whole(x):
        """Loop over the definition: rank r gets from rank s the weights of those ids on s whose rows r has, lane by
        lane and bag by bag."""
        out = []
        for r in range(len(mine)):
            blocks = []
            for s, ids in enumerate(mine):
                bags = lane_bags(replace(ids, weights=x["weights"][s]), used)
                sent = [bags.weights[i] for i in range(int(bags.offsets[-1])) if owner(layout, used, bags, i) == r]
                blocks += [*sent, *[bags.weights.new_zeros(())] * (bags.capacity - len(sent))]
            out.append(torch.stack(blocks))
        return torch.stack(out)

    one = lambda x, ids: route(with_weights(ids, x["weights"]), routes, 1 << 20).weights  # room for all ids
    return Program(one, whole, {"weights": torch.stack([p.weights for p in mine])}, None)


def owner(layout, features, bags, i):
    """Return the rank that has the row of the i-th id in the lanes' bags, or None if no rank has it."""
    lane = int(bags.bag_ids()[i]) // BAGS
    shard, row = layout.shards[layout.shards_of(features[lane].table)[0]], int(bags.values[i])
    return shard.ranks[row // shard.part] if 0 <= row < SHAPES[shard.table][0] else None


def combine_program(layout, mine):
    """Return a program from the owners' pooled results to each rank's bags."""
    (routes,) = routes_of(layout, FEATURES)
    n = len(mine)

    def one(x, ids):
        lanes = combine([x["pooled"]], route(ids, routes, None), routes)
        return torch.cat([lanes[i] for i in range(len(lanes))], 1)

    def whole(x):
        out = []
        for r, ids in enumerate(mine):
            row = []
            for i, lane in enumerate(routes.lanes):
                feature, shard = lane.feature, lane.shard
                at = lambda s, i=i: routes.columns[routes.served[s].index(i)]
                total = sum(x["pooled"][s, r, :, at(s) : at(s) + shard.last - shard.first] for s in range(n))
                lengths = ids.offsets_for(feature.key).diff().clamp(min=1)[:, None]
                row.append(total / lengths if feature.pooling == "mean" else total)
            out.append(torch.cat(row, 1))
        return torch.stack(out)

    width = sum(routes.widths[0])
    pooled = (torch.arange(n * n * BAGS * width, dtype=torch.float64) * 1.1).cos().reshape(n, n, BAGS, width)
    return Program(one, whole, {"pooled": pooled}, None)


# -- transforms of trees -----------------------------------------------------------------------------------------


def sin(x):
    return tree_map(torch.sin, x)


def loss(y):
    """Return a nonlinear loss of one rank. The loss weighs the elements of y differently."""
    y = y.flatten()
    return (y.square() * (torch.arange(y.shape[0], dtype=y.dtype) + 1).rsqrt()).sum()


def scalar(f):
    return lambda x: loss(f(sin(x)))


def scaled(x, v, mean):
    """Return x with banks times the ranks' mean of v[..., 0], and other leaves times v[..., 1]. All ranks read the
    banks."""
    own = lambda a: a * v[..., 1].reshape(*v.shape[:-1], *[1] * (a.dim() - v.dim() + 1))
    return {k: tree_map(lambda a: a * mean(v)[0], y) if k == "banks" else own(y) for k, y in x.items()}


def inner(x, y):
    return sum(
        (a * b).sum()
        for a, b in zip(torch.utils._pytree.tree_leaves(x), torch.utils._pytree.tree_leaves(y), strict=True)
    )


def mean_of_ranks(v):
    return fr.pmean(v, fr.mesh.bound_names())


def twice(x):
    return tree_map(lambda a: torch.stack([a, 2 * a]), x)


# (f, x, a tangent in x's form) -> one result like f's ("y"), or one or two like x ("x"). All are inside the mapped
# function.
TRANSFORMS = {
    "fwd": ("y", lambda f, x, t: f(x)),
    "grad": ("x", lambda f, x, t: [torch.func.grad(scalar(f))(x)]),
    "vjp": ("x", lambda f, x, t: (lambda y, back: [back(direction(y, 1))[0]])(*torch.func.vjp(lambda x: f(sin(x)), x))),
    "jvp": ("y", lambda f, x, t: torch.func.jvp(lambda x: f(sin(x)), (x,), (t,))[1]),
    "vmap": ("y", lambda f, x, t: torch.func.vmap(f)(twice(x))),
    "vmap_grad": (
        "x",
        lambda f, x, t: (lambda g: [tree_map(lambda a, i=i: a[i], g) for i in range(2)])(
            torch.func.vmap(torch.func.grad(scalar(f)))(twice(x))
        ),
    ),
    "jvp_grad": ("x", lambda f, x, t: [torch.func.jvp(torch.func.grad(scalar(f)), (x,), (t,))[1]]),
    "grad_grad": ("x", lambda f, x, t: [torch.func.grad(lambda x: inner(torch.func.grad(scalar(f))(x), t))(x)]),
    "hessian": (
        "y",
        lambda f, x, t: torch.func.hessian(lambda v: scalar(f)(scaled(x, v, mean_of_ranks)))(torch.ones(2).double()),
    ),
}


def whole_transforms(f, x, t):
    """Return {transform: the results of all ranks}, for f of the trees of all ranks. Losses are added. A tangent moves
    all ranks at once."""
    losses = lambda x: torch.stack([loss(y) for y in f(sin(x))])
    total = lambda x: losses(x).sum()
    grad = torch.func.grad(total)
    double = tree_map(lambda a: 2 * a, x)
    n = f(x).shape[0]

    def hessian():
        apart = lambda v: total(scaled(x, v, lambda v: v.mean(0)))
        along = lambda e: torch.func.jvp(torch.func.grad(apart), (torch.ones(n, 2).double(),), (e.expand(n, 2),))[1]
        return torch.stack([along(e) for e in torch.eye(2).double()], 2)

    return {
        "fwd": lambda: f(x),
        "grad": lambda: [grad(x)],
        "vjp": lambda: [torch.func.vjp(lambda x: f(sin(x)), x)[1](torch.stack([direction(y, 1) for y in f(x)]))[0]],
        "jvp": lambda: torch.func.jvp(lambda x: f(sin(x)), (x,), (t,))[1],
        "vmap": lambda: torch.stack([f(x), f(double)], 1),
        "vmap_grad": lambda: [grad(x), grad(double)],
        "jvp_grad": lambda: [torch.func.jvp(grad, (x,), (t,))[1]],
        "grad_grad": lambda: [torch.func.grad(lambda x: inner(grad(x), t))(x)],
        "hessian": hessian,
    }


def tangent(x):
    return tree_map(lambda a: direction(a, a.numel()), x)


# -- on a mesh ---------------------------------------------------------------------------------------------------


def prepared(mesh, name):
    """Return (program, (x, tangent, ids) of this rank or of all ranks, their specs)."""
    made, everywhere = program(name, mesh), fr.P(mesh.axis_names)
    specs = {k: made.layout.specs() if k == "banks" else everywhere for k in made.x}

    def place(x):
        held = {k: fr.shard(v, everywhere, mesh=mesh) for k, v in x.items() if k != "banks"}
        if "banks" in x:
            own = [_tables.own_ranks(b, mesh) for b in made.layout.banks]
            held["banks"] = {
                b.name: _tables.pack(made.layout, i, x["banks"], own[i]) for i, b in enumerate(made.layout.banks)
            }
        return {k: held[k] for k in x}

    ids = fr.shard(batch(mesh.size), everywhere, mesh=mesh)
    return made, (place(made.x), place(tangent(made.x)), ids), (specs, specs, everywhere)


def mapped(made, mesh, specs, keys):
    """Return (x, tangent, ids) -> {transform: result} on the mesh."""
    everywhere = fr.P(mesh.axis_names)

    def one_rank(x, t, ids):
        own = lambda k, v: v if k == "banks" else v[0]
        x, t = ({k: own(k, v) for k, v in y.items()} for y in (x, t))
        out = {}
        for key in keys:
            kind, transform = TRANSFORMS[key]
            result = transform(lambda x: made.one(x, ids), x, t)
            out[key] = result[None] if kind == "y" else [summed(made, mesh, g) for g in result]
        return out

    def spec(key):
        of_tree = {k: s if k == "banks" else everywhere for k, s in specs[0].items()}
        return everywhere if TRANSFORMS[key][0] == "y" else [of_tree] * (2 if key == "vmap_grad" else 1)

    return fr.shard_map(one_rank, mesh=mesh, in_specs=specs, out_specs={k: spec(k) for k in keys}, check=False)


def summed(made, mesh, d):
    """Return a gradient whose banks are summed over the ranks that have copies. The other leaves are stacked."""
    if "banks" not in d:
        return {k: v[None] for k, v in d.items()}
    banks = {}
    for b in made.layout.banks:
        others = tuple(a for a in mesh.axis_names if a not in b.axes)
        banks[b.name] = fr.psum(d["banks"][b.name], others) if others else d["banks"][b.name]
    return {k: banks if k == "banks" else v[None] for k, v in d.items()}


def on_all_ranks(made, mesh, result):
    """Return results with whole tables and all ranks' values."""
    whole = lambda v: fr.unshard(v, fr.P(mesh.axis_names), mesh=mesh)
    tables = lambda v: _tables.gather_banks(made.layout, v, mesh)
    tree = lambda x: {k: tables(v) if k == "banks" else whole(v) for k, v in x.items()}
    return {key: [tree(x) for x in r] if isinstance(r, list) else whole(r) for key, r in result.items()}


def cells(mesh, name, keys=tuple(TRANSFORMS)):
    """Return {transform: the results of all ranks} for one program."""
    made, args, specs = prepared(mesh, name)
    return on_all_ranks(made, mesh, mapped(made, mesh, specs, keys)(*args))


def compiled_cells(mesh, chosen, keys=("fwd", "grad")):
    """Return {"jit", "jit_grad"} -> {program: the results of all ranks}. Each compiled function has all programs."""
    made = {name: prepared(mesh, name) for name in chosen}
    out = {}
    for key in keys:
        fs = {name: mapped(m, mesh, specs, (key,)) for name, (m, _, specs) in made.items()}
        results = fr.jit(lambda args, fs=fs: {name: f(*args[name]) for name, f in fs.items()})(
            {n: m[1] for n, m in made.items()}
        )
        out["jit" if key == "fwd" else "jit_grad"] = {
            n: on_all_ranks(made[n][0], mesh, r)[key] for n, r in results.items()
        }
    return out


def real_cells(axes, name):
    """Return the result of `cells` on this process's ranks."""
    return cells(fr.Mesh.distributed(**axes), name)


def real_compiled_cells(axes, chosen, keys=("fwd", "grad")):
    return compiled_cells(fr.Mesh.distributed(**axes), chosen, keys)


def wanted(axes, name):
    """Return {transform: the results of all ranks}, in plain torch."""
    made = program(name, fr.Mesh.emulated(**axes))
    return {k: f() for k, f in whole_transforms(made.whole, made.x, tangent(made.x)).items()}


def all_cells(mesh, name):
    """Return `cells` and the compiled cells. If a result is missing, its cell gives the reason."""
    out = {}
    for key in TRANSFORMS:
        out |= _or_reason(lambda key=key: cells(mesh, name, (key,)), (key,))
    return out | _or_reason(lambda: {k: x[name] for k, x in compiled_cells(mesh, [name]).items()}, ("jit", "jit_grad"))


def _or_reason(f, keys):
    try:
        return f()
    except Exception as e:  # any error, because the table prints the error
        return dict.fromkeys(keys, f"{type(e).__name__}: {e}")


def real_all_cells(axes, name):
    return all_cells(fr.Mesh.distributed(**axes), name)
