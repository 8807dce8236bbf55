"""Run every public call and every docstring's example, and record the shapes and dtypes of their tensors.

The records stand next to the docstrings' statements about shapes."""

import contextlib
import dataclasses
import doctest
import functools
import importlib
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import funcrec as fr
from programs.doc_shapes import Call, Statement, annotated, call_of, first_shapes, shapes_in, statements_of

FACES = {"": fr, "optim.": fr.optim, "nn.": fr.nn, "metrics.": fr.metrics, "models.": fr.models}
MOST = 200  # calls kept per function, each with forms that the other kept calls do not have


class Said(NamedTuple):
    """A docstring's statements about shapes, and the recorded calls of its function or class."""

    statements: list[Statement]
    calls: list[Call]


def public() -> Iterator[tuple[str, Any]]:
    """Yield (name, function or class) of everything public, each pair once."""
    seen = set()
    for prefix, face in FACES.items():
        for name, x in vars(face).items():
            if not name.startswith("_") and isinstance(x, FunctionType | type) and id(x) not in seen:
                seen.add(id(x))
                yield prefix + name, x


def doc_of(x: Any) -> str:
    return inspect.getdoc(x) or ""


class Recorder:
    """A record {name: the docstring's statements, and calls}. `patched` wraps functions and methods while it lasts."""

    def __init__(self):
        self.said: dict[str, Said] = {}
        self.is_noting = False  # calls that `note` makes are not noted
        self.fields = {x: f"{name}" for name, x in public() if isinstance(x, type) and hasattr(x, "__annotations__")}

    def note(self, name: str, statements: Callable[[], list[Statement]], values: Mapping[str, Any]) -> None:
        """Note a call, the fields of the call's arguments, and the fields of its result."""
        if self.is_noting or torch.compiler.is_exporting():  # torch.export makes sizes symbolic
            return
        self.is_noting = True
        try:
            self.keep(name, statements, values)
            self.look(list(values.values()))
        finally:
            self.is_noting = False

    def keep(self, name: str, statements: Callable[[], list[Statement]], values: Mapping[str, Any]) -> None:
        said = self.said.get(name) or self.said.setdefault(name, Said(statements(), []))
        call = call_of(values)
        if len(said.calls) < MOST and call not in said.calls:
            said.calls.append(call)

    def look(self, x: Any) -> None:
        """Note the fields of values whose classes have documented fields."""
        if isinstance(x, dict | list) or type(x) is tuple:
            for v in x.values() if isinstance(x, dict) else x:
                self.look(v)
        elif type(x) is fr.TrainState and x.step.dim():
            return  # the states of an ensemble are stacked
        elif type(x) in self.fields and not is_functions(x):
            own = {n: getattr(x, n) for n in names_of(type(x))}
            self.keep(self.fields[type(x)], lambda: statements_of(doc_of(type(x)), set(own)), {"self": x, **own})

    def wrapped(self, name: str, f: Callable) -> Callable:
        signature, doc = inspect.signature(f), doc_of(f)

        @functools.wraps(f)
        def run(*args, **kwargs):
            out = f(*args, **kwargs)
            values = {**signature.bind(*args, **kwargs).arguments, "": out}
            if is_functions(out):
                return self.watched(out, name, doc, values)
            if not callable(out):  # a maker's statements describe the functions that it returns
                self.note(name, lambda: statements_of(doc, names_of(f)) + list(annotated(f)), values)
            return out

        return run

    def watched(self, out: Any, name: str, doc: str, made_with: Mapping[str, Any]) -> Any:
        """Return a tuple of functions. Each function is noted under the tuple's class and under the tuple's maker."""
        known = {k: v for k, v in made_with.items() if type(v) is int}
        return out._replace(**{n: self.member(f, n, type(out), name, doc, known) for n, f in members(out)})

    def member(self, f: Callable, field: str, cls: type, name: str, doc: str, known: dict) -> Callable:
        signature, names = inspect.signature(f), names_of(f)

        @functools.wraps(f)
        def run(*args, **kwargs):
            out = f(*args, **kwargs)
            values = {**signature.bind(*args, **kwargs).arguments, "": out}
            self.note(f"{cls.__name__}.{field}", lambda: member_statements(doc_of(cls), field, names), values)
            if field == "init" and "Slots: " in doc:
                slots = {
                    s: {t: own[s] for t, own in out.items() if s in own}
                    for s in {s for own in out.values() for s in own}
                }
                self.note(f"{name}: slots", lambda: slot_statements(doc), {**slots, "tables": values["tables"]})
            elif field == "init" and cls is fr.nn.Layer and isinstance(out, dict):
                self.note(
                    f"{name}: params", lambda: [s for s in statements_of(doc, set(out)) if s.subject], {**known, **out}
                )
            elif field == "apply":
                self.note(f"{name}: apply", lambda: statements_of(doc.split("\n\n")[0], names), {**known, **values})
            return out

        return run

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, x in public():
                if not isinstance(x, type):
                    for face in FACES.values():
                        if vars(face).get(x.__name__) is x:
                            patch.setattr(face, x.__name__, self.wrapped(name, x))
                    continue
                for n, m in list(vars(x).items()):
                    f = m.fget if isinstance(m, property) else getattr(m, "__func__", m)
                    if (
                        (n.startswith("_") and n not in ("__getitem__", "__add__"))
                        or not isinstance(f, FunctionType)
                        or is_functions(x)
                    ):
                        continue
                    made = self.wrapped(f"{name}.{n}", f)
                    patch.setattr(
                        x,
                        n,
                        property(made)
                        if isinstance(m, property)
                        else staticmethod(made)
                        if isinstance(m, staticmethod)
                        else made,
                    )
            yield


def names_of(x: Any) -> set[str]:
    return set(x.__annotations__) if isinstance(x, type) else {*inspect.signature(x).parameters}


def is_functions(x: Any) -> bool:
    """Return whether x is a tuple of functions, such as a layer or an optimizer, or the class of such a tuple."""
    cls = x if isinstance(x, type) else type(x)
    return (
        issubclass(cls, tuple)
        and hasattr(cls, "_fields")
        and any("Callable" in str(t) for t in cls.__annotations__.values())
    )


def members(x: Any) -> list[tuple[str, Callable]]:
    return [(n, f) for n, f in x._asdict().items() if isinstance(f, FunctionType)]


def member_statements(doc: str, field: str, names: set[str]) -> list[Statement]:
    """Return the statements about a function in a tuple of functions. These are the class's statements on the
    function's arguments, and `field(...) -> SHAPE` or `field: (...) -> SHAPE`."""
    result = re.search(rf"\b{field}(?:, \w+)*(?:: )?\([^)]*\) -> ([^`;\n]*)", doc)
    own = [s for s in statements_of(doc, names) if s.subject]
    return own + ([Statement("", shapes)] if result and (shapes := first_shapes(result[1])[:1]) else [])


def slot_statements(doc: str) -> list[Statement]:
    """Return the statements on each slot from `Slots: mean and square, each f[R, D]`, for tables f[R, D]."""
    text, out, at = re.search(r"Slots: (.*?)(?=\.\s|\.\Z|\n\n|\Z)", doc, re.S)[1], [], 0
    for start, end, shape in shapes_in(text):
        out += [Statement(n, (shape,)) for n in re.findall(r"\w+", text[at:start]) if n not in ("and", "each")]
        at = end
    return [Statement("tables", first_shapes("f[R, D]")), *out]


def rare(calls: Any) -> None:
    """Make the calls that set fields which other calls leave None: inverse indices, dense inputs, overflow, whole
    gradients of sharded rows, a jvp's mark."""
    ids = fr.KeyedJaggedTensor.from_lists({"x": [[1], [2]], "y": [[3]]})
    dataclasses.replace(ids, inverse=torch.tensor([[0, 1], [0, 0]])).pad_to(4)
    fr.validate(fr.Batch(calls.IDS, torch.zeros(4), torch.zeros(4, 3), torch.ones(4)), calls.FEATURES, calls.CONFIGS)
    fr.optim.rmsprop(momentum=0.9).init(calls.TABLES)
    deep, x = fr.nn.cross_network(4, 2), torch.ones(3, 4)
    deep.apply(deep.init(calls.KEY), x)
    plan = fr.Plan({"t": fr.column_wise("a"), "u": fr.row_wise("b")})
    for sparse in (fr.optim.adagrad(lr=0.1), fr.optim.partial_rowwise_adam(lr=0.1)):
        step = fr.train_step(calls.loss_fn, sparse=sparse, dense=calls.OPT, mesh=calls.MESH, plan=plan, capacity=8)
        step(step.init(calls.PARAMS), calls.BATCH)
    rows = lambda label: fr.global_norm(
        fr.value_and_grad(calls.loss_fn)(calls.PARAMS, fr.Batch(calls.IDS, label))[1].tables
    )
    torch.func.jvp(rows, (torch.ones(4),), (torch.ones(4),))


def made_anew() -> tuple[ModuleType, ModuleType]:
    """Return fresh executions of the modules of public calls and of their values. `sys.modules` keeps
    those that were imported before."""
    names = [f"programs.public_{x}" for x in ("values", "calls_data", "calls_models", "calls")]
    kept = {n: sys.modules.pop(n) for n in names if n in sys.modules}
    try:
        values, *_, calls = (importlib.import_module(n) for n in names)
    finally:
        for n in names:
            sys.modules.pop(n, None)
        sys.modules.update(kept)
    return values, calls


def record(folder: Path) -> dict[str, Said]:
    """Return the recorded calls of `public_calls` and of the examples in docstrings that state shapes.
    `public_calls` is imported again, so that it calls wrapped functions."""
    recorder = Recorder()
    with recorder.patched():
        values, calls = made_anew()
        for call in calls.public_calls(folder):
            torch.manual_seed(0)
            made = call.fn(**call.good)
            if isinstance(made, fr.optim.RowOptimizer):
                made.init(values.TABLES)
        rare(values)
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
        for name, x in public():
            if name in recorder.said and not re.search(r"jit\(|export\(", doc_of(x)):  # none that compiles
                example = doctest.DocTestParser().get_doctest(doc_of(x), {}, name, None, 0)
                runner.run(example, out=io.StringIO().write)
    return recorder.said


def has_tensors(said: Said) -> bool:
    """Return whether a call took or returned a tensor outside of the values that have documented fields."""
    return any(not letters for call in said.calls for forms in call.leaves.values() for _, _, letters in forms)
