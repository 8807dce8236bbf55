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
    """Yield (the queries of a chunk, their logits [..., chunk, R]). The logits lie in a buffer that the next chunk
    overwrites."""
    count, columns = hidden.shape[-2], items.mT.contiguous()  # a fifth faster than reading the rows as columns
    buffer = hidden.new_empty((*hidden.shape[:-2], min(chunk, count), items.shape[-2]))
    for first in range(0, count, chunk):
        at = slice(first, min(first + chunk, count))
        yield at, torch.matmul(hidden[..., at, :], columns, out=buffer[..., : at.stop - first, :])


def raised(z: Tensor) -> tuple[Tensor, Tensor]:
    """Replace z [..., n, R] by e^(z - greatest of its row), and return (greatest, sums) of the rows, [..., n, 1]."""
    greatest = z.amax(-1, keepdim=True)
    return greatest, z.sub_(greatest).exp_().sum(-1, keepdim=True)


def softmax_losses(hidden: Tensor, items: Tensor, target: Tensor, chunk: int) -> Tensor:
    out = hidden.new_empty(hidden.shape[:-1])
    for at, z in products(hidden, items, chunk):
        own = z.gather(-1, target[..., at, None])
        greatest, total = raised(z)
        out[..., at] = total.log_().add_(greatest - own)[..., 0]
    return out


def softmax_cotangents(hidden: Tensor, items: Tensor, target: Tensor, d: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    d_hidden, d_columns = torch.zeros_like(hidden), zeros_of_columns(items)
    for at, z in products(hidden, items, chunk):
        add_slopes(z, raised(z)[1], hidden, items, d, at, d_hidden, d_columns)
    return less_targets(hidden, items, target, d, d_hidden, d_columns.mT)


def softmax_sum(
    hidden: Tensor, items: Tensor, target: Tensor, share: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (Σ_i share_i loss_i, the cotangents of hidden and items for the cotangents share) from the same logits.

    On the CPU it does not read the queries after the last one whose share is not 0.
    """
    out, d_hidden, d_columns = hidden.new_zeros(hidden.shape[:-2]), torch.zeros_like(hidden), zeros_of_columns(items)
    used = share.shape[-1]
    if share.is_cpu and share.numel():
        last = (share != 0).view(-1, used).any(0).nonzero()
        used = int(last[-1]) + 1 if len(last) else 0
    for at, z in products(hidden[..., :used, :], items, chunk):
        own = z.gather(-1, target[..., at, None])
        greatest, total = raised(z)
        out += ((total.log() + (greatest - own))[..., 0] * share[..., at]).sum(-1)
        add_slopes(z, total, hidden, items, share, at, d_hidden, d_columns)
    return out, *less_targets(hidden, items, target, share, d_hidden, d_columns.mT)


def zeros_of_columns(items: Tensor) -> Tensor:
    return items.new_zeros((*items.shape[:-2], items.shape[-1], items.shape[-2]))


def add_slopes(
    z: Tensor, total: Tensor, hidden: Tensor, items: Tensor, d: Tensor, at: slice, d_hidden: Tensor, d_columns: Tensor
) -> None:
    """Add the part of a chunk, whose logits `raised` has replaced by z, to d_hidden [..., N, D] and d_columns
    [..., D, R]. It scales the rows of hidden, which are shorter than those of z."""
    scale = d[..., at, None] / total
    torch.matmul(z, items, out=d_hidden[..., at, :])
    d_hidden[..., at, :] *= scale
    h = (hidden[..., at, :] * scale).mT
    d_columns.addmm_(h, z) if d_columns.dim() == 2 else d_columns.add_(h @ z)


def less_targets(hidden: Tensor, items: Tensor, target: Tensor, d: Tensor, d_hidden: Tensor, d_items: Tensor):
    """Return the cotangents minus the parts of the targets' own logits."""
    places, d_items = target[..., None].expand(*target.shape, items.shape[-1]), d_items.contiguous()
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
library.define(
    NAMESPACE,
    "softmax_sum",
    "(Tensor hidden, Tensor items, Tensor target, Tensor share, SymInt chunk) -> (Tensor, Tensor, Tensor)",
    softmax_sum,
    lambda hidden, items, target, share, chunk: (
        hidden.new_empty(hidden.shape[:-2]),
        library.blank(hidden),
        library.blank(items),
    ),
)
