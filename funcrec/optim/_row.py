"""Row optimizers: a rule for one row, run on the rows that a batch touched.

    (row', slots') = rule(row, grad, slots, hyper)        for every row in the coalesced gradient; all others keep their bits

A rule sees one row in f32 (f64 for f64 tables) and is mapped over the touched rows by `torch.func.vmap`; the result is
rounded once, when it is written. Built-in optimizers and a user's own are made by the same function. Floor 3.
Shapes: R rows, D dim, M touched rows (a capacity: entries behind `count` are padding).
"""

import functools
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec._configs import table_tensor_problems
from funcrec._errors import Problem, check, describe
from funcrec._rowgrads import RowGrads
from funcrec.kernels import ops

Tables = Mapping[str, Tensor]
Slots = dict[str, dict[str, Tensor]]
Rate = float | Tensor | Callable[[Tensor], float | Tensor]


class RowOptimizer(NamedTuple):
    """A pair of functions that trains tables from their row gradients.

    init: (tables) -> slots, {table: {slot: Tensor}}; f32, or f64 for f64 tables; [R] or [R, D].
    update: (row_grads, slots, tables, step, *, implementation="reference") -> (tables, slots). `row_grads` is
      {table: RowGrads}; `step`, int or i64[], is the number of steps taken before this one. A table without a gradient
      comes back as the same tensor.

    Law: `update` writes to no argument; rows and slots that no entry names keep every bit; a row that is named with a
    zero gradient is touched (a lazy Adam moves it on).

    Cost: reads and writes M · (D + the elements of a row's slots).

    Example:
      >>> import torch, funcrec as fr
      >>> sparse = fr.optim.rowwise_adagrad(lr=0.1)
      >>> tables = {"item": torch.zeros(3, 2)}
      >>> slots = sparse.init(tables)
      >>> grads = {"item": fr.RowGrads.from_entries(torch.tensor([1]), torch.ones(1, 2), num_embeddings=3)}
      >>> tables, slots = sparse.update(grads, slots, tables, step=0)
      >>> tables["item"], slots["item"]["sum"]
      (tensor([[ 0.0000,  0.0000],
              [-0.1000, -0.1000],
              [ 0.0000,  0.0000]]), tensor([0., 1., 0.]))
    """

    init: Callable[[Tables], Slots]
    update: Callable[..., tuple[dict[str, Tensor], Slots]]


def row_optimizer(
    *,
    init: Callable[[Tensor], dict[str, Tensor]],
    rule: Callable[[Tensor, Tensor, dict[str, Tensor], Any], tuple[Tensor, dict[str, Tensor]]],
    lr: Rate = 0.01,
    name: str = "row_optimizer",
    **hyper: Any,
) -> RowOptimizer:
    """An optimizer from a rule for one row.

    Args:
      init: (table f[R, D]) -> {slot: f[R, ...]}; it must work on the meta device, so it reads no value on the host.
      rule: (row f[D], grad f[D], {slot: f[...]}, hyper) -> (row, slots), without host reads. `grad` is the sum over all
        ids of the batch that name the row; `hyper` is a NamedTuple of `lr` (f[]), `step` (f[], 1 at the first update),
        `repeats` (f[], how many entries were summed into the row) and the optimizer's own `hyper`.
      lr: a number, a 0-dimensional tensor, or a function of the step (i64[], 0 at the first update), such as `schedule`.
      name: what errors call it.
      hyper: the optimizer's own numbers. Those with a name of the field's (b1, b2, eps, weight_decay, decay, momentum, eta,
        max_norm, initial_accumulator) are checked.

    Raises: TypeError or ValueError that tells every hyper-parameter out of its range. The update names every table,
      gradient and slot that does not fit.

    Example:
      >>> import torch, funcrec as fr
      >>> def rule(row, grad, slots, hyper):
      ...     age = slots["age"] + 1
      ...     return row - hyper.lr / age * grad.sign(), {"age": age}
      >>> mine = fr.optim.row_optimizer(init=lambda table: {"age": torch.zeros(table.shape[0])}, rule=rule, lr=0.5)
      >>> tables = {"item": torch.zeros(2, 2)}
      >>> grads = {"item": fr.RowGrads.from_entries(torch.tensor([1]), torch.tensor([[3.0, -3.0]]), num_embeddings=2)}
      >>> mine.update(grads, mine.init(tables), tables, step=0)
      ({'item': tensor([[ 0.0000,  0.0000],
              [-0.5000,  0.5000]])}, {'item': {'age': tensor([0., 1.])}})
    """
    call = f"funcrec.optim.{name}"
    check(call, rule_problems(init, rule), hyper_problems(lr, hyper))
    make_hyper = namedtuple("Hyper", ["lr", "step", "repeats", *hyper])

    def init_table(table: Tensor) -> dict[str, Tensor]:
        made = init(table)
        check(f"{call}.init", made_problems(made, table))
        return {k: s.to(ops.accumulation_dtype(table.dtype)) for k, s in made.items()}

    @functools.cache
    def slot_shapes(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
        return {k: tuple(s.shape) for k, s in init_table(torch.empty(shape, dtype=dtype, device="meta")).items()}

    def init_slots(tables: Tables) -> Slots:
        check(f"{call}.init", tables_problems(tables))
        return {n: init_table(t) for n, t in tables.items()}

    def update(
        row_grads: Mapping[str, RowGrads],
        slots: Slots,
        tables: Tables,
        step: int | Tensor,
        *,
        implementation: str = "reference",
    ) -> tuple[dict[str, Tensor], Slots]:
        check_update(f"{call}.update", row_grads, slots, tables, step, slot_shapes)
        tables, slots = dict(tables), dict(slots)
        numbers = functools.cache(lambda dtype, device: rate_and_step(lr, step, dtype, device))
        for n, grads in row_grads.items():
            if grads.rows.shape[0] > 0:
                rate, t = numbers(ops.accumulation_dtype(tables[n].dtype), tables[n].device)
                one = lambda row, grad, own, repeats: rule(row, grad, own, make_hyper(rate, t, repeats, **hyper))  # noqa: B023
                tables[n], slots[n] = _update_table(call, one, grads, slots[n], tables[n], implementation)
        return tables, slots

    return RowOptimizer(init_slots, update)


def _update_table(
    call: str, rule: Callable, grads: RowGrads, slots: dict[str, Tensor], table: Tensor, implementation: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """coalesce, gather, vmap(rule), scatter."""
    grads = grads.coalesce(implementation=implementation)
    dtype = ops.accumulation_dtype(table.dtype)
    take = functools.partial(ops.gather_rows, rows=grads.rows, implementation=implementation)
    put = functools.partial(ops.scatter_rows, rows=grads.rows, count=grads.count, implementation=implementation)
    row = take(table)
    flat = {k: s.flatten(1) if s.dim() > 1 else s[:, None] for k, s in slots.items()}
    mine = {k: take(s).reshape(-1, *slots[k].shape[1:]) for k, s in flat.items()}
    repeats = torch.ones_like(grads.rows) if grads.repeats is None else grads.repeats
    new_row, new_slots = torch.func.vmap(rule)(row, grads.grads.to(dtype), mine, repeats.to(dtype))
    check(call, rule_result_problems(new_row, new_slots, row, mine))
    written = {k: put(s, new=new_slots[k].reshape(-1, s.shape[1])).reshape(slots[k].shape) for k, s in flat.items()}
    return put(table, new=new_row), written


def rate_and_step(lr: Rate, step: int | Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """lr f[] and t = step + 1 f[], tensors on `device`, so that a compiled step does not freeze them."""
    taken = step_tensor(step, device)
    rate = lr(taken) if callable(lr) else lr
    rate = rate.to(device, dtype) if isinstance(rate, Tensor) else torch.full((), rate, dtype=dtype, device=device)
    return rate, (taken + 1).to(dtype)


def step_tensor(step: int | Tensor, device: torch.device) -> Tensor:
    """i64[] on `device`."""
    return step.to(device) if isinstance(step, Tensor) else torch.full((), step, dtype=torch.int64, device=device)


def per_row(table: Tensor, value: float = 0.0) -> Tensor:
    """A slot [R], of the dtype that rules compute in."""
    return per_element(table[:, 0], value)


def per_element(table: Tensor, value: float = 0.0) -> Tensor:
    """A slot [R, D]."""
    return torch.full(table.shape, value, dtype=ops.accumulation_dtype(table.dtype), device=table.device)


def norm(x: Tensor) -> Tensor:
    """f[]: the Euclidean norm of a row."""
    return x.square().sum().sqrt()


# -- validators --------------------------------------------------------------------------------------------------

_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    **dict.fromkeys(("b1", "b2", "momentum"), ("in [0, 1)", lambda x: 0 <= x < 1)),
    **dict.fromkeys(("max_norm", "max_value", "half_life"), ("> 0", lambda x: x > 0)),
    **dict.fromkeys(
        ("eps", "weight_decay", "eta", "initial_accumulator", "beta", "l1", "l2", "clip_ratio", "lower_bound"),
        (">= 0", lambda x: x >= 0),
    ),
}
_DECAYS = ("l2", "decoupled")


def hyper_problems(lr: Rate, hyper: Mapping[str, Any]) -> Iterator[Problem]:
    if not callable(lr) and not isinstance(lr, Tensor):
        yield from range_problems("lr", lr, ">= 0", lambda x: x >= 0)
    for name, value in hyper.items():
        if name in ("lr", "step", "repeats"):
            yield Problem(f"`{name}` is taken.", f"a hyper-parameter {name!r}", "another name")
        if name == "decay" and value not in _DECAYS:
            yield Problem("`decay` is unknown.", f"{value!r}", " or ".join(map(repr, _DECAYS)))
        if name in _RANGES and value is not None and not isinstance(value, Tensor):
            yield from range_problems(name, value, *_RANGES[name])


def range_problems(name: str, value: object, need: str, is_inside: Callable[[float], bool]) -> Iterator[Problem]:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        yield Problem(f"`{name}` is not a number.", describe(value), f"a number {need}", kind=TypeError)
    elif not is_inside(value):
        yield Problem(f"`{name}` is out of range.", f"{value}", need)


def rule_problems(init: object, rule: object) -> Iterator[Problem]:
    for name, x, need in [
        ("init", init, "(table) -> {slot: Tensor}"),
        ("rule", rule, "(row, grad, slots, hyper) -> (row, slots)"),
    ]:
        if not callable(x):
            yield Problem(f"`{name}` is not a function.", describe(x), need, kind=TypeError)


def tables_problems(tables: object) -> Iterator[Problem]:
    if not isinstance(tables, Mapping):
        yield Problem("`tables` is not a dict of tables.", describe(tables), "{name: f[R, D]}", kind=TypeError)
    else:
        yield from table_tensor_problems(tables)


def made_problems(made: object, table: Tensor) -> Iterator[Problem]:
    """What a user's `init` made."""
    if not isinstance(made, Mapping):
        yield Problem("`init` made no slots.", describe(made), "{slot: Tensor}, {} for none", kind=TypeError)
        return
    for k, s in made.items():
        if not isinstance(s, Tensor) or not s.is_floating_point() or s.dim() == 0 or s.shape[0] != table.shape[0]:
            what = f"`init(table)[{k!r}]` is not a slot of a table {describe(table)}."
            yield Problem(what, describe(s), f"f[{table.shape[0]}, ...]", kind=TypeError)


def rule_result_problems(row: object, slots: object, old_row: Tensor, old_slots: dict) -> Iterator[Problem]:
    if not isinstance(row, Tensor) or row.shape != old_row.shape:
        got = describe(row[0]) if isinstance(row, Tensor) else describe(row)
        yield Problem("`rule` returned another shape of row.", got, describe(old_row[0]))
    if not isinstance(slots, Mapping) or sorted(slots) != sorted(old_slots):
        got = f"{sorted(slots)}" if isinstance(slots, Mapping) else describe(slots)
        yield Problem("`rule` returned other slots.", got, f"{sorted(old_slots)}")
        return
    for k, s in old_slots.items():
        if not isinstance(slots[k], Tensor) or slots[k].shape != s.shape:
            yield Problem(f"`rule` returned another shape of slot {k!r}.", describe(slots[k][0]), describe(s[0]))


def check_optimizer(call: str, *named: tuple[str, object]) -> None:
    """Each (path, value) must be a RowOptimizer."""
    need, hint = "a RowOptimizer", "fr.optim.adam(lr=1e-3)"
    wrong = ((path, x) for path, x in named if not isinstance(x, RowOptimizer))
    check(call, (Problem(f"`{p}` is not a row optimizer.", describe(x), need, hint, kind=TypeError) for p, x in wrong))


def check_update(call: str, row_grads, slots, tables, step, slot_shapes: Callable | None = None) -> None:
    """The arguments of an update; with `slot_shapes` also the structure of each table's slots."""
    check(call, tables_problems(tables))
    check(call, gradient_problems(row_grads, tables), slot_problems(slots, tables, slot_shapes), step_problems(step))


def step_problems(step: object) -> Iterator[Problem]:
    counts = isinstance(step, int) and not isinstance(step, bool) and step >= 0
    if not counts and not (isinstance(step, Tensor) and step.dim() == 0 and not step.is_floating_point()):
        yield Problem("`step` is not a step.", describe(step), "i64[] or an int >= 0, the steps taken", kind=TypeError)


def gradient_problems(row_grads: object, tables: Tables) -> Iterator[Problem]:
    if not isinstance(row_grads, Mapping):
        got, hint = describe(row_grads), "the `tables` of value_and_grad's gradients"
        yield Problem("`row_grads` is not a dict of gradients.", got, "{table: RowGrads}", hint, kind=TypeError)
        return
    for n, g in row_grads.items():
        path = f"`row_grads[{n!r}]`"
        if n not in tables:
            yield Problem(f"{path} is for no table.", repr(n), f"one of {list(tables)}", kind=KeyError)
        elif not isinstance(g, RowGrads):
            hint = "RowGrads.from_entries(rows, grads, num_embeddings=R)"
            yield Problem(f"{path} is not a row gradient.", describe(g), "RowGrads", hint, kind=TypeError)
        elif (g.num_embeddings, g.grads.shape[-1]) != tuple(tables[n].shape):
            got = f"RowGrads of [{g.num_embeddings}, {g.grads.shape[-1]}]"
            yield Problem(f"{path} does not match its table.", got, describe(tables[n]))


def slot_problems(slots: object, tables: Tables, slot_shapes: Callable | None) -> Iterator[Problem]:
    hint = "the slots that this optimizer's `init` made of these tables"
    if not isinstance(slots, Mapping):
        yield Problem("`slots` is not a dict of slots.", describe(slots), "{table: {slot: Tensor}}", hint, TypeError)
        return
    for n in [*tables, *(n for n in slots if n not in tables)]:
        if n not in tables:
            yield Problem(f"`slots[{n!r}]` is for no table.", repr(n), f"one of {list(tables)}", hint, KeyError)
        elif n not in slots:
            yield Problem(f"`slots[{n!r}]` is missing.", f"slots for {list(slots)}", "slots for each table", hint)
        elif slot_shapes is not None:
            need = slot_shapes(tuple(tables[n].shape), tables[n].dtype)
            got = slots[n] if isinstance(slots[n], Mapping) else {}
            if sorted(got) != sorted(need):
                what = f"`slots[{n!r}]` are another optimizer's."
                yield Problem(what, f"{sorted(got)}", f"{sorted(need)}", hint)
                continue
            for k, shape in need.items():
                if tuple(got[k].shape) != shape:
                    what = f"`slots[{n!r}][{k!r}]` does not match its table {describe(tables[n])}."
                    yield Problem(what, describe(got[k]), f"f{list(shape)}", hint)
