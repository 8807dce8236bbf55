"""route and combine: ids to the ranks that hold their rows, pooled rows back, and the transpose of both.

    ids ─route─▶ rows at their owners ─lookup─▶ pooled there ─combine─▶ acts;     d_acts ─combineᵀ─▶ d at the owners ─▶ RowGrads

A lane is one feature on one column block of its table. Every rank sends to every other a block of `capacity` rows, grouped by lane and bag,
and the lanes' lengths; so no shape depends on an id. An owner pools what it was sent by each rank apart: the answer goes
back to where the ids came from. Floor 4.
Shapes: n ranks, B bags on each, L lanes, K lanes on a rank, W their columns, C rows in a block.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcrec import _primitives as primitives
from funcrec._codec import Codec, send
from funcrec._collectives import all_to_all
from funcrec._configs import FeatureConfig
from funcrec._hashing import hash_rows
from funcrec._jagged import JaggedTensor, bag_ids, take_ranges
from funcrec._keyed_jagged import KeyedJaggedTensor
from funcrec._layout import Layout
from funcrec._rowgrads import Bags, RowGrads
from funcrec._tree import pytree
from funcrec.kernels import ops
from funcrec.kernels.forms import Feature

NOWHERE = 1 << 40  # more than a bank's rows: owner · NOWHERE + row is one number


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


@pytree(static=("num_bags",), optional=("weights", "scales", "own_weights"))
class Routed:
    """What a rank was sent, and where its own ids went.

    rows: i64[n · C], of the banks; -1 where a block is not full. offsets: i64[n · (K · B + 1)], for each sender the boundaries of its slots'
    bags. weights: f[n · C]; scales: the same, over the bag's length for weighted means, where there are any. overflow: i64[2], how many own ids found no place, and the capacity that all would have needed. own_offsets: i64[L · B + 1], the bags of this rank's lanes.
    sent: i64[N], where each id of the lanes stands among the n · C rows that this rank sent; -1 for none. own_weights: f[N].
    """

    rows: Tensor
    offsets: Tensor
    overflow: Tensor
    own_offsets: Tensor
    sent: Tensor
    weights: Tensor | None = None
    scales: Tensor | None = None
    own_weights: Tensor | None = None
    num_bags: int = 0

    def lengths(self, lane: int) -> Tensor:
        """i64[B]: of this rank's bags, for means."""
        return self.own_offsets[lane * self.num_bags : (lane + 1) * self.num_bags + 1].diff()

    def rows_of(self, bank: int, routes: Routes) -> Tensor:
        """i64[n · C]: the rows that are of that bank, -1 for the others."""
        n, k = routes.num_ranks, len(routes.banks)
        room = self.rows.shape[0] // n
        bounds = self.offsets.unflatten(0, (n, -1))
        places = torch.arange(n * room, device=bounds.device).view(n, room)
        slot = (torch.searchsorted(bounds, places, right=True) - 1) // max(self.num_bags, 1)
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
    ids: KeyedJaggedTensor, routes: Routes, layout: Layout, features: Sequence[FeatureConfig], capacity: int | None
) -> Routed:
    """This rank's ids, sent to the owners of their rows.

    capacity: C; None for all ids of a rank to one owner, which always suffices.
    """
    used = [features[x.feature] for x in routes.lanes]
    bags = lane_bags(ids, used)
    n, num_lanes, device = routes.num_ranks, len(used), bags.values.device
    num_bags, capacity_in = bags.num_bags // num_lanes, bags.capacity
    room = min(capacity, capacity_in) if capacity is not None and routes.axes else capacity_in
    rows = _owned_rows(bags, num_bags, routes, layout, features)
    grouped, lengths, _, positions = ops.bucketize(rows, bags.offsets, None, n, NOWHERE)
    lengths = lengths.unflatten(0, (n, num_lanes, num_bags))
    counts = lengths.flatten(1).sum(1)
    before = counts.cumsum(0) - counts
    within = torch.arange(room, device=device)
    place = torch.where(within < counts[:, None], before[:, None] + within, capacity_in)
    blocks = torch.cat([grouped, grouped.new_full((1,), -1)])[place]
    # an id at position p of those grouped stands at (owner, p - before[owner]) of what is sent
    owner = torch.div(rows, NOWHERE, rounding_mode="floor").clamp(min=0)
    inner = positions - before[owner]
    sent = torch.where((positions >= 0) & (inner < room), owner * room + inner, -1)
    slots = torch.tensor(routes.slots, device=device)  # [n, K]
    told = torch.cat([lengths, lengths.new_zeros(n, 1, num_bags)], 1)
    told = told[torch.arange(n, device=device)[:, None], slots]  # -1 takes the zeros at the end
    most = max(capacity_in, *(layout.banks[b].rows for b in routes.banks))
    narrow = torch.int32 if most < 1 << 31 else torch.int64  # half the bytes
    exchanged = [torch.cat([blocks, told.flatten(1)], 1).to(narrow)]
    if bags.weights is not None:
        exchanged.append(_sent_blocks(bags.weights, sent, n, room))
        if any(_is_weighted_mean(f) for f in used):
            is_wide = any(layout.banks[b].dtype == torch.float64 for b in routes.banks)
            scales = _scales(bags, used).to(torch.float64 if is_wide else bags.weights.dtype)
            exchanged.append(_sent_blocks(scales, sent, n, room))
    both, *weights = all_to_all(tuple(exchanged), routes.axes) if routes.axes else tuple(exchanged)
    got, their_lengths = both.long().split([room, both.shape[1] - room], 1)
    ends = their_lengths.cumsum(1).clamp(max=room)
    offsets = torch.cat([ends.new_zeros(n, 1), ends], 1) + torch.arange(n, device=device)[:, None] * room
    overflow = torch.stack([(counts - room).clamp(min=0).sum(), counts.amax()])
    weights = [w.flatten() for w in weights] + [None] * (2 - len(weights))
    return Routed(got.flatten(), offsets.flatten(), overflow, bags.offsets, sent, *weights, bags.weights, num_bags)


def lane_of(bags: JaggedTensor, num_lanes: int) -> Tensor:
    """i64[N]: the lane that each id stands in; the last one for padding."""
    ends = bags.offsets[:: max(bags.num_bags // num_lanes, 1)][1:num_lanes]
    return torch.searchsorted(ends.contiguous(), torch.arange(bags.capacity, device=ends.device), right=True)


def _is_weighted_mean(feature: FeatureConfig) -> bool:
    return feature.weighted and feature.pooling == "mean"


def _scales(bags: JaggedTensor, features: Sequence[FeatureConfig]) -> Tensor:
    """f64[N]: what an id's gradient is multiplied by: its weight, over its bag's length for a weighted mean."""
    bag = bag_ids(bags.offsets, bags.capacity).clamp(max=bags.num_bags - 1)
    lengths = bags.lengths.clamp(min=1).double()[bag]
    is_mean = torch.tensor([_is_weighted_mean(f) for f in features], device=bag.device)[lane_of(bags, len(features))]
    return torch.where(is_mean, bags.weights.double() / lengths, bags.weights.double())


def _sent_blocks(x: Tensor, sent: Tensor, n: int, room: int) -> Tensor:
    """x[N, ...] as it is sent, [n, room, ...]; zeros elsewhere."""
    place = torch.where(sent < 0, n * room, sent)
    out = x.new_zeros(n * room + 1, *x.shape[1:])
    return torch.index_put(out, (place,), x)[:-1].unflatten(0, (n, room))


def lane_bags(ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> JaggedTensor:
    """The bags of every feature, one feature after the other, cut to its max_length; the buffer itself where nothing has to move."""
    keys = [f.key for f in features]
    is_weighted = any(f.weighted for f in features)
    weights = ids.weights if is_weighted else None
    if tuple(keys) == ids.keys and all(f.max_length is None for f in features):
        return _unit_weights(JaggedTensor(ids.values, ids.offsets, weights), features)
    starts = torch.cat([ids.offsets_for(k)[:-1] for k in keys])
    cut = lambda lengths, most: lengths if most is None else lengths.clamp(max=most)
    lengths = [cut(ids.offsets_for(f.key).diff(), f.max_length) for f in features]
    most = max(keys.count(k) for k in keys)
    return _unit_weights(take_ranges(ids.values, weights, starts, torch.cat(lengths), ids.capacity * most), features)


def _unit_weights(bags: JaggedTensor, features: Sequence[FeatureConfig]) -> JaggedTensor:
    """The bags with weights of 1 for features that are not weighted."""
    if bags.weights is None or all(f.weighted for f in features):
        return bags
    is_weighted = torch.tensor([f.weighted for f in features], device=bags.values.device)[lane_of(bags, len(features))]
    return JaggedTensor(bags.values, bags.offsets, torch.where(is_weighted, bags.weights, 1))


def _owned_rows(
    bags: JaggedTensor, num_bags: int, routes: Routes, layout: Layout, features: Sequence[FeatureConfig]
) -> Tensor:
    """i64[N]: owner · NOWHERE + row of the owner's bank, for every id; -1 where there is no such row."""
    shapes, device = dict(layout.shapes), bags.values.device
    shards = [layout.shards[x.shard] for x in routes.lanes]
    most = max(len(s.ranks) for s in shards)
    wide = lambda xs: [*xs, *[0] * (most - len(xs))]
    lane = lane_of(bags, len(shards))
    of_lane = lambda numbers: torch.tensor(numbers, dtype=torch.int64, device=device)[lane]
    rows = bags.values.long()
    for how in {(features[x.feature].hash, shapes[s.table][0]) for x, s in zip(routes.lanes, shards, strict=True)}:
        if how[0] is not None:
            mine = [
                (features[x.feature].hash, shapes[s.table][0]) == how for x, s in zip(routes.lanes, shards, strict=True)
            ]
            rows = torch.where(of_lane(mine).bool(), hash_rows(bags.values, *how).long(), rows)
    is_row = (rows >= 0) & (rows < of_lane([shapes[s.table][0] for s in shards]))
    rows = torch.where(is_row, rows, 0)
    part = of_lane([s.part for s in shards])
    which = torch.div(rows, part, rounding_mode="floor")
    flat = lane * most + which
    owner = torch.tensor([wide(s.ranks) for s in shards], device=device).flatten()[flat]
    start = torch.tensor([wide(s.starts) for s in shards], device=device).flatten()[flat]
    return torch.where(is_row, owner * NOWHERE + rows - which * part + start, -1)


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
    out = primitives.pooled_lookup(
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
        pooled = primitives.pooled_lookup(
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
        b: primitives.gather_rows(banks[b], routed.rows_of(b, routes), implementation=implementation).unflatten(
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
    for sender in range(routes.num_ranks):
        forms = slot_features(routed, routes, features, sender)
        for b in terms:
            own = tuple(f for k, f in enumerate(forms) if routes.banks[k] == b)
            terms[b].append(Bags(d[sender], routed.rows, routed.offsets, weights, own))
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
