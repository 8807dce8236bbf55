"""One compilation of `jit`: a function staged for the shapes of its arguments, and the steps of a call.

leaves → [compiled graph] → results;   writes(results) into donated leaves;   leaves, results → outputs
"""

import inspect
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.compile._aliases import Hold, alone, shared_leaves
from funcrec.compile._donated import has_memory, held_message, length_of, refuse_shared, shared_pair, take
from funcrec.compile._early import cut_early
from funcrec.compile._keys import leaf_key
from funcrec.compile._program import Staged, picker, planned, staged_first
from funcrec.compile._recording import Recording, capture_cuda, record, replay
from funcrec.compile._trace import is_odd, refuse_odd, stage
from funcrec.core import Problem, chained, check, copied, fast_flatten, leaf_paths, static_key
from funcrec.mesh import exchanges_on_host, has_effect

_requires_grad = operator.attrgetter("requires_grad")
MOST_RECORDINGS = 4  # A recording holds memory. A step that swaps two leaves needs two recordings.


class Followed(NamedTuple):
    """The entry of a function without a compilation, because it closes over tensors that autograd tracks."""

    captured: list[Tensor]
    used = 0

    def is_current(self) -> bool:
        return any(x.requires_grad for x in self.captured)


class Compiled:
    """A staged function, compiled. It takes the arguments' leaves and the captured tensors, and returns the outputs.

    `follows` recognises leaves of the compiled forms, each donated one in memory of its own. `admit` says what is wrong
    with others.

    A call takes all donated leaves, or none. First it does what may fail without harm (copies of memory with other
    holders, compiling, the compiled code). Then it takes all leaves in one step, and then it writes. A program in two
    parts (`_early`) runs the second part after the first writes.
    """

    def __init__(self, staged: Staged, donated: dict[int, str], leaves: list[Any], captured: list[Tensor]):
        self.staged = staged
        self.donated = donated  # {input leaf: its path}
        self.captured = captured
        self.forms = [leaf_key(x) for x in captured]
        self.used = 0  # the number of the last call
        self.lock = threading.RLock()  # for donating calls: each compares its leaves with the last call's outputs
        leaves = leaves + captured
        self.constants = [(i, type(x), leaf_key(x)) for i, x in enumerate(leaves) if not isinstance(x, Tensor)]
        self.tensor_at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.tracks = [leaves[i].requires_grad for i in self.tensor_at]
        self.guard = guard([leaves[i] for i in self.tensor_at])
        self.first, self.crossing, self.rest = staged.programs(len(leaves), donated)
        on_device = any(is_replayed(leaves[i]) for i in donated) and all(map(is_replayed, captured))
        graphs = [staged.graph, *([] if staged.first is None else [staged.first.graph])]
        self.is_replayed = on_device and not any(map(exchanges_on_host, graphs))
        self.recordings: dict[tuple[int, ...], Recording] = {}
        early = set() if self.first is None else self.first.plan.written
        self.written = list(donated) if self.is_replayed else sorted(staged.plan.written | early)
        self.stay = sorted({*self.written, *staged.plan.kept.values()})  # leaves that give their memory to outputs
        # The rest of a program in two parts runs when all leaves are taken.
        self.read = [] if self.first is None else sorted({*donated}.intersection(staged.inputs) - {*self.stay})
        self.told: set[int] = set()  # leaves that a warning about copies has named
        self.spanned = [i for i in self.tensor_at if has_memory(leaves[i])] if donated else []
        self.spans = [float(length_of(leaves[i])) for i in self.spanned]
        self.tensors_of, self.spanned_of, self.donated_of = map(picker, (self.tensor_at, self.spanned, [*donated]))
        self.hold: Hold | None = None  # what the last call found about the memory to write to
        self.returned: dict[int, weakref.ref] = {}  # the outputs of the last call, if calls are recorded
        at = {i: k for k, i in enumerate((*self.stay, *self.read))}  # the outputs' places in `given`, static, results
        places = {j: len(at) + j for j in range(len(staged.static))}
        places |= {j: len(at) + len(staged.static) + k for j, k in staged.plan.whole.items()}
        self.outputs_of = picker([*(places | {j: at[i] for j, i in staged.plan.kept.items()}).values()])

    def admit(self, leaves: list[Any]) -> None:
        """Raise if a donated leaf shares memory with another leaf."""
        refuse_shared(leaves, self.donated)

    def follows(self, leaves: list) -> bool:
        """Return whether the leaves have the compiled forms, and each donated leaf has memory of its own."""
        if not self.has_forms(leaves):
            return False
        starts = [*map(float, map(Tensor.data_ptr, self.spanned_of(leaves)))]  # exact, and sorted faster than integers
        ends = sorted(map(operator.add, starts, self.spans))
        starts.sort()
        # Intervals are disjoint if and only if no start k + 1 lies before the k-th end. Leaves that nobody donates may
        # share memory.
        return all(map(operator.le, ends, starts[1:])) or shared_pair(leaves, self.donated) is None

    def has_forms(self, leaves: list) -> bool:
        """Return whether leaves and captured tensors have the compiled forms, and no tensor occurs twice."""
        tensors = self.tensors_of(leaves)
        if not self.guard.check(*tensors):
            return False
        if not torch.is_grad_enabled() and [*map(_requires_grad, tensors)] != self.tracks:
            return False  # Without grad mode, the guard does not compare requires_grad.
        # A container, which `flatten_like` does not tell from a leaf, has no key.
        return all(type(leaves[i]) is kind and leaf_key(leaves[i]) == key for i, kind, key in self.constants)

    def is_current(self) -> bool:
        return [leaf_key(x) for x in self.captured] == self.forms

    def __call__(self, leaves: list[Any], when: tuple[str, int]) -> Any:
        """Return the outputs.

        The call restores grad mode even if a signal comes, which a `with` does not ensure at every moment.
        """
        was = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return self.run(leaves, when)
        finally:
            torch._C._set_grad_enabled(was)

    def run(self, given: list[Any], when: tuple[str, int]) -> Any:
        plan, leaves = self.staged.plan, given
        # The call has taken nothing yet. Copies, compiling, the program and a recording's memory may fail here, or a
        # signal may interrupt them.
        known, foreign = shared_leaves(self.hold, leaves, self.written)
        self.hold = known
        if foreign:
            leaves = self.with_copies(leaves, foreign, when[0])
        fed = self.fed(leaves) if self.is_replayed else []
        recording = self.recording(leaves, fed) if self.is_replayed else None
        results = self.compute(leaves) if recording is None else []
        mine = {i: leaves[i].data for i in (*self.stay, *self.read)}  # aliases: a taken tensor loses its memory
        # One call of C takes all leaves, and no signal interrupts it. From here on every old name raises: the state
        # belongs to the outputs, or is gone.
        if self.donated:
            left = alone([given[i] for i in self.stay if i not in foreign])
            left += [x._base for x in (given[i] for i in known.views if i not in foreign) if x._base is not None]
            take(self.donated_of(given), self.donated.values(), when, left)
        if recording is None:
            results = self.write(leaves, mine, results)
            outputs = self.outputs_of([*mine.values(), *self.staged.static, *results])
        else:
            outputs = list(self.staged.static)
            for j, x in replay(recording, leaves).items():
                outputs[j] = x
            for j, i in {**plan.kept, **{j: i for i, j in self.successors(fed)}}.items():
                outputs[j] = mine[i]
        if self.is_replayed:
            self.returned = {j: weakref.ref(outputs[j]) for j in (*plan.kept, *plan.whole)}
        return self.staged.structure.unflatten(outputs)[0]

    def compute(self, leaves: list) -> list[Tensor]:
        """Return the results of the part before the first writes. It writes to no leaf."""
        if self.first is None:
            return self.rest.compute(leaves)
        results = self.first.compute(leaves)
        pool = [*leaves, *(results[k] for k in self.crossing)]
        self.rest.code([pool[i] for i in self.rest.inputs])  # compiled before anything is taken
        return results

    def code(self, like: list[Tensor]) -> Callable:
        """Return the compiled graph of a program in one part."""
        return self.rest.code(like)

    def write(self, leaves: list, mine: dict[int, Tensor], results: list[Tensor]) -> list[Tensor]:
        """Replace the rows of written leaves, and return the results. The donated leaves are gone if this fails."""
        try:
            leaves = list(leaves)
            for i, x in mine.items():
                leaves[i] = x
            return self.finish(leaves, results)
        except BaseException as error:
            error.add_note("funcrec.jit: the call had begun to write to what was donated to it, which is gone.")
            raise

    def finish(self, leaves: list, results: list[Tensor]) -> list[Tensor]:
        """Return the results after all writes. results: those of `compute`."""
        if self.first is not None:
            self.first.writes(leaves, results)
            leaves = [*leaves, *(results[k] for k in self.crossing)]
            results = self.rest.compute(leaves)
        if self.rest.plan.writes:
            self.rest.writes(leaves, results)
        return results

    def with_copies(self, leaves: list, shared: dict[int, bool], name: str) -> list:
        """Return the leaves, with copies of `shared` leaves. Warn once for each leaf with a holder in this process."""
        told = {i for i, is_held in shared.items() if is_held} - self.told
        if told:
            self.told |= told
            warnings.warn(held_message(name, [(self.donated[i], leaves[i]) for i in sorted(told)]), stacklevel=5)
        return [copied(x) if i in shared else x for i, x in enumerate(leaves)]

    def step(self, leaves: list[Any]) -> list[Tensor]:
        """Return the results after the writes: a recording records this function."""
        return self.finish(leaves, self.compute(leaves))

    def fed(self, leaves: list) -> list[tuple[int, int]]:
        """Return (leaf, output) of each donated leaf that is an output of the last call, by identity."""
        number = {id(x()): j for j, x in self.returned.items()}
        return [(i, number[id(leaves[i])]) for i in self.donated if id(leaves[i]) in number]

    def successors(self, fed: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return (leaf, output) of each output that a recorded call copies into the memory of a donated leaf."""
        plan = self.staged.plan
        return [(i, j) for i, j in fed if j in plan.whole and i not in plan.kept.values()]

    def recording(self, leaves: list, fed: list[tuple[int, int]]) -> Recording | None:
        """Return the recording for a state at these addresses, or None if the state is not the last call's output."""
        if len(fed) < len(self.donated):
            return None
        fixed = [*self.donated, *range(len(leaves) - len(self.captured), len(leaves))]
        key = tuple(leaves[i].data_ptr() for i in fixed)  # A recording identifies its leaves by address alone.
        if key not in self.recordings:
            arguments = (self.step, leaves, fixed, self.successors(fed), self.staged.plan.whole)
            if len(self.recordings) == MOST_RECORDINGS:
                self.recordings.clear()
            self.recordings[key] = record(*arguments, capture_cuda)
        return self.recordings[key]


def is_replayed(x: Tensor) -> bool:
    """Return whether `jit` records calls with this tensor."""
    return x.is_cuda


def guard(tensors: list[Tensor]) -> Any:
    """Return a check of types, forms and devices of tensors, in C++. A tensor that occurs twice does not pass.

    torch.compile uses the same check. The import waits until something is compiled.
    """
    from torch._C._dynamo.guards import TensorGuards

    sizes: list[Any] = [list(x.shape) for x in tensors]
    strides: list[Any] = [list(x.stride()) for x in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def inference_problems(donated: dict[str, Tensor]) -> Iterator[Problem]:
    for path, x in donated.items():
        if x.is_inference() and not torch.is_inference_mode_enabled():
            what, got = f"donated `{path}` is an inference tensor.", "torch writes to none outside of inference mode"
            yield Problem(what, got, "a tensor that may be written to", "`.clone()`", TypeError)


class Traced(NamedTuple):
    """The operations of a function.

    places: {leaf: its input of the graph}; captured tensors come after the arguments' leaves. structure, static: the
    fields of `Staged`. prints: whether the function calls `debug_print`.
    """

    graph: torch.fx.GraphModule | None
    captured: list[Tensor]
    places: dict[int, torch.fx.Node]
    structure: Any
    static: list
    prints: bool


def trace(
    call: str, run: Callable[[list], Any], leaves: list, paths: Sequence[str], decompositions: Any = None
) -> Traced:
    """Return the operations of run(leaves), recorded by a run on shapes.

    There is no graph if autograd tracks a tensor that the function closes over.
    """
    tensor_at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    found: dict[str, Any] = {}

    def flat(*tensors):
        mine = list(leaves)
        for i, x in zip(tensor_at, tensors, strict=True):
            mine[i] = x
        with chained() as prints:
            out = run(mine)
        outputs, found["structure"] = fast_flatten((out, *prints[-1:]))  # No pass removes what a result needs.
        found["prints"] = bool(prints)
        for x in outputs:
            if not isinstance(x, Tensor):
                static_key(x)  # It raises for an object that may change: later calls would return the same object.
            elif is_odd(x):
                refuse_odd(call, x, "an output")
        found["static"] = [Tensor if isinstance(x, Tensor) else x for x in outputs]
        return [x for x in outputs if isinstance(x, Tensor)]

    how = {} if decompositions is None else {"decompositions": decompositions}
    graph, captured = stage(call, flat, [leaves[i] for i in tensor_at], [paths[i] for i in tensor_at], **how)
    if graph is None:
        return Traced(None, captured, {}, None, [], False)
    numbers = [*tensor_at, *range(len(leaves), len(leaves) + len(captured))]
    places = dict(zip(numbers, graph.graph.find_nodes(op="placeholder"), strict=True))
    graph.graph.eliminate_dead_code(has_effect)  # what the second trace no longer reads
    return Traced(graph, captured, places, found["structure"], found["static"], found["prints"])


def compile_function(
    fn: Callable,
    name: str,
    signature: inspect.Signature,
    names: Sequence[str],
    leaves: list,
    structure: Any,
    donate: Sequence[str],
    in_parts: bool = True,
) -> Compiled | Followed:
    """Return the compilation of fn, after one run on shapes and a plan of the writes to donated leaves.

    in_parts: whether rows may be written before all of the program has run.
    """
    call, named = f"funcrec.jit({name})", leaf_paths(structure, names)
    donated = {i: path for i, (root, path) in named.items() if root in donate and isinstance(leaves[i], Tensor)}
    # These checks run before `fn`, because a call could not take such leaves later.
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
    first, cut = None, cut_early(graph, places, donated, len(leaves) + len(captured)) if in_parts else None
    if cut is not None:
        first = staged_first(cut, donated)
        graph, places = (cut.rest, cut.rest_inputs) if first is not None else (graph, places)
    plan, inputs = planned(graph, outputs, places, donated)
    return Compiled(Staged(graph, inputs, traced.structure, traced.static, plan, first), donated, leaves, captured)
