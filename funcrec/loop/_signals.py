"""SIGINT and SIGTERM inside a loop: the first signal requests an end between two steps, the second ends at once.

Under torchrun one request may reach a rank twice: directly, and through the launcher, which also received it.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_S = 5.0


@contextlib.contextmanager
def listen() -> Iterator[Callable[[], int]]:
    """Note the first signal while the body of the `with` statement runs, and then restore the old handlers.

    A signal that the process ignores stays ignored.

    Yields:
      asked, a function () -> the number of the first signal, or 0. Signals reach only the main thread: in other
      threads the number is always 0.

    Raises:
      KeyboardInterrupt, SystemExit: from the second signal on. Under torchrun only if the signal comes 5 seconds later.

    Example:
      >>> import os, signal, funcrec as fr
      >>> with fr.loop.listen() as asked:
      ...     os.kill(os.getpid(), signal.SIGTERM)
      ...     signal.Signals(asked()).name
      'SIGTERM'
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    heard: list[int] = []
    since, same_s = 0.0, SAME_S if torch.distributed.is_torchelastic_launched() else 0.0

    def handler(signum: int, frame: object) -> None:
        nonlocal since
        if not heard:
            heard.append(signum)
            since = time.monotonic()
        elif time.monotonic() - since >= same_s:
            end(signum, before[signum])

    before: dict[int, Any] = {}
    before |= {s: signal.signal(s, handler) for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}
    try:
        yield lambda: heard[0] if heard else 0
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


def end(signum: int, handler: object) -> None:
    """Do what the signal does in a program that does not call `listen`.

    It calls the program's own handler, or else raises KeyboardInterrupt, or SystemExit with the exit code of a shell.
    """
    if callable(handler) and handler is not signal.default_int_handler:
        handler(signum, None)
        return
    raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)
