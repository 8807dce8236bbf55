"""Second-order interactions of F vectors. They have no parameters.

    fm(x) = Σ_{i<j} ⟨x_i, x_j⟩ = ½ Σ_d ((Σ_i x_id)² - Σ_i x_id²)          dot(x) = (⟨x_i, x_j⟩)_{i>j}

Shapes: B batch, F features, D dim.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, one_level_below


def factorization_machine(x: Tensor) -> Tensor:
    """Return the sum of the dot products of all pairs of vectors: x f[B, F, D] -> f[B].

    Law: fm is quadratic: fm(c · x) = c² · fm(x). It equals the sum of `dot_interaction`.

    Cost: it reads B · F · D elements once.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.nn.factorization_machine(torch.tensor([[[1.0], [2.0], [3.0]]]))
      tensor([11.])

    Source: Rendle, "Factorization Machines" (2010), lemma 3.1. (TorchRec's module of this name treats the F · D numbers
    as vectors of one dimension.)
    """
    check("funcrec.nn.factorization_machine", stack_problems(x))
    return 0.5 * (x.sum(-2).square() - x.square().sum(-2)).sum(-1)


def dot_interaction(x: Tensor) -> Tensor:
    """Return the dot products of all pairs, ⟨x_1, x_0⟩, ⟨x_2, x_0⟩, ⟨x_2, x_1⟩, ...:
    x f[B, F, D] -> f[B, F · (F - 1) / 2].

    Example:
      >>> import torch, funcrec as fr
      >>> fr.nn.dot_interaction(torch.tensor([[[1.0], [2.0], [3.0]]]))
      tensor([[2., 3., 6.]])

    Source: Naumov et al., "Deep Learning Recommendation Model" (2019), §2.1. TorchRec's InteractionArch returns the
    same products after the dense vector, in the order of the rows of the upper triangle.
    """
    check("funcrec.nn.dot_interaction", stack_problems(x))
    return _DotInteraction.apply(x)


class _DotInteraction(torch.autograd.Function):
    """The lower triangle of x xᵀ. Its transpose at a lower triangle S is one product, (S + Sᵀ) x.

    Autograd would make two products, and scatter into S."""

    @staticmethod
    def forward(x):
        return _lower(x @ x.transpose(-2, -1))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, d):
        (x,) = ctx.saved_tensors
        return _symmetric(d, x.shape[-2]) @ x

    @staticmethod
    def jvp(ctx, tangent):
        rule = lambda x, t: _lower(x[0] @ t[0].transpose(-2, -1) + t[0] @ x[0].transpose(-2, -1))
        return one_level_below(rule, ctx.saved_tensors, [tangent])

    @staticmethod
    def vmap(info, in_dims, x):
        return _DotInteraction.apply(x.movedim(in_dims[0], 0)), 0


def _lower(square: Tensor) -> Tensor:
    """Return the lower triangle of [..., F, F], row after row, as [..., F (F - 1) / 2]."""
    size = square.shape[-1]
    places = [i * size + j for i in range(size) for j in range(i)]
    return square.flatten(-2).index_select(-1, torch.tensor(places, dtype=torch.int64, device=square.device))


def _symmetric(lower: Tensor, size: int) -> Tensor:
    """Return [..., F, F], symmetric with zeros on the diagonal, from [..., F (F - 1) / 2].

    It only reads elements, where a scatter would add to them."""
    place = lambda i, j: max(i, j) * (max(i, j) - 1) // 2 + min(i, j)
    places = [place(i, j) if i != j else lower.shape[-1] for i in range(size) for j in range(size)]
    padded = torch.nn.functional.pad(lower, (0, 1))
    index = torch.tensor(places, dtype=torch.int64, device=lower.device)
    return padded.index_select(-1, index).unflatten(-1, (size, size))


# -- validators --------------------------------------------------------------------------------------------------


def stack_problems(x: object) -> Iterator[Problem]:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        yield Problem("`x` is not a float tensor.", describe(x), "f[B, F, D]", kind=TypeError)
    elif x.dim() < 2 or x.shape[-2] < 1:
        yield Problem("`x` is not a stack of vectors.", describe(x), "f[B, F, D]", "KeyedTensor.stack()")
