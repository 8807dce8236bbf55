"""cut: cut a step into two functions, of which the first needs the batch alone and ends in exchanges between ranks.

    routed = ahead(batch);      rest(state, batch, routed) = step(state, batch)

`ahead` holds the exchanges that do not depend on the state, the inputs of these exchanges, and the integers that follow
from their results. For a sharded lookup, `ahead` sends each id to the rank that owns its row. Sums over ranks, and
anything that reads the state, are in `rest`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from funcrec.compile._compiled import Traced, trace
from funcrec.compile._jit import Jitted, jit
from funcrec.compile._program import LOCK
from funcrec.compile._writes import outputs_of
from funcrec.core import fail, fast_flatten, leaf_paths, sure
from funcrec.mesh import AWAIT, LEAVES, MOVES, is_assertion


class Halves(NamedTuple):
    """A step's two functions.

    ahead: batch -> routed, a list of tensors. rest: (state, batch, routed) -> the step's result. read: tensors that
    the step closes over and `ahead` reads; they must not change before `rest` runs. routed_bytes: the size of `routed`.
    """

    ahead: Callable[[Any], list[Tensor]]
    rest: Callable[[Any, Any, list[Tensor]], Any]
    read: list[Tensor]
    routed_bytes: int


def cut(call: str, step: Callable, state: Any, batch: Any, groups: Mapping[str, str]) -> Halves | None:
    """Return the halves of a step for these forms, or None if no exchange depends on the batch alone.

    The step may be plain or jitted.

    Args:
      groups: {process group: the group that `ahead` uses in its place}.
    """
    traced = operations(call, step.fn if isinstance(step, Jitted) else step, {"state": state, "batch": batch})
    first = len(fast_flatten(state)[0])
    of_state = {node for i, node in traced.places.items() if i < first}
    whole = sure(traced.graph)
    crossing = crossing_nodes(whole.graph, of_state)
    if not crossing:
        return None
    inputs = list(traced.places.values())

    sending = sending_part(call, whole, [n for n in inputs if n not in of_state], crossing, groups)
    remaining = part_of(whole, [*inputs, *crossing], outputs_of(whole.graph), assertions_of(whole.graph))
    captured, static = traced.captured, traced.static

    def ahead(batch):
        with torch.no_grad():
            return list(sending(*tensors(batch), *captured))

    def rest(state, batch, routed):
        with torch.no_grad():
            made = iter(remaining(*tensors((state, batch)), *captured, *routed))
        return traced.structure.unflatten([next(made) if x is Tensor else x for x in static])[0]

    read = reads_of(sending, captured)
    routed_bytes = sum(n.meta["val"].nbytes for n in crossing)
    if isinstance(step, Jitted):
        rest.__name__ = ahead.__name__ = step.name
        ahead, rest = jit(ahead), jit(rest, donate=donated_names(call, step))
    return Halves(ahead, rest, read, routed_bytes)


def operations(call: str, fn: Callable, arguments: Mapping[str, Any]) -> Traced:
    """Return the traced operations of fn(*arguments)."""
    leaves, structure = fast_flatten(tuple(arguments.values()))
    paths = [path for _, path in leaf_paths(structure, tuple(arguments)).values()]
    with LOCK:
        traced = trace(call, lambda mine: fn(*structure.unflatten(mine)), leaves, paths, decompositions={})
    if traced.graph is None:
        got, need = "requires_grad of a tensor that the step closes over", "values that nothing is differentiated by"
        fail(call, "autograd tracks the step.", got=got, need=need, hint="`.detach()`", kind=TypeError)
    if traced.prints:
        what = "a step that is cut in two does not print, and does not assert in a loop or a branch."
        got, need = "debug_print, or a loop or a branch with an assertion", "a step without them"
        fail(call, what, got=got, need=need, hint="the step without a pipeline", kind=TypeError)
    return traced


def sending_part(
    call: str, whole: GraphModule, inputs: list[Node], crossing: list[Node], groups: Mapping[str, str]
) -> GraphModule:
    """Return `crossing` as a function of `inputs`, which sends over the process groups that replace the step's."""
    sending = part_of(whole, inputs, crossing)
    for swap in (n for n in sending.graph.nodes if n.target in LEAVES):
        if swap.args[-1] not in groups:
            got, need = f"an exchange over process group {swap.args[-1]!r}", "the mesh that the step exchanges on"
            hint = f"fr.{call.removeprefix('funcrec.')}(step, mesh=mesh)"
            fail(call, "`mesh` is missing, or not the step's.", got=got, need=need, hint=hint)
        swap.args = (*swap.args[:-1], groups[swap.args[-1]])
    sending.recompile()
    return sending


def reads_of(part: GraphModule, captured: list[Tensor], behind: int = 0) -> list[Tensor]:
    """Return the captured tensors that a part reads. `behind` inputs come after the captured tensors."""
    inputs = part.graph.find_nodes(op="placeholder")
    first = len(inputs) - len(captured) - behind
    return [x for x, node in zip(captured, inputs[first : len(inputs) - behind], strict=True) if node.users]


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in fast_flatten(tree)[0] if isinstance(x, Tensor)]


def donated_names(call: str, step: Jitted) -> tuple[str, ...]:
    """Return the names of the arguments that `rest` donates: its state, if the step donates the step's state."""
    names = list(step.signature.parameters)
    if set(step.donate) - set(names[:1]):
        got, need = f"donate={step.donate}", "a step that uses up its state alone: the next batch is read already"
        fail(call, "the step donates its batch.", got=got, need=need, hint=f"donate=({names[0]!r},)")
    return ("state",) if step.donate else ()


def crossing_nodes(graph: Graph, of_state: set[Node]) -> list[Node]:
    """Return the nodes that `ahead` computes and `rest` reads, which become the result of `ahead`."""
    late, constant, moved = set(of_state), set(), set()  # nodes that depend on the state; on no input; on an exchange
    wanted: list[Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        sources, is_collective = node.all_input_nodes, node.target in LEAVES or node.target is AWAIT
        if (node.target in LEAVES and node.target not in MOVES) or not late.isdisjoint(sources):
            late.add(node)
        elif not is_collective and constant.issuperset(sources):
            constant.add(node)  # Both halves compute it.
        elif node.target is AWAIT or not moved.isdisjoint(sources):
            moved.add(node)
            wanted += [node] if node.target is AWAIT or is_integer(node) else []
    early = needs_of(wanted, set())
    early |= {user for n in early if is_list(n) for user in n.users}
    kept = lambda n: n not in constant and n.op != "placeholder" and not is_list(n)
    return [n for n in graph.nodes if n in early and kept(n) and not early.issuperset(n.users)]


def is_list(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (list, tuple))


def is_integer(node: Node) -> bool:
    value = node.meta.get("val")
    parts = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex() for x in parts)


def assertions_of(graph: Graph) -> list[Node]:
    """Return the nodes that nothing reads and that a step's last part holds."""
    return [n for n in graph.nodes if is_assertion(n)]


def part_of(whole: GraphModule, inputs: list[Node], outputs: list[Node], asserted: Sequence[Node] = ()) -> GraphModule:
    """Return a graph that computes `outputs` from `inputs`, which may be inner nodes, and holds these assertions."""
    own = Graph()
    copies = {node: own.placeholder(node.name) for node in inputs}
    needed = needs_of([*outputs, *asserted], set(inputs))
    for node in (n for n in whole.graph.nodes if n in needed):
        copies[node] = own.node_copy(node, copies.__getitem__)
    own.output([copies[n] for n in outputs])
    return GraphModule(whole, own)


def needs_of(outputs: list[Node], inputs: set[Node]) -> set[Node]:
    """Return the nodes on which `outputs` depend, without `inputs` and the nodes before them."""
    seen: set[Node] = set()
    left = list(outputs)
    while left:
        node = left.pop()
        if node not in seen and node not in inputs:
            seen.add(node)
            left += node.all_input_nodes
    return seen
