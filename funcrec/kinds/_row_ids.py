"""The ids of the rows that a gradient touches: the random bits of an update follow an id, and not the row that it has.

    bits(row r) = those of row `id` of a table that has a row for each id

Shapes: M touched rows, K entries, D dim.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from funcrec.core import replace
from funcrec.kernels import ops
from funcrec.kernels.forms import Terms
from funcrec.kinds._dynamic import DynamicTables
from funcrec.tables import BEHIND, RowGrads, origin_of, terms_of

HALF = torch.float16, torch.bfloat16  # the dtypes that are rounded at random


def with_ids(grads: Mapping[str, RowGrads], tables: object) -> dict[str, RowGrads]:
    """Return the gradients, with the ids of their rows as origin where a vocabulary says them and 16 bits need them."""
    if not isinstance(tables, DynamicTables):
        return dict(grads)
    names = [x[0] for x in tables.first if x[0] in grads and tables.tables[x[0]].dtype in HALF]
    touched = dict(zip(names, touched_rows([grads[n] for n in names]), strict=True))
    of = lambda n, rows: origin_of_ids(n, tables.tables[n].shape[1], rows, ids_of_rows(tables, n, rows))
    return {n: replace(g, origin=of(n, touched[n])) if n in touched else g for n, g in grads.items()}


def touched_rows(grads: Sequence[RowGrads]) -> list[Tensor]:
    """Return the distinct rows of each gradient, i64[M], ascending; -1 in places without one."""
    own = [g for g in grads if not g.coalesced]
    d, *rest, segments = terms_of(own)
    # One column of each sum says which rows there are.
    narrow = [s._replace(column=0) for s in segments]
    terms = Terms([x[:, :1].detach() for x in d], *rest, narrow)
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
    own = vocabulary.entries[rows.clamp(0, vocabulary.capacity - 1), 0]
    return torch.where(rows < vocabulary.capacity, own, rows - vocabulary.capacity + torch.iinfo(torch.int64).min)


def origin_of_ids(table: str, dim: int, rows: Tensor, ids: Tensor, column: int = 0) -> Tensor:
    """Return `RowGrads.origin` of rows i64[M], ascending before -1, as rows `ids` of a table from a column on,
    i64[M + 1, 5]."""
    own = torch.stack([x + torch.zeros_like(rows) for x in origin_of(table, dim, ids, column, rows)], 1)
    behind = torch.tensor([BEHIND], device=rows.device)
    return torch.cat([torch.where((rows >= 0)[:, None], own, behind), behind])
