"""Stage a function: run it once on shapes, and record its operations as a graph of flat tensors.

    stage(f, leaves)  →  graph, captured;      graph(*leaves, *captured) = f(*leaves)

Tensors that f closes over become inputs after the arguments. So every call reads the current values of these tensors.
Staging refuses operations that a graph cannot hold: reads of values on the host, writes to arguments and to captured
tensors, and draws from torch's generators.
"""

import contextlib
import functools
import logging
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from funcrec.compile._ambient import lowered_products
from funcrec.compile._apart import FOR_STAGING, imported, settle
from funcrec.compile._donated import Donated
from funcrec.compile.backend._decompositions import DECOMPOSITIONS, SHIFTS
from funcrec.core import ADDRESSES, Problem, describe, fail, is_wrapped, message, outside_transforms
from funcrec.mesh import has_effect

LIBRARY = torch.library.Library("aten", "IMPL")
COPIES = {
    torch.ops.aten.lift_fresh_copy.default,
    torch.ops.aten.lift_fresh.default,
}  # copies of constants that the function's code holds
SETS = {"__set__", "requires_grad_", "register_hook", "retain_grad"}  # functions with an effect that no graph shows
MADE = (FakeTensor, FunctionalTensor, Donated)  # classes of tensors that staging makes, or that raise errors themselves
PLAIN = {Tensor, torch.nn.Parameter, FakeTensor}
HOST = Problem(
    "the function reads a tensor's value on the host.",
    "",
    "shapes and branches that do not depend on values",
    "torch.where, masks and capacities",
    TypeError,
)


class Recorded(NamedTuple):
    """The result of staging.

    graph: a function of (*leaves, *captured) without writes; None if a captured tensor requires grad and autograd would
    follow it.
    """

    graph: GraphModule | None
    captured: list[Tensor]


def stage(
    call: str, flat: Callable, leaves: Sequence[Tensor], paths: Sequence[str], decompositions: Any = DECOMPOSITIONS
) -> Recorded:
    """Return a record of the operations of flat(*leaves), which returns a list of tensors.

    Args:
      paths: the names of the leaves in errors. decompositions: replacements of operations that the graph's compiler
        gets wrong.
    """
    imported(FOR_STAGING)
    settle()
    views_of_zeros()
    with without_log_of_shapes(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        shapes = [like(x) for x in leaves]
        with _Lift(call, fake) as lift:
            try:  # First without functionalize, which does not know the rules of autograd.Function.
                graph = make_fx(flat, SHIFTS)(*shapes)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise TypeError(message(call, [HOST._replace(got=f"{error}")])) from error
            except TypeError as error:  # Python's operators replace the error of a tensor by an error of their own.
                raise lift.refused or error from None
        lift.refuse_other_products()
        captured = lift_constants(graph, lift)  # inputs, which every call checks and reads
        if torch.is_grad_enabled() and any(c.requires_grad for c in captured):
            return Recorded(None, captured)
        lift.refuse_gradients()
        refuse_draws(call, graph.graph)
        _refuse_writes(call, graph.graph, [f"`{p}`" for p in paths] + [f"{describe(c)}, closed over" for c in captured])
        graph.graph.eliminate_dead_code(has_effect)  # the first pass of `value_and_grad`, for example
        graph.recompile()
        # The second trace replaces writes to the function's own tensors by values, so that the plan of writes and
        # Inductor see a pure graph.
        shapes = [like(x) for x in (*leaves, *captured)]
        with torch.no_grad(), torch._C._DisableAutocast():  # The graph already holds the effects of both modes.
            return Recorded(make_fx(functionalize(graph, remove="mutations"), decompositions)(*shapes), captured)


@contextlib.contextmanager
def without_log_of_shapes() -> Iterator[None]:
    """Return a context that hides the page that torch logs about an operation with wrong shapes.

    The operation's error says the same.
    """
    log, mine = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()
    is_other = lambda record: record.thread != mine or "failed while attempting to run meta" not in str(record.msg)
    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


@functools.cache
def views_of_zeros() -> None:
    """Make views of zeros without memory visible to staging, as all other views are.

    torch registers kernels of its own for three views of such zeros. These kernels hide the view from the modes that
    stage, and the result would be a tensor on the device "meta".
    """
    names = [n for n in ("view", "as_strided", "_reshape_alias") if not is_passed_by(f"aten::{n}")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel replaces another kernel.
        for n in names:
            LIBRARY.impl(n, torch.library.fallthrough_kernel, "ZeroTensor")


def is_passed_by(name: str) -> bool:
    return torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(name, "ZeroTensor")


def like(x: Tensor) -> Tensor:
    """Return a new tensor of x's form.

    Each leaf gets a new tensor, even if two leaves are one object: the next call may pass two objects.
    """
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)


# -- what a function closes over ---------------------------------------------------------------------------------


class _Lift(TorchFunctionMode):
    """A mode that gives operations a stand-in without values for each captured tensor.

    So no operation can read or write a captured tensor.
    """

    def __init__(self, call: str, fake: FakeTensorMode):
        super().__init__()
        self.call, self.fake = call, fake
        self.stand_ins: dict[
            int, tuple[Tensor, FakeTensor, object]
        ] = {}  # {id of a tensor: (the tensor, its stand-in, the stand-in's grad)}
        self.origins: dict[int, Tensor] = {}  # {id of a stand-in: its tensor}
        self.refused: TypeError | None = None
        self.products = lowered_products()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not is_recording():
            return func(*args, **(kwargs or {}))
        self.refuse_other_products()
        if args and getattr(func, "__name__", "") in SETS and is_closed_over(args[0]):
            got, need = f"`{func.__name__}` of {describe(args[0])}", "a pure function"
            fail(self.call, "the function changes a tensor that it closes over.", got=got, need=need)
        if getattr(func, "__name__", "") in ADDRESSES:
            raise TypeError(message(self.call, [HOST._replace(got=f"`{func.__name__}` of {describe(args[0])}")]))
        return func(*self.lift(args), **self.lift(kwargs or {}))

    def lift(self, x: Any) -> Any:
        kind = type(x)
        if kind is tuple or kind is list:
            return kind([self.lift(v) for v in x])
        if kind is dict:
            return {k: self.lift(v) for k, v in x.items()}
        return self.stand_in(x) if is_closed_over(x) else x

    def stand_in(self, x: Tensor) -> FakeTensor:
        if id(x) not in self.stand_ins:
            if is_odd(x):
                try:
                    refuse_odd(self.call, x, "a tensor that the function closes over")
                except TypeError as error:
                    self.refused = error
                    raise
            if x.is_conj() or x.is_neg() or x._is_zerotensor():
                need, got = "plain memory", "a lazy conjugate, negative or zero"
                hint = "resolve_conj().resolve_neg(), or clone() of a zero"
                fail(self.call, "a tensor that is closed over is not there yet.", got=got, need=need, hint=hint)
            # Made outside all transforms of the staged program, a stand-in shows the tensor as it lies in memory.
            with outside_transforms(), _disable_current_modes(), torch._C.DisableTorchFunction():
                made = self.fake.from_tensor(x)
                self.stand_ins[id(x)] = (x, made, made.grad)
            self.origins[id(made)] = x
        return self.stand_ins[id(x)][1]

    def refuse_other_products(self) -> None:
        """Raise if the function changed how products round: the graph would compute them as its caller does."""
        if (now := lowered_products()) != self.products:
            got = " and then ".join(
                ", ".join(f"{v!r} on {k}" for k, v in x.items()) or "'ieee'" for x in (self.products, now)
            )
            need, hint = "one precision for the whole program", "set it around the call; inside, `torch.autocast`"
            fail(self.call, "the function changes the precision of f32 products.", got=got, need=need, hint=hint)

    def refuse_gradients(self) -> None:
        for x, made, before in self.stand_ins.values():
            if made.grad is not before:
                got, need = f"`.backward()` that reaches {describe(x)}", "gradients that are returned"
                hint = "torch.func.grad, torch.autograd.grad or fr.value_and_grad"
                what = "the function leaves a gradient in a tensor that it closes over."
                fail(self.call, what, got=got, need=need, hint=hint)


def is_recording() -> bool:
    """Return whether the staged function itself calls the operations, and not torch within an operation.

    Within an operation the modes of staging are off, and torch makes tensors for itself. If `_Lift` lifted such a
    tensor (a result of torch's kernels for shapes, on the device "meta"), that tensor would stay the operation's result
    for the whole process.
    """
    keys = torch._C._TorchDispatchModeKey
    return all(torch._C._get_dispatch_mode(k) is not None for k in (keys.FAKE, keys.PROXY))


def is_closed_over(x: object) -> bool:
    """Return whether x is a tensor with memory of its own that staging did not make."""
    if not isinstance(x, Tensor) or isinstance(x, MADE):
        return False
    is_functional = torch._is_functional_tensor(x)  # pyright: ignore[reportPrivateImportUsage]
    return not (is_wrapped(x) or is_functional)


def lift_constants(graph: GraphModule, lift: _Lift) -> list[Tensor]:
    """Return the captured tensors in the graph, which the function turns into inputs after all other inputs.

    Constants that the function's code holds stay in the graph.
    """
    captured: dict[int, tuple[Tensor, Node]] = {}
    last = next(reversed(graph.graph.find_nodes(op="placeholder")), None)
    for node in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph, node.target)
        origin = cast(Any, lift.origins.get(id(value), value))  # Two stand-ins of one tensor become one input.
        if not isinstance(value, Tensor) or (node.users and all(u.target in COPIES for u in node.users)):
            setattr(graph, node.target, origin)  # The value belongs to a part of an earlier staged graph (`cut`).
            continue
        if id(origin) not in captured:
            with (
                graph.graph.inserting_after(last)
                if last
                else graph.graph.inserting_before(next(iter(graph.graph.nodes)))
            ):
                last = graph.graph.placeholder(f"captured_{len(captured)}")
            captured[id(origin)] = (origin, last)
        node.replace_all_uses_with(captured[id(origin)][1])
        graph.graph.erase_node(node)
    return [x for x, _ in captured.values()]


# -- what is refused -----------------------------------------------------------------------------------------------


def any_fake(leaves: Sequence[Any]) -> bool:
    """Return whether a tensor is fake. A program may be made for fake tensors, but cannot run on them."""
    return any(isinstance(x, FakeTensor) for x in leaves)


def is_odd(x: Tensor) -> bool:
    """Return whether x is not a plain tensor of dense memory with strides."""
    return type(x) not in PLAIN or x.layout != torch.strided or x.is_nested or x.is_quantized


def refuse_odd(call: str, x: Tensor, what: str) -> None:
    form = "nested" if x.is_nested else "quantized" if x.is_quantized else f"layout {x.layout}"
    hint = "`.to_dense()`, `.dequantize()`, a JaggedTensor for nested ones, or the function without jit"
    got, need = f"{type(x).__name__}, {form}", "a torch.Tensor of layout torch.strided"
    fail(call, f"{what} is not a plain tensor.", got=got, need=need, hint=hint, kind=TypeError)


def refuse_draws(call: str, graph: Graph) -> None:
    # The state of a generator is neither in the key nor an input, so every call would repeat the first call's numbers.
    drawn = sorted(
        {str(n.target) for n in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())}
    )
    if drawn:
        need, hint = "random numbers that are made of a key, an argument", "fr.key, fr.split and fr.nn.dropout"
        fail(call, "the function draws from torch's generator.", got=f"{drawn}", need=need, hint=hint, kind=TypeError)


def _refuse_writes(call: str, graph: Graph, names: Sequence[str]) -> None:
    """Raise if the graph writes to an input. names: the names of the graph's inputs, in order."""
    written = set(written_nodes(graph))
    found = [name for name, node in zip(names, graph.find_nodes(op="placeholder"), strict=True) if node in written]
    arguments = [x for x in found if not x.endswith(", closed over")]
    if found:
        what = (
            "the function writes to its argument."
            if arguments
            else "the function writes to a tensor that it closes over."
        )
        hint = "`.clone()` first; return what changes" + (", and donate it" if not arguments else "")
        fail(call, what, got=f"an in-place write to {', '.join(found)}", need="a pure function", hint=hint)


def written_nodes(graph: Graph) -> Iterator[Node]:
    """Yield the nodes to whose memory an operation writes, directly or through views."""
    bases: dict[Node, set[Node]] = {}
    for node in graph.nodes:
        bases[node] = {node}
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            bases[node] = bases[node.args[0]]
        if not isinstance(node.target, OpOverload):
            continue
        schema, shared = node.target._schema, set()
        given = [
            *zip(schema.arguments, node.args, strict=False),
            *((a, node.kwargs[a.name]) for a in schema.arguments if a.name in node.kwargs),
        ]
        for argument, value in given:
            if argument.alias_info is None:
                continue
            tensors: list[Node] = []
            map_arg(value, lambda n: tensors.append(n) or n)  # noqa: B023
            under = {b for n in tensors for b in bases[n]}
            shared |= under
            if argument.alias_info.is_write:
                yield from under
        if any(r.alias_info is not None for r in schema.returns):
            bases[node] = shared | {node}
