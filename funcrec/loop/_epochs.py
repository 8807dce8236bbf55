"""The history of a loop's epochs, and the decisions that follow from it.

best = argmax_e history[e][monitor],   end = after `epochs` epochs, or `patience` epochs after the best epoch
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from funcrec.core import Problem, check, html_table, new_figure, sure, typed

History = Sequence[Mapping[str, Any]]


OF_AN_EPOCH = ("epoch", "loss", "steps", "seconds", "steps_per_s", "bad_ids")  # "bad_ids" only if counted


class Limits(NamedTuple):
    """The conditions that end a run."""

    epochs: int
    monitor: str | None
    mode: Literal["max", "min"]
    patience: int | None


@typed
def best_epoch(history: History, monitor: str, mode: Literal["max", "min"] = "max") -> int | None:
    """Return the first epoch with the best number; None if all numbers are NaN.

    NaN is never best.

    Args:
      history: one {name: number} for each epoch.
      mode: "max" if the greatest number is best, "min" if the least number is.

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


def history_html(history: History) -> str:
    """Return an HTML table with a row for each epoch. A cell without a number is empty."""
    names = list(dict.fromkeys(n for entry in history or [dict.fromkeys(OF_AN_EPOCH[:2])] for n in entry))
    shown = lambda x: f"{x:.4g}" if isinstance(x, float) else x
    return html_table(names, [[shown(entry.get(n, "")) for n in names] for entry in history])


def history_figure(history: History) -> Any:
    """Return a matplotlib Figure: the loss by epoch, and in a second panel the numbers of `evaluate`."""
    others = list(dict.fromkeys(n for e in history for n, x in e.items() if n not in OF_AN_EPOCH and is_number(x)))
    figure = new_figure("funcrec.Fitted.plot", 4.5 * (1 + bool(others)), 3.5)
    panels = figure.subplots(1, 1 + bool(others), squeeze=False)[0]
    for axes, names in zip(panels, (["loss"], others), strict=False):
        for name in names:
            points = [(e["epoch"], e[name]) for e in history if is_number(e.get(name))]
            axes.plot([at for at, _ in points], [x for _, x in points], marker="o", label=name)
        axes.set(xlabel="epoch", ylabel=names[0] if len(names) == 1 else "")
        if len(names) > 1:
            axes.legend()
    return figure


def is_number(x: Any) -> bool:
    return isinstance(x, int | float)


def is_finished(history: History, limits: Limits) -> bool:
    """Return whether all epochs are done, or `patience` epochs have passed since the best epoch."""
    if len(history) >= limits.epochs or not history or limits.patience is None:
        return len(history) >= limits.epochs
    return len(history) - 1 - (best_epoch(history, sure(limits.monitor), limits.mode) or 0) >= limits.patience


def monitor_problems(entry: Mapping, monitor: str, epoch: int) -> Iterator[Problem]:
    if monitor not in entry:
        what = f"`monitor` is not measured in epoch {epoch}."
        yield Problem(what, f"{monitor!r}", f"among {list(entry)}", f"evaluate=... that gives {monitor!r}", KeyError)
