"""Cross entropy over all items in chunks of queries: two operators, opaque to a compiler, that reuse one buffer.

    losses(H, W, t)_i = log Σ_r exp z_ir - z_it,   z = H Wᵀ;        cotangents = the transpose of its derivative

A compiled program that unrolled the chunks would hold a hundred products, and take minutes to compile. The rules in
plain torch, which derivatives of higher order need, are in `_full_softmax`. Shapes: N queries, R items, D dim. Leading
dims are those of vmaps.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from funcrec.kernels import library

NAMESPACE = "funcrec_losses"


def products(hidden: Tensor, items: Tensor, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield (the queries of a chunk, their logits [..., chunk, R]), in a buffer that the next chunk overwrites."""
    count = hidden.shape[-2]
    buffer = hidden.new_empty((*hidden.shape[:-2], min(chunk, count), items.shape[-2]))
    for first in range(0, count, chunk):
        at = slice(first, min(first + chunk, count))
        yield at, torch.matmul(hidden[..., at, :], items.mT, out=buffer[..., : at.stop - first, :])


def softmax_losses(hidden: Tensor, items: Tensor, target: Tensor, chunk: int) -> Tensor:
    out = hidden.new_empty(hidden.shape[:-1])
    for at, z in products(hidden, items, chunk):
        greatest, own = z.amax(-1, keepdim=True), z.gather(-1, target[..., at, None])
        total = z.sub_(greatest).exp_().sum(-1)
        out[..., at] = total.log_().add_((greatest - own)[..., 0])
    return out


def softmax_cotangents(hidden: Tensor, items: Tensor, target: Tensor, d: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    places = target[..., None].expand(*target.shape, items.shape[-1])
    d_hidden, d_items = torch.empty_like(hidden), torch.zeros_like(items)
    for at, z in products(hidden, items, chunk):
        p = torch.softmax(z, -1, out=z).mul_(d[..., at, None])
        torch.matmul(p, items, out=d_hidden[..., at, :])
        d_items += p.mT @ hidden[..., at, :]
    d_items.scatter_add_(-2, places, hidden * -d[..., None])
    return d_hidden.sub_(items.gather(-2, places).mul_(d[..., None])), d_items


library.define(
    NAMESPACE,
    "softmax_losses",
    "(Tensor hidden, Tensor items, Tensor target, SymInt chunk) -> Tensor",
    softmax_losses,
    lambda hidden, items, target, chunk: hidden.new_empty(hidden.shape[:-1]),
)
library.define(
    NAMESPACE,
    "softmax_cotangents",
    "(Tensor hidden, Tensor items, Tensor target, Tensor d, SymInt chunk) -> (Tensor, Tensor)",
    softmax_cotangents,
    lambda hidden, items, target, d, chunk: (library.blank(hidden), library.blank(items)),
)
