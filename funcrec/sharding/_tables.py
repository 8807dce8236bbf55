"""Tables under a plan: a value like the dict of tables, that lookups and steps take in its place.

lookup(shard_tables(tables, plan), ids) == lookup(tables, ids)        on every rank, for its own bags
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from funcrec.core import Count, Problem, check, describe, fail, pytree, replace, typed, value_below
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from funcrec.mesh import (
    Codec,
    Mesh,
    P,
    all_gather,
    bind,
    bits_of,
    bound_names,
    checksum,
    codec_problems,
    pmax,
    unshard,
)
from funcrec.sharding._distinct import RoutedRows, fetch_rows_transpose, fetch_transpose, route_rows
from funcrec.sharding._layout import Bank, Layout, layout_of, pack, unpack
from funcrec.sharding._placement import Plan
from funcrec.sharding._route import Routed, combine, combine_transpose, fetch, pool, route, routes_of
from funcrec.sharding._sequences import fetch_rows, lane_columns, route_sequences, send_rows, sequences_of
from funcrec.tables import (
    FeatureConfig,
    Owner,
    RowGrads,
    TableConfig,
    check_lookup,
    is_followed_inside,
    no_feature,
    open_tables,
    row_problems,
    table_tensor_problems,
    tapped,
    weigh,
)


@pytree(static=("layout", "exact", "capacity", "codec", "dedup", "whole"))
class ShardedTables:
    """The tables of a plan, as their banks: what `shard_tables` makes, and `lookup` takes inside `shard_map`.

    Args:
      banks: {bank: f[rows, dim]}; inside a mapped function this rank's, outside on an emulated mesh those of all ranks.
      layout: which row of which table lies where.
      exact: whether owners send single rows and not sums, so that row-wise sums have one process's bits; more bytes where bags are long.
      capacity: the most ids that a rank may send to another; None for all that it has. Those beyond it are missing from what a lookup
        gives: a step with a capacity (`train_step`) counts them and does not train.
      codec: how vectors travel, there and back; None for every bit.
      dedup: whether a rank sends each row's number once, however many ids name it, and is sent that row once: pooling is done here, with one
        process's bits, and a row's gradients are added up here before they go. `capacity` is then of distinct rows; without one buffers have
        room for every id, and bytes do not fall (`retry_overflow` finds it). Copies of replicated tables are looked up where they are.
      whole: banks of tables cut by columns whose gradients come with all columns of the rows; `train_step` asks for them.

    Example:
      >>> import torch, funcrec as fr
      >>> mesh = fr.Mesh.emulated(model=2)
      >>> tables = fr.shard_tables({"item": torch.arange(6.0).reshape(3, 2)}, fr.Plan({"item": fr.row_wise("model")}), mesh)
      >>> tables
      ShardedTables({item: f32[4, 2]})
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[2, 0], [1]]})
      >>> f = lambda tables, ids: fr.lookup(tables, ids, [fr.FeatureConfig("clicked", table="item")])["clicked"]
      >>> specs = {"in_specs": (tables.specs(), fr.P("model")), "out_specs": fr.P("model")}
      >>> fr.shard_map(f, mesh=mesh, **specs)(tables, ids)
      tensor([[4., 6.],
              [2., 3.]])
    """

    banks: dict[str, Tensor]
    layout: Layout
    exact: bool = False
    capacity: int | None = None
    codec: Codec | None = None
    dedup: bool = False
    whole: tuple[str, ...] = ()

    def specs(self) -> "ShardedTables":
        """The same with a P for each bank, for `shard_map`."""
        return replace(self, banks=self.layout.specs())

    def items(self):
        return self.banks.items()

    def keys(self):
        return self.banks.keys()

    def values(self):
        return self.banks.values()

    def __getitem__(self, bank: str) -> Tensor:
        if not isinstance(bank, str) or bank not in self.banks:
            need, hint = f"one of {list(self.banks)}", "fr.gather_tables(tables, mesh), for the tables by their names"
            fail(
                "funcrec.ShardedTables",
                "there is no such bank.",
                got=describe(bank),
                need=need,
                hint=hint,
                kind=KeyError,
            )
        return self.banks[bank]

    def __iter__(self) -> Iterator[str]:
        return iter(self.banks)

    def __len__(self) -> int:
        return len(self.banks)

    def __contains__(self, bank: object) -> bool:
        return bank in self.banks

    def __repr__(self) -> str:
        return "ShardedTables({" + ", ".join(f"{n}: {describe(t)}" for n, t in self.banks.items()) + "})"

    def lookup(
        self, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None = None
    ) -> KeyedTensor:
        """`funcrec.lookup` of this rank's bags."""
        call = "funcrec.lookup"
        configs = tuple(TableConfig(n, *shape) for n, shape in self.layout.shapes)
        check_lookup(call, configs, ids, features)
        self._check_bound(call)
        pooled = tuple(f for f in features if f.pooling != "none")
        tensors, owners = open_tables(self.banks)
        banks = [tensors[b.name] for b in self.layout.banks]
        parts: list[dict[int, Tensor]] = [{} for _ in pooled]
        exchanges = []
        for routes in routes_of(self.layout, pooled):
            if self.dedup and routes.axes:
                routed = route_rows(ids, routes, self.layout, pooled, self.capacity)
            else:
                routed = route(ids, routes, self.layout, pooled, self.capacity, placed=self.exact)
            exchanges.append(routed)
            if self.exact or isinstance(routed, RoutedRows):
                lanes = fetch(banks, routed, routes, self.layout, pooled, implementation, self.codec)
            else:
                lanes = combine(
                    pool(banks, routed, routes, self.layout, pooled, implementation),
                    routed,
                    routes,
                    self.layout,
                    pooled,
                    self.codec,
                )
            for i, lane in enumerate(routes.lanes):
                parts[lane.feature][lane.shard] = lanes[i]
        columns = [p[s] for p in parts for s in sorted(p)]
        dims = tuple(sum(x.shape[1] for x in p.values()) for p in parts)
        out = KeyedTensor(torch.cat(columns, 1), tuple(f.name for f in pooled), dims)
        refuse_followed(call, owners, exchanges)
        back = lambda d, saved: self.lookup_transpose(d, saved, pooled)
        return tapped(owners, out, exchanges, back, "lookup", pooled)

    def lookup_transpose(
        self, d_acts: KeyedTensor, exchanges: Sequence, features: tuple[FeatureConfig, ...]
    ) -> dict[str, RowGrads]:
        """{bank: RowGrads} of this rank, from the cotangents of `lookup`'s answer on all ranks and what they were sent for it."""
        out: dict[str, RowGrads] = {}
        first = dict(zip((f.name for f in features), _starts(d_acts.dims), strict=True))
        layout = self.layout.with_whole_rows(self.whole)
        for routes, routed in zip(routes_of(layout, features), exchanges, strict=True):
            d_lanes = {}
            for i, lane in enumerate(routes.lanes):
                s = layout.shards[lane.shard]
                at = first[features[lane.feature].name]
                d_lanes[i] = d_acts.values[:, at + s.first : at + s.last]
            back = fetch_transpose if isinstance(routed, RoutedRows) else combine_transpose
            made = back(d_lanes, routed, routes, layout, features, self._codec_back)
            out |= self._named(made, routed)
        return out

    def lookup_sequence(
        self, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None = None
    ) -> dict[str, JaggedTensor]:
        """`funcrec.lookup_sequence` of this rank's bags."""
        call = "funcrec.lookup_sequence"
        check_lookup(call, tuple(TableConfig(n, *shape) for n, shape in self.layout.shapes), ids, features)
        self._check_bound(call)
        sequences = tuple(f for f in features if f.pooling == "none")
        if not sequences and features:
            no_feature(call, features, "none", "lookup")
        tensors, owners = open_tables(self.banks)
        banks, bags = [tensors[b.name] for b in self.layout.banks], sequences_of(ids, self.layout, sequences)
        parts: list[dict[int, Tensor]] = [{} for _ in sequences]
        exchanges = []
        for routes in routes_of(self.layout, sequences):
            to_owners = route_rows if self.dedup and routes.axes else route
            routed = route_sequences(ids, routes, self.layout, sequences, self.capacity, to_owners)
            exchanges.append(routed)
            lanes = fetch_rows(banks, bags, routed, routes, self.layout, implementation, self.codec)
            for i, lane in enumerate(routes.lanes):
                parts[lane.feature][lane.shard] = lanes[i]
        rows = {f.name: torch.cat([p[s] for s in sorted(p)], 1) for f, p in zip(sequences, parts, strict=True)}
        back = lambda d, saved: self.lookup_sequence_transpose(d, saved, sequences)
        rows = tapped(owners, rows, exchanges, back, "lookup_sequence", sequences)
        return {f.name: JaggedTensor(weigh(rows[f.name], b), b.offsets) for f, b in zip(sequences, bags, strict=True)}

    def lookup_sequence_transpose(
        self,
        d_rows: Mapping[str, Tensor],
        exchanges: Sequence,
        features: tuple[FeatureConfig, ...],
    ) -> dict[str, RowGrads]:
        """{bank: RowGrads} of this rank, from the cotangents of the sequences' rows, before their weights, on all ranks."""
        out: dict[str, RowGrads] = {}
        layout = self.layout.with_whole_rows(self.whole)
        for routes, routed in zip(routes_of(layout, features), exchanges, strict=True):
            d_lanes = lane_columns(d_rows, routes, layout, features)
            back = fetch_rows_transpose if isinstance(routed, RoutedRows) else send_rows
            made = back(d_lanes, routed, routes, layout, self._codec_back)
            out |= self._named(made, routed)
        return out

    def _named(self, grads: Mapping[int, RowGrads], routed: Routed) -> dict[str, RowGrads]:
        """{bank: RowGrads} of one exchange; the first tells its overflow."""
        named = {self.layout.banks[b].name: g for b, g in grads.items()}
        if self.capacity is not None:
            first = next(iter(named))
            named[first] = replace(named[first], overflow=routed.overflow)
        return named

    @property
    def _codec_back(self) -> Codec | None:
        return None if self.codec is None else self.codec.transposed()

    def _check_bound(self, call: str) -> None:
        missing = [a for a, _ in self.layout.mesh_shape if a not in bound_names()]
        if missing:
            hint = "shard_map(f, mesh=..., in_specs=(tables.specs(), ...), ...)"
            fail(
                call,
                "sharded tables are looked up outside of their mesh.",
                got=f"axes {missing} are not bound",
                need="a call inside shard_map",
                hint=hint,
            )


Mapping.register(ShardedTables)


def refuse_followed(call: str, owners: Sequence[Owner], exchanges: Sequence) -> None:
    """Pooled at their owners, rows are not here for a tap."""
    if any(is_followed_inside(exchanges, o) for o in owners):
        fail(
            call, "weights of ids are differentiated inside the loss, and the tables are sharded: their gradient would be lost.",
            got="`ids.weights` that a grad or jvp inside the loss follows", need="weights that only the loss as a whole is differentiated by",
            hint="lookup_sequence, then times the weights and a sum over each bag; or tables in one process", kind=TypeError,
        )  # fmt: skip


def _starts(dims: Sequence[int]) -> list[int]:
    return [sum(dims[:i]) for i in range(len(dims))]


@typed
def shard_tables(
    tables: Mapping[str, Tensor],
    plan: Plan,
    mesh: Mesh,
    *,
    exact: bool = False,
    capacity: Count | None = None,
    codec: Codec | None = None,
    dedup: bool = False,
    labels: Mapping[str, Hashable] | None = None,
) -> ShardedTables:
    """Tables [R, D] as the plan places them: on an emulated mesh the banks of all ranks, on real ranks this rank's.

    Args: as ShardedTables; every rank passes the same tables. Tables with different `labels` share no bank.

    Raises: KeyError for a table without a placement, ValueError for an axis or a rank that the mesh lacks, and for both `exact` and `dedup`.

    Law: gather_tables(shard_tables(tables, plan, mesh), mesh) has tables' bits.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.shard_tables({"item": torch.ones(4, 2)}, fr.Plan({"item": fr.replicated()}), fr.Mesh.emulated(data=2))
      ShardedTables({item: f32[4, 2]})
    """
    call = "funcrec.shard_tables"
    check(call, table_tensor_problems(tables), codec_problems(codec), dedup_problems(exact, dedup))
    check(call, row_problems(tables), one_device_problems(tables))
    shapes = {n: (t.shape[0], t.shape[1]) for n, t in tables.items()}
    layout = layout_of(call, shapes, {n: t.dtype for n, t in tables.items()}, plan, mesh, labels)
    banks = {b.name: pack(layout, i, tables, own_ranks(b, mesh)) for i, b in enumerate(layout.banks)}
    return ShardedTables(banks, layout, exact, capacity, codec, dedup)


@typed
def gather_tables(tables: ShardedTables, mesh: Mesh) -> dict[str, Tensor]:
    """{table: [R, D]}: the tables, whole, on every rank; the inverse of `shard_tables`.

    Raises: ValueError for copies that have trained apart (`replicas` of the plan) and are not equal.

    Example:
      >>> import torch, funcrec as fr
      >>> mesh, plan = fr.Mesh.emulated(model=2), fr.Plan({"item": fr.column_wise("model")})
      >>> fr.gather_tables(fr.shard_tables({"item": torch.eye(2)}, plan, mesh), mesh)
      {'item': tensor([[1., 0.],
              [0., 1.]])}
    """
    if not isinstance(tables, ShardedTables):
        fail(
            "funcrec.gather_tables",
            "`tables` are not sharded.",
            got=describe(tables),
            need="ShardedTables",
            hint="fr.shard_tables",
            kind=TypeError,
        )
    check("funcrec.gather_tables", copy_problems(tables.layout, {"table": tables.banks}, mesh))
    return gather_banks(tables.layout, tables.banks, mesh)


def gather_banks(layout: Layout, banks: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Each table [R, D], or each table's slot [R], from this rank's banks; of copies that train apart this rank's, or the first."""
    whole = {b.name: unshard(banks[b.name], P(b.axes) if b.axes else P(), mesh=mesh) for b in layout.banks}
    return {name: unpack(layout, whole, name) for name, _ in layout.shapes}


def copy_problems(layout: Layout, leaves: Mapping[str, Mapping[str, Tensor]], mesh: Mesh) -> Iterator[Problem]:
    """{kind: {bank: f[rows, ...]}} of which copies that train apart differ; on real ranks by checksums."""
    flat = [(kind, n, x) for kind, own in leaves.items() for n, x in own.items()]
    if layout.num_copies == 1 or not flat:
        return
    if mesh.is_emulated:
        copies = [bits_of(x).unflatten(0, (layout.num_copies, -1)) for _, _, x in flat]
        differ = [bool(value_below((x != x[:1]).any()).any()) for x in copies]
    else:
        sums = torch.stack([checksum(value_below(x)) for _, _, x in flat])
        with bind(mesh.bound_axes(mesh.axis_names, sums.device)):
            of_all = all_gather(sums, layout.replicas)
            unequal = (of_all != of_all[:1]).any(0).int()
            differ = pmax(unequal, mesh.axis_names).tolist()  # so that all ranks raise
    names = [f"{kind} of {n!r}" for (kind, n, _), wrong in zip(flat, differ, strict=True) if wrong]
    if names:
        hint = "state = fr.sync_replicas(state, mesh=mesh) first"
        got = f"{layout.num_copies} copies over {layout.replicas}; not equal: {', '.join(names)}"
        yield Problem("the tables have copies that trained apart.", got, "copies of equal bits", hint)


def own_ranks(bank: Bank, mesh: Mesh) -> list[int]:
    """The ranks of the bank's axes that this process holds; all of them once for each copy that it holds."""
    if mesh.is_emulated:
        return list(range(bank.num_ranks)) * bank.num_copies
    if not bank.axes:
        return [0]
    place = 0
    for a in bank.axes:
        place = place * mesh.shape[a] + mesh.coordinates[a]
    return [place]


# -- validators --------------------------------------------------------------------------------------------------


def one_device_problems(tables: Mapping[str, Tensor]) -> Iterator[Problem]:
    if len({t.device for t in tables.values()}) > 1:
        got = ", ".join(f"{n}: {describe(t)}" for n, t in tables.items())
        yield Problem("`tables` are on different devices.", got, "one device", "table.to(device), for each")


def dedup_problems(exact: bool, dedup: bool) -> Iterator[Problem]:
    if exact and dedup:
        need = "one of them: dedup adds a row's gradients up rank by rank, which rounds them otherwise"
        yield Problem("`exact` and `dedup` exclude each other.", "exact=True, dedup=True", need)
