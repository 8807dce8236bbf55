"""Matrix products that sum in one order for all shapes, for laws that compare bits.

    product(a, b) = ((a₀ b₀ + a₁ b₁) + a₂ b₂) + ...        aₖ: column k of a, bₖ: row k of b

A library's matrix product may choose another order for each shape, processor and number of members. Elementwise
operations always round in the same way, and so do the gradients here.
"""

import functools
import operator
from typing import Any

import torch
from torch import Tensor


def total(x: Tensor, dim: int) -> Tensor:
    """Return the sum over dim, from the first element to the last."""
    return functools.reduce(operator.add, x.unbind(dim))


class Product(torch.autograd.Function):
    """The product a b of [M, K] and [K, N]. Its gradients are also such products."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return functools.reduce(operator.add, (a[:, k, None] * b[k] for k in range(b.shape[0])))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return product(d, b.t()), product(a.t(), d)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product a b, for [M, K] and [K, N] or [K]."""
    return Product.apply(a, b) if b.dim() == 2 else Product.apply(a, b[:, None])[:, 0]
