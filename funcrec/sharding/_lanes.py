"""The ids of a lookup before they are sent: which of them its lanes read, and where the rows of each lane lie.

    a lane = a feature on a shard of its table: bags, and the ranks and banks' rows of the shard's parts (`Owners`)
Shapes: B bags, L lanes, N ids.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcrec.core import replace
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, bag_ids, offsets_of, take_ranges
from funcrec.kernels import owners
from funcrec.kernels.ops import Owners
from funcrec.sharding._layout import Layout, Shard
from funcrec.tables import FeatureConfig, Hash, hash_lanes


class ReadIds(NamedTuple):
    """What an exchange reads.

    bags: the lanes' bags, or the bags of all keys, among which `lanes` find theirs. num_bags: B. capacity: the ids that the lanes can have.
    bounds: i64[L · B + 1], of the lanes' bags one after the other, as they are cut. is_placed: whether anybody asks where an id went.
    """

    bags: JaggedTensor
    lanes: list[Owners]
    num_bags: int
    capacity: int
    bounds: Tensor
    is_placed: bool


def read_ids(
    ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], shards: Sequence[Shard], layout: Layout, *, placed: bool
) -> ReadIds:
    """Of ids that nobody asks for again nothing is moved: lanes read them, and cut them, where they are."""
    shapes = dict(layout.shapes)
    num_rows = [shapes[s.table][0] for s in shards]
    hows = [(f.hash, n if f.hash else 0) for f, n in zip(features, num_rows, strict=True)]
    of_key = {f.key: how for f, how in zip(features, hows, strict=True)}
    is_one_each = ids.strides is None and all(of_key[f.key] == how for f, how in zip(features, hows, strict=True))
    is_weighted = any(f.weighted for f in features)
    if placed or is_weighted or not is_one_each:
        bags = lane_bags(ids, features)
        num_bags = bags.num_bags // len(features)
        lanes = lanes_of(shards, num_rows, num_bags)
        bags = replace(bags, values=hashed(bags, hows))
        return ReadIds(bags, lanes, num_bags, bags.capacity, bags.offsets, placed or is_weighted)
    ranges = [ids.bag_range(f.key) for f in features]
    lanes = [
        owners_at(first, f.max_length or 0, s, n)
        for (first, _), f, s, n in zip(ranges, features, shards, num_rows, strict=True)
    ]
    keys = [f.key for f in features]
    bounds = ids.offsets if _is_in_order(ids, features) else offsets_of(torch.cat(_lengths(ids, features)))
    capacity = ids.capacity * max(keys.count(k) for k in keys)
    bags = JaggedTensor(ids.values, ids.offsets)
    bags = replace(bags, values=hashed(bags, [of_key.get(k, (None, 0)) for k in ids.keys]))
    return ReadIds(bags, lanes, ranges[0][1] - ranges[0][0], capacity, bounds, False)


def lanes_of(shards: Sequence[Shard], num_rows: Sequence[int], num_bags: int) -> list[Owners]:
    """Lanes that read their bags one lane after the other."""
    return [owners_at(i * num_bags, 0, s, n) for i, (s, n) in enumerate(zip(shards, num_rows, strict=True))]


def owners_at(first_bag: int, max_length: int, shard: Shard, num_rows: int) -> Owners:
    """A lane that reads the bags from `first_bag` on; num_rows: of its table."""
    return Owners(first_bag, max_length, num_rows, shard.part, shard.ranks, shard.starts)


def owned_rows(
    bags: JaggedTensor, features: Sequence[FeatureConfig], shards: Sequence[Shard], layout: Layout
) -> Tensor:
    """i64[N]: owner · NOWHERE + row of the owner's bank, for every id of the lanes' bags; -1 where there is no such row."""
    shapes = dict(layout.shapes)
    num_rows = [shapes[s.table][0] for s in shards]
    lanes = lanes_of(shards, num_rows, bags.num_bags // len(features))
    hows = [(f.hash, n) for f, n in zip(features, num_rows, strict=True)]
    return owners.owned_rows(hashed(bags, hows), bags.offsets, lanes)


def hashed(bags: JaggedTensor, hows: Sequence[tuple[Hash | None, int]]) -> Tensor:
    """i[N]: the rows of the ids in their tables; hows: for equally many bags each, the hash and the height of the table."""
    if all(hash is None for hash, _ in hows):
        return bags.values
    return hash_lanes(bags.values, lane_of(bags, len(hows)), hows)


def lane_of(bags: JaggedTensor, num_lanes: int) -> Tensor:
    """i64[N]: the lane that each id stands in; the last one for padding."""
    return owners.lane_of(bags.offsets, bags.capacity, num_lanes)


def is_weighted_mean(feature: FeatureConfig) -> bool:
    return feature.weighted and feature.pooling == "mean"


def weight_scales(bags: JaggedTensor, features: Sequence[FeatureConfig]) -> Tensor:
    """f64[N]: what an id's gradient is multiplied by: its weight, over its bag's length for a weighted mean."""
    bag = bag_ids(bags.offsets, bags.capacity).clamp(max=bags.num_bags - 1)
    lengths = bags.lengths.clamp(min=1).double()[bag]
    is_mean = torch.tensor([is_weighted_mean(f) for f in features], device=bag.device)[lane_of(bags, len(features))]
    return torch.where(is_mean, bags.weights.double() / lengths, bags.weights.double())


def lane_bags(ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> JaggedTensor:
    """The bags of every feature, one feature after the other, cut to its max_length; the buffer itself where nothing has to move."""
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
    """i[B] of each feature's bags, cut."""
    lengths = [ids.offsets_for(f.key).diff() for f in features]
    return [x if f.max_length is None else x.clamp(max=f.max_length) for x, f in zip(lengths, features, strict=True)]


def _unit_weights(bags: JaggedTensor, features: Sequence[FeatureConfig]) -> JaggedTensor:
    """The bags with weights of 1 for features that are not weighted."""
    if bags.weights is None or all(f.weighted for f in features):
        return bags
    is_weighted = torch.tensor([f.weighted for f in features], device=bags.values.device)[lane_of(bags, len(features))]
    return JaggedTensor(bags.values, bags.offsets, torch.where(is_weighted, bags.weights, 1))
