"""Run work that no signal may interrupt: the work of Inductor, and the imports that Inductor needs.

    apart(work) == work(); a signal handler's error leaves the call at once, while the work runs to its end

Python runs signal handlers in the main thread, between any two instructions. A handler that raises during an import
leaves half a module, or a table of Inductor with half its rows, and each later call fails. So a separate thread does
such work, one piece at a time. The main thread waits, and may stop waiting.
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

# Modules that torch imports when it first stages, or exports, a function in a process.
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

BEGUN: list[threading.Thread] = []  # the thread of the main thread's last work, which may outlive its call


def apart(work: Callable[[], T]) -> T:
    """Return the result of the work, or raise its error.

    Only the main thread needs a separate thread, because other threads run no signal handlers.
    """
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
    """Wait for work that an interrupted call left running."""
    for thread in BEGUN:
        if thread.is_alive():
            thread.join()
    BEGUN.clear()


@functools.cache
def imported(modules: tuple[str, ...]) -> None:
    """Import the modules once, except modules that this torch lacks."""

    def work() -> None:
        for name in modules:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)

    apart(work)
