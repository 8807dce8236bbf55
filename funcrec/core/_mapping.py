"""Make a class a Mapping from names to its parts, without a base class.

x[name] is parts(x)[name]        for name in x
"""

from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from funcrec.core._errors import describe, fail

C = TypeVar("C", bound=type)
V = TypeVar("V", covariant=True)

if TYPE_CHECKING:

    class Named(Mapping[str, V]):
        """What `mapping` makes of a class, for type checkers alone."""

        def __getitem__(self, name: str) -> V:
            return self[name]

        def __iter__(self) -> Iterator[str]:
            return iter(self)

        def __len__(self) -> int:
            return len(self)
else:

    class Named:
        """A base without content: at run time `mapping` alone makes a class a Mapping."""

        __slots__ = ()
        __module__ = "funcrec.core"  # what `help` shows

        def __class_getitem__(cls, part: Any) -> type:
            return cls


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

    def get(self, name: str, default: Any = None) -> Any:
        return parts(self).get(name, default)

    def decorate(cls: C) -> C:
        for f in (keys, values, items, get, __getitem__, __iter__, __len__, __contains__):
            f.__module__, f.__qualname__ = cls.__module__, f"{cls.__qualname__}.{f.__name__}"
            setattr(cls, f.__name__, f)
        return cast(ABCMeta, Mapping).register(cls)

    return decorate
