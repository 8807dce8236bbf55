"""What a loop knows of its epochs, and what it decides by it.

best = argmax_e history[e][monitor],   the end: `epochs` of them, or `patience` of them behind the best
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from funcrec.core import Problem, check, typed

History = Sequence[Mapping[str, Any]]


class Limits(NamedTuple):
    """What ends a run."""

    epochs: int
    monitor: str | None
    mode: str
    patience: int | None


@typed
def best_epoch(history: History, monitor: str, mode: Literal["max", "min"] = "max") -> int | None:
    """The first epoch of the best number; None where none has one: NaN is never best.

    Args:
      history: one {name: number} per epoch.
      mode: whether the greatest is best, "max", or the least, "min".

    Example:
      >>> import funcrec as fr
      >>> fr.loop.best_epoch([{"auc": 0.5}, {"auc": 0.7}, {"auc": float("nan")}], "auc")
      1
    """
    call = "funcrec.loop.best_epoch"
    check(call, (p for i, h in enumerate(history) for p in monitor_problems(h, monitor, i)))
    sign = 1 if mode == "max" else -1
    numbers = [(sign * h[monitor], -i) for i, h in enumerate(history) if not math.isnan(h[monitor])]
    return -max(numbers)[1] if numbers else None


def is_finished(history: History, limits: Limits) -> bool:
    """Whether there have been all epochs, or `patience` of them since the best."""
    if len(history) >= limits.epochs or not history or limits.patience is None:
        return len(history) >= limits.epochs
    return len(history) - 1 - (best_epoch(history, limits.monitor, limits.mode) or 0) >= limits.patience


def monitor_problems(entry: Mapping, monitor: str, epoch: int) -> Iterator[Problem]:
    if monitor not in entry:
        what = f"`monitor` is not measured in epoch {epoch}."
        yield Problem(what, f"{monitor!r}", f"among {list(entry)}", f"evaluate=... that gives {monitor!r}", KeyError)
