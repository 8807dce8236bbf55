"""`checked`, which runs a function with checks of values, and the switch that turns these checks on.

The switch is a context variable: it applies to the current thread and call only.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from funcrec.core._typed import typed

A = ParamSpec("A")
R = TypeVar("R")
checking: ContextVar[bool] = ContextVar("funcrec_checking", default=False)


@typed
def checked(fn: Callable[A, R]) -> Callable[A, R]:
    """Return a function that runs `fn` uncompiled and checks the values of every lookup's ids and of every gradient.

    The checks read values on the host, so use `checked` to find faults, not on the hot path. A jitted function that
    `fn` calls runs uncompiled and does not donate.

    Raises:
      CheckError: if a value is wrong. The message names the feature, bag and id, or the gradient and row.

    Law: where nothing is wrong, checked(fn) computes the same as fn.

    Example:
      >>> import torch, funcrec as fr
      >>> ids = fr.KeyedJaggedTensor.from_lists({"item": [[7]]})
      >>> look = lambda t: fr.lookup(t, ids, [fr.FeatureConfig("item", table="item")])
      >>> look({"item": torch.ones(5, 2)})["item"]  # an id outside the table reads zeros
      tensor([[0., 0.]])
      >>> fr.checked(look)({"item": torch.ones(5, 2)})  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      funcrec.CheckError: funcrec.lookup: feature 'item' has ids outside table 'item'...
    """

    @functools.wraps(fn)
    def run(*args, **kwargs):
        before = checking.get()
        try:  # The `try` begins before the switch is on, so that an interrupt cannot leave the switch on.
            checking.set(True)
            return fn(*args, **kwargs)
        finally:
            checking.set(before)

    return run


def is_checking() -> bool:
    """Return whether the caller runs under `checked`."""
    return checking.get()
