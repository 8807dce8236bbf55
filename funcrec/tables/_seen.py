"""Which lookups a function makes: what an export asks, to tell a server of each column's table."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from funcrec.jagged import KeyedJaggedTensor
from funcrec.tables._configs import FeatureConfig


class Lookup(NamedTuple):
    """The arguments of one: tables of any kind, ids, features."""

    tables: Any
    ids: KeyedJaggedTensor
    features: Sequence[FeatureConfig]


_seen: ContextVar[list[Lookup] | None] = ContextVar("funcrec_lookups_seen", default=None)


@contextlib.contextmanager
def lookups_seen() -> Iterator[list[Lookup]]:
    """A list that fills with the lookups that are made inside, by this thread."""
    found: list[Lookup] = []
    before = _seen.set(found)
    try:
        yield found
    finally:
        _seen.reset(before)


def see(*lookup: Any) -> None:
    found = _seen.get()
    if found is not None:
        found.append(Lookup(*lookup))
