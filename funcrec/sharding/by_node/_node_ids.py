"""Ids travel to the nodes of their towers, as addresses in the banks of a node.

    ids of rank (i, l) ─all_to_all over nodes─▶ rank (t, l): for each place the bags of ranks (0, l), ..., (N-1, l)

Every rank sends to every node a block of `room` addresses, place by place, and the lengths of the bags. So no shape
depends on an id. An id without a row travels, too: it counts in the length of its bag.
Shapes: N nodes, K places, B bags on a rank, L lanes (features of all nodes), C rows in a block.
"""

import torch
from torch import Tensor

from funcrec.jagged import KeyedJaggedTensor, take_ranges
from funcrec.mesh import all_to_all
from funcrec.sharding._lanes import lane_bags, owned_rows
from funcrec.sharding.by_node._seating import Seating

WIDE = 1 << 31


def send_ids(ids: KeyedJaggedTensor, seating: Seating, capacity: int | None) -> tuple[KeyedJaggedTensor, Tensor]:
    """Return (the addresses of this node's bags, the overflow i64[2] of this rank).

    The addresses have a key for each place, with the N · B bags that this rank looks up for its senders.

    capacity: C; None for room for all ids of a rank.
    """
    bags = lane_bags(ids, [x.feature for x in seating.lanes])
    num_lanes, n, device = len(seating.lanes), len(seating.nodes), bags.values.device
    num_bags = bags.num_bags // num_lanes
    rows = owned_rows(bags, seating.lanes)
    room = bags.capacity if capacity is None else min(capacity, bags.capacity)
    firsts, counts = bounds_of(bags.offsets, seating, num_bags)
    at = (firsts[:, None] + torch.arange(room, device=device)).clamp(max=max(bags.capacity, 1) - 1)
    lengths = torch.cat([bags.lengths.view(num_lanes, num_bags), bags.lengths.new_zeros(1, num_bags)])
    told = lengths.index_select(0, torch.tensor(lane_numbers(seating), device=device)).view(n, -1 if num_bags else 0)
    most = max([bags.capacity, *(b.rows * b.num_ranks for b in seating.view.banks)])
    sent = [torch.cat([rows[at], told.long()], 1).to(torch.int64 if most >= WIDE else torch.int32)]
    if bags.weights is not None:
        sent.append(bags.weights[at])
    both, *weights = all_to_all(tuple(sent), seating.axis)
    lost = (counts - room).clamp(min=0).sum()
    # Within the node, one rank may need room for the ids of all senders. The ids that arrive tell how many these are,
    # unless some were lost.
    overflow = torch.stack([lost, torch.where(lost > 0, n * counts.amax(), counts.amax())])
    return received(both, weights[0] if weights else None, seating, num_bags), overflow


def received(both: Tensor, weights: Tensor | None, seating: Seating, num_bags: int) -> KeyedJaggedTensor:
    """Return the bags of the blocks [N, C + K · B], key by key."""
    n, room = both.shape[0], both.shape[1] - len(seating.slots) * num_bags
    ends = both[:, room:].long().cumsum(1).clamp(max=room)  # ids that found no room at their sender are in no bag
    starts = torch.cat([ends.new_zeros(n, 1), ends], 1)[:, :-1]
    by_key = lambda x: x.view(n, len(seating.slots), num_bags).transpose(0, 1).flatten()
    base = torch.arange(n, device=both.device)[:, None] * room
    scale = None if weights is None else weights.flatten()
    bags = take_ranges(both[:, :room].flatten(), scale, by_key(starts + base), by_key(ends - starts), n * room)
    keys = tuple(f.name for f in seating.slots)
    return KeyedJaggedTensor(bags.values, bags.offsets, bags.weights, None, keys)


def bounds_of(offsets: Tensor, seating: Seating, num_bags: int) -> tuple[Tensor, Tensor]:
    """Return where the ids of each node begin, i64[N], and how many there are, i64[N]."""
    edges = [0]
    for own in seating.served:
        edges.append(edges[-1] + sum(x is not None for x in own) * num_bags)
    at = offsets.index_select(0, torch.tensor(edges, device=offsets.device)).long()
    return at[:-1], at.diff()


def lane_numbers(seating: Seating) -> list[int]:
    """Return the number of the lane at each place of each node, one node after the other; L for an empty place."""
    numbers = iter(range(len(seating.lanes)))
    return [len(seating.lanes) if x is None else next(numbers) for own in seating.served for x in own]
