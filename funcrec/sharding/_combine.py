"""combine: owners send rows, or sums of rows, back to the ranks that hold the ids. Here is also its transpose.

    sums:  acts[b] = 1/len_b · Σ_owners Σ_{i of b there} s_i · row_i
    the owners pool; this rank adds the sums, and divides for a mean
    rows:  acts[b] = 1/len_b · Σ_{i of b} s_i · row_i
    owners send single rows; this rank pools them as one process does
    d_acts[b] ─▶ every owner of rows of b ─▶ Bags: s_i / len_b · e_{row_i} ⊗ d_acts[b]

Shapes: n ranks, B bags on each, L lanes, K lanes on a rank, W their columns, C rows in a block.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from funcrec.kernels import ops
from funcrec.kernels.forms import Feature
from funcrec.mesh import Codec, send
from funcrec.sharding._lanes import Lane, Routes
from funcrec.sharding._route import Routed
from funcrec.sharding.placement._layout import Bank
from funcrec.tables import Bags, FeatureConfig, RowGrads, gather_rows, pooled_lookup

Banks = Mapping[str, Tensor]


def pooled_there(
    banks: Banks, routed: Routed, routes: Routes, implementation: str | None, codec: Codec | None = None
) -> dict[int, Tensor]:
    """Return {lane: f[B, width]}, the pooled bags of this rank, from the sums that owners send back."""
    return combine(pool(banks, routed, routes, implementation), routed, routes, codec)


def pool(banks: Banks, routed: Routed, routes: Routes, implementation: str | None) -> Tensor:
    """Return the sums that this rank sends back to each sender, f[n, B, W], place by place.

    A sum adds the rows of this rank that a bag of the sender names.
    """
    used, width = list(routes.lanes_of_banks), sum(routes.widths)
    forms = [
        form._replace(table=used.index(routes.banks[k]), column=sender * width + form.column)
        for sender in range(routes.num_ranks)
        for k, form in enumerate(place_forms(routed, routes, sender))
    ]
    tables = [banks[b.name] for b in used]
    if any(b.bits for b in used):  # then all banks come from quantised tables
        bits, dims = [b.bits for b in used], [b.dim for b in used]
        out = ops.quantized_lookup(
            tables, [routed.rows], routed.offsets, routed.weights, forms, routed.num_bags, bits, dims,
            implementation=implementation
        )  # fmt: skip
        return out.unflatten(1, (routes.num_ranks, -1)).transpose(0, 1).contiguous()
    out = pooled_lookup(
        tables, [routed.rows], routed.offsets, routed.weights, forms, routed.num_bags, routes.num_ranks,
        implementation=implementation
    )  # fmt: skip
    return out.unflatten(0, (routes.num_ranks, -1))


def place_forms(routed: Routed, routes: Routes, sender: int) -> list[Feature]:
    """Return the places of one sender, as features of a kernel.

    The kernel computes weighted sums. For a mean, the rank that has the bag divides.
    """
    bags = routed.num_bags
    first = sender * (len(routes.banks) * bags + 1)  # each sender has one more boundary than bags
    is_weighted = routed.weights is not None
    return [
        Feature(0, 0, first + k * bags, _longest(routes, k), False, is_weighted, column)
        for k, column in enumerate(routes.columns)
    ]


def _longest(routes: Routes, place: int) -> int:
    """Return the most ids in a bag of a place; 0 if a feature has no `max_length`.

    Bags arrive cut, so the number only bounds how many entries a gradient has.
    """
    known = [routes.lanes[x[place]].feature.max_length for x in routes.served if x[place] >= 0]
    return 0 if None in known else max(known)


def pooled_here(
    banks: Banks, routed: Routed, routes: Routes, implementation: str | None, codec: Codec | None = None
) -> dict[int, Tensor]:
    """Return {lane: f[B, width]}, the pooled bags of this rank, from the rows that owners send back.

    They have the bits of one process.
    """
    rows, out = fetch(banks, routed, routes, implementation, codec), {}
    for bank, lanes in routes.lanes_of_banks.items():
        pooled = pooled_lookup(
            [rows[bank]],
            [routed.sent],
            routed.own_offsets,
            routed.own_weights,
            lane_forms(routed, routes, bank),
            routed.num_bags,
            implementation=implementation,
        )
        out |= dict(zip(lanes, pooled.split(bank.dim, 1), strict=True))
    return out


def lane_forms(routed: Routed, routes: Routes, bank: Bank) -> list[Feature]:
    """Return the lanes of a bank, in adjacent columns, as features of a kernel.

    The kernel reads, for the bags of this rank, the rows at the places `sent`.
    """
    is_weighted = routed.own_weights is not None
    return [
        Feature(0, 0, i * routed.num_bags, 0, routes.lanes[i].feature.pooling == "mean", is_weighted, c * bank.dim)
        for c, i in enumerate(routes.lanes_of_banks[bank])
    ]


def fetch(
    banks: Banks, routed: Routed, routes: Routes, implementation: str | None, codec: Codec | None = None
) -> dict[Bank, Tensor]:
    """Return {bank: f[n · C, dim]}, the row of each sent id, in the place of the id.

    At the places of ids of other banks it has zeros.
    """
    rows = {
        b: rows_of(banks, b, routed.rows_of(b, routes), implementation).unflatten(0, (routes.num_ranks, -1))
        for b in routes.lanes_of_banks
    }
    if routes.axes:
        got = send("all_to_all", list(rows.values()), routes.axes, codec, [(x.shape[-1],) for x in rows.values()])
        rows = dict(zip(rows, got, strict=True))
    return {b: x.flatten(0, 1) for b, x in rows.items()}


def rows_of(banks: Banks, bank: Bank, rows: Tensor, implementation: str | None) -> Tensor:
    """Return the rows of a bank, f[N, dim]. Rows of a quantised bank are decoded."""
    if bank.bits:
        return ops.quantized_rows(banks[bank.name], rows, bank.bits, bank.dim, implementation=implementation)
    return gather_rows(banks[bank.name], rows, implementation=implementation)


def combine(pooled: Tensor, routed: Routed, routes: Routes, codec: Codec | None = None) -> dict[int, Tensor]:
    """Return {lane: f[B, width]}, the pooled bags of this rank, from the sums of all owners.

    This rank divides the means.
    """
    back = send("all_to_all", [pooled], routes.axes, codec, [routes.widths])[0] if routes.axes else pooled
    out = {}
    for i, lane in enumerate(routes.lanes):
        # The sum runs over the owners of the table's parts, in the order of the parts, not in the order
        # of the bag's ids. So it has other bits than in one process.
        at = [(r, routes.columns[routes.served[r].index(i)]) for r in lane.shard.ranks]
        total = back[at[0][0], :, at[0][1] : at[0][1] + lane.bank.dim]
        for r, c in at[1:]:
            total = total + back[r, :, c : c + lane.bank.dim]
        out[i] = _divided(total, routed, i, lane.feature)
    return out


def combine_transpose(
    d_lanes: Mapping[int, Tensor], routed: Routed, routes: Routes, codec: Codec | None = None
) -> dict[str, RowGrads]:
    """Return {bank: RowGrads} at the owners, from the cotangents of the bags.

    `codec.forward` codes the cotangents. d_acts is divided by len_b before it is sent. The terms of a weighted mean
    contain s_i / len_b instead (`scales`).
    """
    d_lanes = {
        i: _scaled(d, routed, i, routes.lanes[i]) if _is_mean(routes.lanes[i]) else d for i, d in d_lanes.items()
    }
    weights = routed.weights if routed.scales is None else routed.scales
    blank = [torch.zeros_like(d_lanes[0][:, :1]).expand(-1, b.dim) for b in routes.banks]
    to_rank = lambda places: torch.cat([blank[k] if i < 0 else d_lanes[i] for k, i in enumerate(places)], 1)
    if not routes.axes:
        d = to_rank(routes.served[0])[None]
    elif len(set(routes.served)) == 1:  # all ranks get the same cotangents
        (d,) = send("all_gather", [to_rank(routes.served[0])], routes.axes, codec, [routes.widths])
    else:
        each = torch.stack([to_rank(places) for places in routes.served])
        (d,) = send("all_to_all", [each], routes.axes, codec, [routes.widths])
    places = routes.places_of_banks
    terms: dict[Bank, list[Bags]] = {b: [] for b in places}
    # One term per sender, in the order of the global batch: `coalesce` adds the gradients of a row in this order.
    for sender, d_sender in enumerate(d.unbind(0)):  # one tensor for all banks, because it may be sent again
        forms = place_forms(routed, routes, sender)
        for b, own in places.items():
            terms[b].append(Bags(d_sender, routed.rows, routed.offsets, weights, tuple(forms[k] for k in own)))
    return {b.name: RowGrads(tuple(t), b.rows, b.dim, False, routes.axes) for b, t in terms.items()}


def _divided(x: Tensor, routed: Routed, lane: int, feature: FeatureConfig) -> Tensor:
    return x / routed.lengths(lane).clamp(min=1)[:, None].to(x.dtype) if feature.pooling == "mean" else x


def _is_mean(lane: Lane) -> bool:
    return lane.feature.pooling == "mean" and not lane.feature.weighted


def _scaled(d: Tensor, routed: Routed, i: int, lane: Lane) -> Tensor:
    """Return d divided by the lengths of the bags, by one factor, in the dtype in which rows are summed.

    The kernels divide in the same way.
    """
    acc = ops.accumulation_dtype(lane.bank.dtype)
    return d.to(acc) * (1 / routed.lengths(i).clamp(min=1).double())[:, None].to(acc)
