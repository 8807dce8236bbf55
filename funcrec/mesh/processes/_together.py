"""Exchanges between ranks outside of programs: all ranks get the value of every rank, and learn of a rank's failure.

    say(x) = [x of rank 0, ..., x of rank n-1]        together(work) = say(work()), or an error on every rank

The timeout of the process group ends the wait for a rank that does not come. Two things do not use this file, because
their ranks cannot wait for an exchange: the beats of `loop.watch`, and the forms of programs in `_alike`.
"""

import functools
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from funcrec.core import Problem, check, message, outside_transforms, sure
from funcrec.mesh._mesh import Mesh

T = TypeVar("T")
P = ParamSpec("P")
LONGEST = 200  # characters of a transport's error
KINDS: dict[str, type[Any]] = {
    k.__name__: k for k in (OSError, ValueError, TypeError, KeyError, IndexError, MemoryError, RuntimeError)
}
NUM_SAID: Counter[int] = Counter()  # how often each thread has called `say`
SIZE_BYTES, HEAD_BYTES = 8, 256  # a value of at most 248 bytes travels in one collective
MAPPED = "run a mapped function (such as a step)"
MOST_WORDS = 500  # characters of an error that other ranks report


class Ranks(NamedTuple):
    """Processes that exchange values with each other; without groups, this process alone.

    groups: one for each axis on which the ranks lie; the last axis runs fastest. device: where the bytes lie for the
    exchange.
    """

    rank: int = 0
    size: int = 1
    groups: tuple[dist.ProcessGroup, ...] = ()
    device: torch.device | str = "cpu"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @staticmethod
    def of(mesh: Mesh | None, device: torch.device | str | None = None) -> "Ranks":
        """Return the ranks of a mesh, over the groups of its axes.

        Without real ranks it returns this process alone.
        """
        if mesh is None or mesh.device_mesh is None:
            return Ranks()
        groups = [mesh.device_mesh.get_group(name) for name in mesh.axis_names]
        return Ranks(dist.get_rank(), mesh.size, tuple(groups), device or device_of(groups[0]))

    @staticmethod
    def of_group(group: dist.ProcessGroup | None) -> "Ranks":
        """Return the ranks of a process group. For None it returns all ranks of the default group."""
        group = sure(dist.group.WORLD if group is None else group)
        return Ranks(dist.get_rank(group), dist.get_world_size(group), (group,), device_of(group))


class Failure(NamedTuple):
    """The error of a rank, as the other ranks report it. kind: the name of a builtin class of the error."""

    kind: str
    errno: int | None
    words: str

    @staticmethod
    def of(error: BaseException) -> "Failure":
        kind = next((n for n, k in KINDS.items() if isinstance(error, k)), "RuntimeError")
        return Failure(kind, getattr(error, "errno", None), words_of(error))


class Told(NamedTuple):
    """What a rank says where ranks compare what they do.

    text: its result, pickled. doing: words, or the number of the forms of a mapped function's arguments (`_alike`).
    """

    text: bytes
    failure: Failure | None
    doing: str | int


def words_of(error: BaseException) -> str:
    """Return the class and the text of an error, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MOST_WORDS]


def say(value: T, ranks: Ranks) -> list[T]:
    """Return the values of all ranks, in the order of the ranks.

    All ranks must call it, and for each group from one thread.

    One sender pickles its value, which may have any size. One receiver gets values of the types that were sent.

    Cost: one collective of 256 bytes for each axis, and a second collective if a value takes more than 248 bytes.
    """
    NUM_SAID[threading.get_ident()] += ranks.size > 1
    return of_all_ranks(value, ranks)


def of_all_ranks(value: T, ranks: Ranks) -> list[T]:
    """Return what `say` returns, within a call whose failure the other ranks learn of in another way."""
    values = [value]
    if ranks.size == 1:
        return values
    with outside_transforms():
        for group in reversed(ranks.groups):
            texts = _bytes_of_all(pickle.dumps(values), group, ranks.device)
            values = [x for text in texts for x in pickle.loads(text)]
    return values


def together(ranks: Ranks, call: str, doing: str, work: Callable[[], T]) -> list[T]:
    """Return the results of work() of all ranks, in the order of the ranks.

    Raises:
      This rank's own error, if work() failed here. If work() failed on another rank, an error of the same kind that
      names that rank.
      ValueError: the ranks do different things: one of them steps, say, and another one saves.
    """
    if ranks.size == 1:
        return [work()]
    text, error = b"", None
    try:
        text = pickle.dumps(work())
    except BaseException as raised:  # this includes interrupts, so that no other rank waits for this rank
        error = raised
    try:
        of_all = say(Told(text, None if error is None else Failure.of(error), doing), ranks)
    except RuntimeError as lost:
        if error is not None or (said := broken_off(call, lost)) is lost:
            raise
        raise said from lost
    finally:
        if error is not None:
            raise error
    failed = {rank: told.failure for rank, told in enumerate(of_all) if told.failure is not None}
    if failed:
        first, need, hint = next(iter(failed.values())), "every rank to", "what that rank says"
        problems = [Problem(f"rank {r} could not {doing}.", x.words, need, hint) for r, x in failed.items()]
        made = KINDS[first.kind](message(call, problems))
        if first.errno is not None:
            made.errno = first.errno
        raise made
    check(call, different_problems(of_all))
    return [pickle.loads(told.text) for told in of_all]


def different_problems(of_all: Sequence[Told]) -> Iterator[Problem]:
    """Report a rank that does something else than rank 0."""
    doing = [told.doing if isinstance(told.doing, str) else MAPPED for told in of_all]
    other = next((r for r, its in enumerate(doing) if its != doing[0]), None)
    if other is not None:
        got, need = f"rank 0 is to {doing[0]}, rank {other} to {doing[other]}", "the same calls on every rank"
        yield Problem("the ranks do different things.", got, need, "as many batches on every rank")


def broken_off(call: str, error: RuntimeError) -> RuntimeError:
    """Return an error with words for an exchange that the transport gave up, or `error` if it is another one."""
    text = str(error)
    if text.startswith("funcrec.") or not is_broken(error):
        return error
    need = "the same calls on every rank, as often as on this one, and all ranks alive until the last call"
    hint = "as many batches on every rank; read the errors of the other ranks first"
    return RuntimeError(message(call, [Problem("the other ranks did not take part.", text[:LONGEST], need, hint)]))


def is_broken(error: BaseException) -> bool:
    """Return whether the error, or its cause, comes from an exchange that another rank broke off.

    Errors of gloo name gloo's source files.
    """
    is_own = lambda e: isinstance(e, dist.DistError) or (isinstance(e, RuntimeError) and "gloo/" in f"{e}")
    return is_own(error) or is_own(error.__cause__)


def called_by_all_ranks(is_of_ranks: Callable[..., bool]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator for a function that all ranks call.

    With the decorator, an error before the first `together` of the function reaches the other ranks. Without the
    decorator, if a call is wrong on one rank only, the other ranks would wait in that `together`.

    Args:
      is_of_ranks: (arguments of a call) -> whether all running ranks make that call.
    """

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            before = NUM_SAID[threading.get_ident()]
            try:
                return fn(*args, **kwargs)
            except BaseException as error:
                if NUM_SAID[threading.get_ident()] == before and is_of_ranks(*args, **kwargs):
                    say(Told(b"", Failure.of(error), ""), Ranks.of_group(None))
                raise

        return run

    return decorate


def apart_problems(of_all: Sequence[dict[str, str]]) -> Iterator[Problem]:
    """Report arguments that are not the same on all ranks. of_all: for each rank, {name: argument as text}."""
    for name, first in of_all[0].items():
        rank, other = next(((r, own[name]) for r, own in enumerate(of_all) if own[name] != first), (0, first))
        if other != first:
            got, need = f"{other:.100} on rank {rank}", f"{first:.100}, as on rank 0"
            yield Problem(f"`{name}` is not the same on all ranks.", got, need, "the same call on every rank")


def device_of(group: dist.ProcessGroup) -> str:
    """Return the device on which the tensors of a group lie.

    It is the CPU if the group takes CPU tensors.
    """
    return "cpu" if torch.device("cpu") in group._device_types else "cuda"


def _bytes_of_all(own: bytes, group: dist.ProcessGroup, device: torch.device | str) -> list[bytes]:
    """Return the bytes of every rank, of any length.

    Ranks exchange heads of one size, and then the bytes that do not fit in a head.
    """
    room = HEAD_BYTES - SIZE_BYTES
    heads = _gathered((len(own).to_bytes(SIZE_BYTES, "little") + own[:room]).ljust(HEAD_BYTES, b"\0"), group, device)
    sizes = [int.from_bytes(head[:SIZE_BYTES], "little") for head in heads]
    rest = max(sizes) - room
    rests = _gathered(own[room:].ljust(rest, b"\0"), group, device) if rest > 0 else [b""] * len(heads)
    return [(head[SIZE_BYTES:] + more)[:size] for head, more, size in zip(heads, rests, sizes, strict=True)]


def _gathered(own: bytes, group: dist.ProcessGroup, device: torch.device | str) -> list[bytes]:
    """Return the bytes of every rank. All ranks pass the same number of bytes."""
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    out = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(out, mine, group=group)
    return [x.cpu().numpy().tobytes() for x in out]
