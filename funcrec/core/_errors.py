"""Errors that say what is wrong, what the call got, what the call needs, and what to try.

A validator is a generator of `Problem`s that reads metadata only. `check` runs all validators of one call and raises
one error with every problem.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from funcrec.core._hints import EXAMPLES as EXAMPLES

STAGES = {
    "core",
    "files",
    "jagged",
    "mesh",
    "tables",
    "invariance",
    "grad",
    "compile",
    "kinds",
    "stores",
    "sharding",
    "planner",
    "dry",
    "train",
    "cached",
    "history",
    "checkpoint",
    "retrieval",
    "serve",
}  # folders that public names leave out
ROOMS = {
    "compile.backend", "data.datasets", "data.encoders", "data.readers", "loop.pipelines", "mesh.processes",
    "serve.freshness", "sharding.by_node", "sharding.moves", "sharding.placement",
}  # folders within folders, which public names leave out, too  # fmt: skip
HIDDEN = STAGES | {room.split(".")[1] for room in ROOMS}


class DonatedError(RuntimeError):
    """Raised if code uses a value that `jit(donate=...)` took; the message names the argument and the call."""


class CheckError(ValueError):
    """Raised by `checked(fn)` for a wrong value: an id out of range, a NaN gradient, or descending offsets."""


class MissingKeyError(KeyError):
    """Raised if a name does not exist. Its message prints as written; a KeyError prints its message in quotes."""

    def __str__(self) -> str:
        return self.args[0]


class Problem(NamedTuple):
    """One violation: `what` is a sentence that begins with the path of the wrong value in backticks."""

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
    """Return the short name of a dtype: `torch.float32` -> `f32`."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def describe(x: object) -> str:
    """Return `f32[118]` for a tensor, the value with its type for a number or string, and else the type's name.

    The text names a tensor's device unless it is the CPU, and its layout unless it is strided.
    """
    if not isinstance(x, Tensor):
        if isinstance(x, type):
            return f"the class {x.__name__}"
        own = type(x).__module__.split(".")[0] in ("builtins", "funcrec", "__main__")
        name = type(x).__name__ if own else f"{type(x).__module__}.{type(x).__name__}"
        return f"{name} {x!r}" if isinstance(x, (int, float, str, bool)) else name
    is_ragged = x.is_nested and x.layout == torch.strided  # such a tensor has no `shape`
    shape = f"{x.size(0)}, ..." if is_ragged else ", ".join(map(str, x.shape))
    place = "" if x.device.type == "cpu" else f" on {x.device}"
    odd = f", {'nested' if x.is_nested else x.layout}" if x.is_nested or x.layout != torch.strided else ""
    return f"{short_dtype(x.dtype)}[{shape}]{place}{odd}"


def call_name(fn: Callable) -> str:
    """Return the public name of a function or class: `funcrec.lookup` for `lookup` in `funcrec/tables/_lookup.py`.

    `publish` sets the module's name. Before that, the public name follows from the module's path: `funcrec.optim.sgd`
    for `sgd` in `funcrec/optim/_sgd.py`.
    """
    module = fn.__module__.removeprefix("funcrec.core.random")  # the keys of fr.random are fr's own
    public = [p for p in (module or "funcrec").split(".") if not p.startswith("_") and p not in HIDDEN]
    return ".".join([*public, fn.__qualname__.removesuffix(".__init__")])


def message(call: str, problems: Iterable[Problem]) -> str:
    """Return the four-part text of all `problems` of one `call`."""
    blocks = []
    for p in problems:
        lines, hint = [f"{call}: {p.what}", f"  got   {p.got}", f"  need  {p.need}"], p.hint or example_of(p)
        blocks.append("\n".join(lines + ([f"  try   {hint}"] if hint else [])))
    return "\n".join(blocks)


def example_of(problem: Problem) -> str:
    """Return what to try for a problem without a hint: one of the needed names, or `name=...` with an example."""
    found = re.match(r"`([\w.]+)(\[.*?\])?`", problem.what)
    path, part = (found[1], found[2] or "") if found else ("", "")
    name, need = path.split(".")[-1], problem.need
    if re.match(r"(None, or )?(one of |among |some of )?[\[']", need) and re.search(r"'[^']*'", need):
        near = repr(nearest(problem.got, re.findall(r"'([^']*)'", need)))
        takes_many = name == "axis_names" or EXAMPLES.get(name, "").startswith('("')
        several = takes_many and need.startswith(("among", "some of"))
        is_bare = not path or problem.kind is KeyError or (need.startswith("among") and not several)
        return near if is_bare else f"{path}=({near},)" if several else f"{path}={near}"
    least, is_range = re.search(r">=? (\d+)", need), _IN_RANGE.search(problem.what)
    is_number = is_range and re.match(r"[\d.]", EXAMPLES.get(name, ""))
    if is_number and least and float(EXAMPLES[name]) < float(least[1]):  # The name has two meanings.
        return f"{name}{part}={least[1]}"
    if problem.kind is not TypeError:
        return example_at(name + part) if is_number else ""
    known = next((EXAMPLES[n] for n in re.findall(r"[A-Z]\w+", need) if n in EXAMPLES), "")
    if name in EXAMPLES or not known or not name:
        return example_at(name + part)
    return f"{name}=[{known}]" if "sequence of" in need else f"{name}{part}={known}"


def example_at(path: str) -> str:
    """Return `path=...` with the example of the argument's name, or "" without an example.

    If `path` is an element and the example is a container, the text shows the whole argument.
    """
    name = re.split(r"[\[.]", path)[0]
    text = EXAMPLES.get(name, "")
    whole = text.startswith("{") if "['" in path else text[:1] in "[({"
    return f"{name if whole else path}={text}" if text else ""


_IN_RANGE = re.compile(
    r"out of range|outside its range|too small|negative|not positive|not an? (probability|scale|exponent)"
)


def nearest(got: str, names: Sequence[str]) -> str:
    """Return the name that is most like what the call got, or the first name if none is similar."""
    return next(iter(difflib.get_close_matches(got.strip("'"), names, 1)), names[0])


def check(call: str, *validators: Iterable[Problem]) -> None:
    """Raise one error, of the first problem's kind, for all problems that the `validators` find.

    The validators run without the innermost mode of torch's functions, if its `passes_reads` is true.
    """
    count = torch._C._len_torch_function_stack()
    mode = torch._C._get_function_stack_at(count - 1) if count else None
    is_aside = getattr(mode, "passes_reads", False)  # it costs 2 µs in each read of a shape or dtype: here are most
    try:
        if is_aside:
            torch._C._pop_torch_function_stack()
        problems = [p for validator in validators for p in validator]
    finally:
        if is_aside and torch._C._len_torch_function_stack() < count:  # an interrupt may come before it was taken
            torch._C._push_on_torch_function_stack(mode)
    if problems:
        kind = MissingKeyError if problems[0].kind is KeyError else problems[0].kind
        raise kind(message(call, problems))


def fail(call: str, what: str, *, got: str, need: str, hint: str = "", kind: type[Exception] = ValueError) -> NoReturn:
    """Raise the error of one problem."""
    raise (MissingKeyError if kind is KeyError else kind)(message(call, [Problem(what, got, need, hint, kind)]))
