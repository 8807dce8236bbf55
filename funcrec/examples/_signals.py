"""SIGINT and SIGTERM. The first signal asks the program to end between two steps. A second signal ends it at once.

    with listen() as heard:     before heard.hold(), a signal ends the program;
                                after it, heard.asked() returns the number of the first signal

Python handles a signal only while its main thread runs Python code. So a separate thread reads signals from a pipe.
This thread can end a program that waits for other ranks: at a second signal, or at the first signal while there is
nothing to save. Exit codes follow the shells: 128 + the signal.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_S = 1.0  # the program and its group may both get one request
SAME_LAUNCHED_S = 5.0  # a scheduler signals the program and its launcher, which passes the signal on
LEAVE_S = 2.0  # time for a main thread that runs Python to end, after a signal before hold()


class Heard(NamedTuple):
    """asked: () -> the first signal, 0 for none. hold: () -> None; after this call there is something to save."""

    asked: Callable[[], int]
    hold: Callable[[], None]


@contextlib.contextmanager
def listen(same_s: float | None = None) -> Iterator[Heard]:
    """Listen for signals inside the block. Signals within `same_s` seconds of the first count as the same request."""
    if same_s is None:
        same_s = SAME_LAUNCHED_S if torch.distributed.is_torchelastic_launched() else SAME_S
    if threading.current_thread() is not threading.main_thread():
        yield Heard(lambda: 0, lambda: None)
        return
    first: list[tuple[int, float]] = []
    is_held, is_left = threading.Event(), threading.Event()

    def handler(signum, frame):
        note(signum)
        if not is_held.is_set():
            raise SystemExit(128 + signum)

    def note(signum):
        if not first:
            first.append((signum, time.monotonic()))

    def read_signals():
        while heard := os.read(source, 64):
            for signum in (s for s in heard if s in SIGNALS):
                if first and time.monotonic() - first[0][1] > same_s:
                    os.write(2, b"a second signal: ended at once; the last checkpoint is whole\n")
                    os._exit(128 + signum)
                note(signum)
                if not is_held.is_set() and not is_left.wait(LEAVE_S) and not is_held.is_set():
                    os._exit(128 + signum)

    source, sink = os.pipe()
    os.set_blocking(sink, False)
    thread = threading.Thread(target=read_signals, name="funcrec.signals", daemon=True)
    thread.start()
    before = {s: signal.signal(s, handler) for s in SIGNALS}
    wakeup = signal.set_wakeup_fd(sink)
    try:
        yield Heard(lambda: first[0][0] if first else 0, is_held.set)
    finally:
        is_left.set()
        signal.set_wakeup_fd(wakeup)
        for signum, old in before.items():
            signal.signal(signum, old)
        os.close(sink)
        thread.join()
        os.close(source)
