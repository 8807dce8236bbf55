"""Optimizers, steps and meshes as cases of the sweep `differences`."""

import functools

import torch

import funcrec as fr
from funcrec.core._tree import tree_map
from funcrec.optim._builtin import BUILTIN, arguments_of
from funcrec.testing._modes import Case, draw
from programs.float_functions import DENSE, GRADS, LOSS, TABLE, WEIGHTS, ids, loss_fn, number, row_grads

# The built-in optimizers. Hyper-parameters replace the defaults where a rule is hardly smooth or leaves out some of its
# terms.
RULES = {n: {} for n in BUILTIN} | {
    "momentum": {"nesterov": True}, "lars_sgd": {"eta": 0.2}, "adagrad": {"eps": 1e-3},
    "rmsprop": {"momentum": 0.5, "b2": 0.8}, "ftrl": {"l1": 0.01, "l2": 0.1},
    **{n: {"eps": 1e-2, "b2": 0.8} for n in ("adam", "adamw", "lamb")},
    **{n: {"b2": 0.8} for n in ("partial_rowwise_adam", "partial_rowwise_lamb")},
    "rowwise_adagrad": {"decay": "decoupled", "max_norm": 2.0}, "rowwise_adagrad_counter": {"half_life": 3.0},
    "rowwise_adagrad_cowclip": {"clip_ratio": 0.3},
}  # fmt: skip
LR = number(0.1)
UPDATED = {"table": TABLE, "grads": GRADS, "lr": LR}


def updated(optimizer, table, grads, slot=None, names="tu", **how):
    """Return the results of two updates, the first with repeated rows. slot: a number added to every slot that has more
    than one element. names: of the tables."""
    tables = {n: x for n, x in {"t": table, "u": table[:, :2] * 1.0}.items() if n in names}
    slots = optimizer.init(tables)
    if slot is not None:
        slots = {
            n: {k: s + slot.square() if s.is_floating_point() else s for k, s in own.items()}
            for n, own in slots.items()
        }
    g = {n: row_grads(x) for n, x in {"t": grads, "u": grads[:, :2]}.items() if n in names}
    tables, slots = optimizer.update(g, slots, tables, 0, **how)
    return optimizer.update({n: x.scale(0.7) for n, x in g.items()}, slots, tables, 1, **how)


def of_rule(name, table, grads, lr, slot, implementation=None, names="tu", **numbers):
    optimizer = getattr(fr.optim, name)(lr=lr, **{**RULES[name], **numbers})
    return updated(optimizer, table, grads, slot, names, implementation=implementation)


def numbers_of(name):
    """Return a rule's float hyper-parameters without lr: those that are not 0, and weight_decay. A nonzero value of a
    hyper-parameter that is 0 would change the rule's form."""
    given = arguments_of(BUILTIN[name], **RULES[name])[1]
    return {k: number(x or 0.2) for k, x in given.items() if type(x) is float and k != "lr" and (x or "decay" in k)}


def no_slots(table):
    return {}


def learned(net, row, grad, slots, hyper):
    hidden = torch.tanh(grad[:, None] * net["in"] + hyper.step)
    return row - hyper.lr * (hidden * net["out"]).sum(1), slots


def learned_update(table, grads, lr, inner, outer):
    rule = functools.partial(learned, {"in": inner, "out": outer})
    return updated(fr.optim.row_optimizer(init=no_slots, rule=rule, lr=lr), table, grads, implementation="reference")


COMBINED = {
    "by_table": lambda lr: fr.optim.by_table({"t": fr.optim.sgd(lr)}, default=fr.optim.adagrad(lr * 2)),
    "clip": lambda lr: fr.optim.clip(fr.optim.sgd(lr), max_norm=0.5, max_value=2.5),
    "freeze": lambda lr: fr.optim.freeze(fr.optim.sgd(lr), tables=["u"]),
    "stochastic_rounding": lambda lr: fr.optim.stochastic_rounding(fr.optim.sgd(lr), key=fr.key(0)),
    "accumulate": lambda lr: fr.optim.accumulate(fr.optim.sgd(lr), every=2, capacity=6),
    "schedule": lambda lr: fr.optim.sgd(
        lambda step: lr * fr.optim.schedule([fr.optim.Stage("linear", 4, value=0.5)])(step)
    ),
}


def of_rows() -> list[Case]:
    slot, small = {"slot": number(0.6)}, {"inner": draw("inner", (4,)), "outer": draw("outer", (4,))}
    # without "reference", kernels would be compiled for each rule: see `test_generated`
    as_tensor = {"implementation": "reference"}
    of_numbers = lambda n: functools.partial(of_rule, n, TABLE, GRADS, LR, number(0.6), names="t", **as_tensor)
    return [
        *(Case(f"optim.{n}", functools.partial(of_rule, n), {**UPDATED, **slot}) for n in RULES),
        *(Case(f"optim.{n}", of_numbers(n), numbers_of(n)) for n in RULES if numbers_of(n)),
        Case("optim.adam cpp", functools.partial(of_rule, "adam", implementation="cpp"), {**UPDATED, **slot}, "*"),
        Case("optim.adam reference", functools.partial(of_rule, "adam", implementation="reference"),
            {**UPDATED, **slot}),
        Case("optim.row_optimizer", learned_update, {**UPDATED, **small}),
        *(Case(f"optim.{n}", lambda table, grads, lr, f=f: updated(f(lr), table, grads), UPDATED) for n,
            f in COMBINED.items()),
    ]  # fmt: skip


CLASSES = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "Adam": {"amsgrad": True, "weight_decay": 0.1, "eps": 1e-2},
    "AdamW": {"eps": 1e-2}, "Adagrad": {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-2},
    "RMSprop": {"centered": True, "momentum": 0.5, "eps": 1e-2},
    "NAdam": {}, "RAdam": {}, "Adamax": {}, "Adadelta": {}, "Rprop": {}, "ASGD": {},
}  # Muon computes in bf16: no difference tells its derivative  # fmt: skip
PARAMS = {"w": draw("p", (2, 3)), "grads": draw("dp", (2, 3)), "lr": LR}


def dense_updated(name, w, grads, lr, moment=None):
    optimizer = fr.optim.dense(getattr(torch.optim, name), lr=lr, **CLASSES[name])
    state = optimizer.init({"w": w})
    if moment is not None:
        state = {"w": {k: s + moment.square() if s.shape == w.shape else s for k, s in state["w"].items()}}
    params, state = optimizer.update({"w": grads}, state, {"w": w}, 0)
    return optimizer.update({"w": grads * 0.5 + params["w"]}, state, params, 1)


def of_dense() -> list[Case]:
    known = {c.__name__ for c in fr.optim._dense.DIFFERENTIABLE}
    moment = {"moment": number(0.7)}
    return [
        Case(f"optim.dense({n})", functools.partial(dense_updated, n), {**PARAMS, **(moment if n in known else {})},
            () if n in known else "*")
        for n in CLASSES
    ] + [Case(f"optim.{n}", functools.partial(grouped, make), PARAMS) for n, make in GROUPED.items()]  # fmt: skip


GROUPED = {
    "by_path": lambda opt: fr.optim.by_path({"w": fr.optim.clip(opt, max_norm=0.5)}),
    "ema": lambda opt: fr.optim.ema(opt, decay=0.7),
    "averaged": lambda opt: fr.optim.ema(fr.optim.freeze(opt, paths=["b"]), decay=0.7),
}


def grouped(make, w, grads, lr):
    optimizer = make(fr.optim.dense(torch.optim.SGD, lr=lr, momentum=0.5))
    params = {"w": w, "b": grads} if make is GROUPED["averaged"] else {"w": w}
    new, state = optimizer.update(tree_map(lambda x: grads, params), optimizer.init(params), params, 0)
    return (new, fr.optim.averaged(new, state)) if make is GROUPED["averaged"] else (new, state)


# -- steps ---------------------------------------------------------------------------------------------------------


def step_of(lr, dense_lr, sparse=fr.optim.adagrad, dense=torch.optim.SGD, **how) -> fr.TrainStep:
    return fr.train_step(loss_fn, sparse=sparse(lr=lr), dense=fr.optim.dense(dense, lr=dense_lr), **how)


def trained(table, w, b, weights, lr, dense_lr):
    step = step_of(lr, dense_lr)
    state = step.init(fr.Params({"t": table}, {"w": w, "b": b}))
    for _ in range(2):
        state, metrics = step(state, ids(weights))
    return state.tables, state.dense, state.slots, metrics["loss"]


def scanned(table, w, b, weights, lr, dense_lr):
    step = step_of(lr, dense_lr)
    batches = tree_map(lambda x: torch.stack([x, x]), ids(weights))
    return fr.scan(step, step.init(fr.Params({"t": table}, {"w": w, "b": b})), batches)


TRAINED = {**LOSS, "lr": LR, "dense_lr": number(0.02)}
MESH = fr.Mesh.emulated(x=2)
SPLIT = draw("split", (4, 3))
ON_RANKS = {
    "shard_map": lambda x: torch.sin(x) * x.sum(),
    "psum": lambda x: fr.psum(torch.sin(x), "x"),
    "pmean": lambda x: fr.pmean(x.square(), "x"),
    "pmax": lambda x: fr.pmax(x, "x"),
    "pmin": lambda x: fr.pmin(x, "x"),
    "all_gather": lambda x: fr.all_gather(x, "x", tiled=True).square(),
    "all_to_all": lambda x: fr.all_to_all(x, "x", tiled=True).square(),
    "psum_scatter": lambda x: fr.psum_scatter(x, "x", tiled=True).square(),
    "ppermute": lambda x: fr.ppermute(x, "x", [(0, 1)]).square(),
}
REPLICATED = {"psum", "pmean", "pmax", "pmin"}


def mapped(name):
    def run(x):
        out = fr.P() if name in REPLICATED else fr.P("x")
        return fr.shard_map(ON_RANKS[name], mesh=MESH, in_specs=(fr.P("x"),), out_specs=out)(x)

    return run


PLAN = fr.Plan({"t": fr.row_wise("x")})
EVEN = draw("even", (6, 3))


def gathered(table):
    return fr.gather_tables(fr.shard_tables({"t": table}, PLAN, MESH), MESH)


def of_steps() -> list[Case]:
    return [
        Case("train_step", trained, TRAINED),
        Case("scan", functools.partial(scanned, weights=WEIGHTS, **DENSE),
            {"table": TABLE, "lr": LR, "dense_lr": number(0.02)}),
        *(Case(n, mapped(n), {"x": SPLIT}) for n in ON_RANKS),
        Case("gather_tables", gathered, {"table": EVEN}),
    ]  # fmt: skip
