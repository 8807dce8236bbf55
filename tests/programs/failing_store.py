"""A store in memory, whose requests fail from one of them on, or wait for a call by a rival."""

import itertools

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from funcrec.files import Url

REQUESTS = ("pipe_file", "rm_file", "cat_file", "info", "ls", "find", "get_file")


def emptied():
    """Return the file system of memory://, without any object."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    return fs


def failing(patch, after, *, late=False):
    """Let every request after the first `after` fail. late: a write does its work before, and its answer is lost."""
    count = itertools.count()

    def wrap(name, real):
        def call(self, *args, **kwargs):
            is_gone = next(count) >= after
            if is_gone and not (late and name in ("pipe_file", "rm_file")):
                raise RuntimeError("the store is gone")
            out = real(self, *args, **kwargs)
            if is_gone:
                raise RuntimeError("the store is gone")
            return out

        return call

    for name in REQUESTS:
        patch.setattr(MemoryFileSystem, name, wrap(name, getattr(MemoryFileSystem, name)))


def with_a_call(monkeypatch, at, call):
    """Call `call` once, before the request number `at` of those that follow; return the number of requests so far."""
    asked, real = [0], Url.ask

    def ask(self, what, request, **how):
        asked[0] += 1
        if asked[0] == at:
            with monkeypatch.context() as patch:
                patch.setattr(Url, "ask", real)
                call()
        return real(self, what, request, **how)

    monkeypatch.setattr(Url, "ask", ask)
    return asked
