"""The next items of an iterator, made in a thread while the current one is used.

list(prefetch(items)) == list(items)
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from funcrec.core import Count, Device, Problem, check, describe, map_tensors, tree_leaves, typed

S = TypeVar("S")
T = TypeVar("T")


@typed
def prefetch(
    items: Iterable[T], *, depth: Count = 2, pin_memory: bool = False, device: Device | None = None
) -> Iterator[T]:
    """Return `items`, with up to `depth` of them ready ahead of the consumer.

    Args:
      items: any iterable of trees of tensors, such as `batches(...)`; only the thread touches it.
      depth: items kept ready, 1 or more; the thread may be making one more.
      pin_memory: copy CPU tensors into page-locked memory, from which a copy to a GPU does not wait.
      device: where the tensors go. A separate stream copies them to a GPU, and the consumer's stream awaits the copy:
        the host does not wait.

    Returns:
      an iterator. Its thread starts with the first item, and ends with the last, or when the iterator is closed or
      dropped. An exception of `items` is raised in place of its item. Only one thread at a time may take items: a
      second one that asks while the first waits gets ValueError, as with any generator.

    Raises:
      TypeError, ValueError: an argument does not fit, or the GPU is not there; raised before the thread starts.

    Law: the same items in the same order.

    Example:
      >>> from funcrec.data import prefetch
      >>> list(prefetch(range(3)))
      [0, 1, 2]
    """
    check("funcrec.data.prefetch", _item_problems(items), device_problems(device))
    return _consume(items, depth, pin_memory, None if device is None else torch.device(device))


def in_threads(make: Callable[[S], T], items: Iterable[S], workers: int, depth: int) -> Iterator[T]:
    """Run map(make, items) in `workers` threads, with up to `depth` results, or one per thread, ahead of the consumer.

    Law: the same results in the same order; an exception is raised in place of its result.
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
    """State that the two threads share: items made and not yet taken, the end with its error, whether to go on."""

    def __init__(self):
        self.items, self.changed = deque(), threading.Condition()
        self.ended, self.error, self.wanted = False, None, True


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
                _await_copy(item, copied, device)
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
        if hasattr(items, "close"):
            items.close()  # runs a generator's `finally` in the thread that ran the generator
        with ready.changed:
            ready.ended = True
            ready.changed.notify_all()


def _move(item, pin_memory: bool, device: torch.device | None, stream):
    """Return (the item on `device`, the event after which its copy is done, or None)."""
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
        yield Problem("`device` is not there.", got, need, "device=None, or 'cpu'")


def _item_problems(items: Iterable) -> Iterator[Problem]:
    if isinstance(items, torch.Tensor) and not items.dim():
        yield Problem("`items` cannot be iterated.", describe(items), "an iterable of batches", kind=TypeError)
