"""Static values, the arguments of a jitted call that are not tensors, and keys that distinguish them.

    static_key(a) == static_key(b)   only if no program can tell a from b

The keys of 1, 1.0 and True differ, and so do the keys of 0.0 and -0.0. Two NaNs of one sign have one key. A value of a
subclass and an equal value of its base class have different keys.
"""

import dataclasses
import datetime
import enum
import math
import numbers
import types
from collections.abc import Hashable, Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from funcrec.core._errors import describe, fail

# Types whose values `==` tells apart, or whose only instance never changes.
EXACT = {
    int, bool, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format,
    type, object, types.FunctionType, types.BuiltinFunctionType,
}  # fmt: skip
PLAIN = {int, str, bytes, type(None)}  # types of which no value equals a value of another type
FIXED: dict[tuple[int, ...], "Fixed"] = {}  # {ids of the static fields of a value: the `Fixed` that holds them}
MOST_FIXED = 1024
UNCHANGING = PLAIN | {bool, float, torch.dtype, torch.device}
OWN_NODES: set[type] = set()  # the classes that `pytree` made; `fix` makes the structures of their values comparable
HEAP_TYPE = 1 << 9  # the flag of a type that a `class` statement made
# Types whose repr shows what `==` ignores: a unit, a time zone, the number of digits, an order.
TOLD_BY_WORDS = (
    numbers.Number, np.generic, datetime.datetime, datetime.time, PurePath, types.GenericAlias, types.UnionType,
)  # fmt: skip


def static_key(x: Any) -> Hashable:
    """Return the value that stands for x in the key of a compilation.

    Raises:
      TypeError: if `==` cannot tell x from other values, or x before a change from x after it.
    """
    kind = type(x)
    if kind in EXACT:
        return kind, x
    if kind is float:
        return (kind, repr(x)) if x == x else (kind, repr(x), math.copysign(1.0, x))
    if isinstance(x, enum.Enum):  # The name identifies a member, even if the member equals another value.
        return kind, x._name_, x._value_ if isinstance(x, enum.Flag) else None
    if isinstance(x, (slice, range)):
        return kind, *map(static_key, (x.start, x.stop, x.step))
    if isinstance(x, (tuple, frozenset)):  # Equal sets may iterate in different orders.
        return kind, tuple(map(static_key, x)), *held_keys(x)
    refuse_opaque(x)
    if dataclasses.is_dataclass(x):
        return kind, x, *(static_key(getattr(x, f.name)) for f in dataclasses.fields(x))
    return kind, plain_value(x), *held_keys(x)


def plain_value(x: Any) -> Hashable:
    """Return a key of a value without its attributes.

    Methods of Python's own types read a subclass's value, since a subclass may override them.
    """
    if isinstance(x, float):
        return float.__repr__(x), math.copysign(1.0, x), getattr(x, "dtype", None)
    if isinstance(x, (complex, np.complexfloating)):
        return repr(x), math.copysign(1.0, x.real), math.copysign(1.0, x.imag), getattr(x, "dtype", None)
    if isinstance(x, np.generic):
        return repr(x), str(x.dtype), math.copysign(1.0, x) if isinstance(x, np.floating) else None
    if isinstance(x, int):
        return int.__int__(x)
    if isinstance(x, str):
        return str.__str__(x)
    if isinstance(x, bytes):
        return b"".join((x,))
    return repr(x) if isinstance(x, TOLD_BY_WORDS) else x


def held_keys(x: Any) -> Iterator[Hashable]:
    """Yield (name, key) of each attribute of a value. A call may read attributes that `==` ignores."""
    kind = type(x)
    is_known_by_name = isinstance(x, type) or (kind.__eq__ is object.__eq__ and not callable(x))
    if (
        is_known_by_name
        or (callable(x) and kind.__module__.startswith("funcrec."))
        or not kind.__flags__ & HEAP_TYPE
        or isinstance(x, PurePath)
        or is_of_torch(kind)
    ):
        return
    for name, value in held(x).items():
        yield name, static_key(value)


def held(x: object) -> dict[str, Any]:
    """Return {name: value} for an object's attributes and slots."""
    slots = [vars(c).get("__slots__", ()) for c in type(x).__mro__]
    names = [n for s in slots for n in ((s,) if isinstance(s, str) else s) if n not in ("__dict__", "__weakref__")]
    return {**{n: getattr(x, n) for n in names if hasattr(x, n)}, **getattr(x, "__dict__", {})}


def is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.")


def refuse_opaque(x: object) -> None:
    """Raise unless a static value is hashable, holds no tensors, and cannot change while it compares equal."""
    if is_opaque(x):
        fail(
            "funcrec.jit", "a leaf is neither a tensor nor a plain static value.", got=describe(x),
            need="tensors, numbers, strings and the like",
            hint="fr.pytree for a class of your own; a tensor for an array",
            kind=TypeError,
        )  # fmt: skip


def is_opaque(x: object) -> bool:
    kind = type(x)
    if isinstance(x, (Tensor, torch.nn.Module, np.void)) or kind.__hash__ is None:
        return True
    if isinstance(x, (enum.Enum, type)):
        return False
    if kind.__eq__ is object.__eq__ and not callable(x):
        return bool(held(x)) or not kind.__flags__ & HEAP_TYPE  # `==` compares identity: a generator, a lock, a box
    return not is_of_torch(kind) and any(isinstance(v, Tensor) for v in held(x).values())


def structure_key(structure: optree.PyTreeSpec) -> Hashable:
    """Return a key of what `==` of structures ignores: exact keys of dicts, and static data of users' own classes.

    The key is an empty tuple if all these data are plain, as in most structures.
    """
    odd = []
    state: Any = structure.__getstate__()
    for i, node in enumerate(state[0]):
        if (data := node[2]) is None or node[4] in OWN_NODES or isinstance(data, type):
            continue
        if type(data) is not list or not PLAIN.issuperset(map(type, data)):
            odd.append((i, tuple(static_key(tuple(d) if type(d) is list else d) for d in as_tuple(data))))
    return tuple(odd)


def as_tuple(data: Any) -> tuple:
    return tuple(data) if isinstance(data, (list, tuple)) else (data,)


class Fixed:
    """The static fields of a value in a tree's structure. `==` compares the `static_key` of the fields."""

    __slots__ = ("code", "key", "values")

    def __init__(self, values: tuple[Any, ...]):
        self.values = values
        self.key = static_key(values)
        self.code = hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Fixed and self.key == other.key)

    def __hash__(self) -> int:
        return self.code


def fix(values: tuple) -> "tuple | Fixed":
    """Return the values themselves, or a `Fixed` with the values if `==` does not tell them from all other values."""
    if not PLAIN.issuperset(map(type, values)):
        for v in values:
            kind = type(v)
            if kind not in PLAIN and not (kind is tuple and PLAIN.issuperset(map(type, v))):
                return fixed(values)
    return values


def fixed(values: tuple) -> Fixed:
    """Return the `Fixed` of the values. Values that cannot change have one, which holds them: their ids name it."""
    if is_dynamo_compiling():
        return Fixed(values)
    ids = tuple(map(id, values))
    found = FIXED.get(ids)
    if found is None:
        found = Fixed(values)
        if all(map(cannot_change, values)):
            if len(FIXED) >= MOST_FIXED:
                FIXED.clear()
            FIXED[ids] = found
    return found


def cannot_change(x: Any) -> bool:
    return all(map(cannot_change, x)) if type(x) is tuple else type(x) in UNCHANGING


def loosen(values: "tuple | Fixed") -> tuple:
    return values.values if isinstance(values, Fixed) else values
