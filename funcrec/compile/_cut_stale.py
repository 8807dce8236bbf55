"""cut_stale: cut a step that reads tables of an earlier time into three functions.

    routed = ahead(batch);  looked = read_ahead(tables, batch, routed);  rest(state, batch, routed, looked) = step(...)

`ahead` sends ids. `read_ahead` holds the operations that read these tables and no other part of the state, up to the
last exchange on each path. That exchange has begun when `read_ahead` returns, and `rest` awaits it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from funcrec.compile._jit import Jitted, jit
from funcrec.compile._split_step import (
    crossing_nodes,
    donated_names,
    is_list,
    needs_of,
    operations,
    part_of,
    reads_of,
    sending_part,
    tensors,
)
from funcrec.compile._writes import arguments, outputs_of
from funcrec.core import fail, fast_flatten, map_tensors, sure
from funcrec.mesh import AWAIT, LEAVES


class RowsAhead(NamedTuple):
    """The values that `read_ahead` read from tables.

    sent: the operands of exchanges under way, which must live until `rest` awaits `begun`. begun: the begun exchanges.
    given: other values.
    """

    sent: list[Tensor]
    begun: list[Tensor]
    given: list[Tensor]


class Thirds(NamedTuple):
    """A step's three functions.

    ahead: batch -> routed, a list of tensors. read_ahead: (tables, batch, routed) -> RowsAhead. rest: (state, batch,
    routed, RowsAhead) -> the step's result. read: tensors that the step closes over and the first two functions read;
    they must not change before `rest` runs. bytes: the size of `routed` and `RowsAhead`.
    """

    ahead: Callable[[Any], list[Tensor]]
    read_ahead: Callable[[Any, Any, list[Tensor]], RowsAhead]
    rest: Callable[[Any, Any, list[Tensor], RowsAhead], Any]
    read: list[Tensor]
    bytes: int


class Found(NamedTuple):
    """Where to cut a graph. last: exchanges that `rest` awaits. given: other values from `read_ahead` to `rest`."""

    last: list[Node]
    given: list[Node]


def cut_stale(
    call: str, step: Callable, fn: Callable, state: Any, tables: Any, batch: Any, groups: Mapping[str, str]
) -> Thirds:
    """Return the three parts of fn(state, tables, batch) for these forms, jitted if `step` is.

    Args:
      groups: {process group: the group that `ahead` uses in its place}.
    """
    apart = map_tensors(Tensor.detach, tables)  # The tables may be tensors of the state.
    traced = operations(call, fn, {"state": state, "tables": apart, "batch": batch})
    first, behind = len(fast_flatten(state)[0]), len(fast_flatten((state, tables))[0])
    inputs, whole = list(traced.places.values()), sure(traced.graph)
    of_state = [n for i, n in traced.places.items() if i < first]
    of_tables = [n for i, n in traced.places.items() if first <= i < behind]
    others = [n for i, n in traced.places.items() if i >= behind]
    routed = crossing_nodes(whole.graph, {*of_state, *of_tables})
    outputs = outputs_of(whole.graph)
    found = lines_of(call, whole.graph, set(of_state), set(of_tables), {*inputs, *routed}, outputs)
    awaited = [next(iter(n.users)) for n in found.last]
    operands = [arguments(n)[0] for n in found.last]
    captured, static = traced.captured, traced.static
    sending = sending_part(call, whole, others, routed, groups)
    looking = part_of(whole, [*of_tables, *others, *routed], [*operands, *found.given])
    remaining = part_of(whole, [*of_state, *others, *routed, *awaited, *found.given], outputs)

    def ahead(batch):
        with torch.no_grad():
            return list(sending(*tensors(batch), *captured))

    def read(tables, batch, routed):
        with torch.no_grad():
            return list(looking(*tensors((tables, batch)), *captured, *routed))

    def compute(state, batch, routed, looked):
        with torch.no_grad():
            made = iter(remaining(*tensors((state, batch)), *captured, *routed, *looked))
        return traced.structure.unflatten([next(made) if x is Tensor else x for x in static])[0]

    if isinstance(step, Jitted):
        ahead.__name__ = read.__name__ = compute.__name__ = step.name
        donate = ("state",) if donated_names(call, step) else ()
        ahead, read, compute = jit(ahead), jit(read), jit(compute, donate=donate)

    def read_ahead(tables, batch, routed):
        made = read(tables, batch, routed)
        sent, given = made[: len(operands)], made[len(operands) :]
        # The exchanges begin outside any program, because a program would have to await an exchange that it begins.
        begun = [cast(Any, n.target)(x, *n.args[1:]) for n, x in zip(found.last, sent, strict=True)]
        return RowsAhead(sent, begun, given)

    def rest(state, batch, routed, looked):
        return compute(state, batch, routed, [*map(AWAIT, looked.begun), *looked.given])

    captures = reads_of(sending, captured) + reads_of(looking, captured, len(routed))
    held_bytes = sum(n.meta["val"].nbytes for n in (*routed, *operands, *awaited, *found.given))
    return Thirds(ahead if routed else lambda batch: [], read_ahead, rest, captures, held_bytes)


def lines_of(
    call: str, graph: Graph, of_state: set[Node], of_tables: set[Node], known: set[Node], outputs: list[Node]
) -> Found:
    """Return where to cut values that depend on the tables alone: at last exchanges, or where the state enters."""
    needed = needs_of(outputs, known)
    late, looked = set(of_state), set(of_tables)
    for node in (n for n in graph.nodes if n in needed):
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        elif not looked.isdisjoint(node.all_input_nodes):
            looked.add(node)
    last: set[Node] = set()
    leading: set[Node] = set()  # nodes that lead to an exchange
    for node in (n for n in reversed(graph.nodes) if n in looked and n not in of_tables):
        if node.target in LEAVES and leading.isdisjoint(node.users):
            last.add(node)
        if node.target in LEAVES or not leading.isdisjoint(node.users):
            leading.add(node)
    for node in (n for n in graph.nodes if n in looked):  # values after an exchange that `read_ahead` does not await
        if not last.isdisjoint(node.all_input_nodes) or any(n in late for n in node.all_input_nodes):
            late.add(node)
            looked.discard(node)
    mine = looked - last
    reads = lambda n: n in needed or n in outputs
    ends = lambda n: n in outputs or any(reads(u) and u not in looked for u in n.users)
    given = [n for n in graph.nodes if n in mine and not is_list(n) and ends(n)]
    refuse_tables(call, given, of_tables)
    return Found([n for n in graph.nodes if n in last], given)


def refuse_tables(call: str, given: list[Node], of_tables: set[Node]) -> None:
    """Raise if `rest` would read the tables themselves, to which an update writes."""
    memory = lambda n: n.meta["val"].untyped_storage()._cdata
    held = {memory(n) for n in of_tables}
    if any(n in of_tables or memory(n) in held for n in given):
        fail(
            call, "a lookup waits for the state: it cannot be read a step ahead.",
            got="ids that follow from dense parameters or the step's key, tables read by no lookup, or micro-batches",
            need="lookups whose ids follow from the batch alone", hint="fr.pipeline(step), which is not stale",
        )  # fmt: skip
