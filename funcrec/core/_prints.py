"""What `debug_print` must know about the call around it: whether to print, and which print came before.

A program's operations have no order of their own. So each print of a program takes the token of the print before it and
returns one, and the last token is a result of the program.
"""

import contextlib
import contextvars
from collections.abc import Iterator

from torch import Tensor

tokens: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar("tokens", default=None)
is_quiet: contextvars.ContextVar[bool] = contextvars.ContextVar("is_quiet", default=False)


@contextlib.contextmanager
def chained() -> Iterator[list[Tensor]]:
    """Return a context that collects the tokens of the prints of one program, in their order."""
    found: list[Tensor] = []
    before = tokens.set(found)
    try:
        yield found
    finally:
        tokens.reset(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Return a context in which nothing is printed: it calls a function once more than the user's code does."""
    before = is_quiet.set(True)
    try:
        yield
    finally:
        is_quiet.reset(before)
