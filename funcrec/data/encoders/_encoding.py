"""Encodings of all columns of a schema: learned from a table or a stream, applied to any table, saved with parameters.

    encoding = fit_encoding(train_table, schema)        encode(encoding, any_table) -> Examples

Columns share one vocabulary if they share a table of embeddings, such as an item and the items that a user has seen.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from funcrec.core import Count, Problem, check, fail, outside_transforms, pytree, replace, typed, unknown_problems
from funcrec.data._examples import Examples, examples_of
from funcrec.data.encoders._encoders import Encoder, Place, elements
from funcrec.data.encoders._numbers import normalize
from funcrec.data.encoders._vocabulary import vocabulary
from funcrec.data.readers import _columns as columns_of
from funcrec.data.readers._files import is_path, opened
from funcrec.data.readers._schema import Schema
from funcrec.data.readers._sources import as_table, need_pyarrow, part_chunks, table_of
from funcrec.tables import FeatureConfig, TableConfig

Pooling = Literal["sum", "mean", "max", "none"]


@pytree(static=("schema", "tables"))
class Encoding:
    """The state that `fit_encoding` learned. Save it by `fr.save`, with the parameters that were trained with it.

    Args:
      ids: {table: the state of its encoder}.
      dense: {column: the state of its encoder}. A column that is not encoded is absent.
      schema: the names of the columns.
      tables: (column, table) of each column of ids.

    Learned numbers are f64. `encode` refuses an encoding that `fr.tree.to` has cast: cast only the parameters.

    Example:
      >>> from funcrec.data import Schema, encode, fit_encoding
      >>> table = {"click": [1, 0, 1], "item": ["hat", "shoe", "hat"], "price": [2.0, 4.0, 2.0]}
      >>> encoding = fit_encoding(table, Schema(label="click", categorical=("item",), dense=("price",)))
      >>> encoding.num_ids, encode(encoding, {"item": ["shoe", "sock"], "price": [4.0, None]}).categorical.tolist()
      ({'item': 3}, [[2], [0]])
    """

    ids: dict[str, Any]
    dense: dict[str, Any]
    schema: Schema
    tables: tuple[tuple[str, str], ...]

    @property
    def num_ids(self) -> dict[str, int]:
        """Return {column: n}, where the ids of the column are in [0, n)."""
        return {column: self.ids[table].num_ids for column, table in self.tables}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{column}: {size}" for column, size in self.num_ids.items())
        return f"Encoding({{{sizes}}}, dense=({', '.join(self.schema.dense)}))"


@typed
def fit_encoding(
    source: object,
    schema: Schema,
    encoders: Mapping[str, Encoder | None] | None = None,
    *,
    share: Mapping[str, str] | None = None,
) -> Encoding:
    """Return the encoding of all columns, learned in one pass over the rows to train on.

    Args:
      source: a source as in `read`, or an iterable of tables and record batches. No source needs to fit in memory.
      schema: the columns and their roles. Its label, weights and time are not encoded.
      encoders: {column: Encoder}. By default ids get `vocabulary()` and dense columns get `normalize()`. None leaves a
        dense column as it is.
      share: {column: table}, for columns of ids that share the table and the vocabulary of another column:
        share={"history": "item"}. The encoder of "item" then learns from both columns.

    Raises:
      TypeError, ValueError, KeyError: an argument or a value does not fit. The error names the column, and the row if
        there is one.

    Law: the same rows give the same encoding, whatever chunks they come in.

    Example:
      >>> from funcrec.data import Schema, bucketize, fit_encoding
      >>> table = {"item": ["hat", "shoe"], "history": [["sock"], []], "age": [30, 50]}
      >>> schema = Schema(categorical=("item", "age"), multivalued=("history",))
      >>> fit_encoding(table, schema, {"age": bucketize(edges=(18, 40, 65))}, share={"history": "item"})
      Encoding({item: 4, age: 5, history: 4}, dense=())
    """
    call = "funcrec.data.fit_encoding"
    of = {n: n for n in schema.keys} | dict(share or {})
    check(call, _sharing_problems(schema, share or {}), _role_problems(schema))
    chosen = {n: vocabulary() for n in of.values()} | {n: normalize() for n in schema.dense} | dict(encoders or {})
    chosen = {n: e for n, e in chosen.items() if e is not None}
    check(call, _encoder_problems(encoders or {}, schema, of))
    known, rows = {n: e.init() for n, e in chosen.items()}, 0
    wanted = (*schema.keys, *schema.dense)
    for table, name_of_row in _tables_of(call, source, wanted):
        unsplit = [c for c in schema.multivalued if of.get(c, c) not in (encoders or {})]
        check(call, columns_of.text_list_problems(table.schema, unsplit))
        table = columns_of.lists_and_ids(table, schema)
        with columns_of.rows_named(name_of_row):
            for column in wanted:
                n = of.get(column, column)
                if n in chosen:
                    known[n] = chosen[n].update(known[n], *elements(table[column], Place(call, column))[:2])
        rows += table.num_rows
    if not rows:
        need = "the rows to train on"
        fail(call, "`source` has no rows.", got="0 rows", need=need, hint="an iterable that was not read before")
    states = {n: _computed(call, n, e, known[n]) for n, e in chosen.items()}
    ids = {n: states[n] for n in dict.fromkeys(of.values())}
    return Encoding(ids, {n: states[n] for n in schema.dense if n in states}, schema, tuple(of.items()))


@typed
def encode(encoding: Encoding, table: Any, *, columns: Sequence[str] | None = None) -> Examples:
    """Return the Examples of an encoded table. A value that `encoding` has not learned gets the unknown id 0.

    Args:
      table: as in `read`. A table for prediction may lack all labels of the schema. Such a table may also lack weight
        and time, and its batches have no label.
      columns: the columns of ids and numbers to encode, such as those of the candidates alone. None encodes all.

    Law: row r of the result depends only on the encoding and row r.

    Raises:
      TypeError: a column has another type than the learned column. `encode` also raises what `examples` raises.

    Example:
      >>> import torch
      >>> from funcrec.data import Schema, encode, fit_encoding
      >>> encoding = fit_encoding({"tags": [["a", "b"], []]}, Schema(multivalued=("tags",)))
      >>> encode(encoding, {"tags": [["b", "?"]]}).take(torch.tensor([0])).ids.to_lists()
      {'tags': [[2, 0]]}
      >>> both = fit_encoding({"user": [7, 8], "item": ["a", "b"]}, Schema(categorical=("user", "item")))
      >>> encode(both, {"item": ["b", "a"]}, columns=["item"]).take(torch.tensor([0, 1])).ids.to_lists()
      {'item': [[2], [1]]}
    """
    call, schema = "funcrec.data.encode", encoding.schema
    check(call, _columns_problems(schema, columns))
    if not (is_path(table) or isinstance(table, Mapping | Sequence)):  # a source that may be readable only once
        table = as_table(call, table, None)
    names = list(table) if isinstance(table, Mapping) else opened(call, table, None).schema.names
    if not set(schema.labels) & set(names):
        absent = {n: None for n in ("weight", "time") if getattr(schema, n) not in names}
        schema = replace(schema, label=None, label_kind="binary", **absent)
    check(call, _absent_problems(schema, names) if columns is None else ())
    schema = schema if columns is None else _part_of(schema, columns)
    table = columns_of.lists_and_ids(table_of(call, opened(call, table, schema)), schema)
    with outside_transforms():  # a transform would wrap the tensors that are read here on the host
        states = {c: encoding.ids[t] for c, t in encoding.tables} | encoding.dense
        for column, state in [(c, s) for c, s in states.items() if c in (*schema.keys, *schema.dense)]:
            made = state.apply(table[column], Place(call, column))
            table = table.set_column(table.column_names.index(column), column, made)
        return examples_of(call, table, schema, {n: k for n, k in encoding.num_ids.items() if n in schema.keys})


@typed
def configs(
    encoding: Encoding,
    embedding_dim: Count | Mapping[str, Count] = 16,
    *,
    pooling: Pooling | Mapping[str, Pooling] = "sum",
) -> tuple[tuple[TableConfig, ...], tuple[FeatureConfig, ...]]:
    """Return (tables, features) for the ids of an encoding. Models are constructed from these two.

    Args:
      embedding_dim: one dimension for all tables, or {table: dim}.
      pooling: one pooling for all columns, or {column: pooling}. Columns that are not named get "sum".

    Example:
      >>> from funcrec.data import Schema, configs, fit_encoding
      >>> encoding = fit_encoding({"item": ["hat", "shoe"]}, Schema(categorical=("item",)))
      >>> configs(encoding, 8)[0][0].shape
      (3, 8)
    """
    call, schema = "funcrec.data.configs", encoding.schema
    settings = {"embedding_dim": (embedding_dim, list(encoding.ids)), "pooling": (pooling, list(schema.keys))}
    check(call, *(_setting_problems(n, x, among) for n, (x, among) in settings.items()))
    dim_of = lambda n: embedding_dim.get(n, 16) if isinstance(embedding_dim, Mapping) else embedding_dim
    pooled = lambda n: pooling.get(n, "sum") if isinstance(pooling, Mapping) else pooling
    weighted = dict(schema.weights)
    tables = tuple(TableConfig(n, state.num_ids, dim_of(n)) for n, state in encoding.ids.items())
    features = tuple(FeatureConfig(c, table=t, pooling=pooled(c), weighted=c in weighted) for c, t in encoding.tables)
    return tables, features


def _part_of(schema: Schema, columns: Sequence[str]) -> Schema:
    """Return the schema with only these columns of ids and numbers. The label, the weight and the weights of ids
    stay."""
    own = {n: tuple(c for c in getattr(schema, n) if c in columns) for n in ("dense", "categorical", "multivalued")}
    return replace(schema, **own, weights=tuple((of, by) for of, by in schema.weights if of in columns))


def _computed(call: str, name: str, encoder: Encoder, known: Any) -> Any:
    """Return the state of an encoder. An error about the rows names the column."""
    try:
        return encoder.compute(known)
    except ValueError as error:
        error.add_note(f"{call}: of column `{name}`")
        raise


def _tables_of(call: str, source: Any, names: tuple[str, ...]) -> Iterator[tuple[Any, Callable[[int], str]]]:
    """Yield each table of a source, with the columns `names`, and a function that names its rows."""
    pa = need_pyarrow(call)
    is_whole = isinstance(source, Sequence | Mapping | Tensor) and not _is_tables(source)
    is_arrow = any(hasattr(source, f"__arrow_c_{x}__") for x in ("stream", "array"))
    if not isinstance(source, pa.RecordBatchReader) and (is_whole or is_arrow or not isinstance(source, Iterable)):
        found = opened(call, source, names)
        for part in found.parts:
            first = part.first
            for chunk in part_chunks(call, part):
                yield pa.Table.from_batches([chunk]), lambda r, part=part, first=first: part.name_of(first + r)
                first += chunk.num_rows
        return
    first = 0
    for part in source:
        table = as_table(call, part, names)
        yield table, lambda r, first=first: f"row {first + r}"
        first += table.num_rows


def _is_tables(source: object) -> bool:
    """Return whether a list holds tables, and not paths."""
    return isinstance(source, list | tuple) and bool(source) and not any(map(is_path, source))


def _sharing_problems(schema: Schema, share: Mapping[str, str]) -> Iterator[Problem]:
    named, hint = (*share, *share.values()), 'share={"history": "item"}'
    yield from unknown_problems("`share` names columns that are not ids.", named, schema.keys, hint)
    onward = [n for n in share.values() if share.get(n, n) != n]
    if onward:
        need = "tables of their own"
        yield Problem("`share` names a table that shares another.", f"{onward}", need, 'share={"history": "item"}')


def _columns_problems(schema: Schema, columns: Sequence[str] | None) -> Iterator[Problem]:
    if columns is None:
        return
    yield from unknown_problems("`columns` names columns that are not encoded.", columns, (*schema.keys, *schema.dense))
    if not set(columns) & set(schema.keys):
        hint = f"columns={list(schema.keys[:1])}"
        yield Problem("`columns` names no column of ids.", f"{list(columns)}", f"some of {list(schema.keys)}", hint)


def _absent_problems(schema: Schema, names: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem if a table lacks columns, and name those that could be encoded alone."""
    absent, there = ([n for n in (*schema.keys, *schema.dense) if (n in names) == has] for has in (False, True))
    if absent and set(there) & set(schema.keys):
        hint = f"names that it has; columns={there} encodes these alone"
        yield Problem("the table lacks columns.", f"{list(names)}", f"{absent}", hint)


def _role_problems(schema: Schema) -> Iterator[Problem]:
    """Yield a problem if an encoded column has another role. For two roles, the column needs two names."""
    others = {*(by for _, by in schema.weights), schema.weight, schema.time}
    twice = [n for n in schema.keys if n in {*others, *schema.dense}] + [n for n in schema.dense if n in others]
    if twice:
        hint = f'a copy: table.append_column("{twice[0]}_2", table["{twice[0]}"])'
        yield Problem("columns to encode have a second role.", f"{twice}", "one use of each", hint)


def _encoder_problems(encoders: Mapping, schema: Schema, of: Mapping[str, str]) -> Iterator[Problem]:
    known = [*dict.fromkeys(of.values()), *schema.dense]
    for name, e in encoders.items():
        is_dense, at = name in schema.dense, f"encoders[{name!r}]"
        if name not in known:
            hint = f"encoders[{of[name]!r}], whose table it shares" if name in of else ""
            yield Problem(f"`{at}` belongs to a column that is not encoded.", f"{name!r}", f"among {known}", hint)
        elif e is None and not is_dense:
            need = "an Encoder"
            yield Problem(f"`{at}` is not an encoder.", "None", need, "fr.data.identity(num_embeddings)", TypeError)
        elif e is not None and (e.makes == "numbers") != is_dense:
            role, want = ("a dense column", "numbers") if is_dense else ("a column of ids", "ids")
            hint = f'"{name}" in categorical= of the schema' if is_dense else f'"{name}" in dense= of the schema'
            yield Problem(f"`{at}` makes {e.makes}, of {role}.", e.makes, want, hint)


def _setting_problems(name: str, setting: object, among: list[str]) -> Iterator[Problem]:
    named, hint = setting if isinstance(setting, Mapping) else (), f"{name}={{{among[0]!r}: ...}}"
    yield from unknown_problems(f"`{name}` names no table.", named, among, hint)
