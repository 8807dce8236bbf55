"""Every collective under every transform, on emulated and on real ranks: programs that the laws compare.

The command prints their table.

PYTHONPATH=tests .venv/bin/python -m programs.transforms
"""

import sys
import time

import torch

import funcrec as fr
from funcrec.testing import RankPool, assert_trees_close

WIDTH = 3
EXACT = {"rtol": 1e-12, "atol": 1e-12}
STARTED = time.perf_counter()


def ring(n):
    return [(r, (r + 1) % n) for r in range(n)]


def ragged(x, axis="x"):
    """Return the rows that this rank gets. Rank r sends r' + 1 of its rows to rank r' (at most WIDTH). Rank r' stores
    all rows one after the other."""
    n = fr.axis_size(axis)
    sizes = torch.arange(n).clamp(max=WIDTH - 1) + 1
    mine = sizes.gather(0, fr.axis_index(axis)[None]).expand(n)
    places = fr.axis_index(axis) * sizes
    output = x.new_zeros(n * WIDTH, WIDTH)
    return fr.ragged_all_to_all(x, output, torch.zeros(n, dtype=torch.int64), sizes, places, mine, axis_name=axis)


# On one rank: x f64[n * WIDTH, WIDTH] -> a tensor.
COLLECTIVES = {
    "psum": lambda x: fr.psum(x, "x"),
    "psum_invariant": lambda x: fr.psum_invariant(x, "x"),
    "pvary": lambda x: fr.pvary(x, "x"),
    "pmean": lambda x: fr.pmean(x, "x"),
    "pmax": lambda x: fr.pmax(x, "x"),
    "pmin": lambda x: fr.pmin(x, "x"),
    "all_gather": lambda x: fr.all_gather(x, "x", dim=1),
    "all_gather_tiled": lambda x: fr.all_gather(x, "x", dim=-1, tiled=True),
    "psum_scatter": lambda x: fr.psum_scatter(x.unflatten(0, (fr.axis_size("x"), WIDTH)), "x"),
    "psum_scatter_tiled": lambda x: fr.psum_scatter(x, "x", tiled=True),
    "all_to_all": lambda x: fr.all_to_all(x.unflatten(0, (WIDTH, fr.axis_size("x"))), "x", split_dim=1, concat_dim=0),
    "all_to_all_tiled": lambda x: fr.all_to_all(x, "x", concat_dim=1, tiled=True),
    "ppermute": lambda x: fr.ppermute(x, "x", ring(fr.axis_size("x"))),
    "ppermute_some": lambda x: fr.ppermute(x, "x", ring(fr.axis_size("x"))[:1]),
    "ragged_all_to_all": ragged,
}


def blocks(x):
    """Return f64[N, n * WIDTH, WIDTH] as a view f64[N, n, WIDTH, WIDTH]."""
    return x.unflatten(1, (x.shape[0], WIDTH))


def dense_ragged(x):
    """Return f64[N, ...], the results of `ragged` on all ranks, by loops over the definition."""
    n = x.shape[0]
    rows = []
    for r in range(n):
        k = min(r, WIDTH - 1) + 1
        rows.append(torch.cat([x[s, :k] for s in range(n)] + [x.new_zeros(n * WIDTH - n * k, WIDTH)]))
    return torch.stack(rows)


# The same for all ranks at once, in plain torch: f64[N, n * WIDTH, WIDTH] -> [N, ...]. Some transposes are by
# definition not the transpose of this map. Other tests check them.
DENSE = {
    "psum": lambda x: x.sum(0).expand_as(x),
    "pmean": lambda x: x.mean(0).expand_as(x),
    "pmax": lambda x: x.amax(0).expand_as(x),
    "pmin": lambda x: x.amin(0).expand_as(x),
    "all_gather": lambda x: torch.stack([x.movedim(0, 1)] * x.shape[0]),
    "all_gather_tiled": lambda x: torch.stack([torch.cat(list(x), -1)] * x.shape[0]),
    "psum_scatter": lambda x: blocks(x).sum(0),
    "psum_scatter_tiled": lambda x: blocks(x).sum(0),
    "all_to_all": lambda x: x.unflatten(1, (WIDTH, x.shape[0])).permute(2, 0, 1, 3),
    "all_to_all_tiled": lambda x: blocks(x).permute(1, 2, 0, 3).flatten(2),
    "ppermute": lambda x: x.roll(1, 0),
    "ppermute_some": lambda x: (
        x if len(x) == 1 else torch.cat([torch.zeros_like(x[:1]), x[:1], torch.zeros_like(x[2:])])
    ),
    "ragged_all_to_all": dense_ragged,
}


def scalar(f):
    """Return a loss of one rank that is nonlinear before and after the collective f. The loss weighs its elements
    differently."""

    def loss(x):
        y = f(x.sin()).flatten()
        return (y.square() * (torch.arange(y.shape[0], dtype=y.dtype) + 1).rsqrt()).sum()

    return loss


def direction(y, seed):
    """Return an arbitrary tensor in the form of y."""
    flat = torch.arange(y.numel(), dtype=torch.float64)
    return ((flat * 0.7 + seed).sin()).reshape(y.shape)


# (f, x) -> a tree of tensors, all inside the mapped function.
TRANSFORMS = {
    "fwd": lambda f, x: f(x),
    "grad": lambda f, x: torch.func.grad(scalar(f))(x),
    "vjp": lambda f, x: (lambda y, back: back(direction(y, 1))[0])(*torch.func.vjp(lambda x: f(x.sin()), x)),
    "jvp": lambda f, x: torch.func.jvp(lambda x: f(x.sin()), (x,), (direction(x, 2),))[1],
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
    "vmap_in1": lambda f, x: torch.func.vmap(f, in_dims=1, out_dims=1)(torch.stack([x, 2 * x], 1)),
    "vmap_grad": lambda f, x: torch.func.vmap(torch.func.grad(scalar(f)))(torch.stack([x, 2 * x])),
    "jvp_grad": lambda f, x: torch.func.jvp(torch.func.grad(scalar(f)), (x,), (direction(x, 3),))[1],
    "grad_grad": lambda f, x: torch.func.grad(lambda x: (torch.func.grad(scalar(f))(x) * direction(x, 4)).sum())(x),
    "jvp_jvp": lambda f, x: torch.func.jvp(
        lambda x: torch.func.jvp(scalar(f), (x,), (direction(x, 5),))[1], (x,), (direction(x, 6),)
    )[1],
    "hessian": lambda f, x: torch.func.hessian(lambda v: scalar(f)(v * x))(x[0]),
}


def dense_transforms(f):
    """Return {transform: X -> the results of all ranks} for a map f of the values of all ranks at once.

    Transforms inside the mapped function add the losses of the ranks. A tangent moves all ranks at once.
    """
    losses = lambda x: torch.stack([scalar(lambda _, y=y: y)(y) for y in f(x.sin())])
    total = lambda x: losses(x).sum()
    grad = torch.func.grad(total)
    along = lambda x, seed: torch.stack([direction(y, seed) for y in x])
    twice = lambda g, dim: lambda x: torch.stack([g(x), g(2 * x)], dim)
    jvp = lambda g, x, seed: torch.func.jvp(g, (x,), (along(x, seed),))[1]

    def hessian(x):
        scaled = torch.func.grad(lambda v: total(v[:, None] * x))
        basis = torch.eye(WIDTH, dtype=x.dtype)
        columns = [torch.func.jvp(scaled, (x[:, 0],), (e.expand(x.shape[0], WIDTH),))[1] for e in basis]
        return torch.stack(columns, 2)

    return {
        "fwd": f,
        "grad": grad,
        "vjp": lambda x: torch.func.vjp(lambda x: f(x.sin()), x)[1](along(f(x), 1))[0],
        "jvp": lambda x: jvp(lambda x: f(x.sin()), x, 2),
        "vmap": twice(f, 1),
        "vmap_in1": twice(f, 2),
        "vmap_grad": twice(grad, 1),
        "jvp_grad": lambda x: jvp(grad, x, 3),
        "grad_grad": torch.func.grad(lambda x: (grad(x) * along(x, 4)).sum()),
        "jvp_jvp": lambda x: jvp(lambda x: jvp(losses, x, 5), x, 6),
        "hessian": hessian,
    }


def values(n):
    """Return f64[N, n * WIDTH, WIDTH] for n = N ranks."""
    x = torch.arange(n * n * WIDTH * WIDTH, dtype=torch.float64)
    return (x * 1.3).sin().reshape(n, n * WIDTH, WIDTH)


def cells(mesh, name, transforms=TRANSFORMS):
    """Return {transform: the results of all ranks, [N, ...]} for one collective."""
    f, out = COLLECTIVES[name], {}
    for key, transform in transforms.items():
        out[key] = run(mesh, lambda x, transform=transform: transform(f, x))
    return out


def run(mesh, f, through=lambda g: g):
    """Return the results of f on all ranks, stacked. `through` transforms the mapped function."""
    (axis,) = mesh.axis_names
    one = lambda x: fr.axis_size(axis) and f(x[0])[None]
    g = through(fr.shard_map(one, mesh=mesh, in_specs=fr.P(axis), out_specs=fr.P(axis)))
    x = fr.shard(values(mesh.size), fr.P(axis), mesh=mesh)
    return fr.unshard(g(x), fr.P(axis), mesh=mesh)


def compiled_cells(mesh, keys=("fwd", "grad")):
    """Return {"jit", "jit_grad"} -> {collective: [N, ...]}. Each compiled function has all collectives."""
    (axis,) = mesh.axis_names
    out = {}
    for key in keys:
        one = lambda x, key=key: {name: TRANSFORMS[key](f, x[0])[None] for name, f in COLLECTIVES.items()}
        g = fr.jit(fr.shard_map(one, mesh=mesh, in_specs=fr.P(axis), out_specs=fr.P(axis)))
        x = fr.shard(values(mesh.size), fr.P(axis), mesh=mesh)
        out["jit" if key == "fwd" else "jit_grad"] = fr.unshard(g(x), fr.P(axis), mesh=mesh)
    return out


def real_cells(name):
    """Return the result of `cells` on this process's ranks."""
    return cells(fr.Mesh.distributed(x=torch.distributed.get_world_size()), name)


def real_compiled_cells(keys=("fwd", "grad")):
    return compiled_cells(fr.Mesh.distributed(x=torch.distributed.get_world_size()), keys)


def main():
    """Print which cells equal the plain function (coded lookups up to rounding). Ranks are emulated, or 2, 4 and 2 x 2
    gloo ranks."""
    print("Each row is printed when it is done. Most of the time is compilation.", flush=True)
    worlds = {n: RankPool(n) for n in (2, 4)}
    failed = print_collectives(worlds)
    for axes in ({"x": 2}, {"x": 4}, {"x": 2, "y": 2}):
        failed += print_lookups(worlds[4 if axes != {"x": 2} else 2], axes)
    for pool in worlds.values():
        pool.kill()
    return failed


def print_collectives(worlds):
    columns = [*TRANSFORMS, "jit", "jit_grad"]
    emulated = {n: compiled_cells(fr.Mesh.emulated(x=n)) for n in worlds}
    real = {n: pool.run(real_compiled_cells, deadline_s=600)[0] for n, pool in worlds.items()}
    failed = print_header(columns)
    for name in COLLECTIVES:
        row = []
        for n, pool in worlds.items():
            ours, theirs = cells(fr.Mesh.emulated(x=n), name), pool.run(real_cells, name)[0]
            ours |= {k: x[name] for k, x in emulated[n].items()}
            theirs |= {k: x[name] for k, x in real[n].items()}
            row.append({k: is_close(ours[k], theirs[k]) for k in columns})
        failed += print_row(name, row, columns)
    return failed


def print_lookups(pool, axes):
    """Print all transforms of the programs for a mesh of these axes."""
    from programs import lookup_transforms as lookups

    columns, failed = [*lookups.TRANSFORMS, "jit", "jit_grad"], 0
    print_header(columns, "lookups, " + " x ".join(map(str, axes.values())))
    for name in lookups.names(axes):
        want = lookups.wanted(axes, name)
        want |= {"jit": want["fwd"], "jit_grad": want["grad"]}
        ours = lookups.all_cells(fr.Mesh.emulated(**axes), name)
        theirs = pool.run(lookups.real_all_cells, axes, name, deadline_s=600)[0]
        close = lookups.ROUNDED if "coded" in name else EXACT
        row = [{k: is_close(got[k], want[k], **close) for k in columns} for got in (ours, theirs)]
        failed += print_row(name, row, columns)
    return failed


def print_header(columns, title="collectives"):
    print(f"{title:20}", *(f"{c:>9}" for c in columns))
    return 0


def print_row(name, row, columns):
    """Print the cells that are equal on all ranks, and the reasons for the other cells. Return the number of cells that
    differ."""
    marks = ["equal" if all(r[k] is True for r in row) else "DIFFERS" for k in columns]
    print(f"{name:20}", *(f"{m:>9}" for m in marks), f"{time.perf_counter() - STARTED:8.0f} s", flush=True)
    for k in columns:
        for why in dict.fromkeys(r[k] for r in row if r[k] is not True):
            print(f"{'':20} {k}: {why}")
    return marks.count("DIFFERS")


def is_close(a, b, **close):
    """Return True, or where and how a and b differ."""
    try:
        assert_trees_close(a, b, **(close or EXACT))
    except AssertionError as e:
        return str(e)
    return True


if __name__ == "__main__":
    sys.exit(main())
