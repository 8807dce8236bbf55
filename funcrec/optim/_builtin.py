"""Built-in optimizers. Each is a declaration of its arguments, a rule for one row and its slots, in one file.

    @builtin(rule=(row, grad, slots, hyper) -> (row, slots), slots=(hyper) -> {slot: per_element() or per_row()})
    def name(lr, *, hyper...): docstring

From these three, the package derives `is_elementwise` and `is_gradient_wise`, the hyper-parameters of the kernels, and
the rule in C++ and Triton (`write`).
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import NoneType, SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, cast

from torch import Tensor

from funcrec.core import check, remade, signature_error
from funcrec.kernels import formula, ops
from funcrec.kernels.memory import full_table
from funcrec.optim._checks import hyper_problems, rate_at
from funcrec.optim._kernel import Kernel
from funcrec.optim._row import RowOptimizer, build

P = ParamSpec("P")


class Slot(NamedTuple):
    """A slot and its first value, a number or f[]. The slot is f[R, D] if it is wide, else f[R]."""

    is_wide: bool
    first: float | Tensor = 0.0


per_element, per_row = functools.partial(Slot, True), functools.partial(Slot, False)


class Builtin(NamedTuple):
    """All facts of a built-in optimizer. `python -m funcrec.optim.write` writes the part of the kernels from these.

    declare: the public function, which has the name, the signature and the docstring. slots: (hyper) -> {name: Slot}.
    is_rate: (hyper) -> whether the rule is w - lr · g.
    """

    declare: Callable[..., Any]
    rule: Callable[[Tensor, Tensor, dict[str, Tensor], Any], tuple[Tensor, dict[str, Tensor]]]
    slots: Callable[[Any], dict[str, Slot]]
    is_rate: Callable[[Any], bool]


BUILTIN: dict[str, Builtin] = {}


def builtin(
    *, rule: Callable, slots: Callable, is_rate: Callable[[Any], bool] = lambda hyper: False
) -> Callable[[Callable[P, RowOptimizer]], Callable[P, RowOptimizer]]:
    """Return a decorator of functions without a body, whose arguments are lr and hyper-parameters.

    The decorated function returns the optimizer of the rule. The rule runs like a user's rule until its kernels are
    written and built, or if a hyper-parameter is a tensor.
    """

    def decorate(declare: Callable[P, RowOptimizer]) -> Callable[P, RowOptimizer]:
        own = BUILTIN[declare.__name__] = Builtin(declare, rule, slots, is_rate)

        @remade
        @functools.wraps(declare)
        def make(*args: P.args, **kwargs: P.kwargs) -> RowOptimizer:
            try:
                declare(*args, **kwargs)  # this raises if arguments are missing or unknown
            except TypeError as error:
                raise signature_error(declare, error) or error from None
            return build_builtin(own, *args, **kwargs)

        return make

    return decorate


def arguments_of(own: Builtin, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Return the learning rate and the hyper-parameters of a call."""
    given = inspect.signature(own.declare).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments["lr"], {k: x for k, x in given.arguments.items() if k != "lr"}


def build_builtin(own: Builtin, *args: Any, **kwargs: Any) -> RowOptimizer:
    name, (lr, hyper) = own.declare.__name__, arguments_of(own, *args, **kwargs)
    check(f"funcrec.optim.{name}", hyper_problems(lr, hyper, inspect.get_annotations(own.declare)))
    slots = own.slots(SimpleNamespace(**hyper))
    init = lambda table: {k: slot_of(table, *slot) for k, slot in slots.items()}
    made = build(
        init=init, rule=own.rule, lr=lr, name=name, hyper=hyper, kernel=kernel_of(name, own.rule, slots, hyper)
    )
    if own.is_rate(SimpleNamespace(**hyper)):
        cast(Any, made.update).rate = lambda table, step: rate_at(f"funcrec.optim.{name}", lr, step)
    return made


def slot_of(table: Tensor, is_wide: bool, first: float | Tensor) -> Tensor:
    """Return a slot of a table, in the dtype that rules compute in."""
    shape = tuple(table.shape) if is_wide else (table.shape[0],)
    form = {"dtype": ops.accumulation_dtype(table.dtype), "device": table.device}
    return first.to(**form).expand(shape).clone() if isinstance(first, Tensor) else full_table(shape, first, **form)


def kernel_of(name: str, rule: Callable, slots: Mapping[str, Slot], hyper: Mapping[str, Any]) -> Kernel | None:
    """Return the fused form, or None if no formula has an operation of the rule. A tensor stands for any number."""
    plain = lambda x: (
        formula.Named() if isinstance(x, Tensor) else float(x) if type(x) not in (bool, str, NoneType) else x
    )
    try:
        own = formula.formula_of(rule, widths(slots), {k: plain(x) for k, x in hyper.items()})
    except formula.UnknownError:
        return None
    form, has_tensors = ops.RULES.get(name), any(isinstance(x, Tensor) for x in hyper.values())
    is_gradient_wise = form is not None and not has_tensors and formula.is_gradient_wise(own)
    return Kernel(name, form, formula.is_elementwise(own), is_gradient_wise)


def widths(slots: Mapping[str, Slot]) -> dict[str, bool]:
    return {k: slot.is_wide for k, slot in slots.items()}
