"""What is wrong with sizes, rates, numbers, flags and functions that a call was given."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from funcrec.core._errors import Problem, call_name, describe, message

FUNCTION = {
    "log_q": "lambda batch: log_frequency[batch.ids['item'].values]",
    "candidate_ids": "lambda batch: batch.ids['item'].values",
}


F = TypeVar("F", bound=Callable)


def plain_number(x: Any) -> Any:
    """A number of numpy's, such as `df.id.max() + 1` is, as Python's; in a tuple or a list, too. All else as it is."""
    if type(x) in (tuple, list) and any(isinstance(y, np.generic) for y in x):
        return type(x)(map(plain_number, x))
    return x.item() if isinstance(x, np.number | np.bool_) else x


def plain_numbers(fn: F) -> F:
    """Decorator of a function or a dataclass: it is given Python's numbers where numpy's are passed."""
    if isinstance(fn, type):
        fn.__init__ = plain_numbers(fn.__init__)
        return fn

    @functools.wraps(fn)
    def run(*args, **kwargs):
        try:
            return fn(*map(plain_number, args), **{n: plain_number(x) for n, x in kwargs.items()})
        except TypeError as error:
            problem = signature_error(run, error)
            if problem is None:
                raise
            raise problem from None

    return run


def signature_error(fn: Callable, error: TypeError) -> TypeError | None:
    """Of a call with arguments that `fn` has not, or without one that it needs: that, and which it has."""
    if error.__traceback__.tb_next is not None:  # of its body
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
    """All must be where the first is."""
    named = list(tensors.items())
    for other, x in named[1:]:
        name, first = named[0]
        if x.device != first.device:
            need = f"a tensor on {first.device}, where `{name}` is"
            yield Problem(f"`{other}` is on another device.", f"{x.device}", need, f"{other}.to({name}.device)")


def function_problems(**functions: object) -> Iterator[Problem]:
    for name, fn in functions.items():
        if not callable(fn):
            yield Problem(
                f"`{name}` is not a function.", describe(fn), "a function of tensors", FUNCTION.get(name, ""), TypeError
            )


def count_problems(n: object, field: str, least: int = 1) -> Iterator[Problem]:
    if not isinstance(n, int) or isinstance(n, bool):
        yield Problem(f"`{field}` is not an integer.", describe(n), f"an int >= {least}", kind=TypeError)
    elif n < least:
        yield Problem(f"`{field}` is too small.", f"{n}", f"an int >= {least}")


def flag_problems(x: object, field: str) -> Iterator[Problem]:
    """A flag is True or False: no other value that Python takes for one."""
    if not isinstance(x, bool):
        yield Problem(f"`{field}` is neither True nor False.", f"{x!r}"[:60], "a bool", kind=TypeError)
