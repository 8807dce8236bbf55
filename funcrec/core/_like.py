"""Flatten trees that have a known structure. This is several times as fast as to find the structure of each tree.

    flatten_like(structure)(tree) = leaves    if fast_flatten(tree) = (leaves, structure), else None

A program's calls repeat the structure of their arguments. A reader of one structure compares each container with the
structure's container at that place (class, keys, static fields), and appends the children.
"""

from collections.abc import Callable
from typing import Any, cast

import optree

from funcrec.core._static import PLAIN
from funcrec.core._tree import CALL_FLATTENS

Reader = Callable[[Any, list], bool]  # appends a value's leaves to the list; False if its containers differ


def flatten_like(structure: optree.PyTreeSpec) -> Callable[[Any], list[Any] | None] | None:
    """Return a function from a tree to its leaves, or to None if its containers differ from those of the structure.

    What stands at a leaf's place is not read: the caller must know each leaf's type, since a container there is no
    leaf. There is no such function for containers other than dict, list, tuple, named tuples, None and the classes of
    `fr.pytree`, nor for keys of other types than str, int, bytes and None.

    Example:
      >>> import funcrec as fr
      >>> from funcrec.core import fast_flatten, flatten_like
      >>> leaves = flatten_like(fast_flatten({"a": 1, "b": [2, 3]})[1])
      >>> leaves({"a": 4, "b": [5, 6]})
      [4, 5, 6]
      >>> leaves({"a": 4, "b": (5, 6)}) is None
      True
    """
    read = reader(structure)
    if read is None:
        return None

    def leaves_of(tree: Any) -> list[Any] | None:
        out: list[Any] = []
        return out if read(tree, out) else None

    return leaves_of


def reader(structure: optree.PyTreeSpec) -> Reader | None:
    """Return the reader of a structure, or None if it has a container of another kind."""
    if structure.is_leaf():
        return read_leaf
    kind, children = cast(Any, structure.type), structure.children()
    if kind is type(None):
        return lambda x, out: x is None
    readers = [reader(child) for child in children]
    if any(read is None for read in readers):
        return None
    into = None if all(read is read_leaf for read in readers) else readers
    if kind is dict:
        return dict_reader(structure.entries(), into)
    if kind in CALL_FLATTENS:
        return value_reader(kind, node_data(structure), into)
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields") and kind.__len__ is tuple.__len__
    if kind in (list, tuple) or (is_named_tuple and kind.__iter__ is tuple.__iter__):
        return sequence_reader(kind, len(children), into)
    return None


def read_leaf(x: Any, out: list) -> bool:
    out.append(x)
    return True


def dict_reader(keys: list, into: list | None) -> Reader | None:
    """Return a reader of dicts with these keys in this order. into: the children's readers; None if all are leaves."""
    if not PLAIN.issuperset(map(type, keys)):
        return None

    def read(x: Any, out: list) -> bool:
        # Keys of these types are equal only if they have one type.
        if type(x) is not dict or [*x] != keys or not PLAIN.issuperset(map(type, x)):
            return False
        return children_read(x.values(), into, out)

    return read


def sequence_reader(kind: type, size: int, into: list | None) -> Reader:
    """Return a reader of lists or tuples with `size` elements."""
    return lambda x, out: type(x) is kind and len(x) == size and children_read(x, into, out)


def value_reader(kind: type, data: Any, into: list | None) -> Reader:
    """Return a reader of values of a class of `fr.pytree`. data: the fields that are not None, and the static ones."""
    flatten = CALL_FLATTENS[kind]

    def read(x: Any, out: list) -> bool:
        if type(x) is not kind:
            return False
        children, found, _ = flatten(x)
        return found == data and children_read(children, into, out)

    return read


def children_read(children: Any, into: list | None, out: list) -> bool:
    if into is None:
        out.extend(children)
        return True
    return all(read(x, out) for read, x in zip(into, children, strict=True))


def node_data(structure: optree.PyTreeSpec) -> Any:
    """Return the data of a structure's outermost container."""
    state: Any = structure.__getstate__()
    return state[0][-1][2]
