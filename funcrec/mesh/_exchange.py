"""The exchange that implements every collective: one differentiable function, and a table of the collectives.

    exchange(x)[r] = Σ_s M[r, s] x[s]          exchangeᵀ is an exchange again

Under emulation an axis is a vmap level, and an exchange moves that level's dimension. On real ranks it is an operator
of torch.distributed. No other function of a program calls these operators: the operators' own derivatives are silently
wrong under torch.func. Inside of `invariant`, sums of floats are trees in the order of the ranks (`_by_tree`): ranks
exchange the terms, and each adds them.
Shapes: n ranks on the axis; x[r] is what rank r passes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives
from torch import Tensor

from funcrec.core import in_parts, is_by_tree, one_level_below, sure, tree_flatten, tree_unflatten
from funcrec.mesh._axes import Axis
from funcrec.mesh._by_tree import tree_sum
from funcrec.mesh._paper import backend_of

_c10d = torch.ops._c10d_functional
AWAIT, SWAP, REDUCE = _c10d.wait_tensor.default, _c10d.all_to_all_single.default, _c10d.all_reduce.default
# Bytes that leave each of n ranks for an operand of x_bytes. A sum goes round a ring. `parts` has a number per
# receiver.
LEAVES: dict[Any, Any] = {
    SWAP: lambda x_bytes, group, _, parts: x_bytes * (sum(parts) - parts[group.rank()]) // max(sum(parts), 1),
    _c10d.all_gather_into_tensor.default: lambda x_bytes, group, _: x_bytes * (group.size() - 1),
    _c10d.reduce_scatter_tensor.default: lambda x_bytes, group, *_: x_bytes * (group.size() - 1) // group.size(),
    REDUCE: lambda x_bytes, group, _: 2 * x_bytes * (group.size() - 1) // group.size(),
}
MOST_JOINED = 1 << 16  # bytes of all ranks together: to move fewer takes less time than one more exchange
SUMS = ("psum", "psum_invariant")
MOVES = {SWAP, _c10d.all_gather_into_tensor.default}  # these operators send existing values, and compute nothing


def has_effect(node: torch.fx.Node) -> bool:
    """Return whether a node of a graph must stay although nothing reads its result.

    Awaiting a collective has an effect on its result alone, so the node may be removed: all ranks have the same graph,
    and drop the same collectives. An operator without results, such as an assertion, has no other purpose.
    """
    if node.target is AWAIT:
        return False
    has_results = not isinstance(node.target, torch._ops.OpOverload) or bool(node.target._schema.returns)
    return not has_results or node.is_impure()


def exchanges_on_host(module: torch.fx.GraphModule) -> bool:
    """Return whether a graph exchanges by gloo, which copies tensors of a GPU to the host.

    A CUDA graph cannot hold such an exchange.
    """
    graphs = [x.graph for x in module.modules() if isinstance(x, torch.fx.GraphModule)]
    return any(_is_gloo(x.args[-1]) for graph in graphs for x in graph.nodes if x.target in LEAVES)


def is_assertion(node: torch.fx.Node) -> bool:
    """Return whether a node of a graph can only raise: an operator without results that writes to nothing."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and not target._schema.returns and not target._schema.is_mutable


class Exchange(NamedTuple):
    """One linear collective over one axis.

    start: (x, call) -> a tensor that `wait` completes, on real ranks.
    emulate: (x f[n, ...], call) -> (y, is_varying). y is the stacked results of all ranks, or one value for all ranks.
    transpose: the name of the transposed exchange. `ppermute` also inverts its pairs.
    """

    start: Callable[[Tensor, "Call"], Tensor]
    emulate: Callable[[Tensor, "Call"], tuple[Tensor, bool]]
    transpose: str


class Call(NamedTuple):
    """The static part of a collective: its kind, its axis, and for `ppermute` the (source, destination) pairs."""

    kind: str
    size: int
    group: str | None
    index: int | None
    pairs: tuple[tuple[int, int], ...] = ()

    def transposed(self) -> "Call":
        return self._replace(kind=EXCHANGES[self.kind].transpose, pairs=tuple((d, s) for s, d in self.pairs))


def _start_sum(x: Tensor, call: Call) -> Tensor:
    return _c10d.all_reduce(x, "sum", call.group)


def _emulate_sum(x: Tensor, call: Call) -> tuple[Tensor, bool]:
    return _added(x), False


def _added(x: Tensor) -> Tensor:
    """Return the sum of the ranks' terms x[n, ...]."""
    return tree_sum(x.unbind(0)) if _is_tree_of(x) else x.sum(0, dtype=x.dtype)


def _is_tree_of(x: Tensor) -> bool:
    return is_by_tree() and x.is_floating_point()


def _start_swap(x: Tensor, call: Call) -> Tensor:
    ones = [1] * call.size
    return _c10d.all_to_all_single(x, ones, ones, call.group)


def _is_gloo(group: str | None) -> bool:
    """Return whether the group runs on gloo.

    On gloo a swap sends as many bytes as other collectives in half the time. A gather copies twice the values that it
    receives, and a scatter of sums is a whole all-reduce.
    """
    return backend_of(sure(group)) == "gloo"


def _start_gather(x: Tensor, call: Call) -> Tensor:
    if _is_gloo(call.group):
        return _start_swap(x.expand(call.size, *x.shape).contiguous(), call)
    return _c10d.all_gather_into_tensor(x[None], call.size, call.group)


def _sums_by_tree(xs: Sequence[Tensor], call: Call) -> list[Tensor]:
    """Return the sums of each tensor over real ranks, by trees that each rank computes.

    Large tensors travel in parts, as many bytes as an all-reduce round a ring: each rank gets one part of all ranks,
    and sends its sum to all. Small tensors, and those of two ranks, travel whole, once.
    """
    is_whole = [call.size == 2 or x.nbytes * call.size <= MOST_JOINED for x in xs]
    start = lambda x, whole: _start_gather(x, call) if whole else _start_swap(in_parts(x, call.size), call)
    begun = [start(x.contiguous(), whole) for x, whole in zip(xs, is_whole, strict=True)]
    own = [tree_sum(_c10d.wait_tensor(y).unbind(0)) for y in begun]
    more = [y if whole else _start_gather(y, call) for y, whole in zip(own, is_whole, strict=True)]
    joined = lambda y, x: _c10d.wait_tensor(y).flatten()[: x.numel()].reshape(x.shape)
    return [y if whole else joined(y, x) for y, x, whole in zip(more, xs, is_whole, strict=True)]


def reduced_in_order(x: Tensor, reduce_op: str, group: str) -> Any:
    """Return what REDUCE is inside of `invariant`: itself, but for sums of floats, whose order is the library's."""
    has_order = x.is_floating_point() and reduce_op not in ("max", "min")
    return NotImplemented if has_order else REDUCE(x, reduce_op, group)


def _start_scatter(x: Tensor, call: Call) -> Tensor:
    """Return the begun exchange, whose blocks `_finish` sums."""
    if _is_gloo(call.group) or _is_tree_of(x):
        return _start_swap(x, call)
    return _c10d.reduce_scatter_tensor(x, "sum", call.size, call.group)


def _start_permute(x: Tensor, call: Call) -> Tensor:
    """Return the begun exchange, which sends at most one block and receives at most one block.

    A rank without a source sends zeros to itself, so that its own send is never dead code.
    """
    sent = [int((call.index, r) in call.pairs) for r in range(call.size)]
    received = [int((r, call.index) in call.pairs) for r in range(call.size)]
    blocks = [x if n else None for n in sent]
    if not any(received):
        own = sure(call.index)
        blocks[own] = torch.zeros_like(x)
        sent[own] = received[own] = 1
    going = [b for b in blocks if b is not None]
    return _c10d.all_to_all_single(torch.stack(going) if going else x[None][:0], received, sent, call.group)


def _emulate_permute(x: Tensor, call: Call) -> tuple[Tensor, bool]:
    source = {d: s for s, d in call.pairs}
    return torch.stack([x[source[r]] if r in source else torch.zeros_like(x[0]) for r in range(call.size)]), True


EXCHANGES = {
    "psum": Exchange(_start_sum, _emulate_sum, "psum"),
    "psum_invariant": Exchange(_start_sum, _emulate_sum, "pvary"),
    "pvary": Exchange(lambda x, call: x.clone(), lambda x, call: (x.clone(), True), "psum_invariant"),
    "all_gather": Exchange(_start_gather, lambda x, call: (x.clone(), False), "psum_scatter"),
    "psum_scatter": Exchange(_start_scatter, lambda x, call: (_added(x), True), "all_gather"),
    "all_to_all": Exchange(_start_swap, lambda x, call: (x.transpose(0, 1), True), "all_to_all"),
    "ppermute": Exchange(_start_permute, _emulate_permute, "ppermute"),
}


class _Exchange(torch.autograd.Function):
    """A linear collective of several tensors, which starts all exchanges and then awaits all of them."""

    @staticmethod
    def forward(call, marker, *xs):
        if call.size == 1:
            return tuple(_alone(x, call) for x in xs)
        if call.kind in SUMS and _is_tree_of(xs[0]):  # `exchange` passes floats apart from integers
            return tuple(_sums_by_tree(xs, call))
        start = EXCHANGES[call.kind].start
        begun = [
            start(x.contiguous(), call) for x in xs
        ]  # all exchanges travel at once: the last has started before the first is awaited
        return tuple(_finish(y, x, call) for y, x in zip(begun, xs, strict=True))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.call = inputs[0]
        # The exchange is linear: only the marker is saved, so that the transpose
        # and the tangent find the vmap level of the axis again.
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx, *d_ys):
        # d_x = Mᵀ d_y is an exchange again, so derivatives of every order exist
        return None, None, *_Exchange.apply(ctx.call.transposed(), *ctx.saved_tensors, *d_ys)

    @staticmethod
    def jvp(ctx, _, marker, *tangents):
        return one_level_below(lambda saved, ts: _tangents(ctx.call, saved[0], ts), ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info, in_dims, call, marker, *xs):
        own, dims = in_dims[1] is not None, in_dims[2:]
        if own:  # this level batches the marker, so it is the axis: dimension 0 holds x[s] of all ranks s
            return _emulated(call, info.batch_size, xs, dims)
        # another level's batch goes last, after the dimensions that are exchanged
        xs = [x if d is None else x.movedim(d, -1) for x, d in zip(xs, dims, strict=True)]
        ys = _Exchange.apply(call, marker, *xs)
        return ys, tuple(None if d is None else y.dim() - 1 for y, d in zip(ys, dims, strict=True))


def _tangents(call: Call, marker: Tensor, tangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    moving = [t for t in tangents if t is not None]
    out = iter(_Exchange.apply(call, marker, *moving))
    return tuple(None if t is None else next(out) for t in tangents)


def _emulated(call: Call, size: int, xs: Sequence[Tensor], dims: Sequence[int | None]):
    """Return the results of all ranks, stacked.

    A result that all ranks share is not batched, and stands for n equal results. With fewer members than ranks
    (`shard_map` compares forms alone) the members are some ranks, and only the form of each result is right.
    """
    stack = lambda x, d: x.expand(size, *x.shape) if d is None else x.movedim(d, 0)
    emulate = EXCHANGES[call.kind].emulate if size == call.size else _formal
    made = [emulate(stack(x, d), call) for x, d in zip(xs, dims, strict=True)]
    return tuple(y for y, _ in made), tuple(0 if varies else None for _, varies in made)


def _formal(x: Tensor, call: Call) -> tuple[Tensor, bool]:
    """Return a value of the form that the collective returns, for some of the ranks: x[r] of each of them."""
    if call.kind in SUMS:
        return x.sum(0, dtype=x.dtype), False
    if call.kind == "all_gather":
        return x[:1].expand(call.size, *x.shape[1:]).clone(), False
    return (x.sum(1, dtype=x.dtype) if call.kind == "psum_scatter" else x.clone()), True


def _alone(x: Tensor, call: Call) -> Tensor:
    """Return the result of the collective on an axis of one rank."""
    y, varies = EXCHANGES[call.kind].emulate(x[None], call)
    return y[0].clone() if varies else y


def _finish(begun: Tensor, x: Tensor, call: Call) -> Tensor:
    """Return the completed result, in the form that one rank sees under emulation."""
    if call.kind == "pvary":
        return begun
    done = _c10d.wait_tensor(begun)
    if call.kind == "psum_scatter":
        return done[0] if done.shape[0] == 1 else _added(done)
    return done[0] if call.kind == "ppermute" else done


def exchange(kind: str, tree: Any, axis: Axis, pairs: tuple = ()) -> Any:
    """Return the result of the collective for every leaf.

    Integers travel before floats and apart from them: floats have derivatives, and integers are known earlier.
    """
    leaves, structure = tree_flatten(tree)
    call, out = Call(kind, axis.size, axis.group, axis.index, pairs), list(leaves)
    for is_float in (False, True):
        at = [i for i, x in enumerate(leaves) if x.is_floating_point() == is_float]
        if at:
            for i, y in zip(at, _Exchange.apply(call, axis.marker, *(leaves[i] for i in at)), strict=True):
                out[i] = y
    return tree_unflatten(out, structure)


class _Extremum(torch.autograd.Function):
    """The maximum or the minimum over the ranks. The ranks that attain it share its derivative."""

    @staticmethod
    def forward(call, marker, x):
        return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), call.kind, call.group))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.call = inputs[0]
        ctx.save_for_backward(*inputs[1:], output)
        ctx.save_for_forward(*inputs[1:], output)

    @staticmethod
    def backward(ctx, d_y):
        marker, x, y = ctx.saved_tensors
        # dy/dx[r] = 1 / k on the k ranks with x[r] = y. y went to all ranks, so the cotangents are added: Σ_s d_y[s].
        (total,) = _Exchange.apply(ctx.call._replace(kind="psum"), marker, d_y)
        return None, None, _share(ctx.call, marker, x, y) * total

    @staticmethod
    def jvp(ctx, _, marker, tangent):
        def rule(saved, tangents):
            marker, x, y = saved
            return _Exchange.apply(
                ctx.call._replace(kind="psum"), marker, _share(ctx.call, marker, x, y) * tangents[0]
            )[0]

        return one_level_below(rule, ctx.saved_tensors, (tangent,))

    @staticmethod
    def vmap(info, in_dims, call, marker, x):
        if in_dims[1] is None:
            return _Extremum.apply(call, marker, x.movedim(in_dims[2], -1)), x.dim() - 1
        stacked = x[None] if in_dims[2] is None else x.movedim(in_dims[2], 0)
        return (stacked.amax(0) if call.kind == "max" else stacked.amin(0)), None


def _share(call: Call, marker: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return 1 / k on the k ranks that attain the extremum, and 0 on the other ranks."""
    has = (x == y).to(x.dtype)
    return has / _Exchange.apply(call._replace(kind="psum"), marker, has)[0]


def extremum(kind: str, tree: Any, axis: Axis) -> Any:
    """Return the maximum or the minimum over the ranks for every leaf, as `kind` ("max" or "min") says."""
    leaves, structure = tree_flatten(tree)
    call = Call(kind, axis.size, axis.group, axis.index)
    return tree_unflatten([_Extremum.apply(call, axis.marker, x) for x in leaves], structure)
