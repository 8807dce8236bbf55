"""Make exchanges in a staged graph cheaper: two ranks send each other one block, and compute while the blocks travel.

    wait(swap(x))[own]  →  x[own]

The graph computes the same bits as before.
Shapes: n ranks in a group; the operand of a swap is [n, ...], a block for each rank.
"""

from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from funcrec.compile._writes import arguments
from funcrec.mesh import AWAIT, SWAP, group_of, has_effect

aten = torch.ops.aten


def smaller_exchanges(graph: GraphModule) -> None:
    """Change the exchanges of a graph in place to smaller exchanges. The graphs of all ranks change in the same way."""
    if not any(True for _ in swaps_of(graph.graph)):
        return
    keep_own_blocks(graph.graph)
    graph.graph.eliminate_dead_code(has_effect)
    graph.recompile()


def swaps_of(graph: Graph) -> Iterator[Node]:
    """Yield the awaits of those exchanges in which each rank gets one block of equal size from every rank."""
    for node in graph.nodes:
        if node.target is AWAIT and (swap := arguments(node)[0]).target is SWAP:
            sent, *splits, group = arguments(swap)
            n = group_of(group).size()
            if splits == [[1] * n] * 2 and sent.meta["val"].shape[0] == n:
                yield node


def _call(graph: Graph, target, *args, **kwargs) -> Node:
    """Return a new node of the graph, with the form of its value computed from the forms of its arguments."""
    node = graph.call_function(target, args, kwargs)
    with next(n.meta["val"].fake_mode for n in graph.nodes if hasattr(n.meta.get("val"), "fake_mode")):
        node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return node


def _whole(graph: Graph, x: Node) -> Node:
    """Return a node with x's value in contiguous memory.

    An exchange returns contiguous memory, and readers of the result may need it.
    """
    if x.meta["val"].is_contiguous():
        return x
    return _call(graph, aten.clone.default, x, memory_format=torch.contiguous_format)


# -- own blocks ------------------------------------------------------------------------------------------------------


def keep_own_blocks(graph: Graph) -> None:
    """Change exchanges of two ranks so that the block that stays on a rank comes from the operand.

    This changes only exchanges whose readers each read one block.
    """
    for wait in list(swaps_of(graph)):
        swap = arguments(wait)[0]
        x, *_, group = arguments(swap)
        own, uses = group_of(group).rank(), list(block_reads(wait))
        reads = [use for use in uses if use is not None]
        if x.meta["val"].shape[0] != 2 or len(reads) < len(uses) or {block for _, block in reads} != {0, 1}:
            continue  # With an unread block, the exchange would be dead code on the rank that has the other block.
        splits = [int(r != own) for r in range(2)]
        with graph.inserting_before(swap):
            sent, kept = _blocks(graph, x, own)
            received = _call(graph, AWAIT, _call(graph, SWAP, sent, splits, splits, group))
            other = _call(graph, aten.select.int, received, 0, 0)
        for node, block in reads:
            node.replace_all_uses_with(kept if block == own else other)


def block_reads(node: Node) -> Iterator[tuple[Node, int] | None]:
    """Yield (reader, block) for each use of the result of two ranks, or None for a use of more than one block."""
    for user in node.users:
        given = arguments(user)
        if user.target is aten.permute.default and given[1] == list(range(len(given[1]))):
            yield from block_reads(user)
        elif user.target is aten.select.int and given[1] == 0:
            yield user, given[2] % 2
        elif user.target is aten.unbind.int and (*given, 0)[1] == 0:
            yield from ((part, arguments(part)[1]) for part in user.users)
        else:
            yield None


def _blocks(graph: Graph, x: Node, own: int) -> tuple[Node, Node]:
    """Return the block to send, [1, ...], and the block that stays, [...].

    Both are the same value if an `expand` made all blocks from one.
    """
    source = arguments(x)[0] if x.target is aten.clone.default else None
    if source is not None and source.target is aten.expand.default and _is_repeated(source):
        kept = _whole(graph, arguments(source)[0])
        return _call(graph, aten.unsqueeze.default, kept, 0), kept
    return _call(graph, aten.slice.Tensor, x, 0, 1 - own, 2 - own), _call(graph, aten.select.int, x, 0, own)


def _is_repeated(expand: Node) -> bool:
    return tuple(expand.meta["val"].shape[1:]) == tuple(arguments(expand)[0].meta["val"].shape)


# -- in order ----------------------------------------------------------------------------------------------------------


def fill_waits(steps: list) -> list:
    """Return the steps of the generated code in an order in which a rank computes while values travel.

    Before an exchange come only the steps that the exchange needs. While an exchange is under way, the steps run that
    the next exchange needs. steps: Inductor's steps, each after the steps that it needs. Inductor calls this function
    as a pass of `reorder_for_compute_comm_overlap_passes`.
    """
    from torch._inductor.utils import contains_collective, contains_wait

    maker = {name: s for s in steps for name in s.get_buffer_names()}
    needs = {s: {maker[d.name] for d in s.unmet_dependencies if d.name in maker} - {s} for s in steps}
    done: dict = {}
    exchanges = sorted(filter(contains_collective, steps), key=lambda s: s.min_order)  # the same on all ranks
    for goal in (*exchanges, None):
        wanted = all_needs(goal, needs) if goal else set(steps)
        left = [s for s in steps if s in wanted and s not in done]
        waits: dict = {}
        for s in left:
            waits[s] = contains_wait(s) or any(waits.get(x, False) for x in needs[s])
        done |= dict.fromkeys(sorted(left, key=waits.__getitem__))
    return list(done)


def all_needs(step: object, needs: dict) -> set:
    """Return the step, and all steps that must come before it."""
    seen, left = {step}, [step]
    while left:
        new = needs[left.pop()] - seen
        seen |= new
        left += new
    return seen
