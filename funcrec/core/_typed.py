"""Check arguments against a signature's annotations, before any work.

    @typed
    def f(ids: KeyedJaggedTensor, size: Count): ...        f(3, 0) raises one error about both arguments

Letters of forms are sizes. In `x: Form("f[B, D]"), w: Form("f[B]")` both B must be one number, if both arguments are
given. `@typed(needs={"keep": "checkpoint"})` requires `checkpoint` with `keep`. A function's own validators check
everything else, and can rely on the structure that annotations require.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from funcrec.core._annotations import ANYTHING, Requirement, kind_of
from funcrec.core._errors import EXAMPLES, Problem, call_name, check, describe, example_at
from funcrec.core._number_checks import device_problems, plain_number, signature_error
from funcrec.core._ranges import Form

F = typing.TypeVar("F", bound=Callable)
C = typing.TypeVar("C", bound=type)


class Declared(NamedTuple):
    """The content of a signature.

    names: the names of the positional arguments. rest, more: the names of *args and **kwargs, or "". kinds: {argument:
    the requirement on it}. forms: the forms of tensors that share a letter. needs: {argument: the argument that it
    requires}. defaults: {argument: its default, or Parameter.empty}. torch.compile treats all of this as constants, so
    no field may hold an `inspect.Signature`.
    """

    names: list[str]
    rest: str
    more: str
    kinds: dict[str, Requirement]
    forms: dict[str, Form]
    needs: Mapping[str, str]
    defaults: dict[str, Any]


@typing.overload
def typed(fn: F) -> F: ...
@typing.overload
def typed(*, call: str = "", needs: Mapping[str, str] | None = None) -> Callable[[F], F]: ...
def typed(fn: Any = None, *, call: str = "", needs: Mapping[str, str] | None = None) -> Any:
    """Return a function that checks the arguments by the annotations of `fn`, and then calls `fn`.

    One error reports every invalid argument with its path.

    Args:
      call: the name that errors show, for a function that a public function makes; "" for the function's own name.
      needs: {argument: another argument}. The second must not be None if the first is neither None nor its default.

    Cost: one check of each argument, and of each element of a sequence or mapping. No check reads a tensor's value.
    """
    if fn is None:
        return functools.partial(typed, call=call, needs=needs)
    return (typed_late if "<locals>" in fn.__qualname__ else typed_now)(fn, call, needs or {})


def typed_late(fn: Callable, call: str, needs: Mapping[str, str]) -> Callable:
    """Return `fn`, typed. Another function makes `fn`, and the first call reads the annotations."""
    made = functools.cache(lambda: typed_now(fn, call, needs))

    @functools.wraps(fn)
    def run(*args, **kwargs):
        return fn(*args, **kwargs) if torch.compiler.is_dynamo_compiling() else made()(*args, **kwargs)

    return run


def typed_now(fn: Callable, call: str, needs: Mapping[str, str]) -> Callable:
    declared = declaration(fn, needs)
    names = declared.names
    tests = [declared.kinds.get(n, ANYTHING).fits for n in names]
    named = {n: k.fits for n, k in declared.kinds.items()}
    test_rest, test_more = (declared.kinds.get(n, ANYTHING).fits for n in (declared.rest, declared.more))
    at = lambda n: names.index(n) if n in names else len(names)
    forms = [(n, at(n), form.dims, form.bags) for n, form in declared.forms.items()]
    trees = {n for n, kind in declared.kinds.items() if kind is ANYTHING}  # Their leaves stay as they are.

    @functools.wraps(fn)
    def run(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            return fn(*args, **kwargs)
        if trees:
            head = tuple([x if n in trees else plain_number(x) for n, x in zip(names, args, strict=False)])
            args = head + tuple(map(plain_number, args[len(names) :]))
            kwargs = {n: x if n in trees else plain_number(x) for n, x in kwargs.items()}
        else:
            args, kwargs = tuple(map(plain_number, args)), {n: plain_number(x) for n, x in kwargs.items()}
        good = all([test(x) for test, x in zip(tests, args, strict=False)])  # noqa: C419 (a list is faster)
        if len(args) > len(names):
            good = good and all(map(test_rest, args[len(names) :]))
        for name, x in kwargs.items():
            good = good and named.get(name, test_more)(x)
        if not good:
            check(call or call_name(run), problems(declared, args, kwargs))
        if (forms and not agree(forms, args, kwargs)) or not declared.needs.keys().isdisjoint(kwargs):
            given = dict(zip(names, args, strict=False)) | kwargs
            check(call or call_name(run), letter_problems(declared, given), need_problems(declared, given))
        try:
            return fn(*args, **kwargs)
        except TypeError as error:
            problem = signature_error(run, error)
            if problem is None:
                raise
            raise problem from None

    return run


def declaration(fn: Callable, needs: Mapping[str, str]) -> Declared:
    signature = inspect.signature(fn)
    hints = {n: p.annotation for n, p in signature.parameters.items() if p.annotation is not p.empty}
    of = lambda *ways: [n for n, p in signature.parameters.items() if p.kind in ways]
    names = of(inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest, more = (next(iter(of(w)), "") for w in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD))
    kinds = {n: kind_of(h, fn) for n, h in hints.items()}
    defaults = {n: p.default for n, p in signature.parameters.items()}
    return Declared(names, rest, more, kinds, forms_that_share(hints), needs, defaults)


def problems(declared: Declared, args: tuple, kwargs: dict) -> Iterator[Problem]:
    """Yield the problems of each single argument."""
    names, rest = declared.names, declared.rest
    given = [(n, n, x) for n, x in zip(names, args, strict=False)]
    given += [(rest, f"{rest}[{i}]", x) for i, x in enumerate(args[len(names) :])]
    given += [(n if n in declared.defaults else declared.more, n, x) for n, x in kwargs.items()]
    for n, path, x in given:
        if n in declared.kinds:
            yield from declared.kinds[n].find(path, x)


def forms_that_share(hints: Mapping[str, Any]) -> dict[str, Form]:
    """Return {argument: its form} for each form with a letter that occurs in another form, or twice in this form."""
    found = {n: form for n, h in hints.items() if (form := form_of(h)) is not None}
    letters = {n: (*form.dims, *filter(None, [form.bags])) for n, form in found.items()}
    count = lambda letter: sum(own.count(letter) for own in letters.values())
    return {n: form for n, form in found.items() if any(d.isalpha() and count(d) > 1 for d in letters[n])}


def form_of(hint: Any) -> Form | None:
    """Return the form in `Annotated[Tensor, Form(...)]`, or in a union with such an annotation; else None."""
    metadata = getattr(hint, "__metadata__", ())
    if metadata:
        return metadata[0] if isinstance(metadata[0], Form) else None
    return next((f for a in typing.get_args(hint) if (f := form_of(a)) is not None), None)


def measured(x: Any, dims: tuple[str, ...], bags: str) -> tuple[Tensor | None, list[tuple[str, int]]]:
    """Return a tensor, or the values of a JaggedTensor, with the sizes of the letters. A union may allow other
    values."""
    values = x if isinstance(x, Tensor) else getattr(x, "values", None)
    if not isinstance(values, Tensor):
        return None, []
    sizes = list(zip(dims, values.shape))
    return values, [*sizes, (bags, cast(Any, x).offsets.shape[0] - 1)] if bags else sizes


def agree(forms: list[tuple[str, int, tuple[str, ...], str]], args: tuple, kwargs: dict) -> bool:
    """Return whether each letter has one size, and all tensors are on one device.

    forms: (name, position, dimensions, letter of the bags) of each tensor.
    """
    sizes: dict[str, int] = {}
    device = None
    for name, i, dims, bags in forms:
        x = args[i] if i < len(args) else kwargs.get(name)
        if isinstance(x, Tensor):
            own = zip(dims, x.shape)
        else:
            x, own = measured(x, dims, bags)
        if x is not None:
            if device is None:
                device = x.device
            elif x.device != device:
                return False
            for d, n in own:
                if sizes.setdefault(d, n) != n and d.isalpha():
                    return False
    return True


def letter_problems(declared: Declared, given: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for dimensions with one letter and different sizes, and for tensors on other devices."""
    found = {n: measured(given.get(n), form.dims, form.bags) for n, form in declared.forms.items()}
    found = {n: (x, sizes) for n, (x, sizes) in found.items() if x is not None}
    yield from device_problems(**{n: x for n, (x, _) in found.items()})
    first: dict[str, tuple[str, int]] = {}
    for name, (x, sizes) in found.items():
        form = declared.forms[name]
        for d, n in sizes:
            if d.isalpha():
                first.setdefault(d, (name, n))
        known = {d: first[d] for d, _ in sizes if d in first}
        other = next((known[d][0] for d, n in sizes if d in known and n != known[d][1]), None)
        if other is not None:
            in_bags = lambda text, n: text if n is None else f"{text} in {n} bags"
            shape = [str(known[d][1]) if d in known else d for d in form.dims] + ["..."] * form.is_open
            wanted = in_bags(f"{form.dtype.strip('xn')}[{', '.join(shape)}]", known.get(form.bags, (name, None))[1])
            theirs = in_bags(describe(found[other][0]), dict(found[other][1]).get(declared.forms[other].bags))
            hint = f"{name}=None, or " if declared.defaults.get(name, "") is None else ""
            hint += f"`{name}` and `{other}` of the same {'examples' if 'B' in known else 'sizes'}"
            got, need = in_bags(describe(x), dict(sizes).get(form.bags)), f"{wanted}, as `{other}`, which is {theirs}"
            yield Problem(f"`{name}` does not match `{other}`.", got, need, hint)


def need_problems(declared: Declared, given: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each given argument without the argument that it requires."""
    for name, other in declared.needs.items():
        x = given.get(name)
        if x is None or x is declared.defaults[name] or given.get(other) is not None:
            continue
        got, need = f"{name}={x!r}, {other}=None", f"`{other}` too, or no `{name}`"
        yield Problem(f"`{name}` needs `{other}`.", got, need, example_at(other))


def typed_fields(cls: C) -> C:
    """Return a NamedTuple class, whose constructor then enforces the annotations of the fields."""
    make = cls.__new__

    @functools.wraps(make)
    def new(owner, *args, **kwargs):
        value = make(owner, *map(plain_number, args), **{n: plain_number(x) for n, x in kwargs.items()})
        if not torch.compiler.is_dynamo_compiling():
            hint = EXAMPLES.get(cls.__name__, "")
            check(call_name(cls), (p._replace(hint=hint or p.hint) for p in field_problems(value)))
        return value

    cls.__new__ = staticmethod(new)
    return cls


def field_problems(value: Any) -> Iterator[Problem]:
    """Yield the violations of the annotations of the fields of a dataclass or a NamedTuple."""
    for name, kind in _field_kinds(type(value)).items():
        yield from kind.find(name, getattr(value, name))


@functools.cache
def _field_kinds(cls: type) -> dict[str, Requirement]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {n: kind_of(hints[n], cls) for n in getattr(cls, "_fields", None) or cls.__dataclass_fields__}


def named_as(fn: Callable) -> Callable[[F], F]:
    """Return a decorator that gives a function the name and the text of `fn`, and leaves it its own signature.

    `functools.wraps` gives `fn`'s signature, too, which callers such as `jit` believe.
    """

    def named(run: F) -> F:
        functools.update_wrapper(run, fn)
        del vars(run)["__wrapped__"]
        return run

    return named
