"""Requirements of annotations on values: the Requirement `kind_of(hint)` states one, tests it, and reports violations.

An annotation is a class, a union, a Literal, a Sequence or Mapping of annotations, a Callable, or an alias from
`_ranges`. Such an alias adds a range or a tensor's form. `PARTS` may add requirements to a class.
"""

import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcrec.core._errors import EXAMPLES, Problem, describe, example_at
from funcrec.core._hints import FUNCTIONS
from funcrec.core._ranges import Form

PARTS: dict[
    type, Callable[[Any, str], Iterator[Problem]]
] = {}  # {class: function(value, path) that yields the problems of a value of the class}


class Requirement(NamedTuple):
    """The requirement on an argument.

    need: the requirement in words. find: (path, value) -> problems. fits: whether a value has no problem. accepts:
    whether the outermost structure of a value is right. example: an expression of a value that fits.
    """

    need: str
    find: Callable[[str, Any], Iterator[Problem]]
    fits: Callable[[Any], bool]
    accepts: Callable[[Any], bool]
    example: str = ""


_PLAIN: dict[Any, tuple[tuple, str, str]] = {
    int: ((numbers.Integral, torch.SymInt), "an integer", "an int"),
    float: ((numbers.Real, torch.SymFloat, torch.SymInt), "a number", "a number"),
    bool: ((bool, np.bool_, torch.SymBool), "a truth value", "True or False"),
    str: ((str,), "a string", "a string"),
    Tensor: ((Tensor,), "a tensor", "a tensor"),
    torch.dtype: ((torch.dtype,), "a dtype", "a torch.dtype"),
    type: ((type,), "a class", "a class"),
    Iterable: ((Iterable,), "iterable", "an iterable"),
}
_DTYPES: dict[str, Callable[[torch.dtype], bool]] = {
    "f": lambda d: d.is_floating_point,
    "i": lambda d: d in (torch.int32, torch.int64),
    "i64": lambda d: d == torch.int64,
    "b": lambda d: d == torch.bool,
    "x": lambda d: not d.is_complex,
    "n": lambda d: not d.is_complex and d != torch.bool,
    "": lambda d: True,
}
_CASTS = {"f": "float()", "i": "long()", "i64": "long()", "b": "bool()", "x": "real", "n": "long()", "": ""}


def kind_of(hint: Any, owner: Any = None) -> Requirement:
    """Return what an annotation requires. The module of `owner`, a function or class, resolves quoted annotations."""
    if isinstance(hint, typing.TypeVar) and hint.__constraints__:
        return _union(hint.__constraints__, owner)
    if isinstance(hint, typing.TypeVar | typing.ParamSpecArgs | typing.ParamSpecKwargs):
        return ANYTHING
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, str | typing.ForwardRef):
        return _late(hint if isinstance(hint, str) else hint.__forward_arg__, owner)
    if origin is Annotated:
        return _annotated(args[0] if len(args) == 2 else Annotated[args[:-1]], args[-1], owner)
    if origin is os.PathLike or (args and all(a is Any or a is ... for a in args)):
        hint, origin, args = origin, None, ()  # a path; a mapping, a sequence or an iterable of anything
    if origin in (typing.Union, types.UnionType):
        return _union(args, owner)
    if origin is typing.Literal:
        return _literal(args)
    if origin in (Mapping, dict):
        return _mapping(args, owner)
    if origin in (Sequence, Collection, tuple, list):
        return _sequence(origin, args, owner)
    if origin is Callable or hint is Callable or is_function_protocol(origin or hint):
        return _instance(callable, "a function", "a function", Callable)
    plain = origin if origin in _PLAIN else hint
    if plain in _PLAIN:
        is_number, (classes, noun, need) = plain in (int, float), _PLAIN[plain]
        is_one = lambda x: isinstance(x, classes) and not (is_number and x.__class__ is bool)
        return _instance(is_one, noun, need, plain)
    if hint is Any or hint is object or not isinstance(hint, type) or getattr(hint, "_is_protocol", False):
        return ANYTHING
    return _of_class(hint)


def is_function_protocol(hint: Any) -> bool:
    """Return whether a class is a Protocol of functions: it names their arguments for a type checker."""
    return getattr(hint, "_is_protocol", False) and "__call__" in vars(hint)


def _instance(is_one: Callable[[Any], bool], noun: str, need: str, cls: Any = None) -> Requirement:
    def find(path: str, x: Any) -> Iterator[Problem]:
        if not is_one(x):
            yield Problem(f"`{path}` is not {noun}.", describe(x), need, conversion(path, x, cls), TypeError)

    return Requirement(need, find, is_one, is_one, EXAMPLES.get(getattr(cls, "__name__", ""), ""))


def _of_class(cls: type) -> Requirement:
    need, example = f"{'an' if cls.__name__[0] in 'AEIOU' else 'a'} {cls.__name__}", EXAMPLES.get(cls.__name__, "")

    def find(path: str, x: Any) -> Iterator[Problem]:
        if not isinstance(x, cls):
            yield Problem(f"`{path}` is not {need}.", describe(x), need, _example(path, example), TypeError)
        elif cls in PARTS:
            yield from PARTS[cls](x, path)

    is_one = lambda x: isinstance(x, cls)
    return Requirement(need, find, lambda x: is_one(x) and (cls not in PARTS or _is_clean(find, x)), is_one, example)


def _is_clean(find: Callable, x: Any) -> bool:
    return not any(True for _ in find("", x))


ANYTHING = Requirement("anything", lambda path, x: iter(()), lambda x: True, lambda x: True)


def _annotated(hint: Any, more: Any, owner: Any) -> Requirement:
    if isinstance(more, Form):
        return _formed(more) if hint is Tensor else _jagged(more, kind_of(hint, owner))
    if more == "device":
        return _DEVICE
    inner = kind_of(hint, owner)

    def find(path: str, x: Any) -> Iterator[Problem]:
        found = [p._replace(need=more.need) if p.what.startswith(f"`{path}` ") else p for p in inner.find(path, x)]
        yield from found
        if not found and not more.holds(x):
            yield Problem(f"`{path}` {more.what}.", f"{x}" or repr(x), more.need, conversion(path, None, hint))

    example = inner.example or _LOOKS.get(hint, ((), ""))[1]
    return Requirement(more.need, find, lambda x: inner.fits(x) and more.holds(x), inner.accepts, example)


def _formed(form: Form) -> Requirement:
    dtype, least, is_open, need = form.dtype, len(form.dims), form.is_open, form.need
    of_kind, least_bytes = _DTYPES[dtype], 2 if form.is_wide else 0
    holds = lambda d: of_kind(d) and d.itemsize >= least_bytes
    is_dense = lambda x: not least_bytes or (x.layout == torch.strided and not x.is_nested)
    has_rank = lambda x: x.dim() >= least if is_open else x.dim() == least

    def find(path: str, x: Any) -> Iterator[Problem]:
        if not isinstance(x, Tensor):
            hint = conversion(path, x, Tensor)
            hint = _example(path, form.example) if hint.endswith(_LOOKS[Tensor][1]) else hint
            yield Problem(f"`{path}` is not {form.noun}.", describe(x), need, hint, TypeError)
        elif not holds(x.dtype):
            is_mask = x.dtype == torch.bool and form.dtype == "i" and least == 1
            hint = f"{path}.{_CASTS[dtype]}" if form.noun == "a tensor" else _example(path)
            hint = f"{path}.nonzero()[:, 0], where the mask is True" if is_mask else hint
            yield Problem(f"`{path}` is not {form.noun} of this dtype.", describe(x), need, hint, TypeError)
        elif not is_dense(x):
            yield Problem(f"`{path}` is not dense.", describe(x), need, f"{path}.to_dense()", TypeError)
        elif not has_rank(x):
            what, is_column = f"`{path}` is not {form.noun} of these dimensions.", x.dim() == least + 1
            hint = f"{path}.squeeze(-1)" if is_column and x.shape[-1] == 1 else _example(path, form.example)
            yield Problem(what, describe(x), need, hint)

    fits = lambda x: isinstance(x, Tensor) and holds(x.dtype) and has_rank(x) and is_dense(x)
    return Requirement(need, find, fits, lambda x: isinstance(x, Tensor))


def _jagged(form: Form, whole: Requirement) -> Requirement:
    """Return the Requirement on a JaggedTensor whose values have the form. whole: the Requirement of its class."""
    inner, needs_none = _formed(form), not form.weights

    def find(path: str, x: Any) -> Iterator[Problem]:
        found = list(whole.find(path, x)) or list(inner.find(f"{path}.values", x.values))
        yield from found
        if not found and needs_none and x.weights is not None:
            hint = "JaggedTensor(values, offsets)"
            yield Problem(f"`{path}` have weights.", describe(x.weights), "weights=None", hint, TypeError)

    fits = lambda x: whole.fits(x) and inner.fits(x.values) and not (needs_none and x.weights is not None)
    return Requirement(f"{whole.need} of {inner.need}", find, fits, whole.accepts, whole.example)


def _device_problems(path: str, x: Any) -> Iterator[Problem]:
    hint, need = f"{path}='cpu'", "a torch.device, or its name"
    if not isinstance(x, str | torch.device):
        yield Problem(f"`{path}` is not a device.", describe(x), need, hint, TypeError)
    elif isinstance(x, str):
        try:
            torch.device(x)
        except RuntimeError:
            yield Problem(f"`{path}` is not a device.", repr(x), need, hint)


_DEVICE = Requirement(
    "a device", _device_problems, functools.partial(_is_clean, _device_problems),
    lambda x: isinstance(x, str | torch.device)
)  # fmt: skip


def _union(args: tuple, owner: Any) -> Requirement:
    optional, members = type(None) in args, [kind_of(a, owner) for a in args if a is not type(None)]
    need = " or ".join(dict.fromkeys(m.need for m in members)) + (", or None" if optional else "")
    allowed = lambda x: optional and x is None

    def find(path: str, x: Any) -> Iterator[Problem]:
        if allowed(x) or any(m.fits(x) for m in members):
            return
        near = next((m for m in members if m.accepts(x)), None)
        if near is not None:
            yield from (p._replace(need=need) if p.what.startswith(f"`{path}` ") else p for p in near.find(path, x))
        else:
            yield next(members[0].find(path, x))._replace(need=need, kind=TypeError)

    fits = lambda x: allowed(x) or any([m.fits(x) for m in members])  # noqa: C419
    return Requirement(need, find, fits, lambda x: allowed(x) or any(m.accepts(x) for m in members), members[0].example)


def _literal(args: tuple) -> Requirement:
    need = " or ".join(map(repr, args))
    classes = tuple({type(a) for a in args if a is not None})
    fits = lambda x: any(x is a or (isinstance(x, classes) and x.__class__ is not bool and x == a) for a in args)

    def find(path: str, x: Any) -> Iterator[Problem]:
        if not fits(x):
            kind = ValueError if isinstance(x, classes) else TypeError
            yield Problem(f"`{path}` is unknown.", describe(x), need, f"{path}={args[0]!r}", kind)

    return Requirement(need, find, fits, lambda x: isinstance(x, classes))


def _mapping(args: tuple, owner: Any) -> Requirement:
    of_key, of_value = (kind_of(a, owner) for a in args)
    need, example = f"{{name: {of_value.need}}}", f'{{"item": {of_value.example}}}' if of_value.example else ""

    def find(path: str, x: Any) -> Iterator[Problem]:
        if not isinstance(x, Mapping):
            own = _example(path).removeprefix(f"{path}=")
            text = own if own.startswith("{") else example or (f'{{"item": {own}}}' if own else "")
            hint = _example(path, text) if text else ""
            yield Problem(f"`{path}` is not a mapping.", describe(x), need, hint, TypeError)
            return
        for k, v in x.items():
            if not of_key.fits(k):
                hint = _example(path, example)
                yield Problem(f"a name in `{path}` is not {of_key.need}.", describe(k), need, hint, TypeError)
            yield from of_value.find(f"{path}[{k!r}]", v)

    is_one = lambda x: isinstance(x, Mapping)
    fits = lambda x: is_one(x) and all([of_key.fits(k) and of_value.fits(v) for k, v in x.items()])  # noqa: C419
    return Requirement(need, find, fits, is_one, example)


def _sequence(origin: Any, args: tuple, owner: Any) -> Requirement:
    is_fixed = origin is tuple and args != () and args[-1] is not ...
    kinds = [kind_of(a, owner) for a in args if a is not ...] or [ANYTHING]
    classes = (tuple, list) if origin is tuple else (Collection if origin is Collection else Sequence,)
    inner = [k.need for k in kinds]
    need = f"({', '.join(inner)})" if is_fixed else f"a sequence, each {inner[0]}"
    example = f"[{kinds[0].example}]" if kinds[0].example else ""
    is_one = lambda x: isinstance(x, classes) and not isinstance(x, str | Mapping | Tensor)

    def find(path: str, x: Any) -> Iterator[Problem]:
        if not is_one(x):
            own = _example(path)
            is_whole = is_fixed or own.startswith((f"{path}=(", f"{path}=["))
            hint = own if is_whole or not example else _example(path, example)
            hint = f"{path}=[{x!r}]" if isinstance(x, str) and kinds[0].fits(x) else hint
            yield Problem(f"`{path}` is not a sequence.", describe(x), need, hint, TypeError)
        elif is_fixed and len(x) != len(kinds):
            yield Problem(f"`{path}` has another length.", f"{len(x)} elements", need, _example(path))
        else:
            for i, e in enumerate(x):
                yield from kinds[i if is_fixed else 0].find(f"{path}[{i}]", e)

    if is_fixed:
        fits = lambda x: is_one(x) and len(x) == len(kinds) and all([k.fits(e) for k, e in zip(kinds, x)])  # noqa: C419
    else:
        fits = lambda x: is_one(x) and all(map(kinds[0].fits, x))
    return Requirement(need, find, fits, is_one, example)


def _late(name: str, owner: Any) -> Requirement:
    """Return the Requirement of a class that is defined later. A name that does not exist accepts anything."""

    @functools.cache
    def resolved() -> Requirement:
        found = getattr(inspect.unwrap(owner), "__globals__", {}).get(name)
        return ANYTHING if found is None else kind_of(found)

    return Requirement(
        f"a {name}", lambda path, x: resolved().find(path, x), lambda x: resolved().fits(x),
        lambda x: resolved().accepts(x),
        EXAMPLES.get(name, ""),
    )  # fmt: skip


# -- what to try -----------------------------------------------------------------------------------------------------


def conversion(path: str, x: Any, cls: Any) -> str:
    """Return an expression that converts the value to what is needed, or an example."""
    if cls is Tensor and isinstance(x, np.ndarray):
        return f"torch.from_numpy({path})"
    if cls is Tensor and isinstance(x, list | tuple) and x and all(isinstance(e, int | float) for e in x):
        return f"torch.tensor({path})"
    if cls is int and isinstance(x, Tensor) and x.dim() == 0:
        return f"int({path}), which waits for the device"
    if cls is bool:
        return f"{path}=True, or False"
    if cls is Callable and path in FUNCTIONS:
        return f"{path}={FUNCTIONS[path]}"
    own, (begins, plain) = _example(path), _LOOKS.get(cls, ((), ""))
    is_other = own.startswith(f"{path}=") and not own.startswith(tuple(f"{path}={b}" for b in begins))
    return _example(path, plain) if plain and (is_other or not own) else own  # Two arguments may have one name.


_LOOKS: dict[Any, tuple[Sequence[str], str]] = {  # {class: (beginnings of its examples, one example)}
    int: ("0123456789", "2"),
    float: ("0123456789", "0.5"),
    str: ('"', '"item"'),
    Tensor: (("torch.", "fr.key"), "torch.ones(4)"),
    Callable: (("lambda", "fr.", "torch."), "lambda *args: args"),
}


def _example(path: str, text: str = "") -> str:
    """Return `path=text`, or without a text the example of the argument at the end of `path`."""
    return f"{path}={text}" if text else example_at(path.split(".")[-1])
