"""Write rows into the memory of donated inputs, after the compiled function has run.

    output = index_put(leaf, rows, values)   becomes   the compiled function returns (rows, values); leaf[rows] = values
    outputs = fused_update(leaves, x)        becomes   the compiled function returns x; fused_update_(leaves, x)

The compiled function itself writes to nothing. The writes come after it, when all readers of the old values have run.
(Inside the function, torch 2.13's Inductor reorders reads and writes of one buffer in half a dozen ways.) Other outputs
have memory of their own, and the call frees the memory of the donated leaves that they replace. `_early` cuts a
function that reads what it has written.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from funcrec.core import sure
from funcrec.kernels.library import twin

PUT = torch.ops.aten.index_put.default
PUT_ = torch.ops.aten.index_put_.default
RESHAPES = {  # views that keep the order of the elements
    getattr(torch.ops.aten, name).default
    for name in ("view", "unsqueeze", "squeeze", "_unsafe_view", "reshape", "alias", "detach")
} | {torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims}


class Slot(NamedTuple):
    """A tensor that a write needs, viewed in a shape: a result of the compiled function, or a leaf of the arguments."""

    is_result: bool
    number: int
    shape: tuple[int, ...] | None = None


class Write(NamedTuple):
    """call(*arguments), which writes to donated leaves; a Slot stands for each tensor."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]


class WritePlan(NamedTuple):
    """The use of a staged graph's results.

    writes: the writes, in order. written: the leaves that the writes change. kept: {output: the donated leaf in whose
    memory the output lies}. whole: {output: the number of the result that the output equals}.
    """

    writes: list[Write]
    written: set[int]
    kept: dict[int, int]
    whole: dict[int, int]


def plan_writes(
    graph: GraphModule, outputs: Sequence[int], inputs: dict[int, Node], donated: Iterable[int]
) -> WritePlan:
    """Return the plan of writes for a graph, and make the graph return what the writes need.

    There is a write for each output that only replaces rows of a donated leaf.

    Args:
      outputs: the numbers of the graph's outputs, in order.
      inputs: {number of a leaf: its placeholder}. donated: numbers of leaves.
    """
    end = next(iter(graph.graph.find_nodes(op="output")))
    sources = dict(zip(outputs, arguments(end)[0], strict=True))
    numbers = {node: i for i, node in inputs.items()}
    leaves = {inputs[i] for i in donated}
    ways = in_place_ways(sources, leaves)
    results = [source for j, source in sources.items() if j not in ways]
    whole = {j: k for k, j in enumerate(j for j in sources if j not in ways)}
    taken: dict[Node, int] = {}
    changed: set[int] = set()

    def read(node: Node) -> Slot:
        if node in numbers and node not in leaves:
            return Slot(False, numbers[node])
        if node not in taken:
            results.append(node)
            taken[node] = len(results) - 1
        return Slot(True, taken[node])

    def written(node: Node) -> Slot:
        leaf = trace_back(node)[0]
        shape = node.meta["val"].shape
        changed.add(numbers[leaf])
        return Slot(False, numbers[leaf], None if shape == leaf.meta["val"].shape else tuple(shape))

    on_way = {n for way in ways.values() for n in way.nodes if replaced_by(n)}
    writes = []
    for node in (n for n in graph.graph.nodes if n in on_way):
        call, count = (PUT_, 1) if node.target is PUT else sure(twin(node.target))
        rest = (*node.args[count:], *node.kwargs.values())
        writes.append(Write(call, (*map_arg(node.args[:count], written), *map_arg(rest, read))))
    end.args = (results,)  # Now no node reads the operations that write in place.
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return WritePlan(writes, changed, {j: numbers[way.leaf] for j, way in ways.items()}, whole)


class Way(NamedTuple):
    """The path from an output back to its leaf, and the operations on the path."""

    leaf: Node
    nodes: tuple[Node, ...]


def in_place_ways(sources: dict[int, Node], leaves: set[Node]) -> dict[int, Way]:
    """Return {output: its way} for each output that is a donated leaf with replaced rows.

    Nothing else may read the written values.
    """
    ways: dict[int, Way] = {}
    given = list(sources.values())
    for j, source in sources.items():
        leaf, nodes = trace_back(source)
        # A leaf that two outputs return, or two writes change, cannot hold both values.
        wanted = leaf in leaves and (not nodes or any(map(replaced_by, nodes))) and given.count(source) == 1
        if wanted and _same_form(source, leaf) and all(way.leaf is not leaf for way in ways.values()):
            ways[j] = Way(leaf, nodes)
    while True:  # An operation runs in place only if all of its writes are in place.
        on_way = {n for way in ways.values() for n in way.nodes}
        ends = {sources[j] for j in ways}
        good = {n for n in on_way if _is_private(n, on_way, ends) and _owns(n, on_way, ways, leaves)}
        kept = {j: way for j, way in ways.items() if good.issuperset(way.nodes)}
        if len(kept) == len(ways):
            return kept
        ways = kept


def arguments(node: Node) -> tuple[Any, ...]:
    """Return the arguments of a node. Their types in torch are everything that a graph can hold."""
    return node.args


def outputs_of(graph: Graph) -> Any:
    """Return the output of a graph, which is most often a list of nodes."""
    return arguments(next(iter(graph.find_nodes(op="output"))))[0]


def trace_back(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """Return the leaf of which `node` replaces rows, and the operations in between, from the last to the first."""
    way: list[Node] = []
    while node.op == "call_function":
        given = arguments(node)
        if node.target is operator.getitem and replaced_by(given[0]):
            way += [node, given[0]]
            node = replaced_by(given[0])[given[1]]
        elif node.target in RESHAPES or len(replaced_by(node)) == 1:
            way.append(node)
            node = given[0]
        else:
            break
    return node, tuple(way)


def _owns(node: Node, on_way: set[Node], ways: dict[int, Way], leaves: set[Node]) -> bool:
    """Return whether the node writes only to donated leaves, and only paths over this node return those leaves."""
    way_of = {way.leaf: way for way in ways.values()}
    # An operation on several tables writes to all of them in place, or to none. A leaf that no output keeps ends with
    # the call. So an operation may overwrite it, unless another such operation writes to that leaf, too.
    for leaf in (trace_back(x)[0] for x in replaced_by(node)):
        if leaf not in leaves or (leaf in way_of and node not in way_of[leaf].nodes):
            return False
        if leaf not in way_of and any(leaf is trace_back(x)[0] for n in on_way - {node} for x in replaced_by(n)):
            return False
    return True


def _is_private(node: Node, on_way: set[Node], ends: set[Node]) -> bool:
    """Return whether only the next node on its path, or the output, reads this node."""
    users = [u for u in node.users if u.op != "output"]
    if isinstance(node.meta["val"], (list, tuple)):  # An operation on several tables: a getitem reads each table.
        return all(u in on_way or not u.users for u in users)
    if node in ends:  # Another reader inside the graph would need a value that is written after the graph.
        return not users
    return len(users) == len(node.users) == 1 and users[0] in on_way and _passes_on(node, users[0])


def _passes_on(node: Node, user: Node) -> bool:
    """Return whether the user writes to the node or reshapes it, and does not read it otherwise."""
    if user.target in RESHAPES:
        return True
    return node in replaced_by(user) and _times(user, node) == 1


def _times(user: Node, node: Node) -> int:
    """Return how often the node occurs among the user's arguments."""
    found: list[Node] = []
    map_arg((user.args, user.kwargs), lambda n: found.append(n) or n)
    return found.count(node)


def replaced_by(node: Node) -> tuple[Node, ...]:
    """Return the arguments whose rows the operation replaces, in the order of its outputs."""
    if node.target is PUT:
        return (arguments(node)[0],)
    found = twin(node.target)
    if found is None:
        return ()
    flat: list[Node] = []
    map_arg(node.args[: found[1]], lambda n: flat.append(n) or n)
    return tuple(flat)


def _same_form(source: Node, leaf: Node) -> bool:
    a, b = source.meta["val"], leaf.meta["val"]
    return source is leaf or (a.shape == b.shape and a.is_contiguous() and b.is_contiguous())


def leaves_read(plan: WritePlan) -> set[int]:
    """Return the leaves that the writes read. A leaf whose rows a write only overwrites does not count."""

    def places(x: object) -> set[int]:
        if isinstance(x, (list, tuple)) and not isinstance(x, Slot):
            return set().union(*map(places, x))
        return {x.number} if isinstance(x, Slot) and not x.is_result else set()

    return set().union(*(places(w.arguments[writes_over(w) :]) for w in plan.writes))


def writes_over(write: Write) -> bool:
    """Return whether a write puts rows into its first argument without reading the old rows.

    A sum reads the old rows. So does an update, whose first arguments are lists of all tables and all slots.
    """
    is_sum = write.call is PUT_ and any(write.arguments[3:4])
    return isinstance(write.arguments[0], Slot) and not is_sum


def prepare_writes(plan: WritePlan, num_leaves: int) -> Callable[[list, list], None]:
    """Return a function of (leaves, results) that replaces the rows, in place and in order."""

    def has_place(x: object) -> bool:
        return isinstance(x, Slot) or (isinstance(x, (list, tuple)) and any(map(has_place, x)))

    def getter(x: Any) -> Callable[[list], object]:
        if isinstance(x, Slot):
            at, shape = x.number + num_leaves * x.is_result, x.shape
            return operator.itemgetter(at) if shape is None else lambda pool: pool[at].view(shape)
        if not has_place(x):
            return lambda pool: x
        getters = [getter(y) for y in x]
        if len(x) > 1 and all(isinstance(y, Slot) and y.shape is None for y in x):
            return operator.itemgetter(*(y.number + num_leaves * y.is_result for y in x))
        return lambda pool: [get(pool) for get in getters]

    calls = [(w.call, [getter(x) for x in w.arguments]) for w in plan.writes]

    def run(leaves: list[Any], results: list[Any]) -> None:
        pool = leaves + results
        with torch._C._AutoDispatchBelowAutograd():
            for call, getters in calls:
                call(*[get(pool) for get in getters])

    return run


def shared_results(
    results: Sequence[Tensor], returned: set[int], arguments: Sequence[Tensor], donated: Sequence[Tensor]
) -> set[int]:
    """Return the numbers of the results to copy.

    A write of this call, or of the next call that takes a result, would change these results. Returned results must
    have memory of their own. Results that writes read must not share a donated argument's memory.
    """
    # A result in an argument's memory would change when the argument's owner writes to that memory. A result in a
    # donated leaf would change with the writes of this call.
    memory, taken = {_memory(x) for x in arguments}, {_memory(x) for x in donated}
    shared = set()
    for k, x in enumerate(results):
        if _memory(x) in (memory if k in returned else taken):
            shared.add(k)
        if k in returned:
            memory.add(_memory(x))
    return shared


def _memory(x: Tensor) -> object:
    """Return a key that identifies a tensor's memory: the address, or the tensor's id if there is no memory."""
    return x.untyped_storage().data_ptr() or id(x)
