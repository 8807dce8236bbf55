"""Weights that an invariant program reads turned: one transpose when they are loaded, and none in a call.

x Wᵀ = invariant_bmm(x, Wᵀ)          W is stored as [outputs, inputs], and the product reads rows of Wᵀ

A product of few rows by columns of W turns W in registers, which takes two to three times as long. The bits are the
same. A program takes each turned weight as f[inputs, outputs]; its manifest names them, and has another format, so that
a reader that does not turn them refuses the package.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from funcrec.core import Problem, sure
from funcrec.kernels import library
from funcrec.serve._json_forms import wrong

aten = torch.ops.aten


def turn_weights(exported: torch.export.ExportedProgram, names: Sequence[str]) -> list[str]:
    """Turn the inputs of a program that are only turned and multiplied; return their names.

    names: those of the first inputs, in their order. The program is changed in place.
    """
    inputs, found = exported.graph.find_nodes(op="placeholder"), []
    args, kwargs = sure(exported.example_inputs)
    args = list(args)
    for i, (node, name) in enumerate(zip(inputs, names, strict=False)):
        turns = [*node.users]
        if not turns or not all(map(is_turned_factor, turns)):
            continue
        node.meta["val"] = node.meta["val"].mT.contiguous()
        for turn in turns:
            turn.replace_all_uses_with(node)
            exported.graph.erase_node(turn)
        args[i] = args[i].mT.contiguous()
        found.append(name)
    if found:
        exported._example_inputs = (tuple(args), kwargs)
        exported.graph_module.recompile()
    return found


def is_turned_factor(node: Node) -> bool:
    """Return whether a node is the transpose of a matrix, and only the second factor of invariant products."""
    is_transpose = node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] == [1, 0])
    if not is_transpose or node.meta["val"].dim() != 2:
        return False
    product = library.operator("cpp", "invariant_bmm")
    views = [*node.users]
    return bool(views) and all(
        view.target is aten.unsqueeze.default
        and bool(view.users)
        and all(user.target is product and user.args[1] is view and user.args[0] is not view for user in view.users)
        for view in views
    )


def turned(tensors: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return {name: Wᵀ}, in memory of their own."""
    return {n: tensors[n].t().clone(memory_format=torch.contiguous_format) for n in names}


def turn_again(tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
    """Write the present values to the turned copies."""
    for name, copy in copies.items():
        copy.copy_(tensors[name].t())


def turned_problems(at: str, names: Sequence[str], params: Sequence[Mapping]) -> Iterator[Problem]:
    """Yield a problem if a manifest names turned weights that are no matrices of its parameters."""
    shapes = {x["name"]: x["shape"] for x in params}
    for i, n in enumerate(names):
        if len(shapes.get(n, ())) != 2 or n in names[:i]:
            yield wrong(f"{at}[{i}]", f'"{n}"', "a matrix of `params`, once")
            return
