"""Cut a graph at operations that renew rows of donated leaves before the rest of the graph reads these rows.

    graph(leaves) = rest(leaves', crossing)      first(leaves) = (what the writes need, crossing);   leaves' = written

A step that admits new ids draws their rows, and its lookups read these rows. So do steps that settle the noise of rows
before they read them. As one function such a step would copy the tables. In two functions the rows are written in
between, in the memory of the donated leaves.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, GraphModule, Node

from funcrec.compile._writes import RESHAPES, replaced_by, trace_back
from funcrec.kernels.library import twin

EARLY = ("draw_rows", "settle_columns")
PUTS = ("scatter_rows",)  # early where the graph reads what they write, and has none of EARLY
VIEWS = RESHAPES | {torch.ops.aten.view.dtype}


class Cut(NamedTuple):
    """The two graphs of a step.

    first: the written leaves, then the crossing values. rest: the step's outputs; its inputs are the step's, then the
    crossing values. first_inputs, rest_inputs: {number of a leaf: its placeholder}.
    """

    first: GraphModule
    first_inputs: dict[int, Node]
    leaves: list[int]
    crossing: int
    rest: GraphModule
    rest_inputs: dict[int, Node]


def cut_early(whole: GraphModule, inputs: dict[int, Node], donated: Iterable[int], num_leaves: int) -> Cut | None:
    """Return the two graphs, or None if no operation writes early, or one of them could not write in place.

    num_leaves: the number of leaves and captured tensors, after which the crossing values come.
    """
    nodes = list(whole.graph.nodes)
    writers = [n for n in nodes if is_one_of(EARLY, n)] or first_puts(nodes)
    leaves = {inputs[i] for i in donated}
    targets = written_leaves(writers, leaves)
    late = followers(writers)
    if not targets or any(w in late for w in writers) or not any(map(is_reader, late)):
        return None
    before = needed_first(writers, set(targets), late)
    if before is None:
        return None
    outside = lambda n: any(u not in before and u not in writers for u in n.users)
    crossing = [n for n in nodes if n in before and n.op != "placeholder" and outside(n)]
    numbers = {node: i for i, node in inputs.items()}
    first, first_inputs = first_graph(whole, inputs, before, writers, list(targets), crossing)
    rest, rest_inputs = rest_graph(whole, inputs, before, writers, targets, crossing, num_leaves)
    return Cut(first, first_inputs, [numbers[x] for x in targets], len(crossing), rest, rest_inputs)


def is_one_of(names: Sequence[str], node: Node) -> bool:
    if node.op != "call_function" or twin(node.target) is None:
        return False
    return cast(Any, node.target)._schema.name.partition("::")[2] in names


def first_puts(nodes: list[Node]) -> list[Node]:
    """Return the writes of rows that follow no other such write, and whose rows the graph reads."""
    puts = [n for n in nodes if is_one_of(PUTS, n)]
    later = followers(puts)
    return [n for n in puts if n not in later and any(map(is_reader, followers([n])))]


def is_reader(node: Node) -> bool:
    """Return whether a node reads numbers, and does not only pass them on."""
    return node.op == "call_function" and node.target is not operator.getitem and node.target not in RESHAPES


def written_leaves(writers: list[Node], leaves: set[Node]) -> dict[Node, tuple[Node, int]]:
    """Return {leaf: (the operation that writes to it, the number of its result)}, or {} if some operation writes to
    anything else, or two of them to one leaf."""
    out: dict[Node, tuple[Node, int]] = {}
    for w in writers:
        for k, x in enumerate(replaced_by(w)):
            leaf, way = trace_back(x)
            plain = leaf in leaves and leaf.meta["val"].is_contiguous() and all(n.target in RESHAPES for n in way)
            if not plain or leaf in out:
                return {}
            out[leaf] = w, k
    return out


def followers(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that depend on these nodes."""
    seen: set[Node] = set()
    left = list(nodes)
    while left:
        for user in left.pop().users:
            if user not in seen:
                seen.add(user)
                left.append(user)
    return seen


def needed_first(writers: list[Node], written: set[Node], late: set[Node]) -> set[Node] | None:
    """Return the nodes that run before the writes: what the writes need, and what reads the leaves that they overwrite.
    None if something reads the old rows and needs the new ones."""
    old = {u for leaf in written for u in leaf.users if u not in writers}
    if any(u in late or u.op == "output" for u in old):
        return None
    # Readers of a view come first, too. A view that also crosses is copied before the writes (`Program.find_shared`).
    views = [n for n in old if n.target in VIEWS]
    while views:
        readers = {u for u in views.pop().users if u not in late and u.op != "output" and u not in writers} - old
        old |= readers
        views += [n for n in readers if n.target in VIEWS]
    out: set[Node] = set()
    left = [*old, *(x for w in writers for x in w.all_input_nodes)]
    while left:
        n = left.pop()
        if n in out:
            continue
        out.add(n)
        left += n.all_input_nodes
        if not isinstance(n.meta.get("val"), torch.Tensor):  # Parts of a list cross, and not the list.
            left += [u for u in n.users if u.target is operator.getitem]
    return None if out & late else out


def first_graph(
    whole: GraphModule,
    inputs: dict[int, Node],
    before: set[Node],
    writers: list[Node],
    leaves: list[Node],
    crossing: list[Node],
) -> tuple[GraphModule, dict[int, Node]]:
    own, copies = Graph(), {}
    for n in whole.graph.nodes:
        if n.op == "placeholder" or n in before or n in writers:
            copies[n] = own.node_copy(n, copies.__getitem__)
    made = {}
    for w in writers:
        for k, x in enumerate(replaced_by(w)):
            leaf = trace_back(x)[0]
            made[leaf] = copies[w] if is_one(w) else call(own, operator.getitem, (copies[w], k), x.meta["val"])
            if x is not leaf:
                shape = list(leaf.meta["val"].shape)
                made[leaf] = call(own, torch.ops.aten.view.default, (made[leaf], shape), leaf.meta["val"])
    own.output([*(made[x] for x in leaves), *(copies[n] for n in crossing)])
    return GraphModule(whole, own), {i: copies[n] for i, n in inputs.items()}


def is_one(writer: Node) -> bool:
    """Return whether a write returns one tensor, and not a list of them."""
    return isinstance(writer.meta["val"], torch.Tensor)


def call(graph: Graph, target: Callable[..., Any], arguments: tuple[Any, ...], value: object) -> Node:
    node = graph.call_function(target, arguments)
    node.meta["val"] = value
    return node


def rest_graph(
    whole: GraphModule,
    inputs: dict[int, Node],
    before: set[Node],
    writers: list[Node],
    targets: dict[Node, tuple[Node, int]],
    crossing: list[Node],
    num_leaves: int,
) -> tuple[GraphModule, dict[int, Node]]:
    own = Graph()
    copies = {n: own.node_copy(n) for n in whole.graph.nodes if n.op == "placeholder"}
    places = {i: copies[n] for i, n in inputs.items()}
    for j, n in enumerate(crossing):
        copies[n] = places[num_leaves + j] = own.placeholder(f"crossing_{j}")
        copies[n].meta = dict(n.meta)
    leaf_of = {place: leaf for leaf, place in targets.items()}

    def again(n: Node) -> Node:
        """Return a reshaped leaf, which now has the new rows."""
        if n not in copies:
            copies[n] = own.node_copy(n, again)
        return copies[n]

    renewed: dict[Node, Node] = {}  # {node of the new rows in any shape: its leaf}
    for n in whole.graph.nodes:
        if n in writers and is_one(n):
            renewed[n] = leaf_of[n, 0]
            copies[n] = again(replaced_by(n)[0])
        if n in copies or n in before or n in writers:
            continue
        if n.target is operator.getitem and n.args[0] in writers:
            renewed[n] = leaf_of[n.args]
            copies[n] = again(replaced_by(n.args[0])[n.args[1]])
        elif n.target in RESHAPES and n.args[0] in renewed:
            leaf = renewed[n] = renewed[n.args[0]]
            is_whole = n.meta["val"].shape == leaf.meta["val"].shape
            copies[n] = copies[leaf] if is_whole else own.node_copy(n, copies.__getitem__)
        else:
            copies[n] = own.node_copy(n, copies.__getitem__)
    return GraphModule(whole, own), places
