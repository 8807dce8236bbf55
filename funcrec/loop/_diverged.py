"""Ends a run whose loss diverged.

diverged(l) = not |l| <= 1e20
"""

from typing import Any

import torch
from torch import Tensor

from funcrec.core import Problem, message
from funcrec.loop._checks import has_loss
from funcrec.loop._ranks import STEPS_PER_QUESTION

LARGEST_LOSS = 1e20  # the square of a larger number is infinite in f32


class DivergedError(FloatingPointError):
    """The loss of a step of `fit` is NaN, infinite or greater than 1e20.

    If a step gives a loss for each of several members, the losses of all members are NaN, infinite or greater.

    step: the number of that step since the beginning of the run. best: the parameters of the best epoch by `monitor`,
    or None. history: one dict per epoch, as in `Fitted`. The checkpoint is the last one that `fit` wrote before that
    step.

    Example:
      >>> import torch, funcrec as fr
      >>> double = lambda w, batch: (w * 1e15, {"loss": w})
      >>> try:
      ...     fr.fit(double, torch.tensor(1.0), [None], epochs=3, monitor="loss", mode="min")
      ... except fr.loop.DivergedError as error:
      ...     print(error.step, error.best, len(error.history))
      3 tensor(1.0000e+15) 2
    """

    def __init__(self, text: str, step: int = 0, best: Any = None, history: Any = ()):
        super().__init__(text)
        self.step, self.best, self.history = step, best, list(history)


class Losses:
    """The losses of an epoch that are not yet read.

    Losses on the CPU are read at once. Losses on another device are read a few at a time.
    """

    def __init__(self):
        self.unread: list[tuple[int, Tensor]] = []

    def add(self, step: int, metrics: Any) -> bool:
        """Note the loss of a step, and return whether it is time to read the losses."""
        if has_loss(metrics):
            self.unread.append((step, torch.as_tensor(metrics["loss"]).detach()))
        return any(x.device.type == "cpu" for _, x in self.unread) or len(self.unread) >= STEPS_PER_QUESTION

    def read(self, best: Any, history: Any) -> None:
        """Raise for the first loss that diverged."""
        unread, self.unread = self.unread, []
        for step, loss in unread:
            if not bool((loss.abs() <= LARGEST_LOSS).any()):
                got = f"{loss.flatten()[0].item()}" + (f" and {loss.numel() - 1} more" if loss.numel() > 1 else "")
                what, need = f"the loss diverged in step {step}.", f"a number of at most {LARGEST_LOSS:g}"
                hint = "a smaller lr, or fr.optim.clip(sparse, ...); the error has `best` and `history`"
                raise DivergedError(message("funcrec.fit", [Problem(what, got, need, hint)]), step, best, history)
