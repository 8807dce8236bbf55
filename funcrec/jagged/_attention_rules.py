"""The kernel of attention as a differentiable function. Its reverse rule is the kernel of the transpose.

    d_queries, d_keys, d_values, d_biases = attentionᵀ(d_out)

The transpose's own derivative is that of the reference. A forward level uses the reference from the start. A vmap is
one call with the members as further heads; if it maps offsets, times or targets, one call for each member.
Shapes: B bags, N queries, M keys, H heads, D dim of queries and keys, V dim of values, K members of a vmap.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.core import any_tracked, fail, is_by_tree, is_forward, is_in_jvp, is_transforming, sure
from funcrec.kernels import ops, reference

NUM_FLOATS = 5  # queries, keys, values and two biases; then six tensors without derivatives


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The static part of a call. It is not a tuple, because torch.func would flatten a tuple."""

    implementation: str
    numbers: tuple

    def arguments(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        q, k, v, position_bias, time_bias, offsets, key_offsets, *others = tensors
        return q, k, v, offsets, key_offsets, position_bias, time_bias, *others, *self.numbers

    def run(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        return ops.jagged_attention(*self.arguments(tensors), implementation=self.implementation)


def attention(tensors: Sequence[Tensor | None], numbers: tuple) -> Tensor:
    """Return the attention f[N, H, V], differentiable in the first five tensors.

    tensors: queries, keys, values, position_bias, time_bias, offsets, key_offsets, query_times, key_times, num_targets.
    numbers: scale, normalizer, softmax, causal.
    """
    spec = _Settings(_chosen(sure(tensors[0])), numbers)
    if spec.implementation == "reference" or is_forward() or is_in_jvp():
        refuse_invariant()
        return reference.jagged_attention(*spec.arguments(tensors))[0]
    if not is_transforming() and not any_tracked(tensors):
        return spec.run(tensors)[0]
    return _Attention.apply(spec, *tensors)[0]


def refuse_invariant() -> None:
    """Raise inside of `invariant`: the reference sums over all bags, and its blocks depend on a bag's place."""
    if is_by_tree():
        need, hint = "its value or first derivative, by the C++ kernel", "reverse mode, once: fr.value_and_grad"
        what, got = "attention has no fixed order here.", "a forward or second derivative, or the reference"
        fail("funcrec.invariant", what, got=got, need=need, hint=hint, kind=NotImplementedError)


def _chosen(x: Tensor) -> str:
    """Return the name of the implementation. It is the reference on a device whose default has no attention."""
    if torch.compiler.is_dynamo_compiling():
        return "reference"
    return ops.available("jagged_attention", x.device)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(spec, *tensors):
        return spec.run(tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.spec, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *tensors)

    @staticmethod
    def backward(ctx, d_out, _):
        out, logs, *tensors = ctx.saved_tensors
        grads = _Transpose.apply(ctx.spec, d_out, out, logs, *tensors)
        needed = ctx.needs_input_grad[1:]
        return (
            None,
            *(g if need else None for g, need in zip(grads, needed, strict=False)),
            *[None] * (len(tensors) - 5),
        )

    @staticmethod
    def vmap(info, in_dims, spec, *tensors):
        size, dims = info.batch_size, in_dims[1:]
        heads = _Members(size, dims, tensors)
        if heads.are_apart and size:
            each = [_Attention.apply(spec, *member(tensors, dims, k)) for k in range(size)]
            return tuple(map(torch.stack, zip(*each, strict=True))), (0, 0)
        if not size:
            out = torch.func.vmap(lambda *xs: reference.jagged_attention(*spec.arguments(xs)), dims)(*tensors)
            return out, (0, 0)
        out, logs = _Attention.apply(spec, *heads.joined())
        return (heads.split(out), heads.split(logs)), (0, 0)


class _Transpose(torch.autograd.Function):
    """The cotangents of the five floats; an empty one for a bias that is None."""

    @staticmethod
    def forward(spec, d_out, out, logs, *tensors):
        return ops.jagged_attention_transpose(
            d_out, out, logs, *spec.arguments(tensors), implementation=spec.implementation
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.spec, d_out, _, _, *tensors = inputs
        ctx.save_for_backward(d_out, *tensors)

    @staticmethod
    def backward(ctx, *moved):
        refuse_invariant()
        d_out, *tensors = ctx.saved_tensors
        spec, given = ctx.spec, [i for i in range(NUM_FLOATS) if tensors[i] is not None]

        def transposed(d_out: Tensor, *floats: Tensor) -> list[Tensor]:
            at = list(tensors)
            for i, x in zip(given, floats, strict=True):
                at[i] = x
            found = reference.jagged_attention_transpose(d_out, None, None, *spec.arguments(at))
            return [found[i] for i in given]

        pull = torch.func.vjp(transposed, d_out, *(tensors[i] for i in given))[1]
        of_d, *grads = pull([moved[i] for i in given])
        found = dict(zip(given, grads, strict=True))
        return None, of_d, None, None, *(found.get(i) for i in range(len(tensors)))

    @staticmethod
    def vmap(info, in_dims, spec, d_out, out, logs, *tensors):
        size, (of_d, of_out, of_logs, *dims) = info.batch_size, in_dims[1:]
        heads = _Members(size, dims, tensors)
        if heads.are_apart and size:
            given, in_dims = (d_out, out, logs, *tensors), (of_d, of_out, of_logs, *dims)
            each = [_Transpose.apply(spec, *member(given, in_dims, k)) for k in range(size)]
            return tuple(map(torch.stack, zip(*each, strict=True))), (0,) * NUM_FLOATS
        if not size:
            call = lambda d, *xs: reference.jagged_attention_transpose(d, None, None, *spec.arguments(xs))
            return torch.func.vmap(call, (of_d, *dims))(d_out, *tensors), (0,) * NUM_FLOATS
        first = [heads.join(x, d) for x, d in ((d_out, of_d), (out, of_out), (logs, of_logs))]
        q, k, v, *biases = _Transpose.apply(spec, *first, *heads.joined())
        biases = (heads.split_bias(d, x, dim) for d, x, dim in zip(biases, tensors[3:5], dims[3:5], strict=True))
        return (heads.split(q), heads.split(k), heads.split(v), *biases), (0,) * NUM_FLOATS


def member(tensors: Sequence[Tensor | None], dims: Sequence[int | None], k: int) -> list[Tensor | None]:
    """Return the tensors of member k of a vmap."""
    return [x if dim is None else sure(x).select(dim, k) for x, dim in zip(tensors, dims, strict=True)]


class _Members:
    """The K members of a vmap as K times the heads."""

    def __init__(self, size: int, dims: Sequence[int | None], tensors: Sequence[Tensor | None]):
        self.size, self.dims, self.tensors = size, dims, tensors
        self.are_apart = any(d is not None for d in dims[NUM_FLOATS:])
        q, of_q = sure(tensors[0]), dims[0]
        self.heads = q.shape[1] if of_q is None else q.movedim(of_q, 0).shape[2]

    def join(self, x: Tensor, dim: int | None) -> Tensor:
        """Return x [N, H, ...] of each member as [N, K · H, ...]."""
        x = x[:, None].expand(-1, self.size, *x.shape[1:]) if dim is None else x.movedim(dim, 1)
        return x.flatten(1, 2)

    def join_bias(self, x: Tensor | None, dim: int | None) -> Tensor | None:
        """Return a bias f[H or 1, P] of each member as f[K · H, P]."""
        if x is None:
            return None
        x = x[None] if dim is None else x.movedim(dim, 0)
        return x.expand(self.size, self.heads, x.shape[2]).flatten(0, 1)

    def joined(self) -> list[Tensor | None]:
        each = list(zip(self.tensors, self.dims, strict=True))
        first = [self.join(sure(x), d) for x, d in each[:3]]
        return [*first, *(self.join_bias(x, d) for x, d in each[3:5]), *self.tensors[NUM_FLOATS:]]

    def split(self, x: Tensor) -> Tensor:
        """Return x [N, K · H, ...] as [K, N, H, ...]."""
        return x.unflatten(1, (self.size, self.heads)).movedim(1, 0)

    def split_bias(self, d: Tensor, x: Tensor | None, dim: int | None) -> Tensor:
        """Return the cotangents f[K · H, P] of a bias x as [K, H or 1, P]."""
        if x is None:
            return d.expand(self.size, *d.shape)
        d = d.unflatten(0, (self.size, self.heads))
        rows = x.shape[0] if dim is None else x.movedim(dim, 0).shape[1]
        return d if rows == self.heads else d.sum(1, keepdim=True)
