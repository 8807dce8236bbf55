"""Make and compare keys of compilations. A key is the form of the arguments and surroundings of a program.

key = ((names of the arguments, structure of the arguments, keys of the structure, surroundings), the form of each leaf)
"""

from typing import Any

import torch
from torch import Tensor

from funcrec.compile._ambient import differences
from funcrec.compile._static_arguments import Static
from funcrec.core import Problem, fail, leaf_paths, message, short_dtype, static_key, structure_key


def leaf_key(x: object) -> Any:
    """Return the form of a leaf, which is the part of a leaf on which a compilation depends."""
    if isinstance(x, Tensor):
        return type(x), x.shape, x.dtype, x.device, x.stride(), x.requires_grad, x.is_inference()
    return x if type(x) is Static else static_key(x)


def form_key(leaves: list[Any], structure: Any) -> tuple[Any, ...]:
    """Return a tree's structure, the structure's key, and the form of each leaf. A compilation depends on these."""
    return structure, structure_key(structure), tuple(map(leaf_key, leaves))


def what_differs(before: tuple, now: tuple) -> tuple[str, str]:
    """Return a text that says what differs between two keys, and a hint that says what to do."""
    (names, *structure, around), leaves = now
    (names_before, *structure_before, around_before), leaves_before = before
    other = differences(around_before, around)
    if other:
        got = "; ".join(f"{what}: {a}, then {b}" for what, (a, b) in other.items())
        return got, "call it in one and the same surroundings"
    if names != names_before or structure != structure_before:
        return "another structure of the arguments", "the same keys, types and order, and the same static fields"
    i = next((i for i, (a, b) in enumerate(zip(leaves_before, leaves, strict=True)) if a != b), None)
    if i is None:
        return "another form of a tensor that it closes over", "pass it as an argument"
    a, b = show_key(leaves_before[i]), show_key(leaves[i])
    path = leaf_paths(structure[0], names)[i][1]
    got = f"`{path}`: {a}, then {b}" if a != b else f"`{path}`: other strides"
    if is_form(leaves[i]):
        return got, "fr.pad_to_bucket for ids, and batches of one size"
    if type(leaves[i]) is Static:
        return got, "few values of a static argument, or an argument that is not static"
    return got, "pass it as a tensor: its values are not compiled in"


def many_compilations(name: str, count: int, most: int, before: tuple, now: tuple) -> str:
    """Return the warning at the `count`-th compilation of a function. The function keeps the last `most` programs."""
    got, hint = what_differs(before, now)
    what, need = f"compiled {count} times; it keeps the last {most}.", "few different forms of arguments"
    return message(f"funcrec.jit({name})", [Problem(what, got, need, hint)])


def refuse_other(name: str, lowered: tuple, now: tuple) -> None:
    """Raise the error of a call of a lowered program with another key."""
    got, _ = what_differs(lowered, now)
    what, need = "a program has one form of arguments, and this is another.", "what it was lowered with"
    hint = "`lower` once more with these arguments, or fr.jit(fn) itself"
    fail(f"funcrec.jit({name}).lower", what, got=got, need=need, hint=hint, kind=TypeError)


def is_form(key: Any) -> bool:
    """Return whether the key is the form of a tensor."""
    return isinstance(key, tuple) and len(key) > 2 and isinstance(key[1], torch.Size)


def show_key(key: Any) -> str:
    """Return a text that shows a leaf, from the leaf's key."""
    if type(key) is Static:
        return repr(key)
    if is_form(key):
        place = "" if key[3].type == "cpu" else f" on {key[3]}"
        return f"{short_dtype(key[2])}[{', '.join(map(str, key[1]))}]{place}"
    return f"{key[0].__name__} {key[1]}"
