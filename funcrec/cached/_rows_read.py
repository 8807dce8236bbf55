"""Tables with the rows of one batch alone, read from caches and stores: for evaluation, which changes neither.

fn(params, batch) of the whole tables == fn(params', batch') of the read rows
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funcrec.cached._place import CALL, Place, read_records
from funcrec.cached._read_tables import ReadTables, new_number, read_of
from funcrec.cached._records import field_in, unpacked
from funcrec.cached._table_store import TableStore, stray_problems
from funcrec.core import check, replace, tree_leaves, tree_map
from funcrec.jagged import KeyedJaggedTensor
from funcrec.kinds import DynamicTables, find, ids_of_columns


def rows_read(
    place: Place, dynamic: DynamicTables, stores: Mapping[str, TableStore], batch: Any
) -> tuple[ReadTables, Any]:
    """Return (tables of the read rows, the batch with rows of these tables in place of the ids of caches).

    A table has a row for each place of the ids of all ranks' batches, so batches of one form give tables of one form.
    Its last row is NaN: ids after the `max_length` of a cache's features, which no step admits, have it, and so have
    ids of another read.
    dynamic: the tables of the state, gathered if it lies on a mesh.
    """
    bags = ids_in(batch)
    values, number = [x.values.long().clone() for x in bags], new_number()
    tables = dict(dynamic.tables)
    for name, store in stores.items():
        columns = {c: most for c, v, most in dynamic.columns if v == name}
        places = [places_of(x, {c: n for c, n in columns.items() if c in x.keys}) for x in bags]
        of_columns = [places_of(x, {c: None for c in columns if c in x.keys}) for x in bags]
        ids = torch.cat([x.values[at].long() for x, at in zip(bags, places, strict=True)])
        check_rows = lambda: check(CALL, stray_problems(name, store, ids)) or ids.cpu()  # noqa: B023
        of_ranks = place.together("read rows", check_rows)
        distinct = torch.cat(of_ranks).unique().to(ids.device)
        rows = torch.searchsorted(distinct, ids)
        room = len(of_ranks) * sum(x.capacity for x in bags)
        tables |= tables_of(place, dynamic, name, store, distinct, room)
        for x, of_column, at, own in zip(
            values, of_columns, places, rows.split([len(at) for at in places]), strict=True
        ):
            x[of_column] = number + room
            x[at] = number + own
    read = {id(x): replace(x, values=v) for x, v in zip(bags, values, strict=True)}
    device = bags[0].values.device if bags else torch.device("cpu")
    return read_of(dynamic, tables, number, device), tree_map(
        lambda x: read[id(x)] if is_ids(x) else x, batch, is_leaf=is_ids
    )


def is_ids(x: Any) -> bool:
    return isinstance(x, KeyedJaggedTensor)


def ids_in(batch: Any) -> list[KeyedJaggedTensor]:
    """Return all bags of ids in a tree."""
    return [x for x in tree_leaves(batch, is_leaf=is_ids) if is_ids(x)]


def places_of(ids: KeyedJaggedTensor, columns: Mapping[str, int | None]) -> Tensor:
    """Return the places of the columns' ids in `ids.values`, i64[n]."""
    if not columns:
        return torch.zeros(0, dtype=torch.int64, device=ids.values.device)
    bag, at = ids_of_columns(ids, columns)
    return at[: int(bag.offsets[-1])]


def tables_of(
    place: Place, dynamic: DynamicTables, name: str, store: TableStore, ids: Tensor, room: int
) -> dict[str, Tensor]:
    """Return {table: f[room + 1, D]}: its row `ids[i]` in row i, from the cache, or else from the store; NaN in the
    last."""
    rows = find(dynamic.vocabularies[name], ids)
    is_here = rows < dynamic.vocabularies[name].capacity
    others, _ = unpacked(store.fields, read_records(place, store, ids[~is_here].cpu()).to(ids.device))
    out = {}
    for f in store.fields:
        if f.slot is None:
            table = field_in(f, dynamic.tables, {})
            new = table.new_zeros(room + 1, *f.shape)
            new[room] = torch.nan
            new[: len(ids)][is_here] = table[rows[is_here]]
            new[: len(ids)][~is_here] = others[f.table]
            out[f.table] = new
    return out
