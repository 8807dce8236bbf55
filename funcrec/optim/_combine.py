"""Row optimizers made from row optimizers: by table, with clipping, with frozen tables, with stochastic rounding.

`clip` and `freeze` also take dense optimizers.

by_table({a: f}, default=g)  =  f on table a, g on the other tables        clip(f)(g) = f(min(1, c / ‖g‖) · g)

Each result keeps the contract of RowOptimizer, so combinators nest.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from funcrec.core import (
    Key,
    Positive,
    Problem,
    Scalar,
    absent_problems,
    check,
    fail,
    member_problems,
    random,
    remade,
    sure,
    twice_problems,
    typed,
    unknown_problems,
)  # fmt: skip
from funcrec.optim._by_path import clip_dense, freeze_dense
from funcrec.optim._checks import check_update, tables_problems
from funcrec.optim._dense import DenseOptimizer
from funcrec.optim._row import RowOptimizer
from funcrec.tables import clip_by_global_norm

Bound = Positive | Scalar


@remade
@typed
def by_table(optimizers: Mapping[str, RowOptimizer], *, default: RowOptimizer | None = None) -> RowOptimizer:
    """Return an optimizer with a row optimizer for each table. `default` updates the tables that are not named.

    Raises:
      KeyError: a name in `optimizers` is not the name of a table.
      ValueError: a table is not named and there is no default.

    Law: each optimizer updates its tables as it would alone.

    Example:
      >>> import torch, funcrec as fr
      >>> sparse = fr.optim.by_table({"user": fr.optim.sgd(0.1)}, default=fr.optim.adagrad(0.1))
      >>> slots = sparse.init({"user": torch.zeros(3, 2), "item": torch.zeros(3, 2)})
      >>> {name: list(s) for name, s in slots.items()}
      {'user': [], 'item': ['sum']}
    """
    call = "funcrec.optim.by_table"

    def split(tables: Mapping[Any, Any]) -> Iterator[tuple[RowOptimizer, list[str]]]:
        """Yield each optimizer with its tables. The default gets all its tables at once, so that a `clip` sees all."""
        yield from ((opt, [n]) for n, opt in optimizers.items())
        rest = [n for n in tables if n not in optimizers]
        if rest:
            yield sure(default), rest

    def init(tables):
        check(f"{call}.init", tables_problems(tables))
        check(f"{call}.init", name_problems("optimizers", optimizers, tables), cover_problems(tables))
        made: dict[Any, Any] = {}
        for opt, names in split(tables):
            made |= opt.init(_only(tables, names))
        return _only(made, tables)

    def updated(of, row_grads, slots, tables, step, **kernel):
        check_update(f"{call}.update", row_grads, slots, tables, step)
        check(f"{call}.update", name_problems("optimizers", optimizers, tables), cover_problems(tables))
        new_tables, new_slots = dict(tables), dict(slots)
        for opt, names in split(tables):
            mine = (_only(row_grads, names), _only(slots, names), _only(tables, names))
            moved, own = of(opt)(*mine, step, **kernel)
            new_tables |= moved
            new_slots |= own
        return new_tables, new_slots

    update, due = (cast(Any, functools.partial(updated, of)) for of in (lambda opt: opt.update, due_of))

    def hold(row_grads, slots, tables, step, **takes):
        held, kept = dict(row_grads), dict(slots)
        for opt, names in ((opt, names) for opt, names in split(tables) if opt.waiting):
            given, own = sure(opt.hold)(*(_only(x, names) for x in (row_grads, slots, tables)), step, **takes)
            held |= given
            kept |= own
        return held, kept

    def cover_problems(tables: Mapping) -> Iterator[Problem]:
        need, hint = "one for each table, or `default`", "default=fr.optim.sgd(lr=0.1)"
        names = tables if default is None else ()
        yield from absent_problems("table {} has no optimizer.", optimizers, names, need, hint, ValueError)

    def label(table: str):
        return (table, optimizers[table].label(table)) if table in optimizers else default and default.label(table)

    own = (*optimizers.values(), *([] if default is None else [default]))
    of_all, of_any = (lambda name, f=f: f(getattr(o, name) for o in own) for f in (all, any))
    waiting = tuple(dict.fromkeys(k for o in own for k in o.waiting))
    halves: dict[str, Any] = {"waiting": waiting, "hold": hold, "due": due} if waiting else {}
    facts = {n: of_all(n) for n in ("is_elementwise", "is_gradient_wise", "has_equal_slots", "ignores_origin")}
    facts |= {n: of_any(n) for n in ("is_joint", "counts_entries")}
    rate = lambda table, step: cast(Any, optimizers.get(table, default)).update.rate(table, step)
    if all(hasattr(o.update, "rate") for o in own):
        update.rate = rate
    return RowOptimizer(init, update, label, **facts, **halves)


@remade
@typed
def clip(
    optimizer: RowOptimizer | DenseOptimizer, *, max_norm: Bound | None = None, max_value: Bound | None = None
) -> RowOptimizer | DenseOptimizer:
    """Return an optimizer that clips gradients before its update, by element and by norm.

    First each element is clipped to [-max_value, max_value]. Then one factor, min(1, max_norm / (norm + 1e-6)),
    scales all gradients to a norm of at most `max_norm`. The norm is over the gradients of all tables, or of all dense
    parameters, in the update, and its bits are those of `global_norm`. An element is an element of the sum over the ids
    of a row. For one norm over tables and dense parameters together, use `train_step(max_norm=...)`.

    Example:
      >>> import torch, funcrec as fr
      >>> sparse = fr.optim.clip(fr.optim.sgd(lr=1.0), max_norm=1.0)
      >>> grads = {"t": fr.RowGrads.from_entries(torch.tensor([0]), torch.tensor([[3.0, 4.0]]), num_embeddings=1)}
      >>> sparse.update(grads, {"t": {}}, {"t": torch.zeros(1, 2)}, step=0)[0]["t"]
      tensor([[-0.6000, -0.8000]])

    Source: torch.nn.utils.clip_grad_norm_ and clip_grad_value_; TorchRec's
      GradientClippingOptimizer does not clip fused tables.
    """
    call = "funcrec.optim.clip"
    if max_norm is None and max_value is None:
        fail(call, "nothing is clipped.", got="max_norm=None, max_value=None", need="one of them or both")
    if isinstance(optimizer, DenseOptimizer):
        return clip_dense(optimizer, max_norm, max_value)

    def clipped(of, row_grads, slots, tables, step, **kernel):
        check_update(f"{call}.update", row_grads, slots, tables, step)
        if max_value is not None:
            row_grads = {n: g.clip(max_value) for n, g in row_grads.items()}
        if max_norm is not None:
            row_grads = clip_by_global_norm(row_grads, max_norm)
        return of(row_grads, slots, tables, step, **kernel)

    update = functools.partial(clipped, optimizer.update)
    hold = functools.partial(clipped, optimizer.hold) if optimizer.waiting else None  # clips before gradients wait
    return optimizer._replace(update=update, hold=hold, is_joint=optimizer.is_joint or max_norm is not None)


@remade
@typed
def freeze(
    optimizer: RowOptimizer | DenseOptimizer, *, tables: Sequence[str] | None = None, paths: Sequence[str] | None = None
) -> RowOptimizer | DenseOptimizer:
    """Return an optimizer that leaves some parameters as they are: they have no slots, and get no updates.

    Args:
      tables: the names of tables that a row optimizer freezes.
      paths: patterns of parameters that a dense optimizer freezes, as in `by_path`.

    Example:
      >>> import torch, funcrec as fr
      >>> sparse = fr.optim.freeze(fr.optim.adagrad(), tables=["user"])
      >>> sparse.init({"user": torch.zeros(3, 2), "item": torch.zeros(1, 2)})
      {'user': {}, 'item': {'sum': tensor([[0., 0.]])}}
    """
    call = "funcrec.optim.freeze"
    check(call, frozen_problems(isinstance(optimizer, DenseOptimizer), tables, paths))
    if isinstance(optimizer, DenseOptimizer):
        frozen = tuple(sure(paths))
        check(call, twice_problems("`paths` has a pattern twice.", frozen))
        return freeze_dense(optimizer, frozen)
    frozen = tuple(sure(tables))
    check(call, twice_problems("`tables` has a name twice.", frozen))

    def init(all_tables):
        check(f"{call}.init", tables_problems(all_tables))
        check(f"{call}.init", name_problems("tables", frozen, all_tables))
        made = optimizer.init(_without(all_tables, frozen))
        return {n: made.get(n, {}) for n in all_tables}

    def others(of, kept, row_grads, slots, all_tables, step, **kernel):
        check_update(f"{call}.update", row_grads, slots, all_tables, step)
        check(f"{call}.update", name_problems("tables", frozen, all_tables))
        mine = (_without(row_grads, frozen), _without(slots, frozen), _without(all_tables, frozen))
        made, own = of(*mine, step, **kernel)
        return {**kept(row_grads, all_tables), **made}, {**slots, **own}

    label = lambda table: (table,) if table in frozen else optimizer.label(table)
    of_tables = functools.partial(functools.partial, others)
    update = of_tables(optimizer.update, lambda grads, tables: tables)
    out = optimizer._replace(init=init, update=update, label=label)
    if not optimizer.waiting:
        return out
    hold = of_tables(optimizer.hold, lambda grads, tables: grads)
    return out._replace(hold=hold, due=of_tables(optimizer.due, lambda grads, tables: tables))


@remade
@typed
def stochastic_rounding(optimizer: RowOptimizer, *, key: Key) -> RowOptimizer:
    """Return an optimizer that rounds f16 and bf16 tables stochastically. It writes other tables as `optimizer` does.

    Args:
      key: i64[]. Each step folds in its number.

    Law: the mean of a rounded value over keys is the value. A value that the dtype holds is never changed. NaN and
      infinities stay. f16 values below 2⁻¹⁴ in size are rounded to the nearest number. The bits depend only on the key,
      the step, and the table, row and column of the element. Every plan gives the bits of one process. In the
      `train_step` of tables that follow a vocabulary, the id counts as the row, in whatever row it is.

    Example:
      >>> import torch, funcrec as fr
      >>> sparse = fr.optim.stochastic_rounding(fr.optim.sgd(lr=2.0**-10), key=fr.key(0))
      >>> tables = {"t": torch.ones(1, 1000, dtype=torch.bfloat16)}
      >>> g = {"t": fr.RowGrads.from_entries(torch.tensor([0]), -torch.ones(1, 1000), num_embeddings=1)}
      >>> new = sparse.update(g, sparse.init(tables), tables, step=0)[0]["t"]
      >>> new.unique(), 0.05 < float((new > 1).float().mean()) < 0.2  # bf16 knows nothing between 1 and 1 + 2⁻⁷
      (tensor([1.0000, 1.0078], dtype=torch.bfloat16), True)

    Source: FBGEMM's stochastic_rounding of fp16 tables.
    """
    check("funcrec.optim.stochastic_rounding", member_problems(key, "key"))

    def rounded(of, row_grads, slots, tables, step, **kernel):
        return of(row_grads, slots, tables, step, **{"key": random.fold_in(key, step), **kernel})

    due = functools.partial(rounded, optimizer.due) if optimizer.waiting else None
    update = functools.partial(rounded, optimizer.update)
    return optimizer._replace(update=update, due=due, ignores_origin=False)


def due_of(optimizer: RowOptimizer) -> Callable:
    """Return the function that updates with the gradients that are due."""
    return sure(optimizer.due) if optimizer.waiting else optimizer.update


def _only(x: Mapping, names) -> dict:
    return {n: x[n] for n in names if n in x}


def _without(x: Mapping, names) -> dict:
    return {n: v for n, v in x.items() if n not in names}


def name_problems(what: str, names: Iterable[str], tables: Mapping) -> Iterator[Problem]:
    return unknown_problems(f"`{what}` names no table.", names, tables, kind=KeyError)


def frozen_problems(is_dense: bool, tables: Sequence[str] | None, paths: Sequence[str] | None) -> Iterator[Problem]:
    """Yield a problem unless a row optimizer gets `tables`, and a dense optimizer gets `paths`."""
    given = [n for n, x in (("tables", tables), ("paths", paths)) if x is not None]
    kind, own, hint = ("dense", "paths", 'paths=["*.bias"]') if is_dense else ("row", "tables", 'tables=["user"]')
    if given != [own]:
        got = " and ".join(f"`{n}`" for n in given) or "neither `tables` nor `paths`"
        yield Problem(f"a {kind} optimizer takes `{own}`.", got, f"`{own}` alone", hint, TypeError)
