"""What is wrong with sizes, rates, numbers, flags and functions that a call was given."""

import functools
import inspect
import math
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
            raise signature_error(run, error) or error from None

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


def size_problems(sizes: object, name: str = "sizes", at_least: int = 1) -> Iterator[Problem]:
    """`sizes` must be a tuple or list of at least `at_least`
    positive integers; a size alone has a `name` of its own."""
    if not isinstance(sizes, (tuple, list)):
        yield Problem(f"`{name}` are not sizes.", describe(sizes), "a tuple of ints >= 1", kind=TypeError)
        return
    for i, n in enumerate(sizes):
        path = f"{name}[{i}]" if name in ("sizes", "bottom") else name
        if not isinstance(n, int) or isinstance(n, bool):
            yield Problem(f"`{path}` is not an integer.", describe(n), "an int >= 1", kind=TypeError)
        elif n < 1:
            yield Problem(f"`{path}` is too small.", f"{n}", "an int >= 1")
    if len(sizes) < at_least:
        yield Problem(f"`{name}` are too few.", f"{tuple(sizes)}", f"at least {at_least}", f"{name}=(64, 16)")


def rate_problems(rate: object, name: str = "rate") -> Iterator[Problem]:
    if not isinstance(rate, (int, float)) or isinstance(rate, bool):
        yield Problem(f"`{name}` is not a number.", describe(rate), "a float in [0, 1)", kind=TypeError)
    elif not 0 <= rate < 1:
        yield Problem(f"`{name}` is not a probability of dropping.", f"{rate}", "a float in [0, 1)")


def number_problems(x: object, name: str, least: float, most: float = math.inf) -> Iterator[Problem]:
    """x must be a finite number in [least, most]."""
    need = f"a finite number >= {least:g}" if most == math.inf else f"a number in [{least:g}, {most:g}]"
    if not isinstance(x, (int, float)) or isinstance(x, bool):
        yield Problem(f"`{name}` is not a number.", describe(x), need, kind=TypeError)
    elif not (least <= x <= most and math.isfinite(x)):
        yield Problem(f"`{name}` is outside its range.", f"{x}", need)


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
