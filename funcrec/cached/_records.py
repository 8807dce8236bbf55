"""The record of a row: the bytes of its numbers in each table, and of its slots, one after the other.

    record(row) = tables[a][row] ‖ slots[a]["sum"][row] ‖ tables[b][row] ‖ ...

Shapes: M rows, W bytes of a record.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import describe, fail
from funcrec.optim import RowOptimizer
from funcrec.tables import TableConfig

Tables = Mapping[str, Tensor]
Slots = Mapping[str, Mapping[str, Tensor]]


class Field(NamedTuple):
    """A part of a record: a row of a table, or of one of its slots. shape: of the row alone."""

    table: str
    slot: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Return the number of its bytes."""
        return prod(self.shape) * self.dtype.itemsize


def fields_of(configs: Sequence[TableConfig], sparse: RowOptimizer) -> tuple[Field, ...]:
    """Return the fields of a record: for each config its row, and then the slots of `sparse`."""
    fields = []
    for config in configs:
        of = lambda rows, c=config: sparse.init({c.name: torch.zeros(rows, c.embedding_dim, dtype=c.dtype)})
        slots, more = (of(rows).get(config.name, {}) for rows in (2, 3))
        fields.append(Field(config.name, None, (config.embedding_dim,), config.dtype))
        for name, x in slots.items():
            if name in sparse.waiting or (x.shape[:1], more[name].shape[:1]) != ((2,), (3,)):
                what, need = f"slot {name!r} of `sparse` belongs to no row.", "slots of one row each"
                fail("funcrec.table_store", what, got=describe(x), need=need, hint="an optimizer without `accumulate`")
            fields.append(Field(config.name, name, tuple(x.shape[1:]), x.dtype))
    return tuple(fields)


def field_in(field: Field, tables: Tables, slots: Slots) -> Tensor:
    """Return the tensor whose rows the field holds."""
    return tables[field.table] if field.slot is None else slots[field.table][field.slot]


def packed(fields: Sequence[Field], tables: Tables, slots: Slots, rows: Tensor | None = None) -> Tensor:
    """Return the records of some rows, or of all, u8[M, W]."""
    parts = [field_in(f, tables, slots) for f in fields]
    if rows is not None:
        parts = [x.index_select(0, rows) for x in parts]
    as_bytes = lambda x, f: x.reshape(x.shape[0], prod(f.shape)).contiguous().view(torch.uint8)
    return torch.cat([as_bytes(x, f) for x, f in zip(parts, fields, strict=True)], 1)


def unpacked(fields: Sequence[Field], records: Tensor) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return (tables, slots) with the rows that the records u8[M, W] hold."""
    tables: dict[str, Any] = {}
    slots: dict[str, dict[str, Tensor]] = {}
    columns = records.split([f.size for f in fields], 1)
    for f, x in zip(fields, columns, strict=True):
        own = x.clone(memory_format=torch.contiguous_format)  # a part of one record may begin at an odd byte
        rows = own.view(f.dtype).reshape(x.shape[0], *f.shape)
        if f.slot is None:
            tables[f.table] = rows
            slots.setdefault(f.table, {})
        else:
            slots[f.table][f.slot] = rows
    return tables, slots
