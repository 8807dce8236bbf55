"""What the HSTU ranker requires of its features and of a batch."""

from collections.abc import Iterator, Sequence

from funcrec.core import Problem, describe, reported
from funcrec.jagged import JaggedTensor, is_concrete
from funcrec.models._model import sequence_problems
from funcrec.nn import Kept
from funcrec.tables import (
    FeatureConfig,
    TableConfig,
    feature_list_problems,
    feature_table_problems,
    table_list_problems,
)

CALL = "funcrec.models.hstu_ranker"


def hstu_problems(
    tables: Sequence[TableConfig],
    context: Sequence[FeatureConfig],
    history: Sequence[FeatureConfig],
    candidates: Sequence[FeatureConfig],
    time: str | None,
    query_time: str | None,
) -> Iterator[Problem]:
    every = (*context, *history, *candidates)
    found = [*table_list_problems(tables), *feature_list_problems(every)]
    yield from found
    if found or (yield from reported(feature_table_problems(every, tables))):
        return
    yield from sequence_problems("history", history)
    yield from sequence_problems("candidates", candidates)
    if len({f.max_length for f in history}) > 1:
        got, need = {f.name: f.max_length for f in history}, "one for all of them"
        yield Problem("`history` has several `max_length`.", str(got), need, "the same max_length in each feature")
    for f in context:
        if f.pooling == "none":
            need = "pooling 'sum' or 'mean'"
            yield Problem(f"`context[{f.name!r}]` is a sequence.", "pooling 'none'", need)
    got = [f.table for f in history], [f.table for f in candidates]
    if got[0] != got[1]:
        need = "a feature of the same table for each feature of `history`"
        yield Problem("`candidates` do not match `history`.", f"tables {got[1]}; history has {got[0]}", need)
    if (time is None) != (query_time is None):
        need, hint = "both, or neither", "query_time=None, time=None"
        yield Problem("`time` and `query_time` come together.", f"{time!r} and {query_time!r}", need, hint)


def column_problems(batch, names: Sequence[str | None]) -> Iterator[Problem]:
    """Yield problems unless the batch has these columns, and all columns have the same bags."""
    ids = batch.ids
    if ids.strides is not None or ids.inverse is not None:
        hint = "a batch without inverse indices"
        yield Problem("`batch.ids` have other bags for each key.", describe(ids), "one number of bags", hint)
    for name in names:
        if name is not None and name not in ids.keys:
            need = f"a column {name!r}"
            yield Problem(f"`batch.ids` lacks column {name!r}.", f"{list(ids.keys)}", need)


def kept_problems(layers: object, count: int, num_bags: int) -> Iterator[Problem]:
    """Yield problems unless the history is of this model, and of these users."""
    hint = "model.encode_history(params, batch)"
    if not isinstance(layers, list | tuple) or len(layers) != count or not all(isinstance(x, Kept) for x in layers):
        yield Problem("`history.layers` are not this model's.", describe(layers), f"{count} of fr.nn.Kept", hint)
    elif any(x.keys.num_bags != num_bags for x in layers):
        got, need = f"{layers[0].keys.num_bags} and {num_bags} bags", "a bag of candidates for each history"
        yield Problem("`history` is of other users than the candidates.", got, need, hint)


def count_problems(candidates: JaggedTensor, most: int) -> Iterator[Problem]:
    """Yield a problem if a bag has more candidates than labels and its lengths can be read."""
    if is_concrete(candidates.offsets) and candidates.num_bags and int(candidates.lengths.max()) > most:
        got, hint = f"labels for {most} candidates", "a column for each candidate of the longest bag"
        yield Problem("`batch.label` is too narrow.", got, f"{int(candidates.lengths.max())} for each bag", hint)
