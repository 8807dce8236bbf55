"""Make a class a Mapping from names to its parts, without a base class.

x[name] is parts(x)[name]        for name in x
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from funcrec.core._errors import describe, fail

C = TypeVar("C", bound=type)


def mapping(parts: Callable[[Any], Mapping[str, Any]], noun: str, hint: str = "") -> Callable[[C], C]:
    """Return a decorator that makes a class's value x act as the Mapping parts(x).

    noun: what errors call a part. hint: what errors suggest.
    """

    def keys(self):
        return parts(self).keys()

    def values(self):
        return parts(self).values()

    def items(self):
        return parts(self).items()

    def __getitem__(self, name: str) -> Any:
        own = parts(self)
        if not isinstance(name, str) or name not in own:
            call, got, need = f"funcrec.{type(self).__name__}", describe(name), f"one of {list(own)}"
            fail(call, f"there is no such {noun}.", got=got, need=need, hint=hint, kind=KeyError)
        return own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(parts(self))

    def __len__(self) -> int:
        return len(parts(self))

    def __contains__(self, name: object) -> bool:
        return name in parts(self)

    def decorate(cls: C) -> C:
        for f in (keys, values, items, __getitem__, __iter__, __len__, __contains__):
            f.__module__, f.__qualname__ = cls.__module__, f"{cls.__qualname__}.{f.__name__}"
            setattr(cls, f.__name__, f)
        return Mapping.register(cls)

    return decorate
