"""jit: a pure function staged once per shape, compiled, and with donated arguments updated in place.

    jit(f)(x) = f(x);     jit(f, donate=("s",))(s, x) = f(s, x), written into the memory of s

A call is flattened to tensors; `make_fx` runs the function once on shapes and records its operations; `torch.compile`
turns the flat graph into code. A donated leaf is overwritten by the output that takes its place, so that no table is
copied: Inductor makes the final copy and the scatter before it one write in place. Floor 3.
"""

import functools
import inspect
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
from torch.fx.experimental.proxy_tensor import make_fx

from funcrec import _checks as checks
from funcrec._donation import poison, refuse_donated, refuse_shared, write_back
from funcrec._errors import Problem, describe, fail, message
from funcrec._tree import paths, tree_flatten, tree_unflatten


def jit(fn: Callable, *, donate: Sequence[str] = ()) -> Callable:
    """Compile a pure function of pytrees.

    Args:
      fn: takes and returns pytrees of tensors. It reads no tensor's value on the host and writes to no argument.
        Python numbers, strings and other hashable leaves are static: a new value means a new compilation.
      donate: names of parameters whose memory the outputs may take. The first output leaf of the same shape and dtype
        takes the place of each donated leaf, in the order of the leaves.

    Returns: a function of the same arguments. `fn.num_compiled()` tells for how many shapes it was compiled.

    Raises: DonatedError when a value is used after it was donated, naming the argument and the call that took it.
      ValueError for an unknown name, a donated leaf that no output can replace, memory given twice, or a function that
      writes to its argument. TypeError for a function that reads values on the host.

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
    taken: dict[int, int]  # output leaf -> the input leaf whose memory it takes


class _Compiled(NamedTuple):
    call: Callable
    staged: _Staged
    donated: dict[int, str]  # input leaf -> its path

    def __call__(self, leaves: list, when: str) -> Any:
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        refuse_shared(leaves, self.donated)
        with torch.no_grad():
            fresh = iter(self.call(*tensors))
        outputs = list(self.staged.static)
        taken = self.staged.taken
        for i, x in enumerate(outputs):
            if i in taken:
                outputs[i] = leaves[taken[i]].data  # an alias that is no view
            elif x is Tensor:
                outputs[i] = next(fresh)
        for i, path in self.donated.items():
            poison(leaves[i], f"`{path}` was donated to {when}")
        return tree_unflatten(outputs, self.staged.structure)


def _compile(fn, name, bound, leaves, structure, donate) -> _Compiled:
    donated = {}
    for i, (path, leaf) in enumerate(paths(dict(bound.arguments))):
        parameter = next(p for p in bound.arguments if path.startswith(f"['{p}']"))
        if parameter in donate and isinstance(leaf, Tensor):
            donated[i] = parameter + path.removeprefix(f"['{parameter}']")
    refuse_shared(leaves, donated)
    staged = _stage(fn, name, bound, leaves, structure, donated)
    return _Compiled(torch.compile(staged.graph, fullgraph=True, dynamic=False), staged, donated)


def _stage(fn, name, bound, leaves, structure, donated) -> _Staged:
    """Run fn once on shapes; append the copies into donated leaves."""
    call = f"funcrec.jit({name})"
    tensor_at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    found: dict[str, Any] = {}

    def flat(*tensors):
        mine = list(leaves)
        for i, x in zip(tensor_at, tensors, strict=True):
            mine[i] = x
        versions = [x._version for x in tensors]
        values = dict(zip(bound.arguments, tree_unflatten(mine, structure), strict=True))
        replayed = inspect.BoundArguments(bound.signature, values)
        outputs, found["structure"] = tree_flatten(fn(*replayed.args, **replayed.kwargs))
        if versions != [x._version for x in tensors]:
            names = [p for p, x in paths(values) if isinstance(x, Tensor)]
            at = [p for p, x, v in zip(names, tensors, versions, strict=True) if x._version != v]
            fail(call, "the function writes to its argument.", got=f"an in-place write to {at}", need="a pure function")
        found["static"] = [Tensor if isinstance(x, Tensor) else x for x in outputs]
        return [x for x in outputs if isinstance(x, Tensor)]

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shapes = [mode.from_tensor(leaves[i], static_shapes=True) for i in tensor_at]
        try:
            graph = make_fx(flat)(*shapes)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            problem = Problem(
                "the function reads a tensor's value on the host.",
                f"{error}",
                "shapes and branches that do not depend on values",
                "torch.where, masks and capacities",
            )
            raise TypeError(message(call, [problem])) from error
    places = dict(zip(tensor_at, graph.graph.find_nodes(op="placeholder"), strict=True))
    outputs = [j for j, x in enumerate(found["static"]) if x is Tensor]
    taken = write_back(call, graph, outputs, {i: places[i] for i in donated}, donated)
    graph.graph.eliminate_dead_code()  # the pass of `value_and_grad` that only finds lookup sites
    graph.recompile()
    return _Staged(graph, found["structure"], found["static"], taken)


def _leaf_key(x: object) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.device, x.stride()
    try:
        hash(x)
    except TypeError:
        hint = "fr.pytree for a class of your own; a tensor for an array"
        fail(
            "funcrec.jit",
            "a leaf is neither a tensor nor hashable.",
            got=describe(x),
            need="tensors and static leaves",
            hint=hint,
            kind=TypeError,
        )
    return type(x), x


def _is_traced(x: object) -> bool:
    if not isinstance(x, Tensor):
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return wrapped or isinstance(x, FakeTensor)
