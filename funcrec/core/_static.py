"""Static values: what a call of a jitted function holds besides tensors, and what tells one from another.

static_key(a) == static_key(b)   only if no program can tell a from b:
1, 1.0 and True differ, and 0.0 and -0.0; NaN is NaN
"""

import dataclasses
import enum
import numbers
import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from funcrec.core._errors import describe, fail

# Types whose values are told apart by `==`, or by being one object that does not change.
EXACT = {
    int, bool, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format,
    type, object, types.FunctionType, types.BuiltinFunctionType,
}  # fmt: skip
PLAIN = {int, str, bytes, type(None)}  # of these no value equals one of another type


def static_key(x: Any) -> Hashable:
    """What stands for x in the key of a compilation.

    Raises: TypeError for a value that cannot be told from another, or from itself after a change.
    """
    kind = type(x)
    if kind in EXACT:
        return kind, x
    if isinstance(x, (slice, range)):
        return kind, *map(static_key, (x.start, x.stop, x.step))
    if isinstance(x, (tuple, frozenset)):
        return kind, (tuple if isinstance(x, tuple) else frozenset)(map(static_key, x))
    refuse_opaque(x)
    if dataclasses.is_dataclass(x):
        return kind, x, *(static_key(getattr(x, f.name)) for f in dataclasses.fields(x))
    return kind, repr(x) if isinstance(x, numbers.Number) else x


def refuse_opaque(x: object) -> None:
    """A static value must be hashable, and may hold neither tensors nor what can change behind its name."""
    if is_opaque(x):
        fail(
            "funcrec.jit", "a leaf is neither a tensor nor a plain static value.", got=describe(x),
            need="tensors, numbers, strings and the like",
            hint="fr.pytree for a class of your own; a tensor for an array",
            kind=TypeError,
        )  # fmt: skip


def is_opaque(x: object) -> bool:
    kind = type(x)
    if isinstance(x, (Tensor, torch.nn.Module)) or kind.__hash__ is None:
        return True
    if isinstance(x, (enum.Enum, type)):
        return False
    held = [*getattr(x, "__dict__", {}).values(), *(getattr(x, n, None) for n in getattr(kind, "__slots__", ()))]
    if kind.__eq__ is object.__eq__ and not callable(x):
        return bool(held) or not kind.__flags__ & HEAP_TYPE  # known by its name only: a generator, a lock, a box
    return not kind.__module__.startswith("torch.") and any(isinstance(v, Tensor) for v in held)


HEAP_TYPE = 1 << 9  # of a type's flags: made by a `class` statement


class Fixed:
    """Static fields of a value in a tree's structure, told apart by `static_key`."""

    __slots__ = ("key", "values")

    def __init__(self, values: tuple):
        self.values = values
        self.key = static_key(values)

    def __eq__(self, other: object) -> bool:
        return type(other) is Fixed and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def fix(values: tuple) -> "tuple | Fixed":
    """The values themselves where `==` tells them apart."""
    for v in values:
        kind = type(v)
        if kind not in PLAIN and not (kind is tuple and PLAIN.issuperset(map(type, v))):
            return Fixed(values)
    return values


def loosen(values: "tuple | Fixed") -> tuple:
    return values.values if type(values) is Fixed else values
