"""Checks that many functions make: of names against those that are there, and of the tensors in trees and dicts.

if (yield from reported(problems)): return         the next checks need what these looked at
"""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from funcrec.core._errors import Problem, describe
from funcrec.core._tree import paths


def reported(problems: Iterable[Problem]) -> Generator[Problem, None, bool]:
    """Yields the problems, and returns whether there are any."""
    found = False
    for problem in problems:
        found = True
        yield problem
    return found


def doubled(names: Iterable[str]) -> list[str]:
    """Returns the names that are there more than once, sorted."""
    names = list(names)
    return sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []


def twice_problems(what: str, names: Iterable[str], hint: str = "", need: str = "distinct names") -> Iterator[Problem]:
    """No name may be there twice. what: the first line of the error."""
    if again := doubled(names):
        yield Problem(what, f"{again} more than once", need, hint)


def unknown_problems(
    what: str, names: Iterable[str], known: Collection[str], hint: str = "", kind: type[Exception] = ValueError
) -> Iterator[Problem]:
    """All names must be known. what: the first line of the error."""
    if unknown := [n for n in names if n not in known]:
        yield Problem(what, f"{unknown}", f"among {list(known)}", hint, kind)


def absent_problems(
    what: str, given: Mapping, names: Iterable[str], need: str, hint: str = "", kind: type[Exception] = KeyError
) -> Iterator[Problem]:
    """Each of the names must be given. what: the first line of the error, with {} for a name."""
    for n in names:
        if n not in given:
            yield Problem(what.format(repr(n)), f"{list(given)}", need, hint, kind)


def float_leaf_problems(what: str, tree: Any, hint: str) -> Iterator[Problem]:
    """All leaves must be float tensors. what: the first line of the error, with {} for a leaf's path."""
    for path, x in paths(tree):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            yield Problem(what.format(path), describe(x), "a float tensor", hint, TypeError)


def float_dict_problems(
    what: str, given: object, name: str, shapes: Mapping[str, Iterable[int]], hint: str, *, some: bool = False
) -> Iterator[Problem]:
    """A dict must have a float tensor of its shape for each name, and `some` may have others too. what: the first line
    of the error where names differ."""
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
