"""Tables under a plan: a value like the dict of tables, that lookups and steps take in its place.

lookup(shard_tables(tables, plan), ids) == lookup(tables, ids)        on every rank, for its own bags
"""

from collections.abc import Hashable, Iterator, Mapping

from torch import Tensor

from funcrec.core import RETYPED, Count, Problem, check, describe, fail, pytree, replace, typed
from funcrec.mesh import Codec, Mesh, P, codec_problems, unshard
from funcrec.sharding._copies import copy_problems
from funcrec.sharding._layout import Layout, layout_of, own_ranks, pack, unpack
from funcrec.sharding._lookup import read_sharded
from funcrec.sharding._plan import Plan
from funcrec.sharding._transport import Transport, dedup_problems, transport_of
from funcrec.tables import KINDS, Kind, row_problems, table_tensor_problems


@pytree(static=("layout", "transport", "whole"))
class ShardedTables:
    """The tables of a plan, as their banks: what `shard_tables` makes, and `lookup` takes inside `shard_map`.

    Args:
      banks: {bank: f[rows, dim]}; inside a mapped function this rank's, outside on an emulated mesh those of all ranks.
      layout: which row of which table lies where.
      transport: what exchanges send, by the keywords of `shard_tables`.
      whole: banks of tables cut by columns whose gradients come
        with all columns of the rows; `train_step` asks for them.

    Example:
      >>> import torch, funcrec as fr
      >>> mesh = fr.Mesh.emulated(model=2)
      >>> tables = fr.shard_tables({"item": torch.arange(6.0).reshape(3, 2)}, fr.Plan({"item": fr.row_wise("model")}),
      ...     mesh)
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
    transport: Transport = Transport()
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


Mapping.register(ShardedTables)
KINDS[ShardedTables] = Kind(lambda tables: dict(tables.layout.shapes), read_sharded)
RETYPED[ShardedTables] = lambda tables, dtype: replace(tables, layout=tables.layout.with_dtype(dtype))


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

    Args:
      tables: every rank passes the same.
      exact: whether owners send single rows and not sums, so that row-wise sums
        have one process's bits; more bytes where bags are long.
      capacity: the most ids that a rank may send to another; None for all that it has. A rank with more gets NaN from
        every lookup of them, and from `value_and_grad` as its loss and gradients; `checked` raises, and tells the
        capacity that would do. A step with a capacity (`train_step`) counts them and does not train.
      codec: how vectors travel, there and back; None for every bit.
      dedup: whether a rank sends each row's number once, however many ids name it, and is sent that row once: pooling
        is done here, with one process's bits, and a row's gradients are added up here before they go. `capacity` is
        then of distinct rows; without one buffers have room for every id, and bytes do not fall (`retry_overflow` finds
        it). Copies of replicated tables are looked up where they are.
      labels: tables with different ones share no bank.

    Raises: KeyError for a table without a placement, ValueError for an axis or a
      rank that the mesh lacks, and for both `exact` and `dedup`.

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
    return ShardedTables(banks, layout, transport_of(exact, dedup, capacity, codec))


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
    """Each table [R, D], or each table's slot [R], from this rank's banks;
    of copies that train apart this rank's, or the first."""
    whole = {b.name: unshard(banks[b.name], P(b.axes) if b.axes else P(), mesh=mesh) for b in layout.banks}
    return {name: unpack(layout, whole, name) for name, _ in layout.shapes}


# -- validators --------------------------------------------------------------------------------------------------


def one_device_problems(tables: Mapping[str, Tensor]) -> Iterator[Problem]:
    if len({t.device for t in tables.values()}) > 1:
        got = ", ".join(f"{n}: {describe(t)}" for n, t in tables.items())
        yield Problem("`tables` are on different devices.", got, "one device", "table.to(device), for each")
