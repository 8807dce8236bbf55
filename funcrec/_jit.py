"""jit: a pure function staged once per shape, compiled, and with donated arguments updated in place.

    jit(f)(x) = f(x);     jit(f, donate=("s",))(s, x) = f(s, x), written into the memory of s

A call is flattened to tensors; `make_fx` runs the function once on shapes and records its operations; `torch.compile`
turns the flat graph into code. Where an output is a donated leaf with some rows replaced, the code returns the rows, and
they are written into the leaf: no table is copied. Floor 3.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from funcrec import _checks as checks
from funcrec._donation import Plan, plan_writes, poison, refuse_donated, refuse_shared, shared_results, write
from funcrec._errors import Problem, describe, fail, message
from funcrec._tree import paths, tree_flatten, tree_unflatten


def jit(fn: Callable, *, donate: Sequence[str] = ()) -> Callable:
    """Compile a pure function of pytrees.

    Args:
      fn: takes and returns pytrees of tensors. It reads no tensor's value on the host and writes to no argument.
        Python numbers, strings and other hashable leaves are static: a new value means a new compilation.
      donate: names of parameters that the call may use up. An output that is a donated leaf with rows replaced
        (`index_put`, as every row optimizer does) takes the leaf's memory; a leaf that is returned as it is stays where
        it is; all other outputs are new, and the old leaf's memory is given up.

    Returns: a function of the same arguments. `fn.num_compiled()` tells for how many shapes it was compiled.

    Raises: DonatedError when a value is used after it was donated, naming the argument and the call that took it.
      ValueError for an unknown name, donated memory given twice, or a function that writes to its argument. TypeError for a function that reads values on the host.

    Law: the same values as `fn`; arguments that are not donated keep every bit; the second call with the same shapes
    compiles nothing.

    Example:
      >>> import torch, funcrec as fr
      >>> step = fr.jit(lambda state, x: state + x, donate=("state",))
      >>> old = torch.zeros(2)
      >>> new = step(old, torch.ones(2))
      >>> new
      tensor([1., 1.])
      >>> old + 1  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      funcrec._errors.DonatedError: ...
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    signature = inspect.signature(fn)
    donate = (donate,) if isinstance(donate, str) else tuple(donate)
    unknown = [d for d in donate if d not in signature.parameters]
    if unknown:
        fail(
            f"funcrec.jit({name})",
            "`donate` names no parameter.",
            got=f"{unknown}",
            need=f"among {list(signature.parameters)}",
        )
    compiled: dict[Any, _Compiled] = {}
    calls = 0

    @functools.wraps(fn)
    def run(*args, **kwargs):
        nonlocal calls
        bound = signature.bind(*args, **kwargs)
        arguments = tuple(bound.arguments.values())
        leaves, structure = tree_flatten(arguments)
        refuse_donated(leaves)
        if checks.is_checking() or torch.compiler.is_compiling() or any(map(_is_traced, leaves)):
            return fn(*args, **kwargs)
        calls += 1
        key = (tuple(bound.arguments), structure, tuple(map(_leaf_key, leaves)))
        entry = compiled.get(key)
        if entry is None:
            entry = compiled[key] = _compile(fn, name, bound, leaves, structure, donate)
        return entry(leaves, f"call {calls} of `{name}`")

    run.num_compiled = lambda: len(compiled)
    return run


class _Staged(NamedTuple):
    """A function on flat tensors as a graph, and how its outputs are put together again."""

    graph: torch.fx.GraphModule
    structure: Any
    static: list  # output leaves that are no tensors; the class Tensor stands for those that are
    plan: Plan


class _Compiled:
    """One compilation: called with the leaves of the arguments, it gives the outputs."""

    def __init__(self, staged: _Staged, donated: dict[int, str]):
        # casts to 16 bits round as in eager mode
        options = {"emulate_precision_casts": True}
        self.call = torch.compile(staged.graph, fullgraph=True, dynamic=False, options=options)
        self.staged = staged
        self.donated = donated  # input leaf -> its path
        self.shared: set[int] | None = None  # results to copy; known after the first call

    def __call__(self, leaves: list, when: str) -> Any:
        refuse_shared(leaves, self.donated)
        plan, outputs = self.staged.plan, list(self.staged.static)
        with torch.no_grad():
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            results = list(self.call(*tensors))
            if self.shared is None:
                self.shared = shared_results(results, tensors + self.constants()) if self.donated else set()
            for k in self.shared:
                results[k] = results[k].clone()
            for j, k in plan.whole.items():
                outputs[j] = results[k]
            for j, (i, writes) in plan.writes.items():
                outputs[j] = leaves[i].data  # an alias that is no view
                write(outputs[j], writes, results)
        for i, path in self.donated.items():
            poison(leaves[i], f"`{path}` was donated to {when}")
        return tree_unflatten(outputs, self.staged.structure)

    def constants(self) -> list[Tensor]:
        """The tensors that the function closes over."""
        graph = self.staged.graph
        return [getattr(graph, node.target) for node in graph.graph.find_nodes(op="get_attr")]


def tensor_paths(bound: inspect.BoundArguments, leaves: list) -> dict[int, str]:
    """{number of the leaf: `parameter['key'].field`} of the tensors."""
    named = [path for path, _ in paths(dict(bound.arguments))]  # begins with ['parameter']
    return {i: re.sub(r"^\['(\w+)'\]", r"\1", named[i]) for i, x in enumerate(leaves) if isinstance(x, Tensor)}


def _compile(fn, name, bound, leaves, structure, donate) -> _Compiled:
    all_paths = tensor_paths(bound, leaves)
    donated = {i: path for i, path in all_paths.items() if re.match(r"\w+", path)[0] in donate}
    refuse_shared(leaves, donated)
    staged = _stage(fn, name, bound, leaves, structure, donated)
    return _Compiled(staged, donated)


def _stage(fn, name, bound, leaves, structure, donated) -> _Staged:
    """Run fn once on shapes, and plan the writes into donated leaves."""
    call = f"funcrec.jit({name})"
    tensor_at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    found: dict[str, Any] = {}

    def flat(*tensors):
        mine = list(leaves)
        for i, x in zip(tensor_at, tensors, strict=True):
            mine[i] = x
        values = dict(zip(bound.arguments, tree_unflatten(mine, structure), strict=True))
        replayed = inspect.BoundArguments(bound.signature, values)
        outputs, found["structure"] = tree_flatten(fn(*replayed.args, **replayed.kwargs))
        for x in outputs:
            if not isinstance(x, Tensor):
                refuse_opaque(x)
        found["static"] = [Tensor if isinstance(x, Tensor) else x for x in outputs]
        return [x for x in outputs if isinstance(x, Tensor)]

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        shapes = [_like(leaves[i]) for i in tensor_at]
        try:
            graph = make_fx(functionalize(flat, remove="mutations"))(*shapes)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            problem = Problem(
                "the function reads a tensor's value on the host.",
                f"{error}",
                "shapes and branches that do not depend on values",
                "torch.where, masks and capacities",
            )
            raise TypeError(message(call, [problem])) from error
    places = dict(zip(tensor_at, graph.graph.find_nodes(op="placeholder"), strict=True))
    _refuse_writes(call, graph, {places[i]: path for i, path in tensor_paths(bound, leaves).items()})
    graph.graph.eliminate_dead_code()  # the pass of `value_and_grad` that only finds lookup sites
    outputs = [j for j, x in enumerate(found["static"]) if x is Tensor]
    plan = plan_writes(graph, outputs, {i: places[i] for i in donated})
    return _Staged(graph, found["structure"], found["static"], plan)


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


def _leaf_key(x: object) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.device, x.stride()
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


def _is_traced(x: object) -> bool:
    if not isinstance(x, Tensor):
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return wrapped or isinstance(x, FakeTensor)
