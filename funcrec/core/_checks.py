"""Checks that several functions share: checks of names against known names, and of tensors in trees and dicts.

if (yield from reported(problems)): return         later checks need what the earlier checks looked at
"""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

from funcrec.core._errors import Problem, describe, short_dtype
from funcrec.core._tree import on_root, paths

T = TypeVar("T")


def sure(x: T | None) -> T:
    """Return x, which is not None where the caller stands. A type checker cannot see why."""
    assert x is not None
    return x


def reported(problems: Iterable[Problem]) -> Generator[Problem, None, bool]:
    """Yield the problems, and return whether there are any."""
    found = False
    for problem in problems:
        found = True
        yield problem
    return found


def doubled(names: Iterable[Any]) -> list[Any]:
    """Return the names that occur more than once, sorted."""
    names = list(names)
    return sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []


def twice_problems(what: str, names: Iterable[Any], hint: str = "", need: str = "distinct names") -> Iterator[Problem]:
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
    what: str, given: Collection[Any], names: Iterable[str], need: str, hint: str = "", kind: type[Exception] = KeyError
) -> Iterator[Problem]:
    """Yield a problem for each name that is not given. what: the first line of the error, with {} for the name."""
    for n in names:
        if n not in given:
            yield Problem(what.format(repr(n)), f"{list(given)}", need, hint, kind)


def float_leaf_problems(what: str, tree: Any, hint: str) -> Iterator[Problem]:
    """Yield a problem for a leaf that is no float tensor. what: the first line of the error, with {} for its path."""
    for path, x in paths(tree):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            yield Problem(what.format(on_root(path)), describe(x), "a float tensor", hint, TypeError)


def element_problems(
    what: str, name: str, x: Tensor, wrong: Tensor, need: str, hint: str = "", kind: type[Exception] = ValueError
) -> Iterator[Problem]:
    """Yield a problem with the first element of x that is wrong. It reads values, and so waits for a device."""
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        got = f"{name}{at} = {x[tuple(at)].item()}, {int(wrong.sum())} in all"
        yield Problem(what, got, need, hint, kind)


def stray(x: Tensor, size: int) -> int | None:
    """Return a number of x that is not in [0, size), or None. It reads values, and so waits for a device."""
    low, high = (int(n) for n in x.aminmax()) if x.numel() else (0, -1)
    return low if low < 0 else high if high >= size else None


def tree_problems(given: Any, name: str, form: Any, other: str, hint: str, *, some: bool = False) -> Iterator[Problem]:
    """Yield a problem for each part of `given` that lacks its form: {name: form}, [form], ... for any value, the shape
    of a float tensor, or a tensor of the shape and dtype. With `some`, a dict may have further names. other: what
    errors say of another dict or list, as in "are not this layer's"."""
    if isinstance(form, dict | list):
        is_one, got = isinstance(given, Mapping if isinstance(form, dict) else list | tuple), describe(given)
        if isinstance(form, dict):
            got, need = f"names {list(given)}" if is_one else got, f"a dict of {', '.join(form)}"
            fits = is_one and (form.keys() <= given.keys() if some else form.keys() == given.keys())
        else:
            got, need = f"{len(given)} of them" if is_one else got, f"a list of {len(form)}"
            fits = is_one and len(form) == len(given)
        if not fits:
            error = ValueError if is_one else TypeError
            yield Problem(f"`{name}` {other}.", got, need, hint, error)
            return
        for n, own in form.items() if isinstance(form, dict) else enumerate(form):
            yield from tree_problems(given[n], f"{name}[{n!r}]", own, other, hint, some=some)
    elif form is not ...:
        is_like = isinstance(form, Tensor)
        shape, dtype = (form.shape, short_dtype(form.dtype)) if is_like else (form, "f")
        need = f"{dtype}{list(shape)}"
        if not isinstance(given, Tensor) or not (given.dtype == form.dtype if is_like else given.is_floating_point()):
            noun = f"a tensor of {dtype}" if is_like else "a float tensor"
            yield Problem(f"`{name}` is not {noun}.", describe(given), need, hint, TypeError)
        elif tuple(given.shape) != tuple(shape):
            yield Problem(f"`{name}` has another shape.", describe(given), need, hint)
