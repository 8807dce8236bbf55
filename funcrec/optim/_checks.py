"""Validators of row optimizers: hyper-parameters, rules, and the arguments of an update.

Each validator yields a Problem for every argument that does not fit. It reads structure and shapes only.
"""

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partialmethod
from numbers import Integral
from types import MappingProxyType
from typing import Annotated, Any, Literal, Optional, get_args, get_origin

import torch
from torch import Tensor

from funcrec.core import (
    NotNegative,
    Positive,
    Problem,
    Scalar,
    Share,
    Within,
    check,
    describe,
    kind_of,
    message,
    nearest,
    tree_problems,
)
from funcrec.tables import TABLE_HINT, RowGrads, is_stacked, table_tensor_problems

Tables = Mapping[str, Tensor]
FiniteRate = Annotated[float, Within("a finite number >= 0", lambda x: 0 <= x < float("inf"))]
Rate = FiniteRate | Scalar | Callable[[Tensor], float | Tensor]
_OF = {
    NotNegative: "eps weight_decay eta initial_accumulator beta l1 l2 clip_ratio lower_bound",
    Share: "b1 b2 momentum",
    Positive: "half_life",
    Optional[Positive]: "max_norm max_value",  # noqa: UP045
    bool: "nesterov",
    Literal["l2", "decoupled"]: "decay",
}


def hyper_kind(hint: Any) -> Any:
    """Return the requirement on a hyper-parameter with this annotation. A number may also be a tensor f[]."""
    numbers = [h for h in (hint, *get_args(hint)) if h is float or float in get_args(h)]
    return kind_of(hint | Scalar if numbers else hint)


_KINDS = {"lr": kind_of(Rate)} | {name: hyper_kind(hint) for hint, names in _OF.items() for name in names.split()}
_MADE = kind_of(FiniteRate | Scalar)  # values that lr(step) may return


def choices_of(name: str) -> tuple[str, ...]:
    """Return the strings that a hyper-parameter may be. Kernels know each string by its place in this list."""
    return next(get_args(hint) for hint, names in _OF.items() if get_origin(hint) is Literal and name in names.split())


def may_be_absent(name: str) -> bool:
    """Return whether a hyper-parameter may be None, and a part of the rule is absent then."""
    return any(type(None) in get_args(hint) for hint, names in _OF.items() if name in names.split())


def hyper_problems(
    lr: object, hyper: Mapping[str, Any], hints: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[Problem]:
    """Yield problems of numbers, and of tensors f[], that are outside their ranges. The value of a tensor is not read.

    hints: annotations of names that the table above lacks."""
    if hasattr(lr, "get_last_lr"):
        what, need = "`lr` is a scheduler of torch.optim, which keeps a count of its own.", "a function of the step"
        hint = "lr=lambda step: 0.01 * 0.5 ** (step / 1000), or fr.optim.schedule([fr.optim.Stage(...)], lr=0.01)"
        yield Problem(what, describe(lr), need, hint, TypeError)
        return
    yield from _KINDS["lr"].find("lr", lr)
    for name, value in hyper.items():
        if name in ("lr", "step", "repeats"):
            yield Problem(f"`{name}` is taken.", f"a hyper-parameter {name!r}", "another name")
        elif name in _KINDS and name != "lr":
            yield from _KINDS[name].find(name, value)
        elif name in hints:
            yield from hyper_kind(hints[name]).find(name, value)


def rate_at(call: str, lr: Any, step: Tensor) -> float | Tensor:
    """Return the learning rate at a step."""
    if not callable(lr):
        return lr
    rate: Any = lr(step)
    if not _MADE.fits(rate):
        check(call, _MADE.find("lr(step)", rate))
    return rate


def rule_problems(init: object, rule: object, name: object) -> Iterator[Problem]:
    if not isinstance(name, str):
        yield Problem("`name` is not a string.", describe(name), "a string", kind=TypeError)
    for part, x, need in [
        ("init", init, "(table) -> {slot: Tensor}"),
        ("rule", rule, "(row, grad, slots, hyper) -> (row, slots)"),
    ]:
        if not callable(x):
            hint = "init=lambda table: {}, for no slots" if part == "init" else ""
            yield Problem(f"`{part}` is not a function.", describe(x), need, hint, kind=TypeError)


def tables_problems(tables: object) -> Iterator[Problem]:
    if not isinstance(tables, Mapping):
        yield Problem("`tables` is not a dict of tables.", describe(tables), "{name: f[R, D]}", TABLE_HINT, TypeError)
    else:
        yield from table_tensor_problems(tables)


def made_problems(made: object, table: Tensor) -> Iterator[Problem]:
    """Yield problems of what a user's `init` returned."""
    if not isinstance(made, Mapping):
        yield Problem("`init` made no slots.", describe(made), "{slot: Tensor}, {} for none", kind=TypeError)
        return
    for k, s in made.items():
        if not isinstance(s, Tensor) or not s.is_floating_point() or s.dim() == 0 or s.shape[0] != table.shape[0]:
            what = f"`init(table)[{k!r}]` is not a slot of a table {describe(table)}."
            yield Problem(what, describe(s), f"f[{table.shape[0]}, ...]", kind=TypeError)


def hyper_type(call: str, own: tuple[str, ...]) -> Any:
    """Return the type of the `hyper` that a rule gets. Reading a name that it lacks raises an error."""
    made: Any = namedtuple("Hyper", ("lr", "step", "repeats", *own))
    made.__getattr__ = partialmethod(refuse_name, call)
    return made


def refuse_name(hyper: Any, call: str, name: str) -> None:
    """Raise for a name that a rule reads and that `hyper` lacks."""
    hint = f"hyper.{nearest(name, hyper._fields)}; others are given by name: row_optimizer(..., {name}=0.1)"
    problem = Problem(f"`hyper` has no {name!r}.", f"hyper.{name}", f"one of {list(hyper._fields)}", hint)
    raise AttributeError(message(call, [problem]))


def outcome_problems(out: object, written: Sequence[Tensor]) -> Iterator[Problem]:
    """Yield problems if a rule returned no pair, or if it wrote to a tensor that it closes over."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        need, hint = "(row f[D], slots {slot: f[...]})", "return row - h.lr * grad, slots"
        yield Problem("`rule` did not return a pair.", describe(out), need, hint, TypeError)
    for x in written:
        got, need = f"a write to {describe(x)}", "a function of row, grad, slots and hyper"
        yield Problem("`rule` writes to a tensor that it closes over.", got, need, "keep such values in a slot")


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


def check_update(
    call: str, row_grads, slots, tables, step, slot_shapes: Callable | None = None, is_gradient_wise: bool = True
) -> None:  # fmt: skip
    """Raise if an argument of an update does not fit. With `slot_shapes`, also check the slots of each table."""
    check(call, tables_problems(tables))
    check(
        call,
        gradient_problems(row_grads, tables, is_gradient_wise),
        slot_problems(slots, tables, slot_shapes),
        step_problems(step),
    )


def step_problems(step: Any, is_one: bool = True) -> Iterator[Problem]:
    """Yield a problem unless `step` is a count. If `is_one` is False, `step` may be a tensor of counts."""
    if isinstance(step, Tensor):
        is_integer = not (step.is_floating_point() or step.is_complex() or step.dtype == torch.bool)
        counts = is_integer and not (is_one and step.dim())
    else:
        counts = isinstance(step, Integral) and not isinstance(step, bool) and int(step) >= 0
    if not counts:
        need = f"an int >= 0, or {'i64[]' if is_one else 'an integer tensor'}, the steps taken"
        yield Problem("`step` is not a step.", describe(step), need, kind=TypeError)


def gradient_problems(row_grads: object, tables: Tables, is_gradient_wise: bool) -> Iterator[Problem]:
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
        elif any(map(is_stacked, g.terms)):
            hint = "torch.func.vmap(optimizer.update, in_dims=(0, 0, 0, None))(row_grads, slots, tables, step)"
            got = f"RowGrads of {describe(g.floats[0])}, one for each member of a vmap"
            yield Problem(f"{path} is stacked.", got, "RowGrads of one table", hint, kind=TypeError)
        elif g.num_embeddings != tables[n].shape[0] or not fits_columns(g, tables[n]):
            got = f"RowGrads of [{g.num_embeddings}, {g.dim}]"
            yield Problem(f"{path} does not match its table.", got, describe(tables[n]))
        elif g.first is not None and not is_gradient_wise:
            need = "whole rows, or an optimizer that sees other columns in the gradient only (`is_gradient_wise`)"
            yield Problem(f"{path} is of rows whose columns lie apart.", "`first` is not None", need)


def fits_columns(grads: RowGrads, table: Tensor) -> bool:
    return grads.dim == table.shape[1] if grads.first is None else grads.dim >= table.shape[1]


def slot_problems(slots: object, tables: Tables, slot_shapes: Callable[..., Any] | None) -> Iterator[Problem]:
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
            got, need = slots[n], slot_shapes(tuple(tables[n].shape), tables[n].dtype)
            yield from tree_problems(got, f"slots[{n!r}]", need, "are another optimizer's", hint)
