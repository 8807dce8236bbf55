"""The recurrence of a GRU over bags, step by step. Nothing is padded: a step computes the bags that are still running.

    r, z = σ(x + h W + b)_r,z    n = tanh(x_n + r · (h W + b)_n)    h' = (1 - z) n + z h        x: the input's gates

At step t only bags longer than t are computed. The lengths are read on the host: inside two operators that are opaque
to a compiler, and in `gru_states`, which autograd differentiates to any order.
Shapes: B bags, N positions, H hidden, S steps.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from funcrec.core import describe, fail, one_level_below, plain, pushed_forward
from funcrec.kernels import library

NAMESPACE = "funcrec_nn"


def steps_of(offsets: Tensor, capacity: int) -> list[Tensor]:
    """Return the positions of each step, i64[S][running bags], the longest bags first."""
    bounds = torch.cummax(offsets.long().clamp(0, capacity), 0).values  # also garbage gives positions in the buffer
    lengths = bounds.diff()
    order = lengths.argsort(descending=True, stable=True)
    starts, counts = bounds[:-1][order], lengths[order]
    running = (counts[:, None] > torch.arange(int(counts[0]) if len(counts) else 0)).sum(0).tolist()
    return [starts[:n] + t for t, n in enumerate(running)]


def cell(x: Tensor, recurrent: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (r, z, n, h') from the gates f[n, 3H] of the input, the gates of the state, and the state f[n, H]."""
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, -1), recurrent.chunk(3, -1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return r, z, n, (1 - z) * n + z * h


def gru_states(gates: Tensor, weight: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Return the states f[N, H] in plain torch; 0 in the padding."""
    if plain(offsets) is None or get_proxy_mode() is not None:
        what, need = "a further derivative of a GRU reads lengths, which a traced program cannot.", "plain offsets"
        hint = "the call without jit, or a first derivative; torch.func.jvp in place of torch.func.linearize"
        fail("funcrec.nn.gru", what, got=describe(offsets), need=need, hint=hint, kind=TypeError)
    steps = steps_of(offsets, gates.shape[0])
    h, made = gates.new_zeros((len(steps[0]) if steps else 0, weight.shape[1])), []
    for at in steps:
        h = h[: len(at)]
        h = cell(gates.index_select(0, at), torch.nn.functional.linear(h, weight, bias), h)[-1]
        made.append(h)
    out = gates.new_zeros((gates.shape[0], weight.shape[1])) + 0 * weight[0]  # tracked like the states
    return out.index_copy(0, torch.cat(steps), torch.cat(made)) if steps else out


def gru_forward(gates: Tensor, weight: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    out = gates.new_zeros((gates.shape[0], weight.shape[1]))
    h = None
    for at in steps_of(offsets, gates.shape[0]):
        h = gates.new_zeros((len(at), weight.shape[1])) if h is None else h[: len(at)]
        h = cell(gates[at], torch.nn.functional.linear(h, weight, bias), h)[-1]
        out[at] = h
    return out


def gru_backward(
    d: Tensor, states: Tensor, gates: Tensor, weight: Tensor, bias: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cotangents of gates, weight and bias. All products except one per step run over all positions at
    once."""
    steps = steps_of(offsets, gates.shape[0])
    before = torch.zeros_like(states)
    for at in steps[1:]:
        before[at] = states[at - 1]
    recurrent = torch.nn.functional.linear(before, weight, bias)
    r, z, n, _ = cell(gates, recurrent, before)
    d_gates, d_recurrent = torch.zeros_like(gates), torch.zeros_like(gates)
    carry = d.new_zeros((0, d.shape[1]))
    for at in reversed(steps):
        d_h = d[at]
        d_h[: len(carry)] += carry
        r_t, z_t, n_t = r[at], z[at], n[at]
        d_n = d_h * (1 - z_t) * (1 - n_t * n_t)
        d_z = d_h * (before[at] - n_t) * z_t * (1 - z_t)
        d_r = d_n * recurrent[at, 2 * d.shape[1] :] * r_t * (1 - r_t)
        d_gates[at] = torch.cat([d_r, d_z, d_n], 1)
        d_recurrent[at] = own = torch.cat([d_r, d_z, d_n * r_t], 1)
        carry = own @ weight + d_h * z_t
    return d_gates, d_recurrent.T @ before, d_recurrent.sum(0)


_GIVEN = "Tensor gates, Tensor weight, Tensor bias, Tensor offsets"
library.define(
    NAMESPACE,
    "gru_forward",
    f"({_GIVEN}) -> Tensor",
    gru_forward,
    lambda gates, weight, bias, offsets: gates.new_empty((gates.shape[0], weight.shape[1])),
)
library.define(
    NAMESPACE,
    "gru_backward",
    f"(Tensor d, Tensor states, {_GIVEN}) -> (Tensor, Tensor, Tensor)",
    gru_backward,
    lambda d, states, gates, weight, bias, offsets: tuple(map(library.blank, (gates, weight, bias))),
)


class Gru(torch.autograd.Function):
    """(gates f[N, 3H], weight f[3H, H], bias f[3H], offsets i[B + 1]) -> states f[N, H]."""

    @staticmethod
    def forward(gates, weight, bias, offsets):
        return torch.ops.funcrec_nn.gru_forward(gates, weight, bias, offsets)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, d):
        *given, states = ctx.saved_tensors
        return (*_Transpose.apply(d, states, *given), None)

    @staticmethod
    def jvp(ctx, *tangents):
        rule = lambda given, tangents: tangent_of(gru_states, given[:3], tangents[:3], given[3])
        return one_level_below(rule, ctx.saved_tensors[:4], list(tangents))

    @staticmethod
    def vmap(info, in_dims, *given):
        return torch.stack([Gru.apply(*own) for own in members(info, in_dims, given)]), 0


class _Transpose(torch.autograd.Function):
    """(d f[N, H], states, gates, weight, bias, offsets) -> cotangents of gates, weight and bias."""

    @staticmethod
    def forward(d, states, *given):
        return torch.ops.funcrec_nn.gru_backward(d, states, *given)

    @staticmethod
    def setup_context(ctx, inputs, output):
        d, _, *given = inputs
        ctx.save_for_backward(d, *given)
        ctx.save_for_forward(d, *given)

    @staticmethod
    def backward(ctx, *d_cotangents):
        *given, offsets = ctx.saved_tensors
        d_d, *rest = torch.func.vjp(lambda d, g, w, b: cotangents(d, g, w, b, offsets), *given)[1](d_cotangents)
        return d_d, None, *rest, None

    @staticmethod
    def jvp(ctx, d_d, _, *tangents):
        rule = lambda given, tangents: tangent_of(cotangents, given[:4], tangents[:4], given[4])
        return one_level_below(rule, ctx.saved_tensors, [d_d, *tangents])

    @staticmethod
    def vmap(info, in_dims, *given):
        made = [_Transpose.apply(*own) for own in members(info, in_dims, given)]
        return tuple(map(torch.stack, zip(*made, strict=True))), (0, 0, 0)


def cotangents(d: Tensor, gates: Tensor, weight: Tensor, bias: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """Return the cotangents of gates, weight and bias in plain torch. The states are computed once more."""
    return torch.func.vjp(lambda g, w, b: gru_states(g, w, b, offsets), gates, weight, bias)[1](d)


def tangent_of(fn: Callable, given: Sequence[Tensor], tangents: Sequence[Tensor | None], offsets: Tensor) -> Any:
    own = tuple(torch.zeros_like(x) if t is None else t for x, t in zip(given, tangents, strict=True))
    return pushed_forward(lambda *xs: fn(*xs, offsets), given, own)


def members(info, in_dims: tuple, given: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the arguments of each member of a vmap."""
    for i in range(info.batch_size):
        yield [x if d is None else x.select(d, i) for x, d in zip(given, in_dims, strict=True)]
