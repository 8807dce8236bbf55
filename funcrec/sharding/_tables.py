"""Sharded tables: a value that lookups and steps take in place of the dict of tables.

lookup(shard_tables(tables, plan), ids) == lookup(tables, ids)        on every rank, for its own bags
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from torch import Tensor

from funcrec.core import (
    RETYPED,
    Count,
    Movable,
    Named,
    Problem,
    check,
    describe,
    mapping,
    pytree,
    replace,
    tree_map,
    typed,
)
from funcrec.kinds import (
    CODES,
    STORED,
    DynamicTables,
    QuantizedTables,
    bits_of,
    cut_problems,
    cut_vocabulary,
    dtype_problems,
    is_cut,
    is_shard,
    join_vocabulary,
    named_dtypes,
    shard_specs,
    stored,
)
from funcrec.mesh import Codec, Mesh, P, unshard
from funcrec.sharding._copies import copy_problems
from funcrec.sharding._fake_quantized import read_fake
from funcrec.sharding._lookup import check_bound, read_each, read_sharded
from funcrec.sharding._transport import Transport, dedup_problems, transport_of
from funcrec.sharding.placement._layout import Layout, layout_of, own_ranks, pack, unpack
from funcrec.sharding.placement._plan import Plan
from funcrec.tables import KINDS, Faked, Kind, kind_of_tables, layout_in, placed_as, row_problems, table_tensor_problems


@mapping(lambda tables: tables.banks, "bank", "fr.gather_tables(tables, mesh), for the tables by their names")
@pytree(static=("layout", "transport", "whole", "of"))
class ShardedTables(Named[Tensor], Movable):
    """The tables of a plan, held as banks: `shard_tables` makes them, and `lookup` takes them inside `shard_map`.

    Args:
      banks: {bank: f[rows, dim]}. Inside a mapped function these are the banks of this rank. Outside, on an emulated
        mesh, they are the banks of all ranks.
      layout: the place of each row of each table.
      transport: a description of the values that exchanges send. The keywords of `shard_tables` choose it.
      whole: banks of tables cut by columns whose gradients arrive with all columns of the rows; `train_step` sets it.
      of: the type of the whole tables. Its entry in `funcrec.tables.KINDS` says how to read and gather them.
      rest: the tensors of that type that are not parts. They are whole on every rank, but vocabularies may be cut.

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
    of: type = dict
    rest: Any = ()

    def specs(self) -> "ShardedTables":
        """Return the same value with a P for each tensor, for `shard_map`."""
        whole = lambda x: tree_map(lambda _: P(), x)
        return replace(self, banks=self.layout.specs(), rest=of_vocabularies(self.rest, shard_specs, whole))

    def __repr__(self) -> str:
        return "ShardedTables({" + ", ".join(f"{n}: {describe(t)}" for n, t in self.banks.items()) + "})"


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
    """Return tables [R, D] as ShardedTables, placed as the plan says.

    On an emulated mesh they hold the banks of all ranks, on real ranks the banks of this rank.

    Args:
      tables: every rank passes the same. They may be QuantizedTables: each part of a row then has the row's scale and
        bias.
      exact: whether owners send single rows instead of sums. Row-wise sums then have the bits of one process, and long
        bags cost more bytes.
      capacity: the most ids that a rank may send to another rank; None for all its ids. If a rank has more ids, its
        lookups of them, its loss and its gradients from `value_and_grad` are NaN. `checked` then raises, and names a
        capacity that suffices. A step with a capacity (`train_step`) counts the ids without room, and does not train.
      codec: the codes of the vectors and their cotangents; None for every bit.
      dedup: whether a rank sends the number of each row once, however many ids name it, and receives the row once. The
        rank then pools the rows itself, with the bits of one process, and adds up the gradients of a row before it
        sends them. `capacity` then counts distinct rows. Without a capacity, buffers have room for every id, and
        `dedup` saves no byte (`retry_overflow` finds a capacity). Lookups in replicated tables read the copies in
        place.
      labels: tables with different labels share no bank.

    Raises:
      KeyError: if a table has no placement.
      ValueError: if the plan names an axis or a rank that the mesh lacks, or both `exact` and `dedup` are set.

    Law: gather_tables(shard_tables(tables, plan, mesh), mesh) has the bits of `tables`.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.shard_tables({"item": torch.ones(4, 2)}, fr.Plan({"item": fr.replicated()}), fr.Mesh.emulated(data=2))
      ShardedTables({item: f32[4, 2]})
    """
    call = "funcrec.shard_tables"
    check(call, placed_problems(tables))
    forms = kind_of_tables(tables).forms(tables)
    check(call, table_tensor_problems({n: t for n, t in tables.items() if n not in forms}))
    check(call, dedup_problems(exact, dedup))
    check(call, row_problems(tables), one_device_problems(tables))
    shapes = {n: (t.shape[0], forms[n][1] if n in forms else t.shape[1]) for n, t in tables.items()}
    bits = {n: b for n, (b, _) in forms.items()}
    labels = own_banks(call, tables, plan, labels or {})
    layout = layout_of(call, shapes, {n: t.dtype for n, t in tables.items()}, plan, mesh, labels, bits)
    banks = {b.name: pack(layout, i, tables, own_ranks(b, mesh)) for i, b in enumerate(layout.banks)}
    made = with_banks(tables, banks, layout, transport_of(exact, dedup, capacity, codec))
    return with_buckets(call, made, plan.buckets, mesh)


@typed
def gather_tables(tables: ShardedTables, mesh: Mesh) -> Mapping[str, Tensor]:
    """Return the whole tables on every rank -> {table: [R, D]}.

    They have the type that was sharded. This is the inverse of `shard_tables`.

    Raises:
      ValueError: if copies that trained apart (the plan's `replicas`) differ.

    Example:
      >>> import torch, funcrec as fr
      >>> mesh, plan = fr.Mesh.emulated(model=2), fr.Plan({"item": fr.column_wise("model")})
      >>> fr.gather_tables(fr.shard_tables({"item": torch.eye(2)}, plan, mesh), mesh)
      {'item': tensor([[1., 0.],
              [0., 1.]])}
    """
    layout = tables.layout
    check("funcrec.gather_tables", copy_problems(layout, {"table": tables.banks}, mesh))
    return join_parts(with_whole_rest(tables, mesh), gather_banks(layout, tables.banks, mesh))


def of_vocabularies(rest: Any, cut: Callable[[Any], Any], whole: Callable[[Any], Any] = lambda x: x) -> Any:
    """Return `whole` of what sharded tables have besides banks, with `cut` of each part of a vocabulary."""
    if not isinstance(rest, DynamicTables) or not is_cut(rest.vocabularies.values()):
        return whole(rest)
    made = {n: cut(v) for n, v in rest.vocabularies.items()}
    return replace(whole(replace(rest, vocabularies={})), vocabularies=made)


def with_buckets(call: str, tables: ShardedTables, axes: tuple[str, ...], mesh: Mesh) -> ShardedTables:
    """Return the tables with their vocabularies, which are whole, cut by buckets over axes."""
    rest = tables.rest
    if not axes or not isinstance(rest, DynamicTables):
        return tables
    caches = {x[1] for x in rest.first if x[2] == STORED}
    check(call, *(cut_problems(n, v, n in caches) for n, v in rest.vocabularies.items()))
    cut = {n: cut_vocabulary(v, axes, mesh) for n, v in rest.vocabularies.items()}
    return replace(tables, rest=replace(rest, vocabularies=cut))


def buckets_of(tables: ShardedTables) -> tuple[str, ...]:
    """Return the axes over which the vocabularies of sharded tables are cut."""
    each = tables.rest.vocabularies.values() if isinstance(tables.rest, DynamicTables) else ()
    return next((v.axes for v in each if is_shard(v)), ())


def with_whole_rest(tables: ShardedTables, mesh: Mesh) -> ShardedTables:
    """Return the tables with whole vocabularies on every rank."""
    return replace(tables, rest=of_vocabularies(tables.rest, lambda v: join_vocabulary(v, mesh)))


def with_banks(tables: Any, banks: dict[str, Tensor], layout: Layout, transport: Transport) -> ShardedTables:
    """Return ShardedTables of the type of `tables`, which are whole or sharded. The parts now lie in `banks`."""
    if layout_in(tables) is not None:
        return replace(tables, banks=banks, layout=layout, transport=transport, whole=())
    of = type_placed(tables)
    return ShardedTables(banks, layout, transport, of=of, rest=placed_as(of).rest(tables))


def own_banks(call: str, tables: Any, plan: Plan, labels: Mapping[str, Hashable]) -> dict[str, Hashable]:
    """Return the labels, with one of its own for each part that the type of `tables` reads whole."""
    of = type_placed(tables)
    check(call, whole_problems(of, plan))
    return {**labels, **{n: ("whole", n, labels.get(n)) for n in placed_as(of).whole}}


def type_placed(tables: Any) -> type:
    """Return the type of whole tables, or the type from which tables were sharded."""
    if layout_in(tables) is not None:
        return tables.of
    return type(tables) if type(tables) in KINDS else dict


def join_parts(tables: ShardedTables, parts: dict[str, Any]) -> Any:
    """Return whole tables of the type of `tables`, made of whole parts, or of values that stand for the parts."""
    return placed_as(tables.of).joined(tables, parts)


def quantize_sharded(tables: ShardedTables, dtype: Any, key: Tensor | None) -> ShardedTables:
    """Return the tables with the rows of each rank quantised in place.

    No row is sent, so a rank must hold whole rows.
    """
    names, layout = dict(tables.layout.shapes), tables.layout
    dtype = "int8" if dtype is None else dtype
    check("funcrec.quantize", float_problems(tables))
    check("funcrec.quantize", dtype_problems(names, dtype), sharded_problems(tables, dtype, key))
    named = {s.bank: named_dtypes(names, dtype)[s.table] for s in layout.shards}
    banks = {b.name: stored(tables.banks[b.name], named[i]) for i, b in enumerate(layout.banks)}
    told = [b._replace(dtype=banks[b.name].dtype, bits=bits_of(named[i])) for i, b in enumerate(layout.banks)]
    return ShardedTables(banks, layout._replace(banks=tuple(told)), tables.transport, of=QuantizedTables)


def rows_of_parts(tables: ShardedTables, ids: Any, features: Any) -> tuple[ShardedTables, Any]:
    """Return (sharded tables that are read by rows, the ids as rows), by the tensors that every rank has."""
    if not KINDS[tables.of].follows(tables.rest):
        return tables, ids
    if isinstance(tables.rest, DynamicTables) and is_cut(tables.rest.vocabularies.values()):
        check_bound("funcrec.lookup", tables.layout)
    rows = KINDS[tables.of].as_rows(tables.rest, ids, features)[1]
    return replace(tables, of=dict, rest=()), rows


WHOLE = 'fr.fake_quantize of rows that are whole on a rank: row_wise, table_wise, replicated; or "float32" for this one'
KINDS[ShardedTables] = Kind(
    lambda tables: placed_as(tables.of).shapes(tables),
    read_sharded,
    lambda tables: KINDS[tables.of].is_trained(tables),
    any_ids=lambda tables: KINDS[tables.of].any_ids(tables.rest),
    follows=lambda tables: KINDS[tables.of].follows(tables.rest),
    as_rows=rows_of_parts,
    layout=lambda tables: tables.layout,
    read_each=read_each,
    quantized=quantize_sharded,
    faked=Faked(
        lambda tables, named: iter([*float_problems(tables)] or code_problems(tables, named, WHOLE)), read_fake
    ),
    placed="fr.gather_tables(tables, mesh) first",
)


def gather_banks(layout: Layout, banks: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Return {table: the table [R, D], or its slot [R]}, from the banks of this rank.

    Of copies that train apart it returns the copy of this rank, or on an emulated mesh the first copy.
    """
    whole = {b.name: unshard(banks[b.name], P(b.axes) if b.axes else P(), mesh=mesh) for b in layout.banks}
    return {name: unpack(layout, whole, name) for name, _ in layout.shapes}


# -- validators --------------------------------------------------------------------------------------------------


def float_problems(tables: ShardedTables) -> Iterator[Problem]:
    if tables.of is not dict:
        what = f"`tables` are sharded {tables.of.__name__}, which are not quantised on ranks."
        yield Problem(what, repr(tables), "shards of {name: f[R, D]}", "fr.gather_tables(tables, mesh)", TypeError)


def sharded_problems(tables: ShardedTables, dtype: Any, key: Tensor | None) -> Iterator[Problem]:
    """Report tables cut by columns, tables of one bank with several dtypes, and a key.

    A key cannot round rows that lie on other ranks.
    """
    hint = "fr.shard_tables(fr.quantize(tables, ...), plan, mesh)"
    named = named_dtypes(dict(tables.layout.shapes), dtype)
    yield from code_problems(tables, named, hint)
    for i, b in enumerate(tables.layout.banks):
        several = {s.table: named[s.table] for s in tables.layout.shards if s.bank == i}
        if len(set(several.values())) > 1:
            yield Problem(f"tables of one bank, {b.name!r}, have several dtypes.", f"{several}", "one dtype", hint)
    if key is not None:
        yield Problem("`key` is for tables that are whole.", "a key, and sharded tables", "key=None", hint)


def code_problems(tables: ShardedTables, named: Mapping[str, str], hint: str) -> Iterator[Problem]:
    layout = tables.layout
    for n, (_, dim) in layout.shapes:
        own = [layout.shards[i] for i in layout.shards_of(n)]
        if own[0].last - own[0].first < dim and named[n] in CODES:
            got, need = f"{len(own)} blocks of columns", "rows that are whole on a rank: a row has one scale"
            yield Problem(f"table {n!r} is cut by columns.", got, need, hint)


def placed_problems(tables: Any) -> Iterator[Problem]:
    """Report tables whose type does not say how they lie on ranks."""
    hint = kind_of_tables(tables).placed
    if isinstance(hint, str):
        got, need = describe(tables), "{name: f[R, D]}, QuantizedTables, or a type that `KINDS` places"
        yield Problem(f"`tables` are {type(tables).__name__}, which are not placed.", got, need, hint, TypeError)


def whole_problems(of: type, plan: Plan) -> Iterator[Problem]:
    """A part that is read whole must lie whole on every rank."""
    for n in placed_as(of).whole:
        if n in dict(plan.placements) and plan[n].kind != "replicated":
            got, need = f"{plan[n].kind}", f"replicated: {of.__name__} reads all its rows on each rank"
            yield Problem(f"the plan cuts {n!r}, which is read whole.", got, need, f"{{{n!r}: fr.replicated()}}")


def one_device_problems(tables: Mapping[str, Tensor]) -> Iterator[Problem]:
    if len({t.device for t in tables.values()}) > 1:
        got = ", ".join(f"{n}: {describe(t)}" for n, t in tables.items())
        yield Problem("`tables` are on different devices.", got, "one device", "table.to(device), for each")
