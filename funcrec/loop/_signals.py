"""SIGINT and SIGTERM inside a loop: the first asks for an end between two steps, the second is the end."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def listen() -> Iterator[Callable[[], int]]:
    """Inside the block the first signal is only heard; behind it the handlers are what they were.

    Yields: asked, a function () -> the first signal's number, 0 for none. In another thread than the main one, which
      signals do not reach, it is always 0.

    Raises: from the second signal, what `end` raises.

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

    def handler(signum: int, frame: object) -> None:
        if heard:
            end(signum)
        heard.append(signum)

    before = {s: signal.signal(s, handler) for s in SIGNALS}
    try:
        yield lambda: heard[0] if heard else 0
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


def end(signum: int) -> None:
    """What the signal does in a program that does not listen: KeyboardInterrupt, or SystemExit with a shell's code."""
    raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)
