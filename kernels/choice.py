"""The choice of an implementation: by name, by `using`, or the device's default.

A call with a tracked input takes "reference", which alone has derivatives.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, cast

import torch
from funcrec.kernels import library
from funcrec.kernels.tracked import any_tracked, is_bare, is_quiet
from torch import Tensor

IMPLEMENTATIONS = tuple(library.MODULES)
_DEVICES = {"cpu": "cpp", "cuda": "triton"}
_using: ContextVar[str | None] = ContextVar("funcrec_implementation", default=None)


@contextlib.contextmanager
def using(implementation: str) -> Iterator[None]:
    """Return a context, for this thread or task only, in which calls that name no implementation take this one.

    Example:
      >>> import torch
      >>> from funcrec.kernels import ops
      >>> with ops.using("reference"):
      ...     ops.gather_rows(torch.eye(2), torch.tensor([1, 7]))
      tensor([[0., 1.],
              [0., 0.]])
    """
    before = _using.get()
    try:
        _using.set(library.check_name("using", implementation))
        yield
    finally:
        _using.set(before)


def chosen(implementation: str | None, device: torch.device) -> str:
    """Return the name of the implementation that a call on `device` takes."""
    if device.type == "mps":
        raise TypeError(
            "funcrec.kernels.ops: no implementation runs on Apple's GPUs.\n  got   tensors on mps, which has no f64\n"
            "  need  tensors on cpu or cuda\n  try   .cpu()"
        )
    own = _using.get() or _DEVICES.get(device.type, "reference")
    return library.check_name("ops", own if implementation is None else implementation)


def ambient() -> str | None:
    """Return the name that `using` set, or None. The name is part of a compilation's key."""
    return _using.get()


def has(name: str, implementation: str) -> bool:
    """Return whether the implementation has the operation."""
    return library.operator(implementation, name) is not None


def available(name: str, device: torch.device) -> str:
    """Return the implementation of a call on `device`: the reference if the device's default lacks the operation.

    A name that `using` set stays.
    """
    choice = chosen(None, device)
    return choice if ambient() is not None or has(name, choice) else "reference"


def operation(
    name: str, implementation: str | None, *tensors: Tensor | None, bare: Sequence[Tensor] | None = None
) -> Callable:
    """Return the function to call. `tensors` are the tensors that may be tracked; the first is on the call's device.

    bare: the other tensors, for operations that may skip the dispatcher if nothing observes the call.
    """
    mine = [x for x in tensors if x is not None]
    device = mine[0].device if mine else torch.device("cpu")
    choice = chosen(implementation, device)
    if choice != "reference" and any_tracked(mine):
        if not (is_free(implementation) and has(name, "reference")):
            library.refuse_derivatives(name, choice)
        choice = "reference"
    if bare is not None and choice == "cpp" and is_bare([*mine, *bare]):
        return library.function(choice, name)
    call = library.operator(choice, name)
    if call is None:
        raise NotImplementedError(
            f"funcrec.kernels.{name}: implementation {choice!r} has no {name}.\n  got   implementation={choice!r}\n"
            f"  need  one of {[i for i in ('reference', 'cpp', 'triton') if i != choice]}\n  try   another for this "
            f"call, or None for the device's own"
        )
    return call


@functools.cache
def direct(name: str) -> Callable:
    """Return an operator of "cpp" for plain tensors on the CPU that nothing tracks: compiled code calls it.

    Calls skip the dispatcher, which takes half a microsecond per tensor, unless something observes them.
    """
    run, observed = library.function("cpp", name), library.operator("cpp", name)
    if name in cast(Any, library.load("cpp")).compiled_operators():
        return cast(Any, observed)._op  # without Python, so the dispatcher takes less time than a look for observers
    return lambda *args: run(*args) if observed is None or is_quiet() else observed(*args)


def is_plain(implementation: str | None, x: Tensor) -> bool:
    """Return whether a call runs "cpp", no input can be tracked, and nothing observes the call."""
    return implementation is None and _using.get() is None and type(x) is Tensor and x.is_cpu and is_quiet()


def is_free(implementation: str | None) -> bool:
    """Return whether nobody named an implementation, so that a call with a tracked input may take "reference"."""
    return implementation is None and ambient() is None
