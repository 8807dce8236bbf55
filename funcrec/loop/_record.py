"""What a callback of `fit` is given."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Record(NamedTuple):
    """What a callback of `fit` is given.

    when: "begin" before the first step, when there is a checkpoint; "step" behind each step; "epoch" behind each epoch
    and its evaluation. epoch: its number. step: the steps since the beginning of the run. metrics: those of the step as
    it gave them (tensors: reading one waits for the device), or the epoch's entry of the history. state, params: as
    they are now, params (whole) at an epoch's end only; a donating step takes them away: copy what is to be kept.
    is_best: whether the epoch is the best so far. is_chief: whether this process is the one to print and write.

    Example:
      >>> import funcrec as fr
      >>> log = lambda record: print(record.step, record.metrics["loss"]) if record.when == "epoch" else None
      >>> log(fr.loop.Record("epoch", 0, 12, {"epoch": 0, "loss": 0.5}, state=None))
      12 0.5
    """

    when: str
    epoch: int
    step: int
    metrics: Mapping[str, Any]
    state: Any
    params: Any = None
    is_best: bool = False
    is_chief: bool = True
