"""Updates of weights that other threads read. A delta is applied whole, between two calls, or not at all.

tensors[name][rows] = values          while no thread reads
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

from torch import Tensor

from funcrec.serve.freshness._delta_file import Change, read_changes


def permits(free: SimpleQueue, count: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return (take, give) for `count` permits of a queue, for use as `try: take() ... finally: give()`.

    Both run entirely in C. So an interrupt falls before or after them, or while `take` waits. `give` returns the
    permits that `take` has taken until then.
    """
    held: list[bool] = []
    return partial(held.extend, islice(iter(free.get, None), count)), partial([].extend, map(free.put, held))


def applied(
    call: str,
    path: Path,
    manifest: Mapping,
    tensors: Mapping[str, Tensor],
    version: str,
    alone: tuple[Callable, Callable],
    name: Callable,
) -> None:
    """Write a delta to the tensors of `version`, and call `name` with the new version.

    No other thread reads these tensors between the two calls of `alone`. Before the first call, the file is read and
    checked against the package. If the write fails or is interrupted, every bit stays as it was.
    """
    changes, to = read_changes(call, path, manifest["params"], manifest["digest"], version)
    now = lambda n, rows: (tensors[n] if rows is None else tensors[n][rows]).clone()
    take, give = alone
    try:
        take()
        before = {n: Change(c.rows, now(n, c.rows)) for n, c in changes.items()}
        try:
            put(tensors, changes)
            name(to)
        except BaseException:
            put(tensors, before)
            name(version)
            raise
    finally:
        give()


def put(tensors: Mapping[str, Tensor], changes: Mapping[str, Change]) -> None:
    for n, (rows, values) in changes.items():
        if rows is None:
            tensors[n].copy_(values)
        else:
            tensors[n][rows] = values
