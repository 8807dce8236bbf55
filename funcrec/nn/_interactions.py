"""Second-order interactions of F vectors; no parameters.

    fm(x) = Σ_{i<j} ⟨x_i, x_j⟩ = ½ Σ_d ((Σ_i x_id)² - Σ_i x_id²)          dot(x) = (⟨x_i, x_j⟩)_{i>j}

Floor 4. Shapes: B batch, F features, D dim.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from funcrec._errors import Problem, check, describe


def factorization_machine(x: Tensor) -> Tensor:
    """x f[B, F, D] -> f[B], the sum of the dot products of all pairs.

    Law: quadratic: fm(c · x) = c² · fm(x); it equals the sum of `dot_interaction`.

    Cost: reads B · F · D elements once.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.nn.factorization_machine(torch.tensor([[[1.0], [2.0], [3.0]]]))
      tensor([11.])

    Source: Rendle, "Factorization Machines" (2010), lemma 3.1. (TorchRec's module of the name treats the F · D numbers
    as vectors of one dimension.)
    """
    check("funcrec.nn.factorization_machine", stack_problems(x))
    return 0.5 * (x.sum(-2).square() - x.square().sum(-2)).sum(-1)


def dot_interaction(x: Tensor) -> Tensor:
    """x f[B, F, D] -> f[B, F (F - 1) / 2]: ⟨x_1, x_0⟩, ⟨x_2, x_0⟩, ⟨x_2, x_1⟩, ...

    Example:
      >>> import torch, funcrec as fr
      >>> fr.nn.dot_interaction(torch.tensor([[[1.0], [2.0], [3.0]]]))
      tensor([[2., 3., 6.]])

    Source: Naumov et al., "Deep Learning Recommendation Model" (2019), §2.1; TorchRec's InteractionArch has the same products
    in the order of the upper triangle's rows, behind the dense vector.
    """
    check("funcrec.nn.dot_interaction", stack_problems(x))
    products = x @ x.transpose(-2, -1)
    # rows of the lower triangle by slices: their transpose is padding, where an index's would be atomic adds
    rows = [products[..., i, :i] for i in range(1, x.shape[-2])]
    return torch.cat(rows, -1) if rows else products[..., 0, :0]


# -- validators --------------------------------------------------------------------------------------------------


def stack_problems(x: object) -> Iterator[Problem]:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        yield Problem("`x` is not a float tensor.", describe(x), "f[B, F, D]", kind=TypeError)
    elif x.dim() < 2 or x.shape[-2] < 1:
        yield Problem("`x` is not a stack of vectors.", describe(x), "f[B, F, D]", "KeyedTensor.stack()")
