"""Kinds of tables: what the library asks of tables is one row of functions, of which a lookup needs one.

    (ids, features) -> (out, saved, transpose)          d_parts = transpose(d_out, saved)

`KINDS` has an entry for each type that stands for tables; every other Mapping is read as a dict {name: f[R, D]}. It is
a dict of functions, and neither a Protocol nor a base class: a plain dict has no method that a Protocol could ask for;
a value stays data, which any function may read; and a type is in the dict or not, while "has an attribute `lookup`" is
also true of what has it by chance. An entry is defined next to its type.

A type in `KINDS` is a pytree and a Mapping of its parts {part: f[rows, dim]}, each named as the last key or field on
its path: the tensors that get RowGrads, and that row optimizers update. What a feature calls a table may be made of
several parts, or lie in part of one.
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
    """What a lookup gives, and its way back.

    out: of pooled features a KeyedTensor f[B, ΣD], keys in the features' order; of sequences {feature: JaggedTensor of
      f[capacity, D]}, each id's row, and the id's weight, which `lookup_sequence` multiplies it with.
    saved: () -> a tree of tensors, all that `transpose` reads; called where somebody waits for cotangents. `transpose`
      runs outside of the vmaps that stand between the lookup and the loss, once for each member.
    transpose: (d_out, saved) -> {part: RowGrads}; d_out is d_acts, a KeyedTensor, or {feature: f[capacity, D]}.
    overflows: i64[2] of each exchange that has a capacity: how many ids found no place, and the capacity that all would
      have needed. Whoever differentiates gets them with the gradients, and must not train on what is not whole.
    """

    out: Any
    saved: Callable[[], Any]
    transpose: Callable[[Any, Any], dict[str, RowGrads]]
    overflows: tuple[Tensor, ...] = ()


class Faked(NamedTuple):
    """How `fake_quantize` has tables read that are not plain. problems: (tables, {table: dtype}) -> why it cannot.
    read: (FakeQuantizedTables, ids, features, implementation) -> LookupResult."""

    problems: Callable[..., Iterator[Problem]]
    read: Callable[..., LookupResult]


class Kind(NamedTuple):
    """What is asked of tables of a type; the names of features are those of their tables, not of their parts.

    shapes: tables -> {table: (R, D)}, by the names that features use: what `lookup`
      checks features and ids against, once, for every kind.
    read: (tables, ids, features, implementation) -> LookupResult. The features are checked, not empty for other kinds
      than plain tables, and all of them pooled ("sum", "mean") or all sequences ("none").
    is_trained: tables -> whether the parts get gradients; `value_and_grad` refuses others.
    layout: tables -> where the rows of which table lie on a mesh, as `funcrec.sharding` has it: resharding, checkpoints
      and logs go by it. None for tables that are whole, whose parts are what is kept.
    quantized: (tables, dtypes, key) -> what `quantize` gives. None: it refuses them.
    faked: None: `fake_quantize` refuses them.
    """

    shapes: Callable[[Any], Mapping[str, tuple[int, int]]]
    read: Callable[..., LookupResult]
    is_trained: Callable[[Any], bool] = lambda tables: True
    layout: Callable[[Any], Any] = lambda tables: None
    quantized: Callable[..., Any] | None = None
    faked: Faked | None = None


KINDS: dict[type, Kind] = {}


def kind_of_tables(tables: object) -> Kind:
    return KINDS.get(type(tables), KINDS[dict])


def layout_in(tables: object) -> Any:
    """Where the rows of tables lie on a mesh; None of tables that are whole, and of what are no tables."""
    return kind_of_tables(tables).layout(tables)


def is_plain(tables: object) -> bool:
    """Whether the parts are the tables."""
    return kind_of_tables(tables) is KINDS[dict]


def with_parts(tables: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> Any:
    """The same tables made of other parts."""
    return dict(parts) if is_plain(tables) else map_parts(lambda name, _: parts[name], tables)


def map_parts(fn: Callable[[str, Tensor], Any], tables: Mapping[str, Tensor]) -> Any:
    """The same kind of tables, of fn(part, tensor) for each part."""
    names = () if is_plain(tables) else [n for n in leaf_names(tables) if n in tables]
    if not is_plain(tables) and sorted(names) != sorted(tables):
        fail(
            "funcrec.tables.KINDS", f"the parts of {type(tables).__name__} are not its tensors' names.",
            got=f"parts {list(tables)} of tensors named {names}", need="each tensor's last key or field once",
            hint="two dicts keyed by table: name the parts apart, as in {'item.base': ..., 'item.delta': ...}",
        )  # fmt: skip
    return map_with_names(lambda name, x: fn(name, x) if name in tables else x, tables)


def table_shapes(tables: Any) -> dict[str, tuple[int, int]]:
    """{table: (R, D)}, of tables of any kind or of their configs."""
    if isinstance(tables, Mapping):
        return dict(kind_of_tables(tables).shapes(tables))
    return {t.name: t.shape for t in tables}


# -- which lookups are made: what an export asks, to tell a server of each column's table -----------------------------


class Lookup(NamedTuple):
    """The arguments of one: tables of any kind, ids, features."""

    tables: Any
    ids: KeyedJaggedTensor
    features: Sequence[FeatureConfig]


_seen: ContextVar[list[Lookup] | None] = ContextVar("funcrec_lookups_seen", default=None)


@contextlib.contextmanager
def lookups_seen() -> Iterator[list[Lookup]]:
    """A list that fills with the lookups that are made inside, by this thread."""
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
