"""Lanczos' method and conjugate gradients: eigenvalues and solutions of a symmetric matrix known by its products.

    A Q = Q T + r eᵀ        T tridiagonal: its outermost eigenvalues are the first to be near those of A

A vector is a tree of floats, such as the parameters of `of_rows`. Sums run in f32, or in f64 if a leaf is f64.
Shapes: N elements of a vector, k steps.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import (
    Count,
    Key,
    NotNegative,
    Problem,
    Scalar,
    check,
    describe,
    fail,
    float_leaf_problems,
    fold_in,
    own_errors,
    random,
    tree_flatten,
    tree_unflatten,
    typed,
)

BROKEN = 100  # times the dtype's rounding, relative to T: a residual as small as this is rounding


class Spectrum(NamedTuple):
    """Approximations of k eigenvalues and eigenvectors.

    values: f[k], ascending. errors: f[k]; the matrix has an eigenvalue within errors[i] of values[i]. vectors: a tree
    of f[k, ...], of unit norm.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.lanczos(lambda v: 3 * v, torch.zeros(2), steps=1, key=fr.key(0)).values.round(decimals=3)
      tensor([3.])
    """

    values: Tensor
    errors: Tensor
    vectors: Any


class Solution(NamedTuple):
    """x, a tree like the right side; residual f[], the norm of b - A x.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.conjugate_gradient(lambda v: 2 * v, torch.ones(2), steps=1).residual
      tensor(0.)
    """

    x: Any
    residual: Tensor


@typed
def lanczos(product: Callable[..., Any], like: Any, *, steps: Count, key: Key) -> Spectrum:
    """Return approximate eigenvalues of a symmetric matrix, of which only products with vectors are known.

    The outermost eigenvalues are found first: some 20 steps give the largest few of most Hessians. With as many steps
    as elements all eigenvalues are found.

    Args:
      product: (vector) -> the matrix times the vector, such as `lambda v: torch.func.jvp(gradient, (at,), (v,))[1]`.
      like: a tree of floats, N in all, with the form of a vector. Its values are not read.
      steps: k products, k <= N. key: draws the first vector.

    Raises:
      ValueError: if k exceeds N. TypeError: if `like` has a leaf that is not a float tensor, or `product` returns
        another form.

    Law: for a symmetric matrix, each value is within its error of an eigenvalue, and with k = N all are found.

    Cost: k products, and the k vectors in memory: 2 k² N multiplications keep them orthogonal.

    Example:
      >>> import torch, funcrec as fr
      >>> found = fr.lanczos(lambda v: torch.tensor([1.0, 2.0, 10.0]) * v, torch.zeros(3), steps=3, key=fr.key(0))
      >>> found.values.round(decimals=3)
      tensor([ 1.,  2., 10.])

    Source: Lanczos (1950), with full reorthogonalisation: Golub and Van Loan, "Matrix Computations", section 10.3.
    """
    call = "funcrec.lanczos"
    check(call, like_problems("like", like))
    flat, tree = flattened(like)
    check(call, size_problems(flat.shape[0], steps))
    basis, diagonal, beside = [], [], []
    next_one, scale = random.normal(key, flat.shape).to(flat), flat.new_zeros(())
    for i in range(steps):
        basis.append(unit(orthogonal(next_one, basis)))
        w = vector_of(call, product, tree(basis[i]), like)
        diagonal.append(basis[i] @ w)
        w = orthogonal(w, basis)
        norm = length(w)
        scale = torch.maximum(scale, torch.maximum(diagonal[i].abs(), norm))
        is_broken = norm <= BROKEN * torch.finfo(flat.dtype).eps * scale
        beside.append(torch.where(is_broken, 0, norm))
        next_one = torch.where(is_broken, random.normal(fold_in(key, i + 1), flat.shape).to(flat), w)
    t = torch.diag_embed(torch.stack(diagonal))
    if steps > 1:
        off = torch.diag_embed(torch.stack(beside[:-1]), offset=1)
        t = t + off + off.mT
    values, ways = torch.linalg.eigh(t)
    vectors = ways.mT @ torch.stack(basis)
    return Spectrum(values, (beside[-1] * ways[-1]).abs(), torch.func.vmap(tree)(vectors))


@typed
def conjugate_gradient(
    product: Callable[..., Any], b: Any, *, steps: Count, damping: NotNegative | Scalar = 0.0
) -> Solution:
    """Return x that solves (A + damping · I) x = b, for a symmetric A without negative eigenvalues, and the residual.

    Args:
      product: (vector) -> A times the vector, such as a product with a Gauss-Newton matrix.
      b: f[N], or another tree of floats. steps: the most products; after an exact solution the rest change nothing.
      damping: a number >= 0, or f[], whose value is not checked.

    Returns:
      Solution(x, a tree like `b`, and residual, the norm of b - (A + damping · I) x).

    Raises:
      TypeError: if `b` has a leaf that is not a float tensor, or `product` returns another form.

    Law: with as many steps as elements, it is `torch.linalg.solve` within rounding. All operations have derivatives.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.conjugate_gradient(lambda v: torch.tensor([2.0, 4.0]) * v, torch.tensor([2.0, 2.0]), steps=2).x
      tensor([1.0000, 0.5000])
      >>> fr.conjugate_gradient(lambda v: v, torch.ones(1), steps=1, damping=torch.tensor(3.0)).x
      tensor([0.2500])

    Source: Hestenes and Stiefel (1952); jax.scipy.sparse.linalg.cg.
    """
    call = "funcrec.conjugate_gradient"
    check(call, like_problems("b", b))
    flat, tree = flattened(b)
    multiply = lambda v: vector_of(call, product, tree(v), b) + damping * v
    scale = scale_of(flat)  # x(b) = scale · x(b / scale)
    x, rest = torch.zeros_like(flat), flat / scale
    way, square = rest, rest @ rest
    for _ in range(steps):
        a = multiply(way)
        step = ratio(square, way @ a)
        x = x + step * way
        rest = rest - step * a
        new = rest @ rest
        way, square = rest + ratio(new, square) * way, new
    return Solution(tree(x * scale), rest.norm() * scale)


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b, and 0 where b is 0; its derivative is finite there."""
    is_zero = b == 0
    return torch.where(is_zero, 0, a / torch.where(is_zero, 1, b))


def scale_of(v: Tensor) -> Tensor:
    """Return a power of two near the greatest element, f[]: squares of v / scale neither overflow nor vanish."""
    most = v.abs().amax().clamp(min=torch.finfo(v.dtype).tiny)
    return torch.exp2(torch.log2(most).floor())


def length(v: Tensor) -> Tensor:
    scale = scale_of(v)
    return (v / scale).norm() * scale


def unit(v: Tensor) -> Tensor:
    v = v / scale_of(v)
    return v / v.norm()


def orthogonal(v: Tensor, basis: list[Tensor]) -> Tensor:
    """Return v without its parts along the orthonormal vectors; the second pass removes the rounding of the first."""
    if not basis:
        return v
    q = torch.stack(basis)
    for _ in range(2):
        v = v - q.mT @ (q @ v)
    return v


def flattened(tree: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return the elements of a tree as one vector f[N], f32 or f64, and the function that makes a vector a tree."""
    leaves, structure = tree_flatten(tree)
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in leaves) else torch.float32
    sizes = [x.numel() for x in leaves]

    def back(v: Tensor) -> Any:
        parts = zip(v.split(sizes), leaves, strict=True)
        return tree_unflatten([part.reshape(x.shape).to(x.dtype) for part, x in parts], structure)

    return torch.cat([x.flatten().to(dtype) for x in leaves]), back


def vector_of(call: str, product: Callable, vector: Any, like: Any) -> Tensor:
    """Return the product with a vector as one vector. Raise if its form is not that of `like`."""
    with own_errors(call, product, vector, need="a vector like its argument"):
        made = product(vector)
    (leaves, structure), (need, form) = tree_flatten(made), tree_flatten(like)
    is_like = structure == form and all(
        isinstance(x, Tensor) and x.shape == y.shape for x, y in zip(leaves, need, strict=True)
    )
    if not is_like:
        got, needed = f"{[describe(x) for x in leaves]} in {structure}", f"{[describe(x) for x in need]} in {form}"
        fail(call, "`product` returned another form than its vector.", got=got, need=needed, kind=TypeError)
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in need) else torch.float32
    return torch.cat([x.flatten().to(dtype) for x in leaves])


# -- validators --------------------------------------------------------------------------------------------------


def like_problems(name: str, tree: Any) -> Iterator[Problem]:
    yield from float_leaf_problems(f"`{name}{{}}` is not a part of a vector.", tree, "a tree of float tensors alone")
    if not any(isinstance(x, Tensor) and x.numel() for x in tree_flatten(tree)[0]):
        yield Problem(f"`{name}` has no elements.", describe(tree), "a tree of float tensors")


def size_problems(n: int, steps: int) -> Iterator[Problem]:
    if steps > n:
        yield Problem("`steps` exceeds the number of elements.", f"{steps}", f"at most {n}")
