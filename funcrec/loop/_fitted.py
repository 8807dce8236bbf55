"""Fitted: what a run of `fit` ends with."""

from typing import Any, Generic, NamedTuple, TypeVar

from funcrec.loop._epochs import history_figure, history_html

S = TypeVar("S")  # a state


class Fitted(NamedTuple, Generic[S]):
    """The result of `fit`.

    state: the state after the last step.
    best: the parameters of the best epoch by `monitor`, whole and in memory of their own. They are the parameters of
      `state` if there is no monitor, or if its number was always NaN.
    history: one dict per epoch: "epoch", "loss", "steps", "seconds", "steps_per_s" (without the first step, which may
      compile), and the numbers of `evaluate`. "loss" is the mean over the epoch's steps, and over members if a step
      gives a loss for each member. If steps give no loss, it is absent.
    stopped: the number from `stop` that ended the run, else 0.

    Example:
      >>> import torch, funcrec as fr
      >>> add = lambda total, batch: (total + batch, {"loss": 1 / (1 + total)})
      >>> done = fr.fit(add, torch.tensor(0.0), [1.0, 2.0], epochs=2, monitor="loss", mode="min")
      >>> done.state, done.best, round(done.history[1]["loss"], 3)
      (tensor(6.), tensor(6.), 0.225)
    """

    state: S
    best: Any
    history: list[dict[str, float]]
    stopped: int = 0

    def _repr_html_(self) -> str:
        """Return the history as HTML for a notebook."""
        return history_html(self.history)

    def plot(self) -> Any:
        """Return a matplotlib Figure, which is not shown: the loss by epoch, and next to it the numbers of `evaluate`.

        Raises:
          ImportError: if matplotlib is not installed.
        """
        return history_figure(self.history)
