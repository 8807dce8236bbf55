"""Work that no signal cuts in half: Inductor's, and the imports that it needs.

    apart(work) == work(), and an error of a signal's handler leaves it at once, while the work goes on to its end

Python runs handlers in the main thread, between any two of its instructions. One that raises in the midst of an import
leaves half a module behind, or a table of Inductor's with half its rows, and each later call fails. So this is done in
a thread of its own, one work at a time; the main thread waits, and may stop waiting.
"""

import contextlib
import contextvars
import functools
import importlib
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

# What torch imports when it stages, and exports, a function for the first time in a process.
FOR_STAGING = (
    "sympy.tensor.tensor", "torch._dynamo", "torch._inductor.compiler_bisector",
    "torch._inductor.fx_passes.dedupe_symint_uses", "multiprocessing.synchronize",
)  # fmt: skip
FOR_EXPORT = (
    "torch.export._trace", "torch.fx.experimental.validator", "torch._inductor.sizevars",
    "torch._subclasses.schema_check_mode", "torch._export.passes._node_metadata_hook",
    "torch._export.passes.replace_autocast_with_hop_pass", "torch._export.passes.replace_set_grad_with_hop_pass",
    "torch._functorch._aot_autograd.subclass_parametrization",
)  # fmt: skip

BEGUN: list[threading.Thread] = []  # the last work of the main thread, which may outlast its call


def apart(work: Callable[[], T]) -> T:
    """The work's result, or its error. Other threads than the main one do it themselves: no handler runs there."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    settle()
    context, device = contextvars.copy_context(), torch.cuda.current_device() if torch.cuda.is_initialized() else None
    results, errors = [], []

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            results.append(context.run(work))
        except BaseException as error:
            errors.append(error)

    BEGUN[:] = [threading.Thread(target=run, name="funcrec.compile")]
    BEGUN[0].start()
    settle()
    if errors:
        raise errors.pop()
    return results.pop()


def settle() -> None:
    """Wait for the work that an interrupted call left."""
    for thread in BEGUN:
        if thread.is_alive():
            thread.join()
    BEGUN.clear()


@functools.cache
def imported(modules: tuple[str, ...]) -> None:
    """Import them, once; a torch that has no such module imports another one by itself."""

    def work() -> None:
        for name in modules:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)

    apart(work)
