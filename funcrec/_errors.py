"""Errors that say what was wrong, what was got, what is needed and what to try.

A validator is a generator of `Problem`s read from metadata; `check` drains the validators of one call
and raises every problem at once. Floor 0.
"""

import contextlib
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcrec._examples import EXAMPLES as EXAMPLES


class DonatedError(RuntimeError):
    """A value was used after `jit(donate=...)` had taken it; the message names the argument and the call."""


class CheckError(ValueError):
    """A value check of `checked(fn)` failed: an id out of range, a NaN gradient, descending offsets."""


class MissingKeyError(KeyError):
    """A name that is not there; its text prints as it stands, where a KeyError's would be quoted."""

    def __str__(self) -> str:
        return self.args[0]


class Problem(NamedTuple):
    """One violation: `what` is a sentence that begins with the path of the offender in backticks."""

    what: str
    got: str
    need: str
    hint: str = ""
    kind: type[Exception] = ValueError


_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def short_dtype(dtype: torch.dtype) -> str:
    """`torch.float32` -> `f32`."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def describe(x: object) -> str:
    """`f32[118]` for a tensor, the type's name for anything else; the device is named when it is not the CPU."""
    if not isinstance(x, Tensor):
        if isinstance(x, type):
            return f"the class {x.__name__}"
        own = type(x).__module__.split(".")[0] in ("builtins", "funcrec", "__main__")
        name = type(x).__name__ if own else f"{type(x).__module__}.{type(x).__name__}"
        return f"{name} {x!r}" if isinstance(x, (int, float, str, bool)) else name
    shape = ", ".join(map(str, x.shape))
    place = "" if x.device.type == "cpu" else f" on {x.device}"
    return f"{short_dtype(x.dtype)}[{shape}]{place}"


def message(call: str, problems: Iterable[Problem]) -> str:
    """The four-part text of all `problems` of one `call`."""
    blocks = []
    for p in problems:
        lines, hint = [f"{call}: {p.what}", f"  got   {p.got}", f"  need  {p.need}"], p.hint or example_of(p)
        blocks.append("\n".join(lines + ([f"  try   {hint}"] if hint else [])))
    return "\n".join(blocks)


def example_of(problem: Problem) -> str:
    """What to try where a problem does not say it: one of the names that are needed, or `name=...` with an example."""
    found = re.match(r"`([\w.]+)[`\[]", problem.what)
    path = found[1] if found else ""
    name = path.split(".")[-1]
    if problem.need == "a bool":
        return f"{path}=True, or False"
    if re.match(r"(None, or )?(one of |among |some of )?[\[']", problem.need) and re.search(r"'[^']*'", problem.need):
        near = nearest(problem.got, re.findall(r"'([^']*)'", problem.need))
        return f"{path}={near!r}" if path and problem.kind is not KeyError else repr(near)
    is_fixed = _IN_RANGE.search(problem.what) and re.match(r"[\d.]", EXAMPLES.get(name, ""))
    least = re.search(r"> ?=? (\d+)", problem.need)
    if is_fixed and least and float(EXAMPLES[name]) < float(least[1]):  # a name of two meanings
        return f"{name}={least[1]}"
    if name in EXAMPLES and (problem.kind is TypeError or is_fixed):
        return f"{name}={EXAMPLES[name]}"
    known = next((EXAMPLES[n] for n in re.findall(r"[A-Z]\w+", problem.need) if n in EXAMPLES), "")
    return (
        f"{name}=[{known}]"
        if known and name and "sequence of" in problem.need
        else f"{name}={known}"
        if known and name
        else ""
    )


_IN_RANGE = re.compile(
    r"out of range|outside its range|too small|negative|not positive|no (probability|scale|exponent)"
)


def nearest(got: str, names: Sequence[str]) -> str:
    """The name most like what was got; the first, where none is."""
    return next(iter(difflib.get_close_matches(got.strip("'"), names, 1)), names[0])


def check(call: str, *validators: Iterable[Problem]) -> None:
    """Raise all problems that the `validators` find, as one error of the first problem's kind."""
    problems = [p for validator in validators for p in validator]
    if problems:
        kind = MissingKeyError if problems[0].kind is KeyError else problems[0].kind
        raise kind(message(call, problems))


@contextlib.contextmanager
def own_errors(call: str, fn: Callable, *given: object, need: str) -> Iterator[None]:
    """Errors of a function that `call` was given, `fn`, with a note of what it was given; those that say so themselves as they are."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if "\n  need  " not in str(error) and not any(call in note for note in getattr(error, "__notes__", ())):
            name = getattr(fn, "__name__", type(fn).__name__)
            got, hint = ", ".join(map(describe, given)), f"{name}(...) alone: it fails in the same way"
            error.add_note(message(call, [Problem(f"`{name}` failed on its arguments.", got, need, hint)]))
        raise


def fail(call: str, what: str, *, got: str, need: str, hint: str = "", kind: type[Exception] = ValueError):
    """Raise one problem."""
    check(call, [Problem(what, got, need, hint, kind)])
