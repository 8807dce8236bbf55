"""A progress bar on a terminal: the steps of an epoch, examples per second, and the time left for the whole run.

left = (steps left of this epoch + steps of later epochs) · seconds per step
"""

import operator
import sys
import time
from typing import Any

from torch import Tensor
from tqdm import tqdm

from funcrec.core import tree_leaves
from funcrec.loop._ranks import is_chief
from funcrec.loop._run_state import Work
from funcrec.tables import Batch


class Progress:
    """The bar of one epoch. A hidden bar shows and counts nothing.

    done: the number of steps of the epoch that an earlier run made. epochs: the most epochs of the whole run.
    """

    def __init__(self, work: Work, epoch: int, done: int, epochs: int):
        is_shown = sys.stderr.isatty() if work.progress is None else work.progress
        self.total, self.epochs_left = operator.length_hint(work.loader) or None, epochs - epoch - 1
        hidden = not (is_shown and is_chief(work.mesh))
        self.bar = tqdm(
            total=self.total, initial=done, desc=f"epoch {epoch:3d}", unit="step", leave=False, disable=hidden
        )
        self.done, self.steps, self.examples, self.bad_ids, self.began = done, 0, 0, 0, 0.0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.close()

    def step(self, batch: Any, bad_ids: int) -> None:
        """Count one step. The first step may compile, so the clock begins after it."""
        if self.bar.disable:
            return
        if self.began:
            self.steps, self.examples = self.steps + 1, self.examples + num_examples(batch)
        else:
            self.done, self.began = self.done + 1, time.perf_counter()
        seconds = time.perf_counter() - self.began if self.steps else 0.0
        self.bar.set_postfix(self.words(seconds, bad_ids), refresh=bad_ids > self.bad_ids)  # show new bad ids at once
        self.bad_ids = bad_ids
        self.bar.update()

    def words(self, seconds: float, bad_ids: int) -> dict[str, Any]:
        """Return {name: text}, the texts after the bar. seconds: the time since the clock began."""
        found: dict[str, Any] = {"examples/s": f"{self.examples / seconds:,.0f}"} if self.examples else {}
        if self.total is not None and self.steps:
            left = self.total * (self.epochs_left + 1) - self.done - self.steps
            found["left"] = tqdm.format_interval(left * seconds / self.steps)
        return found | ({"bad_ids": bad_ids} if bad_ids else {})


def num_examples(batch: Any) -> int:
    """Return the number of examples of a batch.

    The function counts labels, or rows of the first tensor of another tree; without these it returns 0.
    """
    rows = [batch.label, batch.dense, batch.weight] if isinstance(batch, Batch) else tree_leaves(batch)
    return next((x.shape[0] for x in rows if isinstance(x, Tensor) and x.dim()), 0)
