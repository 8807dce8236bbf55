"""A compiled graph with its writes to donated leaves.

leaves → [compiled graph] → results;   writes(results) into donated leaves
"""

import contextlib
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.compile._donated import Donated
from funcrec.compile._early import Cut
from funcrec.compile._writes import WritePlan, plan_writes, prepare_writes, shared_results
from funcrec.compile.backend._exchanges import smaller_exchanges
from funcrec.compile.backend._inductor import compile_graph

_AS_IT_IS = contextlib.nullcontext()
LOCK = threading.RLock()  # held while torch compiles, one program at a time


class Program:
    """A graph of flat tensors, which is compiled once, and the plan of its writes.

    inputs: the numbers of the leaves that the graph reads. num_leaves: how many leaves a call has. donated: numbers of
    leaves.
    """

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        inputs: tuple[int, ...],
        plan: WritePlan,
        num_leaves: int,
        donated: Iterable[int],
    ):
        self.graph, self.inputs, self.plan, self.donated = graph, inputs, plan, list(donated)
        self.inputs_of = picker(inputs)
        self.writes = prepare_writes(plan, num_leaves)
        self.shared: set[int] | None = None  # results to copy; None before the first call
        self.call: Callable | None = None

    def compute(self, leaves: list) -> list[Tensor]:
        """Return the results, with copies of those that may not share memory. It writes to no leaf."""
        mine = self.inputs_of(leaves)
        casts_are_in_the_graph = torch._C._is_any_autocast_enabled()
        with torch._C._DisableAutocast() if casts_are_in_the_graph else _AS_IT_IS:
            call = self.code(mine)
            # Nothing follows the program: its operators need not pass autograd, which costs each of ours 30 µs.
            with torch._C._AutoDispatchBelowAutograd():
                results = list(call(*mine))
        if self.shared is None:  # In every call of this key, a result is a view of the same tensor.
            self.shared = self.find_shared(leaves, results)
        for k in self.shared:
            results[k] = results[k].clone()
        return results

    def code(self, like: Sequence[Tensor]) -> Callable:
        """Return the graph, compiled once for arguments of these forms.

        Its caller must turn grad mode and autocast off, as in calls of the compiled graph.
        """
        if self.call is None:
            with LOCK, clean_surroundings():
                self.call = self.call or compile_graph(self.graph, [*like])
        return self.call

    def find_shared(self, leaves: list, results: list[Tensor]) -> set[int]:
        left = lambda x: isinstance(x, Tensor) and type(x) is not Donated  # no result is in what was taken, and unread
        own = [x for x in (leaves[i] for i in self.donated) if left(x)]
        if not own:
            return set()
        arguments = [x for x in leaves if left(x)]
        return shared_results(results, set(self.plan.whole.values()), arguments, own)


def picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function from a list to the elements with these numbers, in their order."""
    return operator.itemgetter(*numbers) if len(numbers) > 1 else lambda xs: [xs[i] for i in numbers]


class Staged(NamedTuple):
    """A function on flat tensors as a graph, and the form of its outputs.

    inputs: the numbers of the leaves that the graph reads; tensors that the function closes over come after the
      arguments' leaves.
    static: the output leaves, with the class Tensor in place of each tensor. structure: the structure of (the
      function's result,), or (the result, the token of the last print).
    """

    graph: torch.fx.GraphModule
    inputs: tuple[int, ...]
    structure: Any
    static: list
    plan: WritePlan
    first: "First | None" = None

    def programs(self, num_leaves: int, donated: Iterable[int]) -> tuple[Program | None, list[int], Program]:
        """Return the part that runs before the first writes, the numbers of its results that the rest reads, and the
        rest."""
        if self.first is None:
            return None, [], Program(self.graph, self.inputs, self.plan, num_leaves, donated)
        first = Program(self.first.graph, self.first.inputs, self.first.plan, num_leaves, donated)
        rest = Program(self.graph, self.inputs, self.plan, num_leaves + len(self.first.crossing), donated)
        return first, self.first.crossing, rest


class First(NamedTuple):
    """The part of a program in two parts that runs before the first writes (`_early`).

    crossing: the numbers of its results that the rest reads, as leaves after all others. The other fields are those of
    `Staged`.
    """

    graph: torch.fx.GraphModule
    inputs: tuple[int, ...]
    plan: WritePlan
    crossing: list[int]


def planned(
    graph: torch.fx.GraphModule, outputs: Sequence[int], places: dict[int, torch.fx.Node], donated: Iterable[int]
) -> tuple[WritePlan, tuple[int, ...]]:
    """Return the plan of a graph's writes, and the leaves that the graph still reads."""
    plan = plan_writes(graph, outputs, places, donated)  # Inputs that only writes read now have no user.
    inputs = tuple(i for i, node in places.items() if node.users)
    for node in graph.graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    smaller_exchanges(graph)
    return plan, inputs


def staged_first(cut: Cut, donated: Iterable[int]) -> First | None:
    """Return the first part of a cut graph, or None if it cannot write in place."""
    number = len(cut.leaves)
    plan, inputs = planned(cut.first, range(number + cut.crossing), cut.first_inputs, donated)
    if plan.kept != dict(enumerate(cut.leaves)):
        return None
    return First(cut.first, inputs, plan, [plan.whole[number + j] for j in range(cut.crossing)])


def clean_surroundings() -> contextlib.AbstractContextManager:
    """Return a context without the caller's default device, for the compiler, which makes tensors of its own."""
    return torch.device("cpu") if torch._C._len_torch_function_stack() else _AS_IT_IS
