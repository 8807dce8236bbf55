"""Looks up a rank's bags in sharded tables, with one exchange for each set of axes that cuts the tables.

    ids ─route─▶ rows at their owners ─fetch─▶ each lane's columns ─▶ acts;
    d_acts ─▶ each lane's columns ─transpose─▶ {bank: RowGrads}

Shapes: B bags on this rank, D dim.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from funcrec.core import fail, replace
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor, are_equal, with_bags
from funcrec.mesh import bound_names
from funcrec.sharding._lanes import Lane, Routes, routes_of
from funcrec.sharding._sequences import lane_rows, sequence_routes
from funcrec.sharding._transport import POOLED, SEQUENCES, Steps, Transport, steps_of
from funcrec.sharding.placement._layout import Layout
from funcrec.tables import FeatureConfig, LookupResult, RowGrads, placed_as, sequence_rows

Features = tuple[FeatureConfig, ...]
Rounded = Callable[[Any, Routes, str | None], tuple[Mapping[str, Tensor], Any]]


def read_sharded(
    tables: Any,
    ids: KeyedJaggedTensor,
    features: Sequence[FeatureConfig],
    implementation: str | None = None,
    rounded: Rounded | None = None,
) -> LookupResult:
    """Return the lookup of this rank's bags.

    The transpose sends the cotangents of the bags of all ranks to the owners of the rows.

    tables: ShardedTables.
    features: all of them pooled, or all of them sequences.
    rounded: (routed, routes, implementation) -> the tensors to read instead of the banks, and `routed` with rows of
    these tensors.
    """
    if (read := placed_as(tables.of).read) is not None:  # features name other things than the parts of this type
        return read(replace(tables, of=dict), ids, features, implementation)
    is_sequence = features[0].pooling == "none"
    check_bound("funcrec.lookup_sequence" if is_sequence else "funcrec.lookup", tables.layout)
    return (read_sequences if is_sequence else read_pooled)(tables, ids, tuple(features), implementation, rounded)


def read_pooled(
    tables: Any, ids: KeyedJaggedTensor, features: tuple[FeatureConfig, ...], implementation, rounded: Rounded | None
) -> LookupResult:
    read = read_groups(tables, ids, [features], implementation, rounded)
    return read._replace(out=read.out[0], transpose=lambda d_acts, saved: read.transpose([d_acts], saved))


def read_each(
    tables: Any, ids: KeyedJaggedTensor, groups: Sequence[Features], implementation: str | None = None
) -> LookupResult | None:
    """Return the lookup of groups of features with different numbers of bags, by the exchanges of one lookup.

    It returns None for types of tables that have a `read` of their own.
    """
    if placed_as(tables.of).read is not None:
        return None
    check_bound("funcrec.lookup", tables.layout)
    return read_groups(tables, ids, groups, implementation, None)


def read_groups(
    tables: Any, ids: KeyedJaggedTensor, groups: Sequence[Features], implementation, rounded: Rounded | None
) -> LookupResult:
    """Return the lookup whose `out` has a KeyedTensor f[B_g, ΣD_g] for each group.

    The ids of all groups travel together, with empty bags after those of a key. A row travels for each bag of a group.
    """
    features = tuple(f for g in groups for f in g)
    counts = None if len(groups) == 1 else tuple(ids.bags_of(f.key) for f in features)
    ids = ids if counts is None else equal_bags(ids, features)
    each = routes_of(tables.layout, features, counts)
    lanes_of = lambda lanes, routed, routes: lanes
    columns, exchanges = exchanged(tables, ids, features, each, POOLED, lanes_of, implementation, rounded)
    out, places = [], {}
    for i, g in enumerate(groups):
        dims = {f.name: sum(x.shape[1] for x in columns[f.name]) for f in g}
        places |= {n: (i, at) for n, at in zip(dims, accumulate(dims.values(), initial=0), strict=False)}
        values = torch.cat([x for name in dims for x in columns[name]], 1)
        out.append(KeyedTensor(values, tuple(dims), tuple(dims.values())))

    def transpose(d_acts: Sequence[KeyedTensor], exchanges: Sequence) -> dict[str, RowGrads]:
        def own(x: Lane) -> Tensor:
            group, at = places[x.feature.name]
            return d_acts[group].values[:, at + x.shard.first : at + x.shard.last]

        return sent_back(tables.transport, POOLED, routes_of(whole_rows(tables), features, counts), exchanges, own)

    return LookupResult(out, lambda: exchanges, transpose, overflows_of(tables.transport, each, exchanges))


def equal_bags(ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> KeyedJaggedTensor:
    """Return the ids of the features' keys, with as many bags for each key: empty bags follow.

    No id moves if the features read all keys.
    """
    keys = [k for k in ids.keys if any(f.key == k for f in features)]
    used = ids if len(keys) == len(ids.keys) else ids.permute(keys)
    return with_bags(used, [max(map(used.bags_of, used.keys))] * len(used.keys))


def read_sequences(
    tables: Any, ids: KeyedJaggedTensor, features: tuple[FeatureConfig, ...], implementation, rounded: Rounded | None
) -> LookupResult:
    num_rows = {n: rows for n, (rows, _) in tables.layout.shapes}
    bags = {f.name: sequence_rows(ids, f, num_rows[f.table]) for f in features}
    lanes_of = lambda rows, routed, routes: lane_rows(rows, routed, routes, {k: x.capacity for k, x in bags.items()})
    each = sequence_routes(tables.layout, features)
    ids = ids if are_equal(ids.bags_of(f.key) for f in features) else equal_bags(ids, features)
    columns, exchanges = exchanged(tables, ids, features, each, SEQUENCES, lanes_of, implementation, rounded)
    out = {k: JaggedTensor(torch.cat(columns[k], 1), x.offsets, x.weights) for k, x in bags.items()}

    def transpose(d_rows: Mapping[str, Tensor], exchanges: Sequence) -> dict[str, RowGrads]:
        own = lambda x: d_rows[x.feature.name][:, x.shard.first : x.shard.last]
        return sent_back(tables.transport, SEQUENCES, sequence_routes(whole_rows(tables), features), exchanges, own)

    return LookupResult(out, lambda: exchanges, transpose, overflows_of(tables.transport, each, exchanges))


def exchanged(
    tables: Any,
    ids: KeyedJaggedTensor,
    features: Sequence[FeatureConfig],
    each: Sequence[Routes],
    answers: Mapping[str, Steps],
    lanes_of: Callable[[Any, Any, Routes], Mapping[int, Tensor]],
    implementation: str | None,
    rounded: Rounded | None,
) -> tuple[dict[str, list[Tensor]], list]:
    """Return ({feature: its blocks of columns, in order}, [the `routed` of each exchange]).

    lanes_of: (fetched, routed, routes) -> {lane: its block}.
    """
    blocks: dict[str, dict[int, Tensor]] = {f.name: {} for f in features}
    exchanges = []
    for routes in each:
        steps = steps_of(answers, tables.transport, routes)
        routed = steps.route(ids, routes, tables.transport.capacity)
        exchanges.append(routed)
        banks, at = (tables.banks, routed) if rounded is None else rounded(routed, routes, implementation)
        fetched = steps.fetch(banks, at, routes, implementation, tables.transport.codec)
        for i, block in lanes_of(fetched, routed, routes).items():
            lane = routes.lanes[i]
            blocks[lane.feature.name][lane.shard.first] = unless_lost(block, tables.transport, routes, routed)
    return {name: [own[first] for first in sorted(own)] for name, own in blocks.items()}, exchanges


def sent_back(
    transport: Transport,
    answers: Mapping[str, Steps],
    each: Sequence[Routes],
    exchanges: Sequence,
    own: Callable[[Lane], Tensor],
) -> dict[str, RowGrads]:
    """Return {bank: RowGrads} of this rank. The `routed` of an exchange says where cotangents go.

    own: a lane -> its columns of the cotangent.
    """
    out: dict[str, RowGrads] = {}
    for routes, routed in zip(each, exchanges, strict=True):
        transpose = steps_of(answers, transport, routes).transpose
        d_lanes = {i: unless_lost(own(x), transport, routes, routed) for i, x in enumerate(routes.lanes)}
        out |= transpose(d_lanes, routed, routes, transport.codec_back)
    return out


def has_capacity(transport: Transport, routes: Routes) -> bool:
    """Return whether an exchange may lack room for an id.

    An exchange without axes has room: the rank reads its own copies in place.
    """
    return transport.capacity is not None and bool(routes.axes)


def unless_lost(x: Tensor, transport: Transport, routes: Routes, routed: Any) -> Tensor:
    """Return x, which belongs to the rank's own bags; NaN if an id of that rank found no room.

    The function is linear, and so is its transpose. NaN shows that a part of the batch was lost.
    """
    return x * torch.where(routed.overflow[0] > 0, torch.nan, 1).to(x.dtype) if has_capacity(transport, routes) else x


def overflows_of(transport: Transport, each: Sequence[Routes], exchanges: Sequence) -> tuple[Tensor, ...]:
    """Return the overflow counts of the exchanges that may lack room."""
    both = zip(each, exchanges, strict=True)
    return tuple(x.overflow for routes, x in both if has_capacity(transport, routes))


def whole_rows(tables: Any) -> Layout:
    """Return the layout of the gradients. Gradients of `whole` banks have all columns of their rows."""
    return tables.layout.with_whole_rows(tables.whole)


# -- validators --------------------------------------------------------------------------------------------------


def check_bound(call: str, layout: Layout) -> None:
    missing = [a for a, _ in layout.mesh_shape if a not in bound_names()]
    if missing:
        hint = "shard_map(f, mesh=..., in_specs=(tables.specs(), ...), ...)"
        what = "sharded tables are looked up outside of their mesh."
        fail(call, what, got=f"axes {missing} are not bound", need="a call inside shard_map", hint=hint)
