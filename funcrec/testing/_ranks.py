"""RankPool: real ranks for tests, which stay alive between the tests.

A start of processes costs seconds, most of them for the import of torch. A call on running ranks costs milliseconds.
"""

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, set_debug_level

START_S = 120.0
GRACE_S = 2.0  # the time for other ranks once a rank has failed: they may wait for that rank in a collective
PRELOADED = ["funcrec", "torch.distributed.device_mesh"]


class RankError(AssertionError):
    """A rank failed. The text says which rank failed, and how."""


class RankPool:
    """A pool of `world` processes with a gloo group. Functions run in them as under torchrun.

    Args:
      world: the number of ranks.
      timeout_s: how long a collective waits for a missing rank.
      debug: whether to compare the ranks' calls before every collective, as `Mesh.distributed(debug=True)` does.

    A failing call ends the processes, and the next call starts new processes.

    Example:
      >>> from funcrec.testing import RankPool
      >>> import torch.distributed as dist
      >>> with RankPool(2) as pool:  # doctest: +SKIP
      ...     pool.run(dist.get_rank)
      [0, 1]
    """

    def __init__(self, world: int, *, timeout_s: float = 60.0, debug: bool = False):
        self.world = world
        self.timeout_s = timeout_s
        self.debug = debug
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.processes: list = []
        self.connections: list = []

    def run(self, fn: Callable[..., Any], *args: Any, deadline_s: float | None = None) -> list[Any]:
        """Return the results of fn(*args) on all ranks, in the order of the ranks.

        Args:
          fn: a function of a module, which can be sent by name.
          deadline_s: the longest wait for answers; None for four times `timeout_s`.

        Raises:
          RankError: if a rank raised, died or did not answer. The error names each such rank.
        """
        if not self.processes:
            self._start()
        for c in self.connections:
            c.send((fn, args))
        results, errors = self._collect(time.monotonic() + (deadline_s or 4 * self.timeout_s))
        if errors:
            self.kill()
            raise RankError("\n".join(f"rank {r}: {text}" for r, text in sorted(errors.items())))
        return results

    def _start(self) -> None:
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.world):
            own, theirs = self.context.Pipe()
            process = self.context.Process(
                target=_serve, args=(rank, self.world, store, theirs, self.timeout_s, self.debug), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(own)
        _, errors = self._collect(time.monotonic() + START_S)
        if errors:
            self.kill()
            raise RankError(f"the ranks did not start: {errors}")

    def _collect(self, end: float) -> tuple[list, dict[int, str]]:
        """Return (results, {rank: error}), from one answer of each rank."""
        waiting = {c: rank for rank, c in enumerate(self.connections)}
        results: list[Any] = [None] * self.world
        errors: dict[int, str] = {}
        while waiting:
            ready: list[Any] = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                errors |= dict.fromkeys(waiting.values(), "no answer")
                break
            for c in ready:
                rank = waiting.pop(c)
                try:
                    is_good, value = c.recv()
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(1)
                    is_good, value = False, f"the process ended with exit code {self.processes[rank].exitcode}"
                if is_good:
                    results[rank] = value
                else:
                    errors[rank] = value
                    end = min(end, time.monotonic() + self.timeout_s + GRACE_S)
        return results, errors

    def kill(self) -> None:
        """End the processes at once."""
        for p in self.processes:
            p.kill()
        for p in self.processes:
            p.join(5)
        self.processes, self.connections = [], []

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()


def _serve(rank: int, world: int, store: Path, connection: Any, timeout_s: float, debug: bool) -> None:
    gc.freeze()  # what was imported stays, and a pass over it is a tenth of what a rank compiles
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if debug:
        set_debug_level(DebugLevel.DETAIL)
    wait_s = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=wait_s)
    connection.send((True, None))
    while True:
        try:
            fn, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, fn(*args)))
        except BaseException as error:
            connection.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
