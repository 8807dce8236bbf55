"""The tables of a node: the kind of tables that a tower's lookup reads.

    rank (t, l) ─addresses─▶ the ranks of node t that have the rows ─sums─▶ rank (t, l), for the bags of all its senders

The exchanges are those of a sharded lookup, over the axes within a node. The transpose returns gradients of banks of
the whole mesh, with a term for each sender, as a lookup over all axes does. So a row's gradient is summed in the order
of the global batch.
Shapes: N nodes, B bags on a rank.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from funcrec.core import Named, mapping, pytree, replace
from funcrec.jagged import KeyedJaggedTensor
from funcrec.mesh import coordinates, rank_at
from funcrec.sharding._lookup import read_sharded
from funcrec.sharding._tables import ShardedTables
from funcrec.sharding.placement._layout import Bank, Layout
from funcrec.tables import KINDS, Bags, FeatureConfig, Kind, LookupResult, RowGrads, placed_as


@mapping(lambda tables: tables.tables.banks, "bank")
@pytree(static=("layout", "axis"))
class NodeTables(Named[Tensor]):
    """Banks that the ranks of a node read by addresses.

    tables: ShardedTables whose layout is the view of a seating. layout: that of the whole mesh.
    lost: i64[2], the overflow of the exchange that brought the addresses.
    """

    tables: ShardedTables
    lost: Tensor
    layout: Layout
    axis: str


def read_node(
    node: NodeTables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None = None
) -> LookupResult:
    """Return the lookup of the bags of this rank's senders."""
    read, banks = read_sharded(node.tables, ids, features, implementation), {b.name: b for b in node.layout.banks}

    def transpose(d_out: Any, saved: Any) -> dict[str, RowGrads]:
        grads = read.transpose(d_out, saved)
        return {n: by_sender(g, banks[n], node.axis, dict(node.layout.mesh_shape)) for n, g in grads.items()}

    has_room = node.tables.transport.capacity is None
    return read._replace(transpose=transpose, overflows=read.overflows if has_room else (*read.overflows, node.lost))


def by_sender(grads: RowGrads, bank: Bank, axis: str, sizes: Mapping[str, int]) -> RowGrads:
    """Return the gradient with a term for each sender, in the order of the ranks on the bank's axes.

    A term of a pooled lookup has the bags of senders (0, l), ..., (N-1, l). Entries have no senders, and stay.
    """
    terms = [t for t in grads.terms if isinstance(t, Bags)]
    if len(terms) < len(grads.terms):
        return replace(grads, axes=bank.axes)
    inner = [a for a in bank.axes if a != axis]
    axes = bank.axes if axis in bank.axes else (axis, *inner)
    placed = [
        (rank_at(coordinates(j, inner, sizes) | {axis: i}, axes, sizes), t)
        for j, term in enumerate(terms)
        for i, t in enumerate(of_senders(term, sizes[axis]))
    ]
    return replace(grads, terms=tuple(t for _, t in sorted(placed, key=lambda p: p[0])), axes=bank.axes)


def of_senders(term: Bags, num_nodes: int) -> list[Bags]:
    num_bags = term.d.shape[0] // num_nodes
    moved = lambda i: tuple(f._replace(first_bag=f.first_bag + i * num_bags) for f in term.features)
    each = term.d.unflatten(0, (num_nodes, num_bags)).unbind(0)
    return [replace(term, d=d, features=moved(i)) for i, d in enumerate(each)]


KINDS[NodeTables] = Kind(lambda node: placed_as(node.tables.of).shapes(node.tables), read_node)
