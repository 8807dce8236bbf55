"""Sequences under a plan: an owner sends each id's row, and the transpose sends each id's gradient to the owner.

    ids ─route─▶ rows at their owners ─gather, all_to_all─▶ one row per id;
    d ─all_to_all─▶ Entries, sender by sender

Ids travel like the ids of pooled features, in blocks of one capacity. A row comes back to the place that its id had in
the block. Weights are not sent: they multiply rows after these arrive, and gradients before they are sent.
Shapes: n ranks, C rows in a block, N places of a sequence's buffer, D dim.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from funcrec.core import Problem, check, is_by_tree, replace, sure
from funcrec.mesh import Codec, send
from funcrec.sharding._lanes import Routes, routes_of
from funcrec.sharding._route import Routed, SentIds, sent_blocks
from funcrec.sharding.placement._layout import Bank, Layout
from funcrec.tables import Entries, FeatureConfig, RowGrads


def sequence_routes(layout: Layout, features: Sequence[FeatureConfig]) -> tuple[Routes, ...]:
    """Return the exchanges of a lookup of sequences, which do not send weights."""
    return routes_of(layout, tuple(replace(f, weighted=False) for f in features))


def lane_rows(
    rows: Mapping[Bank, Tensor], routed: Routed, routes: Routes, sizes: Mapping[str, int]
) -> dict[int, Tensor]:
    """Return {lane: f[N, width]}, the row of each id of the lane's sequence; zeros for padding.

    sizes: N of each feature.
    """
    out = {}
    for i, lane in enumerate(routes.lanes):
        places = lane_places(routed, i, sizes[lane.feature.name])
        taken = rows[lane.bank][places.clamp(min=0)]
        out[i] = torch.where((places >= 0)[:, None], taken, 0)
    return out


def lane_places(routed: SentIds, lane: int, capacity: int) -> Tensor:
    """Return the place of each id of a lane among the n · C rows that this rank sent, i64[N].

    It is -1 for padding and for ids without a place.
    """
    sent = sure(routed.sent)
    first, last = (routed.own_offsets[k * routed.num_bags] for k in (lane, lane + 1))
    at = first + torch.arange(capacity, device=sent.device)
    most = max(sent.shape[0], 1) - 1
    return torch.where(at < last, sent[at.clamp(max=most)], -1)


def send_cotangents(
    d_lanes: Mapping[int, Tensor], routed: Routed, routes: Routes, codec: Codec | None = None
) -> dict[str, RowGrads]:
    """Return {bank: RowGrads} at the owners, with Entries for each sender in turn.

    This is the transpose of `fetch` and `lane_rows`.

    `codec.forward` codes the gradients.
    """
    if is_by_tree():
        check("funcrec.invariant", shared_problems(routes))
    n = routes.num_ranks
    room, sent = routed.rows.shape[0] // n, {}
    for b, own in routes.lanes_of_banks.items():
        places = torch.cat([lane_places(routed, i, d_lanes[i].shape[0]) for i in own])
        d = torch.cat([d_lanes[i] for i in own])
        # d_row of each id goes to the place that the id had in the block.
        # The row of the id came from there, and each place has one id.
        sent[b] = sent_blocks(torch.where((places >= 0)[:, None], d, 0), places, n, room)
    if routes.axes:
        got = send("all_to_all", list(sent.values()), routes.axes, codec, [(x.shape[-1],) for x in sent.values()])
        sent = dict(zip(sent, got, strict=True))
    out = {}
    for b, d in sent.items():
        rows = routed.rows_of(b, routes).unflatten(0, (n, room))
        terms = tuple(Entries(rows[s], d[s]) for s in range(n))
        out[b.name] = RowGrads(terms, b.rows, b.dim, False, routes.axes)
    return out


# -- validators --------------------------------------------------------------------------------------------------


def shared_problems(routes: Routes) -> Iterator[Problem]:
    """Report several sequences of one table: their gradients arrive sender by sender, not sequence by sequence."""
    names: dict[str, list[str]] = {}
    for lane in routes.lanes:
        own = names.setdefault(lane.feature.table, [])
        own += [lane.feature.name] if lane.feature.name not in own else []
    for table, own in names.items():
        if len(own) > 1:
            need, hint = "one sequence of a table in a lookup", "fr.lookup_sequence for each feature"
            yield Problem(f"several sequences read table {table!r} in one lookup on ranks.", f"{own}", need, hint)
