"""Sharded tables that lookups read as if they were quantised: owners round the rows that ids ask for.

    lookup(fake_quantize(shard_tables(tables, plan, mesh)), ids) == lookup(fake_quantize(tables), ids)

Owners round a copy of these rows, and read the copy instead of the rows. Gradients travel as for float tables.
Shapes: n ranks, C rows in a block, D dim.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from funcrec.core import replace
from funcrec.jagged import KeyedJaggedTensor
from funcrec.kinds import FakeQuantizedTables, as_stored, row_keys
from funcrec.mesh import axis_index
from funcrec.sharding._lanes import Routes
from funcrec.sharding._lookup import read_sharded
from funcrec.sharding.placement._layout import Bank, Layout
from funcrec.tables import FeatureConfig, LookupResult, gather_rows


class Owned(NamedTuple):
    """The rows of a table among N rows of a bank. is_here: bool[N]. rows: i64[N], the row of the table."""

    table: str
    is_here: Tensor
    rows: Tensor


def read_fake(
    fake: FakeQuantizedTables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None
) -> LookupResult:
    """Return the lookup of this rank's bags in tables whose rows are rounded."""
    dtypes, tables = dict(fake.dtypes), cast(Any, fake.tables)  # ShardedTables, here

    def rounded(routed: Any, routes: Routes, implementation: str | None) -> tuple[dict[str, Tensor], Any]:
        """Return ({bank: f[n · C, D]}, routed): the rounded rows to read instead of the banks, and where to read them.

        There is a row for each id that arrived. The result's `routed` points into these copies: row i is the row of the
        i-th id.
        """
        copies = {}
        for b in routes.lanes_of_banks:
            rows = routed.rows_of(b, routes).long()
            x = gather_rows(tables.banks[b.name], rows, implementation=implementation)
            copies[b.name] = rounded_copy(x, b, list(owners(tables.layout, b, rows)), dtypes, fake.rounding)
        places = torch.arange(routed.rows.shape[0], device=routed.rows.device)
        return copies, replace(routed, rows=torch.where(routed.rows < 0, -1, places))

    return read_sharded(fake.tables, ids, features, implementation, rounded)


def rounded_copy(
    x: Tensor, bank: Bank, owned: Sequence[Owned], dtypes: Mapping[str, str], key: Tensor | None
) -> Tensor:
    """Return rows f[N, D] of a bank, each rounded as the dtype of its table stores it.

    Rows of no table are zeros, in every dtype.
    """
    keys = () if key is None else (torch.zeros_like(owned[0].rows),)
    for own in owned if keys else ():
        keys = (torch.where(own.is_here, *row_keys(key, own.table, own.rows, bank.dim), *keys),)
    by_dtype = {dtypes[own.table]: as_stored(x, dtypes[own.table], *keys) for own in owned}
    out = by_dtype[dtypes[owned[0].table]]
    for own in owned if len(by_dtype) > 1 else ():
        out = torch.where(own.is_here[:, None], by_dtype[dtypes[own.table]], out)
    return out


def owners(layout: Layout, bank: Bank, rows: Tensor) -> Iterator[Owned]:
    """Yield, for each table with rows in the bank on any rank, the table's rows among this rank's rows i64[N]."""
    of_rank = lambda x: (
        x.to(rows.device).index_select(0, axis_index(bank.axes)[None]) if bank.axes else x.to(rows.device)
    )
    for s in layout.shards:
        if layout.banks[s.bank] != bank:
            continue
        starts, firsts = torch.full((2, bank.num_ranks), bank.rows)  # a rank without the table: after all rows
        for i, (r, start) in enumerate(zip(s.ranks, s.starts, strict=True)):
            starts[r], firsts[r] = start, i * s.part
        at = rows - of_rank(starts)
        yield Owned(s.table, (at >= 0) & (at < s.part), at + of_rank(firsts))
