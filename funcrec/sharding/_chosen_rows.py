"""Rows of sharded tables and of their slots by their numbers: read on all ranks, and written by their holders.

    read_chosen(put_chosen(banks, rows, new), rows) == new

Shapes: M rows, D dim.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funcrec.kernels.draws import GIVEN, Fresh
from funcrec.kinds import NewRows, draw, matrix_of
from funcrec.mesh import Mesh, rank_at
from funcrec.sharding._renew import bank_rows
from funcrec.sharding._tables import ShardedTables
from funcrec.sharding.placement._layout import Layout, Shard

Slots = Mapping[str, Mapping[str, Tensor]]


def read_chosen(layout: Layout, leaves: Mapping[str, Tensor], table: str, mesh: Mesh, rows: Tensor) -> Tensor:
    """Return these rows of a table f[M, D], or of its slot f[M, ...].

    On real ranks a row, or a part of it, is that of the first rank that holds it, and zeros on the others: the sum over
    all ranks is the row. leaves: {bank: the bank, or its slot, of this process}.
    """
    shards = [layout.shards[k] for k in layout.shards_of(table)]
    if not is_cut(layout, shards[0], leaves[layout.banks[shards[0].bank].name]):
        shards = shards[:1]  # a slot with one number for each row is the same in every shard
    return torch.cat([read_shard(layout, s, leaves, mesh, rows) for s in shards], 1 if len(shards) > 1 else 0)


def read_shard(layout: Layout, shard: Shard, leaves: Mapping[str, Tensor], mesh: Mesh, rows: Tensor) -> Tensor:
    """Return the rows of a block of columns, as `read_chosen` does."""
    bank, each = layout.banks[shard.bank], torch.div(rows, shard.part, rounding_mode="floor")
    owner, start = (torch.tensor(x, device=rows.device)[each] for x in (shard.ranks, shard.starts))
    at = start + rows - each * shard.part
    if mesh.is_emulated:
        return leaves[bank.name][owner * bank.rows + at]
    is_first = all(i == 0 for a, i in mesh.coordinates.items() if a not in bank.axes)
    is_own = (owner == rank_at(mesh.coordinates, bank.axes, mesh.shape)) & is_first
    found = leaves[bank.name][at]
    return torch.where(is_own.reshape(-1, *[1] * (found.dim() - 1)), found, torch.zeros((), dtype=found.dtype))


def put_chosen(
    tables: ShardedTables, slots: Slots, rows: Tensor, count: Tensor, new_tables: Mapping[str, Tensor], new_slots: Slots
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return this rank's (banks, slots) with new numbers in the first `count` of some rows.

    rows: i64[M]. count: i64[]. new_tables, new_slots: M rows of each table that changes, and of its slots.
    """
    layout, banks, made = tables.layout, dict(tables.banks), {b: dict(own) for b, own in slots.items()}
    at: dict[tuple[str, str], int] = {}  # {(bank, slot or ""): the number of its tensor}
    value = lambda bank, slot: made[bank][slot] if slot else banks[bank]
    places, given, fresh = [], [], []
    for table, new in new_tables.items():
        for s in (layout.shards[k] for k in layout.shards_of(table)):
            bank = layout.banks[s.bank].name
            for slot, x in {"": new, **new_slots[table]}.items():
                own = x[:, s.first : s.last] if is_cut(layout, s, value(bank, slot)) else x
                target, begin = at.setdefault((bank, slot), len(at)), len(places) * len(rows)
                fresh.append(Fresh(target, GIVEN, len(given), rows=begin, places=len(rows)))
                given.append(matrix_of(own))
            places.append(bank_rows(rows, s, layout.banks[s.bank]))
    targets, none = [matrix_of(value(*x)) for x in at], rows[:0]
    new_rows = NewRows(torch.cat(places), none, count[None], ())
    written = draw(targets, given, new_rows, none, fresh, [0.0] * len(fresh))
    for (bank, slot), i in at.items():
        x = written[i].reshape(value(bank, slot).shape)
        if slot:
            made[bank][slot] = x
        else:
            banks[bank] = x
    return banks, made


def is_cut(layout: Layout, shard: Shard, leaf: Tensor) -> bool:
    """Return whether a leaf of a shard's bank has the shard's columns alone."""
    return leaf.dim() > 1 and shard.last - shard.first < dict(layout.shapes)[shard.table][1]
