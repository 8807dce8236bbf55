"""Tuples of functions that can be pickled: a pickle holds the call that makes them again.

    optimizer  =  maker(*args, **kwargs)        pickle(optimizer)  =  pickle((maker, args, kwargs))

Functions that close over their arguments do not pickle. The public function that made them pickles by its name.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from funcrec.core._number_checks import plain_number, signature_error

F = TypeVar("F", bound=Callable)


class Origin(NamedTuple):
    """The call that made a tuple of functions."""

    maker: Callable
    args: tuple
    kwargs: dict
    made: tuple


def remade(maker: F) -> F:
    """Decorate a public function that makes a NamedTuple with its own function `update`: record each call."""

    @functools.wraps(maker)
    def run(*args, **kwargs):
        args, kwargs = tuple(map(plain_number, args)), {n: plain_number(x) for n, x in kwargs.items()}
        try:
            made = maker(*args, **kwargs)
        except TypeError as error:
            raise signature_error(maker, error) or error from None
        made.update.made_by = Origin(run, args, kwargs, made)
        return made

    return run


def reduced(value: Any) -> tuple:
    """Return `__reduce__` of such a NamedTuple: the call that made it, or its fields if they have changed since."""
    origin = getattr(value.update, "made_by", None)
    if origin is None or not all(x is y for x, y in zip(origin.made, value, strict=True)):
        return type(value), tuple(value)
    return functools.partial(origin.maker, *origin.args, **origin.kwargs), ()
