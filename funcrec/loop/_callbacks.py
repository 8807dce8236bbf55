"""Callbacks of `fit`: functions of a Record that print or write its numbers."""

import csv
import json
import math
import os
from collections.abc import Callable, Mapping
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from funcrec.core import Count, describe, fail, typed


class Record(NamedTuple):
    """The argument of a callback of `fit`.

    when: "begin" before the first step (if there are checkpoints, after the first checkpoint), "step" after each
      step, "epoch" after each epoch and its evaluation.
    epoch: the number of the epoch.
    step: the number of steps since the beginning of the run.
    metrics: the metrics of the step, or the epoch's entry of the history. Metrics of a step are tensors: to read one
      waits for the device.
    state, params: the present values. `params` are whole, and given only at the end of an epoch. A donating step reuses
      the memory: copy what you keep.
    is_best: whether the epoch is the best epoch so far.
    is_chief: whether this process is the one that prints and writes.

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


@typed
def print_epoch(record: Record) -> None:
    """Print a line for each epoch: its number, the numbers of its entry, and "best" for the best epoch so far.

    Example:
      >>> import funcrec as fr
      >>> entry = {"epoch": 3, "loss": 0.25, "auc": 0.75}
      >>> fr.loop.print_epoch(fr.loop.Record("epoch", 3, 40, entry, None, is_best=True))
      epoch   3  loss 0.2500  auc 0.7500  best
    """
    if record.when == "epoch" and record.is_chief:
        hidden = ("epoch", "steps", "seconds")
        shown = {name: x for name, x in numbers_of(record.metrics).items() if name not in hidden}
        words = [f"{name} {x:,.4f}" if isinstance(x, float) else f"{name} {x:,}" for name, x in shown.items()]
        print(f"epoch {record.epoch:3d}", *words, *["best"] * record.is_best, sep="  ", flush=True)


@typed
def json_lines(path: str | os.PathLike[str]) -> Callable[[Record], None]:
    """Return a callback that appends the entry of each epoch to a file, as a line of JSON.

    A number that is not finite becomes null.

    Example:
      >>> import tempfile, pathlib, funcrec as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder) / "log.jsonl"
      ...     fr.loop.json_lines(path)(fr.loop.Record("epoch", 0, 10, {"epoch": 0, "loss": 0.5}, None))
      ...     path.read_text()
      '{"epoch": 0, "loss": 0.5}\\n'
    """
    path = Path(path)

    def write(record: Record) -> None:
        if record.when == "epoch" and record.is_chief:
            entry = {name: x if math.isfinite(x) else None for name, x in numbers_of(record.metrics).items()}
            with open(path, "a") as file:
                file.write(json.dumps(entry) + "\n")

    return write


@typed
def csv_lines(path: str | os.PathLike[str]) -> Callable[[Record], None]:
    """Return a callback that appends the entry of each epoch to a file, as a line of CSV.

    A new file gets a header.

    Raises:
      ValueError: from the callback, if the file has other columns.

    Example:
      >>> import tempfile, pathlib, funcrec as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder) / "log.csv"
      ...     fr.loop.csv_lines(path)(fr.loop.Record("epoch", 0, 10, {"epoch": 0, "loss": 0.5}, None))
      ...     path.read_text().split()
      ['epoch,loss', '0,0.5']
    """
    path = Path(path)

    def write(record: Record) -> None:
        if record.when == "epoch" and record.is_chief:
            entry, is_new = numbers_of(record.metrics), not path.exists() or not path.stat().st_size
            if not is_new:
                with open(path, newline="") as file:
                    header = next(csv.reader(file))
                if header != list(entry):
                    call, what, hint = "funcrec.loop.csv_lines", f"`{path}` has other columns.", "another path"
                    fail(call, what, got=f"{header}", need=f"{list(entry)}", hint=hint)
            with open(path, "a", newline="") as file:
                rows = csv.writer(file)
                rows.writerows([list(entry)] * is_new + [list(entry.values())])

    return write


@typed
def tensorboard(writer: Any, *, every: Count | None = None) -> Callable[[Record], None]:
    """Return a callback that writes the numbers of each epoch to TensorBoard, and the numbers of every `every`th step.

    Args:
      writer: a folder, for torch.utils.tensorboard (which must be installed), or a writer of your own with
        `add_scalar(name, number, step)`.
      every: a number of steps; None to write numbers of epochs only. To read a number of a step waits for the device.

    Example:
      >>> import funcrec as fr
      >>> class Writer:
      ...     def add_scalar(self, name, number, step):
      ...         print(name, number, step)
      >>> log = fr.loop.tensorboard(Writer(), every=10)
      >>> log(fr.loop.Record("step", 0, 10, {"loss": 0.5}, None))
      step/loss 0.5 10
      >>> log(fr.loop.Record("epoch", 0, 12, {"epoch": 0, "auc": 0.75}, None))
      epoch/auc 0.75 0
    """
    call = "funcrec.loop.tensorboard"
    if not isinstance(writer, str | os.PathLike) and not callable(getattr(writer, "add_scalar", None)):
        need = "a folder, or a writer with `add_scalar`"
        fail(call, "`writer` is not a writer.", got=describe(writer), need=need, hint="'runs/one'", kind=TypeError)
    made: list[Any] = []  # the writer, made at the first record, in the process that writes

    def write(record: Record) -> None:
        is_due = record.when == "epoch" or (every is not None and record.step % every == 0)
        if record.is_chief and is_due:
            made[:] = made or [open_writer(writer)]
            at = record.epoch if record.when == "epoch" else record.step
            for name, x in numbers_of(record.metrics).items():
                if name != "epoch":
                    made[0].add_scalar(f"{record.when}/{name}", x, at)
            if record.when == "epoch" and hasattr(made[0], "flush"):
                made[0].flush()

    return write


def open_writer(writer: Any) -> Any:
    if not isinstance(writer, str | os.PathLike):
        return writer
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        need, hint = "tensorboard, which torch.utils.tensorboard imports", "pip install tensorboard"
        fail("funcrec.loop.tensorboard", "tensorboard is missing.", got=f"{error}", need=need, hint=hint)
    return SummaryWriter(os.fspath(writer))


def numbers_of(metrics: Any) -> dict[str, float]:
    """Return {name: number} of the metrics that are numbers or tensors of one element."""
    entries = metrics.items() if isinstance(metrics, Mapping) else ()
    is_number = lambda x: isinstance(x, Number) or (isinstance(x, Tensor) and x.numel() == 1)
    return {str(n): x.item() if isinstance(x, Tensor) else x for n, x in entries if is_number(x)}
