"""Pickle and show tuples of functions: a pickle holds the call that makes the tuple again, and `repr` shows it.

    optimizer  =  maker(*args, **kwargs)        pickle(optimizer)  =  pickle((maker, args, kwargs))

A function that closes over arguments does not pickle. The public function that made it pickles by name.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor

from funcrec.core._errors import describe
from funcrec.core._number_checks import plain_number, signature_error

F = TypeVar("F", bound=Callable)
SHOWN, LONGEST = 3, 300  # elements of a sequence, and characters of an argument, that `shown` writes


class Origin(NamedTuple):
    """The call that made a tuple of functions."""

    maker: Callable
    args: tuple[Any, ...]
    kwargs: dict
    made: tuple[Any, ...]


def remade(maker: F) -> F:
    """Return the function `maker` with a record of each call on the NamedTuple that the call returns.

    The NamedTuple must have a field `update`, or else `init`, a function of its own; the record is an attribute of that
    function.
    """

    @functools.wraps(maker)
    def run(*args, **kwargs):
        args, kwargs = tuple(map(plain_number, args)), {n: plain_number(x) for n, x in kwargs.items()}
        try:
            made = maker(*args, **kwargs)
        except TypeError as error:
            raise signature_error(maker, error) or error from None
        recorded_on(made).made_by = Origin(run, args, kwargs, made)
        return made

    return cast(F, run)


def recorded_on(made: Any) -> Callable:
    """Return the function of a NamedTuple that holds the record of its call."""
    return made.update if "update" in made._fields else made.init


def origin_of(value: Any) -> Origin | None:
    """Return the call that made a NamedTuple; None if there is none, or if `_replace` has changed a field since."""
    origin = getattr(recorded_on(value), "made_by", None)
    same = origin is not None and all(x is y for x, y in zip(origin.made, value, strict=True))
    return origin if same else None


def shown(value: Any) -> str:
    """Return the text of the call that made a NamedTuple: `sgd(lr=0.1)`. Without a call, its class with its fields."""
    origin = origin_of(value)
    if origin is None:
        return f"{type(value).__name__}({', '.join(f'{n}={short(x)}' for n, x in value._asdict().items())})"
    given = [*map(short, origin.args), *(f"{n}={short(x)}" for n, x in origin.kwargs.items() if x is not None)]
    return f"{origin.maker.__name__}({', '.join(given)})"


def short(x: Any) -> str:
    """Return an argument on one line: functions, classes and configs by their names, tensors by their forms."""
    if isinstance(x, Tensor):
        return describe(x)
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        more = [f"... {len(x)} in all"] if len(x) > SHOWN else []
        inner = ", ".join([*map(short, x[:SHOWN]), *more])
        return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' if len(x) == 1 else ''})"
    if isinstance(x, type) or (callable(x) and not hasattr(x, "_fields")):
        return getattr(x, "__name__", type(x).__name__)
    if isinstance(name := getattr(x, "name", None), str):
        return f"{type(x).__name__}({name!r})"
    text = repr(x)
    if "\n" not in text and len(text) <= LONGEST:
        return text
    brief = getattr(x, "_brief", None)
    return f"<{type(x).__name__}>" if brief is None else brief()


def reduced(value: Any) -> tuple[Any, ...]:
    """Return the result of `__reduce__` for a NamedTuple that a function decorated by `remade` made.

    It holds the call that made the tuple, or the tuple's fields if `_replace` has changed one since.
    """
    origin = origin_of(value)
    if origin is None:
        return type(value), tuple(value)
    return functools.partial(origin.maker, *origin.args, **origin.kwargs), ()
