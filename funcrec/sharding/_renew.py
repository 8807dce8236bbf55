"""Initial numbers for rows that passed to new ids, on ranks: each rank writes the rows that it owns.

A rank knows the new rows that it owns, and a row depends on its id and a key alone. So nothing is sent.
Shapes: P places of new rows, D dim.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from funcrec.kernels.draws import GIVEN, Fresh
from funcrec.kinds import NewRows, draw, first_slots, is_shard, matrix_of
from funcrec.mesh import axis_index
from funcrec.optim import RowOptimizer
from funcrec.sharding._tables import ShardedTables
from funcrec.sharding.placement._layout import Bank, Shard
from funcrec.tables import Initializer, TableConfig, draw_of, table_keys


def renew_banks(
    sparse: RowOptimizer,
    tables: ShardedTables,
    slots: Mapping[str, Mapping[str, Tensor]],
    new: NewRows,
    key: Tensor,
    configs: Sequence[tuple[int, TableConfig]],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return this rank's (banks, slots) with initial numbers in its rows of new ids.

    configs: (vocabulary, config) of each table.
    """
    layout, banks, made = tables.layout, dict(tables.banks), {b: dict(own) for b, own in slots.items()}
    at: dict[tuple[str, str | None], int] = {}  # {(bank, slot or None): the number of its tensor}
    number = lambda bank, slot=None: at.setdefault((bank, slot), len(at))
    value = lambda bank, slot: banks[bank] if slot is None else made[bank][slot]
    rows, given, fresh, scales, begin = [], [], [], [], 0
    for i, (vocabulary, config) in enumerate(configs):
        own = new.of(vocabulary)
        drawn = draw_of(cast(Initializer, config.initializer), config.num_embeddings, config.embedding_dim)
        for s in (layout.shards[k] for k in layout.shards_of(config.name)):
            bank = layout.banks[s.bank]
            rows.append(bank_rows(new.rows[own["rows"] : own["rows"] + own["places"]], s, bank))
            mine, begin = {**own, "rows": begin}, begin + own["places"]
            row = {"dim": config.embedding_dim, "first": s.first, "key": i, **mine}
            fresh.append(Fresh(number(bank.name), drawn[0], **row))
            scales.append(drawn[1])
            like = tables.banks[bank.name].new_zeros(1, s.last - s.first)
            for slot, x in first_slots(sparse, config, like, key, new, own, s.first).items():
                given.append(matrix_of(x))
                fresh.append(Fresh(number(bank.name, slot), GIVEN, given=len(given) - 1, **mine))
                scales.append(0.0)
    if fresh:
        keys = table_keys(key, [c for _, c in configs], new.rows.device)
        targets = [matrix_of(value(*x)) for x in at]
        written = draw(targets, given, new._replace(rows=torch.cat(rows)), keys, fresh, scales)
        for (bank, slot), i in at.items():
            x = written[i].reshape(value(bank, slot).shape)
            (banks if slot is None else made[bank])[bank if slot is None else slot] = x
    return banks, made


def beside_buckets(tables: ShardedTables) -> set[str]:
    """Return the vocabularies of which each rank has exactly the buckets of its rows, in every table."""
    layout, out = tables.layout, {n for n, v in tables.rest.vocabularies.items() if is_shard(v)}
    for table, name, *_ in tables.rest.first:
        v = tables.rest.vocabularies[name]
        for s in (layout.shards[k] for k in layout.shards_of(table)) if is_shard(v) else ():
            bank = layout.banks[s.bank]
            is_alike = bank.axes == v.axes and s.part == v.own.capacity and s.ranks == tuple(range(bank.num_ranks))
            if not is_alike:
                out.discard(name)
    return out


def in_banks(tables: ShardedTables, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return {bank: the numbers of rows in this rank's bank, or -1 for rows of other ranks, i64[P]}.

    rows: {table: numbers of its rows, or -1}.
    """
    layout, out = tables.layout, {}
    for n, own in rows.items():
        for s in (layout.shards[k] for k in layout.shards_of(n)):
            bank = layout.banks[s.bank]
            out.setdefault(bank.name, []).append(bank_rows(own, s, bank))
    return {bank: torch.cat(own) for bank, own in out.items()}


def bank_rows(rows: Tensor, shard: Shard, bank: Bank) -> Tensor:
    """Return the numbers of a table's rows in this rank's bank, or -1 for rows of other ranks, i64[P]."""
    each = torch.div(rows.clamp(min=0), shard.part, rounding_mode="floor")
    owner, start = (torch.tensor(x, device=rows.device)[each] for x in (shard.ranks, shard.starts))
    is_own = (rows >= 0) & (owner == (axis_index(bank.axes) if bank.axes else 0))
    return torch.where(is_own, start + rows - each * shard.part, -1)
