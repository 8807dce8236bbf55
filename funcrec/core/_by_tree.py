"""Whether sums over ranks and over parts of a batch are trees of neighbours, as inside of `invariant`."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_by_tree: ContextVar[bool] = ContextVar("funcrec_by_tree", default=False)


def is_by_tree() -> bool:
    """Return whether this code runs inside of `invariant`, where sums over ranks and parts of a batch are trees."""
    return _by_tree.get()


@contextlib.contextmanager
def by_tree() -> Iterator[None]:
    """Return a context in which sums over ranks and parts of a batch are trees."""
    before = _by_tree.set(True)
    try:
        yield
    finally:
        _by_tree.reset(before)
