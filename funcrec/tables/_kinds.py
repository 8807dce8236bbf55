"""Kinds of tables: each type of tables has an entry of functions, and a lookup calls the function `read` of the entry.

    (ids, features) -> (out, saved, transpose)          d_parts = transpose(d_out, saved)

`KINDS` has an entry for each type of tables. Subclasses of dict have the entry of dict; every other Mapping is refused.
`KINDS` is a dict of functions, neither a Protocol nor a base class. A plain dict has no method that a Protocol could
require. A value stays data, which any function may read. An unrelated class may have an attribute `lookup` by chance,
but it is not in `KINDS`. The file that defines a type defines its entry.

A type in `KINDS` is a pytree and a Mapping of its parts {part: f[rows, dim]}. The last key or field on a part's path is
its name. The parts are the tensors that get RowGrads, and that row optimizers update. A table that a feature names may
consist of several parts, or lie in a section of one part.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

from funcrec.core import Problem, describe, fail, map_with_names, named_leaves, replace
from funcrec.jagged import KeyedJaggedTensor
from funcrec.tables._configs import FeatureConfig, modulo
from funcrec.tables._rowgrads import RowGrads


class LookupResult(NamedTuple):
    """The result of a lookup, and its transpose.

    out: for pooled features a KeyedTensor f[B, ΣD], keys in the features' order; for sequences {feature: JaggedTensor
      of f[capacity, D]} with each id's row and weight. `lookup_sequence` multiplies the rows by the weights.
    saved: () -> a tree of all tensors that `transpose` reads. A caller calls `saved` only if it wants cotangents.
      `transpose` runs outside the vmaps between the lookup and the loss, once for each member.
    transpose: (d_out, saved) -> {part: RowGrads}; d_out is d_acts, a KeyedTensor, or {feature: f[capacity, D]}.
    overflows: i64[2] for each exchange with a capacity: how many ids found no place, and the capacity that all ids
      would need. A caller that differentiates gets overflows and gradients, and must not train on incomplete gradients.
    """

    out: Any
    saved: Callable[[], Any]
    transpose: Callable[[Any, Any], dict[str, RowGrads]]
    overflows: tuple[Tensor, ...] = ()


class Faked(NamedTuple):
    """The functions with which `fake_quantize` reads tables of a kind.

    problems: (tables, {table: dtype}) -> the reasons why `fake_quantize` cannot read them. read: (FakeQuantizedTables,
    ids, features, implementation) -> LookupResult.
    """

    problems: Callable[..., Iterator[Problem]]
    read: Callable[..., LookupResult]


class Placed(NamedTuple):
    """The functions for tables of a type on ranks. `ShardedTables` hold the parts, each a table [R, D] in a plan.

    joined: (ShardedTables, {part: x}) -> whole tables of the type. x is a tensor, or stands for a tensor whose value is
      not read.
    shapes: the `shapes` of `Kind`, for ShardedTables.
    read: the `read` of `Kind`, for ShardedTables, read as a dict of the parts. None if features read the parts.
    rest: tables -> a tree of the other tensors, by names that no part has; each rank has the whole tree. A plan may cut
      vocabularies in it (`Plan.buckets`).
    whole: the parts that `read` takes by name, with all rows. A plan must replicate them, and each has its own bank. A
      lookup must read every other part: a bank has other rows on each rank, and rows of several parts.
    """

    joined: Callable[[Any, dict[str, Any]], Any] = lambda sharded, parts: parts
    shapes: Callable[[Any], Any] = lambda sharded: sharded.layout.shapes
    read: Callable[..., LookupResult] | None = None
    rest: Callable[[Any], Any] = lambda tables: ()
    whole: tuple[str, ...] = ()


class Kind(NamedTuple):
    """The functions of a type of tables; features name its tables, not its parts.

    shapes: tables -> {table: (R, D)}, by the names that features use. `lookup` checks the features and ids of every
      lookup against these shapes, once.
    read: (tables, ids, features, implementation) -> LookupResult. The features are checked. All are pooled ("sum",
      "mean") or all are sequences ("none"; a maximum is read as one); only plain tables get an empty list.
    is_trained: tables, or ShardedTables of the type -> whether the parts get gradients. `value_and_grad` refuses tables
      whose parts get none.
    layout: tables -> where the rows of each table lie on a mesh, as in `funcrec.sharding`, or None for whole tables.
      Resharding, checkpoints and logs use the layout; of whole tables they store the parts.
    forms: tables -> {part: (bits, dim)} of the parts whose rows have the stored form of `quantize`.
    read_each: (tables, ids, groups, implementation) -> a LookupResult of pooled features, whose `out` and `d_out` are a
      list of a KeyedTensor for each group, or None. The features of a group have one number of bags. Without it, or if
      it returns None, lookups call `read` for each group.
    quantized: (tables, dtypes, key) -> the result of `quantize`; None if `quantize` refuses the type.
    faked: the functions that `fake_quantize` calls; None if `fake_quantize` refuses the type.
    placed: the functions that `shard_tables`, `gather_tables`, `reshard` and checkpoints call. If they refuse the type,
      a text that the error shows as what to try.
    any_ids: tables -> the names of the tables whose ids may be any numbers.
    follows: tables -> the names of the tables whose ids are not rows: `as_rows` finds their rows.
    as_rows: (tables, ids, features) -> the tables and the ids that a lookup reads instead; the new ids are rows.
    """

    shapes: Callable[[Any], Mapping[str, tuple[int, int]]]
    read: Callable[..., LookupResult]
    is_trained: Callable[[Any], bool] = lambda tables: True
    layout: Callable[[Any], Any] = lambda tables: None
    forms: Callable[[Any], Mapping[str, tuple[int, int]]] = lambda tables: {}
    read_each: Callable[..., LookupResult | None] | None = None
    quantized: Callable[..., Any] | None = None
    faked: Faked | None = None
    placed: Placed | str = ""
    any_ids: Callable[[Any], Collection[str]] = lambda tables: ()
    follows: Callable[[Any], Collection[str]] = lambda tables: ()
    as_rows: Callable[..., tuple[Any, KeyedJaggedTensor]] = lambda tables, ids, features: (tables, ids)


KINDS: dict[type, Kind] = {}


def kind_of_tables(tables: object) -> Kind:
    """Return the entry for tables. Values that are not tables have the entry of dict; their callers refuse them."""
    kind = KINDS.get(type(tables))
    if kind is None and isinstance(tables, Mapping) and not isinstance(tables, dict):
        name = type(tables).__name__
        fail(
            "funcrec.tables.KINDS", "`tables` are of a type that is not in `KINDS`.", got=describe(tables),
            need=f"a dict {{name: f[R, D]}}, or one of {sorted(k.__name__ for k in KINDS if k is not dict)}",
            hint=f"dict(tables), for plain tables; KINDS[{name}] = Kind(...), for a kind of your own", kind=TypeError,
        )  # fmt: skip
    return kind or KINDS[dict]


def placed_as(of: type) -> Placed:
    """Return the functions that place tables of a type. The tables were placed, so their type has these functions."""
    placed = KINDS[of].placed
    assert isinstance(placed, Placed)
    return placed


def layout_in(tables: object) -> Any:
    """Return the layout of tables on a mesh, or None for whole tables and for values that are not tables."""
    return KINDS.get(type(tables), KINDS[dict]).layout(tables)


def is_plain(tables: object) -> bool:
    """Return whether the parts are the tables themselves."""
    return kind_of_tables(tables) is KINDS[dict]


def with_parts(tables: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> Any:
    """Return tables of the same kind with other parts."""
    return dict(parts) if is_plain(tables) else map_parts(lambda name, _: parts[name], tables)


def map_parts(fn: Callable[[str, Tensor], Any], tables: Mapping[str, Tensor]) -> Any:
    """Return tables of the same kind, with fn(part, tensor) for each part."""
    # a tensor of integers may have the name of a part, as the tags of a vocabulary may
    is_other = lambda name, x: isinstance(x, Tensor) and not x.is_floating_point() and x is not tables[name]
    is_part = lambda name, x: name in tables and not is_other(name, x)
    names = () if is_plain(tables) else [n for n, x in named_leaves(tables) if is_part(n, x)]
    if not is_plain(tables) and sorted(names) != sorted(tables):
        fail(
            "funcrec.tables.KINDS", f"the parts of {type(tables).__name__} are not its tensors' names.",
            got=f"parts {list(tables)} of tensors named {names}", need="each tensor's last key or field once",
            hint="two dicts keyed by table: name the parts apart, as in {'item.base': ..., 'item.delta': ...}",
        )  # fmt: skip
    return map_with_names(lambda name, x: fn(name, x) if is_plain(tables) or is_part(name, x) else x, tables)


def bounded(features: Sequence[FeatureConfig], tables: Any) -> list[FeatureConfig]:
    """Return the features, with a hash for those whose ids may be any numbers: checks of values let their ids pass."""
    free = kind_of_tables(tables).any_ids(tables) if isinstance(tables, Mapping) else ()
    return [replace(f, hash=modulo()) if f.table in free and f.hash is None else f for f in features]


def table_shapes(tables: Any) -> dict[str, tuple[int, int]]:
    """Return {table: (R, D)}, the shapes of tables of any kind, or of the tables that configs describe."""
    if isinstance(tables, Mapping):
        return dict(kind_of_tables(tables).shapes(tables))
    return {t.name: t.shape for t in tables}


# -- records of lookups: an export reads them, to tell a server the table of each column ------------------------------


class Lookup(NamedTuple):
    """The arguments of a lookup: tables of any kind, ids, features."""

    tables: Any
    ids: KeyedJaggedTensor
    features: Sequence[FeatureConfig]


_seen: ContextVar[list[Lookup] | None] = ContextVar("funcrec_lookups_seen", default=None)


@contextlib.contextmanager
def lookups_seen() -> Iterator[list[Lookup]]:
    """Yield a list that collects the lookups that this thread makes inside the context."""
    found: list[Lookup] = []
    before = _seen.set(found)
    try:
        yield found
    finally:
        _seen.reset(before)


def see(*lookup: Any) -> None:
    found = _seen.get()
    if found is not None:
        found.append(Lookup(*lookup))
