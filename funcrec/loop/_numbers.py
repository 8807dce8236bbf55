"""Names of the numbers of metrics that have several values.

{"auc": f[2], "ctr": {"new": x, "old": y}}   ->   {"auc.0", "auc.1", "ctr.new", "ctr.old"}
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
from torch import Tensor

from funcrec.core import Problem, check, describe


def named_numbers(call: str, found: Mapping[str, Any], giver: str, kind: str = "metrics") -> dict[str, float]:
    """Return {name: number}, flat, in the order of `found`.

    A number keeps its name. An entry of a tensor or a list has its index after a dot, and an entry of a dict its key.

    Args:
      call: the name of the call that errors report.
      found: {name: a number, or a tensor, an array, a dict or a list of numbers}.
      giver: a format of who gave the value of `name`, for errors.
      kind: the name of the argument that holds the names, for errors.

    Raises:
      TypeError: if a value has no numbers.
      ValueError: if two numbers have one name.
    """
    pairs = [(name, *pair) for name, x in found.items() for pair in numbers_in(name, x) or [(name, None)]]
    check(call, number_problems(pairs, found, giver), name_problems([own for _, own, _ in pairs], kind))
    return {own: float(x) for _, own, x in pairs}


def numbers_in(name: str, x: Any) -> list[tuple[str, Any]]:
    """Return [(name, number)] of a value. The number is None if the value, or an entry of it, has no numbers."""
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "fiub":
        x = x.astype(np.float64).tolist()
    if isinstance(x, Tensor):
        x = None if x.is_complex() else x.detach().double().tolist()
    if isinstance(x, tuple) and hasattr(x, "_asdict"):
        x = cast(Any, x)._asdict()
    if isinstance(x, Mapping | list | tuple):
        pairs = x.items() if isinstance(x, Mapping) else enumerate(x)
        return [pair for key, value in pairs for pair in numbers_in(f"{name}.{key}", value) or [(name, None)]]
    return [(name, x if isinstance(x, int | float) else None)]


# -- validators --------------------------------------------------------------------------------------------------


def number_problems(pairs: list[tuple[str, str, Any]], found: Mapping[str, Any], giver: str) -> Iterator[Problem]:
    for name in dict.fromkeys(name for name, _, x in pairs if x is None):
        need, hint = "a number, or a tensor or a dict of numbers", "fr.metrics.exact_auc"
        yield Problem(giver.format(name=repr(name)), describe(found[name]), need, hint, TypeError)


def name_problems(names: list[str], kind: str) -> Iterator[Problem]:
    if twice := [n for n, count in Counter(names).items() if count > 1]:
        need, hint = "a name for each number", f"another key than {twice[0].rpartition('.')[0]!r}"
        yield Problem(f"`{kind}` give one name to two numbers.", f"{twice[:3]}", need, hint)
