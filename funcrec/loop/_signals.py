"""SIGINT and SIGTERM inside a loop: the first signal requests an end between two steps, the second ends at once.

Under torchrun one request may reach a rank twice: directly, and through the launcher, which received it, too.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_S = 5.0


@contextlib.contextmanager
def listen() -> Iterator[Callable[[], int]]:
    """Inside the block the first signal is only noted; after it the old handlers are back.

    A signal that the process ignores stays ignored.

    Yields:
      asked, a function () -> the first signal's number, 0 for none. Signals do not reach other threads than the main
      one: there it is always 0.

    Raises:
      KeyboardInterrupt, SystemExit: from the second signal on; under torchrun only if it comes 5 seconds later.

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

    before = {s: signal.signal(s, handler) for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}
    try:
        yield lambda: heard[0] if heard else 0
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


def end(signum: int, handler: object) -> None:
    """Do what the signal does in a program that does not listen.

    That is its own handler's work, or else KeyboardInterrupt, or SystemExit with a shell's code.
    """
    if callable(handler) and handler is not signal.default_int_handler:
        handler(signum, None)
        return
    raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)
