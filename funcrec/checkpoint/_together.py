"""Ranks do one thing together: if it fails on one rank, all of them raise.

together(ranks, work): work() on every rank, or an error on every rank
"""

import functools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from funcrec.checkpoint._rank_parts import is_of_ranks
from funcrec.core import Problem, message
from funcrec.mesh import Mesh

T = TypeVar("T")
KINDS = {k.__name__: k for k in (OSError, ValueError, TypeError, KeyError, MemoryError, RuntimeError)}
SAID: Counter[int] = Counter()  # how often each thread has sent a result to the others


class Ranks(NamedTuple):
    """The processes that save or load one checkpoint. group: None for this process alone, or for the default group."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of the ranks; JSON must be able to write it, and all must call it."""
        if self.size == 1:
            return [value]
        SAID[threading.get_ident()] += 1
        kind = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(kind)
        size = torch.tensor([text.numel()], device=kind)
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        dist.all_gather(sizes, size, group=self.group)
        most = max(int(n) for n in sizes)
        padded = torch.cat([text, text.new_zeros(most - text.numel())])
        texts = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self.group)
        return [json.loads(bytes(t[: int(n)].tolist())) for t, n in zip(texts, sizes, strict=True)]


def ranks_of(mesh: Mesh | None) -> Ranks:
    if mesh is None or mesh.is_emulated:
        return Ranks()
    return Ranks(dist.get_rank(), mesh.size)


def called_by_all_ranks(fn: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function that all ranks call, so that an error before its first `together` reaches the other ranks.

    Else, if a call is wrong on one rank only, the others would wait for it there.
    """

    @functools.wraps(fn)
    def run(*args, **kwargs):
        before = SAID[threading.get_ident()]
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            if SAID[threading.get_ident()] == before and is_of_ranks(kwargs.get("mesh"), [*args[1:], *kwargs.values()]):
                Ranks(dist.get_rank(), dist.get_world_size()).all([None, _told(error)])
            raise

    return run


def apart_problems(told: Sequence[dict[str, str]]) -> Iterator[Problem]:
    """Report arguments that are not the same on all ranks. told: each rank's, by name."""
    for name, first in told[0].items():
        rank, other = next(((r, own[name]) for r, own in enumerate(told) if own[name] != first), (0, first))
        if other != first:
            got, need = f"{other:.100} on rank {rank}", f"{first:.100}, as on rank 0"
            yield Problem(f"`{name}` is not the same on all ranks.", got, need, "the same call on every rank")


def together(ranks: Ranks, call: str, doing: str, work: Callable[[], T]) -> tuple[T, list[Any]]:
    """Run work() on every rank: (this rank's result, those of all ranks). JSON must be able to write the results.

    Raises:
      This rank's own error if it failed; else an error of the same kind that names the rank that failed.
    """
    result, error = None, None
    try:
        result = work()
    except BaseException as raised:  # an interrupt, too: the others must not wait for this rank
        error = raised
    try:
        told = ranks.all([result, _told(error)])
    finally:
        if error is not None:
            raise error
    failed = {rank: text for rank, (_, text) in enumerate(told) if text is not None}
    if failed:
        kind, number, _ = next(iter(failed.values()))
        need, hint = "every rank to", "what that rank says"
        problems = [Problem(f"rank {r} could not {doing}.", t, need, hint) for r, (_, _, t) in failed.items()]
        made = KINDS[kind](message(call, problems))
        if number is not None:
            made.errno = number
        raise made
    return result, [value for value, _ in told]


def _told(error: BaseException | None) -> tuple[str, int | None, str] | None:
    """The kind of an error, its number and its first line."""
    if error is None:
        return None
    kind = next((n for n, k in KINDS.items() if isinstance(error, k)), "RuntimeError")
    lines = [line.strip() for line in str(error).splitlines()] or [""]
    got = next((line.removeprefix("got").strip() for line in lines if line.startswith("got ")), "")
    text = f"{type(error).__name__}: {lines[0]}" + (f" got {got}" if got else "")
    return kind, getattr(error, "errno", None), text
