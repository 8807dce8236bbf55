"""Checks that several functions share: checks of names against known names, and of tensors in trees and dicts.

if (yield from reported(problems)): return         later checks need what the earlier checks looked at
"""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from funcrec.core._errors import Problem, describe
from funcrec.core._tree import paths


def reported(problems: Iterable[Problem]) -> Generator[Problem, None, bool]:
    """Yield the problems, and return whether there are any."""
    found = False
    for problem in problems:
        found = True
        yield problem
    return found


def doubled(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, sorted."""
    names = list(names)
    return sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []


def twice_problems(what: str, names: Iterable[str], hint: str = "", need: str = "distinct names") -> Iterator[Problem]:
    """Yield a problem if a name occurs twice. what: the first line of the error."""
    if again := doubled(names):
        yield Problem(what, f"{again} more than once", need, hint)


def unknown_problems(
    what: str, names: Iterable[str], known: Collection[str], hint: str = "", kind: type[Exception] = ValueError
) -> Iterator[Problem]:
    """Yield a problem if a name is not known. what: the first line of the error."""
    if unknown := [n for n in names if n not in known]:
        yield Problem(what, f"{unknown}", f"among {list(known)}", hint, kind)


def absent_problems(
    what: str, given: Mapping, names: Iterable[str], need: str, hint: str = "", kind: type[Exception] = KeyError
) -> Iterator[Problem]:
    """Yield a problem for each name that is not given. what: the first line of the error, with {} for the name."""
    for n in names:
        if n not in given:
            yield Problem(what.format(repr(n)), f"{list(given)}", need, hint, kind)


def float_leaf_problems(what: str, tree: Any, hint: str) -> Iterator[Problem]:
    """Yield a problem for a leaf that is no float tensor. what: the first line of the error, with {} for its path."""
    for path, x in paths(tree):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            yield Problem(what.format(path), describe(x), "a float tensor", hint, TypeError)


def float_dict_problems(
    what: str, given: object, name: str, shapes: Mapping[str, Iterable[int]], hint: str, *, some: bool = False
) -> Iterator[Problem]:
    """Yield a problem unless a dict has, for each name, a float tensor of the given shape. With `some`, it may have
    further names. what: the first line of the error for other names."""
    if not isinstance(given, Mapping) or not (shapes.keys() <= given.keys() if some else shapes.keys() == given.keys()):
        got = f"names {list(given)}" if isinstance(given, Mapping) else describe(given)
        yield Problem(what, got, f"a dict of {', '.join(shapes)}", hint, TypeError)
        return
    for n, shape in shapes.items():
        x, need = given[n], f"f{list(shape)}"
        if not isinstance(x, Tensor) or not x.is_floating_point():
            yield Problem(f"`{name}[{n!r}]` is not a float tensor.", describe(x), need, hint, TypeError)
        elif tuple(x.shape) != tuple(shape):
            yield Problem(f"`{name}[{n!r}]` has another shape.", describe(x), need, hint)
