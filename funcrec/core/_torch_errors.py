"""Rewrite torch's errors about a function that a transform cannot run.

torch.func vmaps the functions that users pass over rows or ranks, or differentiates them. torch's errors about such a
function speak of torch's own machinery. The errors here say what the function did, what funcrec needs, and what to
write instead.
"""

import contextlib
import re
import signal
import traceback
from collections.abc import Callable, Iterator

from funcrec.core._errors import Problem, describe, message

_TENSORS = "a function of tensors, whose values are not read on the host"
_DRAWN = "numbers drawn before, closed over or passed; in a loss its parameter `key`, as for fr.nn.dropout"
_OWN_RULES = "setup_context, and a vmap staticmethod or generate_vmap_rule = True; or the formula in plain torch"

WORDS: tuple[tuple[str, str, str, str], ...] = (
    ("random operation while in randomness error mode", "draws from torch's generator.", "arguments that say all",
        _DRAWN),
    ("data-dependent control flow", "branches on a tensor's value.", _TENSORS, "torch.where(condition, a, b)"),
    (r"calling \.item\(\)", "reads a tensor's value on the host.", _TENSORS,
        "the tensor itself in place of float(x) or x.item(); torch.where(condition, a, b) in place of an if"),
    (r"dynamic shape|nonzero(?! value)", "makes a shape of a tensor's values.", "shapes that follow from shapes",
        "torch.where(mask, x, 0) in place of x[mask]"),
    ("rule not implemented for aten::_assert", "asserts a tensor's value.", "a function that can be mapped",
        "the condition as a result, and the assertion outside; or torch.where(condition, x, nan)"),
    ("setup_context staticmethod|does not have vmap support", "calls an autograd.Function that transforms cannot run.",
        "one that they can, or plain torch", _OWN_RULES),
    ("ProxyTorchDispatchMode.* not registered", "maps or differentiates a rule of its own inside torch.export.",
        "an exported function without vmaps, emulated ranks and derivatives",
        "a predict function of whole tables (fr.gather_tables); or fr.jit, which takes all of them"),
    ("mutate a captured Tensor", "writes to a tensor that it closes over.", "a pure function",
        "`.clone()` first; return what changes; module.eval() of a batch norm"),
    ("saved tensor hooks", "runs torch.utils.checkpoint, or other hooks on saved tensors.",
        "a function without them: torch.func has none",
        "fr.remat(function), which keeps its arguments alone; or smaller batches, added up by fr.optim.accumulate"),
    (r"_higher_order_ops/cond\.py|torch\.cond", "calls torch.cond, which no transform of torch.func passes.",
        "both values, and a choice between them", "torch.where(condition, a, b)"),
    ("Cannot access data pointer|Can't call numpy|tensor that doesn't have storage",
        "reads a tensor's memory on the host.", _TENSORS, "torch's own operations in place of numpy's"),
)  # fmt: skip


@contextlib.contextmanager
def own_errors(call: str, fn: Callable | str, *given: object, need: str) -> Iterator[None]:
    """Return a context that rewrites the errors of `fn`, a function that `call` received.

    torch's errors about transforms become this library's errors. Any other error gets a note with the arguments of
    `fn`, unless it already has such a note.
    """
    try:
        yield
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if not is_of_handler(error) and not any(
            "\n  need  " in text for text in (str(error), *getattr(error, "__notes__", ()))
        ):
            name = fn if isinstance(fn, str) else getattr(fn, "__name__", type(fn).__name__)
            if known := problem_of(name, error):
                raise TypeError(message(call, [known])) from error
            got, hint = ", ".join(map(describe, given)), f"{name}(...) alone: it fails in the same way"
            error.add_note(message(call, [Problem(f"`{name}` failed on its arguments.", got, need, hint)]))
        raise


def is_of_handler(error: BaseException) -> bool:
    """Return whether a signal's handler raised the error; then the code that the signal interrupted is not at fault."""
    handlers = (getattr(h, "func", h) for h in map(signal.getsignal, signal.valid_signals()))  # a partial's
    codes = [getattr(x, "__code__", None) for h in handlers for x in (h, type(h).__dict__.get("__call__"))]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def problem_of(name: str, error: Exception) -> Problem | None:
    """Return the Problem that says what the user's function `name` did, or None if torch's message is unknown."""
    text = str(error)
    for pattern, what, need, hint in WORDS:
        if re.search(pattern, text):
            got = text.removeprefix("vmap: ").split(". ")[0].splitlines()[0]
            return Problem(f"`{name}` {what}", got, need, hint, TypeError)
    return None
