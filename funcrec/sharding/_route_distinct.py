"""Sends to the owners each row number once: the exchange of a lookup with `dedup`, and its transpose.

    ids ─sort─▶ distinct rows ─all_to_all─▶ owners ─rows─▶ this rank, which pools them;
    d_acts ─sum over a row's ids─▶ all_to_all ─▶ Entries

A rank first sends a row number and a count for each distinct row. The answer and its cotangent are one vector each.
Weights and lengths are not sent. No shape depends on an id: blocks have room for `capacity` rows. `fetch` reads the
answer, where several ids may share one place.
Shapes: n ranks, B bags on each, L lanes, U banks, N ids of the lanes, C rows in a block.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from funcrec.core import pytree
from funcrec.jagged import KeyedJaggedTensor
from funcrec.kernels.owners import NOWHERE
from funcrec.mesh import Codec, all_to_all, send
from funcrec.sharding._combine import lane_forms, with_zeros
from funcrec.sharding._lanes import Routes, lane_bags, lane_of, owned_rows, room_for
from funcrec.sharding._sequences import lane_places
from funcrec.sharding.placement._layout import Bank
from funcrec.tables import Bags, Entries, RowGrads


@pytree(static=("num_bags",), optional=("own_weights",))
class RoutedRows:
    """The fields of `Routed`, for distinct rows.

    rows: i64[n · C], ascending for each sender and bank; -1 after the last row of a sender.
    repeats: i64[n · C], how many of the sender's ids share each row.
    bounds: i64[n, U + 1], where the rows of each bank begin among the rows of a sender.
    overflow: i64[2], the number of distinct rows that found no room, and the capacity that holds all of them.
    own_offsets: i64[L · B + 1].
    sent: i64[N], the place of the row of each id among the n · C rows that this rank sent; -1 for none.
    own_weights: f[N].
    """

    rows: Tensor
    repeats: Tensor
    bounds: Tensor
    overflow: Tensor
    own_offsets: Tensor
    sent: Tensor
    own_weights: Tensor | None = None
    num_bags: int = 0

    def rows_of(self, bank: Bank, routes: Routes) -> Tensor:
        """Return the rows that belong to that bank, i64[n · C]; -1 for other rows."""
        k, rows = list(routes.lanes_of_banks).index(bank), self.rows.unflatten(0, (routes.num_ranks, -1))
        place = torch.arange(rows.shape[1], device=rows.device)
        return torch.where(
            (place >= self.bounds[:, k, None]) & (place < self.bounds[:, k + 1, None]), rows, -1
        ).flatten()


def route_rows(ids: KeyedJaggedTensor, routes: Routes, capacity: int | None) -> RoutedRows:
    """Send the distinct rows of this rank's ids to their owners, and return the rows that arrive here.

    capacity: C; None for the number of ids, which always suffices.
    """
    used = [x.feature for x in routes.lanes]
    bags, n, banks = lane_bags(ids, used), routes.num_ranks, list(routes.lanes_of_banks)
    num_bags, device = bags.num_bags // len(used), bags.values.device
    is_id = torch.arange(bags.capacity, device=device) < bags.offsets[-1]
    owned = torch.where(is_id, owned_rows(bags, routes.lanes), -1)
    # An owner's row of a bank has one number: owner · total + start of the bank + row. Sorting puts equal rows next to
    # each other, and puts the rows of each owner together, by bank. (`owned`, owner · NOWHERE + row, lacks the bank,
    # and is larger: a sort of it would take longer.)
    starts = [sum(b.rows for b in banks[:k]) for k in range(len(banks) + 1)]
    total = starts.pop()
    of_lane = torch.tensor([starts[banks.index(x.bank)] for x in routes.lanes], device=device)
    owner = torch.div(owned, NOWHERE, rounding_mode="floor")
    numbers = owner * total + of_lane[lane_of(bags, len(used))] + owned % NOWHERE
    ordered, order = torch.sort(torch.where(owned < 0, n * total, numbers), stable=True)
    is_row = ordered < n * total  # padding and ids without a row come last
    is_first = is_row & torch.cat([torch.ones_like(is_row[:1]), ordered[1:] != ordered[:-1]])
    nth = torch.cat([is_first.new_zeros(1), is_first]).cumsum(0)  # i64[N + 1]: distinct rows before each element
    edges = torch.tensor([r * total + s for r in range(n) for s in starts] + [n * total], device=device)
    edges = edges + ordered.new_zeros(1)  # under vmap each member then has its own edges, contiguous in memory
    ends = nth[torch.searchsorted(ordered, edges)]  # distinct rows before each bank of each owner
    before, counts = ends[:: len(banks)][:n], ends[:: len(banks)].diff()
    room = room_for(capacity, bags.capacity, routes, lambda: counts)
    # The place of a row is the first place of its owner's block, plus the number of distinct
    # rows of that owner before it. All ids of the row share the place.
    owner = torch.div(ordered, total, rounding_mode="floor").clamp(max=n - 1)
    inner = nth[1:] - 1 - before[owner]
    place = torch.where(is_row & (inner < room), owner * room + inner, -1)
    sent = torch.zeros_like(order).scatter(0, order, place)
    blank = ordered.new_full((n * room + 1,), -1)  # rows without a place go into the last element
    rows = blank.scatter(0, torch.where(is_first & (place >= 0), place, n * room), owned[order] % NOWHERE)[:-1]
    repeats = (blank + 1).scatter_add(0, torch.where(place < 0, n * room, place), torch.ones_like(place))[:-1]
    # Optimizers that count ids need the repeats, because the owner does not
    # see the ids. `told` has the number of rows of each bank.
    told = ends.diff().unflatten(0, (n, len(banks)))
    narrow = torch.int32 if max(bags.capacity, *(b.rows for b in banks)) < 1 << 31 else torch.int64
    both = torch.cat([rows.unflatten(0, (n, room)), repeats.unflatten(0, (n, room)), told], 1).to(narrow)
    got, their_repeats, their_counts = all_to_all(both, routes.axes).long().split([room, room, len(banks)], 1)
    bounds = torch.cat([got.new_zeros(n, 1), their_counts.cumsum(1)], 1).clamp(max=room)
    overflow = torch.stack([(counts - room).clamp(min=0).sum(), counts.amax()])
    return RoutedRows(
        got.flatten(), their_repeats.flatten(), bounds, overflow, bags.offsets, sent, bags.weights, num_bags
    )


def fetch_transpose(
    d_lanes: Mapping[int, Tensor], routed: RoutedRows, routes: Routes, codec: Codec | None = None
) -> dict[str, RowGrads]:
    """Return {bank: RowGrads} at the owners, from the cotangents of bags that were pooled here.

    This is the transpose of a lookup among the rows that arrived.
    """
    sums = {}
    for bank, lanes in routes.lanes_of_banks.items():
        d = torch.cat([with_zeros(d_lanes[i], routed.num_bags) for i in lanes], 1)
        forms = tuple(lane_forms(routed, routes, bank))
        term = Bags(d, routed.sent, routed.own_offsets, routed.own_weights, forms)
        sums[bank] = RowGrads((term,), routed.rows.shape[0], bank.dim)
    return _at_owners(sums, routed, routes, codec)


def fetch_rows_transpose(
    d_lanes: Mapping[int, Tensor], routed: RoutedRows, routes: Routes, codec: Codec | None = None
) -> dict[str, RowGrads]:
    """Return {bank: RowGrads} at the owners, from the cotangents of the rows of sequences."""
    sums = {}
    for bank, lanes in routes.lanes_of_banks.items():
        places = torch.cat([lane_places(routed, i, d_lanes[i].shape[0]) for i in lanes])
        d = torch.cat([d_lanes[i] for i in lanes])
        sums[bank] = RowGrads.from_entries(places, d, num_embeddings=routed.rows.shape[0])
    return _at_owners(sums, routed, routes, codec)


def _at_owners(
    sums: Mapping[Bank, RowGrads], routed: RoutedRows, routes: Routes, codec: Codec | None
) -> dict[str, RowGrads]:
    """Return {bank: RowGrads} at the owners, with Entries for each sender in turn.

    This rank sums the gradient of each place, and sends the sum to the owner of the row.
    """
    apart = lambda x: x.unflatten(0, (routes.num_ranks, -1))
    # This rank sums over the ids of a row, and then the owner sums over the
    # senders. This rounds differently from one sum over the global batch.
    own = [apart(g.coalesce().to_dense()) for g in sums.values()]
    got = send("all_to_all", own, routes.axes, codec, [(x.shape[-1],) for x in own])
    repeats, out = apart(routed.repeats), {}
    for b, d in zip(sums, got, strict=True):
        rows = apart(routed.rows_of(b, routes))
        terms = tuple(Entries(rows[s], d[s], repeats=repeats[s]) for s in range(routes.num_ranks))
        out[b.name] = RowGrads(terms, b.rows, b.dim, False, routes.axes)
    return out
