"""One compilation of `jit`: a function staged for the shapes of its arguments, and what a call of it does.

leaves → [compiled graph] → results;   writes(results) into donated leaves;   leaves, results → outputs
"""

import bisect
import contextlib
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.compile._aliases import Hold, alone, hold, shared_leaves
from funcrec.compile._donated import held_message, memory_span, refuse_shared, take
from funcrec.compile._keys import leaf_key
from funcrec.compile._recording import Recording, capture_cuda, record, replay
from funcrec.compile._trace import is_odd, refuse_odd, stage
from funcrec.compile._writes import Plan, plan_writes, prepare_writes, shared_results
from funcrec.compile.backend._exchanges import smaller_exchanges
from funcrec.compile.backend._inductor import compile_graph
from funcrec.core import Problem, check, copied, fast_flatten, leaf_paths, static_key
from funcrec.mesh import has_effect

_AS_IT_IS = contextlib.nullcontext()
MOST_RECORDINGS = 4  # each holds the memory of its step; a step that swaps two leaves needs two


LOCK = threading.RLock()  # torch compiles one program at a time


class Staged(NamedTuple):
    """A function on flat tensors as a graph, and how its outputs are put together again.

    inputs: the leaves that the graph reads, by number; those that the function closes over come after the arguments'.
    static: the output leaves that are no tensors; the class Tensor
      stands for those that are. structure: of the outputs.
    """

    graph: torch.fx.GraphModule
    inputs: tuple[int, ...]
    structure: Any
    static: list
    plan: Plan


class Followed(NamedTuple):
    """What stands for a compilation of a function that closes over tensors which autograd follows: there is none."""

    captured: list[Tensor]
    used = 0

    def is_current(self) -> bool:
        return any(x.requires_grad for x in self.captured)


class Link(NamedTuple):
    """What was found out about a call's leaves, and holds for the next call's if they are this call's outputs.

    fed: (leaf, output), the donated leaves that the call before returned. others: all other leaves. sizes: {address:
    bytes} of donated leaves that keep their memory. moved: (leaf, bytes) of donated leaves whose memory is new in every
    call. hold: on what is written to.
    """

    fed: list[tuple[int, int]]
    others: list[int]
    sizes: dict[int, int]
    moved: list[tuple[int, int]]
    hold: Hold


class Compiled:
    """A staged function, compiled; called with the leaves of the arguments
    and the tensors that it closes over, it gives the outputs.

    A state that a call returned is most often the next call's argument. `follows` knows its leaves again, so that what
    `admit` found out about them need not be looked at twice.

    A call has the donated leaves whole or has not begun: first what may fail without harm (copies of memory that others
    hold, the compiled code), then all leaves are taken in one step, then the writes.
    """

    def __init__(self, staged: Staged, donated: dict[int, str], leaves: list, captured: list[Tensor]):
        self.staged = staged
        self.donated = donated  # input leaf -> its path
        self.captured = captured
        self.forms = [leaf_key(x) for x in captured]
        self.used = 0  # the number of the last call
        self.lock = threading.RLock()  # of donating calls: each looks for what the last one returned
        leaves = leaves + captured
        self.constants = [(i, leaf_key(x)) for i, x in enumerate(leaves) if not isinstance(x, Tensor)]
        self.tensor_at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.tracks = [leaves[i].requires_grad for i in self.tensor_at]
        self.guard = guard([leaves[i] for i in self.tensor_at])
        self.shared: set[int] | None = None  # results to copy; known after the first call
        self.call: Callable | None = None
        self.is_replayed = any(is_replayed(leaves[i]) for i in donated) and all(map(is_replayed, captured))
        self.recordings: dict[tuple[int, ...], Recording] = {}
        self.writes = prepare_writes(staged.plan, len(leaves))
        self.written = list(donated) if self.is_replayed else sorted(staged.plan.written)
        self.stay = sorted({*self.written, *staged.plan.kept.values()})  # leaves whose memory becomes the outputs'
        self.told: set[int] = set()  # leaves whose copies were spoken of
        nothing = Link([], list(range(len(leaves))), {}, [], hold(leaves, []))
        # the last call's, and its outputs, which are not kept alive
        self.last: tuple[Link, dict[int, weakref.ref]] = (nothing, {})

    def admit(self, leaves: list) -> Link:
        """Look at every leaf."""
        refuse_shared(leaves, self.donated)  # or one's rows are written while another still means the old ones
        # known by identity alone: a tensor of another history that has the same address has been looked at by nobody
        number = {id(x()): j for j, x in self.last[1].items()}
        fed = [(i, number[id(leaves[i])]) for i in self.donated if id(leaves[i]) in number]
        known = {i for i, _ in fed}
        others = [i for i in range(len(leaves)) if i not in known]
        kept = set(self.staged.plan.kept.items())
        spans = {i: memory_span(leaves[i]) for i, _ in fed}
        moved = [(i, spans[i][1] - spans[i][0]) for i, j in fed if (j, i) not in kept]
        sizes = {spans[i][0]: spans[i][1] - spans[i][0] for i, j in fed if (j, i) in kept}
        return Link(fed, others, sizes, moved, hold(leaves, self.written))

    def follows(self, leaves: list) -> Link | None:
        """What is known of the leaves, if the donated ones are the last call's outputs
        and the others have known forms and their own memory."""
        link, outputs = self.last
        if len(link.fed) < len(self.donated):
            return None
        for i, j in link.fed:
            if leaves[i] is not outputs[j]():
                return None
        if not self.has_forms(leaves):  # the key once more, as C++: strides and devices may change under a leaf's name
            return None
        if not self.donated:
            return link
        # given once (refuse_shared): outputs lie apart, as the call
        # before made them, so only the other leaves can touch one
        sizes = link.sizes
        if link.moved:
            numbers, lengths = zip(*link.moved, strict=True)
            sizes = sizes | dict(zip(map(Tensor.data_ptr, map(leaves.__getitem__, numbers)), lengths, strict=True))
        starts = sorted(sizes)
        for i in link.others:
            x = leaves[i]
            if isinstance(x, Tensor) and starts:
                start, end = memory_span(x)
                before = bisect.bisect_left(starts, end) - 1
                if before >= 0 and starts[before] + sizes[starts[before]] > start:
                    return None
        return link

    def has_forms(self, leaves: list) -> bool:
        """Whether leaves and captured tensors have the forms that were compiled for, and no tensor is there twice."""
        tensors = leaves if not self.constants else [leaves[i] for i in self.tensor_at]
        if not self.guard.check(*tensors):
            return False
        if not torch.is_grad_enabled() and [x.requires_grad for x in tensors] != self.tracks:
            return False  # the guard asks only for what autograd would follow
        return all(leaf_key(leaves[i]) == key for i, key in self.constants)

    def is_current(self) -> bool:
        return [leaf_key(x) for x in self.captured] == self.forms

    def __call__(self, leaves: list, when: tuple[str, int], link: Link) -> Any:
        """The outputs, put together; grad mode is as before, whenever
        a signal comes (a `with` has moments when it is not)."""
        was = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return self.run(leaves, when, link)
        finally:
            torch._C._set_grad_enabled(was)

    def run(self, given: list, when: tuple[str, int], link: Link) -> Any:
        plan, outputs, leaves = self.staged.plan, list(self.staged.static), given
        # Not begun: copies, compiling, the program and a recording's
        # memory may fail or be interrupted, and nothing is taken.
        foreign = shared_leaves(link.hold, leaves)
        if foreign:
            leaves = self.with_copies(leaves, foreign, when[0])
            link = self.admit(leaves)
        recording = self.recording(leaves, link) if self.is_replayed else None
        results = self.compute(leaves) if recording is None else []
        mine = {i: leaves[i].data for i in self.stay}  # aliases that are no views, since what is taken loses its memory
        # Taken: all leaves by one call of C, which no signal parts. From here on
        # every old name raises: the state is the outputs', or gone.
        if self.donated:
            left = alone([given[i] for i in self.stay if i not in foreign])
            left += [x._base for x in (given[i] for i in link.hold.views if i not in foreign) if x._base is not None]
            take([given[i] for i in self.donated], self.donated.values(), when, left)
        if recording is None:
            self.write(leaves, mine, results)
            returned, kept = (
                zip(plan.whole, map(results.__getitem__, plan.whole.values()), strict=True),
                plan.kept.items(),
            )
        else:
            moved = {j: i for i, j in self.successors(link)}
            returned, kept = replay(recording, leaves).items(), {**plan.kept, **moved}.items()
        for j, x in returned:
            outputs[j] = x
        for j, i in kept:
            outputs[j] = mine[i]
        if self.donated:
            numbers = (*plan.kept, *plan.whole)
            self.last = link, dict(zip(numbers, map(weakref.ref, map(outputs.__getitem__, numbers)), strict=True))
        return self.staged.structure.unflatten(outputs)

    def compute(self, leaves: list) -> list[Tensor]:
        """The results, those that may not share memory copied. Nothing is written."""
        mine = [leaves[i] for i in self.staged.inputs]
        casts_are_in_the_graph = torch._C._is_any_autocast_enabled()
        with torch._C._DisableAutocast() if casts_are_in_the_graph else _AS_IT_IS:
            results = list(self.code(mine)(*mine))
        if self.shared is None:  # what a result is a view of is the same in every call of this key
            self.shared = self.find_shared(leaves, results)
        for k in self.shared:
            results[k] = results[k].clone()
        return results

    def code(self, like: list[Tensor]) -> Callable:
        """The graph, compiled once, for arguments of these forms; to be asked
        for as it is called, without grad mode and autocast."""
        if self.call is None:
            with LOCK, clean_surroundings():
                self.call = self.call or compile_graph(self.staged.graph, like)
        return self.call

    def write(self, leaves: list, mine: dict[int, Tensor], results: list[Tensor]) -> None:
        """Replace the rows; what fails here has taken the donated leaves."""
        try:
            if self.staged.plan.writes:
                leaves = list(leaves)
                for i, x in mine.items():
                    leaves[i] = x
                self.writes(leaves, results)
        except BaseException as error:
            error.add_note("funcrec.jit: the call had begun to write to what was donated to it, which is gone.")
            raise

    def with_copies(self, leaves: list, shared: dict[int, bool], name: str) -> list:
        """The leaves, `shared` ones in memory of their own; said once, where
        it is somebody in this process who would see the writes."""
        told = {i for i, is_held in shared.items() if is_held} - self.told
        if told:
            self.told |= told
            warnings.warn(held_message(name, [(self.donated[i], leaves[i]) for i in sorted(told)]), stacklevel=5)
        return [copied(x) if i in shared else x for i, x in enumerate(leaves)]

    def step(self, leaves: list) -> list[Tensor]:
        """What is recorded: the results, and the writes."""
        results = self.compute(leaves)
        self.writes(leaves, results)
        return results

    def successors(self, link: Link) -> list[tuple[int, int]]:
        """(leaf, output) where a recorded call copies the output
        into the leaf's memory, which no other output keeps."""
        plan = self.staged.plan
        return [(i, j) for i, j in link.fed if j in plan.whole and i not in plan.kept.values()]

    def recording(self, leaves: list, link: Link) -> Recording | None:
        """The recording for a state of these addresses, made when a state comes back for the first time."""
        if len(link.fed) < len(self.donated):
            return None
        fixed = [*self.donated, *range(len(leaves) - len(self.captured), len(leaves))]
        key = tuple(leaves[i].data_ptr() for i in fixed)  # addresses are all that a recording knows its leaves by
        if key not in self.recordings:
            arguments = (self.step, leaves, fixed, self.successors(link), self.staged.plan.whole)
            if len(self.recordings) == MOST_RECORDINGS:
                self.recordings.clear()
            self.recordings[key] = record(*arguments, capture_cuda)
        return self.recordings[key]

    def find_shared(self, leaves: list, results: list[Tensor]) -> set[int]:
        own = [leaves[i] for i in self.donated]
        if not own:
            return set()
        arguments = [x for x in leaves if isinstance(x, Tensor)]
        return shared_results(results, set(self.staged.plan.whole.values()), arguments, own)


def is_replayed(x: Tensor) -> bool:
    """Whether calls that take this tensor are recorded."""
    return x.is_cuda


def guard(tensors: list[Tensor]) -> Any:
    """A check of types, forms and devices of tensors, in C++; a tensor given twice does not pass.

    torch.compile's own; this module is not imported for it before something is compiled.
    """
    from torch._C._dynamo.guards import TensorGuards

    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def inference_problems(donated: dict[str, Tensor]) -> Iterator[Problem]:
    for path, x in donated.items():
        if x.is_inference() and not torch.is_inference_mode_enabled():
            what, got = f"donated `{path}` is an inference tensor.", "torch writes to none outside of inference mode"
            yield Problem(what, got, "a tensor that may be written to", "`.clone()`", TypeError)


def clean_surroundings() -> contextlib.AbstractContextManager:
    """The compiler makes tensors of its own: not on the caller's default device."""
    return torch.device("cpu") if torch._C._len_torch_function_stack() else _AS_IT_IS


class Traced(NamedTuple):
    """A function's operations. places: {leaf: its input of the graph}; those that
    it closes over come after the arguments'. structure, static: as of `Staged`."""

    graph: torch.fx.GraphModule | None
    captured: list[Tensor]
    places: dict[int, torch.fx.Node]
    structure: Any
    static: list


def trace(
    call: str, run: Callable[[list], Any], leaves: list, paths: Sequence[str], decompositions: Any = None
) -> Traced:
    """What run(leaves) does, found by a run on shapes; no graph where autograd follows what it closes over."""
    tensor_at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    found: dict[str, Any] = {}

    def flat(*tensors):
        mine = list(leaves)
        for i, x in zip(tensor_at, tensors, strict=True):
            mine[i] = x
        outputs, found["structure"] = fast_flatten(run(mine))
        for x in outputs:
            if not isinstance(x, Tensor):
                static_key(x)  # raises for what may change: the same object is every later call's output
            elif is_odd(x):
                refuse_odd(call, x, "an output")
        found["static"] = [Tensor if isinstance(x, Tensor) else x for x in outputs]
        return [x for x in outputs if isinstance(x, Tensor)]

    how = {} if decompositions is None else {"decompositions": decompositions}
    graph, captured = stage(call, flat, [leaves[i] for i in tensor_at], [paths[i] for i in tensor_at], **how)
    if graph is None:
        return Traced(None, captured, {}, None, [])
    numbers = [*tensor_at, *range(len(leaves), len(leaves) + len(captured))]
    places = dict(zip(numbers, graph.graph.find_nodes(op="placeholder"), strict=True))
    graph.graph.eliminate_dead_code(has_effect)  # the pass of `value_and_grad` that only finds lookup sites
    return Traced(graph, captured, places, found["structure"], found["static"])


def compile_function(
    fn: Callable,
    name: str,
    signature: inspect.Signature,
    names: Sequence[str],
    leaves: list,
    structure: Any,
    donate: Sequence[str],
) -> Compiled | Followed:
    """Run fn once on shapes, and plan the writes into donated leaves."""
    call, named = f"funcrec.jit({name})", leaf_paths(structure, names)
    donated = {i: path for i, (root, path) in named.items() if root in donate and isinstance(leaves[i], Tensor)}
    # refused before `fn` runs: what a call could not take later
    refuse_shared(leaves, donated)
    check(call, inference_problems({path: leaves[i] for i, path in donated.items()}))

    def replayed(mine: list) -> Any:
        arguments = inspect.BoundArguments(signature, dict(zip(names, structure.unflatten(mine), strict=True)))
        return fn(*arguments.args, **arguments.kwargs)

    traced = trace(call, replayed, leaves, [path for _, path in named.values()])
    if traced.graph is None:
        return Followed(traced.captured)
    graph, captured, places = traced.graph, traced.captured, traced.places
    outputs = [j for j, x in enumerate(traced.static) if x is Tensor]
    plan = plan_writes(graph, outputs, places, donated)  # what only writes read has no user in the graph now
    inputs = tuple(i for i, node in places.items() if node.users)
    for node in graph.graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    smaller_exchanges(graph)
    return Compiled(Staged(graph, inputs, traced.structure, traced.static, plan), donated, leaves, captured)
