"""Jitted functions whose staged graphs run uncompiled, for laws of staging, donation and exchanges.

Compilation changes nothing about those laws, and costs two to four seconds per program on each rank."""

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def staged_only() -> Iterator[None]:
    """Compile no graph that is staged within the context."""
    with mock.patch("funcrec.compile._program.compile_graph", lambda graph, arguments: graph):
        yield


def as_staged(fn, *args):
    """Return fn(*args), called in `staged_only`. This function is at module level, so that it can be sent to ranks."""
    with staged_only():
        return fn(*args)
