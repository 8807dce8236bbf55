"""route and combine: ids to the ranks that hold their rows, pooled rows back, and the transpose of both.

    ids ─route─▶ rows at their owners ─lookup─▶ pooled there ─combine─▶ acts;     d_acts ─combineᵀ─▶ d at the owners ─▶ RowGrads

A lane is one feature on one column block of its table. Every rank sends to every other a block of `capacity` rows, grouped by lane and bag,
and the lanes' lengths; so no shape depends on an id. An owner pools what it was sent by each rank apart: the answer goes
back to where the ids came from.
Shapes: n ranks, B bags on each, L lanes, K lanes on a rank, W their columns, C rows in a block.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcrec.core import pytree
from funcrec.jagged import KeyedJaggedTensor
from funcrec.kernels import ops
from funcrec.kernels.forms import Feature
from funcrec.kernels.reference_jagged import place_among
from funcrec.mesh import Codec, all_to_all, send
from funcrec.sharding._lanes import is_weighted_mean, read_ids, weight_scales
from funcrec.sharding._layout import Layout
from funcrec.tables import Bags, FeatureConfig, RowGrads, gather_rows, pooled_lookup


class Lane(NamedTuple):
    """A feature (by number) on a shard of its table (by number)."""

    feature: int
    shard: int


class Routes(NamedTuple):
    """What is known of an exchange before any id: static.

    lanes: by bank, then by feature. slots: for each rank the lanes it serves, -1 where it has fewer than others; slot k is of one bank on
    all ranks. columns: where slot k's columns begin among the W that a rank sends back for a bag.
    """

    axes: tuple[str, ...]
    num_ranks: int
    lanes: tuple[Lane, ...]
    slots: tuple[tuple[int, ...], ...]
    banks: tuple[int, ...]
    columns: tuple[int, ...]
    width: int

    def widths(self, layout: Layout) -> tuple[int, ...]:
        """The columns of each slot."""
        return tuple(layout.banks[b].dim for b in self.banks)


@pytree(static=("num_bags",), optional=("sent", "weights", "scales", "own_weights"))
class Routed:
    """What a rank was sent, and where its own ids went.

    rows: i[n · C], of the banks; -1 where a block is not full. offsets: i64[n · (K · B + 1)], for each sender the boundaries of its slots'
    bags. weights: f[n · C]; scales: the same, over the bag's length for weighted means, where there are any. overflow: i64[2], how many own ids found no place, and the capacity that all would have needed. own_offsets: i64[L · B + 1], the bags of this rank's lanes.
    sent: i64[N], where each id of the lanes stands among the n · C rows that this rank sent, -1 for none; if anybody asks. own_weights: f[N].
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
        """i64[B]: of this rank's bags, for means."""
        return self.own_offsets[lane * self.num_bags : (lane + 1) * self.num_bags + 1].diff()

    def rows_of(self, bank: int, routes: Routes) -> Tensor:
        """i[n · C]: the rows that are of that bank, -1 for the others."""
        n, k = routes.num_ranks, len(routes.banks)
        room = self.rows.shape[0] // n
        bounds = self.offsets.unflatten(0, (n, -1))
        places = torch.arange(n * room, device=bounds.device).view(n, room)
        slot = (place_among(bounds, places) - 1) // max(self.num_bags, 1)
        slot, own = slot.flatten(), [i for i in range(k) if routes.banks[i] == bank]
        return torch.where((slot >= own[0]) & (slot <= own[-1]), self.rows, -1)


@functools.lru_cache(maxsize=256)
def routes_of(layout: Layout, features: tuple[FeatureConfig, ...]) -> tuple[Routes, ...]:
    """The exchanges of a lookup, one for each set of axes that its tables are cut over."""
    lanes: dict[tuple[str, ...], list[Lane]] = {}
    for f, feature in enumerate(features):
        for s in layout.shards_of(feature.table):
            lanes.setdefault(layout.banks[layout.shards[s].bank].axes, []).append(Lane(f, s))
    return tuple(_routes(layout, axes, own) for axes, own in lanes.items())


def _routes(layout: Layout, axes: tuple[str, ...], lanes: Sequence[Lane]) -> Routes:
    bank_of = lambda lane: layout.shards[lane.shard].bank
    lanes = tuple(sorted(lanes, key=bank_of))
    n = layout.banks[bank_of(lanes[0])].num_ranks
    banks, slots = [], [[] for _ in range(n)]
    for bank in dict.fromkeys(map(bank_of, lanes)):
        own = [
            [i for i, x in enumerate(lanes) if bank_of(x) == bank and r in layout.shards[x.shard].ranks]
            for r in range(n)
        ]
        most = max(map(len, own))
        banks += [bank] * most
        for r in range(n):
            slots[r] += own[r] + [-1] * (most - len(own[r]))
    columns, width = [], 0
    for bank in banks:
        columns.append(width)
        width += layout.banks[bank].dim
    return Routes(axes, n, lanes, tuple(map(tuple, slots)), tuple(banks), tuple(columns), width)


def route(
    ids: KeyedJaggedTensor,
    routes: Routes,
    layout: Layout,
    features: Sequence[FeatureConfig],
    capacity: int | None,
    *,
    placed: bool = True,
) -> Routed:
    """This rank's ids, sent to the owners of their rows.

    capacity: C; None for all ids of a rank to one owner, which always suffices. placed: whether `sent` is asked for.
    """
    used = [features[x.feature] for x in routes.lanes]
    read = read_ids(ids, used, [layout.shards[x.shard] for x in routes.lanes], layout, placed=placed)
    weights, n, device = read.bags.weights, routes.num_ranks, ids.values.device
    room = min(capacity, read.capacity) if capacity is not None and routes.axes else read.capacity
    most = max(read.capacity, *(layout.banks[b].rows for b in routes.banks))
    blocks, counts, sent = ops.owner_blocks(
        read.bags.values,
        read.bags.offsets,
        read.lanes,
        routes.slots,
        read.num_bags,
        room,
        wide=most >= 1 << 31,  # else half the bytes
        placed=read.is_placed,
    )
    exchanged = [blocks]
    if weights is not None:
        exchanged.append(_sent_blocks(weights, sent, n, room))
        if any(map(is_weighted_mean, used)):
            is_wide = any(layout.banks[b].dtype == torch.float64 for b in routes.banks)
            scales = weight_scales(read.bags, used).to(torch.float64 if is_wide else weights.dtype)
            exchanged.append(_sent_blocks(scales, sent, n, room))
    both, *theirs = all_to_all(tuple(exchanged), routes.axes) if routes.axes else tuple(exchanged)
    got, their_lengths = both.split([room, both.shape[1] - room], 1)
    ends = their_lengths.cumsum(1).clamp(max=room)
    offsets = torch.cat([ends.new_zeros(n, 1), ends], 1) + torch.arange(n, device=device)[:, None] * room
    overflow = torch.stack([(counts - room).clamp(min=0).sum(), counts.amax()])
    theirs = [w.flatten() for w in theirs] + [None] * (2 - len(theirs))
    sent = sent if read.is_placed else None
    return Routed(got.flatten(), offsets.flatten(), overflow, read.bounds, sent, *theirs, weights, read.num_bags)


def _sent_blocks(x: Tensor, sent: Tensor, n: int, room: int) -> Tensor:
    """x[N, ...] as it is sent, [n, room, ...]; zeros elsewhere."""
    place = torch.where(sent < 0, n * room, sent)
    out = x.new_zeros(n * room + 1, *x.shape[1:])
    return torch.index_put(out, (place,), x)[:-1].unflatten(0, (n, room))


# -- pooled at the owner -----------------------------------------------------------------------------------------


def pool(
    banks: Sequence[Tensor], routed: Routed, routes: Routes, layout: Layout, features, implementation: str | None
) -> Tensor:
    """f[n, B, W]: for each sender, the sums of its bags' rows here, slot by slot, as they are sent."""
    used = list(dict.fromkeys(routes.banks))
    forms = [
        form._replace(table=used.index(routes.banks[k]), column=sender * routes.width + form.column)
        for sender in range(routes.num_ranks)
        for k, form in enumerate(slot_features(routed, routes, features, sender))
    ]
    tables = [banks[b] for b in used]
    out = pooled_lookup(
        tables, [routed.rows], routed.offsets, routed.weights, forms, routed.num_bags, routes.num_ranks, implementation=implementation
    )  # fmt: skip
    return out.unflatten(0, (routes.num_ranks, -1))


def slot_features(routed: Routed, routes: Routes, features: Sequence[FeatureConfig], sender: int) -> list[Feature]:
    """The slots as features of a kernel, of one sender's bags."""
    bags = routed.num_bags
    first = sender * (len(routes.banks) * bags + 1)
    is_weighted = routed.weights is not None
    longest = [_longest(features, routes, k) for k in range(len(routes.banks))]
    return [
        Feature(0, 0, first + k * bags, longest[k], False, is_weighted, c) for k, c in enumerate(routes.columns)
    ]  # fmt: skip


def _longest(features: Sequence[FeatureConfig], routes: Routes, slot: int) -> int:
    """The most ids in a bag of a slot, 0 if nobody says: bags come cut, so it only bounds how many entries a gradient has."""
    known = [features[routes.lanes[x[slot]].feature].max_length for x in routes.slots if x[slot] >= 0]
    return 0 if None in known else max(known)


def fetch(
    banks: Sequence[Tensor],
    routed: Routed,
    routes: Routes,
    layout: Layout,
    features,
    implementation: str | None,
    codec: Codec | None = None,
) -> dict[int, Tensor]:
    """{lane: f[B, width]}, pooled here from the single rows that owners send back: the sums of one process, to the bit."""
    out = {}
    for bank, rows in fetched(banks, routed, routes, implementation, codec).items():
        lanes = [i for i, x in enumerate(routes.lanes) if layout.shards[x.shard].bank == bank]
        width, forms = layout.banks[bank].dim, []
        for c, i in enumerate(lanes):
            feature = features[routes.lanes[i].feature]
            is_weighted = routed.own_weights is not None
            forms.append(Feature(0, 0, i * routed.num_bags, 0, feature.pooling == "mean", is_weighted, c * width))
        pooled = pooled_lookup(
            [rows],
            [routed.sent],
            routed.own_offsets,
            routed.own_weights,
            forms,
            routed.num_bags,
            implementation=implementation,
        )
        out |= dict(zip(lanes, pooled.split(width, 1), strict=True))
    return out


def fetched(
    banks: Sequence[Tensor], routed: Routed, routes: Routes, implementation: str | None, codec: Codec | None = None
) -> dict[int, Tensor]:
    """{bank: f[n · C, dim]}: for each id that this rank sent its row, in the id's place; zeros for those of other banks."""
    rows = {
        b: gather_rows(banks[b], routed.rows_of(b, routes), implementation=implementation).unflatten(
            0, (routes.num_ranks, -1)
        )
        for b in dict.fromkeys(routes.banks)
    }
    if routes.axes:
        got = send("all_to_all", list(rows.values()), routes.axes, codec, [(x.shape[-1],) for x in rows.values()])
        rows = dict(zip(rows, got, strict=True))
    return {b: x.flatten(0, 1) for b, x in rows.items()}


def combine(
    pooled: Tensor, routed: Routed, routes: Routes, layout: Layout, features, codec: Codec | None = None
) -> dict[int, Tensor]:
    """{lane: f[B, width]}: this rank's bags, from what all owners pooled for it; means are divided here."""
    widths = routes.widths(layout)
    back = send("all_to_all", [pooled], routes.axes, codec, [widths])[0] if routes.axes else pooled
    out = {}
    for i, lane in enumerate(routes.lanes):
        width = layout.banks[layout.shards[lane.shard].bank].dim
        at = [(r, routes.columns[routes.slots[r].index(i)]) for r in layout.shards[lane.shard].ranks]
        total = back[at[0][0], :, at[0][1] : at[0][1] + width]
        for r, c in at[1:]:
            total = total + back[r, :, c : c + width]
        out[i] = _divided(total, routed, i, features[lane.feature])
    return out


def combine_transpose(
    d_lanes: dict[int, Tensor], routed: Routed, routes: Routes, layout: Layout, features, codec: Codec | None = None
) -> dict[int, RowGrads]:
    """{bank: RowGrads} at the owners, from the cotangents of `combine`'s answers; `codec.forward` is how they travel."""
    scaled = lambda i, d: _scaled(d, routed, i, layout.banks[layout.shards[routes.lanes[i].shard].bank].dtype)
    d_lanes = {i: scaled(i, d) if _is_mean(features[routes.lanes[i].feature]) else d for i, d in d_lanes.items()}
    weights = routed.weights if routed.scales is None else routed.scales
    blank = [torch.zeros_like(d_lanes[0][:, :1]).expand(-1, layout.banks[b].dim) for b in routes.banks]
    to_rank = lambda slots: torch.cat([blank[k] if i < 0 else d_lanes[i] for k, i in enumerate(slots)], 1)
    if not routes.axes:
        d = to_rank(routes.slots[0])[None]
    elif len(set(routes.slots)) == 1:  # every rank is sent the same
        (d,) = send("all_gather", [to_rank(routes.slots[0])], routes.axes, codec, [routes.widths(layout)])
    else:
        each = torch.stack([to_rank(slots) for slots in routes.slots])
        (d,) = send("all_to_all", [each], routes.axes, codec, [routes.widths(layout)])
    terms: dict[int, list[Bags]] = {b: [] for b in routes.banks}
    for sender, d_sender in enumerate(d.unbind(0)):  # one tensor for all banks: it may travel on
        forms = slot_features(routed, routes, features, sender)
        for b in terms:
            own = tuple(f for k, f in enumerate(forms) if routes.banks[k] == b)
            terms[b].append(Bags(d_sender, routed.rows, routed.offsets, weights, own))
    return {
        b: RowGrads(tuple(t), layout.banks[b].rows, layout.banks[b].dim, False, routes.axes) for b, t in terms.items()
    }


def _divided(x: Tensor, routed: Routed, lane: int, feature: FeatureConfig) -> Tensor:
    return x / routed.lengths(lane).clamp(min=1)[:, None].to(x.dtype) if feature.pooling == "mean" else x


def _is_mean(feature: FeatureConfig) -> bool:
    return feature.pooling == "mean" and not feature.weighted


def _scaled(d: Tensor, routed: Routed, lane: int, dtype: torch.dtype) -> Tensor:
    """d over the bags' lengths, as the kernels do it: by one factor, in the dtype that the table's rows are summed in."""
    acc = ops.accumulation_dtype(dtype)
    return d.to(acc) * (1 / routed.lengths(lane).clamp(min=1).double())[:, None].to(acc)
