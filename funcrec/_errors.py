"""Errors that say what was wrong, what was got, what is needed and what to try.

A validator is a generator of `Problem`s read from metadata; `check` drains the validators of one call
and raises every problem at once. Floor 0.
"""

import re
from collections.abc import Iterable
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
    """`name=...` for an argument of another type that has an example."""
    found = re.match(r"`(\w+)[`\[]", problem.what)
    if problem.kind is not TypeError or found is None or found[1] not in EXAMPLES:
        return ""
    return f"{found[1]}={EXAMPLES[found[1]]}"


def check(call: str, *validators: Iterable[Problem]) -> None:
    """Raise all problems that the `validators` find, as one error of the first problem's kind."""
    problems = [p for validator in validators for p in validator]
    if problems:
        kind = MissingKeyError if problems[0].kind is KeyError else problems[0].kind
        raise kind(message(call, problems))


def fail(call: str, what: str, *, got: str, need: str, hint: str = "", kind: type[Exception] = ValueError):
    """Raise one problem."""
    check(call, [Problem(what, got, need, hint, kind)])
