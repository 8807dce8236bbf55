"""Sequences under a plan: each id's row from its owner, and the transpose: each id's gradient at its row's owner.

    ids ─route─▶ rows at their owners ─gather, all_to_all─▶ one row per id;     d ─all_to_all─▶ Entries, sender by sender

Ids go out as those of pooled features do, in blocks of one capacity; a row comes back to the place that its id had in the block. Weights
stay at home: they multiply rows that came, and gradients before they go.
Shapes: n ranks, C rows in a block, N places of a sequence's buffer, D dim.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from funcrec.core import replace
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor
from funcrec.mesh import Codec, send
from funcrec.sharding._layout import Layout
from funcrec.sharding._route import Routed, Routes, _sent_blocks, fetched, route
from funcrec.tables import Entries, FeatureConfig, RowGrads, sequence_rows


def route_sequences(
    ids: KeyedJaggedTensor,
    routes: Routes,
    layout: Layout,
    features: Sequence[FeatureConfig],
    capacity: int | None,
    to_owners: Callable = route,
) -> Routed:
    """`route`, or `route_rows`, of ids without their weights."""
    plain = [replace(f, weighted=False) for f in features]
    return to_owners(ids, routes, layout, plain, capacity)


def sequences_of(ids: KeyedJaggedTensor, layout: Layout, features: Sequence[FeatureConfig]) -> list[JaggedTensor]:
    """The rows of each feature in its table, with its weights, as the plain lookup lays them out."""
    shapes = dict(layout.shapes)
    return [sequence_rows(ids, f, shapes[f.table][0]) for f in features]


def fetch_rows(
    banks: Sequence[Tensor],
    bags: Sequence[JaggedTensor],
    routed: Routed,
    routes: Routes,
    layout: Layout,
    implementation,
    codec: Codec | None = None,
) -> dict[int, Tensor]:
    """{lane: f[N, width]}: a row for each id of the lane's sequence, zeros for padding."""
    rows, out = fetched(banks, routed, routes, implementation, codec), {}
    for i, lane in enumerate(routes.lanes):
        places = lane_places(routed, i, bags[lane.feature].capacity)
        have = rows[layout.shards[lane.shard].bank]
        taken = have[places.clamp(min=0)]
        out[i] = torch.where((places >= 0)[:, None], taken, 0)
    return out


def lane_places(routed: Routed, lane: int, capacity: int) -> Tensor:
    """i64[N]: where each id of a lane stands among the n · C rows that this rank sent; -1 for padding and for ids without a place."""
    first, last = (routed.own_offsets[k * routed.num_bags] for k in (lane, lane + 1))
    at = first + torch.arange(capacity, device=routed.sent.device)
    most = max(routed.sent.shape[0], 1) - 1
    return torch.where(at < last, routed.sent[at.clamp(max=most)], -1)


def send_rows(
    d_lanes: Mapping[int, Tensor], routed: Routed, routes: Routes, layout: Layout, codec: Codec | None = None
) -> dict[int, RowGrads]:
    """{bank: RowGrads} at the owners, of Entries for each sender in turn: the transpose of `fetch_rows`; `codec.forward` is how they travel."""
    n = routes.num_ranks
    room, sent = routed.rows.shape[0] // n, {}
    for b in dict.fromkeys(routes.banks):
        own = [i for i, x in enumerate(routes.lanes) if layout.shards[x.shard].bank == b]
        places = torch.cat([lane_places(routed, i, d_lanes[i].shape[0]) for i in own])
        d = torch.cat([d_lanes[i] for i in own])
        sent[b] = _sent_blocks(torch.where((places >= 0)[:, None], d, 0), places, n, room)
    if routes.axes:
        got = send("all_to_all", list(sent.values()), routes.axes, codec, [(x.shape[-1],) for x in sent.values()])
        sent = dict(zip(sent, got, strict=True))
    out = {}
    for b, d in sent.items():
        rows = routed.rows_of(b, routes).unflatten(0, (n, room))
        terms = tuple(Entries(rows[s], d[s]) for s in range(n))
        out[b] = RowGrads(terms, layout.banks[b].rows, layout.banks[b].dim, False, routes.axes)
    return out


def lane_columns(
    d: Mapping[str, Tensor], routes: Routes, layout: Layout, features: Sequence[FeatureConfig]
) -> dict[int, Tensor]:
    """{lane: f[N, width]}: each lane's columns of the cotangents of the sequences' rows."""
    out = {}
    for i, lane in enumerate(routes.lanes):
        shard = layout.shards[lane.shard]
        out[i] = d[features[lane.feature].name][:, shard.first : shard.last]
    return out
