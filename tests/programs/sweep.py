"""Replace every argument of every public call, and every field and element of an argument, by a wrong value."""

import contextlib
import dataclasses
import inspect
import io
import os
import signal
import sys
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import funcrec as fr

LIMIT_S = 60  # of the clock: under a load a call takes many times what it takes alone
LIBRARY, PROGRAMS = (str(Path(x).parent) + os.sep for x in (fr.__file__, __file__))
TREES = (fr.JaggedTensor, fr.KeyedJaggedTensor, fr.KeyedTensor, fr.Params, fr.Batch, fr.TrainState)


class Opaque:
    def __repr__(self):
        return "Opaque()"


def wrong_values() -> dict[str, Any]:
    own = {
        "None": None, "'no'": "no", "7": 7, "-1": -1, "0": 0, "True": True, "nan": float("nan"),
        "[1.5, 'a']": [1.5, "a"],
        "()": (), "{'q': 1}": {"q": 1}, "object": Opaque(), "f32[1, 1, 1, 1]": torch.ones(1, 1, 1, 1),
        "bool[3]": torch.ones(3) > 0,
        "c64[2]": torch.ones(2, dtype=torch.complex64), "i64[17]": torch.arange(17), "f32[0]": torch.ones(0),
        "f64[]": torch.tensor(0.5).double(),
        "meta": torch.ones(2, 2, device="meta"), "numpy": np.ones((2, 3)),
        "JaggedTensor": fr.JaggedTensor.from_lists([[0.5], []]),
        "mesh": fr.Mesh.emulated(z=2), "function": lambda *args, **kwargs: None, "class": dict,
    }  # fmt: skip
    with contextlib.suppress(ImportError), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrec import KeyedJaggedTensor

        own["torchrec"] = KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([1]))
    return own


class Outcome(NamedTuple):
    """The outcome of one wrong call. kind: "returned", "said" (got and need), "raw". whole: all four parts.

    fits: "closed" if the annotation names the value's class, "open" if it accepts the value only as a tensor or as Any,
    "" if the value does not fit.
    """

    call: str
    path: str
    wrong: str
    kind: str
    whole: bool
    text: str
    fits: str


def places(good: dict) -> Iterator[tuple[str, Callable[[Any], dict], Any]]:
    """Yield (path, wrong value -> arguments, the good value) of each argument, and of each element or field one level
    below."""
    for name, value in good.items():
        yield name, lambda x, n=name: {**good, n: x}
        if isinstance(value, Mapping) and type(value) is dict:
            for k in value:
                yield f"{name}[{k!r}]", lambda x, n=name, k=k, v=value: {**good, n: {**v, k: x}}
        elif type(value) in (list, tuple):
            for i in range(min(len(value), 2)):
                yield f"{name}[{i}]", lambda x, n=name, i=i, v=value: {**good, n: type(v)([*v[:i], x, *v[i + 1 :]])}
        elif type(value) in TREES:
            for f in dataclasses.fields(value):
                yield f"{name}.{f.name}", lambda x, n=name, f=f.name, v=value: {**good, n: with_field(v, f, x)}


def with_field(value: Any, field: str, x: Any) -> Any:
    """Return the value with a replaced field. As in a tree operation, no constructor runs."""
    made = object.__new__(type(value))
    for f in dataclasses.fields(value):
        object.__setattr__(made, f.name, x if f.name == field else getattr(value, f.name))
    return made


@contextlib.contextmanager
def limited(seconds: int = LIMIT_S):
    def ring(*_):
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(call, path: str, wrong: str, arguments: dict, fits: str) -> Outcome:
    try:
        with limited():
            call.fn(**arguments)
    except Exception as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        says = "\n  got   " in text and "\n  need  " in text
        return Outcome(
            call.name, path, wrong, "said" if says else "raw", says and "\n  try   " in text,
            text if says else f"{type(error).__name__}: {text}", fits,
        )  # fmt: skip
    return Outcome(call.name, path, wrong, "returned", False, "", fits)


@contextlib.contextmanager
def reached(call, codes: set):
    """Add the code of the function that a good call runs: its own code, or that of the functions it calls after the
    checks of arguments."""
    own = code_of(call.fn)
    if own is not None and own.co_filename.startswith(LIBRARY):
        codes.add(own)
        yield
        return
    between = tuple(LIBRARY + x for x in ("core/_typed.py", "core/_annotations.py", "core/_number_checks.py"))

    def on_call(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            by = frame.f_back
            while by.f_code.co_filename.endswith("contextlib.py") or by.f_code.co_filename.startswith(between):
                by = by.f_back
            if by.f_code.co_filename.startswith(PROGRAMS):
                codes.add(frame.f_code)

    sys.setprofile(on_call)
    try:
        yield
    finally:
        sys.setprofile(None)


def code_of(fn: Any) -> types.CodeType | None:
    """Return the code of the function inside all wrappers. For a class, return the code of the constructor."""
    fn = inspect.unwrap(vars(fn).get("__init__", fn.__new__) if inspect.isclass(fn) else fn)
    return getattr(getattr(fn, "__func__", fn), "__code__", None)


def public_functions() -> Iterator[tuple[str, Any]]:
    """Yield (name, function or method) of every public function or method that takes an argument."""
    for face in (fr, *(getattr(fr, n) for n in fr.__all__ if isinstance(getattr(fr, n), types.ModuleType))):
        prefix = face.__name__.removeprefix("funcrec").removeprefix(".")
        for name in face.__all__ if prefix not in ("kernels", "examples") else ():
            found = getattr(face, name)
            methods = [n for n in vars(found) if not n.startswith("_")] if inspect.isclass(found) else []
            fits = lambda x: inspect.isroutine(x) and set(inspect.signature(x).parameters) - {"self"}
            own = [(f"{name}.{n}", getattr(found, n)) for n in methods] or [(name, found)]
            yield from ((".".join(filter(None, (prefix, n))), x) for n, x in own if fits(x))


def sweep(calls, folder, codes: set) -> Iterator[Outcome]:
    """Yield the outcomes of all wrong calls in `folder`, where a test finds unexpected files. codes: receives the code
    that the good calls reach."""
    values = wrong_values()
    os.chdir(folder)
    for call in calls:
        with limited(60), reached(call, codes):  # 60 s, because imports also take time
            call.fn(**call.good)
        hints = annotations(call.fn) | inner_annotations(call)
        for path, replaced in places(call.good):
            if path in call.skip:
                continue
            for name, x in values.items():
                fits = how_it_fits(x, hints[path]) if path in hints else ""
                yield attempt(call, path, name, replaced(x), fits)


def tried(calls, outcomes: Sequence[Outcome], own: dict) -> Iterator[tuple[Outcome, Outcome]]:
    """Yield (the outcome of the wrong argument, the outcome of the suggested value). The values are those that errors
    suggest, if the suggestion can be evaluated with the names in `own`."""
    by_name, seen = {call.name: call for call in calls}, set()
    for o in outcomes:
        given = [line.partition("=")[2] for line in o.text.split("\n") if line.startswith(f"  try   {o.path}=")]
        for text in given:
            if (o.call, o.path, text) not in seen and o.path in by_name[o.call].good:
                seen.add((o.call, o.path, text))
                with contextlib.suppress(NameError, SyntaxError):  # the text uses names of the reader's own program
                    x = eval(text, dict(own))
                    call = by_name[o.call]
                    yield o, attempt(call, o.path, text, {**call.good, o.path: x}, "")


# -- what signatures say -----------------------------------------------------------------------------------------


def annotations(fn: Any) -> dict[str, Any]:
    fn = fn.__init__ if inspect.isclass(fn) and not hasattr(fn, "_fields") else fn
    inner = inspect.unwrap(fn)
    try:
        return typing.get_type_hints(getattr(inner, "__func__", inner))
    except Exception:
        return {}


def inner_annotations(call) -> dict[str, Any]:
    """Return {path: annotation} one level below the arguments."""
    out = {}
    for name, value in call.good.items():
        if type(value) in TREES:
            out |= {f"{name}.{n}": t for n, t in typing.get_type_hints(type(value)).items()}
        hint = annotations(call.fn).get(name)
        inner = typing.get_args(hint)
        if inner and type(value) is dict and typing.get_origin(hint) in (dict, Mapping):
            out |= {f"{name}[{k!r}]": inner[1] for k in value}
        elif inner and type(value) in (list, tuple) and typing.get_origin(hint) in (Sequence, tuple, list):
            out |= {
                f"{name}[{i}]": inner[min(i, len(inner) - 1)] if inner[-1] is not ... else inner[0] for i in range(2)
            }
        elif hint is Any and type(value) in (dict, list, tuple):
            out |= {path: Any for path, _ in places({name: value})}
    return out


def how_it_fits(x: Any, hint: Any) -> str:
    if x != x if isinstance(x, float) else False:  # NaN
        return ""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    fitting = [m for m in map(without_any, members) if is_a(x, m)]
    is_open = lambda m: (
        m in (Any, object, torch.Tensor)
        or isinstance(m, typing.TypeVar)
        or (typing.get_origin(m) is not Callable and Any in typing.get_args(m))
    )
    return "" if not fitting else "open" if all(map(is_open, fitting)) else "closed"


def without_any(hint: Any) -> Any:
    """Return Sequence for Sequence[Any], and so on: both say the same."""
    args = typing.get_args(hint)
    return typing.get_origin(hint) if args and all(a is Any or a is ... for a in args) else hint


def is_a(x: Any, hint: Any) -> bool:
    """Return whether a value fits an annotation, one level deep. Any number fits float."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object or isinstance(hint, typing.TypeVar):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(is_a(x, a) for a in args)
    if origin is typing.Literal:
        return any(x is a or (isinstance(x, str) and x == a) for a in args)
    if origin in (Sequence, Collection, list, tuple, Iterable):
        kinds = args[:1] if origin is not tuple or args[1:] == (...,) else args
        if isinstance(x, str | torch.Tensor) or not isinstance(x, tuple if origin is tuple else origin):
            return False
        if len(kinds) > 1 and len(kinds) != len(x):
            return False
        return (
            all(is_a(e, kinds[i % len(kinds)]) for i, e in enumerate(x)) if kinds and origin is not Iterable else True
        )
    if origin in (Mapping, dict):
        return isinstance(x, Mapping) and all(is_a(k, args[0]) and is_a(v, args[1]) for k, v in x.items())
    if origin is Callable or hint is Callable:
        return callable(x)
    if origin is type:
        return isinstance(x, type)
    if hint is float:
        return isinstance(x, (int, float)) and not isinstance(x, bool)
    if hint is int:
        return isinstance(x, int) and not isinstance(x, bool)
    try:
        return isinstance(x, hint)
    except TypeError:  # a protocol
        return True


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    raised = [o for o in outcomes if o.kind != "returned"]
    said = sum(o.kind == "said" for o in raised)
    return {
        "calls": len(outcomes), "returned": len(outcomes) - len(raised), "raised": len(raised),
        "got and need": said / max(len(raised), 1), "all four": sum(o.whole for o in raised) / max(len(raised), 1),
    }  # fmt: skip
