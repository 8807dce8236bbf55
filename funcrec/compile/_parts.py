"""Parts: functions that are staged as programs of their own, and that the program around them calls by name.

    graph of f(x)  =  ... run(name, [x, captured]) ...        PARTS[name]([x, captured]) = f's part of the work

A loop's body is then compiled once, and runs as often as values say. A part is staged inside of the graph around it:
its operations are recorded there, and then moved into a graph of their own. So tensors that it closes over, at any
depth, become its inputs. The name is a digest of the part, so that code on disk that holds the name stays right.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.overrides import TorchFunctionMode

from funcrec.compile._jit import jit
from funcrec.compile._trace import refuse_draws, written_nodes
from funcrec.core import (
    belongs_above,
    chained,
    current_level,
    describe,
    fail,
    level_of,
    quiet,
    sure,
    tokens,
    tree_leaves,
)
from funcrec.mesh import has_effect, is_assertion

LIBRARY = torch.library.Library("funcrec_parts", "DEF")
LIBRARY.define("run(str name, Tensor[] inputs) -> Tensor[]")


Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


class Ready(NamedTuple):
    """What a name stands for. run: inputs -> results. forms: (shape, strides, dtype, device) of each result."""

    run: Callable[[list[Tensor]], list[Tensor]]
    forms: list[Form]


PARTS: dict[str, Ready] = {}


@torch.library.impl(LIBRARY, "run", "CompositeExplicitAutograd")
def _run(name: str, inputs: list[Tensor]) -> list[Tensor]:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        what, need = "a loop or a branch that values decide cannot be recorded.", "a program without donation"
        fail("funcrec.jit", what, got="a CUDA graph", need=need, hint="fr.jit without donate=", kind=RuntimeError)
    with torch.no_grad(), torch._C._DisableAutocast():
        results = PARTS[name].run(inputs)
    return own_memory(results, inputs, PARTS[name].forms)


@torch.library.register_fake("funcrec_parts::run", lib=LIBRARY)
def _forms(name: str, inputs: list[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(a, b, dtype=dtype, device=device) for a, b, dtype, device in PARTS[name].forms]


def own_memory(results: Sequence[Tensor], inputs: Sequence[Tensor], forms: Sequence[Form]) -> list[Tensor]:
    """Return the results in these forms. Results that share memory with an input or an earlier result are copied."""
    seen, out = {x.untyped_storage()._cdata for x in inputs}, []
    for x, (_, strides, *_) in zip(results, forms, strict=True):
        if x.stride() != strides:
            x = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
        elif x.untyped_storage()._cdata in seen:
            x = x.clone()
        seen.add(x.untyped_storage()._cdata)
        out.append(x)
    return out


class Part(NamedTuple):
    """A function of tensors, staged.

    graph: a function of (*operands, *captured). captured: the tensors that it closes over. outputs: its results, as
    they were made while it was staged; only their forms may be read. text: all that the graph depends on. prints:
    whether the function prints, or calls a part that asserts; the graph then also returns the last token. asserts:
    whether the graph holds an assertion.
    """

    graph: GraphModule
    captured: list[Tensor]
    outputs: list[Tensor]
    text: str
    prints: bool = False
    asserts: bool = False

    def program(self, num_own: int = 0) -> Callable[[list[Tensor], list[Tensor]], list[Tensor]]:
        """Return the compiled function (own, rest) -> results. It uses up `own`, the first operands."""
        graph = self.graph

        def part(own: list[Tensor], rest: list[Tensor]) -> list[Tensor]:
            return graph(*own, *rest)

        run, count = jit(part, donate=("own",) if num_own else ()), len(self.outputs)
        return (lambda own, rest: run(own, rest)[:count]) if self.prints else run


def is_staging() -> bool:
    """Return whether operations are being recorded on shapes, as `jit` does it."""
    keys = torch._C._TorchDispatchModeKey
    return all(torch._C._get_dispatch_mode(k) is not None for k in (keys.FAKE, keys.PROXY))


def stage_part(call: str, fn: Callable[..., list[Tensor]], operands: Sequence[Tensor]) -> Part:
    """Return fn(*operands) as a part of the program that is being staged."""
    tracer = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY).tracer
    last = next(reversed(tracer.graph.nodes), None)
    own = [x.clone() for x in operands]
    # Before the function runs, because a write to x moves x to another node.
    starts = [sure(node_of(x, tracer)) for x in own]
    with chained() as prints:
        results = fn(*own)
    outputs = [node_of(x, tracer) or sure(node_of(x.clone(), tracer)) for x in (*results, *prints[-1:])]
    nodes = list(tracer.graph.nodes)
    region = nodes[nodes.index(last) + 1 :] if last is not None else nodes
    inside = {n for n in region if n.op != "get_attr"} - set(starts)
    work = [n for n in region if n in inside]
    outer = list(dict.fromkeys(m for n in [*work, *outputs] for m in (*n.all_input_nodes, n) if m not in inside))
    outer = [n for n in outer if n not in starts]
    graph = Graph()
    copies = {n: placed(graph.placeholder(f"x_{i}"), n) for i, n in enumerate((*starts, *outer))}
    for n in work:
        copies[n] = placed(graph.node_copy(n, copies.__getitem__), n)
    graph.output([copies[n] for n in outputs])
    graph.eliminate_dead_code(has_effect)
    refuse(call, graph)
    captured = [tensor_of(call, n, tracer) for n in outer]
    if tracked := [x for x in captured if x.requires_grad and torch.is_grad_enabled()]:
        what, need = "the function closes over a tensor that requires grad.", "such tensors among the arguments"
        hint = "the tensor as an argument, or `.detach()`"
        fail(call, what, got=describe(tracked[0]), need=need, hint=hint, kind=TypeError)
    for n in reversed(region):
        if not n.users and n not in outer:
            tracer.graph.erase_node(n)
    forms = (f"{n.format_node()} {n.meta['form']}" for n in graph.nodes if "form" in n.meta)
    text, asserts = "\n".join([*forms, str(outputs)]), any(map(is_assertion, graph.nodes))
    return Part(GraphModule({}, graph), captured, list(results), text, bool(prints), asserts)


def placed(copy: Node, node: Node) -> Node:
    """Return the copy of a node with the form of its value."""
    value = node.meta.get("val")
    values = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    copy.meta["form"] = [f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.device}" for x in values]
    return copy


def node_of(x: Tensor, tracer: Any) -> Node | None:
    found = get_proxy_slot(x, tracer, None)
    return None if found is None else found.proxy.node


def tensor_of(call: str, node: Node, tracer: Any) -> Tensor:
    """Return the tensor that a node of the graph around stands for."""
    if node.op == "get_attr":
        return getattr(tracer.root, str(node.target))
    for x, found in tracer.tensor_tracker.items():
        if found.proxy.node is node:
            return x
    what, hint = "the function reads a tensor that is gone.", "an argument"
    fail(call, what, got=f"{node}", need="tensors that it closes over", hint=hint, kind=TypeError)


def form_of(x: Tensor, *stacked: int) -> Form:
    """Return the form of x in memory of its own, or of x stacked along new first dimensions of these sizes."""
    shape = (*stacked, *x.shape)
    return shape, tuple(max(1, math.prod(shape[i + 1 :])) for i in range(len(shape))), x.dtype, x.device


def part_call(kind: str, parts: Sequence[Part], run: Callable, forms: list[Form], inputs: list) -> list[Tensor]:
    """Return the results of `run`, as one operation of the program that is being staged.

    kind: a text that determines, with the parts, what `run` does.
    """
    before, silent, prints = tokens.get(), run, any(p.prints for p in parts)
    # No pass may remove the call although nothing reads its results. It takes its place among the program's prints.
    stays = prints or (before is not None and any(p.asserts for p in parts))
    if stays:
        if before is None:
            what, need = "a program of another tracer does not print.", "fr.jit"
            fail("funcrec.debug_print", what, got="torch's make_fx", need=need, hint="fr.jit(f)", kind=TypeError)
        after = before[-1] if before else first_token()
        run, inputs = (lambda xs: [*silent(xs[:-1]), first_token()]), [*inputs, after]
        forms = [*forms, form_of(after)]
    text = "\n".join([kind, *(p.text for p in parts), *map(str, forms)])
    name = f"{kind}.{hashlib.sha256(text.encode()).hexdigest()}"
    if name not in PARTS:  # equal parts share their programs
        PARTS[name] = Ready(run, forms)
    if inputs and all(map(is_constant, inputs)):  # torch would run the operation while it stages
        first = inputs[0]
        inputs = [torch.where(torch.ones((), dtype=torch.bool, device=first.device), first, first), *inputs[1:]]
    results = torch.ops.funcrec_parts.run(name, inputs)
    if stays:
        sure(before).append(results.pop())
    return results


def first_token() -> Tensor:
    return torch.zeros((), device="cpu")


def is_constant(x: Tensor) -> bool:
    """Return whether the program that is being staged holds the value of x, such as that of `torch.tensor(0)`."""
    tracer = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY).tracer
    found = get_proxy_slot(x, tracer, None)
    return found is not None and found.constant is not None


class _Watch(TorchFunctionMode):
    """A mode that notes whether a function reads tensors that a transform outside of it maps or differentiates."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.found = current_level(), None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.note((args, kwargs))
        return func(*args, **(kwargs or {}))

    def note(self, tree: Any) -> None:
        for x in tree_leaves(tree):
            if isinstance(x, Tensor) and 0 < level_of(x) <= self.level and belongs_above(x, 0):
                self.found = x


def plain_outputs(call: str, name: str, fn: Callable[..., list[Tensor]], operands: Sequence[Tensor]) -> list[Tensor]:
    """Return fn's results on plain tensors of these forms.

    Raise if fn closes over a tensor that a transform follows.
    """
    plain = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in operands]
    with _Watch() as watch, quiet():
        out = fn(*plain)
        watch.note(out)
    if watch.found is not None:
        what = f"`{name}` closes over a tensor that a transform maps or differentiates."
        got, need = describe(watch.found), "such tensors among the arguments, while a program is staged"
        fail(
            call,
            what,
            got=got,
            need=need,
            hint="the tensor as an argument, or the transform of fr.jit(f)",
            kind=TypeError,
        )
    return out


# -- what is refused -----------------------------------------------------------------------------------------------


def refuse(call: str, graph: Graph) -> None:
    """Raise if a part writes to its inputs, draws from torch's generator, or exchanges values between ranks."""
    refuse_draws(call, graph)
    written = {n for n in written_nodes(graph) if n.op == "placeholder"}
    if written:
        need, hint = "a pure function", "`.clone()` first; return what changes"
        fail(
            call,
            "the function writes to a tensor that it was given.",
            got=f"{len(written)} writes",
            need=need,
            hint=hint,
        )
    sent = [n for n in graph.nodes if getattr(n.target, "namespace", "") in ("_c10d_functional", "c10d")]
    if sent:
        what, hint = "a loop or a branch exchanges values between ranks.", "the exchange before it or after it"
        fail(call, what, got=f"{sent[0].target}", need="work of one rank", hint=hint, kind=TypeError)
