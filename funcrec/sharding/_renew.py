"""Initial numbers for rows that passed to new ids, on ranks: each rank writes the rows that it owns.

All ranks know the turnover, and a row depends on its id and a key alone. So nothing is sent.
Shapes: M entries of a turnover.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.kernels import ops
from funcrec.kinds import Turnover
from funcrec.mesh import axis_index
from funcrec.optim import RowOptimizer
from funcrec.sharding._tables import ShardedTables
from funcrec.sharding.placement._layout import Bank, Shard
from funcrec.tables import TableConfig, id_rows


def renew_banks(
    sparse: RowOptimizer,
    tables: ShardedTables,
    slots: Mapping[str, Mapping[str, Tensor]],
    turnover: Turnover,
    key: Tensor,
    configs: Sequence[TableConfig],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return this rank's (banks, slots) with initial numbers in its rows of new ids."""
    layout, banks, made = tables.layout, dict(tables.banks), {b: dict(own) for b, own in slots.items()}
    for config in configs:
        fresh = id_rows(key, config, turnover.new_ids)
        for s in (layout.shards[k] for k in layout.shards_of(config.name)):
            bank = layout.banks[s.bank]
            rows, order, count = own_rows(turnover, s, bank)
            part = fresh[order, s.first : s.last]
            wide = part.to(ops.accumulation_dtype(part.dtype))
            banks[bank.name] = ops.scatter_rows(banks[bank.name], rows, count, wide)
            for slot, x in sparse.init({config.name: part}).get(config.name, {}).items():
                old = made[bank.name][slot]
                flat = lambda x: x.reshape(x.shape[0], -1)
                made[bank.name][slot] = ops.scatter_rows(flat(old), rows, count, flat(x)).reshape(old.shape)
    return banks, made


def own_rows(turnover: Turnover, shard: Shard, bank: Bank) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rows of this rank's bank i64[M], the order that puts them first i64[M], their number i64[])."""
    rows = turnover.rows.clamp(min=0)
    each = torch.div(rows, shard.part, rounding_mode="floor")
    owner, start = (torch.tensor(x, device=rows.device)[each] for x in (shard.ranks, shard.starts))
    is_own = turnover.admitted & (owner == (axis_index(bank.axes) if bank.axes else 0))
    order = (~is_own).to(torch.uint8).argsort(stable=True)
    return (start + rows - each * shard.part)[order], order, is_own.sum()
