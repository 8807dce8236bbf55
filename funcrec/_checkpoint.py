"""Checkpoints: any tree of tensors and plain numbers in one file that is whole or not there.

    load(save(path, x)) == x, bit for bit

The file is torch's zip archive with the tree's structure beside the tensors, so that no example is needed to read it
and no code in it is run. It is written under a temporary name and renamed. Floor 6.
"""

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcrec._errors import Problem, check, describe, fail
from funcrec._tree import CLASSES, class_name, paths
from funcrec.kernels.memory import empty_table

FORMAT = "funcrec checkpoint 1"
PLAIN = (int, float, str, bool, type(None))


def save(path: str | os.PathLike, tree: Any) -> Path:
    """Write a tree (dicts, lists, tuples, funcrec's values, tensors, numbers, strings) to one file.

    The bytes go to a temporary file beside `path`, are flushed to the disk and then take its name: an interrupted save
    leaves the old file whole.

    Returns: the path.

    Raises: TypeError for a leaf or node that is none of these, before anything is written.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = fr.save(folder + "/state.pt", {"w": torch.ones(2), "epoch": 3})
      ...     fr.load(path)
      {'w': tensor([1., 1.]), 'epoch': 3}
    """
    path = Path(path)
    tensors: list[Tensor] = []
    content = {"format": FORMAT, "tree": _encode(tree, tensors, "tree"), "tensors": tensors}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load(path: str | os.PathLike, *, like: Any = None, device: torch.device | str | None = None) -> Any:
    """Read what `save` wrote.

    Args:
      like: a tree to compare with; every path whose shape or dtype differs, or that only one has, is told.
      device: where the tensors go; by default where they were saved from.

    Raises: ValueError for a file that is truncated, damaged (each tensor's CRC is checked) or no checkpoint, and for a
      tree unlike `like`; FileNotFoundError.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = fr.save(folder + "/state.pt", {"w": torch.ones(2)})
      ...     fr.load(path, like={"w": torch.ones(3)})
      Traceback (most recent call last):
      ...
      ValueError: funcrec.load: `['w']` has another shape or dtype.
        got   f32[2]
        need  f32[3]
    """
    path = Path(path)
    with open(path, "rb"):  # a missing file says so itself
        pass
    content = _read(path, device)
    for i, x in enumerate(content["tensors"]):  # where rows are read fast, as those of `init`
        content["tensors"][i] = empty_table(tuple(x.shape), dtype=x.dtype, device=x.device).copy_(x)
    tree = _decode(content["tree"], content["tensors"])
    if like is not None:
        check("funcrec.load", difference_problems(tree, like))
    return tree


def _read(path: Path, device) -> dict:
    def damaged(why: str):
        hint = "an older checkpoint; `save` itself never leaves half a file"
        fail(
            "funcrec.load",
            f"`{path.name}` is not a whole checkpoint.",
            got=why,
            need="a file that save wrote",
            hint=hint,
        )

    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        damaged(str(error))
    if bad is not None:
        damaged(f"wrong checksum of {bad}")
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch.load has no error type of its own
        damaged(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        damaged("another format" if not isinstance(content, dict) else f"format {content.get('format')!r}")
    return content


def _encode(node: Any, tensors: list[Tensor], path: str) -> Any:
    if isinstance(node, Tensor):
        tensors.append(node.detach())
        return ("tensor", len(tensors) - 1)
    if type(node) in PLAIN:
        return ("plain", node)
    if type(node) is dict:
        return ("dict", [(k, _encode(v, tensors, f"{path}[{k!r}]")) for k, v in node.items()])
    if type(node) in (list, tuple):
        return (type(node).__name__, [_encode(v, tensors, f"{path}[{i}]") for i, v in enumerate(node)])
    if class_name(type(node)) in CLASSES:
        flatten, _ = CLASSES[class_name(type(node))]
        children, (fields, static) = flatten(node)
        parts = [_encode(v, tensors, f"{path}.{n}") for n, v in zip(fields, children, strict=True)]
        return ("class", class_name(type(node)), list(fields), parts, _encode(static, tensors, path))
    need = "tensors, numbers, strings, dicts, lists, tuples and funcrec's values"
    fail("funcrec.save", f"`{path}` cannot be saved.", got=describe(node), need=need, hint="fr.pytree", kind=TypeError)


def _decode(code: Any, tensors: list[Tensor]) -> Any:
    match code:
        case ("tensor", index):
            return tensors[index]
        case ("plain", value):
            return value
        case ("dict", items):
            return {k: _decode(v, tensors) for k, v in items}
        case ("list", items):
            return [_decode(v, tensors) for v in items]
        case ("tuple", items):
            return tuple(_decode(v, tensors) for v in items)
        case ("class", name, fields, parts, static):
            if name not in CLASSES:
                fail("funcrec.load", "a class of the tree is unknown.", got=name, need="an imported fr.pytree class")
            _, unflatten = CLASSES[name]
            return unflatten([_decode(p, tensors) for p in parts], (tuple(fields), _decode(static, tensors)))
    fail("funcrec.load", "a node of the tree is unknown.", got=f"{code!r}", need=f"{FORMAT}")


def difference_problems(tree: Any, like: Any) -> Iterator[Problem]:
    """Every leaf in which two trees differ in place, shape or dtype."""
    found, wanted = dict(paths(tree)), dict(paths(like))
    for path in [p for p in wanted if p not in found]:
        yield Problem(f"`{path}` is missing.", "nothing", describe(wanted[path]))
    for path in [p for p in found if p not in wanted]:
        yield Problem(f"`{path}` is not expected.", describe(found[path]), "nothing")
    for path, x in wanted.items():
        if path in found and describe(found[path]) != describe(x) and isinstance(x, Tensor):
            yield Problem(f"`{path}` has another shape or dtype.", describe(found[path]), describe(x))
