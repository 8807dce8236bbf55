"""Sharded tables that lookups read as if they were quantised: owners round the rows that they are asked for.

    lookup(fake_quantize(shard_tables(tables, plan, mesh)), ids) == lookup(fake_quantize(tables), ids)

What is rounded is a copy of those rows, which is then read in their place; gradients go back as those of float tables.
Shapes: n ranks, C rows in a block, D dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.core import replace
from funcrec.jagged import KeyedJaggedTensor
from funcrec.mesh import axis_index
from funcrec.quantized import CODES, FakeQuantizedTables, as_stored, row_keys
from funcrec.sharding._lanes import Routes
from funcrec.sharding._layout import Bank, Layout
from funcrec.sharding._lookup import read_sharded
from funcrec.tables import FeatureConfig, Read, gather_rows


def read_fake(
    fake: FakeQuantizedTables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None
) -> Read:
    """What a lookup gives of this rank's bags."""
    dtypes, layout = dict(fake.dtypes), fake.tables.layout

    def rounded(routed: Any, routes: Routes, implementation: str | None) -> tuple[dict[str, Tensor], Any]:
        """({bank: f[n · C, D]}, of each id that came the row; what was routed, of which row i is the i-th of those)."""
        copies = {}
        for b in routes.lanes_of_banks:
            rows = routed.rows_of(b, routes).long()
            x = gather_rows(fake.tables.banks[b.name], rows, implementation=implementation)
            dtype = next(dtypes[s.table] for s in layout.shards if layout.banks[s.bank] == b)
            keys = () if fake.rounding is None or dtype not in CODES else (bank_keys(fake.rounding, layout, b, rows),)
            copies[b.name] = as_stored(x, dtype, *keys)
        places = torch.arange(routed.rows.shape[0], device=routed.rows.device)
        return copies, replace(routed, rows=torch.where(routed.rows < 0, -1, places))

    return read_sharded(fake.tables, ids, tuple(features), implementation, rounded)


def bank_keys(key: Tensor, layout: Layout, bank: Bank, rows: Tensor) -> Tensor:
    """i64[N]: what this rank's rows of a bank are rounded by, wherever they lie: the keys of their tables' rows."""
    keys = torch.zeros_like(rows)
    of_rank = lambda x: (
        x.to(rows.device).index_select(0, axis_index(bank.axes)[None]) if bank.axes else x.to(rows.device)
    )
    for s in layout.shards:
        if layout.banks[s.bank] != bank:
            continue
        starts, firsts = torch.full((2, bank.num_ranks), bank.rows)  # of a rank without the table: behind all rows
        for i, (r, start) in enumerate(zip(s.ranks, s.starts, strict=True)):
            starts[r], firsts[r] = start, i * s.part
        at = rows - of_rank(starts)
        (own,) = row_keys(key, s.table, at + of_rank(firsts), bank.dim)
        keys = torch.where((at >= 0) & (at < s.part), own, keys)
    return keys
