"""Surroundings in which torch.optim runs as under torch.compile: its scalars are tensors, and no value is read.

`vmap` maps such a scalar, and each member has the bits of a run of its own.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcrec.core import is_in_transform
from funcrec.tables import root


class TensorScalars(TorchFunctionMode):
    """A mode that lets `alpha` and `value` of add, addcmul and addcdiv be tensors. It makes `out=` a copy for vmap.

    tracked: the square root gets derivative 0 at 0. Its dividend is 0 there too, and torch's derivative gives 0 · ∞.
    """

    def __init__(self, tracked: bool):
        super().__init__()
        self.tracked = tracked

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        for name in ("alpha", "value"):
            if isinstance(kwargs.get(name), Tensor):
                args = (args[0], args[1].to(args[0].dtype) * kwargs.pop(name), *args[2:])
        if self.tracked and func in (Tensor.sqrt, Tensor.sqrt_, torch.sqrt):
            func = root
        if (func in _IN_PLACE or func in _UNBATCHED) and is_in_transform():
            args = (args[0], *(x.to(args[0].dtype) if is_number_of(x, args[0]) else x for x in args[1:]))
        out = kwargs.pop("out", None)
        if func in _UNBATCHED and is_in_transform():
            out, func = args[0], _UNBATCHED[func]
        result = func(*args, **kwargs)
        return result if out is None else out.copy_(result)


_UNBATCHED = {  # vmap would run these in-place operations once for each member
    getattr(Tensor, name + "_"): getattr(Tensor, name) for name in ("lerp", "addcmul", "addcdiv", "clamp")
}

_IN_PLACE = {Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_}


def is_number_of(x: Any, y: Tensor) -> bool:
    """Return whether x is a wide number beside floats y: without vmap torch rounds it first, with vmap the result."""
    return (
        isinstance(x, Tensor) and not x.dim() and y.dim() > 0 and (x.dtype, y.dtype) == (torch.float64, torch.float32)
    )


@contextlib.contextmanager
def tensor_scalars(tracked: bool = False) -> Iterator[None]:
    """Run torch.optim inside the block as torch.compile does: it reads the value of no tensor."""
    try:
        _run_as_compiled(True)
        with TensorScalars(tracked):
            yield
    finally:
        _run_as_compiled(False)


class _Running:
    """The threads that run an optimizer, and the value of torch's flag before the first thread began."""

    threads: set[int] = set()
    before = False
    lock = threading.Lock()


def _run_as_compiled(begins: bool) -> None:
    """Set or restore the flag of torch for all threads. The first thread sets it, and the last thread restores it."""
    if torch.compiler.is_dynamo_compiling():
        return
    with _Running.lock:
        if begins and not _Running.threads:
            _Running.before = torch.compiler._is_compiling_flag
        (_Running.threads.add if begins else _Running.threads.discard)(threading.get_ident())
        torch.compiler._is_compiling_flag = bool(_Running.threads) or _Running.before
