"""Cheaper exchanges in a staged graph: each of two ranks sends only the other's block, and ranks compute meanwhile.

    wait(swap(x))[own]  →  x[own]

The bits are those of the unchanged graph.
Shapes: n ranks in a group; a swap's operand is [n, ...], a block for each rank.
"""

from collections.abc import Iterator

import torch
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from funcrec.mesh import AWAIT, SWAP, has_effect

aten = torch.ops.aten


def smaller_exchanges(graph: GraphModule) -> None:
    """Make the exchanges of a graph smaller, in place; every rank's graph changes in the same way."""
    if not any(True for _ in swaps_of(graph.graph)):
        return
    keep_own_blocks(graph.graph)
    graph.graph.eliminate_dead_code(has_effect)
    graph.recompile()


def swaps_of(graph: Graph) -> Iterator[Node]:
    """Yield the awaits of exchanges that give each rank one block of equal size."""
    for node in graph.nodes:
        if node.target is AWAIT and node.args[0].target is SWAP:
            sent, *splits, group = node.args[0].args
            n = _resolve_process_group(group).size()
            if splits == [[1] * n] * 2 and sent.meta["val"].shape[0] == n:
                yield node


def _call(graph: Graph, target, *args, **kwargs) -> Node:
    """Add a node, and compute the form of its value from those of its arguments."""
    node = graph.call_function(target, args, kwargs)
    with next(n.meta["val"].fake_mode for n in graph.nodes if hasattr(n.meta.get("val"), "fake_mode")):
        node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return node


def _whole(graph: Graph, x: Node) -> Node:
    """Return the value as contiguous memory, as an exchange returns it and its readers may need it."""
    if x.meta["val"].is_contiguous():
        return x
    return _call(graph, aten.clone.default, x, memory_format=torch.contiguous_format)


# -- own blocks ------------------------------------------------------------------------------------------------------


def keep_own_blocks(graph: Graph) -> None:
    """Take the block that stays on a rank from the operand, if an exchange of two ranks is only read block by block."""
    for wait in list(swaps_of(graph)):
        swap = wait.args[0]
        x, *_, group = swap.args
        own, reads = _resolve_process_group(group).rank(), list(block_reads(wait))
        if x.meta["val"].shape[0] != 2 or None in reads or {block for _, block in reads} != {0, 1}:
            continue  # if a block were not read, the exchange would be dead code on the rank that has the other block
        splits = [int(r != own) for r in range(2)]
        with graph.inserting_before(swap):
            sent, kept = _blocks(graph, x, own)
            received = _call(graph, AWAIT, _call(graph, SWAP, sent, splits, splits, group))
            other = _call(graph, aten.select.int, received, 0, 0)
        for node, block in reads:
            node.replace_all_uses_with(kept if block == own else other)


def block_reads(node: Node) -> Iterator[tuple[Node, int] | None]:
    """Yield (reader, block) for each use of two ranks' result; None for a use of more than a single block."""
    for user in node.users:
        if user.target is aten.permute.default and user.args[1] == list(range(len(user.args[1]))):
            yield from block_reads(user)
        elif user.target is aten.select.int and user.args[1] == 0:
            yield user, user.args[2] % 2
        elif user.target is aten.unbind.int and (*user.args, 0)[1] == 0:
            yield from ((part, part.args[1]) for part in user.users)
        else:
            yield None


def _blocks(graph: Graph, x: Node, own: int) -> tuple[Node, Node]:
    """Return the block to send, [1, ...], and the block that stays, [...]; if all blocks are one value, that value."""
    source = x.args[0] if x.target is aten.clone.default else None
    if source is not None and source.target is aten.expand.default and _is_repeated(source):
        kept = _whole(graph, source.args[0])
        return _call(graph, aten.unsqueeze.default, kept, 0), kept
    return _call(graph, aten.slice.Tensor, x, 0, 1 - own, 2 - own), _call(graph, aten.select.int, x, 0, own)


def _is_repeated(expand: Node) -> bool:
    return tuple(expand.meta["val"].shape[1:]) == tuple(expand.args[0].meta["val"].shape)


# -- in order ----------------------------------------------------------------------------------------------------------


def fill_waits(steps: list) -> list:
    """Order the steps of the generated code so that a rank computes while values travel.

    Before an exchange come only the steps that it needs, and while it is under way the steps that the next one needs.
    steps: Inductor's, each after its needs; this is a pass of `reorder_for_compute_comm_overlap_passes`.
    """
    from torch._inductor.utils import contains_collective, contains_wait

    maker = {name: s for s in steps for name in s.get_buffer_names()}
    needs = {s: {maker[d.name] for d in s.unmet_dependencies if d.name in maker} - {s} for s in steps}
    done: dict = {}
    exchanges = sorted(filter(contains_collective, steps), key=lambda s: s.min_order)  # as staged: alike on all ranks
    for goal in (*exchanges, None):
        wanted = all_needs(goal, needs) if goal else set(steps)
        left = [s for s in steps if s in wanted and s not in done]
        waits: dict = {}
        for s in left:
            waits[s] = contains_wait(s) or any(waits.get(x, False) for x in needs[s])
        done |= dict.fromkeys(sorted(left, key=waits.get))
    return list(done)


def all_needs(step: object, needs: dict) -> set:
    """Return the step, and all steps that must come before it."""
    seen, left = {step}, [step]
    while left:
        new = needs[left.pop()] - seen
        seen |= new
        left += new
    return seen
