"""Arguments of a jitted function that are static as they are, because the caller of `jit` named them.

key of a compilation = (forms of tensors, static keys of other leaves, (class, value) of each static argument)
"""

import contextlib
import inspect
import reprlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from funcrec.core import Problem, check, describe, static_key, tree_leaves


class Static:
    """An argument as one leaf, whatever it is. Values of one class that are equal are one.

    Python's own values have their static keys, which tell -0.0 from 0.0, and (1,) from (True,).
    """

    __slots__ = ("key", "value")

    def __init__(self, value: Any):
        self.value, self.key = value, (type(value), value)
        if type(value).__module__ == "builtins":
            with contextlib.suppress(TypeError):  # a tuple may hold values of other classes
                self.key = static_key(value)

    def __eq__(self, other: object) -> bool:
        return type(other) is Static and bool(other.key == self.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return reprlib.repr(self.value)


def call_plain(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return fn of the arguments, with static ones as they were given."""
    plain = lambda x: x.value if type(x) is Static else x
    return fn(*map(plain, args), **{n: plain(x) for n, x in kwargs.items()})


def static_names(
    name: str, static: Sequence[str | int], signature: inspect.Signature, donate: Sequence[str]
) -> tuple[str, ...]:
    """Return the names of the static parameters, which are given by name or by place."""
    parameters = [n for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    check(f"funcrec.jit({name})", parameter_problems(static, parameters, donate))
    return tuple(dict.fromkeys(parameters[x] if isinstance(x, int) else x for x in static))


def with_static(name: str, static: Sequence[str], names: Sequence[str], arguments: tuple) -> tuple:
    """Return the arguments, each static one as a leaf."""
    given = dict(zip(names, arguments, strict=True))
    check(f"funcrec.jit({name})", value_problems({n: given[n] for n in static if n in given}))
    return tuple(Static(x) if n in static else x for n, x in given.items())


# -- validators --------------------------------------------------------------------------------------------------


def parameter_problems(
    static: Sequence[str | int], parameters: Sequence[str], donate: Sequence[str]
) -> Iterator[Problem]:
    for x in static:
        which = "static_argnums" if isinstance(x, int) else "static_argnames"
        if x not in (range(len(parameters)) if isinstance(x, int) else parameters):
            yield Problem(f"`{which}` names no parameter.", f"{x!r}", f"among {list(parameters)}", "the name of one")
        elif (parameters[x] if isinstance(x, int) else x) in donate:
            yield Problem(
                f"`{which}` names a donated parameter.", f"{x!r}", "a parameter without tensors", "one of both"
            )


def value_problems(given: dict[str, Any]) -> Iterator[Problem]:
    for n, x in given.items():
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(x)):
            need, hint = "a value without tensors", f"{n!r} not among static_argnames"
            yield Problem(f"`{n}` is static, and holds tensors.", describe(x), need, hint, TypeError)
            continue
        try:
            hash(x)
        except TypeError:
            need, hint = "a hashable value", "a tuple for a list; frozenset(d.items()) for a dict"
            yield Problem(f"`{n}` is static, and not hashable.", describe(x), need, hint, TypeError)
