"""Layout: the place of each row of each table under a plan, and functions that pack tables and slots into banks.

    (table, row, columns) -> (rank, bank, row of the bank)

A function for one rank can only hold tensors whose shapes are the same on all ranks. So a bank holds the parts of all
tables with one width and one dtype, one after the other: row-wise parts on every rank, whole tables on some. On each
rank a bank has as many rows as the fullest rank needs. Optimizers see a bank as a table.
Shapes: R rows, D dim, n ranks on a bank's axes.
"""

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import check, is_tracked, is_wrapped, written
from funcrec.kernels.memory import empty_table
from funcrec.kinds import cut_columns, join_columns, stored_width
from funcrec.mesh import Mesh, P, rank_at
from funcrec.sharding.placement._plan import Plan, fit_problems


class Bank(NamedTuple):
    """The description of a tensor [rows, dim] on each of `num_ranks` ranks of `axes`.

    These tensors exist in `num_copies` copies, over `replicas`. The copies train apart.
    bits: for quantised tables, as in `QuantizedTables`; 0 for tables of floats that are trained.
    """

    name: str
    axes: tuple[str, ...]
    num_ranks: int
    rows: int
    dim: int
    dtype: torch.dtype
    replicas: tuple[str, ...] = ()
    num_copies: int = 1
    bits: int = 0

    @property
    def width(self) -> int:
        """Return the number of elements of a stored row."""
        return stored_width(self.bits, self.dim)

    @property
    def spec(self) -> P:
        return P((*self.replicas, *self.axes)) if self.replicas or self.axes else P()


class Shard(NamedTuple):
    """A block of a table's columns: ranks[i] holds rows [i · part, (i + 1) · part), from row starts[i] on."""

    table: str
    bank: int
    first: int
    last: int
    ranks: tuple[int, ...]
    part: int
    starts: tuple[int, ...]


class Layout(NamedTuple):
    """The shapes (R, D) of the tables, by name, the banks, and the shards of the tables. It is static and hashable."""

    shapes: tuple[tuple[str, tuple[int, int]], ...]
    banks: tuple[Bank, ...]
    shards: tuple[Shard, ...]
    mesh_shape: tuple[tuple[str, int], ...]
    replicas: tuple[str, ...] = ()

    @property
    def num_copies(self) -> int:
        """Return the number of copies of the tables that train apart."""
        return prod(dict(self.mesh_shape)[a] for a in self.replicas)

    @property
    def forms(self) -> tuple[tuple[str, int, int], ...]:
        """Return (table, bits, dim) of each table, as in `QuantizedTables`; 0 bits for tables of floats."""
        bits = {s.table: self.banks[s.bank].bits for s in self.shards}
        return tuple((n, bits[n], dim) for n, (_, dim) in self.shapes)

    def shards_of(self, table: str) -> list[int]:
        """Return the numbers of the shards of a table, in the order of the columns."""
        return [i for i, s in enumerate(self.shards) if s.table == table]

    def with_whole_rows(self, banks: Sequence[str]) -> "Layout":
        """Return the layout of gradients that have, for these banks, all columns of their tables."""
        dims = {s.bank: dict(self.shapes)[s.table][1] for s in self.shards if self.banks[s.bank].name in banks}
        return self._replace(
            banks=tuple(b._replace(dim=dims.get(i, b.dim)) for i, b in enumerate(self.banks)),
            shards=tuple(s._replace(first=0, last=dims[s.bank]) if s.bank in dims else s for s in self.shards),
        )

    def with_dtype(self, dtype: torch.dtype) -> "Layout":
        """Return the same layout with another dtype of the banks. Banks of codes keep their dtype."""
        size = 8 * dtype.itemsize
        retyped = lambda b: b if b.dtype == torch.uint8 else b._replace(dtype=dtype, bits=b.bits and size)
        return self._replace(banks=tuple(map(retyped, self.banks)))

    def specs(self) -> dict[str, P]:
        """Return {bank: its P}, for `shard_map`."""
        return {b.name: b.spec for b in self.banks}


def layout_of(
    call: str,
    shapes: Mapping[str, tuple[int, int]],
    dtypes: Mapping[str, torch.dtype],
    plan: Plan,
    mesh: Mesh,
    labels: Mapping[str, Hashable] | None = None,
    bits: Mapping[str, int] | None = None,
) -> Layout:
    """Return the layout of a plan. Tables with different `labels` share no bank. bits: of quantised tables, by name."""
    check(call, fit_problems(plan, mesh, shapes))
    filled: dict[tuple, list[int]] = {}  # a bank -> the number of rows on each of its ranks
    names: dict[tuple[Any, ...], str] = {}
    places = []
    for table, (num_rows, dim) in shapes.items():
        placement = plan[table]
        n = prod(mesh.shape[a] for a in placement.axes)
        blocks = placement.blocks(mesh.shape, dim)
        # A table of several blocks shares no bank: so its row numbers identify the parts of a row.
        alone = table if len(blocks) > 1 else None
        for block in blocks:
            width = block.last - block.first
            key = (placement.axes, width, dtypes[table], (labels or {}).get(table), alone, (bits or {}).get(table, 0))
            if key not in filled:
                filled[key] = [0] * n
                names[key] = table if width == dim else f"{table}[{block.first}:{block.last}]"
            # ranks[i] has rows [i · part, (i + 1) · part), and the last rank has fewer:
            # so an id's owner is row // part, without a list of bounds
            part = -(-num_rows // len(block.ranks))
            starts = tuple(filled[key][r] for r in block.ranks)
            for r in block.ranks:
                filled[key][r] += part
            places.append((key, Shard(table, 0, block.first, block.last, block.ranks, part, starts)))
    # every rank gets as many rows as the fullest rank needs: one graph with fixed shapes runs on all ranks
    keys = list(filled)
    copies = prod(mesh.shape[a] for a in plan.replicas)
    sizes = lambda k: (len(filled[k]), max(filled[k]))
    banks = [Bank(names[k], k[0], *sizes(k), k[1], k[2], plan.replicas, copies, k[-1]) for k in keys]
    shards = [s._replace(bank=keys.index(k)) for k, s in places]
    return Layout(tuple(shapes.items()), tuple(banks), tuple(shards), tuple(mesh.shape.items()), plan.replicas)


def pack(layout: Layout, bank: int, tables: Mapping[str, Tensor], ranks: Sequence[int]) -> Tensor:
    """Return the rows of a bank on `ranks`, one rank after the other.

    The rows come from tables [R, D], or from slots [R], with a number per row.

    A rank that is named several times gets a copy for each.
    """
    own, shards = layout.banks[bank], [s for s in layout.shards if s.bank == bank]
    parts = [tables[s.table] for s in shards]  # only tables of this bank: other tables may have another dtype
    narrow = parts[0].dim() == 1
    out = blank((len(ranks) * own.rows, *([] if narrow else [own.width])), parts)
    numbers: dict[int, list[int]] = {}
    for k, r in enumerate(ranks):
        numbers.setdefault(r, []).append(k)
    for s in shards:
        dim = dict(layout.shapes)[s.table][1]
        whole = tables[s.table] if narrow else cut_columns(tables[s.table], own.bits, dim, s.first, s.last)
        for i, (rank, start) in enumerate(zip(s.ranks, s.starts, strict=True)):
            for at in (k * own.rows + start for k in numbers.get(rank, ())):
                part = whole[i * s.part : (i + 1) * s.part]
                out = written(out, (slice(at, at + part.shape[0]),), part)
    return out


def blank(shape: Sequence[int], like: Sequence[Tensor]) -> Tensor:
    """Return zeros in the dtype of the first of `like`. Rows of every tensor of `like` may be written into the result.

    The zeros are batched or tracked if one tensor of `like` is. So autograd tracks a bank on every rank, whichever
    ranks have rows in it: all ranks then run a derivative's exchanges.
    """
    batched = [x.new_zeros(shape) for x in like if is_wrapped(x)]
    none = [x.flatten()[:0].sum() for x in like if is_tracked(x)]
    if batched or none:
        return sum([*batched, *none], torch.zeros(shape, dtype=like[0].dtype, device=like[0].device))
    return empty_table(tuple(shape), dtype=like[0].dtype, device=like[0].device).zero_()


def unpack(layout: Layout, banks: Mapping[str, Tensor], table: str) -> Tensor:
    """Return a table [R, D], or a slot [R], from the banks of all ranks, each [n · rows, ...].

    Of several copies it returns the first.
    """
    num_rows, _ = dict(layout.shapes)[table]
    columns, shards = [], [layout.shards[k] for k in layout.shards_of(table)]
    for s in shards:
        bank = layout.banks[s.bank]
        x = banks[bank.name]
        parts = [x[r * bank.rows + a : r * bank.rows + a + s.part] for r, a in zip(s.ranks, s.starts, strict=True)]
        columns.append(torch.cat(parts)[:num_rows])
    if columns[0].dim() == 1:
        return columns[0]
    return join_columns(columns, layout.banks[shards[0].bank].bits, [s.last - s.first for s in shards])


def own_ranks(bank: Bank, mesh: Mesh) -> list[int]:
    """Return the ranks of the bank's axes that this process holds, repeated for each copy that the process holds."""
    if mesh.is_emulated:
        return list(range(bank.num_ranks)) * bank.num_copies
    return [rank_at(mesh.coordinates, bank.axes, mesh.shape)]
