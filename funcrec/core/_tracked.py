"""Find out whether the caller wants a derivative of a tree's tensors, or of tensors that a function closes over.

    tracked  =  requires grad with grad mode on, or belongs to a level of torch.func, or has a forward tangent

A function with a tracked input differentiates that input, or raises before any work. It never returns a wrong
derivative.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcrec.core._levels import get_unwrapped, is_wrapped
from funcrec.core._tree import tree_flatten, tree_leaves
from funcrec.kernels.tracked import any_tracked as any_tracked
from funcrec.kernels.tracked import is_followed as is_followed
from funcrec.kernels.tracked import is_forward as is_forward
from funcrec.kernels.tracked import is_in_derivative as is_in_derivative
from funcrec.kernels.tracked import is_in_jvp as is_in_jvp
from funcrec.kernels.tracked import is_recorded as is_recorded
from funcrec.kernels.tracked import is_tracked as is_tracked
from funcrec.kernels.tracked import is_transforming as is_transforming
from funcrec.kernels.tracked import plain as plain
from funcrec.kernels.tracked import stand_in as stand_in
from funcrec.kernels.tracked import stand_ins as stand_ins
from funcrec.kernels.tracked import vmaps_of as vmaps_of

ADDRESSES = {
    "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_",
}  # fmt: skip


def has_tracked(*trees: Any) -> bool:
    """Return whether a tensor among the leaves of the trees is tracked."""
    return any_tracked(x for tree in trees for x in tree_leaves(tree))


def is_reversed(x: Tensor) -> bool:
    """Return whether a reverse derivative of x is wanted, at any level."""
    x = stand_in(x)
    if not (x.is_floating_point() or x.is_complex()) or not torch.is_grad_enabled():
        return False
    with torch._C.DisableTorchFunction():  # A tensor inside x may have a stand-in of its own.
        while is_wrapped(x) and not x.requires_grad:
            x = get_unwrapped(x)
        return x.requires_grad


class Reading(NamedTuple):
    """A record of the operations of a function, and of the tensors that it read.

    tensors: the tensors that the function read besides its arguments. calls: every operation with its arguments, where
    a number replaces each tensor. Two runs that differ in more than tensors' values differ in `calls` or `tensors`.
    written: the tensors among `tensors` that the function wrote to.
    """

    tensors: tuple[Tensor, ...]
    calls: tuple[Any, ...]
    written: tuple[Tensor, ...] = ()

    def is_same(self, other: "Reading") -> bool:
        """Return whether the same operations read the same tensors in both records."""
        return self.calls == other.calls and all(map(operator.is_, self.tensors, other.tensors))


def _content(x: Any) -> Any:
    """Return what torch may read of a value: its bytes, its elements, its number or its text.

    The text need not show what the value holds.
    """
    if hasattr(x, "__array__"):
        x = np.asarray(x)
        return x.dtype.str, x.shape, x.tobytes()
    if hasattr(x, "__getitem__") and hasattr(x, "__len__") and not isinstance(x, (str, Mapping)):
        return tuple((type(y), _content(y)) for y in (x[i] for i in range(len(x))))
    for number in (operator.index, float, complex):
        if hasattr(x, f"__{number.__name__}__"):
            return repr(number(cast(Any, x)))
    return repr(x)


class _Reads(TorchFunctionMode):
    """A mode that records every operation, and every tensor that an operation reads and no earlier operation made."""

    def __init__(self, given: list[Tensor]):
        super().__init__()
        self.known = {id(x): (i, x) for i, x in enumerate(given)}  # It keeps tensors alive, so that no id recurs.
        self.found: list[Tensor] = []
        self.versions: list[int] = []
        self.calls: list[tuple] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        self.calls.append((func, structure, tuple(map(self.mark, leaves))))
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and id(x) not in self.known:
                self.known[id(x)] = len(self.known), x
        return out

    def mark(self, x: Any) -> Any:
        """Return a key for a leaf: a tensor's number, or another leaf's type and content.

        At the first read of a tensor, the key also holds the tensor's form.
        """
        if not isinstance(x, Tensor):
            return type(x), _content(x)
        if id(x) in self.known:
            return self.known[id(x)][0]
        self.known[id(x)] = len(self.known), x
        self.found.append(x)
        self.versions.append(version_of(x))
        return self.known[id(x)][0], x.dtype, tuple(x.shape), x.device


def reading(fn: Callable, *args: Any) -> tuple[Any, Reading]:
    """Return (fn(*args), the Reading of that run).

    The Reading has the tensors that fn finds in closures, dicts, objects, partials and modules.
    """
    with _Reads([x for x in tree_leaves(args) if isinstance(x, Tensor)]) as reads:
        out = fn(*args)
    leaves, structure = tree_flatten(out)
    calls = (*reads.calls, (structure, *map(reads.mark, leaves)))
    written = (x for x, version in zip(reads.found, reads.versions, strict=True) if version_of(x) != version)
    return out, Reading(tuple(reads.found), calls, tuple(written))


def written(out: Tensor, at: tuple[slice, ...], part: Tensor) -> Tensor:
    """Return `out` with `part` written into out[at]; the caller owns `out`.

    `torch.func.linearize` (2.13) traces operations without their writes through views, and loses these writes. Under
    `linearize` the result is a new tensor. (A forward level is open while `linearize` traces.)
    """
    if not (is_forward() and torch._C._len_torch_dispatch_stack()):
        out[at] = part
        return out
    return _replaced(out, at, part.to(out.dtype), 0)


def _replaced(out: Tensor, at: tuple[slice, ...], part: Tensor, d: int) -> Tensor:
    if d == len(at):
        return part
    size = out.shape[d]
    first, last, _ = at[d].indices(size)
    own = _replaced(out.narrow(d, first, last - first), at, part, d + 1)
    return torch.cat([out.narrow(d, 0, first), own, out.narrow(d, last, size - last)], d)


def version_of(x: Tensor) -> int:
    """Return the number of writes to a tensor, or 0 for an inference tensor, which has no count."""
    return 0 if x.is_inference() else x._version


class NoHostMemory(TorchFunctionMode):
    """A mode that raises `error` if code asks for a tensor's memory address: a trace on shapes has no memory."""

    def __init__(self, error: Callable[[str], Exception]):
        super().__init__()
        self.error = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ADDRESSES:
            raise self.error(f"{func.__name__} of a tensor")
        return func(*args, **(kwargs or {}))
