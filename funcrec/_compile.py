"""One compilation of `jit`: a function staged for the shapes of its arguments, and what a call of it does.

    leaves → [compiled graph] → results;   writes(results) into donated leaves;   leaves, results → outputs

Floor 3.
"""

import bisect
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from funcrec._donation import Plan, memory_span, plan_writes, poison, prepare_writes, refuse_shared, shared_results
from funcrec._errors import Problem, describe, fail, message
from funcrec._exchange import has_effect
from funcrec._exchange_passes import smaller_exchanges
from funcrec._inductor import DECOMPOSITIONS, compile_graph
from funcrec._replay import Recording, capture_cuda, record, replay
from funcrec._tree import fast_flatten, leaf_paths

MOST_RECORDINGS = 4  # each holds the memory of its step; a step that swaps two leaves needs two


class Staged(NamedTuple):
    """A function on flat tensors as a graph, and how its outputs are put together again.

    inputs: the leaves that the graph reads, by number. static: the output leaves that are no tensors; the class Tensor stands
    for those that are. structure: of the outputs. constants: the tensors that the function closes over.
    """

    graph: torch.fx.GraphModule
    inputs: tuple[int, ...]
    structure: Any
    static: list
    constants: list[Tensor]
    plan: Plan


class Compiled:
    """A staged function, compiled; called with the leaves of the arguments, it gives the outputs.

    A state that a call returned is most often the next call's argument. `follows` knows its leaves again, so that what `admit`
    found out about them need not be looked at twice.
    """

    def __init__(self, staged: Staged, donated: dict[int, str], leaves: list):
        self.staged = staged
        self.donated = donated  # input leaf -> its path
        self.keys = {i: leaf_key(x) for i, x in enumerate(leaves)}
        self.shared: set[int] | None = None  # results to copy; known after the first call
        self.call: Callable | None = None
        self.is_replayed = any(is_replayed(leaves[i]) for i in donated)
        self.recordings: dict[tuple[int, ...], Recording] = {}
        self.writes = prepare_writes(staged.plan, len(leaves))
        self.outputs: dict[int, weakref.ref] = {}  # the last call's tensors: a state that is dropped is not kept alive
        self.fed: list[tuple[int, int]] = []  # (leaf, output): donated leaves that the last call returned
        self.others: list[int] = []  # all other leaves
        self.sizes: dict[int, int] = {}  # {address: bytes} of donated leaves that keep their memory
        self.moved: list[tuple[int, int]] = []  # (leaf, bytes): donated leaves whose memory is new in every call

    def admit(self, leaves: list) -> None:
        """Look at every leaf."""
        refuse_shared(leaves, self.donated)
        number = {id(x()): j for j, x in self.outputs.items()}
        self.fed = [(i, number[id(leaves[i])]) for i in self.donated if id(leaves[i]) in number]
        known = {i for i, _ in self.fed}
        self.others = [i for i in range(len(leaves)) if i not in known]
        kept = set(self.staged.plan.kept.items())
        spans = {i: memory_span(leaves[i]) for i, _ in self.fed}
        self.moved = [(i, spans[i][1] - spans[i][0]) for i, j in self.fed if (j, i) not in kept]
        self.sizes = {spans[i][0]: spans[i][1] - spans[i][0] for i, j in self.fed if (j, i) in kept}

    def follows(self, leaves: list) -> bool:
        """Whether the donated leaves are the last call's outputs, and the others have known forms and memory of their own."""
        outputs, keys = self.outputs, self.keys
        if len(self.fed) < len(self.donated):
            return False
        for i, j in self.fed:
            if leaves[i] is not outputs[j]():
                return False
        sizes = self.sizes | {leaves[i].data_ptr(): size for i, size in self.moved}
        starts = sorted(sizes)
        for i in self.others:
            x = leaves[i]
            if leaf_key(x) != keys[i]:
                return False
            if isinstance(x, Tensor) and starts:
                start, end = memory_span(x)
                before = bisect.bisect_left(starts, end) - 1
                if before >= 0 and starts[before] + sizes[starts[before]] > start:
                    return False
        return True

    def __call__(self, leaves: list, when: tuple[str, int]) -> Any:
        plan, outputs = self.staged.plan, list(self.staged.static)
        with torch.no_grad():
            recording = self.recording(leaves) if self.is_replayed else None
            if recording is None:
                results = self.run(leaves)
                returned, kept = {j: results[k] for j, k in plan.whole.items()}, plan.kept.items()
            else:
                moved = {j: i for i, j in self.successors()}
                returned, kept = replay(recording, leaves), {**plan.kept, **moved}.items()
            for j, x in returned.items():
                outputs[j] = x
            for j, i in kept:
                outputs[j] = leaves[i].data  # an alias that is no view
        for i, path in self.donated.items():
            poison(leaves[i], (path, when))
        if self.donated:
            self.outputs = {j: weakref.ref(outputs[j]) for j in (*plan.kept, *plan.whole)}
        return self.staged.structure.unflatten(outputs)

    def run(self, leaves: list) -> list[Tensor]:
        """The results, those that may not share memory copied; the rows are written."""
        mine = [leaves[i] for i in self.staged.inputs]
        if self.call is None:
            self.call = compile_graph(self.staged.graph, mine)
        results = list(self.call(*mine))
        if self.shared is None:
            self.shared = self.find_shared(leaves, results)
        for k in self.shared:
            results[k] = results[k].clone()
        self.writes(leaves, results)
        return results

    def successors(self) -> list[tuple[int, int]]:
        """(leaf, output) where a recorded call copies the output into the leaf's memory, which no other output keeps."""
        plan = self.staged.plan
        return [(i, j) for i, j in self.fed if j in plan.whole and i not in plan.kept.values()]

    def recording(self, leaves: list) -> Recording | None:
        """The recording for a state of these addresses, made when a state comes back for the first time."""
        if len(self.fed) < len(self.donated):
            return None
        key = tuple(leaves[i].data_ptr() for i in self.donated)
        if key not in self.recordings:
            arguments = (self.run, leaves, list(self.donated), self.successors(), self.staged.plan.whole)
            if len(self.recordings) == MOST_RECORDINGS:
                self.recordings.clear()
            self.recordings[key] = record(*arguments, capture_cuda)
        return self.recordings[key]

    def find_shared(self, leaves: list, results: list[Tensor]) -> set[int]:
        own = [leaves[i] for i in self.donated]
        if not own:
            return set()
        arguments = [x for x in leaves if isinstance(x, Tensor)] + self.staged.constants
        return shared_results(results, set(self.staged.plan.whole.values()), arguments, own)


def is_replayed(donated: Tensor) -> bool:
    """Whether calls that take this leaf are recorded."""
    return donated.is_cuda


def leaf_key(x: object) -> Any:
    """What a compilation depends on."""
    if isinstance(x, Tensor):
        return type(x), x.shape, x.dtype, x.device, x.stride()
    refuse_opaque(x)
    return type(x), repr(x) if isinstance(x, float) else x  # 0.0 == -0.0, and NaN equals nothing


def refuse_opaque(x: object) -> None:
    """A static leaf must be hashable, and may not hide tensors."""
    if dataclasses.is_dataclass(x) or isinstance(x, torch.nn.Module) or type(x).__hash__ is None:
        fail(
            "funcrec.jit", "a leaf is neither a tensor nor a plain static value.", got=describe(x),
            need="tensors, numbers, strings and the like", hint="fr.pytree for a class of your own; a tensor for an array",
            kind=TypeError,
        )  # fmt: skip


def compile_function(
    fn: Callable,
    name: str,
    signature: inspect.Signature,
    names: Sequence[str],
    leaves: list,
    structure: Any,
    donate: Sequence[str],
) -> Compiled:
    """Run fn once on shapes, and plan the writes into donated leaves."""
    named = leaf_paths(structure, names)
    donated = {i: path for i, (root, path) in named.items() if root in donate and isinstance(leaves[i], Tensor)}
    refuse_shared(leaves, donated)
    tensor_at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    found: dict[str, Any] = {}

    def flat(*tensors):
        mine = list(leaves)
        for i, x in zip(tensor_at, tensors, strict=True):
            mine[i] = x
        replayed = inspect.BoundArguments(signature, dict(zip(names, structure.unflatten(mine), strict=True)))
        outputs, found["structure"] = fast_flatten(fn(*replayed.args, **replayed.kwargs))
        for x in outputs:
            if not isinstance(x, Tensor):
                refuse_opaque(x)
        found["static"] = [Tensor if isinstance(x, Tensor) else x for x in outputs]
        return [x for x in outputs if isinstance(x, Tensor)]

    graph = _record(f"funcrec.jit({name})", flat, [leaves[i] for i in tensor_at])
    places = dict(zip(tensor_at, graph.graph.find_nodes(op="placeholder"), strict=True))
    _refuse_writes(f"funcrec.jit({name})", graph, {places[i]: named[i][1] for i in tensor_at})
    graph.graph.eliminate_dead_code(has_effect)  # the pass of `value_and_grad` that only finds lookup sites
    outputs = [j for j, x in enumerate(found["static"]) if x is Tensor]
    plan = plan_writes(graph, outputs, places, donated)
    inputs = tuple(i for i in tensor_at if places[i].users)
    for node in graph.graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    smaller_exchanges(graph)
    constants = [getattr(graph, node.target) for node in graph.graph.find_nodes(op="get_attr")]
    return Compiled(Staged(graph, inputs, found["structure"], found["static"], constants, plan), donated, leaves)


def _record(call: str, flat: Callable, leaves: list[Tensor]) -> torch.fx.GraphModule:
    """The graph of flat's operations, without writes to intermediate values."""
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        shapes = [_like(x) for x in leaves]
        try:
            recorded = make_fx(flat)(*shapes)  # first as it is: rules of autograd.Function are unknown to functionalize
            return make_fx(functionalize(recorded, remove="mutations"), DECOMPOSITIONS)(*shapes)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            problem = Problem(
                "the function reads a tensor's value on the host.",
                f"{error}",
                "shapes and branches that do not depend on values",
                "torch.where, masks and capacities",
            )
            raise TypeError(message(call, [problem])) from error


def _refuse_writes(call: str, graph: torch.fx.GraphModule, places: dict[torch.fx.Node, str]) -> None:
    """Functionalised, a write to an argument is a copy into its placeholder."""
    copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = [places[n.args[0]] for n in copies if n.args[0] in places]
    if written:
        fail(
            call, "the function writes to its argument.", got=f"an in-place write to {written}", need="a pure function"
        )


def _like(x: Tensor) -> Tensor:
    """A tensor of x's form for each leaf, also where two leaves are one object: the next call's may be two."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
