"""Collectives over a named axis: ranks exchange values through functions that have derivatives.

    psum(x)[r] = Σ_s x[s]      all_gather(x)[r] = (x[0], ..., x[n-1])      all_to_all(x)[r] = (x[0][r], ..., x[n-1][r])

Call them inside `shard_map`, which binds the axes. All of them take trees. A tuple of axis names stands for the ranks
of several axes; the first axis is the major one.
Shapes: n ranks on the axis; x[r] is what rank r passes.
"""

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, paths, tree_flatten, tree_map, tree_unflatten, typed
from funcrec.mesh._axes import Axis, AxisName, bound_axes, bound_axis, rank_at
from funcrec.mesh._exchange import exchange, extremum

T = TypeVar("T")  # a pytree of tensors


def psum(x: T, axis_name: AxisName) -> T:
    """Return on each rank the sum over the ranks of an axis.

    Its gradient is that of jax.lax.psum in pmap and vmap, and with check_vma=False. By default (check_vma=True), the
    gradient in jax.shard_map is that of `psum_invariant`: use it if all ranks compute the same loss from the sum, and
    the loss counts once. The transpose of psum is psum: each rank got the sum, so it adds the cotangents of all ranks.

    psum(x)[r] = Σ_s x[s]. One sender's x goes into every rank's sum. One receiver gets the sum of all.

    Inside of `invariant`, floats are added as a tree of neighbours, in the order of the ranks.

    Args:
      x: a tree of tensors, of one shape on all ranks. Bools are counted in i64. A Python number is taken to be equal on
        all ranks: its sum is the number n · x, and no rank sends anything.
      axis_name: a name, or a tuple of names for the ranks of all these axes.

    Shapes: x [...] -> [...].

    Example: two ranks that hold 1 and 2.
      >>> import torch, funcrec as fr
      >>> mesh = fr.Mesh.emulated(data=2)
      >>> f = fr.shard_map(lambda x: fr.psum(x, "data"), mesh=mesh, in_specs=fr.P("data"), out_specs=fr.P())
      >>> f(torch.tensor([1.0, 2.0]))
      tensor([3.])

    Source: jax.lax.psum.
    """
    return _reduce("psum", x, axis_name)


def psum_invariant(x: T, axis_name: AxisName) -> T:
    """Return the sum over the ranks of an axis as a value that counts once, however many ranks read it.

    Its transpose is `pvary`, which gives each rank its own cotangent. The values are those of `psum`.
    Use it for a loss that every rank computes alike from the sum: d/dx[r] L(psum_invariant(x)) = L'(Σ x), not n · L'(Σ
    x).

    Shapes: x [...] -> [...].

    Example: the gradient of (x[0] + x[1])², by `psum_invariant` and by `psum`.
      >>> import torch, funcrec as fr
      >>> mesh, x = fr.Mesh.emulated(data=2), torch.tensor([1.0, 2.0])
      >>> by = lambda total: torch.func.grad(lambda x: total(x, "data").square().sum())
      >>> [fr.shard_map(by(f), mesh=mesh, in_specs=fr.P("data"), out_specs=fr.P("data"))(x) for f in (fr.psum_invariant,
      ...     fr.psum)]
      [tensor([6., 6.]), tensor([12., 12.])]

    Source: jax.lax.psum under check_vma; Megatron-LM's reduce_from_model_parallel_region.
    """
    return _reduce("psum_invariant", x, axis_name)


def pvary(x: T, axis_name: AxisName) -> T:
    """Return x as a value that each rank uses as its own copy.

    `pvary` and `psum_invariant` are each other's transposes.
    Use it inside a differentiated function, for a parameter that is equal on all ranks and that each rank applies to
    its data.

    Shapes: x [...] -> [...].

    Example: d/dw Σ_r w · x[r].
      >>> import torch, funcrec as fr
      >>> loss = lambda w, x: fr.psum_invariant((fr.pvary(w, "data") * x).sum(), "data")
      >>> f = fr.shard_map(torch.func.grad(loss), mesh=fr.Mesh.emulated(data=2), in_specs=(fr.P(), fr.P("data")),
      ...     out_specs=fr.P())
      >>> f(torch.tensor(1.0), torch.tensor([1.0, 2.0]))
      tensor(3.)

    Source: jax.lax.pvary.
    """
    axes = _prepare("pvary", x, axis_name)
    for a in axes:
        x = exchange("pvary", x, a)
    return x


def pmean(x: T, axis_name: AxisName) -> T:
    """Return on each rank the mean over the ranks of an axis, psum(x) / n.

    Its transpose is pmean. The mean of integers and bools is in torch's default dtype of floats, from a sum in i64,
    which is exact below 2⁶³. A Python number is taken to be equal on all ranks.

    Shapes: x [...] -> [...].

    Example: two ranks that hold 1 and 2.
      >>> import torch, funcrec as fr
      >>> f = fr.shard_map(lambda x: fr.pmean(x, "data"), mesh=fr.Mesh.emulated(data=2), in_specs=fr.P("data"),
      ...     out_specs=fr.P())
      >>> f(torch.tensor([1.0, 2.0]))
      tensor([1.5000])

    Source: jax.lax.pmean.
    """
    axes = _prepare("pmean", x, axis_name, numbers=True)
    n, is_exact = prod(a.size for a in axes), lambda y: not (y.is_floating_point() or y.is_complex())
    total = _over(axes, x, lambda t, a: exchange("psum", t, a), lambda y: y.long() if is_exact(y) else y)
    leaves, structure = tree_flatten(total)
    return tree_unflatten([y / n if isinstance(y, Tensor) else float(y) for y in leaves], structure)


def _reduce(kind: str, x: T, axis_name: AxisName) -> T:
    axes = _prepare(kind, x, axis_name, numbers=True)
    total = _over(axes, x, lambda t, a: exchange(kind, t, a), lambda y: y.long() if y.dtype == torch.bool else y)
    leaves, structure = tree_flatten(total)
    n = prod(a.size for a in axes)
    return tree_unflatten([y if isinstance(y, Tensor) else n * y for y in leaves], structure)


def _over(axes: Sequence[Axis], x: T, reduce: Callable, prepared: Callable[[Tensor], Tensor] = lambda y: y) -> T:
    """Return the tree with its tensors reduced over the axes, one after the other. Python's numbers stay."""
    leaves, structure = tree_flatten(x)
    tensors = [prepared(y) for y in leaves if isinstance(y, Tensor)]
    for a in reversed(axes) if tensors else ():  # neighbours first: the ranks of the last axis
        tensors = reduce(tensors, a)
    made = iter(tensors)
    return tree_unflatten([next(made) if isinstance(y, Tensor) else y for y in leaves], structure)


def pmax(x: T, axis_name: AxisName) -> T:
    """Return on each rank the maximum over the ranks, element by element.

    Ranks that tie share the derivative of the maximum.

    Shapes: x [...] -> [...].

    Example: two ranks that hold [1, 5] and [3, 2].
      >>> import torch, funcrec as fr
      >>> f = fr.shard_map(lambda x: fr.pmax(x, "data"), mesh=fr.Mesh.emulated(data=2), in_specs=fr.P("data"),
      ...     out_specs=fr.P())
      >>> f(torch.tensor([[1.0, 5.0], [3.0, 2.0]]))
      tensor([[3., 5.]])

    Source: jax.lax.pmax.
    """
    return _over(_prepare("pmax", x, axis_name, numbers=True), x, functools.partial(extremum, "max"))


def pmin(x: T, axis_name: AxisName) -> T:
    """Return on each rank the minimum over the ranks, element by element.

    Ranks that tie share the derivative of the minimum.

    Shapes: x [...] -> [...].

    Example: two ranks that hold [1, 5] and [3, 2].
      >>> import torch, funcrec as fr
      >>> f = fr.shard_map(lambda x: fr.pmin(x, "data"), mesh=fr.Mesh.emulated(data=2), in_specs=fr.P("data"),
      ...     out_specs=fr.P())
      >>> f(torch.tensor([[1.0, 5.0], [3.0, 2.0]]))
      tensor([[1., 2.]])

    Source: jax.lax.pmin.
    """
    return _over(_prepare("pmin", x, axis_name, numbers=True), x, functools.partial(extremum, "min"))


@typed
def all_gather(x: T, axis_name: AxisName, *, dim: int = 0, tiled: bool = False) -> T:
    """Return on each rank the values of all ranks, in the order of the axis.

    Sender r's x becomes element r of every rank's result. One receiver gets n values, stacked along a new dimension
    `dim`, or, with `tiled`, joined along the existing dimension `dim`. Its transpose is `psum_scatter`.

    Shapes along dim 0: x [K, ...] -> [n, K, ...], or [n · K, ...] with `tiled`.

    Example: two ranks that hold [1] and [2].
      >>> import torch, funcrec as fr
      >>> f = fr.shard_map(lambda x: fr.all_gather(x, "data", tiled=True), mesh=fr.Mesh.emulated(data=2),
      ...                  in_specs=fr.P("data"), out_specs=fr.P())
      >>> f(torch.tensor([1.0, 2.0]))
      tensor([1., 2.])

    Source: jax.lax.all_gather.
    """
    axes = _prepare("all_gather", x, axis_name)
    check("funcrec.all_gather", dim_problems(x, dim, extra=0 if tiled else 1))
    for a in reversed(axes):  # each step puts its ranks in front, so the major axis comes last
        x = exchange("all_gather", x, a)
    leaves, structure = tree_flatten(x)
    return tree_unflatten([_join(y.flatten(0, len(axes) - 1), dim, tiled) for y in leaves], structure)


def _join(x: Tensor, dim: int, tiled: bool) -> Tensor:
    """Return x with the first dimension of [n, ...] moved to `dim`.

    With `tiled` that dimension is merged with the dimension at `dim`.
    """
    if not tiled:
        return x.movedim(0, dim)
    dim = dim % (x.dim() - 1)
    return x.movedim(0, dim).flatten(dim, dim + 1)


def _cut(x: Tensor, dim: int, n: int, tiled: bool) -> Tensor:
    """Return x cut into [n, ...]: the inverse of `_join`."""
    if not tiled:
        return x.movedim(dim, 0)
    dim = dim % x.dim()
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


@typed
def psum_scatter(x: T, axis_name: AxisName, *, dim: int = 0, tiled: bool = False) -> T:
    """Return on each rank the rank's own part of the sum over the ranks: psum_scatter(x)[r] = Σ_s x[s][r].

    One sender's x has n parts along `dim`. Part r goes into rank r's sum. The size of `dim` is n, and the result lacks
    this dimension. With `tiled` the size is a multiple of n, and the dimension is cut. The transpose is `all_gather`.

    Shapes along dim 0: x [M, ...] -> [...], or [K, ...] with `tiled`, where M = n · K.

    Example: two ranks that hold [1, 2] and [10, 20].
      >>> import torch, funcrec as fr
      >>> f = fr.shard_map(lambda x: fr.psum_scatter(x[0], "data", tiled=True), mesh=fr.Mesh.emulated(data=2),
      ...                  in_specs=fr.P("data"), out_specs=fr.P("data"))
      >>> f(torch.tensor([[1.0, 2.0], [10.0, 20.0]]))
      tensor([11., 22.])

    Source: jax.lax.psum_scatter.
    """
    axes = _prepare("psum_scatter", x, axis_name)
    sizes = [a.size for a in axes]
    n = prod(sizes)
    check("funcrec.psum_scatter", part_problems(x, dim, n, tiled))
    leaves, structure = tree_flatten(x)
    x = tree_unflatten([_cut(y, dim, n, tiled).unflatten(0, sizes) for y in leaves], structure)
    for i, a in reversed([*enumerate(axes)]):  # [n_1, n_2, ...]: each rank keeps its own place of a dimension
        x = exchange("psum_scatter", tree_map(lambda y: y.movedim(i, 0), x), a)  # noqa: B023
    return x


@typed
def all_to_all(
    x: T, axis_name: AxisName, *, split_dim: int = 0, concat_dim: int | None = None, tiled: bool = False
) -> T:
    """Return on each rank the parts that all ranks hold for it: all_to_all(x)[r][s] = x[s][r].

    One sender's x has n parts along `split_dim`. Part r goes to rank r. The size of `split_dim` is n; with `tiled` it
    is a multiple of n, and is cut. One receiver places the parts of all senders, in their order, along `concat_dim`
    (default: split_dim). The transpose is an all_to_all again.

    Shapes where `concat_dim` is `split_dim`: x [...] -> [...].

    Example: two ranks that hold [1, 2] and [10, 20].
      >>> import torch, funcrec as fr
      >>> f = fr.shard_map(lambda x: fr.all_to_all(x, "data", tiled=True), mesh=fr.Mesh.emulated(data=2),
      ...                  in_specs=fr.P("data"), out_specs=fr.P("data"))
      >>> f(torch.tensor([1.0, 2.0, 10.0, 20.0]))
      tensor([ 1., 10.,  2., 20.])

    Source: jax.lax.all_to_all.
    """
    axes = _prepare("all_to_all", x, axis_name)
    sizes = [a.size for a in axes]
    n = prod(sizes)
    concat_dim = split_dim if concat_dim is None else concat_dim
    check("funcrec.all_to_all", part_problems(x, split_dim, n, tiled), dim_problems(x, concat_dim, name="concat_dim"))
    leaves, structure = tree_flatten(x)
    parts = [_cut(y, split_dim, n, tiled).unflatten(0, sizes) for y in leaves]
    for i, a in enumerate(axes):  # to transpose (i, j) with (i', j'), transpose i with i', then j with j'
        moved = tree_unflatten([p.movedim(i, 0) for p in parts], structure)
        parts = [p.movedim(0, i) for p in tree_flatten(exchange("all_to_all", moved, a))[0]]
    out = [_join(p.flatten(0, len(axes) - 1), concat_dim, tiled) for p in parts]
    return tree_unflatten(out, structure)


@typed
def ppermute(x: T, axis_name: AxisName, perm: Sequence[Sequence[int]]) -> T:
    """Return on each destination rank the x of its source rank.

    For (source, destination) in `perm`, ppermute(x)[destination] = x[source].

    A rank that is not a destination gets zeros. One sender sends to one destination at most. One receiver gets from one
    source at most. The transpose permutes back.

    Shapes: x [...] -> [...].

    Example: two ranks that hold 1 and 2.
      >>> import torch, funcrec as fr
      >>> f = fr.shard_map(lambda x: fr.ppermute(x, "data", [(0, 1)]), mesh=fr.Mesh.emulated(data=2),
      ...                  in_specs=fr.P("data"), out_specs=fr.P("data"))
      >>> f(torch.tensor([1.0, 2.0]))
      tensor([0., 1.])

    Source: jax.lax.ppermute.
    """
    axis = bound_axis("funcrec.ppermute", axis_name)
    check("funcrec.ppermute", leaf_problems(x, "ppermute"), permutation_problems(perm, axis.size))
    return exchange("ppermute", x, axis, tuple((int(s), int(d)) for s, d in perm))


def axis_index(axis_name: AxisName) -> Tensor:
    """Return this rank's place on the axis -> i64[].

    For several axes it is the place among the ranks of these axes. The first axis is the major one.

    Example:
      >>> import funcrec as fr
      >>> fr.shard_map(lambda: fr.axis_index("data")[None], mesh=fr.Mesh.emulated(data=3), in_specs=(),
      ...     out_specs=fr.P("data"))()
      tensor([0, 1, 2])

    Source: jax.lax.axis_index.
    """
    axes = {a.name: a for a in bound_axes("funcrec.axis_index", axis_name)}
    return rank_at({n: a.marker for n, a in axes.items()}, list(axes), {n: a.size for n, a in axes.items()})


def axis_size(axis_name: AxisName) -> int:
    """Return the number of ranks on the axis, or on all axes of a tuple.

    Example:
      >>> import torch, funcrec as fr
      >>> f = lambda x: x * fr.axis_size("data")
      >>> fr.shard_map(f, mesh=fr.Mesh.emulated(data=2), in_specs=fr.P("data"), out_specs=fr.P("data"))(torch.ones(2))
      tensor([2., 2.])

    Source: jax.lax.axis_size.
    """
    return prod([a.size for a in bound_axes("funcrec.axis_size", axis_name)])


# -- validators --------------------------------------------------------------------------------------------------


def _prepare(name: str, x: T, axis_name: AxisName, numbers: bool = False) -> list[Axis]:
    """Return the bound axes, and check the leaves. numbers: whether Python's numbers may be among them."""
    axes = bound_axes(f"funcrec.{name}", axis_name)
    check(f"funcrec.{name}", leaf_problems(x, name, numbers))
    return axes


def leaf_problems(x: T, name: str, numbers: bool = False):
    need = "a tree of tensors and numbers" if numbers else "a tree of tensors"
    for path, leaf in paths(x):
        where = f"`x{path}`" if path.startswith("[") or not path else f"`x.{path}`"
        if numbers and type(leaf) in (bool, int, float):
            continue
        if not isinstance(leaf, Tensor):
            yield Problem(f"{where} is not a tensor.", describe(leaf), need, kind=TypeError)
        elif name == "psum_scatter" and leaf.dtype == torch.bool:
            yield Problem(f"{where} cannot be summed.", describe(leaf), "numbers", "x.long()", TypeError)
        elif name in ("pmax", "pmin") and leaf.is_complex():
            yield Problem(f"{where} has no order.", describe(leaf), "real numbers", "x.abs()", TypeError)


def dim_problems(x: T, dim: int, *, extra: int = 0, name: str = "dim"):
    for path, leaf in paths(x):
        rank = leaf.dim() + extra
        if not -rank <= dim < rank:
            got = f"{dim}; {describe(leaf)}"
            yield Problem(f"`{name}` is not a dimension of `x{path}`.", got, f"{-rank} to {rank - 1}", kind=IndexError)


def part_problems(x: T, dim: int, n: int, tiled: bool):
    found = list(dim_problems(x, dim))
    yield from found
    for path, leaf in paths(x) if not found else ():
        size = leaf.shape[dim]
        if size % n if tiled else size != n:
            need = f"a multiple of {n}, the number of ranks" if tiled else f"{n}, the number of ranks"
            hint = "" if tiled else "tiled=True"
            yield Problem(f"dimension {dim} of `x{path}` is not cut by the axis.", describe(leaf), need, hint)


def permutation_problems(perm: Sequence, n: int):
    pairs = list(perm)
    if any(len(p) != 2 for p in pairs):
        yield Problem("`perm` is not a list of pairs.", f"{pairs}", "(source, destination) pairs", kind=TypeError)
        return
    if any(not 0 <= r < n for p in pairs for r in p):
        yield Problem("`perm` names a rank that does not exist.", f"{pairs}", f"0 to {n - 1}")
    for side, what in enumerate(("sends", "receives")):
        ranks = [p[side] for p in pairs]
        if len(set(ranks)) < len(ranks):
            yield Problem(f"a rank {what} twice in `perm`.", f"{pairs}", "each at most once")
