"""Jitted functions whose staged graphs are run as they stand: for laws of staging, donation and exchanges, of which a
compiler changes nothing. A program that is compiled costs two to four seconds, on each rank."""

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def staged_only() -> Iterator[None]:
    """No graph that is staged within is compiled."""
    with mock.patch("funcrec.compile._compiled.compile_graph", lambda graph, arguments: graph):
        yield


def as_staged(fn, *args):
    """fn(*args) so; a function of a module, so that ranks can be sent it."""
    with staged_only():
        return fn(*args)
