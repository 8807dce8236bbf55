"""Exchanges of a staged graph, made cheaper: small ones that need not wait for one another travel as one, of two ranks each sends only
what the other has not, and a rank computes while values travel.

    wait(swap(x)), wait(swap(y))  →  split(wait(swap([x | y])));      wait(swap(x))[own]  →  x[own]

An exchange costs about 0.2 ms on gloo however small it is. Bits are those of the graph as it was. Floor 3.
Shapes: n ranks in a group; a swap's operand is [n, ...], a block for each rank.
"""

import operator
from collections.abc import Iterator

import torch
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from funcrec._exchange import AWAIT, SWAP, has_effect

MOST_JOINED = (
    1 << 16
)  # bytes of an operand: sent one after the other they would take less than a second exchange's 0.2 ms
aten = torch.ops.aten


def fewer_exchanges(graph: GraphModule) -> None:
    """The same function with fewer and smaller exchanges, in place; every rank's graph changes alike."""
    if not any(True for _ in swaps_of(graph.graph)):
        return
    from torch._inductor.pattern_matcher import stable_topological_sort  # slow to import, and only needed to compile

    join_small(graph.graph)
    stable_topological_sort(graph.graph)
    keep_own_blocks(graph.graph)
    graph.graph.eliminate_dead_code(has_effect)
    graph.recompile()


def swaps_of(graph: Graph) -> Iterator[Node]:
    """The awaits of exchanges that give each rank one block of equal size."""
    for node in graph.nodes:
        if node.target is AWAIT and node.args[0].target is SWAP:
            sent, *splits, group = node.args[0].args
            n = _resolve_process_group(group).size()
            if splits == [[1] * n] * 2 and sent.meta["val"].shape[0] == n:
                yield node


# -- together --------------------------------------------------------------------------------------------------------


def join_small(graph: Graph) -> None:
    """One exchange of all small ones over the same ranks that have as many exchanges before them.

    A result that an exchange needs is of one before it: what is joined waits for nothing of its own, nor do two that are joined wait
    for each other.
    """
    together: dict[tuple, list[Node]] = {}
    before: dict[Node, int] = {}
    awaits = set(swaps_of(graph))
    for node in graph.nodes:
        before[node] = max((before[x] for x in node.all_input_nodes), default=0) + (node in awaits)
        x = node.meta.get("val")
        if node in awaits and x.nbytes <= MOST_JOINED:
            together.setdefault((before[node], node.args[0].args[-1]), []).append(node)
    for waits in together.values():
        if len(waits) > 1:
            _join(graph, waits)


def _join(graph: Graph, waits: list[Node]) -> None:
    """Behind the last of their operands; the graph has to be put in order again. Values of several dtypes travel as their bits."""
    like = [w.meta["val"] for w in waits]
    unit = _unit({x.dtype for x in like})
    sizes = [x[0].nbytes // unit.itemsize for x in like]
    swap = waits[-1].args[0]
    with graph.inserting_before(swap):
        call = lambda target, *args: _call(graph, target, *args)
        is_of = lambda x, dtype: x.meta["val"].dtype == dtype
        seen_as = lambda x, dtype: x if is_of(x, dtype) else call(aten.view.dtype, call(aten.clone.default, x), dtype)
        rows = lambda x: call(aten.reshape.default, x, [like[0].shape[0], -1])
        both = call(aten.cat.default, [seen_as(rows(w.args[0].args[0]), unit) for w in waits], 1)
        parts = call(aten.split_with_sizes.default, call(AWAIT, call(SWAP, both, *swap.args[1:])), sizes, 1)
        for i, (w, x) in enumerate(zip(waits, like, strict=True)):
            part = seen_as(call(operator.getitem, parts, i), x.dtype)
            w.replace_all_uses_with(call(aten.reshape.default, part, list(x.shape)))
    for w in waits:
        graph.erase_node(w)


def _unit(dtypes: set[torch.dtype]) -> torch.dtype:
    """As which values of all these dtypes can be seen."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return torch.int32 if all(d.itemsize % 4 == 0 for d in dtypes) else torch.int8


def _call(graph: Graph, target, *args) -> Node:
    """A node with the form of its value, which is computed from those of its arguments."""
    node = graph.call_function(target, args)
    with next(n.meta["val"].fake_mode for n in graph.nodes if hasattr(n.meta.get("val"), "fake_mode")):
        node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]))
    return node


# -- own blocks ------------------------------------------------------------------------------------------------------


def keep_own_blocks(graph: Graph) -> None:
    """Of two ranks' exchange whose result is only read block by block, the block that stays is taken from the operand."""
    for wait in list(swaps_of(graph)):
        swap = wait.args[0]
        x, *_, group = swap.args
        own, reads = _resolve_process_group(group).rank(), list(block_reads(wait))
        if x.meta["val"].shape[0] != 2 or None in reads or {block for _, block in reads} != {0, 1}:
            continue  # were one block not read, the exchange would be dead code on the rank that has the other
        splits = [int(r != own) for r in range(2)]
        with graph.inserting_before(swap):
            sent, kept = _blocks(graph, x, own)
            received = _call(graph, AWAIT, _call(graph, SWAP, sent, splits, splits, group))
            other = _call(graph, aten.select.int, received, 0, 0)
        for node, block in reads:
            node.replace_all_uses_with(kept if block == own else other)


def block_reads(node: Node) -> Iterator[tuple[Node, int] | None]:
    """(reader, block) of every use of two ranks' result; None for one that is not of a single block."""
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
    """What the other rank is sent, [1, ...], and what this one keeps, [...]: the value itself where all blocks are one."""
    source = x.args[0] if x.target is aten.clone.default else None
    if source is not None and source.target is aten.expand.default and _is_repeated(source):
        kept = source.args[0]
        whole = kept if kept.meta["val"].is_contiguous() else _call(graph, aten.clone.default, kept)
        return _call(graph, aten.unsqueeze.default, whole, 0), kept
    return _call(graph, aten.slice.Tensor, x, 0, 1 - own, 2 - own), _call(graph, aten.select.int, x, 0, own)


def _is_repeated(expand: Node) -> bool:
    return tuple(expand.meta["val"].shape[1:]) == tuple(expand.args[0].meta["val"].shape)


# -- in order ----------------------------------------------------------------------------------------------------------


def fill_waits(steps: list) -> list:
    """The steps of the generated code in an order in which a rank computes while values travel: before an exchange only what it needs,
    and while it is under way what the next one needs besides.

    steps: Inductor's, each with its needs before it; a pass of `reorder_for_compute_comm_overlap_passes`.
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
    """The step, and all that has to come before it."""
    seen, left = {step}, [step]
    while left:
        new = needs[left.pop()] - seen
        seen |= new
        left += new
    return seen
