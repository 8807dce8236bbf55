"""Method: a jitted function that is a method of a class, bound to an object.

obj.step(x) = step(obj, x)
"""

import inspect
import types
from typing import Any

from funcrec.compile._lower import Lowered


class Method:
    """A jitted method, bound to an object, which becomes the first argument."""

    def __init__(self, jitted: Any, owner: object):
        self.__func__, self.__self__ = jitted, owner
        self.__signature__ = inspect.signature(types.MethodType(jitted.fn, owner))

    def __call__(self, *args, **kwargs):
        return self.__func__(self.__self__, *args, **kwargs)

    def lower(self, *args, **kwargs) -> Lowered:
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str):
        return getattr(self.__func__, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Method) and self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.__self__, self.name)
