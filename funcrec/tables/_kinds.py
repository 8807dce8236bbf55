"""Kinds of tables: a type of tables is one row of functions, and a lookup needs one of them.

    (ids, features) -> (out, saved, transpose)          d_parts = transpose(d_out, saved)

`KINDS` has an entry for each type of tables; every other Mapping is read as a dict {name: f[R, D]}. It is a dict of
functions, neither a Protocol nor a base class. A plain dict has no method that a Protocol could require; a value stays
data, which any function may read; and a type is in the dict or not, while an unrelated class may have an attribute
`lookup` by chance. An entry is defined next to its type.

A type in `KINDS` is a pytree and a Mapping of its parts {part: f[rows, dim]}. Each part is named by the last key or
field on its path. The parts are the tensors that get RowGrads, and that row optimizers update. One table, as features
name it, may consist of several parts, or lie in a section of one part.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

from funcrec.core import Problem, fail, leaf_names, map_with_names
from funcrec.jagged import KeyedJaggedTensor
from funcrec.tables._configs import FeatureConfig
from funcrec.tables._rowgrads import RowGrads


class LookupResult(NamedTuple):
    """The result of a lookup, and its transpose.

    out: for pooled features a KeyedTensor f[B, ΣD], keys in the features' order; for sequences {feature: JaggedTensor
      of f[capacity, D]}, each id's row with the id's weight; `lookup_sequence` multiplies the two.
    saved: () -> a tree of all tensors that `transpose` reads; called only if cotangents are wanted. `transpose` runs
      outside the vmaps between the lookup and the loss, once for each member.
    transpose: (d_out, saved) -> {part: RowGrads}; d_out is d_acts, a KeyedTensor, or {feature: f[capacity, D]}.
    overflows: i64[2] for each exchange with a capacity: how many ids found no place, and the capacity that all ids
      would need. A caller that differentiates gets them with the gradients, and must not train on incomplete ones.
    """

    out: Any
    saved: Callable[[], Any]
    transpose: Callable[[Any, Any], dict[str, RowGrads]]
    overflows: tuple[Tensor, ...] = ()


class Faked(NamedTuple):
    """How `fake_quantize` reads tables of another kind.

    problems: (tables, {table: dtype}) -> the reasons why it cannot. read: (FakeQuantizedTables, ids, features,
    implementation) -> LookupResult.
    """

    problems: Callable[..., Iterator[Problem]]
    read: Callable[..., LookupResult]


class Placed(NamedTuple):
    """How tables of a type lie on ranks: `ShardedTables` hold the parts, each a table [R, D] that a plan names.

    joined: (ShardedTables, {part: x}) -> whole tables of the type. x is a tensor, or stands for one that is not read.
    shapes: as in `Kind`, of ShardedTables.
    read: as in `Kind`, of ShardedTables that are read as a dict of the parts. None: features read the parts.
    rest: tables -> a tree of the tensors that are no parts, by other names than theirs; each rank has all of it.
    """

    joined: Callable[[Any, dict[str, Any]], Any] = lambda sharded, parts: parts
    shapes: Callable[[Any], Any] = lambda sharded: sharded.layout.shapes
    read: Callable[..., LookupResult] | None = None
    rest: Callable[[Any], Any] = lambda tables: ()


class Kind(NamedTuple):
    """The functions of a type of tables; features name its tables, not its parts.

    shapes: tables -> {table: (R, D)}, by the names that features use. `lookup` checks features and ids of every kind
      against them, once.
    read: (tables, ids, features, implementation) -> LookupResult. The features are checked. All are pooled ("sum",
      "mean") or all are sequences ("none"); only plain tables get an empty list.
    is_trained: tables, or ShardedTables of the type -> whether the parts get gradients; `value_and_grad` refuses tables
      that do not.
    layout: tables -> where the rows of each table lie on a mesh, as in `funcrec.sharding`; resharding, checkpoints and
      logs use it. None for tables that are whole: then the parts are stored.
    forms: tables -> {part: (bits, dim)} of the parts whose rows are stored as `quantize` stores them.
    quantized: (tables, dtypes, key) -> the result of `quantize`; None if `quantize` refuses the type.
    faked: None if `fake_quantize` refuses the type.
    placed: what `shard_tables`, `gather_tables`, `reshard` and checkpoints call. A text if they refuse the type: the
      error says to try that.
    """

    shapes: Callable[[Any], Mapping[str, tuple[int, int]]]
    read: Callable[..., LookupResult]
    is_trained: Callable[[Any], bool] = lambda tables: True
    layout: Callable[[Any], Any] = lambda tables: None
    forms: Callable[[Any], Mapping[str, tuple[int, int]]] = lambda tables: {}
    quantized: Callable[..., Any] | None = None
    faked: Faked | None = None
    placed: Placed | str = ""


KINDS: dict[type, Kind] = {}


def kind_of_tables(tables: object) -> Kind:
    return KINDS.get(type(tables), KINDS[dict])


def layout_in(tables: object) -> Any:
    """Return where the rows of tables lie on a mesh; None for whole tables, and for values that are not tables."""
    return kind_of_tables(tables).layout(tables)


def is_plain(tables: object) -> bool:
    """Whether the parts are the tables themselves."""
    return kind_of_tables(tables) is KINDS[dict]


def with_parts(tables: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> Any:
    """Return the same tables with other parts."""
    return dict(parts) if is_plain(tables) else map_parts(lambda name, _: parts[name], tables)


def map_parts(fn: Callable[[str, Tensor], Any], tables: Mapping[str, Tensor]) -> Any:
    """Return tables of the same kind, with fn(part, tensor) for each part."""
    names = () if is_plain(tables) else [n for n in leaf_names(tables) if n in tables]
    if not is_plain(tables) and sorted(names) != sorted(tables):
        fail(
            "funcrec.tables.KINDS", f"the parts of {type(tables).__name__} are not its tensors' names.",
            got=f"parts {list(tables)} of tensors named {names}", need="each tensor's last key or field once",
            hint="two dicts keyed by table: name the parts apart, as in {'item.base': ..., 'item.delta': ...}",
        )  # fmt: skip
    return map_with_names(lambda name, x: fn(name, x) if name in tables else x, tables)


def table_shapes(tables: Any) -> dict[str, tuple[int, int]]:
    """Return {table: (R, D)} of tables of any kind, or of their configs."""
    if isinstance(tables, Mapping):
        return dict(kind_of_tables(tables).shapes(tables))
    return {t.name: t.shape for t in tables}


# -- which lookups are made: what an export asks, to tell a server of each column's table -----------------------------


class Lookup(NamedTuple):
    """The arguments of a lookup: tables of any kind, ids, features."""

    tables: Any
    ids: KeyedJaggedTensor
    features: Sequence[FeatureConfig]


_seen: ContextVar[list[Lookup] | None] = ContextVar("funcrec_lookups_seen", default=None)


@contextlib.contextmanager
def lookups_seen() -> Iterator[list[Lookup]]:
    """Yield a list that collects the lookups that this thread makes inside."""
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
