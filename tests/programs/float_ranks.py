"""Public functions of a mesh as cases of the sweep `differences`, on an emulated mesh and on real ranks.

Every rank has the whole input and takes its own part. On real ranks, each rank gets the part of the derivative that
passes through the rank's own input (reverse) or the rank's own output (forward).
"""

import contextlib
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import Tensor

import funcrec as fr
from funcrec.compile import _program
from funcrec.core._tree import replace, tree_leaves, tree_map
from funcrec.testing import _modes as differences
from funcrec.testing._modes import BATCH, H2, RAISED, ZERO, Case, H, along, draw

SHAPES = {"a": (5, 2), "b": (4, 2), "c": (3, 3), "d": (5, 2)}  # no bag has id 3 for d
PLAN = fr.Plan({"a": fr.row_wise("x"), "b": fr.column_wise("x"), "c": fr.table_wise("x", rank=1), "d": fr.replicated()})
COPIES = fr.Plan(dict.fromkeys("abcd", fr.replicated()), replicas="x")
OTHER = fr.Plan(
    {"a": fr.replicated(), "b": fr.table_wise("x", rank=0), "c": fr.row_wise("x"), "d": fr.column_wise("x")}
)
POOLED = (
    fr.FeatureConfig("f0", table="a", column="u", weighted=True),
    fr.FeatureConfig("f1", table="b", column="v", pooling="mean"),
    fr.FeatureConfig("f2", table="c", column="v", pooling="mean", weighted=True),
    fr.FeatureConfig("f3", table="d", column="u"),
    fr.FeatureConfig("f4", table="a", column="v"),
)
LISTED = (
    fr.FeatureConfig("s0", table="a", column="u", pooling="none", weighted=True),
    fr.FeatureConfig("s1", table="b", column="v", pooling="none"),
)
BAGS = {"u": [[0, 4, 4], [], [2], [1, -1, 0]], "v": [[3], [1, 0], [], [2, 2, 9]]}
TABLES = {n: draw(f"table {n}", s) for n, s in SHAPES.items()}
DENSE = {"w": draw("w", (11,)), "bias": draw("b", (4,))}
WEIGHTS = draw("weights", (13,)).square() + 0.5
number = lambda x: torch.tensor(x, dtype=torch.float64)


def ids(weights: Tensor) -> fr.KeyedJaggedTensor:
    return replace(fr.KeyedJaggedTensor.from_lists(BAGS, dtype=torch.int64), weights=weights)


def cut(tree, mesh: fr.Mesh):
    return fr.shard(tree, fr.P("x"), mesh=mesh)


def bent(x: Tensor) -> Tensor:
    return torch.sin(x) + 0.05 * x.square()


def loss_fn(params, batch):
    pooled = fr.lookup(params.tables, batch, POOLED).values
    lists = fr.lookup_sequence(params.tables, batch, LISTED)
    bias = params.dense["bias"]
    return (
        bent(pooled * params.dense["w"]).mean()
        + bent(torch.cat([lists[k].to_padded(3).sum(1) for k in ("s0", "s1")], 1) * bias).mean()
    )


def with_aux(params, batch):
    return loss_fn(params, batch), {"seen": batch.weights.mean()}


def merge(dense, aux):
    return {**dense, "bias": dense["bias"] + 0.1 * aux["seen"]}


# -- collectives -------------------------------------------------------------------------------------------------

SIZES = torch.tensor([[1, 2], [1, 1]])
RAGGED = {
    "starts": torch.tensor([[0, 1], [0, 1]]),
    "sizes": SIZES,
    "places": torch.tensor([[0, 0], [1, 2]]),
    "got": SIZES.t(),
}


def ragged(x: Tensor) -> Tensor:
    starts, sizes, places, got = (t[fr.axis_index("x")[None]][0] for t in RAGGED.values())
    return fr.ragged_all_to_all(x, torch.zeros_like(x), starts, sizes, places, got, axis_name="x").square()


COLLECTIVES = {  # functions of x f[4, 2] on each of two ranks
    "psum": lambda x: fr.psum(bent(x), "x"),
    "psum_invariant, pvary": lambda x: fr.pvary(fr.psum_invariant(bent(x), "x"), "x").square(),
    "pmean": lambda x: fr.pmean(bent(x), "x"),
    "pmax": lambda x: fr.pmax(bent(x), "x") * x,
    "pmin": lambda x: fr.pmin(bent(x), "x").square(),
    "all_gather": lambda x: fr.all_gather(x, "x").square(),
    "all_gather, tiled": lambda x: bent(fr.all_gather(x, "x", dim=1, tiled=True)),
    "psum_scatter": lambda x: fr.psum_scatter(bent(x), "x", tiled=True).square(),
    "all_to_all": lambda x: fr.all_to_all(bent(x), "x", concat_dim=1, tiled=True).square(),
    "ppermute": lambda x: fr.ppermute(bent(x), "x", [(0, 1)]) * x,
    "ragged_all_to_all": ragged,
    "axis_index": lambda x: bent(x) * fr.axis_index("x"),
}


def collectives(mesh: fr.Mesh, x: Tensor, names=tuple(COLLECTIVES)):
    one = lambda x: {n: COLLECTIVES[n](x)[None] for n in names}
    return fr.shard_map(one, mesh=mesh, in_specs=fr.P("x"), out_specs=fr.P("x"))(cut(x, mesh))


# -- tables ------------------------------------------------------------------------------------------------------


def of_tables(tensors: dict) -> dict:
    return {n: tensors[n] for n in SHAPES}


def looked_up(mesh, *, weights, how=(), **tables):
    held = fr.shard_tables(of_tables(tables), PLAN, mesh, **dict(how))

    def one(held, ids):
        listed = fr.lookup_sequence(held, ids, LISTED)
        return fr.lookup(held, ids, POOLED).values, {n: x.to_padded(3) for n, x in listed.items()}

    mapped = fr.shard_map(one, mesh=mesh, in_specs=(held.specs(), fr.P("x")), out_specs=fr.P("x"))
    return tree_map(bent, mapped(held, cut(ids(weights), mesh)))


def gradients(mesh, *, weights, w, bias, how=(), **tables):
    """Return the row gradients of every rank, and the gradients of the dense parameters."""
    held = fr.shard_tables(of_tables(tables), PLAN, mesh, **dict(how))

    def one(held, dense, ids):
        loss, grads = fr.value_and_grad(loss_fn)(fr.Params(held, dense), ids)
        return loss[None], {n: g.to_dense() for n, g in grads.tables.items()}, tree_map(lambda x: x[None], grads.dense)

    specs = (held.specs(), fr.P(), fr.P("x"))
    return fr.shard_map(one, mesh=mesh, in_specs=specs, out_specs=fr.P("x"))(
        held, {"w": w, "bias": bias}, cut(ids(weights), mesh)
    )


def moved(mesh, *, is_whole, w, slot, **tables):
    """Return a state that was sharded and made whole again: with `gather_state`, with `reshard`, or tables alone."""
    sparse, dense = fr.optim.adagrad(lr=0.1), fr.optim.dense(torch.optim.SGD, lr=0.1)
    step = fr.train_step(loss_fn, sparse=sparse, dense=dense, mesh=mesh, plan=PLAN, dense_axes=("x",))
    state = step.init(fr.Params(of_tables(tables), {"w": w}))
    slots = {n: {k: s + slot for k, s in own.items()} for n, own in state.slots.items()}
    state = replace(state, slots=slots)
    if not is_whole:
        state = fr.reshard(state, OTHER, mesh=mesh, sparse=sparse)
        return [bent(x) for x in tree_leaves(state.tables.banks)], state.slots, state.dense
    state = fr.gather_state(state, mesh)
    return tree_map(bent, state.tables), state.slots, tree_map(bent, state.dense)


def whole_again(mesh, **tables):
    return tree_map(bent, fr.gather_tables(fr.shard_tables(of_tables(tables), PLAN, mesh), mesh))


def united(mesh, *, lr, apart, **tables):
    """Return replicas that trained apart and were then united. `apart` makes the replicas differ."""
    options = {
        "sparse": fr.optim.adagrad(lr=lr, initial_accumulator=0.1),
        "dense": fr.optim.dense(torch.optim.SGD, lr=0.1),
    }
    step = fr.train_step(loss_fn, **options, mesh=mesh, plan=COPIES)
    state = step.init(fr.Params(of_tables(tables), DENSE))
    state, _ = step(state, cut(ids(WEIGHTS), mesh))
    banks = {n: x + own_part(apart, x, mesh) for n, x in state.tables.items()}
    state = fr.sync_replicas(replace(state, tables=replace(state.tables, banks=banks)), mesh=mesh)
    return tree_map(bent, state.tables.banks), state.slots


def own_part(apart: Tensor, x: Tensor, mesh: fr.Mesh) -> Tensor:
    """Return this process's numbers of apart f[2], one number per replica, expanded to the rows of x."""
    return cut(apart, mesh).repeat_interleave(x.shape[0] // (2 if mesh.is_emulated else 1))[:, None]


STEPS = {
    "plain": ("SGD", {}),
    "dense_axes, merge, capacity": ("Adam", {"dense_axes": ("x",), "merge": merge, "has_aux": True, "capacity": 16}),
}


def trained(mesh, *, how, steps, weights, w, bias, lr, dense_lr, jit=False, **tables):
    name, more = STEPS[how]
    dense = fr.optim.dense(getattr(torch.optim, name), lr=dense_lr, **({"eps": 0.5} if name == "Adam" else {}))
    options = {"sparse": fr.optim.adagrad(lr=lr, initial_accumulator=0.1), "dense": dense}
    step = fr.train_step(with_aux if "merge" in more else loss_fn, **options, **more, mesh=mesh, plan=PLAN)
    run = fr.jit(step) if jit else step
    state = step.init(fr.Params(of_tables(tables), {"w": w, "bias": bias}))
    for _ in range(steps):
        state, metrics = run(state, cut(ids(weights), mesh))
    return tree_map(bent, (state.tables.banks, state.slots, state.dense)), metrics["loss"], metrics.get("aux")


def at_once(f, inputs: dict[str, Tensor]):
    """Return f of one vector that holds all inputs. The difference therefore sees every input whose gradient a mode
    loses."""
    sizes = [x.numel() for x in inputs.values()]
    apart = lambda x: {k: p.reshape(y.shape) for (k, y), p in zip(inputs.items(), x.split(sizes), strict=True)}
    return lambda x: f(**apart(x)), {"x": torch.cat([x.flatten() for x in inputs.values()])}


LOOKED = {**TABLES, "weights": WEIGHTS}
LOSS = {**LOOKED, **DENSE}
TRAINED = {**LOSS, "lr": number(0.1), "dense_lr": number(0.02)}
MOVED = {**TABLES, "w": DENSE["w"], "slot": number(0.3)}
CASES = {  # {name: (f of the mesh and the inputs, inputs)}
    "collectives": (collectives, {"x": draw("x", (8, 2))}),
    "lookups": (looked_up, LOOKED),
    "lookups, exact": (partial(looked_up, how={"exact": True}), LOOKED),
    "lookups, dedup": (partial(looked_up, how={"dedup": True}), LOOKED),
    "value_and_grad": (gradients, LOSS),
    "gather_state": (partial(moved, is_whole=True), MOVED),
    "reshard": (partial(moved, is_whole=False), MOVED),
    "gather_tables": (whole_again, TABLES),
    "sync_replicas": (united, {**TABLES, "lr": number(0.1), "apart": number(0.2).expand(2).clone()}),
    "train_step": (partial(trained, how="plain", steps=1), TRAINED),
    "train_step, all options": (partial(trained, how="dense_axes, merge, capacity", steps=1), TRAINED),
}
# cases whose vectors travel coded: (the case, its `how`, the allowed rounding relative to the derivative's size)
CODED = {
    "lookups, bfloat16": ("lookups", {"codec": fr.Codec("bfloat16", "bfloat16")}, 0.04),
    "lookups, float16, exact": ("lookups, exact", {"codec": fr.Codec("float16", "float16"), "exact": True}, 0.005),
    "lookups, int8, dedup": ("lookups, dedup", {"codec": fr.Codec("int8", "int8"), "dedup": True}, 0.03),
    "value_and_grad, float16": ("value_and_grad", {"codec": fr.Codec("float16", "float16")}, 0.01),
}
BITS = ("gather_state", "reshard")  # these raise between real ranks, where rows travel as bits
# Every rank must have equal parameters. No rank can therefore move its parameters alone.
SHARED = ("train_step", "train_step, all options")
FEW = ("grad", "autograd", "jvp", "vmap", "vmap of grad", "jvp of grad")
# jit runs the staged graph itself
STAGED = mock.patch.object(_program, "compile_graph", lambda graph, args: graph)


def case_of(name: str, mesh: fr.Mesh) -> Case:
    if name in CODED:
        plain, how, rtol = CODED[name]
        f, inputs = CASES[plain]
        run, inputs = at_once(partial(f, mesh, how=how), inputs)
        return Case(name, run, inputs, (), case_of(plain, mesh).f, rtol)
    f, inputs = CASES[name]
    return Case(name, *at_once(partial(f, mesh), inputs), "*" if name in BITS and not mesh.is_emulated else ())


# -- real ranks --------------------------------------------------------------------------------------------------


def over_ranks(x: Tensor) -> Tensor:
    """Return Σ_r x, for plain numbers."""
    total = x.detach().clone()
    torch.distributed.all_reduce(total)
    return total


def through_mine(s: Callable, difference: Callable) -> Tensor:
    """Return difference(f) for every rank in turn. f is the effect on Σ_r s_r when only this rank moves its t."""
    own = None
    for rank in range(torch.distributed.get_world_size()):
        mine = rank == torch.distributed.get_rank()
        need = difference(lambda base, t: over_ranks(s(base + t if mine else ZERO + base)))  # noqa: B023
        own = need if mine else own
    return own


def slope(f: Callable, base: float = 0.0) -> Tensor:
    return (f(base, H) - f(base, -H)) / (2 * H)


def slope_of_slope(f: Callable) -> Tensor:
    """Return the derivative of f's slope in f's own t. All ranks move the base of that derivative."""
    at = lambda base: (f(base, H2) - f(base, -H2)) / (2 * H2)
    return (8 * (at(H2) - at(-H2)) - (at(2 * H2) - at(-2 * H2))) / (12 * H2)


# the derivative of each rank: of its own s_r by the t of all ranks (forward), or of Σ s_r by its own t (reverse)
OWN = {
    "grad": lambda s: through_mine(s, slope),
    "vmap of grad": lambda s: sum(through_mine(s, lambda f: slope(f, float(b))) for b in BATCH),  # noqa: B023
    "jvp": lambda s: differences.first(s).detach(),
    "vmap": lambda s: sum(s(b) for b in BATCH).detach(),
    "jvp of grad": lambda s: through_mine(s, slope_of_slope),
}
OWN |= {"autograd": OWN["grad"], "jit of grad": OWN["grad"], "jit of jvp": OWN["jvp"]}


def outcomes(name: str, modes: tuple[str, ...], compiled: bool = False) -> dict[tuple[str, str], str]:
    """Return the outcomes of `differences.sweep` on real ranks. Each rank compares its derivative with its own
    differences. The cases in SHARED compare the sum of the reverse derivatives."""
    case, needs, found = case_of(name, fr.Mesh.distributed(x=torch.distributed.get_world_size())), {}, {}
    s, smooth = along(case, "x"), along(case._replace(f=case.smooth or case.f), "x")
    s(ZERO)  # this call draws the random numbers of the sweep outside of transforms
    for mode in modes:
        derivative, difference = differences.EVERY[mode]
        added = name in SHARED and mode not in ("jvp", "jit of jvp", "vmap")
        need_of = (lambda s, d=difference: d(lambda t: over_ranks(s(t)))) if added else OWN[mode]
        try:
            with contextlib.nullcontext() if compiled else STAGED:
                got = derivative(s).detach()
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            found["x", mode] = f"{RAISED}: {type(error).__name__} {str(error)[:400]}"
            continue
        key = difference if added else OWN[mode]
        if key not in needs:
            needs[key] = need_of(smooth)
        got = over_ranks(got) if added else got
        if "size" not in needs:
            needs["size"] = differences.size_of(smooth)
        found["x", mode] = differences.compared(got, needs[key], needs["size"], mode, case.rtol)
    return found
