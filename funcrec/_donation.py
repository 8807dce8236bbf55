"""Donation: rows that are written into the memory of inputs, and an error for whoever still holds the old name.

    output = index_put(leaf, rows, values)   becomes   the compiled function returns (rows, values); leaf[rows] = values

The compiled function itself writes to nothing: the writes come behind it, when all that reads the old values has run.
(Written inside, torch 2.13's Inductor reorders reads and writes of one buffer in half a dozen ways.) Other outputs have
memory of their own, and that of their donated predecessors is given up. Floor 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from funcrec._errors import DonatedError, Problem, fail, message
from funcrec._tree import tree_leaves

PUT = torch.ops.aten.index_put.default
RESHAPES = {  # views that keep the order of the elements
    getattr(torch.ops.aten, name).default
    for name in ("view", "unsqueeze", "squeeze", "_unsafe_view", "reshape", "alias", "detach")
} | {torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims}


# -- rows written in place ---------------------------------------------------------------------------------------


class Write(NamedTuple):
    """leaf.view(shape)[indices] = values; indices and values are numbers of the compiled function's results."""

    shape: tuple[int, ...]
    indices: tuple[int | None, ...]
    values: int
    accumulate: bool


class Plan(NamedTuple):
    """What the results of a staged graph are.

    writes: {output: (donated leaf, its writes in order)}; whole: {output: result}, for the outputs that are returned.
    """

    writes: dict[int, tuple[int, list[Write]]]
    whole: dict[int, int]


def plan_writes(graph: GraphModule, outputs: Sequence[int], donated: dict[int, Node]) -> Plan:
    """Have the graph return rows and values where an output only replaces rows of a donated leaf.

    Args:
      outputs: the numbers of the graph's outputs, in order.
      donated: {number of the leaf: its placeholder}.
    """
    end = next(iter(graph.graph.find_nodes(op="output")))
    sources = dict(zip(outputs, end.args[0], strict=True))
    numbers = {leaf: i for i, leaf in donated.items()}
    results: list[Node] = []
    plan = Plan({}, {})

    def result(node: Node) -> int:
        results.append(node)
        return len(results) - 1

    claimed = set()
    for j, source in sources.items():
        leaf, puts = row_writes(source)
        alone = all(len(n.users) == 1 for n in puts) and list(sources.values()).count(source) == 1
        if leaf not in numbers or leaf in claimed or not (alone and _same_form(source, leaf)):
            plan.whole[j] = result(source)
            continue
        claimed.add(leaf)
        plan.writes[j] = (numbers[leaf], [])
        for put in puts:
            if put.target is PUT:
                base, indices, values, *more = put.args
                places = tuple(None if n is None else result(n) for n in indices)
                accumulate = bool(more and more[0]) or bool(put.kwargs.get("accumulate"))
                write = Write(tuple(base.meta["val"].shape), places, result(values), accumulate)
                plan.writes[j][1].append(write)
    end.args = (results,)
    graph.recompile()
    return plan


def row_writes(source: Node) -> tuple[Node, list[Node]]:
    """The leaf that `source` is, but for replaced rows, and the operations on the way, in order."""
    way: list[Node] = []
    node = source
    while node.op == "call_function" and (node.target is PUT or node.target in RESHAPES):
        way.append(node)
        node = node.args[0]
    put_at = [k for k, n in enumerate(way) if n.target is PUT]
    return (node, way[: put_at[-1] + 1][::-1]) if put_at else (source, [])


def _same_form(source: Node, leaf: Node) -> bool:
    a, b = source.meta["val"], leaf.meta["val"]
    return source is leaf or (a.shape == b.shape and a.is_contiguous() and b.is_contiguous())


def write(target: Tensor, writes: list[Write], results: Sequence[Tensor]) -> None:
    """Replace the rows, in place."""
    for shape, indices, values, accumulate in writes:
        places = tuple(None if i is None else results[i] for i in indices)
        target.view(shape).index_put_(places, results[values], accumulate)


def shared_results(results: Sequence[Tensor], arguments: Sequence[Tensor]) -> set[int]:
    """The results that lie in the memory of an argument, of a constant, or of an earlier result.

    They are copied: this call's writes, or those of the next call that takes the result, would change the other too.
    """
    memory = {_place(x) for x in arguments}
    shared = set()
    for k, x in enumerate(results):
        if _place(x) in memory:
            shared.add(k)
        memory.add(_place(x))
    return shared


def _place(x: Tensor) -> object:
    """What tells one memory from another: its address, or the tensor itself when it has none."""
    return x.untyped_storage().data_ptr() or id(x)


# -- old names ---------------------------------------------------------------------------------------------------


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
    spans = sorted((*_span(x), i) for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.numel())
    before: dict[bool, tuple[int, int]] = {}  # of donated and of other leaves, the one that reaches furthest
    for start, end, i in spans:
        for is_donated, (reach, first) in before.items():
            if start < reach and (is_donated or i in donated):
                fail(
                    "funcrec.jit",
                    f"the memory of donated `{donated.get(i) or donated[first]}` is given twice.",
                    got="two leaves share it",
                    need="one leaf, or a clone",
                )
        before[i in donated] = max(before.get(i in donated, (0, 0)), (end, i))


def _span(x: Tensor) -> tuple[int, int]:
    """The bytes from the first to behind the last element."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
