"""Matches the names of a TorchRec state dict to tensors of funcrec.

    embedding_bags.item.weight = tables["item"]        over_arch.model.1.bias = dense["out"]["bias"]

The name of a table finds the table. For a dense tensor, the longest tail of its path that is the end of exactly one
name decides. TorchRec's own models have other paths than the models of funcrec, and RENAMES maps these paths. Shapes: F
features, D dim.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import Problem, paths

TABLE = re.compile(r"(?:^|\.)embedding(?:_bag)?s\.([^.]+)\.weight$")
# From paths of torchrec.models (DLRM, DLRM_DCN and SimpleDeepFMNN) to paths of fr.models (dlrm, dlrm_dcnv2 and
# simple_deepfm).
RENAMES = (
    (r"dense_arch\.model\._mlp\.(\d+)\._linear\.", r"bottom.linear.\1."),
    (r"over_arch\.model\.0\._mlp\.(\d+)\._linear\.", r"{top}.linear.\1."),
    (r"over_arch\.model\.1\.", "{out}."),
    (r"inter_arch\.crossnet\.W_kernels\.(\d+)$", r"cross.\1.u"),
    (r"inter_arch\.crossnet\.V_kernels\.(\d+)$", r"cross.\1.v"),
    (r"inter_arch\.crossnet\.bias\.(\d+)$", r"cross.\1.bias"),
    (r"dense_arch\.model\.0\.", "bottom.linear.0."),
    (r"dense_arch\.model\.2\.", "bottom.linear.1."),
    (r"inter_arch\.deep_fm\.dense_module\.0\.", "deep.linear.0."),
    (r"over_arch\.model\.0\.(?=weight|bias)", "out."),
)
OF_TOP = "over_arch.model.0._mlp."  # layers of the top; in a DLRM the first layer reads the products of all pairs
OF_CROSS = "inter_arch.crossnet."  # the cross network of a DLRM_DCN, whose last layer is in the top here


class Place(NamedTuple):
    """A tensor of TorchRec and its place in funcrec: the name of a table, or the number of a dense leaf."""

    name: str
    path: str
    at: str | int
    ours: Tensor
    is_interaction: bool = False


def find_places(
    names: Sequence[str], tables: Mapping[str, Tensor], dense: Any, *, all_of_dense: bool = True
) -> tuple[list[Place], list[Problem]]:
    """Return (the place of every name, problems).

    The problems are names without a place, and places without a name.
    """
    found: list[Place] = []
    problems: list[Problem] = []
    for table, x in tables.items():
        own = [n for n in names if table_of(n, tables) == table]
        if len(own) == 1:
            found.append(Place(own[0], f"tables[{table!r}]", table, x))
        else:
            what = (
                f"`tables[{table!r}]` is {'not in the state dict' if not own else 'several times in the state dict'}."
            )
            problems.append(Problem(what, f"{own or list(names)}", f"one name *.embedding_bags.{table}.weight",
                                    "tables named as TorchRec's configs are; group=..., for those of other ranks",
                                    KeyError))  # fmt: skip
    rest = [n for n in names if table_of(n, tables) is None]
    if all_of_dense or any(not TABLE.search(n) for n in rest):
        called = aliases(rest)
        has_pairs = not any(OF_CROSS in n for n in rest)
        for i, (path, leaf) in enumerate(paths(dense)):
            own = by_tail(dotted(path), called)
            if len(own) == 1:
                is_first = has_pairs and own[0].endswith(f"{OF_TOP}0._linear.weight")
                found.append(Place(own[0], f"dense{path}", i, leaf, is_first))
            else:
                what = f"`dense{path}` has {'no' if not own else 'more than one'} counterpart in the state dict."
                problems.append(Problem(what, f"{own or rest}", f"one name that ends in {dotted(path)!r}",
                                        "a dense tree of the module's own names", KeyError))  # fmt: skip
    taken = [p.name for p in found]
    spare = [n for n in names if n not in taken]
    if spare and not problems:
        hint = "Params of all of the module's tables and weights"
        what, need = "the state dict has names that `state` lacks.", "names of tables and weights of `state`"
        problems.append(Problem(what, f"{spare}", need, hint))
    doubled = sorted({n for n in taken if taken.count(n) > 1})
    if doubled:
        problems.append(Problem("two places have one name in the state dict.", f"{doubled}", "a name for each",
                                "one leaf for a tensor that the module has once"))  # fmt: skip
    return found, problems


def table_of(name: str, tables: Collection[str]) -> str | None:
    """Return the table whose rows the name holds; None if there is no such table.

    The name is a path in a collection, or `table.weight` as in a fused optimizer.
    """
    match = TABLE.search(name)
    table = match[1] if match else name.removesuffix(".weight")
    return table if table in tables else None


def is_optimizer(state_dict: Mapping[str, Any]) -> bool:
    return isinstance(state_dict.get("state"), Mapping)


def dotted(path: str) -> str:
    """Return a path in the form of a module: `over.0.weight` for `['over']['0.weight']`."""
    return ".".join("".join(part) for part in re.findall(r"\['([^']*)'\]|\[(\d+)\]|\.?(\w+)", path))


def by_tail(path: str, called: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the names that share the longest tail with `path`."""
    parts = path.split(".")
    for first in range(len(parts)):
        tail = "." + ".".join(parts[first:])
        own = [n for n, given in called.items() if any(f".{alias}".endswith(tail) for alias in given)]
        if own:
            return own
    return []


def aliases(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return {name: (the name, the name in funcrec's models)}."""
    own = {"top": "mlp", "out": "out"}
    if any(OF_CROSS in n for n in names):
        own = {"top": "top", "out": f"top.linear.{sum(OF_TOP in n and n.endswith('.weight') for n in names)}"}
    called: dict[str, tuple[str, ...]] = {n: (n,) for n in names}
    for n in names:
        for pattern, ours in RENAMES:
            changed, count = re.subn(pattern, ours.format(**own), n)
            if count:
                called[n] = (n, changed)
                break
    return called


# -- the products of pairs --------------------------------------------------------------------------------------------


def interaction_columns(width: int, dim: int) -> Tensor | None:
    """Return the columns of TorchRec's first top layer in the order of funcrec; None if the width does not fit.

    Both orders begin with the dense vector. The products (i, j) of pairs follow: row by row of the lower triangle here,
    and of the upper triangle in TorchRec.
    """
    count = (1 + math.isqrt(max(0, 1 + 8 * (width - dim)))) // 2
    if width < dim or dim + count * (count - 1) // 2 != width:
        return None
    rows, columns = torch.tril_indices(count, count, -1)
    upper = columns * (2 * count - columns - 1) // 2 + rows - columns - 1  # index of (j, i) in TorchRec, j < i
    return torch.cat([torch.arange(dim), upper + dim])


def to_our_columns(x: Tensor, place: Place, dim: int) -> Tensor:
    columns = interaction_columns(x.shape[1], dim) if place.is_interaction and x.dim() == 2 else None
    return x if columns is None else x[:, columns.to(x.device)]


def to_their_columns(x: Tensor, place: Place, dim: int) -> Tensor:
    columns = interaction_columns(x.shape[1], dim) if place.is_interaction and x.dim() == 2 else None
    return x if columns is None else x[:, columns.argsort().to(x.device)]


def shape_problems(place: Place, shape: torch.Size, ours: torch.Size, where: str = "") -> Iterator[Problem]:
    if shape != ours and (shape.numel() != ours.numel() or shape[:1] != ours[:1]):
        hint = "fr.models.dlrm(..., keep='dense') for TorchRec's DLRM" if place.is_interaction else ""
        hint = hint or "configs of fr.interop.from_torchrec, the rule of TorchRec's optimizer"
        yield Problem(f"`{place.path}`{where} has another shape in the state dict.",
                      f"{list(shape)} as {place.name!r}", f"{list(ours)}", hint)  # fmt: skip
