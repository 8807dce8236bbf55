"""The gradients of the global batch: every copy of a row gets the terms of all ranks.

    grads[copy] = (terms of rank 0, ..., terms of rank n-1)        small tensors of a dtype travel as one

An exchange costs about 0.2 ms on gloo, however small it is. Shapes: n ranks on some axes.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from funcrec.core import replace, tree_leaves, tree_map
from funcrec.mesh import all_gather, axis_size
from funcrec.sharding._layout import Bank, Layout
from funcrec.tables import Bags, Entries, RowGrads

MOST_JOINED = 1 << 16  # bytes of all ranks together, which take less time than an exchange of their own
BITS = {torch.int32: torch.float32, torch.int64: torch.float64}


def sync_grads(
    grads: Mapping[str, RowGrads], layout: Layout, told: Sequence[Tensor] = ()
) -> tuple[dict[str, RowGrads], list[tuple[Tensor, ...]]]:
    """(every bank's gradient with the terms of all ranks that hold a copy of it, in the order of the global batch; each of `told` of all
    ranks of the mesh, which travels along).

    Copies that train apart have each the terms of its own group.
    """
    own = [b for b in layout.banks if b.name in grads]
    everywhere = tuple(a for a, _ in layout.mesh_shape)
    wanted: dict[tuple[str, ...], list[Tensor]] = {everywhere: list(told)}
    for b in own:
        axes, terms = copy_axes(b, layout), grads[b.name].terms
        wanted.setdefault(axes, []).extend(tree_leaves(terms) if axes and grads[b.name].capacity else ())
    narrow = narrow_bounds(t for b in own for t in grads[b.name].terms)
    gathered = {axes: gather_each(xs, axes, narrow) for axes, xs in wanted.items() if xs}
    synced = {b.name: _of_all(grads[b.name], b, layout, gathered.get(copy_axes(b, layout), {})) for b in own}
    return synced, [gathered[everywhere][id(x)] for x in told]


def copy_axes(bank: Bank, layout: Layout) -> tuple[str, ...]:
    """The axes whose ranks hold one and the same copy of a bank's rows."""
    return tuple(a for a, _ in layout.mesh_shape if a not in bank.axes and a not in layout.replicas)


def is_small(xs: Sequence[Tensor], num_ranks: int) -> bool:
    """Whether these are sent together with others of their dtype."""
    return sum(x.nbytes for x in xs) * num_ranks <= MOST_JOINED


def gather_each(
    xs: Sequence[Tensor], axes: tuple[str, ...], narrow: Mapping[int, Tensor]
) -> dict[int, tuple[Tensor, ...]]:
    """{id of x: what each rank of the axes has for it}, of each tensor; narrow: {id of x: what is sent in its place}."""
    n, apart = axis_size(axes), {id(x): x for x in xs}
    sent = {i: narrow.get(i, x) for i, x in apart.items()}
    large = {i: x for i, x in sent.items() if not is_small([x], n)}
    together = by_carrier({i: x for i, x in sent.items() if i not in large})
    joined = [torch.cat([as_bits(x.flatten(), dtype) for x in own.values()]) for dtype, own in together.items()]
    got = [x.unbind(0) for x in all_gather((*large.values(), *joined), axes)]
    of_all = dict(zip(large, got, strict=False))
    for own, whole in zip(together.values(), got[len(large) :], strict=True):
        sizes = [x.numel() for x in own.values()]
        for (i, x), parts in zip(own.items(), zip(*(w.split(sizes) for w in whole), strict=True), strict=True):
            of_all[i] = tuple(as_bits(p, x.dtype).reshape(x.shape) for p in parts)
    return {i: tuple(y.to(apart[i].dtype) for y in ys) for i, ys in of_all.items()}


def as_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x read as another dtype of its size; x itself where it has that dtype, for `view` to a dtype has no derivative."""
    return x if x.dtype == dtype else x.view(dtype)


def by_carrier(xs: Mapping[int, Tensor]) -> dict[torch.dtype, dict[int, Tensor]]:
    """The tensors by the dtype as which they travel: integers as the bits of floats of their size, which have derivatives, if there are some."""
    dtypes, out = {x.dtype for x in xs.values()}, {}
    for i, x in xs.items():
        float_of_size = BITS.get(x.dtype, x.dtype)
        out.setdefault(float_of_size if float_of_size in dtypes else x.dtype, {})[i] = x
    return out


def narrow_bounds(terms: Iterable[Entries | Bags]) -> dict[int, Tensor]:
    """{id of offsets: the same as i32}, of bags of fewer than 2^31 ids whose rows are."""
    bags = [t for t in terms if isinstance(t, Bags) and t.rows.dtype == torch.int32]
    apart = {id(t.offsets): t.offsets for t in bags if t.rows.shape[0] <= torch.iinfo(torch.int32).max}
    return {i: x.int() for i, x in apart.items()}


def _of_all(grads: RowGrads, bank: Bank, layout: Layout, gathered: Mapping[int, tuple[Tensor, ...]]) -> RowGrads:
    """A bank's gradient with the terms of all copies, whose tensors were gathered."""
    names, sizes = [a for a, _ in layout.mesh_shape], dict(layout.mesh_shape)
    others = copy_axes(bank, layout)
    if grads.capacity == 0:
        return grads
    if not others:  # each lookup has one term for every sender
        order = sorted(range(len(grads.terms)), key=lambda i: (i % bank.num_ranks, i))
        return replace(grads, terms=tuple(grads.terms[i] for i in order))
    placed = []
    for i, t in enumerate(grads.terms):
        for copy in range(prod(sizes[a] for a in others)):
            where = {**_coordinates(i % bank.num_ranks, bank.axes, sizes), **_coordinates(copy, others, sizes)}
            rank = 0
            for a in names:
                rank = rank * sizes[a] + where.get(a, 0)
            placed.append((rank, i, tree_map(lambda x, c=copy: gathered[id(x)][c], t)))
    placed.sort(key=lambda p: p[:2])
    return replace(grads, terms=tuple(t for _, _, t in placed), coalesced=False)


def _coordinates(place: int, axes: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    out = {}
    for a in reversed(axes):
        out[a], place = place % sizes[a], place // sizes[a]
    return out
