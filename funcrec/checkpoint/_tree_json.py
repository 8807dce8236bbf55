"""Writes trees as JSON, which a checkpoint stores with the tensors, and reads the same trees back.

    decode(encode(tree)) == tree with the same types, or encode names every leaf and key that would not come back

A number, string, bool or None is itself. Every other node is a list that begins with the node's kind. The code of a
tensor is its place in the order of tensors. No kind names code to run.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING
from typing import Any, NamedTuple, cast

import torch
import torch.utils._pytree as torch_tree
from torch import Tensor

from funcrec.compile import Donated, donated_message
from funcrec.core import (
    CLASSES,
    STATIC_DEFAULTS,
    DonatedError,
    Problem,
    class_name,
    describe,
    is_in_transform,
    is_tracked,
)

PLAIN = (int, float, str, bool, type(None))
MAX_DEPTH = 100
MAX_INT = 2**63
NEED = "tensors, numbers, strings, None, dicts, lists, tuples and funcrec's values"
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.bool,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    )
}  # fmt: skip


class CodeError(Exception):
    """The JSON is not the code of a tree."""


class Cut(NamedTuple):
    """A tensor of which this process has parts.

    held: the tensors in which the parts lie. grid: the numbers of rows and columns for the cut.
    parts: (where) -> (rank, first row, first column, [rows, ...]) of each part.
    """

    held: tuple[Tensor, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    grid: tuple[int, int]
    parts: Callable[[Any], Iterator[tuple[int, int, int, Tensor]]]


class Encoded(NamedTuple):
    """An encoded tree. code: a value that JSON can write. leaves: {path: tensor, or Cut}, in order.

    problems: the reasons why the tree cannot be saved. If there are problems, do not use the code.
    """

    code: Any
    leaves: dict[str, Tensor | Cut]
    problems: list[Problem]

    @property
    def tensors(self) -> list[Tensor]:
        return cast(list[Tensor], list(self.leaves.values()))


def encode(tree: Any, name: str, see: Callable[[Any], Any] = lambda node: node) -> Encoded:
    """Return the encoded tree. Errors call the tree `name`, and `see` maps each node to the node to write."""
    out = Encoded(None, {}, [])
    return out._replace(code=_encode(tree, name, (), out, see))


def _encode(node: Any, path: str, above: tuple[int, ...], out: Encoded, see: Callable[[Any], Any]) -> Any:
    def refuse(got: str, hint: str, need: str = NEED):
        out.problems.append(Problem(f"`{path}` cannot be saved.", got, need, hint, TypeError))

    inside = lambda child, where: _encode(child, f"{path}{where}", (*above, id(given)), out, see)
    given, node = node, see(node)
    if isinstance(node, Tensor | Cut):
        for x in node.held if isinstance(node, Cut) else (node,):
            out.problems.extend(tensor_problems(x, path))
        out.leaves[path if path not in out.leaves else f"{path} ({len(out.leaves)})"] = node
        return ["tensor"]
    if type(node) in PLAIN:
        return _encode_plain(node)
    if id(given) in above:
        return refuse("a value that holds itself", "a tree", "a tree")
    if len(above) > MAX_DEPTH:
        return refuse(f"more than {MAX_DEPTH} values, one in another", "a flatter tree", f"at most {MAX_DEPTH}")
    if type(node) is dict:
        out.problems.extend(p for k in node for p in _key_problems(k, path))
        return ["dict", [[_encode_key(k), inside(v, f"[{show(k)}]")] for k, v in node.items()]]
    if type(node) in (list, tuple):
        return [type(node).__name__, [inside(v, f"[{i}]") for i, v in enumerate(node)]]
    if class_name(type(node)) in CLASSES:
        return _encode_class(node, path, inside, out.problems)
    refuse(describe(node), _hint(node))


def _encode_class(node: Any, path: str, inside: Callable, problems: list[Problem]) -> Any:
    name, (flatten, _) = type(node).__name__, CLASSES[class_name(type(node))]
    if torch_tree.SUPPORTED_NODES[type(node)].flatten_fn is not flatten:
        got = f"a {name} of an earlier definition: another class has taken its name"
        return problems.append(Problem(f"`{path}` cannot be saved.", got, NEED, "another name", TypeError))
    children, (fields, static) = flatten(node)
    parts = [inside(v, f".{n}") for n, v in zip(fields, children, strict=True)]
    before = len(problems)
    code = ["class", class_name(type(node)), list(fields), parts, inside(static, "")]
    if problems[before:]:  # the static fields have problems
        hint = "numbers, strings and tuples as static fields"
        got = f"{name} with the static fields {show(static)}"
        problems[before:] = [Problem(f"`{path}` cannot be saved.", got, NEED, hint, TypeError)]
    return code


def show(x: Any) -> str:
    try:
        return f"{x!r:.100}"
    except Exception:  # repr may fail: for a user's class, or an integer with too many digits
        return f"<{type(x).__name__}>"


def _hint(node: Any) -> str:
    if isinstance(node, dict):
        return "dict(x)"
    if isinstance(node, (tuple, list)):
        return f"{'tuple' if isinstance(node, tuple) else 'list'}(x)"
    if type(node).__module__ == "numpy":
        return "torch.from_numpy(x)" if type(node).__name__ == "ndarray" else "x.item()"
    return "x.value" if hasattr(node, "value") else "a class made by fr.pytree, or leave it out"


def _encode_plain(value: Any) -> Any:
    return ["int", hex(value)] if type(value) is int and not -MAX_INT <= value < MAX_INT else value


def _encode_key(key: Any) -> Any:
    return ["tuple", [_encode_key(k) for k in key]] if type(key) is tuple else _encode_plain(key)


def _key_problems(key: Any, path: str, depth: int = 0) -> Iterator[Problem]:
    if type(key) is tuple and depth < MAX_DEPTH:
        for k in key:
            yield from _key_problems(k, path, depth + 1)
    elif type(key) not in PLAIN:
        got = f"{type(key).__name__} {show(key)}"
        need = "int, float, str, bool, None, or a tuple of them"
        yield Problem(f"`{path}` has a key that cannot be saved.", got, need, _key_hint(key), TypeError)


def _key_hint(key: Any) -> str:
    return "int(k)" if hasattr(key, "__index__") else "str(k)"


def tensor_problems(x: Tensor, path: str) -> Iterator[Problem]:
    """Report properties of a tensor that the stored bytes would not keep."""
    what, need = f"`{path}` cannot be saved.", "a dense torch.Tensor with memory of its own"

    def problem(got: str, hint: str) -> Problem:
        return Problem(what, got, need, hint, TypeError)

    if isinstance(x, Donated):
        got = donated_message(x).splitlines()[0].removeprefix("funcrec.jit: ")
        yield Problem(what, got, need, "the value that the call returned in its place", DonatedError)
    elif type(x) is not Tensor:
        is_parameter = isinstance(x, torch.nn.Parameter)
        yield problem(f"a {type(x).__name__}", "x.detach()" if is_parameter else "the plain tensors that it is made of")
    elif x.requires_grad or is_tracked(x):
        yield problem(f"{describe(x)} that is differentiated", "x.detach()")
    elif x.is_nested:
        yield problem("a nested tensor", "fr.JaggedTensor")
    elif x.is_quantized:
        yield problem("a quantised tensor", "x.int_repr(), and its scale and zero point")
    elif x.layout != torch.strided:
        yield problem(f"{describe(x)} with the layout {x.layout}", "x.to_dense(), or its indices and values")
    elif x.is_meta:
        yield problem(f"{describe(x)}: it has no memory", "a tensor on a device")
    elif str(x.dtype).removeprefix("torch.") not in DTYPES:
        yield problem(describe(x), "x.view(torch.uint8)")


def transform_problems() -> Iterator[Problem]:
    """Report a call inside a transform, where files must not be read or made."""
    if is_in_transform():
        got, need = "a call inside vmap, grad or another transform of torch.func", "a call outside of them"
        yield Problem("a transform cannot include a file.", got, need, "return the value, and save it then", TypeError)


def decode(code: Any, tensors: Iterator[Tensor], depth: int = 0) -> Any:
    """Return the decoded tree, whose tensors come in order.

    Raises:
      CodeError: if the code is not the code of a tree.
    """
    if depth > MAX_DEPTH + 1:
        raise CodeError(f"a tree that is more than {MAX_DEPTH} deep")
    inside = lambda part: decode(part, tensors, depth + 1)
    match code:
        case bool() | int() | float() | str() | None:
            return code
        case ["int", str(digits)]:
            return _number(digits)
        case ["tensor"]:
            found = next(tensors, None)
            if found is None:
                raise CodeError("more tensors in the tree than in the file")
            return found
        case ["dict", list(items)]:
            return _decode_dict(items, inside)
        case ["list", list(items)]:
            return [inside(v) for v in items]
        case ["tuple", list(items)]:
            return tuple([inside(v) for v in items])
        case ["class", str(name), list(fields), list(parts), static]:
            return _decode_class(name, fields, [inside(p) for p in parts], inside(static))
    raise CodeError(f"a node of the tree that is unknown: {show(code)}")


def _number(digits: str) -> int:
    try:
        return int(digits, 16)
    except ValueError:
        raise CodeError(f"no number: {digits!r:.60}") from None


def _decode_dict(items: list, inside: Callable) -> dict:
    if not all(isinstance(item, list) and len(item) == 2 for item in items):
        raise CodeError("a dict that is not made of pairs")
    none: Iterator[Tensor] = iter(())
    try:
        found = {decode(k, none): inside(v) for k, v in items}
    except TypeError as error:  # the key has no hash
        raise CodeError(f"a dict's key: {error}") from None
    if len(found) < len(items):
        raise CodeError("a dict that has a key twice")
    return found


def _decode_class(name: str, fields: list, parts: list, static: Any) -> Any:
    found = CLASSES.get(name)
    if found is None:
        raise CodeError(f"the class {name!r:.100}, which is not imported here")
    flatten, unflatten = found
    later = STATIC_DEFAULTS[name][len(static) :] if isinstance(static, tuple) else ()
    if later and MISSING not in later:  # the class got this field after the file was written
        static = (*static, *later)
    try:
        value = unflatten(parts, (tuple(fields), static))
        same = flatten(value)[1] == (tuple(fields), static)
    except (AttributeError, TypeError, ValueError):
        same = False
    if not same:
        raise CodeError(f"the class {name!r:.100} with other fields than it has here")
    return value
