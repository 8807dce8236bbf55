"""Donation: outputs that are written into the memory of inputs, and an error for whoever still holds the old name.

    leaf.copy_(its successor), as the last operations of a staged graph

Floor 1.
"""

import re

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from funcrec._errors import DonatedError, Problem, describe, fail, message
from funcrec._tree import tree_leaves


class Donated(Tensor):
    """What a donated tensor becomes: any use raises."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        gone = next(x for x in tree_leaves((args, kwargs)) if type(x) is Donated)
        raise DonatedError(donated_message(gone))

    def __repr__(self, *, tensor_contents=None):
        return "<donated tensor>"


def poison(x: Tensor, why: str) -> None:
    x.__dict__["donated"] = why
    x.__class__ = Donated


def donated_message(x: Donated) -> str:
    why = x.__dict__["donated"]
    need = "the value that the call returned in its place"
    return message("funcrec.jit", [Problem(f"{why} and is gone.", "a use after donation", need, "jit without donate=")])


def refuse_donated(leaves: list) -> None:
    for x in leaves:
        if type(x) is Donated:
            raise DonatedError(donated_message(x))


def refuse_shared(leaves: list, donated: dict[int, str]) -> None:
    """Memory that is donated must be given once."""
    if not donated:
        return
    seen: dict[int, int] = {}
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor) or not x.numel():
            continue
        first = seen.setdefault(x.data_ptr(), i)
        if first != i and (i in donated or first in donated):
            path = donated.get(i) or donated[first]
            fail(
                "funcrec.jit",
                f"the memory of donated `{path}` is given twice.",
                got="two leaves share it",
                need="one leaf, or a clone",
            )


# -- the graph ---------------------------------------------------------------------------------------------------


def write_back(
    call: str, graph: GraphModule, outputs: list[int], donated: dict[int, Node], names: dict[int, str]
) -> dict[int, int]:
    """Make a staged graph write into its donated inputs; the outputs that are not written there stay its outputs.

    Args:
      outputs: the numbers of the graph's outputs, in order.
      donated: {number of the leaf: its placeholder}; names: {number: path}.

    Returns: {output: the leaf whose memory it takes}.

    Three kinds of output keep memory of their own, or Inductor (torch 2.13) gives wrong values: one that grew out of
    another donated leaf (copies of it are dropped as no-ops, and the leaf is read after it was overwritten); one whose
    leaf has a second scatter into it (both would be done in place); and scalars (a write to an f64 scalar is lost).
    """
    end = next(iter(graph.graph.find_nodes(op="output")))
    sources = dict(zip(outputs, end.args[0], strict=True))
    successors = match(call, sources, donated, names)
    leaves = set(donated.values())

    def is_safe(source: Node, leaf: Node) -> bool:
        foreign = {_origins(source)[-1], _copied_from(source)} & leaves - {leaf}
        return source is leaf or not (foreign or _rivals(graph, source, leaf) or leaf.meta["val"].dim() == 0)

    taken = {j: i for j, i in successors.items() if is_safe(sources[j], donated[i])}
    with graph.graph.inserting_before(end):
        for j in outputs:
            if j not in taken and _copied_from(sources[j]) in leaves:  # it may be a view of what is overwritten
                sources[j] = graph.graph.call_function(torch.ops.aten.clone.default, (sources[j],))
        for j, i in taken.items():
            if sources[j] is not donated[i]:
                graph.graph.call_function(torch.ops.aten.copy_.default, (donated[i], sources[j]))
    end.args = ([sources[j] for j in outputs if j not in taken],)
    graph.recompile()
    return taken


def match(call: str, sources: dict[int, Node], donated: dict[int, Node], names: dict[int, str]) -> dict[int, int]:
    """{output: the donated leaf that it succeeds}: itself, else what grew out of it, else the first of its kind."""
    kind = lambda node: (node.meta["val"].shape, node.meta["val"].dtype, node.meta["val"].device)
    successors: dict[int, int] = {}
    for succeeds in (
        lambda source, leaf: source is leaf,
        lambda source, leaf: _origins(source)[-1] is leaf and kind(source) == kind(leaf),
        lambda source, leaf: kind(source) == kind(leaf),
    ):
        for i, leaf in donated.items():
            j = next((j for j, source in sources.items() if j not in successors and succeeds(source, leaf)), None)
            if j is not None and i not in successors.values():
                successors[j] = i
    for i in donated.keys() - successors.values():
        got, need = describe(donated[i].meta["val"]), "an output of its shape and dtype"
        fail(call, f"no output can take the place of donated `{names[i]}`.", got=got, need=need)
    return successors


def _origins(node: Node) -> list[Node]:
    """The chain of first arguments of one shape that ends in `node`, backwards: what an update is an update of."""
    chain = [node]
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        if _shape(node.args[0]) != _shape(node):
            break
        node = node.args[0]
        chain.append(node)
    return chain


def _shape(node: Node) -> object:
    """The shape of the node's value; of several values (a sort's), something that equals no shape."""
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else node


def _rivals(graph: GraphModule, source: Node, leaf: Node) -> list[Node]:
    """Scatters into `leaf` that `source` is not made of."""
    own = set(_origins(source))
    scatters = [n for n in graph.graph.nodes if n.op == "call_function" and _SCATTER.search(str(n.target))]
    return [n for n in scatters if n not in own and _origins(n)[-1] is leaf]


_SCATTER = re.compile("index_put|scatter|index_copy|index_add|index_fill|index_reduce|masked_fill|auto_functionalized")


def _copied_from(node: Node) -> Node:
    """The start of the chain of operations on one tensor that ends in `node`."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node
