"""Two trees held beside each other: where they differ in place, kind, shape or dtype."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from funcrec.checkpoint._tree_json import show
from funcrec.core import CLASSES, Problem, class_name, describe


def difference_problems(tree: Any, like: Any) -> Iterator[Problem]:
    """Every node in which two trees differ in place, kind, shape or dtype."""
    found, wanted = dict(_nodes(tree, "")), dict(_nodes(like, ""))
    leaves = lambda nodes: [p for p, (_, is_leaf) in nodes.items() if is_leaf]
    hint = "like=None, which loads what there is"
    for path in [p for p in leaves(wanted) if p not in found]:
        yield Problem(f"`{path}` is missing.", "nothing", wanted[path][0], hint)
    for path in [p for p in leaves(found) if p not in wanted]:
        yield Problem(f"`{path}` is not expected.", found[path][0], "nothing", hint)
    for path, (need, is_leaf) in wanted.items():
        if path in found and found[path][0] != need:
            differs = "has another shape or dtype" if is_leaf and found[path][1] else "is another kind of value"
            yield Problem(f"`{path or 'tree'}` {differs}.", found[path][0], need, hint)


def _nodes(node: Any, path: str) -> Iterator[tuple[str, tuple[str, bool]]]:
    """(path, (what it is, whether it is a leaf)) of every node."""
    children: list[tuple[str, Any]] = []
    kind = type(node).__name__
    if isinstance(node, Tensor):
        kind = describe(node)
    elif isinstance(node, dict):
        children = [(f"{path}[{show(k)}]", v) for k, v in node.items()]
    elif isinstance(node, (list, tuple)):
        children = [(f"{path}[{i}]", v) for i, v in enumerate(node)]
    elif class_name(type(node)) in CLASSES:
        values, (fields, static) = CLASSES[class_name(type(node))][0](node)
        kind = f"{kind} {show(static)}" if static else kind
        children = [(f"{path}.{n}".lstrip("."), v) for n, v in zip(fields, values, strict=True)]
    yield path, (kind, not children)
    for where, child in children:
        yield from _nodes(child, where)
