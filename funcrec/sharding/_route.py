"""route: sends ids to the ranks that hold their rows.

    ids ─route─▶ rows at their owners ─lookup─▶ sums at the owners ─combine─▶ acts;
    d_acts ─combineᵀ─▶ d at the owners ─▶ RowGrads

Every rank sends to every rank a block of `capacity` rows, grouped by lane and bag, and the lengths of the bags. So no
shape depends on an id. An owner keeps the rows of each sender apart, because the answers go back to the senders.
Shapes: n ranks, B bags on each, L lanes, K lanes on a rank, C rows in a block.
"""

import functools
from typing import Protocol

import torch
from torch import Tensor

from funcrec.core import pytree
from funcrec.jagged import KeyedJaggedTensor
from funcrec.kernels import ops
from funcrec.kernels.reference_jagged import place_among
from funcrec.mesh import all_to_all
from funcrec.sharding._lanes import Routes, is_weighted_mean, read_ids, room_for, weight_scales
from funcrec.sharding.placement._layout import Bank


class SentIds(Protocol):
    """The fields of `Routed` and `RoutedRows` about the ids that this rank sent."""

    @property
    def sent(self) -> Tensor | None: ...
    @property
    def own_offsets(self) -> Tensor: ...
    @property
    def own_weights(self) -> Tensor | None: ...
    @property
    def num_bags(self) -> int: ...


@pytree(static=("num_bags",), optional=("sent", "weights", "scales", "own_weights"))
class Routed:
    """The rows that a rank received, and the places to which its own ids went.

    rows: i[n · C], rows of the banks; -1 where a block is not full.
    offsets: i64[n · (K · B + 1)], for each sender the boundaries of the bags of its places.
    weights: f[n · C].
    scales: f[n · C], the weights, divided by the bag's length for weighted means. None if no feature is a weighted
      mean.
    overflow: i64[2], the number of this rank's ids that found no room, and the capacity that holds all ids.
    own_offsets: i64[L · B + 1], the bags of this rank's lanes.
    sent: i64[N], the place of each id of the lanes among the n · C rows that this rank sent, -1 for none; optional.
    own_weights: f[N].
    """

    rows: Tensor
    offsets: Tensor
    overflow: Tensor
    own_offsets: Tensor
    sent: Tensor | None = None
    weights: Tensor | None = None
    scales: Tensor | None = None
    own_weights: Tensor | None = None
    num_bags: int = 0

    def lengths(self, lane: int) -> Tensor:
        """Return the lengths of this rank's bags of a lane, i64[B], for means."""
        return self.own_offsets[lane * self.num_bags : (lane + 1) * self.num_bags + 1].diff()

    def rows_of(self, bank: Bank, routes: Routes) -> Tensor:
        """Return the rows that belong to that bank, i[n · C]; -1 for other rows."""
        n, own = routes.num_ranks, routes.places_of_banks[bank]
        room = self.rows.shape[0] // n
        bounds = self.offsets.unflatten(0, (n, -1))
        places = torch.arange(n * room, device=bounds.device).view(n, room)
        slot = (place_among(bounds, places) - 1) // max(self.num_bags, 1)
        slot = slot.flatten()
        return torch.where((slot >= own[0]) & (slot <= own[-1]), self.rows, -1)


def route(ids: KeyedJaggedTensor, routes: Routes, capacity: int | None, *, placed: bool = True) -> Routed:
    """Send this rank's ids to the owners of their rows, and return the rows that arrive here.

    capacity: C; None for room for all ids of a rank, which always suffices.
    placed: whether the result needs `sent`.
    """
    read = read_ids(ids, routes.lanes, placed=placed)
    weights, n, device = read.bags.weights, routes.num_ranks, ids.values.device
    most = max(read.capacity, *(b.rows for b in routes.banks))
    blocks_of = functools.partial(
        ops.owner_blocks,
        read.bags.values,
        read.bags.offsets,
        read.lanes,
        routes.served,
        read.num_bags,
        wide=most >= 1 << 31,  # i32 takes half the bytes
    )
    room = room_for(capacity, read.capacity, routes, lambda: blocks_of(0)[1])
    blocks, counts, sent = blocks_of(room, placed=read.is_placed)
    exchanged = [blocks]
    if weights is not None:
        # An owner multiplies each row by s_i in the lookup. For a weighted mean the lookup divides the whole sum by the
        # bag's length after the exchange, but the transpose divides each term. So the owner receives s_i and the
        # scales.
        exchanged.append(sent_blocks(weights, sent, n, room))
        if any(is_weighted_mean(x.feature) for x in routes.lanes):
            is_wide = any(b.dtype == torch.float64 for b in routes.banks)
            scales = weight_scales(read.bags, [x.feature for x in routes.lanes])
            exchanged.append(sent_blocks(scales.to(torch.float64 if is_wide else weights.dtype), sent, n, room))
    both, *theirs = all_to_all(tuple(exchanged), routes.axes) if routes.axes else tuple(exchanged)
    got, their_lengths = both.split(
        [room, both.shape[1] - room], 1
    )  # the last K · B numbers of a block are the lengths of its bags
    ends = their_lengths.cumsum(1).clamp(max=room)  # ids that found no room at their sender are in no bag here
    offsets = torch.cat([ends.new_zeros(n, 1), ends], 1) + torch.arange(n, device=device)[:, None] * room
    overflow = torch.stack([(counts - room).clamp(min=0).sum(), counts.amax()])
    own, scales = [*(w.flatten() for w in theirs), None, None][:2]
    sent = sent if read.is_placed else None
    return Routed(got.flatten(), offsets.flatten(), overflow, read.bounds, sent, own, scales, weights, read.num_bags)


def sent_blocks(x: Tensor, sent: Tensor, n: int, room: int) -> Tensor:
    """Return x[N, ...] in the places from which it is sent, [n, room, ...]; zeros elsewhere."""
    place = torch.where(sent < 0, n * room, sent)
    out = x.new_zeros(n * room + 1, *x.shape[1:])
    return torch.index_put(out, (place,), x)[:-1].unflatten(0, (n, room))
