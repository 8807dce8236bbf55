"""Gathers the gradients of the global batch: every copy of a row gets the terms of all ranks.

    grads[copy] = (terms of rank 0, ..., terms of rank n-1)

Shapes: n ranks on some axes.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from funcrec.core import is_by_tree, replace, tree_leaves, tree_map
from funcrec.mesh import coordinates, gather_each, rank_at
from funcrec.sharding.placement._layout import Bank, Layout
from funcrec.tables import Bags, Entries, RowGrads


def gather_terms(
    grads: Mapping[str, RowGrads], layout: Layout, told: Sequence[Tensor] = (), micro_batches: int = 1
) -> tuple[dict[str, RowGrads], list[tuple[Tensor, ...]]]:
    """Return each bank's gradient with the terms of all ranks that hold a copy of the bank.

    The terms stand in the order of the global batch. The second value has, for each tensor of `told`, this tensor of
    every rank of the mesh, from the same exchange. Each copy that trains apart gets only the terms of its own group.

    micro_batches: the number of parts of a rank's batch, each of which has terms for a lookup.
    """
    own = [b for b in layout.banks if b.name in grads]
    everywhere = tuple(a for a, _ in layout.mesh_shape)
    wanted: dict[tuple[str, ...], list[Tensor]] = {everywhere: list(told)}
    for b in own:
        axes, terms = copy_axes(b, layout), grads[b.name].terms
        # Without axes only one rank holds the row. All terms of the row came to that rank through the lookup's
        # transpose.
        wanted.setdefault(axes, []).extend(tree_leaves(terms) if axes and grads[b.name].capacity else ())
    narrow = narrow_bounds(t for b in own for t in grads[b.name].terms)
    gathered = {axes: gather_each(xs, axes, narrow) for axes, xs in wanted.items() if xs}
    of_all = lambda b: _of_all(grads[b.name], b, layout, gathered.get(copy_axes(b, layout), {}), micro_batches)
    synced = {b.name: of_all(b) for b in own}
    return synced, [gathered[everywhere][id(x)] for x in told]


def copy_axes(bank: Bank, layout: Layout) -> tuple[str, ...]:
    """Return the axes along which all ranks hold the same copy of a bank's rows."""
    return tuple(a for a, _ in layout.mesh_shape if a not in bank.axes and a not in layout.replicas)


def narrow_bounds(terms: Iterable[Entries | Bags]) -> dict[int, Tensor]:
    """Return {id of offsets: the offsets as i32}, for bags of fewer than 2^31 ids with i32 rows."""
    bags = [t for t in terms if isinstance(t, Bags) and t.rows.dtype == torch.int32]
    apart = {id(t.offsets): t.offsets for t in bags if t.rows.shape[0] <= torch.iinfo(torch.int32).max}
    return {i: x.int() for i, x in apart.items()}


def _of_all(
    grads: RowGrads, bank: Bank, layout: Layout, gathered: Mapping[int, tuple[Tensor, ...]], micro_batches: int
) -> RowGrads:
    """Return a bank's gradient with the gathered terms of all copies.

    The terms stand in the order of the ranks that have the bags. That is the order of the mesh, in whatever order a
    placement names its axes: so the sum of a row has the bits of one process. Inside of `invariant` they stand lookup
    by lookup and feature by feature, and in that order within a feature.
    """
    names, sizes = [a for a, _ in layout.mesh_shape], dict(layout.mesh_shape)
    others = copy_axes(bank, layout)
    if grads.capacity == 0:
        return grads
    placed = []
    for i, t in enumerate(grads.terms):  # each lookup has one term for every sender on the bank's axes
        for copy in range(prod(sizes[a] for a in others)):
            sender = coordinates(i % bank.num_ranks, bank.axes, sizes) | coordinates(copy, others, sizes)
            rank = rank_at(dict.fromkeys(names, 0) | sender, names, sizes)
            feature = i // (bank.num_ranks * micro_batches) if is_by_tree() else 0
            placed.append((feature, rank, i, tree_map(lambda x, c=copy: gathered[id(x)][c], t) if others else t))
    placed.sort(key=lambda p: p[:3])
    return replace(grads, terms=tuple(p[3] for p in placed), coalesced=grads.coalesced and not others)
