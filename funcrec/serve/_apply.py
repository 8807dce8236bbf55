"""A delta put into weights that other threads read: all of it, between two calls, or nothing.

tensors[name][rows] = values          while nobody reads
"""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from funcrec.serve._delta_file import Change, read_changes


class Alone:
    """Held when all `count` permits of a semaphore are: nobody else is inside then. By one thread at a time."""

    __slots__ = ("count", "free", "held")

    def __init__(self, free: threading.Semaphore, count: int):
        self.free, self.count, self.held = free, count, 0

    def __enter__(self):
        try:
            while self.held < self.count:
                self.free.acquire()
                self.held += 1
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error):
        if self.held:
            self.free.release(self.held)
        self.held = 0


def applied(
    call: str, path: Path, manifest: Mapping, tensors: Mapping[str, Tensor], version: str, alone: Alone, name: Callable
) -> None:
    """Write a delta to the tensors, which are of `version`, and `name` them anew. The file is read and held to the
    package before; what fails or is interrupted leaves every bit as it was."""
    changes, to = read_changes(call, path, manifest["params"], manifest["digest"], version)
    now = lambda n, rows: (tensors[n] if rows is None else tensors[n][rows]).clone()
    with alone:
        before = {n: Change(c.rows, now(n, c.rows)) for n, c in changes.items()}
        try:
            put(tensors, changes)
            name(to)
        except BaseException:
            put(tensors, before)
            name(version)
            raise


def put(tensors: Mapping[str, Tensor], changes: Mapping[str, Change]) -> None:
    for n, (rows, values) in changes.items():
        if rows is None:
            tensors[n].copy_(values)
        else:
            tensors[n][rows] = values
