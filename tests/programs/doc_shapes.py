"""Compare the shapes in docstrings with calls: `f[B, D]` in the text is `f[B, D]` in every call. All B are equal.

A statement is a subject (an argument, a field, or the result) and the shapes that it may have:

    rows: i32[M] or i64[M]. grads: f[M, D].     of arguments, or fields of a class, anywhere in the text
    Values [N, ...] and lengths i[B]            in the first line, a name and its shape
    i64[num]: independent keys                  first in the text, or after `->` there or under Shapes: the
                                                result
    Returns:
      KeyedTensor f32[B, ΣD]                    the result
    Slots: mean f[R, D], square f[R].           what the optimizer's `init` gives for a table f[R, D]

A dimension is a number, a name, or arithmetic on dimensions. A name is an int argument of the call or a letter of one
of its values (LETTERS). The first shape gives the size of any other name. `...` stands for the same dimensions
throughout. In trees, the values under one key share names that are local to the key.
"""

import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import funcrec as fr

DTYPES = {
    "b": {torch.bool}, "f": {torch.float16, torch.bfloat16, torch.float32, torch.float64},
    "i": {torch.int32, torch.int64}, "bool": {torch.bool},
    "f32": {torch.float32}, "f64": {torch.float64}, "i32": {torch.int32}, "i64": {torch.int64}, "i8": {torch.int8},
    "u8": {torch.uint8},
}  # fmt: skip
SHAPE = re.compile(
    rf"(?<![\w\])])((?:{'|'.join(DTYPES)})(?:\|(?:{'|'.join(DTYPES)}))*)?\[((?:[^\W\d]|\d|[ ,.·*+()/-])*)\]"
)
DIMS = re.compile(r"(\.\.\.|[^\W\d]\w*|\d+)( *[·*+/-] *\(?([^\W\d]\w*|\d+)( *[-+] *\d+)?\)?)*")


class Shape(NamedTuple):
    dtypes: str
    dims: tuple[str, ...]

    def __repr__(self):
        return f"{self.dtypes}[{', '.join(self.dims)}]"


class Form(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


class Statement(NamedTuple):
    """A statement on a shape. subject: the name of an argument or field, "" for the result. shapes: the allowed
    shapes."""

    subject: str
    shapes: tuple[Shape, ...]


def shapes_in(text: str) -> list[tuple[int, int, Shape]]:
    """Return (start, end, shape) of each shape in the text. A list of numbers is not a shape."""
    out = []
    for m in SHAPE.finditer(text):
        dims = tuple(d.strip() for d in m[2].split(",") if d.strip())
        is_shape = all(map(DIMS.fullmatch, dims)) and (m[1] or any(not d.isdigit() for d in dims))
        if is_shape:
            out.append((m.start(), m.end(), Shape(m[1] or "", dims)))
    return out


def first_shapes(text: str) -> tuple[Shape, ...]:
    """Return the first shape of the text, and the shapes that `or` joins to it."""
    found = shapes_in(text)
    own = found[:1]
    for one in found[1:]:
        if text[own[-1][1] : one[0]].strip(" ,\n") != "or":
            break
        own.append(one)
    return tuple(shape for _, _, shape in own)


def statements_of(doc: str, names: set[str]) -> list[Statement]:
    """Return the statements about these arguments or fields."""
    doc = doc.split("Example:")[0]
    first = doc.split("\n\n")[0]
    out: dict[str, tuple[Shape, ...]] = {}
    marks = [m for m in re.finditer(r"(?<![\w`{])((?:\w+, )*\w+)\"?:\s", doc) if {*m[1].split(", ")} <= names]
    for m, end in zip(marks, [*(n.start() for n in marks[1:]), len(doc)]):
        text = re.split(r"\n\n|\n\w+:", doc[m.end() : end])[0]
        if shapes := first_shapes(text):
            out = {**dict.fromkeys(m[1].split(", "), shapes), **out}
    for start, _, shape in shapes_in(doc):
        before = re.search(r"((?:\w+, )*\w+)`?(?: is| are)?\s+(?:\{\w+: )?$", doc[:start])
        for word in before[1].lower().split(", ") if before else ():
            if word in names:
                out.setdefault(word, (shape,))
    returns = re.search(r"^Returns:\s+(.*?)(?=\n\n|\Z)", doc, re.S | re.M)
    result = first_shapes(returns[1]) if returns else ()
    for text in () if result else (first, *re.findall(r"^Shapes.*(?:\n\S.*)*", doc, re.M)):
        begins = re.match(r"(\{\w+: )?", text).end() in [start for start, _, _ in shapes_in(text)]
        result = result or first_shapes(text if begins else text.partition("->")[2])
    return [Statement(n, s) for n, s in out.items()] + ([Statement("", result)] if result else [])


# -- check a call against its statements -------------------------------------------------------------------------------


def _of_keyed(x: Any) -> dict[str, Any]:
    bags = x.offsets.shape[0] - 1
    return {
        "F": len(x.keys),
        "B": bags / len(x.keys) if x.keys else 0,
        "N": x.values.shape[0],
    }  # for strided values, B is the mean of their numbers of bags


LETTERS = {
    fr.JaggedTensor: lambda x: {"B": x.offsets.shape[0] - 1, "N": x.values.shape[0], "capacity": x.values.shape[0]},
    fr.KeyedJaggedTensor: _of_keyed,
    fr.KeyedTensor: lambda x: {"F": len(x.keys), "B": x.values.shape[0], "ΣD": sum(x.dims)},
    fr.RowGrads: lambda x: {"R": x.num_embeddings, "M": x.capacity, **({"D": x.dim} if x.first is None else {})},
    fr.TableConfig: lambda x: {"num_embeddings": x.num_embeddings, "embedding_dim": x.embedding_dim},
}


class Call(NamedTuple):
    """The forms of a call's arguments and result, without values: {subject: [(path, form, letters)]}. A call also has
    the known sizes of names, for all keys and for each key."""

    leaves: dict[str, list]
    known: dict[str, Any]
    by_key: dict[str, dict]


def call_of(values: Mapping[str, Any]) -> Call:
    """Return the forms of a call's values. values: {argument or field: value}. The result has key ""."""
    known: dict[str, set] = {}
    by_key: dict[Any, dict] = {}
    for name, x in values.items():
        is_size = type(x) is int or (type(x) is tuple and x and all(type(n) is int for n in x))
        found = [{name: x}] if is_size else [letters(v) for v in (x if type(x) in (list, tuple) else [x])]
        for letter, n in (pair for own in found for pair in own.items()):
            known.setdefault(letter, set()).add(n)
        for key, v in x.items() if type(x) is dict else ():
            by_key.setdefault(key, {}).update(letters(v))
        for config in x if type(x) in (list, tuple) else ():
            if type(config) is fr.TableConfig:
                by_key.setdefault(config.name, {}).update(letters(config))
    agreed = {letter: min(sizes) for letter, sizes in known.items() if len(sizes) == 1}
    return Call({n: list(leaves(x)) for n, x in values.items()}, agreed, by_key)


def letters(x: Any) -> dict[str, Any]:
    return LETTERS[type(x)](x) if type(x) in LETTERS else {}


def leaves(x: Any, path: tuple = ()) -> Iterator[tuple[tuple, Form, dict]]:
    """Yield (path of keys, form, letters of the enclosing value) of each tensor."""
    if isinstance(x, Tensor):
        yield path, Form(x.dtype, tuple(x.shape)), {}
    elif isinstance(x, fr.JaggedTensor | fr.KeyedTensor):
        yield path, Form(x.values.dtype, tuple(x.values.shape)), letters(x)
    elif isinstance(x, dict | list) or type(x) is tuple:
        for k, v in x.items() if isinstance(x, dict) else enumerate(x):
            yield from leaves(v, (*path, k))


def violations(statements: list[Statement], call: Call) -> Iterator[str]:
    """Yield the statements that do not hold in the call."""
    scopes: dict[tuple, dict] = {(): dict(call.known)}
    for subject, shapes in statements:
        for path, form, more in call.leaves.get(subject, ()):
            for i in range(len(path)):  # the sizes of a key also hold for all keys below it
                more_known = call.by_key.get(path[i], {})
                scopes.setdefault(path[: i + 1], {**scopes[path[:i]], **more_known})
            scope = scopes[path]
            if not any(fits(form, shape, scope, more) for shape in shapes):
                where = subject + "".join(f"[{k!r}]" for k in path) or "the result"
                known = {k: v for k, v in scope.items() if any(k in d for s in shapes for d in s.dims)}
                yield f"{where} is {form.dtype}{list(form.shape)}, not {' or '.join(map(repr, shapes))} with {known}"


def fits(x: Form, shape: Shape, scope: dict, more: dict) -> bool:
    """Return whether x has the shape. The scope keeps the sizes found for names."""
    if shape.dtypes and not any(x.dtype in DTYPES[d] for d in shape.dtypes.split("|")):
        return False
    trial, sizes = {**more, **scope}, x.shape
    dims = [str(n) for d in shape.dims for n in (trial[d] if isinstance(trial.get(d), tuple) and d != "..." else (d,))]
    if "..." in dims:
        at, rest = dims.index("..."), len(sizes) - (len(dims) - 1)
        if rest < 0 or trial.setdefault("...", sizes[at : at + rest]) != sizes[at : at + rest]:
            return False
        dims[at : at + 1] = map(str, sizes[at : at + rest])
    if len(dims) != len(sizes) or not all(size_fits(d, n, trial) for d, n in zip(dims, sizes)):
        return False
    scope.update(trial)
    return True


def size_fits(dim: str, size: int, scope: dict) -> bool:
    names = re.findall(r"[^\W\d]\w*", dim)
    unknown = [n for n in names if n not in scope]
    if len(unknown) > 1:
        return False
    value = lambda: eval(re.sub(r"[^\W\d]\w*", lambda m: str(scope[m[0]]), dim.replace("·", "*")))
    if not unknown:
        return value() == size
    if dim == unknown[0]:
        scope[dim] = size
        return True
    return any(value() == size for scope[unknown[0]] in range(size + 2))  # the least size that fits


def annotated(f: Callable) -> Iterator[Statement]:
    """Return the shapes that a signature's annotations state."""
    for name, parameter in inspect.signature(f).parameters.items():
        hints = [parameter.annotation, *typing.get_args(parameter.annotation)]
        forms = [more.text for hint in hints for more in getattr(hint, "__metadata__", ()) if hasattr(more, "noun")]
        if shapes := tuple(shape for text in forms for shape in first_shapes(text)):
            yield Statement(name, shapes)
