"""A table of integer ids as tensors, whose rows can be taken in any order.

    bag b of key k = the ids of column k in row rows[b];    label[b], dense[b] and weight[b] come from row rows[b]

Shapes: N rows, B rows of a batch, C categorical columns, D dense numbers, T labels.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from funcrec.core import Within, check, pytree, sure, typed
from funcrec.data.readers import _columns as columns
from funcrec.data.readers._files import opened
from funcrec.data.readers._rows import Vocabularies, need_ids, row_problems, there, vocabulary_problems
from funcrec.data.readers._schema import Schema
from funcrec.data.readers._sources import table_of
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, is_concrete, offsets_of, take_ranges
from funcrec.tables import Batch

CALL = "funcrec.data.examples"
MAX_CLASS = 2**24  # labels are f32, which holds every integer up to 2²⁴


@pytree(static=("schema", "most"), optional=("multivalued", "label", "dense", "weights", "weight", "time"))
class Examples:
    """The rows of a table as tensors; `take`, `batches` and `fr.to` accept it.

    Args:
      categorical: i64[N, C], one id for each row and column.
      multivalued: the columns with several ids in a row, N bags for each column; or None.
      label: f32[N], or f32[N, T] for T labels, or None.
      dense: f32[N, D], or None.
      weights: f32[N, C], the weights of the categorical ids; or None. They are 1 in columns without weights.
        `multivalued` holds the weights of its own ids.
      weight: f32[N], or None.
      time: i64[N] or f64[N], or None.
      schema: the names of the columns.
      most: for each multivalued column, the largest number of ids in a row.

    Example:
      >>> import torch
      >>> from funcrec.data import Schema, examples
      >>> data = examples({"click": [1, 0], "item": [7, 8]}, Schema(label="click", categorical=("item",)))
      >>> data.take(torch.tensor([1, 1])).ids.to_lists()
      {'item': [[8], [8]]}
    """

    categorical: Tensor
    multivalued: KeyedJaggedTensor | None
    label: Tensor | None
    dense: Tensor | None
    weights: Tensor | None
    weight: Tensor | None
    time: Tensor | None
    schema: Schema
    most: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.categorical.shape[0]

    def take(self, rows: Tensor) -> Batch:
        """Return the batch of these rows, as `funcrec.data.take` describes it.

        If values can be read, the buffer has room for the ids of these rows. Inside `jit` and on a GPU no value
        can be read. There the buffer has room for B · Σ most ids, so that its shape depends on B only."""
        check("funcrec.data.take", row_problems(rows, self.num_rows, self.categorical.device))
        rows, inside = there(rows, self.num_rows)
        of = lambda x: None if x is None else x.index_select(0, rows)
        mark: Callable[..., Any] = lambda x, odd: (
            x if x is None or inside is None else torch.where(_like(inside, x), x, odd)
        )
        single, bags = mark(of(self.categorical), -1), None
        if self.multivalued is not None:
            bags = _taken(self.multivalued, rows, inside, sum(self.most))
        numbers = [mark(of(x), torch.nan) for x in (self.label, self.dense, self.weight)]
        return Batch(_ids(self.schema, single, of(self.weights), bags), *numbers)

    def __repr__(self) -> str:
        return f"Examples({self.num_rows} rows, {self.schema})"


def whole(data: Examples) -> Batch:
    """Return all rows in order, as one batch."""
    own = data.multivalued
    bags = None if own is None else JaggedTensor(own.values, own.offsets, own.weights)
    numbers: tuple[Any, ...] = (data.label, data.dense, data.weight)
    return Batch(_ids(data.schema, data.categorical, data.weights, bags), *numbers)


def _like(inside: Tensor, x: Tensor) -> Tensor:
    return inside.view(-1, *[1] * (x.dim() - 1))


def _taken(bags: KeyedJaggedTensor, rows: Tensor, inside: Tensor | None, most: int) -> JaggedTensor:
    """Return the bags of these rows, key after key. A row that the table lacks has an empty bag."""
    firsts = torch.arange(len(bags.keys), device=rows.device) * bags.num_bags
    at = (firsts[:, None] + rows).flatten()
    starts = bags.offsets[:-1].index_select(0, at)
    lengths = bags.offsets[1:].index_select(0, at) - starts
    if inside is not None:
        lengths = torch.where(inside.repeat(len(bags.keys)), lengths, 0)
    is_read = is_concrete(rows) and is_concrete(lengths)
    return take_ranges(
        bags.values, bags.weights, starts, lengths, int(lengths.sum()) if is_read else rows.shape[0] * most
    )


def _ids(schema: Schema, single: Tensor, weights: Tensor | None, bags: JaggedTensor | None) -> KeyedJaggedTensor:
    """Return one buffer of ids: single ids i64[B, C] with weights f32[B, C], then the bags of the other keys."""
    values, weights = single.T.flatten(), None if weights is None else weights.T.flatten()
    offsets = torch.arange(single.numel() + 1, device=single.device)
    if bags is not None:
        if weights is not None or bags.weights is not None:
            own = lambda w, x: x.new_ones(x.shape[0], dtype=torch.float32) if w is None else w
            weights = torch.cat([own(weights, values), own(bags.weights, bags.values)])
        offsets = torch.cat([offsets[:-1], bags.offsets + single.numel()])
        values = torch.cat([values, bags.values])
    keys = schema.keys
    return KeyedJaggedTensor(values, offsets, weights, keys=keys, unweighted=_unweighted(keys, schema))


def _unweighted(keys: tuple[str, ...], schema: Schema) -> tuple[str, ...]:
    """Return the keys without weights if other keys have weights, else no key."""
    weighted = dict(schema.weights)
    return tuple(k for k in keys if k not in weighted) if any(k in weighted for k in keys) else ()


MissingId = Annotated[int, Within("an int of 64 bits", lambda n: -(2**63) <= n < 2**63, "is not an id")]


@typed
def examples(
    table: object, schema: Schema, *, vocabularies: Vocabularies = None, missing: MissingId | None = None
) -> Examples:
    """Return the Examples of a table whose ids are integers. For other ids, use `fit_encoding` and `encode`.

    Args:
      table: a pyarrow, pandas or polars table, a dict of columns, or a path, as in `read`.
      schema: the columns and their roles.
      vocabularies: {column: V}. An id outside [0, V) of such a column is then an error. Use
        `vocabularies_of(tables, features)` for features without a hash.
      missing: the id that replaces a missing integer. Without it, a missing integer is an error. A missing list is an
        empty bag.

    A column of ids holds integers below 2⁶³ or booleans, or lists of either in any of Arrow's layouts. Negative
    integers stay as they are: a hash accepts them, and a table returns zeros for them. A column of numbers holds
    integers, floats, booleans or decimals, all finite in f32. A column of times holds numbers, or timestamps and dates,
    which become microseconds since 1970. A dictionary column counts as the values that it stands for.

    Raises:
      ModuleNotFoundError: pyarrow is missing.
      TypeError: a column has another type.
      ValueError: a column is missing, or an id, label or number is missing or out of its range. The error names the
        column and the row.

    Law: take(examples(table, schema), rows) has the values that the table has in these rows.

    Example:
      >>> from funcrec.data import Schema, batches, examples
      >>> table = {"click": [1, 0, 1], "price": [0.5, 2.0, 1.0], "item": [7, 8, 7], "genres": [[1, 2], [], [3]]}
      >>> schema = Schema(label="click", dense=("price",), categorical=("item",), multivalued=("genres",))
      >>> [batch.ids.to_lists() for _, batch in batches(examples(table, schema), None, 2)]
      [{'item': [[7], [8]], 'genres': [[1, 2], []]}, {'item': [[7]], 'genres': [[3]]}]
    """
    check(CALL, vocabulary_problems(vocabularies, schema.keys))
    found = table_of(CALL, opened(CALL, table, schema))
    return examples_of(CALL, found, schema, vocabularies or {}, missing)


def examples_of(
    call: str,
    table,
    schema: Schema,
    sizes: Mapping[str, int],
    missing: int | None = None,
    missing_number: float | None = None,
) -> Examples:
    """Return the Examples of a pyarrow.Table that has the columns of the schema. Errors name `call`."""
    table = columns.lists_and_ids(table, schema)
    check(call, columns.type_problems(table.schema, schema))
    n, weights = table.num_rows, dict(schema.weights)

    def need(name: str, ids: np.ndarray, row: Callable[[int], int] = int) -> np.ndarray:
        no = lambda at, _, got, what: columns.refuse(call, at, name, got, what)
        need_ids(ids, sizes.get(name), name, no, row)
        return ids

    single = [need(c, columns.ids_of(call, table[c], c, missing=missing)) for c in schema.categorical]
    by = [weights.get(c) for c in schema.categorical]
    ones = np.ones(n, np.float32)
    own = [ones if w is None else columns.floats_of(call, table[w], w) for w in by] if any(by) else None
    lists = [(c, *columns.bags_of(call, table[c], c)) for c in schema.multivalued]
    for c, ids, lengths in lists:
        need(c, ids, lambda nth, lengths=lengths: columns.row_of(lengths, nth))
    dense = [columns.dense_of(call, table[c], c, missing=missing_number) for c in schema.dense]
    labels = [_label(call, table[c], c, kind) for c, kind in zip(schema.labels, schema.label_kinds, strict=True)]
    label = None if not labels else labels[0] if isinstance(schema.label, str) else np.stack(labels, 1)
    of = lambda x: None if x is None else torch.from_numpy(np.ascontiguousarray(x))
    return Examples(
        categorical=sure(of(np.stack(single, 1) if single else np.zeros((n, 0), np.int64))),
        multivalued=_bags(call, table, lists, schema) if lists else None,
        label=of(label),
        dense=of(np.concatenate(dense, 1)) if dense else None,
        weights=of(None if own is None else np.stack(own, 1)),
        weight=of(None if schema.weight is None else _weight(call, table[schema.weight], schema.weight)),
        time=of(None if schema.time is None else columns.times_of(call, table[schema.time], schema.time)),
        schema=schema,
        most=tuple(int(lengths.max(initial=0)) for _, _, lengths in lists),
    )


def _bags(call: str, table, lists: list, schema: Schema) -> KeyedJaggedTensor:
    """Return N bags of each column from (name, ids, lengths), with a weight for each id if any column has weights."""
    scales, weights = [], dict(schema.weights)
    for name, ids, lengths in lists:
        by = weights.get(name)
        scale, own = np.ones(len(ids), np.float32), lengths
        if by is not None:
            scale, own = columns.list_floats_of(call, table[by], by)
        if by is not None and (own != lengths).any():
            row = int(np.flatnonzero(own != lengths)[0])
            columns.refuse(call, row, by, f"{own[row]} weights", f"{lengths[row]}, one for each id of `{name}`")
        scales.append(scale)
    joined = lambda parts: torch.from_numpy(np.concatenate(parts))
    has_weights = any(name in weights for name, _, _ in lists)
    offsets = offsets_of(joined([lengths for _, _, lengths in lists]))
    values, keys = joined([ids for _, ids, _ in lists]), tuple(name for name, _, _ in lists)
    own = joined(scales) if has_weights else None
    return KeyedJaggedTensor(values, offsets, own, keys=keys, unweighted=_unweighted(keys, schema))


def _label(call: str, column, name: str, kind: str) -> np.ndarray:
    """Return labels f32[N], after a check of their kind."""
    column = columns.plain(column)
    if column.null_count:
        hint = "the rows that have one, table.filter(...); label=None in the schema, for prediction"
        columns.refuse(call, columns.first_true(column.is_null()), name, "no label", "a number", hint)
    found = columns.numbers_of(call, column, name)
    if kind == "number":
        return columns.floats_of(call, column, name)
    if kind == "binary":
        wrong, need = ~((found >= 0) & (found <= 1)), "a number in [0, 1]"
        hint = 'label_kind="number" or "class" in the schema, or a label of its own: stars >= 4'
    else:
        wrong = ~((found >= 0) & (found < MAX_CLASS) & (found == np.floor(found)))
        need, hint = f"a class 0, 1, 2, ... below {MAX_CLASS}", 'label_kind="number" in the schema'
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        columns.refuse(call, row, name, f"label {found[row]}", need, hint)
    return found.astype(np.float32)


def _weight(call: str, column, name: str) -> np.ndarray:
    x = columns.floats_of(call, column, name)
    if x.size and x.min() < 0:
        row = int(x.argmin())
        columns.refuse(call, row, name, f"weight {x[row]}", "a number >= 0")
    return x
