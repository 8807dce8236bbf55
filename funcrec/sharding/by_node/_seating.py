"""Seating: the node of each tower, and one description of the lookups and interactions that all nodes run.

    place k = a feature of each node's towers, whose rows lie in the same banks        seat s = a tower of each node

All ranks run one program. So node t reads at place k whichever of its features is there, and runs at seat s the
interaction of whichever of its towers is there. To a node, a bank is one table: a row has an address in the banks of
the node's ranks. The ranks of a node then look up addresses as they look up the ids of any sharded table.
Shapes: N nodes, K places.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from funcrec.core import Problem, check
from funcrec.mesh import coordinates, rank_at
from funcrec.sharding._lanes import Lane, most_of
from funcrec.sharding.placement._layout import Bank, Layout, Shard
from funcrec.tables import FeatureConfig

Features = tuple[FeatureConfig, ...]
CALL = "funcrec.towers"


class Seat(NamedTuple):
    """One run of an interaction on every node.

    towers: for each node the number of the tower; -1 for a node without a tower at this seat.
    columns: for each node the columns of the tower's features among those of the places.
    """

    towers: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]


class Seating(NamedTuple):
    """The static description of towers on the nodes of a mesh.

    nodes: for each node the numbers of its towers, in the order in which their outputs travel.
    served: for each node and place the lane that turns ids into addresses, or None.
    slots: the places as features, for the lookup within a node.
    view: the layout of that lookup. Its tables are the places, and its banks lie on the ranks of one node.
    """

    axis: str
    nodes: tuple[tuple[int, ...], ...]
    served: tuple[tuple[Lane | None, ...], ...]
    slots: Features
    view: Layout
    seats: tuple[Seat, ...]

    @property
    def lanes(self) -> list[Lane]:
        """Return the lanes of all nodes, one node after the other."""
        return [x for own in self.served for x in own if x is not None]


@functools.lru_cache(maxsize=64)
def seating_of(layout: Layout, towers: tuple[Features, ...], labels: tuple[int, ...], axis: str) -> Seating:
    """Return the seating. Towers with one label have one interaction, up to its parameters."""
    check(CALL, node_problems(layout, towers, axis))
    num_nodes, where = dict(layout.mesh_shape)[axis], nodes_of(layout, towers, axis)
    # Towers of one label come one after the other on every node, so that they meet at the same seats.
    order = sorted(range(len(towers)), key=lambda i: (labels[i], i))
    nodes = tuple(tuple(i for i in order if where[i] == t) for t in range(num_nodes))
    places, taken = places_of(layout, towers, nodes)
    read = [{k: f for own in of_node.values() for f, k in own} for of_node in taken]
    slots, lanes, shapes, shards = [], [], [], []
    for k, place in enumerate(places):
        own = [x.get(k) for x in read]
        first = next(f for f in own if f is not None)
        most = most_of(f.max_length for f in own if f is not None)
        slots.append(
            FeatureConfig(f"{k}", table=f"{k}", pooling=first.pooling, weighted=first.weighted, max_length=most)
        )
        parts = [ranks_of(layout, [f for f in own if f is not None], j, axis) for j in range(len(place[0]))]
        lanes.append([None if f is None else address_lane(layout, f, parts[0], axis) for f in own])
        rows = len(parts[0]) * layout.banks[place[0][0][0]].rows
        shapes.append((f"{k}", (rows, dict(layout.shapes)[first.table][1])))
        for (bank, a, b), ranks in zip(place[0], parts, strict=True):
            shards.append(Shard(f"{k}", bank, a, b, ranks, layout.banks[bank].rows, (0,) * len(ranks)))
    banks = tuple(of_node(layout, b, axis) for b in layout.banks)
    view = layout._replace(shapes=tuple(shapes), banks=banks, shards=tuple(shards))
    starts = list(accumulate((dim for _, (_, dim) in shapes), initial=0))
    spans = [{i: [range(starts[k], starts[k + 1]) for _, k in own] for i, own in x.items()} for x in taken]
    columns = [{i: tuple(c for span in own for c in span) for i, own in x.items()} for x in spans]
    served = tuple(zip(*lanes, strict=True))
    return Seating(axis, nodes, served, tuple(slots), view, seats_of(nodes, labels, columns))


Place = tuple[tuple[tuple[int, int, int], ...], str, bool]  # ((bank, first, last) of each block), pooling, weighted
Taken = dict[int, list[tuple[FeatureConfig, int]]]  # {tower: (a feature, its place)}


def places_of(
    layout: Layout, towers: Sequence[Features], nodes: Sequence[Sequence[int]]
) -> tuple[list[Place], list[Taken]]:
    """Return (the places, and for each node which places its towers take).

    There are as many places of a kind as the node needs that has most features of that kind.
    """
    places: list[Place] = []
    taken: list[Taken] = []
    for own in nodes:
        free, mine = list(range(len(places))), {}
        for i in own:
            for f in towers[i]:
                shards = (layout.shards[s] for s in layout.shards_of(f.table))
                place = (tuple((s.bank, s.first, s.last) for s in shards), f.pooling, f.weighted)
                k = next((k for k in free if places[k] == place), len(places))
                if k == len(places):
                    places.append(place)
                else:
                    free.remove(k)
                mine.setdefault(i, []).append((f, k))
        taken.append(mine)
    return places, taken


def seats_of(
    nodes: Sequence[Sequence[int]], labels: Sequence[int], columns: Sequence[dict[int, tuple[int, ...]]]
) -> tuple[Seat, ...]:
    """Return for each label as many seats as the node needs that has most towers with the label."""
    seats = []
    for label in sorted(set(labels)):
        own = [[i for i in node if labels[i] == label] for node in nodes]
        for s in range(max(map(len, own))):
            towers = tuple(x[s] if s < len(x) else -1 for x in own)
            width = len(next(c[i] for c, i in zip(columns, towers, strict=True) if i >= 0))
            blank = (0,) * width
            read = tuple(c[i] if i >= 0 else blank for c, i in zip(columns, towers, strict=True))
            seats.append(Seat(towers, read))
    return tuple(seats)


def nodes_of(layout: Layout, towers: Sequence[Features], axis: str) -> list[int]:
    """Return the node of each tower. Towers whose tables lie on every node take the nodes in turn."""
    num_nodes = dict(layout.mesh_shape)[axis]
    found = [{t for f in own for t in nodes_of_table(layout, f.table, axis)} for own in towers]
    return [min(x) if x else i % num_nodes for i, x in enumerate(found)]


def nodes_of_table(layout: Layout, table: str, axis: str) -> set[int]:
    """Return the nodes that hold parts of a table; nothing for a table that lies on every node."""
    sizes, found = dict(layout.mesh_shape), set()
    for s in (layout.shards[i] for i in layout.shards_of(table)):
        axes = layout.banks[s.bank].axes
        found |= {coordinates(r, axes, sizes)[axis] for r in s.ranks} if axis in axes else set()
    return found


def inner_rank(layout: Layout, bank: Bank, rank: int, axis: str) -> int:
    """Return the number of a rank of the bank among the ranks of its node."""
    sizes = dict(layout.mesh_shape)
    return rank_at(coordinates(rank, bank.axes, sizes), [a for a in bank.axes if a != axis], sizes)


def of_node(layout: Layout, bank: Bank, axis: str) -> Bank:
    """Return the bank as the ranks of one node hold it."""
    inner = tuple(a for a in bank.axes if a != axis)
    return bank._replace(axes=inner, num_ranks=prod(dict(layout.mesh_shape)[a] for a in inner))


def ranks_of(layout: Layout, features: Sequence[FeatureConfig], block: int, axis: str) -> tuple[int, ...]:
    """Return the ranks of a node that hold rows at a place, whichever node it is."""
    shards = [layout.shards[layout.shards_of(f.table)[block]] for f in features]
    return tuple(dict.fromkeys(inner_rank(layout, layout.banks[s.bank], r, axis) for s in shards for r in s.ranks))


def address_lane(layout: Layout, feature: FeatureConfig, ranks: Sequence[int], axis: str) -> Lane:
    """Return a lane whose rows are addresses: row r of the bank of ranks[i] has the address i · rows of a bank + r.

    Blocks of columns of one table have one address: such a table has banks of its own, with its rows in one order.
    """
    shard = layout.shards[layout.shards_of(feature.table)[0]]
    bank = layout.banks[shard.bank]
    base = [ranks.index(inner_rank(layout, bank, r, axis)) * bank.rows for r in shard.ranks]
    starts = tuple(i + s for i, s in zip(base, shard.starts, strict=True))
    shard = shard._replace(ranks=(0,) * len(starts), starts=starts)
    return Lane(feature, shard, bank, dict(layout.shapes)[feature.table][0])


# -- validators --------------------------------------------------------------------------------------------------


def node_problems(layout: Layout, towers: Sequence[Features], axis: str) -> Iterator[Problem]:
    for own in towers:
        where = {f.table: sorted(nodes_of_table(layout, f.table, axis)) for f in own}
        for table, found in where.items():
            if len(found) > 1:
                got, need = f"nodes {found} of axis {axis!r}", "one node for all rows of a tower's table"
                hint = f"fr.tower_placements(towers, mesh, axis={axis!r}) for the plan; or axis=None"
                yield Problem(f"table {table!r} of a tower lies on several nodes.", got, need, hint)
        if len({t for found in where.values() for t in found}) > 1 and all(len(x) < 2 for x in where.values()):
            got = ", ".join(f"{n!r} on node {x[0]}" for n, x in where.items() if x)
            hint = f"fr.tower_placements(towers, mesh, axis={axis!r}) for the plan; or axis=None"
            yield Problem("a tower's tables lie on different nodes.", got, "one node for all tables of a tower", hint)
