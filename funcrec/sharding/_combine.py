"""combine: owners send rows, or sums of rows, back to the ranks that hold the ids. Here is also its transpose.

    sums:  acts[b] = 1/len_b · Σ_owners Σ_{i of b there} s_i · row_i
    the owners pool; this rank adds the sums, and divides for a mean
    rows:  acts[b] = 1/len_b · Σ_{i of b} s_i · row_i
    owners send single rows; this rank pools them as one process does
    d_acts[b] ─▶ every owner of rows of b ─▶ Bags: s_i / len_b · e_{row_i} ⊗ d_acts[b]

Shapes: n ranks, B bags on each, L lanes, K lanes on a rank, W their columns, C rows in a block. A group g of places has
B_g bags, if features have different numbers of bags.
"""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from funcrec.core import is_by_tree
from funcrec.jagged import offsets_of
from funcrec.kernels import ops
from funcrec.kernels.forms import Feature
from funcrec.mesh import Codec, send
from funcrec.sharding._lanes import Lane, Routes, most_of, places_of
from funcrec.sharding._route import Routed, SentIds
from funcrec.sharding.placement._layout import Bank
from funcrec.tables import Bags, FeatureConfig, RowGrads, gather_rows, pooled_lookup

Banks = Mapping[str, Tensor]
MOST_ADDED = 8  # the most ranks whose values are added, or stacked, one by one
ADDED_ALIKE = (torch.float32, torch.float64)  # the dtypes in which a lookup adds as torch.add does


def pooled_there(
    banks: Banks, routed: Routed, routes: Routes, implementation: str | None, codec: Codec | None = None
) -> dict[int, Tensor]:
    """Return {lane: f[B, width]}, the pooled bags of this rank, from the sums that owners send back."""
    return combine(pool(banks, routed, routes, implementation), routed, routes, codec)


def pool(banks: Banks, routed: Routed, routes: Routes, implementation: str | None) -> list[Tensor]:
    """Return the sums that this rank sends back to each sender, f[n, B_g, W_g] for each group, place by place.

    A sum adds the rows of this rank that a bag of the sender names.
    """
    return [_pool_group(banks, routed, routes, g, implementation) for g in range(len(routes.groups))]


def _pool_group(banks: Banks, routed: Routed, routes: Routes, group: int, implementation: str | None) -> Tensor:
    used, width, (_, places) = list(routes.lanes_of_banks), sum(routes.widths[group]), routes.groups[group]
    num_bags, each = _bags_of(routed, routes, group), range(routes.num_ranks)
    forms = [
        own[k]._replace(table=used.index(routes.banks[k]), column=sender * width + own[k].column)
        for sender, own in enumerate(place_forms(routed, routes, sender) for sender in each)
        for k in places
    ]
    tables = [banks[b.name] for b in used]
    if any(b.bits for b in used):  # then all banks come from quantised tables
        bits, dims = [b.bits for b in used], [b.dim for b in used]
        out = ops.quantized_lookup(
            tables, [routed.rows], routed.offsets, routed.weights, forms, num_bags, bits, dims,
            implementation=implementation
        )  # fmt: skip
        return out.unflatten(1, (routes.num_ranks, -1)).transpose(0, 1).contiguous()
    out = pooled_lookup(
        tables, [routed.rows], routed.offsets, routed.weights, forms, num_bags, routes.num_ranks,
        implementation=implementation
    )  # fmt: skip
    return out.unflatten(0, (routes.num_ranks, -1))


def _bags_of(routed: Routed, routes: Routes, group: int) -> int:
    count = routes.groups[group][0]
    return routed.num_bags if count is None else count


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
    return most_of(routes.lanes[x[place]].feature.max_length for x in routes.served if x[place] >= 0) or 0


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
        each = zip(lanes, pooled.split(bank.dim, 1), strict=True)
        out |= {i: own_bags(x, routes.lanes[i]) for i, x in each}
    return out


def lane_forms(routed: SentIds, routes: Routes, bank: Bank) -> list[Feature]:
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


def combine(pooled: Sequence[Tensor], routed: Routed, routes: Routes, codec: Codec | None = None) -> dict[int, Tensor]:
    """Return {lane: f[B, width]}, the pooled bags of this rank, from the sums of all owners.

    This rank divides the means.
    """
    back = send("all_to_all", pooled, routes.axes, codec, routes.widths) if routes.axes else pooled
    out, group_of = {}, routes.group_of_place
    place_of = {own: {i: k for k, i in enumerate(own)} for own in set(routes.served)}
    # The sum runs over the owners of the table's parts, in the order of the parts, not in the order
    # of the bag's ids. So it has other bits than in one process.
    at = {i: [(r, place_of[routes.served[r]][i]) for r in x.shard.ranks] for i, x in enumerate(routes.lanes)}
    many: dict[tuple[int, Bank], list[int]] = {}
    for i, lane in enumerate(routes.lanes):
        groups = {group_of[k] for _, k in at[i]}
        if len(at[i]) > MOST_ADDED and len(groups) == 1 and back[0].dtype in ADDED_ALIKE:
            many.setdefault((groups.pop(), lane.bank), []).append(i)
            continue
        out[i] = functools.reduce(
            torch.add, (own_bags(back[group_of[k]][r], lane, routes.columns[k]) for r, k in at[i])
        )
    for (group, bank), lanes in many.items():
        places = [k for k in routes.places_of_banks[bank] if group_of[k] == group]
        out |= _added(back[group], bank, places, {i: at[i] for i in lanes}, routes)
    return {i: _divided(own_bags(out[i], x), routed, i, x.feature) for i, x in enumerate(routes.lanes)}


def _added(
    x: Tensor, bank: Bank, places: Sequence[int], at: Mapping[int, Sequence[tuple[int, int]]], routes: Routes
) -> dict[int, Tensor]:
    """Return {lane: f[B, D], the sum of its bags over its owners, in their order}, for lanes of a bank.

    It is one lookup, of bags that hold a row of each owner. Additions would be one operation for each lane and owner.

    x: f[n, B, W], what the owners sent for a group of places. places: those of the bank in the group. at: {lane: its
    (owner, place)}.
    """
    first, number, num_bags = routes.columns[places[0]], {k: j for j, k in enumerate(places)}, x.shape[1]
    table = x[:, :, first : first + len(places) * bank.dim].reshape(-1, bank.dim)  # row (r · B + b) · K + j
    begin = [r * num_bags * len(places) + number[k] for owners in at.values() for r, k in owners]
    counts = [len(owners) for owners in at.values()]
    begins, bags = torch.tensor(begin, device=x.device).split(counts), torch.arange(num_bags, device=x.device)[:, None]
    rows = torch.cat([(b + bags * len(places)).flatten() for b in begins])
    offsets = offsets_of(torch.tensor(counts, device=x.device)[:, None].expand(-1, num_bags).flatten())
    forms = [Feature(0, 0, j * num_bags, 0, False, False, j * bank.dim) for j in range(len(at))]
    total = pooled_lookup([table], [rows], offsets, None, forms, num_bags)
    return dict(zip(at, total.split(bank.dim, 1), strict=True))


def combine_transpose(
    d_lanes: Mapping[int, Tensor], routed: Routed, routes: Routes, codec: Codec | None = None
) -> dict[str, RowGrads]:
    """Return {bank: RowGrads} at the owners, from the cotangents of the bags.

    `codec.forward` codes the cotangents. d_acts is divided by len_b before it is sent. The terms of a weighted mean
    contain s_i / len_b instead (`scales`). Inside of `invariant`, terms stand feature by feature, and sender by sender
    within a feature: one process that has the global batch adds in this order.
    """
    d_lanes = {
        i: _scaled(d, routed, i, routes.lanes[i]) if _is_mean(routes.lanes[i]) else d for i, d in d_lanes.items()
    }
    weights = routed.weights if routed.scales is None else routed.scales
    if not routes.axes:
        d = [x[None] for x in _served(d_lanes, routes.served[0], routed, routes)]
    elif len(set(routes.served)) == 1:  # all ranks get the same cotangents
        own = _served(d_lanes, routes.served[0], routed, routes)
        d = send("all_gather", own, routes.axes, codec, routes.widths)
    else:
        if routes.num_ranks > MOST_ADDED:
            own = [_served_by_all(d_lanes, routed, routes, g) for g in range(len(routes.groups))]
        else:
            each = [_served(d_lanes, lanes, routed, routes) for lanes in routes.served]
            own = [torch.stack(x) for x in zip(*each, strict=True)]
        d = send("all_to_all", own, routes.axes, codec, routes.widths)
    terms: dict[Bank, list[Bags]] = {b: [] for b in routes.places_of_banks}
    if is_by_tree():
        forms = [place_forms(routed, routes, s) for s in range(routes.num_ranks)]
        for b, own in routes.places_of_banks.items():
            each = [(d[routes.group_of_place[k]][s], forms[s][k]) for k in own for s in range(routes.num_ranks)]
            terms[b] = [Bags(x, routed.rows, routed.offsets, weights, (form,)) for x, form in each]
        return by_bank(terms, routes)
    # Terms sender by sender, in the order of the global batch: `coalesce` adds the gradients of a row in this order.
    for sender, d_groups in enumerate(zip(*(x.unbind(0) for x in d), strict=True)):
        forms = place_forms(routed, routes, sender)
        for d_sender, (_, places) in zip(d_groups, routes.groups, strict=True):  # one tensor for all banks of a group
            for b, own in routes.places_of_banks.items():
                if mine := tuple(forms[k] for k in own if k in places):
                    terms[b].append(Bags(d_sender, routed.rows, routed.offsets, weights, mine))
    return by_bank(terms, routes)


def by_bank(terms: Mapping[Bank, Sequence[Bags]], routes: Routes) -> dict[str, RowGrads]:
    return {b.name: RowGrads(tuple(t), b.rows, b.dim, False, routes.axes) for b, t in terms.items()}


def _served(d_lanes: Mapping[int, Tensor], lanes: Sequence[int], routed: Routed, routes: Routes) -> list[Tensor]:
    """Return the cotangents of the lanes that a rank serves, f[B_g, W_g] for each group, place by place."""
    out = []
    for g, (_, places) in enumerate(routes.groups):
        num_bags = _bags_of(routed, routes, g)
        blank = lambda k, n=num_bags: torch.zeros_like(d_lanes[0][:1, :1]).expand(n, routes.banks[k].dim)
        each = [blank(k) if lanes[k] < 0 else with_zeros(d_lanes[lanes[k]], num_bags) for k in places]
        out.append(torch.cat(each, 1))
    return out


def _served_by_all(d_lanes: Mapping[int, Tensor], routed: Routed, routes: Routes, group: int) -> Tensor:
    """Return the cotangents of a group's lanes for every rank, f[n, B_g, W_g]: a stack of `_served`.

    Each bank takes the lanes of all ranks in one operation, where `_served` takes them one by one.
    """
    places, num_bags, blocks = routes.groups[group][1], _bags_of(routed, routes, group), []
    for bank, own in places_of(routes.banks[k] for k in places).items():  # places of a bank are adjacent
        at = [[routes.served[r][places[j]] for j in own] for r in range(routes.num_ranks)]
        lanes = sorted({i for row in at for i in row if i >= 0})
        number = {i: j for j, i in enumerate(lanes)} | {-1: len(lanes)}  # the last is zeros
        kept = [with_zeros(d_lanes[i], num_bags) for i in lanes]
        stacked = torch.stack([*kept, torch.zeros_like(d_lanes[0][:1, :1]).expand(num_bags, bank.dim)])
        wanted = torch.tensor([number[i] for row in at for i in row], device=stacked.device)
        taken = stacked.index_select(0, wanted).unflatten(0, (routes.num_ranks, len(own)))
        blocks.append(taken.transpose(1, 2).flatten(2))
    return torch.cat(blocks, 2)


def with_zeros(d: Tensor, num_bags: int) -> Tensor:
    """Return d f[B_f, D] with rows of zeros after it, f[B, D]."""
    return d if d.shape[0] == num_bags else torch.cat([d, d.new_zeros(num_bags - d.shape[0], d.shape[1])])


def own_bags(x: Tensor, lane: Lane, column: int = 0) -> Tensor:
    """Return the bags of a lane among more bags, and its columns, f[B_f, dim]."""
    return (x if lane.num_bags is None else x[: lane.num_bags])[:, column : column + lane.bank.dim]


def _divided(x: Tensor, routed: Routed, lane: int, feature: FeatureConfig) -> Tensor:
    if feature.pooling != "mean":
        return x
    return x / routed.lengths(lane)[: x.shape[0]].clamp(min=1)[:, None].to(x.dtype)


def _is_mean(lane: Lane) -> bool:
    return lane.feature.pooling == "mean" and not lane.feature.weighted


def _scaled(d: Tensor, routed: Routed, i: int, lane: Lane) -> Tensor:
    """Return d divided by the lengths of the bags, by one factor, in the dtype in which rows are summed.

    The kernels divide in the same way.
    """
    acc = ops.accumulation_dtype(lane.bank.dtype)
    return d.to(acc) * (1 / routed.lengths(i)[: d.shape[0]].clamp(min=1).double())[:, None].to(acc)
