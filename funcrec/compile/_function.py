"""The function that `jit` gets: what it may be, and the names of its parameters."""

import inspect
from collections.abc import Callable

from funcrec.core import describe, fail


def check_function(fn: Callable) -> None:
    kinds = {
        "coroutine": inspect.iscoroutinefunction,
        "generator": inspect.isgeneratorfunction,
        "asynchronous generator": inspect.isasyncgenfunction,
    }
    for kind, is_one in kinds.items():
        if is_one(fn) or is_one(getattr(fn, "__call__", None)):  # noqa: B004
            need, hint = "a function that returns its values", "collect them in a list, and return that"
            got = getattr(fn, "__name__", describe(fn))
            fail("funcrec.jit", f"`fn` is a {kind}.", got=got, need=need, hint=hint, kind=TypeError)


def signature_of(fn: Callable) -> inspect.Signature:
    try:
        return inspect.signature(fn)
    except ValueError:  # a builtin function without a signature
        return inspect.signature(lambda *args, **kwargs: None)


def bound_to(name: str, signature: inspect.Signature, args: tuple, kwargs: dict) -> inspect.BoundArguments:
    """Return the arguments of a call by the names of the function's parameters."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        found = f"{error}"
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    what, need = "the arguments are not those that it takes.", f"{name}{inspect.Signature(plain)}"
    fail(f"funcrec.jit({name})", what, got=found, need=need, kind=TypeError)
