"""Models of sequences for retrieval: the next item of a history, from the vectors of its positions.

    hidden = encoder(E[history]),   score of item r after position p = ⟨hidden_p, E_r⟩,   query = hidden of the last p

One table E is both the input and the output. It is always in `params.tables`, never among the dense parameters. `items`
looks up all its rows, so its gradient is rows. The tables may be sharded or quantised, and row optimizers update them.
Shapes: B histories, N items of all histories, D dim, R rows of the item table.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import (
    Count,
    Problem,
    check,
    describe,
    html_table,
    random,
    reduced,
    shown,
    sure,
    tree_leaves,
    typed_fields,
)
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, take_ranges
from funcrec.models._model import input_problems
from funcrec.nn import Layer
from funcrec.tables import (
    HEAD,
    Batch,
    FeatureConfig,
    Params,
    TableConfig,
    feature_list_problems,
    feature_table_problems,
    kind_of_tables,
    lookup_sequence,
    sequence_ids,
    table_lines,
    table_list_problems,
)
from funcrec.tables import init as init_tables


@typed_fields
class SequenceModel(NamedTuple):
    """A retrieval model of histories.

    tables, features: all tables, and the feature of the history.
    init: (key) -> Params.
    query: (params, batch) -> f[B, D], the vector after the whole history, as in evaluation; 0 for an empty history.
    items: (params) -> f[R, D], the vectors of all items. The score of an item is its product with a query.
    hidden: (params, bags i[N]) -> JaggedTensor f[N, D], a vector for each position of histories, as in evaluation.
    train_hidden: (params, bags i[N], key) -> JaggedTensor f[N, D], as in training.
    max_length: the number of latest items of a history that the model reads.

    Example: see `sasrec`.
    """

    tables: tuple[TableConfig, ...]
    features: tuple[FeatureConfig, ...]
    init: Callable[[Tensor], Params]
    query: Callable[[Params, Batch], Tensor]
    items: Callable[[Params], Tensor]
    hidden: Callable[[Params, JaggedTensor], JaggedTensor]
    train_hidden: Callable[[Params, JaggedTensor, Tensor], JaggedTensor]
    max_length: Count

    def _repr_html_(self) -> str:
        """Return the tables of the model in HTML, for a notebook."""
        return html_table(HEAD, table_lines(self.tables, self.features))

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    def __repr__(self) -> str:
        return shown(self)


def check_history(call: str, tables: Any, history: Any) -> None:
    """Raise unless `history` is a sequence of rows of one of the tables."""
    check(call, table_list_problems(tables), feature_list_problems((history,)))
    check(call, feature_table_problems((history,), tables), history_problems(history))


def sequence_model(
    call: str, tables: Sequence[TableConfig], history: FeatureConfig, encoder: Layer, max_length: int
) -> SequenceModel:
    """Return the model of an encoder: a layer of bags of vectors f[N, D] -> bags of vectors f[N, D]."""
    table = next(t for t in tables if t.name == history.table)

    def init(key: Tensor) -> Params:
        random.check_key(f"{call}.init", key)
        for_tables, for_encoder = random.split(key)
        return Params(init_tables(for_tables, tables), encoder.init(for_encoder))

    def hidden(params: Params, bags: JaggedTensor, key: Tensor | None) -> JaggedTensor:
        x = looked_up(params.tables, history, latest(bags, max_length))
        return encoder.apply(params.dense, x) if key is None else sure(encoder.train_apply)(params.dense, x, key)[0]

    def query(params: Params, batch: Batch) -> Tensor:
        check(f"{call}.query", input_problems(params, batch, 0))
        return last_of(hidden(params, history_of(batch, history), None))

    def items(params: Params) -> Tensor:
        check(f"{call}.items", listed_problems(params.tables, history.table))
        device = next(x.device for x in tree_leaves(params.dense) if isinstance(x, Tensor))
        rows = torch.arange(table.num_embeddings, device=device)
        bag = JaggedTensor(rows, torch.tensor([0, len(rows)], device=device))
        return looked_up(params.tables, history, bag).values

    return SequenceModel(
        tuple(tables),
        (history,),
        init,
        query,
        items,
        lambda params, bags: hidden(params, bags, None),
        hidden,
        max_length,
    )


def history_of(batch: Batch, history: FeatureConfig) -> JaggedTensor:
    """Return the history of each example, i[N]."""
    return sequence_ids(batch.ids, (history,))[history.name]


def looked_up(tables: Any, feature: FeatureConfig, bags: JaggedTensor) -> JaggedTensor:
    """Return the rows of the bags' items, bags of vectors."""
    ids = KeyedJaggedTensor(bags.values, bags.offsets, keys=(feature.key,))
    return lookup_sequence(tables, ids, (feature,))[feature.name]


def latest(bags: JaggedTensor, length: int) -> JaggedTensor:
    """Return the last `length` values of each bag, in a buffer of the same capacity."""
    lengths = bags.lengths.clamp(max=length)
    return take_ranges(bags.values, None, bags.offsets[1:] - lengths, lengths, bags.capacity)


def shifted(bags: JaggedTensor, length: int) -> tuple[JaggedTensor, JaggedTensor]:
    """Return (the inputs, their next items): of each bag the latest positions that have a next item, at most
    `length`."""
    lengths = (bags.lengths - 1).clamp(min=0, max=length)
    starts = bags.offsets[1:] - lengths
    taken = lambda starts: take_ranges(bags.values, None, starts, lengths, bags.capacity)
    return taken((starts - 1).clamp(min=0)), taken(starts)


def last_of(bags: JaggedTensor) -> Tensor:
    """Return the last vector of each bag, f[B, D]; 0 for an empty bag."""
    padded = torch.cat([bags.values, bags.values.new_zeros((1, *bags.values.shape[1:]))])
    return padded.index_select(0, torch.where(bags.lengths > 0, bags.offsets[1:] - 1, bags.capacity))


# -- validators --------------------------------------------------------------------------------------------------


def listed_problems(tables: Any, name: str) -> Iterator[Problem]:
    """Report a table whose rows do not have the numbers of its items."""
    if name in kind_of_tables(tables).follows(tables):
        what = f"the items of table {name!r} are those of a vocabulary, and not the numbers of its rows."
        hint = "a table of all items beside the dynamic ones; or fr.models.two_tower with losses of the batch's items"
        yield Problem(what, describe(tables), "a table with a row for each item", hint)


def history_problems(history: FeatureConfig) -> Iterator[Problem]:
    if history.pooling != "none":
        hint = f'fr.FeatureConfig({history.name!r}, table={history.table!r}, pooling="none")'
        yield Problem("the feature of the history is pooled.", f"pooling={history.pooling!r}", 'pooling="none"', hint)
    if history.hash is not None or history.weighted:
        got = "a hash" if history.hash is not None else "weighted=True"
        need, hint = "ids that are rows, without weights", "rows by fr.data.vocabulary(); the next item is a row, too"
        yield Problem("the feature of the history does not name rows of items.", got, need, hint)
    if history.max_length is not None:
        what, got = "the feature of the history cuts off the latest items.", f"max_length={history.max_length}"
        yield Problem(what, got, "a feature without max_length", "max_length of the model, which keeps the latest")
