"""Makes batches ready before a step takes them: fetches them, agrees on them with all ranks, and exchanges ids.

    thread:  fetch(j) → say(j) → ahead(batch j)        for j < taken + depth
    loop:    take(i)  → rest(state, batch i, routed i)
On CUDA, where a launch takes no time, the loop launches ahead(batch i + 1) on a separate stream before rest(i).

The exchanges over the groups of the thread depend on what the loops did, never on time. The number of batches that the
loop has taken decides which batches may be fetched. The steps before decide which program routes a batch, or that no
program does.
"""

import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from funcrec.compile import Halves, form_key
from funcrec.core import Problem, fail, fast_flatten, map_tensors, message
from funcrec.jagged import KeyedJaggedTensor
from funcrec.mesh import Ranks, Twins, digest, form_text, say, words_of
from funcrec.tables import Batch

LEAVE_S = 1.0  # how long a leaving rank waits until other ranks join its thread's exchanges


class BatchNews(IntEnum):
    """A rank's message to the other ranks about its next batch."""

    HAS = 0
    ENDED = 1  # the rank has no batch, and no blank batch
    BLANK = 2  # the rank goes on with a blank batch, if other ranks have batches
    CLOSED = 3
    FAILED = 4


class Ready:
    """A batch that `ahead` made ready. Pass it to the pipeline once, instead of the batch.

    number: the number of the batch.
    form: the shapes of the batch.
    routed: the result of `Halves.ahead`, valid after `is_done`. None if nothing was exchanged: the step then takes the
      batch without routes.
    halves: the Halves of the step that routed the batch.
    """

    def __init__(self, source: "Ahead", number: int, batch: Any, form: Any):
        self.source, self.number, self.batch, self.form = source, number, batch, form
        self.is_done, self.versions = False, list[int]()
        self.halves: Any = None
        self.routed: Any = None
        self.sent: Any = None

    def __repr__(self) -> str:
        return f"Ready({self.batch!r})"

    def __getattr__(self, name: str):
        """Raise for other names. They are fields of the batch, and names of this class hide some of these fields."""
        if name.startswith("__"):
            raise AttributeError(name)
        got, need = f"`.{name}` of {type(self).__name__}", "the batch in it"
        what, hint = "a batch that is ready has no fields of its own.", f"batch.batch.{name}"
        fail(self.source.call, what, got=got, need=need, hint=hint, kind=AttributeError)


class Ahead:
    """An iterator that makes batches ready in a thread.

    The thread ends after the last batch, or when the iterator is closed.
    """

    def __init__(
        self,
        call: str,
        batches: Iterable[Any],
        depth: int,
        twins: Twins | None,
        blank: Callable[..., Any],
        stream: Any = None,
    ):
        self.call, self.batches, self.depth, self.twins = call, batches, depth, twins
        self.blank, self.stream = blank, stream
        # `with self.lock` runs in C. After an interrupt within the condition's own `with`, the lock would stay held.
        self.lock, self.thread = threading.RLock(), None
        self.changed = threading.Condition(self.lock)
        self.ready: deque[Ready] = deque()
        self.taken, self.last, self.limit = 0, None, 0
        # permits: {number of a batch: its programs, {form: Halves}, or None before the first step}
        self.programs, self.permits, self.skipped = None, {}, set()
        self.closing, self.ended, self.error = False, False, None

    # -- the loop's side -----------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Ready]:
        """Yield the batches, and close the iterator when the loop leaves or drops it."""
        try:
            while (one := self.take()) is not None:
                yield one
                del one
        finally:
            self.close()

    def take(self) -> Ready | None:
        """Return the next batch; None after the last batch."""
        with self.lock:
            if self.last is not None:  # no step took it, so no program has routed it
                self.skip(self.last)
            self.last = None
            for number in range(self.limit, self.taken + 1 + self.depth):
                self.permits[number] = self.programs
            self.limit = max(self.limit, self.taken + 1 + self.depth)
            self.changed.notify_all()
        if self.thread is None and not self.closing:
            around = contextvars.copy_context()  # the loader's `with mesh:`
            self.thread = threading.Thread(target=lambda: around.run(self.work), name=self.call, daemon=True)
            self.thread.start()
        with self.lock:
            self.changed.wait_for(lambda: self.ready or self.ended or self.closing)
            if self.closing:
                raise RuntimeError(message(self.call, [OTHER]))
            if self.ready:
                self.taken += 1
                self.last = self.ready.popleft()
                return self.last
        if self.error is not None:
            raise self.error
        return None

    def begin(self, one: Ready, programs: dict[Any, Any]) -> bool:
        """Return whether a step of these programs routes the batch, now or once the programs hold its form."""
        with self.lock:
            self.programs = programs
            self.permits = {n: programs if own is None else own for n, own in self.permits.items()}
            mine = self.permits.get(one.number) is programs and one.number not in self.skipped
            if not mine:
                self.skip(one)
            self.last = None
            self.changed.notify_all()
            return mine

    def skip(self, one: Ready) -> None:
        if one.form not in (self.permits.get(one.number) or {}):
            self.skipped.add(one.number)
            self.changed.notify_all()

    def add(self, programs: dict[Any, Any], form: Any, halves: Any) -> None:
        with self.lock:
            programs[form] = halves
            self.changed.notify_all()

    def wait(self, one: Ready) -> None:
        """Wait until the batch is routed."""
        with self.lock:
            self.changed.wait_for(lambda: one.is_done or self.ended)
        if not one.is_done:
            raise self.error or RuntimeError(message(self.call, [GONE]))
        self.permits.pop(one.number, None)

    def following(self) -> Ready | None:
        """Return the batch after the last taken batch, and do not take it; None if there is no such batch.

        All ranks return the batch of one number, or None.
        """
        with self.lock:
            self.changed.wait_for(lambda: self.ready or self.ended)
            return self.ready[0] if self.ready else None

    def close(self, wait_s: float | None = LEAVE_S) -> None:
        """End the thread, after the exchanges that the other ranks' threads wait for.

        These exchanges may in turn wait for the loop of this rank. Then `close` returns, and the thread ends with
        the threads of other ranks.
        """
        with self.lock:
            self.closing = True
            self.changed.notify_all()
        if self.thread is not None:
            with contextlib.suppress(RuntimeError):  # an interrupt stopped its start: a begun thread ends by itself
                self.thread.join(None if self.twins is None else wait_s)
            if self.thread.is_alive():  # the thread still reads what other threads have begun
                return
        self.ready.clear()
        self.permits.clear()

    # -- the thread's --------------------------------------------------------------------------------------------

    def work(self) -> None:
        items = None
        try:
            items = iter(self.batches)
            for one in self.common_batches(items):
                self.route(one)
        except BaseException as error:
            self.error = error
        finally:
            try:
                close = getattr(items, "close", None)
                if close is not None:
                    close()
            except BaseException as error:
                self.error = self.error or error
            with self.lock:
                self.ended = True
                self.changed.notify_all()

    def common_batches(self, items: Iterator[Any]) -> Iterator[Ready]:
        """Yield the batches of this rank for as long as all ranks have batches."""
        number, like = 0, None
        while True:
            with self.lock:
                self.changed.wait_for(lambda: number < self.limit or self.closing)  # noqa: B023
                if number >= self.limit:  # the iterator closes, and no rank waits for this batch
                    return
            told, batch, error = self.fetch(items, like)
            has = told in (BatchNews.HAS, BatchNews.BLANK)
            is_cut = has and self.twins is not None
            form, text = (form_key(*fast_flatten(batch)), form_text(batch)) if is_cut else (None, "")
            if not self.is_go(told, number, text, error):
                return
            one, like = Ready(self, number, batch, form), batch
            with self.lock:
                self.ready.append(one)
                self.changed.notify_all()
            yield one
            number += 1

    def fetch(self, items: Iterator[Any], like: Any) -> tuple[BatchNews, Any, BaseException | None]:
        if self.closing:
            return BatchNews.CLOSED, None, None
        try:
            return BatchNews.HAS, next(items), None
        except StopIteration:
            try:
                filler = None if like is None or self.twins is None else self.blank(like)
            except BaseException as error:
                return BatchNews.FAILED, None, error
            return BatchNews.ENDED if filler is None else BatchNews.BLANK, filler, None
        except BaseException as error:
            return BatchNews.FAILED, None, error

    def is_go(self, own: BatchNews, number: int, form: str, error: BaseException | None) -> bool:
        """Return whether all ranks go on with this batch. All ranks raise if a rank cannot."""
        ranks = Ranks() if self.twins is None else self.twins.ranks
        of_all = say((int(own), digest(form), None if error is None else words_of(error)), ranks)
        who = lambda *kinds: [r for r, (x, _, _) in enumerate(of_all) if x in kinds]
        if error is not None:
            raise error
        if own == BatchNews.CLOSED or not who(BatchNews.HAS, BatchNews.FAILED, BatchNews.CLOSED):
            return False
        if failed := who(BatchNews.FAILED):
            what, need, hint = "the batches of another rank ended in an error.", "batches on every rank", "its loader"
            got = "; ".join(f"rank {r} raised {of_all[r][2]}" for r in failed)
            raise RuntimeError(message(self.call, [Problem(what, got, need, hint)]))
        if closed := who(BatchNews.CLOSED):
            what, got = "another rank has left its loop.", f"ranks {closed} have, this one goes on"
            raise RuntimeError(message(self.call, [Problem(what, got, "the same steps on every rank")]))
        if bare := who(BatchNews.ENDED):
            what = "the ranks have different numbers of batches."
            got = f"ranks {bare} have no more, ranks {who(BatchNews.HAS)} have"
            hint = "batches of fr.Batch with weights, or blank=lambda batch: one of that form that counts for nothing"
            if not number:
                hint = "a batch for every rank: those have had none, of which a blank one could be made"
            raise ValueError(message(self.call, [Problem(what, got, "as many on all, or blank ones", hint)]))
        if len({form for _, form, _ in of_all}) > 1:
            what, got = "the ranks' batches have different forms.", f"{form or 'no leaves'} here, another elsewhere"
            hint = "the same keys, pad_to of one capacity, and batches of one size"
            raise ValueError(message(self.call, [Problem(what, got, "one form on all ranks", hint)]))
        return True

    def route(self, one: Ready) -> None:
        """Exchange the ids of the batch, for which it waits for a program for the batch's form."""
        if self.stream is not None or self.twins is None:
            return
        with self.lock:
            own = lambda: self.permits.get(one.number) or {}
            self.changed.wait_for(lambda: one.form in own() or one.number in self.skipped or self.closing)
            halves = None if one.number in self.skipped else own().get(one.form)
        send(one, halves)
        with self.lock:
            one.is_done = True
            self.changed.notify_all()

    # -- on CUDA -------------------------------------------------------------------------------------------------

    def launch(self, one: Ready, programs: dict[Any, Any]) -> None:
        """Exchange the ids of this batch and of the next batch on the side stream.

        One thread exchanges them, in the same order on all ranks, because exchanges go over several communicators.
        """
        following = self.following()
        current = torch.cuda.current_stream(self.stream.device)
        for x in (one, following):
            if x is not None and not x.is_done and self.permits.get(x.number) is programs and x.form in programs:
                self.stream.wait_stream(current)  # waits for the batch's copy and all earlier launches
                with torch.cuda.stream(self.stream):
                    send(x, programs[x.form])
                    x.sent = self.stream.record_event()
                x.is_done = True
                for t in fast_flatten(x.batch)[0]:
                    if isinstance(t, Tensor) and t.is_cuda:
                        t.record_stream(self.stream)
        current.wait_event(one.sent)
        for t in one.routed or ():
            t.record_stream(current)


def send(one: Ready, halves: Halves | None) -> None:
    """Exchange the ids of the batch.

    It does nothing without a program, or without ids to exchange.
    """
    if halves is not None:
        one.halves, one.versions = halves, versions_of(halves)
        one.routed = halves.ahead(one.batch)


def versions_of(halves: Halves) -> list[int]:
    return [0 if x.is_inference() else x._version for x in halves.read]


GONE = Problem("a batch is not ready.", "batches that were closed before it was", "one of `pipe.ahead(...)` under way")


OTHER = Problem(
    "the pipeline has begun with other batches.",
    "batches of `ahead` or `run` before",
    "one at a time",
    "a pipeline each",
)


def blank(batch: Any) -> Any:
    """Return a batch of that form that counts for nothing, with weights 0 and bags without ids.

    It is None if the batch has no weights.
    """
    if not isinstance(batch, Batch) or not isinstance(batch.weight, Tensor):
        return None
    zeros = map_tensors(torch.zeros_like, batch)
    return zeros if isinstance(batch.ids, KeyedJaggedTensor) else None
