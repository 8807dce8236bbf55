"""An iterator whose next items a thread makes while the current item is in use.

list(prefetch(items)) == list(items)
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from funcrec.core import Count, Device, Problem, check, describe, map_tensors, sure, tree_leaves, typed

S = TypeVar("S")
T = TypeVar("T")


@typed
def prefetch(
    items: Iterable[T], *, depth: Count = 2, pin_memory: bool = False, device: Device | None = None
) -> Iterator[T]:
    """Return an iterator over `items`, of which up to `depth` are ready ahead of the consumer.

    Args:
      items: any iterable of trees of tensors, such as `batches(...)`. Only the thread uses it.
      depth: the number of items that are kept ready, 1 or more. The thread may be making one item more.
      pin_memory: copy CPU tensors into page-locked memory. A copy from there to a GPU does not block the host.
      device: where the tensors go. A separate stream copies them to a GPU. The consumer's stream waits for the copy,
        and the host does not.

    Returns:
      an iterator. Its thread starts with the first item. The thread ends with the last item, or when the iterator is
      closed or dropped. An exception of `items` is raised in place of its item. Only one thread at a time may take
      items: a second thread that takes items meanwhile gets ValueError, as with any generator.

    Raises:
      TypeError, ValueError: an argument does not fit, or the GPU is not there. The call raises before a thread starts.

    Law: the iterator returns the same items in the same order as `items`.

    Example:
      >>> from funcrec.data import prefetch
      >>> list(prefetch(range(3)))
      [0, 1, 2]
    """
    check("funcrec.data.prefetch", _item_problems(items), device_problems(device))
    return _consume(items, depth, pin_memory, None if device is None else torch.device(device))


def in_threads(make: Callable[[S], T], items: Iterable[S], workers: int, depth: int) -> Iterator[T]:
    """Yield the results of map(make, items), made in `workers` threads ahead of the consumer.

    At most `depth` results wait, or as many as there are threads if these are more.

    Law: the results come in the order of the items. An exception is raised in place of its result.
    """
    with ThreadPoolExecutor(workers, thread_name_prefix="funcrec.data.loader") as pool:
        waiting: deque = deque()
        try:
            for item in items:
                waiting.append(pool.submit(make, item))
                if len(waiting) > max(workers, depth):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for one in waiting:
                one.cancel()


class _Ready:
    """State that both threads share: the ready items, whether the source ended and its error, whether to go on."""

    def __init__(self):
        self.items, self.changed = deque(), threading.Condition()
        self.ended, self.wanted = False, True
        self.error: BaseException | None = None


def _consume(items: Iterable[T], depth: int, pin_memory: bool, device: torch.device | None) -> Iterator[T]:
    ready = _Ready()
    work = lambda: _produce(items, ready, depth, pin_memory, device)
    thread = threading.Thread(target=work, name="funcrec.data.prefetch", daemon=True)
    thread.start()
    try:
        while True:
            with ready.changed:
                ready.changed.wait_for(lambda: ready.items or ready.ended)
                if not ready.items:
                    break
                item, copied = ready.items.popleft()
                ready.changed.notify_all()
            if copied is not None:
                _await_copy(item, copied, sure(device))
            yield item
        if ready.error is not None:
            raise ready.error
    finally:
        with ready.changed:
            ready.wanted = False
            ready.changed.notify_all()
        thread.join()


def _produce(source: Iterable, ready: _Ready, depth: int, pin_memory: bool, device: torch.device | None) -> None:
    items = None
    try:
        items = iter(source)
        stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        for item in items:
            made = _move(item, pin_memory, device, stream)
            with ready.changed:
                ready.changed.wait_for(lambda: len(ready.items) < depth or not ready.wanted)
                if not ready.wanted:
                    break
                ready.items.append(made)
                ready.changed.notify_all()
    except BaseException as error:
        ready.error = error
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()  # a generator's `finally` runs in the thread that ran the generator
        with ready.changed:
            ready.ended = True
            ready.changed.notify_all()


def _move(item, pin_memory: bool, device: torch.device | None, stream):
    """Return the item on `device`, and the event that marks the end of its copy, or None."""
    if pin_memory:
        item = map_tensors(lambda x: x.pin_memory() if x.device.type == "cpu" else x, item)
    if device is None:
        return item, None
    if stream is None:
        return map_tensors(lambda x: x.to(device), item), None
    with torch.cuda.stream(stream):
        return map_tensors(lambda x: x.to(device, non_blocking=True), item), stream.record_event()


def _await_copy(item, copied, device: torch.device) -> None:
    """Make the consumer's stream wait for the copy, and keep the memory until that stream is done with it."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(copied)
    for x in tree_leaves(item):
        if isinstance(x, torch.Tensor) and x.is_cuda:
            x.record_stream(stream)


def device_problems(device: Device | None) -> Iterator[Problem]:
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        got, need = f"{str(device)!r}, and no GPU that torch can use", "a device of this machine"
        yield Problem("`device` is not available.", got, need, "device=None, or 'cpu'")


def _item_problems(items: Iterable) -> Iterator[Problem]:
    if isinstance(items, torch.Tensor) and not items.dim():
        yield Problem("`items` cannot be iterated.", describe(items), "an iterable of batches", kind=TypeError)
