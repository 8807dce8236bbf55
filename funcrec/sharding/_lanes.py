"""Lanes, and the ids of a lookup before they are sent: which ids the lanes read, and where the rows of a lane lie.

    a lane = a feature on a shard of its table: the bags, and the ranks and rows that hold the shard's parts (`Owners`)
Shapes: B bags, L lanes, N ids, W columns that a rank sends back.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from funcrec.core import replace, sure, value_below
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, bag_ids, offsets_of, take_ranges
from funcrec.kernels import owners
from funcrec.kernels.ops import Owners
from funcrec.mesh import are_emulated, is_readable
from funcrec.sharding.placement._layout import Bank, Layout, Shard
from funcrec.tables import FeatureConfig, Hash, hash_lanes


class Lane(NamedTuple):
    """A feature on a shard of its table, and the bank that holds the shard.

    num_rows: the rows of the table. num_bags: the bags of the feature if features have different numbers, else None.
    """

    feature: FeatureConfig
    shard: Shard
    bank: Bank
    num_rows: int
    num_bags: int | None = None


class Routes(NamedTuple):
    """The static description of an exchange.

    lanes: ordered by bank, then by feature.
    served: for each rank the numbers of the lanes that it serves, padded with -1 to one length. Place k belongs
      to one bank, banks[k], on all ranks.
    columns: where the columns of place k begin among the columns that a rank sends back for a bag of the place's group.
    groups: (B_g, the places whose lanes have up to B_g bags) for each number of bags, the greatest first. There is one
      group, with B_g None, if all features have one number.
    """

    axes: tuple[str, ...]
    num_ranks: int
    lanes: tuple[Lane, ...]
    served: tuple[tuple[int, ...], ...]
    banks: tuple[Bank, ...]
    columns: tuple[int, ...]
    groups: tuple[tuple[int | None, tuple[int, ...]], ...]

    @property
    def widths(self) -> list[tuple[int, ...]]:
        """Return the numbers of columns of the places of each group. Those of a group add up to its W."""
        return [tuple(self.banks[k].dim for k in places) for _, places in self.groups]

    @property
    def group_of_place(self) -> dict[int, int]:
        return {k: g for g, (_, places) in enumerate(self.groups) for k in places}

    @property
    def lanes_of_banks(self) -> dict[Bank, list[int]]:
        """Return {bank: the numbers of its lanes}, for the banks that the exchange reads, in order."""
        return places_of(x.bank for x in self.lanes)

    @property
    def places_of_banks(self) -> dict[Bank, list[int]]:
        """Return {bank: the numbers of its places}, in the order of `lanes_of_banks`.

        The places of a bank are adjacent.
        """
        return places_of(self.banks)


def places_of(banks: Iterable[Bank]) -> dict[Bank, list[int]]:
    out: dict[Bank, list[int]] = {}
    for i, b in enumerate(banks):
        out.setdefault(b, []).append(i)
    return out


@functools.lru_cache(maxsize=256)
def routes_of(
    layout: Layout, features: tuple[FeatureConfig, ...], counts: tuple[int, ...] | None = None
) -> tuple[Routes, ...]:
    """Return the exchanges of a lookup, one for each set of axes that its tables are cut over.

    counts: the number of bags of each feature; None if all have one number.
    """
    num_rows, lanes = {n: rows for n, (rows, _) in layout.shapes}, {}
    for f, count in zip(features, counts or [None] * len(features), strict=True):
        for s in (layout.shards[i] for i in layout.shards_of(f.table)):
            lane = Lane(f, s, layout.banks[s.bank], num_rows[f.table], count)
            lanes.setdefault(lane.bank.axes, []).append(lane)
    order = lambda x: (x.shard.bank, -(x.num_bags or 0))  # lanes of one place then have similar numbers of bags
    return tuple(_routes(axes, sorted(own, key=order)) for axes, own in lanes.items())


def _routes(axes: tuple[str, ...], lanes: Sequence[Lane]) -> Routes:
    n, banks = lanes[0].bank.num_ranks, []
    served: list[list[int]] = [[] for _ in range(n)]
    for bank, of_bank in places_of(x.bank for x in lanes).items():
        # All ranks run one graph. So on every rank a bank has as many places
        # as the rank needs that serves most of its lanes.
        own = [[i for i in of_bank if r in lanes[i].shard.ranks] for r in range(n)]
        most = max(map(len, own))
        banks += [bank] * most
        for r in range(n):
            served[r] += own[r] + [-1] * (most - len(own[r]))
    most_bags = [most_of(lanes[own[k]].num_bags for own in served if own[k] >= 0) for k in range(len(banks))]
    groups, columns = [], [0] * len(banks)
    for count in sorted(set(most_bags), key=lambda x: -(x or 0)):
        places = [k for k, x in enumerate(most_bags) if x == count]
        for k, first in zip(places, accumulate((banks[k].dim for k in places), initial=0), strict=False):
            columns[k] = first
        groups.append((count, tuple(places)))
    return Routes(axes, n, tuple(lanes), tuple(map(tuple, served)), tuple(banks), tuple(columns), tuple(groups))


def most_of(numbers: Iterable[int | None]) -> int | None:
    """Return the largest of one or more numbers; None if one of them is not known."""
    given = list(numbers)
    known = [n for n in given if n is not None]
    return max(known) if len(known) == len(given) else None


class ReadIds(NamedTuple):
    """The ids that an exchange reads.

    bags: the bags of the lanes, or of all keys; `lanes` say where the bags of each lane begin.
    num_bags: B.
    capacity: the most ids that the lanes can have.
    bounds: i64[L · B + 1], boundaries of the cut bags, one lane after the other.
    is_placed: whether the caller needs the place to which each id went.
    """

    bags: JaggedTensor
    lanes: list[Owners]
    num_bags: int
    capacity: int
    bounds: Tensor
    is_placed: bool


def read_ids(ids: KeyedJaggedTensor, lanes: Sequence[Lane], *, placed: bool) -> ReadIds:
    """Return the ids that the lanes read.

    If the places of ids are not needed, no id moves: lanes read and cut bags in place.
    """
    features = [x.feature for x in lanes]
    hows = [(x.feature.hash, x.num_rows if x.feature.hash else 0) for x in lanes]
    of_key = {f.key: how for f, how in zip(features, hows, strict=True)}
    is_one_each = ids.strides is None and all(of_key[f.key] == how for f, how in zip(features, hows, strict=True))
    is_weighted = any(f.weighted for f in features)
    if (
        placed or is_weighted or not is_one_each
    ):  # ids move together with weights, and one id may be hashed for several tables
        bags = lane_bags(ids, features)
        num_bags = bags.num_bags // len(features)
        owners_of = lanes_of(lanes, num_bags)
        bags = replace(bags, values=hashed(bags, hows))
        return ReadIds(bags, owners_of, num_bags, bags.capacity, bags.offsets, placed or is_weighted)
    ranges = [ids.bag_range(f.key) for f in features]
    owners_of = [owners_at(first, x.feature.max_length or 0, x) for (first, _), x in zip(ranges, lanes, strict=True)]
    keys = [f.key for f in features]
    bounds = ids.offsets if _is_in_order(ids, features) else offsets_of(torch.cat(_lengths(ids, features)))
    capacity = ids.capacity * max(keys.count(k) for k in keys)
    bags = JaggedTensor(ids.values, ids.offsets)
    bags = replace(bags, values=hashed(bags, [of_key.get(k, (None, 0)) for k in ids.keys]))
    return ReadIds(bags, owners_of, ranges[0][1] - ranges[0][0], capacity, bounds, False)


def room_for(capacity: int | None, most: int, routes: Routes, counts: Callable[[], Tensor]) -> int:
    """Return the room of a block: for all ids of a rank, or, of emulated ranks, for the fullest block.

    Real ranks exchange blocks of one size, which cannot depend on ids. Emulated ranks see the ids of all ranks: with
    room for all ids of a rank, n ranks would hold n · n · `most` numbers. Unused room changes no bit.

    capacity: the room that the caller chose, or None. most: room for all ids. counts: () -> the ids for each owner.
    """
    if capacity is not None and routes.axes:
        return min(capacity, most)
    if not routes.axes or not are_emulated(routes.axes):
        return most
    fullest = counts()
    return max(1, int(value_below(fullest).amax())) if is_readable(fullest) and most else most


def lanes_of(lanes: Sequence[Lane], num_bags: int) -> list[Owners]:
    """Return the Owners of lanes that read their bags one lane after the other."""
    return [owners_at(i * num_bags, 0, x) for i, x in enumerate(lanes)]


def owners_at(first_bag: int, max_length: int, lane: Lane) -> Owners:
    """Return the Owners of a lane that reads the bags from `first_bag` on."""
    shard = lane.shard
    return Owners(first_bag, max_length, lane.num_rows, shard.part, shard.ranks, shard.starts)


def owned_rows(bags: JaggedTensor, lanes: Sequence[Lane]) -> Tensor:
    """Return owner · NOWHERE + row of the owner's bank, i64[N], for each id of the bags; -1 for an id without a row."""
    hows = [(x.feature.hash, x.num_rows) for x in lanes]
    return owners.owned_rows(hashed(bags, hows), bags.offsets, lanes_of(lanes, bags.num_bags // len(lanes)))


def hashed(bags: JaggedTensor, hows: Sequence[tuple[Hash | None, int]]) -> Tensor:
    """Return the row of each id in its table, i[N].

    hows: (hash, rows of the table) for each of as many equal runs of bags.
    """
    if all(hash is None for hash, _ in hows):
        return bags.values
    return hash_lanes(bags.values, lane_of(bags, len(hows)), hows)


def lane_of(bags: JaggedTensor, num_lanes: int) -> Tensor:
    """Return the lane of each id, i64[N]; the last lane for padding."""
    return owners.lane_of(bags.offsets, bags.capacity, num_lanes)


def is_weighted_mean(feature: FeatureConfig) -> bool:
    return feature.weighted and feature.pooling == "mean"


def weight_scales(bags: JaggedTensor, features: Sequence[FeatureConfig]) -> Tensor:
    """Return the factor of the gradient of each id, f64[N].

    It is the id's weight, divided by the length of its bag for a weighted mean.
    """
    # s_i / len_b is rounded once, when it travels
    bag = bag_ids(bags.offsets, bags.capacity).clamp(max=bags.num_bags - 1)
    lengths = bags.lengths.clamp(min=1).double()[bag]
    is_mean = torch.tensor([is_weighted_mean(f) for f in features], device=bag.device)[lane_of(bags, len(features))]
    weights = sure(bags.weights).double()
    return torch.where(is_mean, weights / lengths, weights)


def lane_bags(ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> JaggedTensor:
    """Return the bags of every feature, one feature after the other. The max_length of a feature cuts its bags.

    If no id has to move, the result has the buffer of `ids`.
    """
    keys = [f.key for f in features]
    weights = ids.weights if any(f.weighted for f in features) else None
    if _is_in_order(ids, features):
        return _unit_weights(JaggedTensor(ids.values, ids.offsets, weights), features)
    starts = torch.cat([ids.offsets_for(k)[:-1] for k in keys])
    lengths = torch.cat(_lengths(ids, features))
    most = max(keys.count(k) for k in keys)
    return _unit_weights(take_ranges(ids.values, weights, starts, lengths, ids.capacity * most), features)


def _is_in_order(ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> bool:
    return tuple(f.key for f in features) == ids.keys and all(f.max_length is None for f in features)


def _lengths(ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> list[Tensor]:
    """Return for each feature the lengths of its bags, i[B], cut to max_length."""
    lengths = [ids.offsets_for(f.key).diff() for f in features]
    return [x if f.max_length is None else x.clamp(max=f.max_length) for x, f in zip(lengths, features, strict=True)]


def _unit_weights(bags: JaggedTensor, features: Sequence[FeatureConfig]) -> JaggedTensor:
    """Return the bags with weights of 1 for features that are not weighted."""
    if bags.weights is None or all(f.weighted for f in features):
        return bags
    is_weighted = torch.tensor([f.weighted for f in features], device=bags.values.device)[lane_of(bags, len(features))]
    return JaggedTensor(bags.values, bags.offsets, torch.where(is_weighted, bags.weights, 1))
