"""Dense parameters cut over ranks: each rank keeps an equal part of every leaf and of its optimizer's state.

A rank gathers the whole leaves for one evaluation of the loss.

    whole = all_gather(parts)        d_part[r] = Σ_s d_whole[s][part r], in the order of the ranks s
    part' = update(d_part, part)

Shapes: n ranks on the axes, N elements of a leaf, C = ceil(N / n) elements on a rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.utils._pytree as torch_tree
from torch import Tensor

from funcrec.core import (
    Movable,
    Problem,
    fail,
    float_leaf_problems,
    in_parts,
    paths,
    pytree,
    ravel,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
    value_below,
)
from funcrec.mesh import (
    Mesh,
    P,
    added,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    coordinates,
    gather_as_one,
    rank_at,
    shard,
    unshard,
)
from funcrec.optim import DenseOptimizer

PROBE = ((0, 1e-3), (1, 1e3), (10**6, 1e-3), (10**6 + 1, 1e3))  # (step, size of the step's gradients)


@pytree(static=("shape", "axes"))
class DenseShard(Movable):
    """A dense parameter, cut over the ranks of `axes`; `train_step(dense_axes=...)` keeps these in `state.dense`.

    Args:
      flat: f[C], the rank's elements, in the order of the whole, padded with zeros. On an emulated mesh f[n · C],
        the elements of all ranks. In an optimizer's state it is a dict of such tensors and of counters i[] or f[].
      shape: the shape of the whole parameter.
      axes: axes of the mesh; the first axis is the major one.

    Example:
      >>> import torch, funcrec as fr
      >>> mesh, plan = fr.Mesh.emulated(data=2), fr.Plan({})
      >>> opts = {"sparse": fr.optim.sgd(0.1), "dense": fr.optim.dense(torch.optim.Adam, lr=0.1)}
      >>> step = fr.train_step(lambda params, batch: params.dense.sum(), **opts, mesh=mesh, plan=plan,
      ...     dense_axes=("data",))
      >>> state = step.init(fr.Params({}, torch.ones(3)))
      >>> state.dense
      DenseShard(flat=tensor([1., 1., 1., 0.]), shape=(3,), axes=('data',))
      >>> fr.gather_state(state, mesh).dense
      tensor([1., 1., 1.])

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
      Trillion Parameter Models", SC 2020 (its third stage).
    """

    flat: Any
    shape: tuple[int, ...]
    axes: tuple[str, ...]


def is_shard(x: Any) -> bool:
    return isinstance(x, DenseShard)


def map_shards(fn, tree: Any) -> Any:
    """Return the tree with fn applied to every DenseShard. Other leaves stay."""
    return torch_tree.tree_map(lambda x: fn(x) if is_shard(x) else x, tree, is_leaf=is_shard)


def cut_dense(tree: Any, mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """Return the tree with a DenseShard of this process's ranks for every leaf. A leaf without a dimension stays."""
    n, spec = prod(mesh.shape[a] for a in axes), P(axes)
    cut = lambda x: DenseShard(shard(in_parts(x, n).flatten(), spec, mesh=mesh).clone(), tuple(x.shape), axes)
    return tree_map(lambda x: cut(x) if x.dim() else x, tree)


def cut_state(opt_state: Any, whole: Any, mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """Return a dense optimizer's state, cut as `cut_dense` cuts the parameters `whole`.

    The state has a dict of tensors for each leaf of `whole`. Counters stay whole.
    """
    leaves, structure = tree_flatten(whole)
    out = []
    for x, own in zip(leaves, structure.flatten_up_to(opt_state), strict=True):
        cut = {k: cut_dense(s, mesh, axes).flat if s.dim() else s for k, s in own.items()}
        out.append(DenseShard(cut, tuple(x.shape), axes) if x.dim() else own)
    return tree_unflatten(out, structure)


def join_dense(tree: Any, mesh: Mesh) -> Any:
    """Return the tree on every rank with the whole leaf for every DenseShard, outside a mapped function.

    In an optimizer's state it joins every tensor of the dict of a shard.
    """

    def join(x: DenseShard) -> Any:
        whole = lambda flat: _whole(unshard(flat, P(x.axes), mesh=mesh), x.shape) if flat.dim() else flat
        return tree_map(whole, x.flat)

    return map_shards(join, tree)


def dense_specs(tree: Any) -> Any:
    """Return a P for each leaf, for `shard_map`. The axes of a shard cut its tensors, and other leaves are whole."""
    cut = lambda x: tree_map(lambda t: P(x.axes) if t.dim() else P(), x)
    if not any(map(is_shard, torch_tree.tree_leaves(tree, is_leaf=is_shard))):
        return P()
    return torch_tree.tree_map(lambda x: cut(x) if is_shard(x) else P(), tree, is_leaf=is_shard)


def gather_dense(tree: Any) -> Any:
    """Return the tree with the whole leaf for every DenseShard, inside a mapped function.

    There every rank has its part. All leaves of a dtype travel together.
    """
    leaves, structure = torch_tree.tree_flatten(tree, is_leaf=is_shard)
    cut = [x for x in leaves if is_shard(x)]
    parts = iter(gather_as_one([x.flat for x in cut], cut[0].axes) if cut else ())
    return tree_unflatten([_whole(next(parts).flatten(), x.shape) if is_shard(x) else x for x in leaves], structure)


def own_dense(whole: Any, like: Any) -> Any:
    """Return this rank's parts of the result of `merge`, a tree of whole leaves, inside a mapped function.

    `like` is the tree of shards from which the whole leaves were gathered.
    """
    leaves, structure = torch_tree.tree_flatten(like, is_leaf=is_shard)
    try:
        found = structure.flatten_up_to(whole)
    except ValueError:
        got, need, hint = f"{tree_structure(whole)}", f"{structure}, as it was given", "{**dense, ...}"
        fail("funcrec.train_step", "`merge` gives another tree than it takes.", got=got, need=need, hint=hint)
    out = []
    for x, held in zip(found, leaves, strict=True):
        if is_shard(held):
            # The rank is a tensor: an int would be read on the host, and the graphs of the ranks would differ.
            own = in_parts(x, axis_size(held.axes)).index_select(0, axis_index(held.axes)[None])[0]
            x = DenseShard(own, held.shape, held.axes)
        out.append(x)
    return tree_unflatten(out, structure)


def whole_leaves(grads: Any, like: Any) -> list[Tensor]:
    """Return the gradients of the leaves that are not cut, in order."""
    held = torch_tree.tree_leaves(like, is_leaf=is_shard)
    return [g for g, x in zip(tree_leaves(grads), held, strict=True) if not is_shard(x)]


def dense_terms(grads: Any) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Return (gradient, the mesh axes whose ranks hold other parts of it) for each dense parameter."""
    held = torch_tree.tree_leaves(grads, is_leaf=is_shard)
    return [(x.flat, x.axes) if is_shard(x) else (x, ()) for x in held]


def sum_dense(grads: Any, summed: Sequence[Tensor], like: Any, sizes: Mapping[str, int]) -> Any:
    """Return the sum over all ranks of every leaf's gradient, added in the order of the ranks.

    For a leaf that is cut, it is this rank's part of the sum.

    summed: the sums for the leaves that are not cut.
    """
    held, structure = torch_tree.tree_flatten(like, is_leaf=is_shard)
    cut = [(g, x) for g, x in zip(tree_leaves(grads), held, strict=True) if is_shard(x)]
    parts, rest = iter(sum_to_parts([g for g, _ in cut], [x for _, x in cut], sizes)), iter(summed)
    return tree_unflatten([next(parts) if is_shard(x) else next(rest) for x in held], structure)


def sum_to_parts(leaves: Sequence[Tensor], held: Sequence[DenseShard], sizes: Mapping[str, int]) -> list[DenseShard]:
    """Return this rank's part of the sum over all ranks, for every leaf.

    It sends as many bytes as the first half of a ring's all-reduce. Over axes that do not cut the leaves it gathers the
    parts.
    """
    axes = held[0].axes if held else ()
    others = tuple(a for a in sizes if a not in axes)

    def total(blocks: Tensor) -> Tensor:
        # d_part[r] = Σ_s d_whole[s][part r]: part r of every rank's gradient goes to r
        got = all_to_all(blocks, axes)  # [n, C]: one block from each rank s of the cutting axes
        got = all_gather(got, others) if others else got[None]  # [other ranks, n, C]: a block from each rank s
        # The order of the mesh, whichever axes cut, gives the sum the bits of one process.
        return added([got[other, own] for other, own in _in_order(sizes, others, axes)])

    blocks, unravel = ravel([in_parts(x, axis_size(axes)) for x in leaves], lead=1)
    return [DenseShard(x, h.shape, axes) for x, h in zip(unravel(list(map(total, blocks))), held, strict=True)]


def _in_order(sizes: Mapping[str, int], *groups: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yield the place of each rank of the mesh, in order, on each group of axes."""
    for rank in range(prod(sizes.values())):
        where = coordinates(rank, list(sizes), sizes)
        yield tuple(rank_at(where, group, sizes) for group in groups)


def _whole(flat: Tensor, shape: Sequence[int]) -> Tensor:
    return flat[: prod(shape)].reshape(shape)


# -- validators --------------------------------------------------------------------------------------------------


def dense_axes_problems(mesh: Any, axes: Any, dense: DenseOptimizer | None = None) -> Iterator[Problem]:
    """Report axes that the mesh lacks, and an optimizer that does not treat every element on its own."""
    if not axes:
        return
    if not isinstance(mesh, Mesh):
        yield Problem("`dense_axes` require `mesh`.", "no `mesh`", "mesh=... and plan=..., or dense_axes=()")
    elif [a for a in axes if a not in mesh.axis_names] or len(set(axes)) < len(axes):
        need = f"some of {list(mesh.axis_names)}, each once"
        yield Problem("`dense_axes` are not the mesh's.", f"{tuple(axes)}", need)
    elif isinstance(dense, DenseOptimizer):
        try:
            reason = "" if is_elementwise(dense) else "parts that move otherwise than the whole"
        except (TypeError, ValueError) as error:  # such as Muon, which takes matrices only
            reason = str(error).splitlines()[0]
        if reason:
            need, hint = "one that has the same answer for every cut", "dense_axes=(), or torch.optim.Adam"
            yield Problem("`dense` does not update each element on its own.", reason, need, hint)


def leaf_problems(dense: Any, state: Any) -> Iterator[Problem]:
    """Report leaves to cut that are not float tensors, or have no dict of tensors in the optimizer's state."""
    hint = "the `dense` and `dense_opt` of one state: step.init(params)"
    yield from float_leaf_problems("`state.dense{}` cannot be cut.", dense, hint)
    try:
        held = tree_structure(dense).flatten_up_to(state)
        fits = all(isinstance(x, Mapping) and all(isinstance(s, Tensor) for s in x.values()) for x in held)
    except ValueError:
        fits = False
    if not fits:
        got, need = (f"{[p for p, _ in paths(x)]}" for x in (state, dense))
        what = "`state.dense_opt` has other parameters."
        yield Problem(what, f"leaves {got}", f"a dict of tensors at each of {need}", hint)


def is_elementwise(dense: DenseOptimizer) -> bool:
    """Return whether steps with a tensor give the same numbers as steps with its two halves.

    It tries early and late steps, with small and large gradients. A combinator does if its parts do.
    """
    if dense.parts or dense.is_joint:
        return not dense.is_joint and all(map(is_elementwise, dense.parts))
    x, g = torch.linspace(-1, 2, 6), torch.linspace(3, -2, 6)
    whole, first, last = (_moved(dense, x[at], g[at]) for at in (slice(0, 6), slice(0, 3), slice(3, 6)))
    differ = (whole - torch.cat([first, last])).abs() > 1e-4 * (whole - x).abs().max()
    return not bool(value_below(differ).any())


def _moved(dense: DenseOptimizer, x: Tensor, g: Tensor) -> Tensor:
    params, state = [x], dense.init([x])
    for step, size in PROBE:
        params, state = dense.update([g * size], state, params, step)
    return params[0]
