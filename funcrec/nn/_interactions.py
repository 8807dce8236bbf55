"""Second-order interactions of F vectors. They have no parameters.

    fm(x) = Σ_{i<j} ⟨x_i, x_j⟩ = ½ Σ_d ((Σ_i x_id)² - Σ_i x_id²)          dot(x) = (⟨x_i, x_j⟩)_{i>j}

Shapes: B batch, F features, D dim.
"""

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, one_level_below
from funcrec.kernels import ops, reference_interaction
from funcrec.kernels.tracked import any_tracked, is_followed


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


def dot_interaction(x: Tensor, *more: Tensor) -> Tensor:
    """Return the dot products of all pairs, ⟨x_1, x_0⟩, ⟨x_2, x_0⟩, ⟨x_2, x_1⟩, ...:
    x f[B, F, D] -> f[B, F · (F - 1) / 2].

    Args:
      more: other stacks of vectors of the same examples. Their vectors follow those of x, and F counts all of them, as
        if torch.cat had joined the stacks; nothing is copied for this.

    Cost: it reads B · F · D elements once, and computes B · D products for each pair. Its transpose computes twice as
      many. On a CPU both are one kernel each; their sums run in f32 (f64 for f64).

    Example:
      >>> import torch, funcrec as fr
      >>> fr.nn.dot_interaction(torch.tensor([[[1.0], [2.0], [3.0]]]))
      tensor([[2., 3., 6.]])

    Source: Naumov et al., "Deep Learning Recommendation Model" (2019), §2.1. TorchRec's InteractionArch returns the
    same products after the dense vector, in the order of the rows of the upper triangle.
    """
    check("funcrec.nn.dot_interaction", stack_problems(x), more_problems(x, more))
    parts = (x, *more)
    if more:
        dtype = functools.reduce(torch.promote_types, [part.dtype for part in parts])
        parts = tuple(part.to(dtype) for part in parts)
    if torch.compiler.is_dynamo_compiling() or any(map(is_followed, parts)):
        return _DotInteraction.apply(*parts)
    return _products(parts)


class _DotInteraction(torch.autograd.Function):
    """The lower triangle of x xᵀ."""

    @staticmethod
    def forward(*x):
        return _products(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, d):
        return _Transpose.apply(d, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx, *tangents):
        return one_level_below(_derivative, ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info, in_dims, *x):
        return _DotInteraction.apply(*members_first(info.batch_size, in_dims, x)), 0


class _Transpose(torch.autograd.Function):
    """Its transpose at a lower triangle S: (S + Sᵀ) x, which is linear in S and in x.

    Autograd would make two products for it, and scatter into S."""

    @staticmethod
    def forward(d, *x):
        return tuple(_transposed(d, x))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, *d_out):
        d, *x = ctx.saved_tensors
        return _derivative(x, d_out), *_Transpose.apply(d, *d_out)

    @staticmethod
    def jvp(ctx, *tangents):
        return one_level_below(_derivative_of_transpose, ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        outs = _Transpose.apply(*members_first(info.batch_size, in_dims, inputs))
        return outs, (0,) * len(outs)


def members_first(size: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of a vmap of `size` members, with the members in the first dimension of each."""
    dims = zip(tensors, in_dims, strict=True)
    return [x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in dims]


def _derivative_of_transpose(inputs: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    (d, *x), (d_t, *t) = inputs, tangents
    t = [torch.zeros_like(a) if b is None else b for a, b in zip(x, t, strict=True)]
    outs = _Transpose.apply(d, *t)
    return outs if d_t is None else tuple(a + b for a, b in zip(outs, _Transpose.apply(d_t, *x), strict=True))


def _derivative(x: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Tensor:
    """Return the derivative of the products: those of x + t, without the terms of x alone and of t alone."""
    t = torch.cat([torch.zeros_like(a) if b is None else b for a, b in zip(x, tangents, strict=True)], -2)
    whole = torch.cat([*x], -2)
    return reference_interaction.lower(whole @ t.transpose(-2, -1) + t @ whole.transpose(-2, -1))


def _products(x: Sequence[Tensor]) -> Tensor:
    if (choice := _choice("dot_interaction", x)) == "reference":
        return reference_interaction.dot_interaction(x)
    out = ops.dot_interaction([_flat(part, 2) for part in x], implementation=choice)
    return out.reshape(*x[0].shape[:-2], out.shape[-1])


def _transposed(d: Tensor, x: Sequence[Tensor]) -> list[Tensor]:
    if (choice := _choice("dot_interaction_transpose", (d, *x))) == "reference":
        return reference_interaction.dot_interaction_transpose(d, x)
    flat = [_flat(part, 2) for part in x]
    d_x = ops.dot_interaction_transpose(_flat(d, 1), flat, implementation=choice)
    return [d_part.view(part.shape) for d_part, part in zip(d_x, x, strict=True)]


def _choice(name: str, tensors: Sequence[Tensor]) -> str:
    """Return the implementation, which is the reference where another has no such kernel or no derivative.

    Dynamo does not see the rules of kernels."""
    if torch.compiler.is_dynamo_compiling() or any_tracked(tensors):
        return "reference"
    choice = ops.chosen(None, tensors[0].device)
    return choice if ops.has(name, choice) else "reference"


def _flat(x: Tensor, inner: int) -> Tensor:
    """Return x with its last `inner` dimensions, after one for all others."""
    outer = x.dim() - inner
    return x if outer == 1 else x.flatten(0, outer - 1) if outer else x[None]


# -- validators --------------------------------------------------------------------------------------------------


def stack_problems(x: object) -> Iterator[Problem]:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        yield Problem("`x` is not a float tensor.", describe(x), "f[B, F, D]", kind=TypeError)
    elif x.dim() < 2 or x.shape[-2] < 1:
        yield Problem("`x` is not a stack of vectors.", describe(x), "f[B, F, D]", "KeyedTensor.stack()")


def more_problems(x: Tensor, more: Sequence[object]) -> Iterator[Problem]:
    """Yield a problem for each of `more` that does not continue the stack x."""
    for i, part in enumerate(more):
        if not isinstance(part, Tensor) or not part.is_floating_point():
            yield Problem(f"`more[{i}]` is not a float tensor.", describe(part), "f[B, G, D]", kind=TypeError)
        elif isinstance(x, Tensor) and x.dim() > 1 and not _continues(part, x):
            need = f"[..., G, D] with x's sizes elsewhere, on {x.device}; x is {describe(x)}"
            yield Problem(f"`more[{i}]` does not continue `x`.", describe(part), need, "KeyedTensor.stack()")


def _continues(part: Tensor, x: Tensor) -> bool:
    alike = part.dim() == x.dim() and part.device == x.device
    return alike and part.shape[:-2] == x.shape[:-2] and part.shape[-1] == x.shape[-1]
