"""Saves during training: copies the part of a state that is left to write, and writes the copy in a thread.

    write all but `copy_bytes` of the state, copy the rest -> the call returns -> write the copy, rename

One save runs at a time: the next save waits for it, and raises its error. The end of the program also waits.
"""

import atexit
import concurrent.futures.thread  # noqa: F401, whose own end was registered first
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from funcrec.mesh import Ranks


class Saving:
    """A running save, returned by `save(..., asynchronous=True)`.

    path: the path of the future checkpoint. wait(): waits until the checkpoint is there, and returns the path. is_done:
      whether it is
    written, or the save has failed.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     saving = fr.save(folder + "/state.pt", {"w": torch.ones(2)}, asynchronous=True)
      ...     fr.load(saving.wait())
      {'w': tensor([1., 1.])}
    """

    def __init__(self, path: Path, run: Callable[[Callable[[], None]], Any], num_live: int):
        self.path = path
        self._error: BaseException | None = None
        self._left, self._is_copied, self._is_given_up = num_live, threading.Event(), False
        self._thread = threading.Thread(target=self._work, args=(run,), name=f"funcrec.save {path.name}")

    def _work(self, run: Callable[[Callable[[], None]], Any]) -> None:
        try:
            run(self._wrote)
        except BaseException as error:
            self._error = None if self._is_given_up else error  # after a given up save the caller already has an error
        finally:
            self._is_copied.set()

    def _wrote(self) -> None:
        if self._is_given_up and self._left > 0:
            raise InterruptedError("the call was interrupted, and what it was to write may have changed")
        self._left -= 1
        if self._left == 0:
            self._is_copied.set()

    def _start(self) -> "Saving":
        """Start the thread, and return the save once it no longer reads memory of the caller."""
        if not self._left:
            self._is_copied.set()
        self._thread.start()
        try:
            self._is_copied.wait()
        except BaseException:  # the caller may now change its memory, so the save is given up
            self._is_given_up = True
            raise
        return self

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is whole, and return its path.

        Raises:
          The error of the save, once: either here or at the next save.
        """
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path

    def __repr__(self) -> str:
        return f"Saving({str(self.path)!r}, {'done' if self.is_done else 'going on'})"


_last: list[Saving] = []
_groups: dict[Any, Any] = {}


def settle() -> None:
    """Wait for the last save.

    It raises the error of that save, unless the error was raised before.
    """
    while _last:
        _last.pop().wait()


def finish() -> None:
    """Wait until the last save has succeeded or failed, so that a reader finds the files of this process."""
    for saving in _last:
        saving._thread.join()


def go_on(path: Path, run: Callable[[Callable[[], None]], Any], num_live: int) -> Saving:
    """Return a save that calls run(wrote) in a thread, once `num_live` tensors are written.

    The thread calls `wrote` after each tensor.
    """
    saving = Saving(path, run, num_live)
    _last.append(saving)
    return saving._start()


def ranks_beside(ranks: Ranks) -> Ranks:
    """Return the same ranks with a group of their own, so that exchanges of a thread stay apart from those of training.

    All ranks call it.
    """
    if ranks.size == 1:
        return ranks
    world = dist.distributed_c10d._get_default_group()
    if world not in _groups:
        _groups.clear()
        _groups[world] = dist.new_group(backend="gloo")
    return Ranks.of_group(_groups[world])


def num_live(sizes: Sequence[int], copy_bytes: int | None) -> int:
    """Return the number of first tensors to write without a copy, so that copies of all other tensors fit."""
    total = sum(sizes)
    for i, size in enumerate(sizes):
        if copy_bytes is None or total <= copy_bytes:
            return i
        total -= size
    return len(sizes)


def copy_of(x: Tensor) -> Tensor:
    """Return a copy on the CPU with memory of its own."""
    plain = x.detach().cpu()
    return plain.clone() if plain.device == x.device else plain


# Before the threads of concurrent.futures end, which clients of stores need: an atexit function would come too late.
threading._register_atexit(finish)  # type: ignore[attr-defined]


@atexit.register
def _report_last() -> None:
    """Report, at the end of the program, an error for which no call waited."""
    for saving in _last:
        if saving._error is not None:
            print(f"funcrec.save: {saving.path} was not saved: {saving._error}", file=sys.stderr)
