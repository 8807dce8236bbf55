"""Generated calls of the operations on tables' cotangents. See hostile.py.

The operations write cotangents out, sum them, and use them in an update by every rule.

Shapes: B bags, N ids, R rows, D dim.
"""

from collections.abc import Mapping
from unittest import mock

import torch
from funcrec.kernels import cpp, ops, reference
from funcrec.kernels.rules import RULES
from torch import Tensor
from torch.utils._pytree import tree_map

import funcrec as fr
from funcrec.optim import _builtin
from funcrec.tables._rowgrads import Bags, Entries, RowGrads
from programs.hostile_draw import BF16, F16, F32, F64, FLOATS, Draw, Result, bounds_of, size, wide
from programs.update_calls import CASES, numbers

LR = 0.125
OPTIMIZERS = [getattr(fr.optim, name)(lr=LR, **options) for name, options in CASES]
WINDOWED = [x for x in OPTIMIZERS if x.is_gradient_wise]
DIMS = (1, 3, 16, 17, 32, 64, 65, 128, 130)


# -- written out and summed --------------------------------------------------------------------------------------


def cotangents(draw: Draw, shapes: list[tuple[int, int]], dtype: torch.dtype) -> tuple:
    """Return random (d, rows, offsets, weights, segments), with up to three segments for each table."""
    d, rows, offsets, weights, segments = [], [], [], [], []
    for t, (num_rows, dim) in enumerate(shapes):
        for _ in range(draw.one(1, 2, 3) if t == 0 else draw.one(0, 1, 3)):
            n, num_bags, first = draw.size(), draw.size(), draw.one(0, 2)
            is_bags, weighted, column = draw.one(False, True), draw.one(False, True), draw.one(0, 2)
            num_bags = num_bags if is_bags else max(n - 2, 0)
            x = draw.noise(num_bags, dim + 3, dtype=dtype)
            d.append(draw.place(x) if draw.one(0, 1) else draw.place(x.t().contiguous()).t())
            rows.append(draw.ids(n, num_rows))
            w, longest, mean = draw.noise(n, dtype=draw.one(F32, F64)), 0, False
            if is_bags:
                offsets.append(draw.offsets(first + num_bags, n))
                bounds = bounds_of(offsets[-1], n)
                w[: bounds[first]] = w[bounds[-1] :] = torch.nan
                longest, mean = draw.one(0, 1, 3, 40), draw.one(False, True)
            if weighted:
                weights.append(draw.put(w))
            at = [t, len(d) - 1, column, len(rows) - 1, len(offsets) - 1 if is_bags else -1, first if is_bags else 0]
            segments += [*at, num_bags, longest, int(mean), len(weights) - 1 if weighted else -1]
    return d, rows, offsets, weights, segments


def written_out(draw: Draw, name: str, each: int) -> Result:
    shapes = [(draw.one(0, 1, 7, 50, 2**33), draw.one(0, 1, 3, 16, 65)) for _ in range(draw.one(1, 2))]
    given, flat = cotangents(draw, shapes, draw.one(F32, F64, BF16)), [x for s in shapes for x in s]
    call, run = getattr(reference, name), getattr(torch.ops.funcrec_cpp, name)
    *tensors, segments = given
    sizes = call(*size(tensors), segments, flat)
    sizes = [x if i % each == 1 else None for i, x in enumerate(sizes)]
    terms = sum(x.shape[0] for x in given[1])
    return Result(lambda: run(*given, flat), call(*wide(tensors), segments, flat), sizes, terms)


def expand(draw: Draw) -> Result:
    return written_out(draw, "expand", 2)


def coalesce(draw: Draw) -> Result:
    return written_out(draw, "coalesce", 4)


# -- updates -----------------------------------------------------------------------------------------------------


def gradient(draw: Draw, num_rows: int, dim: int, dtype: torch.dtype) -> RowGrads:
    """Return the random gradient of a table: bags and entries. `draw` places all its numbers."""
    terms = []
    for _ in range(draw.one(1, 2, 3)):
        n, num_bags = draw.size(), draw.size()
        rows = draw.ids(n, num_rows)
        if draw.one(False, True):
            count = draw.one(None, draw.place(torch.tensor(max(n - 2, 0))))
            terms.append(Entries(rows, draw.place(draw.noise(n, dim, dtype=dtype)), count))
            continue
        offsets, weighted = draw.offsets(num_bags, n), draw.one(False, True)
        weights = draw.noise(n, dtype=F32)
        bounds = bounds_of(offsets, n)
        weights[: bounds[0]] = weights[bounds[-1] :] = torch.nan
        f = ops.Feature(0, 0, 0, draw.one(0, 1, 3, 40), draw.one(False, True), weighted, draw.one(0, 2))
        d = draw.place(draw.noise(num_bags, dim + 3, dtype=dtype))
        terms.append(Bags(d, rows, offsets, draw.put(weights) if weighted else None, (f,)))
    return RowGrads(tuple(terms), num_rows, dim, False)


def state(draw: Draw, optimizer, tables: Mapping[str, Tensor], step: int) -> dict[str, dict[str, Tensor]]:
    """Return slots with the values of a run after some steps."""
    numbers = lambda k, x: (
        torch.randint(0, max(step, 1), x.shape, generator=draw.generator).to(x.dtype)
        if k in ("counter", "last")
        else draw.noise(*x.shape, dtype=x.dtype).square() / 4
    )
    made = optimizer.init({n: x.clone() for n, x in tables.items()})
    return {n: {k: draw.place(numbers(k, x)) for k, x in own.items()} for n, own in made.items()}


def cast(tree, dtype: torch.dtype):
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


def leaves(tables, slots) -> list[Tensor]:
    return [*tables.values(), *(x for own in slots.values() for x in own.values())]


def allowed(truth: Tensor, same: Tensor, old: Tensor, random: bool) -> Tensor:
    """Return 4 · (the loss of the rule in eager f32, and some roundings), plus one rounding to 16 bits, or two if
    rounding is random.

    For f64, the loss is the loss of f32 in units of f64. A small result of large terms (FTRL's z) is as uncertain as
    the terms.
    """
    acc, own = torch.finfo(F64 if old.dtype == F64 else F32), torch.finfo(old.dtype)
    lost = (same.double() - truth).abs().max() * (acc.eps / torch.finfo(F32).eps) if truth.numel() else 0
    bound = 4 * (lost + 64 * acc.eps * (truth.abs() + old.double().abs())) + 1e-30
    return bound + ((1 + random) * own.eps * truth.abs() + own.tiny) * (old.dtype in (F16, BF16))


def updated(draw: Draw, optimizer, dims=DIMS, dtypes=None) -> Result:
    dtypes = dtypes or draw.one((F32,), (F64,), (F32, F16, BF16))
    step, acc = draw.one(0, 4, 1000), F64 if F64 in dtypes else F32
    shapes = [(draw.one(1, 7, 50, 300), draw.one(*dims)) for _ in dtypes]
    tables = {f"t{i}": draw.place(draw.noise(*s, dtype=t)) for i, (s, t) in enumerate(zip(shapes, dtypes))}
    grads = {f"t{i}": gradient(draw, *s, acc) for i, s in enumerate(shapes)}
    slots = state(draw, optimizer, tables, step)
    key = fr.key(draw.random.randrange(99)) if draw.one(0, 0, 1) else None

    run = lambda: leaves(*optimizer.update(grads, slots, tables, step, implementation="cpp", key=key))
    plain = lambda dtype: leaves(
        *optimizer.update(*cast((grads, slots, tables), dtype), step, implementation="reference")
    )
    truth, same, old = plain(F64), plain(F32), leaves(tables, slots)
    return Result(run, truth, bounds=[allowed(*x, key is not None) for x in zip(truth, same, old, strict=True)])


def fused_update(draw: Draw) -> Result:
    return updated(draw, draw.one(*OPTIMIZERS))


def users_rule(row, grad, slots, h):
    n = slots["sum"] + (grad * grad).mean()
    return row - h.lr * (grad + grad.flip(0).tanh()) / (n.sqrt() + 1e-3) * torch.exp(-row.square().sum().sqrt()), {
        "sum": n
    }


# No kernel implements these rules. The first call for a form of table compiles each rule.
with mock.patch.object(_builtin, "kernel_of", lambda *given: None):
    USERS = [getattr(fr.optim, name)(lr=LR, **options) for name, options in CASES]
USERS.append(fr.optim.row_optimizer(init=lambda t: {"sum": torch.zeros(t.shape[0])}, rule=users_rule, lr=LR))


def generated_update(draw: Draw) -> Result:
    """Return the result of an update by rules with generated C++, for few dims because each dim is compiled."""
    optimizer = draw.one(*USERS)
    return updated(draw, optimizer, *draw.one(((16,), (F64,)), ((33,), (F32, BF16)), ((64,), (F32, F16))))


def windowed_update(draw: Draw) -> Result:
    """Return the result of an update of columns [a, b) of a table's rows, with the gradient of all columns."""
    optimizer, dtype, dim = draw.one(*WINDOWED), draw.one(*FLOATS), draw.one(2, 5, 17, 64, 130)
    num_rows, step, acc, a = (
        draw.one(1, 7, 50),
        draw.one(0, 4),
        F64 if dtype == F64 else F32,
        draw.random.randrange(dim),
    )
    b = draw.random.randint(a + 1, dim)
    table, grads = {"t": draw.noise(num_rows, dim, dtype=dtype)}, {"t": gradient(draw, num_rows, dim, acc)}
    slots = state(draw, optimizer, table, step)
    cut = lambda tree: tree_map(lambda x: draw.place(x[:, a:b].contiguous() if x.dim() > 1 else x), tree)
    window = RowGrads(grads["t"].terms, num_rows, dim, False, first=draw.place(torch.tensor(a)))
    own = cut((slots, table))
    run = lambda: leaves(*optimizer.update({"t": window}, *own, step, implementation="cpp"))
    plain = lambda dtype: optimizer.update(*cast((grads, slots, table), dtype), step, implementation="reference")
    truth, same = [[x[:, a:b] if x.dim() > 1 else x for x in leaves(*plain(t))] for t in (F64, F32)]
    bounds = [allowed(*x, False) for x in zip(truth, same, leaves(*own[::-1]), strict=True)]
    return Result(run, truth, bounds=bounds)


def empty_update(draw: Draw) -> Result:
    """Return the result of an update of tables that may be empty, without entries. The update writes nothing."""
    shapes = [draw.one((0, 5), (7, 0), (0, 0), (5, 3)) for _ in range(draw.one(1, 2, 3))]
    tables = [draw.place(draw.noise(*s, dtype=draw.one(*FLOATS))) for s in shapes]
    tables = [x.to(F32) for x in tables]
    *terms, segments = cotangents(draw, shapes, F32)
    terms[1] = [torch.full_like(x, -1) if draw.one(0, 1) else x + 5 for x in terms[1]]
    terms[1] = [torch.where((x >= 0) & (x < 5), -1, x) for x in terms[1]]
    lr, step = draw.place(torch.tensor(0.1, dtype=F64)), draw.place(torch.tensor(0))
    rule, hyper, each = draw.one(("sgd", [0.0], 0), ("rowwise_adagrad", [0.0, 0.0, 0.0, 0.0], 1))
    slots = [draw.place(torch.ones(x.shape[0])) for x in tables] * each
    given = (tables, slots, *terms, segments, lr, step, None, rule, hyper)
    return Result(lambda: [*torch.ops.funcrec_cpp.fused_update(*given)], [*tables, *slots])


def stacked_update(draw: Draw) -> Result:
    """Return the result of an update of K members in one call, with the bits of a call for each member.

    A member has a rate, a step, numbers, and some of the terms of its own, or shares them."""
    (rule, options), k, dtype = draw.one(*CASES), draw.one(1, 2, 3), draw.one(*FLOATS)
    acc, hyper = F64 if dtype == F64 else F32, numbers(rule, options)
    shapes = [(draw.one(0, 1, 7, 50), draw.one(*DIMS)) for _ in range(draw.one(1, 2))]
    *terms, segments = cotangents(draw, shapes, acc)
    each = lambda x: draw.place(torch.stack([x.roll(i, 0) for i in range(k)])) if draw.one(0, 1, 1) else x
    terms = [[each(x) for x in xs] for xs in terms]
    wide = [w for name, w in zip(RULES[rule].slots, RULES[rule].wide) if name in RULES[rule].slots_with(hyper)]
    tables = [draw.noise(k, *s, dtype=dtype) for s in shapes]
    slots = [draw.noise(k, *(s if w else s[:1]), dtype=acc).square() / 4 for s in shapes for w in wide]
    key = torch.tensor(
        [[[[3 * i + t, 0, i, 40], [0, 2**63 - 1, 0, 0]] for t, _ in enumerate(shapes)] for i in range(k)]
    )
    lr, step = draw.noise(k, dtype=F64), torch.arange(k) * 3
    own = torch.tensor(hyper, dtype=F64) * (1 + torch.arange(k)[:, None] / 8)
    when = [draw.place(x) if draw.one(0, 1, 1) else draw.place(x[0]) for x in (lr, step)]
    when.append(draw.one(None, draw.place(key), draw.place(key[0])))
    own = draw.one(None, draw.place(own), draw.place(own[0]))

    def run(tables, slots, terms, when, own) -> list[Tensor]:
        tables, slots = [*map(draw.place, tables)], [*map(draw.place, slots)]
        cpp.fused_update_(tables, slots, *terms, segments, *when, rule, hyper, None, [], own)
        return tables + slots

    of = lambda x, rank, i: x[i] if x is not None and x.dim() > rank else x
    of_terms = lambda i: [[of(x, rank, i) for x in xs] for rank, xs in zip((2, 1, 1, 1), terms)]
    of_when = lambda i: [of(x, rank, i) for rank, x in zip((0, 0, 3), when)]
    alone = lambda i: run([x[i] for x in tables], [x[i] for x in slots], of_terms(i), of_when(i), of(own, 1, i))
    want = [torch.stack(xs) for xs in zip(*map(alone, range(k)))]
    return Result(lambda: run(tables, slots, terms, when, own), want)


UPDATES = (expand, coalesce, fused_update, generated_update, windowed_update, empty_update, stacked_update)
