"""Built-in optimizers: each is a declaration of its arguments, a rule for one row and its slots, in one file.

    @builtin(rule=(row, grad, slots, hyper) -> (row, slots), slots=(hyper) -> {slot: per_element() or per_row()})
    def name(lr, *, hyper...): docstring

Everything else follows: what a table's columns see of one another, what
kernels know them by, the C++ and Triton of the rule (`write`).
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import NoneType, SimpleNamespace
from typing import Any, NamedTuple, ParamSpec

from torch import Tensor

from funcrec.core import check, remade, signature_error
from funcrec.kernels import formula, ops
from funcrec.kernels.memory import full_table
from funcrec.optim._checks import hyper_problems
from funcrec.optim._kernel import Kernel
from funcrec.optim._row import RowOptimizer, build

P = ParamSpec("P")


class Slot(NamedTuple):
    """f[R, D], or f[R] where it is not wide, and what it begins at."""

    is_wide: bool
    first: float = 0.0


per_element, per_row = functools.partial(Slot, True), functools.partial(Slot, False)


class Builtin(NamedTuple):
    """All there is of a built-in optimizer: `python -m funcrec.optim.write` writes what kernels know of it from these.

    declare: the public function, for its signature; it does nothing. slots: (hyper) -> {name: Slot}.
    """

    declare: Callable[..., Any]
    rule: Callable[[Tensor, Tensor, dict[str, Tensor], Any], tuple[Tensor, dict[str, Tensor]]]
    slots: Callable[[Any], dict[str, Slot]]


BUILTIN: dict[str, Builtin] = {}


def builtin(*, rule: Callable, slots: Callable) -> Callable[[Callable[P, RowOptimizer]], Callable[P, RowOptimizer]]:
    """Decorator of a function without a body, whose arguments are lr
    and hyper-parameters: it makes the optimizer of that rule.

    Before its kernels are written and built, and where a hyper-parameter is a tensor, the rule runs as a user's.
    """

    def decorate(declare: Callable[P, RowOptimizer]) -> Callable[P, RowOptimizer]:
        own = BUILTIN[declare.__name__] = Builtin(declare, rule, slots)

        @remade
        @functools.wraps(declare)
        def make(*args: P.args, **kwargs: P.kwargs) -> RowOptimizer:
            try:
                declare(*args, **kwargs)  # which arguments are missing, or too many
            except TypeError as error:
                raise signature_error(declare, error) or error from None
            return build_builtin(own, *args, **kwargs)

        return make

    return decorate


def arguments_of(own: Builtin, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The learning rate and the hyper-parameters of a call."""
    given = inspect.signature(own.declare).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments["lr"], {k: x for k, x in given.arguments.items() if k != "lr"}


def build_builtin(own: Builtin, *args: Any, **kwargs: Any) -> RowOptimizer:
    name, (lr, hyper) = own.declare.__name__, arguments_of(own, *args, **kwargs)
    check(f"funcrec.optim.{name}", hyper_problems(lr, hyper, inspect.get_annotations(own.declare)))
    slots = own.slots(SimpleNamespace(**hyper))
    init = lambda table: {k: slot_of(table, *slot) for k, slot in slots.items()}
    return build(
        init=init, rule=own.rule, lr=lr, name=name, hyper=hyper, kernel=kernel_of(name, own.rule, slots, hyper)
    )


def slot_of(table: Tensor, is_wide: bool, first: float) -> Tensor:
    """In the dtype that rules compute in."""
    shape = tuple(table.shape) if is_wide else (table.shape[0],)
    return full_table(shape, first, dtype=ops.accumulation_dtype(table.dtype), device=table.device)


def kernel_of(name: str, rule: Callable, slots: Mapping[str, Slot], hyper: Mapping[str, Any]) -> Kernel | None:
    """The fused form; none if the rule has what no formula has. A tensor is a number of any value."""
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
