"""The ids of the rows that a gradient touches: the random bits of an update follow an id, and not the row that it has.

    bits(row r) = those of row `id` of a table that has a row for each id

Shapes: M touched rows, K entries, D dim.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from funcrec.core import replace
from funcrec.kernels import ops
from funcrec.kinds._dynamic import DynamicTables
from funcrec.kinds._vocabulary_shards import ids_on_ranks, is_shard
from funcrec.tables import BEHIND, RowGrads, origin_of, terms_of

HALF = torch.float16, torch.bfloat16  # the dtypes that are rounded at random


def with_ids(grads: Mapping[str, RowGrads], tables: object) -> dict[str, RowGrads]:
    """Return the gradients, with the ids of their rows as origin where a vocabulary says them and 16 bits need them."""
    if not isinstance(tables, DynamicTables):
        return dict(grads)
    names = [x[0] for x in tables.first if x[0] in grads and tables.tables[x[0]].dtype in HALF]
    if not names:
        return dict(grads)
    touched = touched_rows([grads[n] for n in names])
    most = max(map(len, touched))
    rows = torch.stack([torch.nn.functional.pad(x, (0, most - len(x)), value=-1) for x in touched])
    ids = torch.stack([ids_of_rows(tables, n, own) for n, own in zip(names, rows.unbind(), strict=True)])
    of_tables = origins_of([(n, tables.tables[n].shape[1], 0) for n in names], rows, ids).unbind()
    return {**grads, **{n: replace(grads[n], origin=x) for n, x in zip(names, of_tables, strict=True)}}


def touched_rows(grads: Sequence[RowGrads]) -> list[Tensor]:
    """Return the distinct rows of each gradient, i64[M], ascending; -1 in places without one."""
    own = [g for g in grads if not g.coalesced]
    terms = terms_of(own)
    # One column of each sum says which rows there are.
    narrow = [s._replace(column=0) for s in terms.segments]
    terms = terms._replace(d=[x[:, :1].detach() for x in terms.d], segments=narrow)
    summed = iter(ops.coalesce(terms, [(g.num_embeddings, 1) for g in own]) if own else ())
    return [torch.where(g.valid, g.rows, -1) if g.coalesced else next(summed)[0] for g in grads]


def ids_of_rows(dynamic: DynamicTables, table: str, rows: Tensor) -> Tensor:
    """Return the id of each row of a table, i64[M], or the row itself if the table follows no vocabulary.

    Rows of unknown ids have the least numbers of 64 bits. A row that is negative has any number.
    """
    name = next((x[1] for x in dynamic.first if x[0] == table), None)
    if name is None:
        return rows
    vocabulary = dynamic.vocabularies[name]
    if is_shard(vocabulary):
        own = ids_on_ranks(vocabulary, rows)
    else:
        own = vocabulary.entries[rows.clamp(0, vocabulary.capacity - 1), 0]
    return torch.where(rows < vocabulary.capacity, own, rows - vocabulary.capacity + torch.iinfo(torch.int64).min)


def origins_of(tables: Sequence[tuple[str, int, int]], rows: Tensor, ids: Tensor) -> Tensor:
    """Return `RowGrads.origin` of rows i64[T, M], ascending before -1, as rows `ids` of T tables, i64[T, M + 1, 5].

    tables: (name, dim, first column) of each.
    """
    facts = torch.tensor([origin_of(name, dim, column=column) for name, dim, column in tables], device=rows.device)
    number, before, _, phase, words = facts[..., None].unbind(1)
    parts = torch.broadcast_tensors(number, before + (ids - rows) * words, rows, phase, words)
    parts = [x.contiguous() for x in parts]  # torch.stack takes ten times as long without it
    behind = torch.tensor(BEHIND, device=rows.device)
    own = torch.where((rows >= 0)[..., None], torch.stack(parts, -1), behind)
    return torch.cat([own, behind.expand(len(tables), 1, -1)], 1)
