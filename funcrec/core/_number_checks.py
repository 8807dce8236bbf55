"""Checks of sizes, rates, numbers, flags and functions that a call receives."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from funcrec.core._errors import Problem, call_name, message

F = TypeVar("F", bound=Callable)


def plain_number(x: Any) -> Any:
    """Return x with numpy's numbers, such as `df.id.max() + 1`, as Python's numbers.

    A tuple or list of numbers is converted, too. Any other value is returned as it is.
    """
    if type(x) in (tuple, list) and any(isinstance(y, np.generic) for y in x):
        return type(x)(map(plain_number, x))
    return x.item() if isinstance(x, np.number | np.bool_) else x


def or_nan(x: float | Tensor, holds: Callable = lambda x: (x > 0) & x.isfinite()) -> float | Tensor:
    """Return a parameter: a number, which the call has checked, or f[], NaN if it is out of its range."""
    return torch.where(holds(x), x, torch.nan) if isinstance(x, Tensor) else x


def plain_numbers(fn: F) -> F:
    """Return the function or dataclass `fn`, which then receives Python's numbers in place of numpy's numbers."""
    if isinstance(fn, type):
        fn.__init__ = plain_numbers(fn.__init__)
        return cast(F, fn)

    @functools.wraps(fn)
    def run(*args, **kwargs):
        try:
            return fn(*map(plain_number, args), **{n: plain_number(x) for n, x in kwargs.items()})
        except TypeError as error:
            problem = signature_error(run, error)
            if problem is None:
                raise
            raise problem from None

    return cast(F, run)


def signature_error(fn: Callable, error: TypeError) -> TypeError | None:
    """Return an error that says what the function takes, for a call with unknown or missing arguments.

    Return None for an error from the function's body.
    """
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # The function's body raised it.
        return None
    parameters = [p for n, p in inspect.signature(fn).parameters.items() if n != "self"]
    name, plain = call_name(fn), [p.replace(annotation=p.empty) for p in parameters]
    own, text = name.split(".")[-1], str(error).split("() ")[-1]
    is_needed = lambda p: p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    needed = ", ".join(f"{p.name}=..." for p in plain if is_needed(p))
    problem = Problem(
        "the arguments are not those that it takes.", text, f"{own}{inspect.Signature(plain)}", f"{own}({needed})"
    )
    return TypeError(message(name, [problem]))


def device_problems(**tensors: Tensor) -> Iterator[Problem]:
    """Yield a problem for each tensor that is not on the first tensor's device."""
    named = list(tensors.items())
    for other, x in named[1:]:
        name, first = named[0]
        if x.device != first.device:
            need = f"a tensor on {first.device}, where `{name}` is"
            yield Problem(f"`{other}` is on another device.", f"{x.device}", need, f"{other}.to({name}.device)")
