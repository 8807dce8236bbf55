"""Run a function now, and again later under other transforms, with all that its first run took from outside.

    again(x, w) = f(x)        w: the tensors of f's closure that a transform or autograd follows

The first run finds these tensors: it gives f its arguments at a level of their own, so that any other followed tensor
is from outside. A later run puts stand-ins in their place. It also gives the first run's answers to the questions that
depend on where a run takes place (`remembered`), such as the taps of its lookups.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcrec.core._checks import sure
from funcrec.core._errors import Problem, describe, message
from funcrec.core._levels import get_unwrapped, is_wrapped, level_of, own_level
from funcrec.core._tracked import is_tracked, stand_in, stand_ins
from funcrec.core._tree import tree_flatten

_IMPURE = Problem(
    "`fn` is not a function of its arguments: it ran otherwise when it was computed again.",
    "",
    "the same operations whenever it is called with the same arguments",
    "pass what changes as an argument",
)
_INNER = Problem(
    "a transform inside of `fn` follows a tensor that `fn` closes over.",
    "",
    "such tensors among the arguments of `fn`",
    "fr.remat(fn)(..., x), or fr.remat of the function that the inner transform calls",
    TypeError,
)


class Run:
    """A run of a function: the first one, or a later one.

    call: the name in errors. outer: the run around this one, or None. level: the level of a first run's arguments; None
    in a later run. found: {id: (a tensor from outside, the tensor that stands for it in the run around)}. answers: what
    `remembered` returned in the first run, in order.
    """

    def __init__(self, call: str, outer: "Run | None", level: int | None, answers: list):
        self.call, self.outer, self.level, self.answers = call, outer, level, answers
        self.found: dict[int, tuple[Tensor, Tensor]] = {}
        self.place, self.refused = 0, None

    @property
    def outside(self) -> list[Tensor]:
        """Return the tensors that the function took from outside."""
        return [value for _, value in self.found.values()]

    def put(self, x: Any) -> Any:
        """Return x with stand-ins in a later run. In a first run return x, and note its tensors from outside."""
        kind = type(x)
        if kind is tuple or kind is list:
            return kind([self.put(v) for v in x])
        if kind is dict:
            return {k: self.put(v) for k, v in x.items()}
        if not isinstance(x, Tensor):
            return x
        if self.level is None:
            return stand_in(x)
        self.note(x)
        return x

    def note(self, x: Tensor) -> None:
        value = base = stand_in(x)
        inside, level = quiet_levels(), sure(self.level)
        while level_of(base) > level or level_of(base) < 0:  # torch reads arguments of a vjp that has ended
            if level_of(base) in inside:  # an argument of a run inside, which `taken` noted, or a result of one
                return
            base = get_unwrapped(base)
        if level_of(base) == self.level or id(x) in self.found or not is_from_transform(base):
            return
        if base is not value:
            self.refused = TypeError(message(self.call, [_INNER._replace(got=describe(base))]))
            raise self.refused
        self.found[id(x)] = (x, value)

    def next_answer(self) -> Any:
        if self.place >= len(self.answers):
            raise ValueError(message(self.call, [_IMPURE._replace(got="another number of lookups or weighted means")]))
        self.place += 1
        return self.answers[self.place - 1]


_run: contextvars.ContextVar[Run | None] = contextvars.ContextVar("funcrec_run", default=None)


def is_from_transform(x: Tensor) -> bool:
    """Return whether a transform or autograd may follow x."""
    return is_wrapped(x) or x.requires_grad or is_tracked(x)


def current_run() -> Run | None:
    """Return the innermost run, or None outside of all runs."""
    return _run.get()


def quiet_levels() -> set[int]:
    """Return the levels that first runs opened, at which nothing is differentiated."""
    run, levels = _run.get(), set()
    while run is not None:
        levels |= set() if run.level is None else {run.level}
        run = run.outer
    return levels


def taken(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors that the current runs give to another function, with stand-ins in later runs.

    First runs note the tensors, which operations inside of that function see at levels of its own.
    """
    given, run = list(tensors), _run.get()
    while run is not None:
        given, run = run.put(given), run.outer
    return given


def remembered(home: Run | None, make: Callable[[], Any]) -> Any:
    """Return make() in a first run, and the same again in a later run.

    home: the run in which the object was made that is asked. Runs inside of it remember; the run itself asks anew.
    """
    return _asked(_run.get(), home, make)


def _asked(run: Run | None, home: Run | None, make: Callable[[], Any]) -> Any:
    if run is None or run is home:
        with entered(run):
            return make()
    if run.level is None:
        return run.next_answer()
    answer = _asked(run.outer, home, make)
    run.answers.append(answer)
    return answer


@contextlib.contextmanager
def entered(run: Run | None) -> Iterator[None]:
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


class _Outside(TorchFunctionMode):
    """A mode that shows a run the tensors of every operation."""

    def __init__(self, run: Run):
        super().__init__()
        self.run = run

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(kwargs.get("generator"), torch.Generator):
            refuse_draws(self.run.call, f"{getattr(func, '__name__', func)}(generator=...)")
        return func(*self.run.put(args), **self.run.put(kwargs))


def refuse_draws(call: str, got: str) -> None:
    problem = Problem(
        "`fn` draws from torch's generator.", got, "random numbers that are made of a key, an argument",
        "fr.key, fr.split and fr.nn.dropout", TypeError,
    )  # fmt: skip
    raise TypeError(message(call, [problem]))


def first_run(call: str, fn: Callable, tensors: Sequence[Tensor]) -> tuple[list, Any, Run]:
    """Return the leaves of fn(*tensors), their structure, and the run. No derivative of the leaves is kept."""
    with torch.no_grad(), own_level() as (level, wrap, unwrap):
        run = Run(call, _run.get(), level, [])
        try:
            with entered(run), _Outside(run):
                leaves, structure = tree_flatten(fn(*map(wrap, tensors)))
        except TypeError as error:  # Python's operators replace the error of a tensor by an error of their own.
            raise run.refused or error from None
        for x in leaves:
            run.put(x)
        return [unwrap(x) if isinstance(x, Tensor) else x for x in leaves], structure, run


def later_run(first: Run, fn: Callable, tensors: Sequence[Tensor], outside: Sequence[Tensor]) -> tuple[list, Any]:
    """Return the leaves of fn(*tensors), with stand-ins for what the first run found outside, and their structure."""
    run, token = Run(first.call, None, None, first.answers), stand_ins.set(dict(zip(first.found, outside, strict=True)))
    try:
        with entered(run), _Outside(run):
            leaves, structure = tree_flatten(fn(*tensors))
        leaves = [run.put(x) for x in leaves]
    finally:
        stand_ins.reset(token)
    if run.place != len(run.answers):
        raise ValueError(message(run.call, [_IMPURE._replace(got="another number of lookups or weighted means")]))
    return leaves, structure
