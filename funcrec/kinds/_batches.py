"""The ids of a batch that vocabularies have to hold: a step admits them before its lookups read their rows.

    dynamic', new rows = admit_batch(dynamic, batch)

Shapes: N ids of a column, C places of a bag.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Problem, check, replace, tree_leaves
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor
from funcrec.kernels import ops
from funcrec.kinds._columns import Columns, admit_columns, buffers_of, buffers_of_bags, joined
from funcrec.kinds._dynamic import DynamicTables
from funcrec.kinds._renewal import NewRows
from funcrec.kinds._vocabulary import id_problems, vocabulary_problems
from funcrec.kinds._vocabulary_shards import admit_on_ranks, here, is_cut

Gather = Callable[[Tensor], Tensor]


def admit_batch(
    dynamic: DynamicTables, batch: Any, gather: Gather | None = None, followed: Collection[str] = ()
) -> tuple[DynamicTables, NewRows | None, Tensor]:
    """Return the tables after their vocabularies admitted the ids of a batch, the new rows, and the numbers of
    `admit_columns`. There are no new rows without vocabularies.

    The rows of new ids still hold the numbers of the ids before: `with_new_rows` renews them.

    gather: on ranks, a tensor -> that of all ranks, one after the other. followed: vocabularies whose new rows are
    needed on the rank of their bucket only, if ranks have parts of vocabularies.
    """
    if not dynamic.vocabularies:
        return dynamic, None, dynamic.first_key.new_zeros(0, 4)
    vocabularies = list(dynamic.vocabularies.values())
    own = [*map(here, vocabularies)]
    if gather is None or is_cut(vocabularies):
        each, columns = keyed_in(batch), columns_by_vocabulary(dynamic)
        check("funcrec.train_step", *(batch_problems(each, n, mine) for n, mine in columns.items()))
        given = buffers_of(each, list(columns.values()))
    else:
        given = buffers_of_bags(list(ids_of_batch(dynamic, batch, gather).values()))
    check("funcrec.train_step", *map(vocabulary_problems, own), *(id_problems(x, own[0]) for x in given.ids))
    if is_cut(vocabularies):
        at = [i for i, n in enumerate(dynamic.vocabularies) if n in followed]
        after, new, numbers = admit_on_ranks(vocabularies, given, at)
    else:
        after, new, numbers = admit_columns(own, given)
    return replace(dynamic, vocabularies=dict(zip(dynamic.vocabularies, after, strict=True))), new, numbers


def ids_of_batch(dynamic: DynamicTables, batch: Any, gather: Gather = lambda x: x) -> dict[str, JaggedTensor]:
    """Return {vocabulary: the ids of a batch that it has to hold, in one bag}.

    batch: any tree; all its KeyedJaggedTensors count.
    """
    each, out = keyed_in(batch), {}
    for name, columns in columns_by_vocabulary(dynamic).items():
        check("funcrec.train_step", batch_problems(each, name, columns))
        own = [(x, {c: n for c, n in columns.items() if c in x.keys}) for x in each]
        bags = [ids_of_columns(x, mine)[0] for x, mine in own if mine]
        out[name] = joined([gather(b.values) for b in bags], [gather(b.offsets[1:]) for b in bags])
    return out


def keyed_in(batch: Any) -> list[KeyedJaggedTensor]:
    is_ids = lambda x: isinstance(x, KeyedJaggedTensor)
    return [x for x in tree_leaves(batch, is_leaf=is_ids) if is_ids(x)]


def columns_by_vocabulary(dynamic: DynamicTables) -> dict[str, Columns]:
    return {n: {c: most for c, v, most in dynamic.columns if v == n} for n in dynamic.vocabularies}


def ids_of_columns(ids: KeyedJaggedTensor, columns: Mapping[str, int | None]) -> tuple[JaggedTensor, Tensor]:
    """Return (the ids of these columns in one bag of C places, their places in the values i64[C]).

    columns: {column: the most ids of a bag, or None}. The place of padding is N, the size of the values.
    """
    starts, lengths, room = [], [], 0
    for column, most in columns.items():
        bounds = ids.offsets_for(column).long()
        first, last = (bounds[:1], bounds[-1:]) if most is None else (bounds[:-1], bounds[1:])
        starts.append(first)
        lengths.append(last - first if most is None else (last - first).clamp(max=most))
        room += ids.capacity if most is None else min(ids.capacity, ids.bags_of(column) * most)
    ranges = torch.cat(starts), torch.cat(lengths), min(room, ids.capacity)
    every = torch.arange(ids.capacity, device=ids.values.device)
    (values, ends), (at, _) = (ops.take_ranges(x, *ranges) for x in (ids.values.long(), every))
    at = torch.where(torch.arange(at.shape[0], device=at.device) < ends[-1], at, ids.capacity)
    return JaggedTensor(values, torch.stack([ends[0], ends[-1]])), at


# -- validators --------------------------------------------------------------------------------------------------


def batch_problems(each: Sequence[KeyedJaggedTensor], name: str, columns: Mapping) -> Iterator[Problem]:
    if not any(c in x.keys for x in each for c in columns):
        need, hint = f"a KeyedJaggedTensor with one of {list(columns)}", "features=those that read the batch's ids"
        yield Problem(f"the batch has no ids for vocabulary {name!r}.", "none of its columns", need, hint, KeyError)
