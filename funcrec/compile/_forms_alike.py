"""What branches and loops share: calls of users' functions, numbers as tensors, and the forms that must agree.

selected(p, x, y) = x where p holds, y elsewhere, for x and y of one form
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, fast_flatten, on_root, own_errors, paths

NUMBERS = {bool: torch.bool, int: torch.int64, float: None}  # the dtypes of Python's numbers; None: torch's default


def run(call: str, fn: Callable[..., Any], *args: Any) -> Any:
    with own_errors(call, fn, *args, need="the arguments that it takes"):
        return fn(*args)


def as_tensors(tree: Any, floats: torch.dtype | None = None) -> Any:
    """Return the tree with its numbers as tensors: bool[], i64[], or f[] of the dtype `floats` (None: the default)."""
    leaves, structure = fast_flatten(tree)
    of = lambda x: torch.tensor(x, dtype=floats if type(x) is float else NUMBERS[type(x)])
    return structure.unflatten([of(x) if type(x) in NUMBERS else x for x in leaves])


def predicate(call: str, cond_fn: Callable, carry: Any) -> Any:
    going = run(call, cond_fn, carry)
    check(call, predicate_problems("cond_fn(carry)", going))
    return going


def next_carry(call: str, body_fn: Callable, carry: Any) -> Any:
    """Return body_fn(carry), after a check of its form."""
    new = as_tensors(run(call, body_fn, carry))
    check(call, form_problems("body_fn(carry)", new, "the carry", carry))
    return new


def selected(call: str, pred: Tensor, taken: Any, other: Any) -> Any:
    """Return each leaf of `taken` where the predicate holds, and of `other` elsewhere."""
    check(call, form_problems("one result", taken, "the other", other))
    mine, structure = fast_flatten(taken)
    pairs = zip(mine, fast_flatten(other)[0], strict=True)
    return structure.unflatten([torch.where(pred, x, y) if isinstance(x, Tensor) else x for x, y in pairs])


# -- validators --------------------------------------------------------------------------------------------------


def predicate_problems(name: str, pred: object) -> Iterator[Problem]:
    if isinstance(pred, bool) or (isinstance(pred, Tensor) and pred.dtype == torch.bool and pred.dim() == 0):
        return
    hint = "(x > 0).all(), or torch.func.vmap over the members" if isinstance(pred, Tensor) else "x.sum() > 0"
    yield Problem(f"`{name}` is not one bool.", describe(pred), "bool[], or a bool", hint, TypeError)


def form_problems(name: str, got: Any, other_name: str, other: Any) -> Iterator[Problem]:
    """Yield a problem for each leaf of a tree whose form is not that of the other tree."""
    if fast_flatten(got)[1] != fast_flatten(other)[1]:
        a, b = (f"{[p for p, _ in paths(x)]}" for x in (got, other))
        yield Problem(f"{name} has another structure than {other_name}.", a, b, "one tree, whose leaves change",
            TypeError)  # fmt: skip
        return
    for (path, x), (_, y) in zip(paths(got), paths(other), strict=True):
        yield from leaf_problems(f"{name}{on_root(path)}", x, f"{other_name}{on_root(path)}", y)


def leaf_problems(name: str, x: Any, other_name: str, y: Any) -> Iterator[Problem]:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        if x is not y and not (type(x) is type(y) and (x == y) is True):
            yield Problem(f"{name} is not {other_name}.", describe(x), describe(y), "a tensor", TypeError)
    elif x.dtype != y.dtype:
        yield Problem(f"{name} has another dtype than {other_name}.", describe(x), describe(y), f"x.to({y.dtype})",
            TypeError)  # fmt: skip
    elif x.shape != y.shape:
        yield Problem(f"{name} has another shape than {other_name}.", describe(x), describe(y), "one shape")
