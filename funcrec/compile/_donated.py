"""Donated values. A call takes all donated values in one step, and every later use of a donated value raises.

take(leaves):   leaf → Donated, whose every use raises;   the memory belongs to outputs of the call
"""

import collections
import itertools
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from funcrec.core import DonatedError, Problem, fail, message, tree_leaves

# The memory of a taken tensor: no operation reads this dtype, which torch's stubs lack.
GONE = torch.empty((), dtype=torch.uint1)  # pyright: ignore[reportAttributeAccessIssue]
_taking = threading.Lock()


class Donated(Tensor):
    """The type of a donated tensor, of which any use raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        own = [x for x in args if type(x) is Donated]  # A container may be half made, such as deepcopy's memo.
        raise DonatedError(
            donated_message(own[0] if own else next(x for x in tree_leaves((args, kwargs)) if type(x) is Donated))
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "<donated tensor>"


class Taken(NamedTuple):
    """What a call took. ids: of the taken tensors, in the order of `paths`; a living tensor has its id alone."""

    paths: Iterable[str]
    ids: list[int]
    name: str
    call: int


def take(given: Sequence[Tensor], paths: Iterable[str], when: tuple[str, int], emptied: Sequence[Tensor]) -> None:
    """Take the given tensors: any later use is an error that names the argument, the function and the call's number.

    `take` takes all tensors or none, in one call of C, which no signal interrupts. An audit hook may be Python
    code, and gets each change of `__class__`. An error in a hook, or in a signal's handler, is raised here after `take`
    has taken all other tensors. If two threads give the same tensors, one thread gets them. emptied: the tensors of
    `given` whose memory now belongs to another tensor. Code that reads only the C++ part of a tensor (torch.tensor)
    finds nothing there.
    """
    told = {"donated": Taken(paths, [*map(id, given)], *when)}
    named = map(setattr, given, itertools.repeat("__dict__"), itertools.repeat(told))  # one dict is made, and one freed
    blank = map(setattr, emptied, itertools.repeat("data"), itertools.repeat(GONE))
    # The last three are made here, because a signal may end a call. The error of one more hook may end each of these.
    first, second, third, fourth = (
        map(setattr, given, itertools.repeat("__class__"), itertools.repeat(Donated)) for _ in range(4)
    )
    steps = itertools.chain(named, blank, first)
    with _taking:
        refuse_donated(given)
        try:
            collections.deque(steps, 0)
        except BaseException:
            try:
                collections.deque(second, 0)
            except BaseException:
                try:
                    collections.deque(third, 0)
                except BaseException:
                    collections.deque(fourth, 0)
                    raise
                raise
            raise


def donated_message(x: Donated) -> str:
    taken: Taken = x.__dict__["donated"]
    path = [*taken.paths][taken.ids.index(id(x))]
    why = f"`{path}` was donated to call {taken.call} of `{taken.name}`"
    need = "the value that the call returned in its place"
    return message("funcrec.jit", [Problem(f"{why} and is gone.", "a use after donation", need, "jit without donate=")])


def refuse_donated(leaves: Sequence) -> None:
    if Donated in map(type, leaves):
        raise DonatedError(donated_message(next(x for x in leaves if type(x) is Donated)))


def held_message(name: str, leaves: Sequence[tuple[str, Tensor]]) -> str:
    size = sum(x.nbytes for _, x in leaves)
    what = f"the memory of donated {', '.join(f'`{path}`' for path, _ in leaves)} is held elsewhere, and was copied."
    got = f"{size:,} bytes that a view, a detach(), an array or a traceback sees; it keeps the old values"
    need, hint = "leaves that only the state holds", "fr.copy of what is to be kept, and no other name for the rest"
    return message(f"funcrec.jit({name})", [Problem(what, got, need, hint)])


def refuse_shared(leaves: list, donated: dict[int, str]) -> None:
    """Raise if two leaves share donated memory."""
    found = shared_pair(leaves, donated)
    if found is not None:
        what = f"the memory of donated `{donated.get(found[1]) or donated[found[0]]}` is given twice."
        fail("funcrec.jit", what, got="two leaves share it", need="one leaf, or a clone")


def shared_pair(leaves: list, donated: Collection[int]) -> tuple[int, int] | None:
    """Return two leaves, one of them donated, that share memory, or None."""
    spans = sorted((*memory_span(x), i) for i, x in enumerate(leaves) if has_memory(x)) if donated else []
    before: dict[bool, tuple[int, int]] = {}  # {whether donated: (the furthest end, its leaf)}
    for start, end, i in spans:
        for is_donated, (reach, first) in before.items():
            if start < reach and (is_donated or i in donated):
                return first, i
        before[i in donated] = max(before.get(i in donated, (0, 0)), (end, i))
    return None


def has_memory(x: object) -> bool:
    return isinstance(x, Tensor) and x.numel() > 0 and not isinstance(x, FakeTensor)  # those of `dry_run` have none


def memory_span(x: Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor, and the address after its last element."""
    start = x.data_ptr()
    return start, start + length_of(x)


def length_of(x: Tensor) -> int:
    """Return the number of bytes from the first to the last element of a tensor with elements."""
    if x.is_contiguous():
        return x.nbytes
    return (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()
