"""checked: a function with its values looked at, and the switch that it turns on.

The switch is a context variable: it belongs to the thread and the call that set it.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar

from funcrec.core._typed import typed

checking: ContextVar[bool] = ContextVar("funcrec_checking", default=False)


@typed
def checked(fn: Callable) -> Callable:
    """The same function, run uncompiled, with every lookup's ids and every gradient checked by value.

    It reads values on the host, so it is for finding faults, not for the hot path; a jitted function inside runs
    uncompiled and undonated.

    Raises:
      CheckError: names the feature, bag and id, or the gradient and row.

    Law: where nothing is wrong, checked(fn) == fn.

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
        try:  # from before the switch on, so that an interrupt finds it on the way back
            checking.set(True)
            return fn(*args, **kwargs)
        finally:
            checking.set(before)

    return run


def is_checking() -> bool:
    """Whether the caller runs under `checked`."""
    return checking.get()
