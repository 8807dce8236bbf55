"""Pickle tuples of functions: a pickle holds the call that makes the tuple again.

    optimizer  =  maker(*args, **kwargs)        pickle(optimizer)  =  pickle((maker, args, kwargs))

A function that closes over arguments does not pickle. The public function that made it pickles by name.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from funcrec.core._number_checks import plain_number, signature_error

F = TypeVar("F", bound=Callable)


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

    return run


def recorded_on(made: Any) -> Callable:
    """Return the function of a NamedTuple that holds the record of its call."""
    return made.update if "update" in made._fields else made.init


def reduced(value: Any) -> tuple[Any, ...]:
    """Return the result of `__reduce__` for a NamedTuple that a function decorated by `remade` made.

    It holds the call that made the tuple, or the tuple's fields if `_replace` has changed one since.
    """
    origin = getattr(recorded_on(value), "made_by", None)
    if origin is None or not all(x is y for x, y in zip(origin.made, value, strict=True)):
        return type(value), tuple(value)
    return functools.partial(origin.maker, *origin.args, **origin.kwargs), ()
