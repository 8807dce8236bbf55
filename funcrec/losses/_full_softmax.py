"""Cross entropy over all items, fused with the product of queries and items: all logits never exist at once.

    loss_i = log Σ_r exp ⟨h_i, w_r⟩ / T - ⟨h_i, w_t⟩ / T,   t = target_i
    d_h = (P - Y) W d / T,   d_W = (P - Y)ᵀ H d / T,   P = softmax(H Wᵀ / T)

The forward and the backward pass each compute the logits of one chunk of queries at a time. The gradient of a weighted
sum of losses is known up to a factor in the forward pass. So `_SoftmaxSum` computes it there, from the same logits.
Shapes: N queries, R items, D dim.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor

from funcrec.core import (
    Count,
    Form,
    PositiveMagnitude,
    Problem,
    Scalar,
    any_tracked,
    check,
    element_problems,
    is_forward,
    is_in_jvp,
    is_tracked,
    one_level_below,
    or_nan,
    pushed_forward,
    typed,
)
from funcrec.losses import _chunks  # noqa: F401  defines the operators
from funcrec.losses._mean import Reduction, can_be_read, reduce, weight_problems, weights_and_total
from funcrec.tables import blank_padding

Vectors = Annotated[Tensor, Form("f[N, D]")]
Weights = Annotated[Tensor, Form("f[N]")] | None
Items = Annotated[Tensor, Form("f[R, D]")]
CHUNK_NUMBERS, CHUNK_QUERIES = 2**18, 64  # logits of a chunk: 1 MB in f32 fits in a core's L2; at least 64 queries


@typed
def full_softmax(
    hidden: Vectors,
    items: Items,
    target: Annotated[Tensor, Form("i[N]")],
    weight: Weights = None,
    *,
    temperature: PositiveMagnitude | Scalar = 1.0,
    chunk: Count | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the cross entropy of each query's target among all items, f[]. The logits f[N, R] are never stored.

    Args:
      hidden: f[N, D], a query for each example, such as the hidden vectors of all positions of a batch of histories.
      items: f[R, D], the vectors of all items.
      target: i[N], the row of the right item.
      weight: f[N] >= 0, or None. An example of weight 0 is padding and is not read, unless the weights are
        differentiated (`weighted_mean`).
      temperature: T > 0, a number or f[]. The loss is NaN for a tensor that is not > 0.
      chunk: the number of queries whose logits exist at once, static. None chooses as many as have 2¹⁸ logits, but at
        least 64.
      reduction: "mean" for `weighted_mean`, f[]; "none" for the loss of each example, f[N], 0 for padding.

    Floats of 16 bits are computed in f32.

    Raises:
      TypeError, ValueError: `hidden` and `items` have different dims, or a target is not a row. If no value can be read
        (under `jit`, on a GPU), the loss is NaN instead.

    Law: the loss is `cross_entropy(hidden @ items.T / temperature, target)`, and so are all its derivatives.

    Cost: one product of N · R · D for the value, three for the value and gradient of a mean, and four with
      reduction="none", where the gradient computes the logits once more. Memory for chunk · R numbers. A second
      derivative keeps the logits of all chunks.

    Example:
      >>> import torch, funcrec as fr
      >>> items = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
      >>> fr.losses.full_softmax(torch.eye(2), items, torch.tensor([0, 2]), reduction="none")
      tensor([0.2395, 2.2395])

    Source: Klenitskiy and Vasilev, "Turning dross into gold loss" (RecSys 2023), §3.2; Wijmans et al., "Cut your
      losses in large-vocabulary language models" (ICLR 2025).
    """
    call = "funcrec.losses.full_softmax"
    check(call, weight_problems(weight))
    check(call, target_problems(target, items.shape[0], weight))
    h, t = blank_padding(hidden, weight), blank_padding(target, weight).long()
    is_row = (t >= 0) & (t < items.shape[0])
    dtype = torch.promote_types(h.dtype, items.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    size = chunk or max(CHUNK_QUERIES, CHUNK_NUMBERS // max(items.shape[0], 1))
    given = h.to(wide) / or_nan(temperature), items.to(wide), torch.where(is_row, t, 0)
    if reduction == "mean" and is_sum_enough(hidden, items, weight):
        return mean_of(*given, is_row, weight, size).to(dtype)
    own = _FullSoftmax.apply(*given, size)
    return reduce(torch.where(is_row, own, torch.nan).to(dtype), weight, reduction)


def is_sum_enough(hidden: Tensor, items: Tensor, weight: Tensor | None) -> bool:
    """Return whether gradients of the queries or items are wanted, but no tangents and no gradients of weights."""
    of_weight = weight is not None and is_tracked(weight)
    return any_tracked([hidden, items]) and not (of_weight or is_in_jvp() or is_forward())


def mean_of(hidden: Tensor, items: Tensor, target: Tensor, is_row: Tensor, weight: Tensor | None, chunk: int) -> Tensor:
    """Return the weighted mean of the losses, f[]; NaN if the target of an example with weight is not a row."""
    if weight is None:
        share, total = torch.ones_like(hidden[:, 0]), hidden.shape[0]
    else:
        share, total = weights_and_total(weight, hidden.dtype)
        total = torch.where(total == 0, 1, total)
    out = _SoftmaxSum.apply(hidden, items, target, torch.where(is_row, share, 0), chunk)[0]
    return out / total + torch.where(is_row.all(), 0.0, torch.nan)


class _FullSoftmax(torch.autograd.Function):
    """(hidden f[..., N, D], items f[..., R, D], target i64[..., N], chunk) -> f[..., N], with leading dims of vmaps.

    Its transpose is a function, too, so that torch.func, which differentiates with create_graph, keeps no logits."""

    @staticmethod
    def forward(hidden, items, target, chunk):
        return torch.ops.funcrec_losses.softmax_losses(hidden, items, target, chunk)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.chunk = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, d):
        return (*_Cotangents.apply(*ctx.saved_tensors, d, ctx.chunk, None, None, None), None, None)

    @staticmethod
    def jvp(ctx, d_hidden, d_items, *no_tangents):
        rule = lambda x, d: tangent_of(x[0], x[1], x[2], d[0], d[1], ctx.chunk)
        return one_level_below(rule, ctx.saved_tensors, [d_hidden, d_items])

    @staticmethod
    def vmap(info, in_dims, hidden, items, target, chunk):
        return _FullSoftmax.apply(*in_front(info, in_dims, hidden, items, target), chunk), 0


class _SoftmaxSum(torch.autograd.Function):
    """(hidden f[..., N, D], items f[..., R, D], target i64[..., N], share f[..., N], chunk) -> (Σ_i share_i loss_i
    f[...], and for its transpose the derivatives by hidden and items)."""

    @staticmethod
    def forward(hidden, items, target, share, chunk):
        return torch.ops.funcrec_losses.softmax_sum(hidden, items, target, share, chunk)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.chunk = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx, d, *_):
        hidden, items, target, share, *known = ctx.saved_tensors
        d = hidden.new_zeros(hidden.shape[:-2]) if d is None else d
        return (*_Cotangents.apply(hidden, items, target, share * d[..., None], ctx.chunk, d.detach(), *known),) + (
            None,
        ) * 3

    @staticmethod
    def vmap(info, in_dims, hidden, items, target, share, chunk):
        return _SoftmaxSum.apply(*in_front(info, in_dims, hidden, items, target, share), chunk), (0, 0, 0)


class _Cotangents(torch.autograd.Function):
    """(hidden, items, target, d f[..., N], chunk, factor f[...], known) -> (d_hidden, d_items). Its derivatives are
    those of `cotangents`. known: two tensors that, times the factor, are the results; or None."""

    @staticmethod
    def forward(hidden, items, target, d, chunk, factor, *known):
        if factor is not None:
            return tuple(x * factor[..., None, None] for x in known)
        return torch.ops.funcrec_losses.softmax_cotangents(hidden, items, target, d, chunk)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.chunk = inputs[:5]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, *d_cotangents):
        hidden, items, target, d = ctx.saved_tensors
        rule = lambda hidden, items, d: cotangents(hidden, items, target, d, ctx.chunk)
        d_hidden, d_items, d_d = torch.func.vjp(rule, hidden, items, d)[1](d_cotangents)
        return d_hidden, d_items, None, d_d, *(None,) * 4

    @staticmethod
    def jvp(ctx, d_hidden, d_items, _, d_d, *others):
        def rule(tensors, tangents):
            hidden, items, target, d = tensors
            own = [torch.zeros_like(x) if t is None else t for x, t in zip((hidden, items, d), tangents, strict=True)]
            of = lambda hidden, items, d: cotangents(hidden, items, target, d, ctx.chunk)
            return pushed_forward(of, (hidden, items, d), own)

        return one_level_below(rule, ctx.saved_tensors, [d_hidden, d_items, d_d])

    @staticmethod
    def vmap(info, in_dims, hidden, items, target, d, chunk, *known):
        front = in_front(info, in_dims, hidden, items, target, d)
        known = [None if x is None else in_front(info, (at,), x)[0] for x, at in zip(known, in_dims[5:], strict=True)]
        return _Cotangents.apply(*front, chunk, *known), (0, 0)


def in_front(info, in_dims: tuple, *given: Tensor) -> list[Tensor]:
    """Return the tensors with the dimension of a vmap in front, also the tensors that all members share."""
    pairs = zip(given, in_dims, strict=False)
    return [x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0) for x, d in pairs]


def chunks(size: int, *given: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return the chunks of the tensors [..., N, K]; K may be 1, for a vector."""
    parts = zip(*(x.split(size, -2) for x in given), strict=True)
    return ((h, *(x[..., 0] for x in vectors)) for h, *vectors in parts)


def cotangents(hidden: Tensor, items: Tensor, target: Tensor, d: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the cotangents of hidden and items, for the cotangents d f[..., N] of the losses.

    It is the operator `softmax_cotangents` in plain torch, which autograd differentiates to any order."""
    places = target[..., None].expand(*target.shape, items.shape[-1])
    scaled = hidden * d[..., None]
    d_items = torch.zeros_like(items).scatter_add(-2, places, -scaled)
    if not hidden.shape[-2]:
        return torch.zeros_like(hidden), d_items
    parts = []
    for h, scale in chunks(chunk, hidden, d[..., None]):
        p = torch.softmax(h @ items.mT, -1) * scale[..., None]
        parts.append(p @ items)
        d_items = d_items + p.mT @ h
    return torch.cat(parts, -2) - items.gather(-2, places) * d[..., None], d_items


def tangent_of(
    hidden: Tensor, items: Tensor, target: Tensor, d_hidden: Tensor | None, d_items: Tensor | None, chunk: int
) -> Tensor:
    """Return the tangents f[..., N] of the losses."""
    d_hidden = torch.zeros_like(hidden) if d_hidden is None else d_hidden
    d_items = torch.zeros_like(items) if d_items is None else d_items
    parts = [torch.zeros_like(hidden[..., :0, 0])]
    for (h, t), d_h in zip(chunks(chunk, hidden, target[..., None]), d_hidden.split(chunk, -2), strict=True):
        tangent = d_h @ items.mT + h @ d_items.mT
        mean = (torch.softmax(h @ items.mT, -1) * tangent).sum(-1)
        parts.append(mean - tangent.gather(-1, t[..., None])[..., 0])
    return torch.cat(parts, -1)


# -- validators --------------------------------------------------------------------------------------------------


def target_problems(target: Tensor, num_items: int, weight: Tensor | None) -> Iterator[Problem]:
    if can_be_read(target, weight):
        wrong = blank_padding(~((target >= 0) & (target < num_items)), weight)
        what, need = "`target` has values that are not rows of `items`.", f"0 <= target < {num_items}"
        yield from element_problems(what, "target", target, wrong, need, "weight=0 for padding")
