"""Sends each row once from the banks of one layout to the banks of another layout, on real ranks.

    cell = (rows, columns) that are contiguous in both layouts;   stream (s, d) = the cells that rank s sends to d

The two layouts alone determine the cells, so every rank knows all streams. The ranks send the cells in rounds of one
all-to-all each. In a round no rank sends or gets more than `_gather_rows.BLOCK_BYTES`. Rows travel as bytes.
Shapes: n ranks, R rows, D dim.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcrec.mesh import Mesh, coordinates, rank_at, swap_bytes
from funcrec.sharding.moves import _gather_rows
from funcrec.sharding.placement._layout import Layout, Shard

Leaves = Mapping[str, Mapping[str, Tensor]]  # {bank: {"": the bank, slot: its slot}}


class Place(NamedTuple):
    """The place of a cell in a bank: the bank, the cell's first row, and its columns (None for all columns)."""

    bank: str
    row: int
    columns: slice | None

    def of(self, leaves: Leaves, leaf: str, first: int, last: int) -> Tensor:
        """Return a view of rows [first, last) of the cell in a leaf."""
        rows = leaves[self.bank][leaf][self.row + first : self.row + last]
        return rows if self.columns is None else rows[:, self.columns]


class Cell(NamedTuple):
    """A block of rows and columns of a table's leaf that one rank sends to one rank."""

    leaf: str
    sender: int
    receiver: int
    num_rows: int
    row_bytes: int
    source: Place
    target: Place


class Side(NamedTuple):
    """A layout, and the ranks that hold each part: holders[axes][rank of these axes] = ranks of the mesh."""

    layout: Layout
    holders: Mapping[tuple[str, ...], Sequence[Sequence[int]]]


def side_of(layout: Layout) -> Side:
    sizes = dict(layout.mesh_shape)
    names, num_ranks = list(sizes), 1
    for n in sizes.values():
        num_ranks *= n
    holders = {}
    for bank in layout.banks:
        own = holders.setdefault(bank.axes, [[] for _ in range(bank.num_ranks)])
        if not any(own):
            for r in range(num_ranks):
                own[rank_at(coordinates(r, names, sizes), bank.axes, sizes)].append(r)
    return Side(layout, holders)


def parts_of(side: Side, shard: Shard, first: int, last: int) -> Iterator[tuple[int, int, int, Sequence[int]]]:
    """Yield (first row, last row, the bank's row of the first row, the ranks that hold it) for each part of a shard."""
    ranks = side.holders[side.layout.banks[shard.bank].axes]
    for i in range(first // shard.part, -(-last // shard.part)):
        a, b = max(first, i * shard.part), min(last, (i + 1) * shard.part)
        yield a, b, shard.starts[i] + a - i * shard.part, ranks[shard.ranks[i]]


def cells_of(old: Side, new: Side, table: str, leaf: str, sample: Tensor) -> Iterator[Cell]:
    """Yield all cells of a leaf of a table, in the same order on all ranks. sample: the leaf without rows."""
    num_rows, _ = dict(old.layout.shapes)[table]
    sources, targets = ([x.layout.shards[i] for i in x.layout.shards_of(table)] for x in (old, new))
    is_cut = sample.dim() > 1 and len(sources) + len(targets) > 2
    width = lambda s: (s.last - s.first) if is_cut else 1
    for t in targets:
        for a, b, at, receivers in parts_of(new, t, 0, num_rows):
            # a slot with one number per row is the same in every shard
            for s in sources if is_cut else sources[:1]:
                c, d = (max(s.first, t.first), min(s.last, t.last)) if is_cut else (0, 1)
                if c >= d:
                    continue
                cut = lambda x: slice(c - x.first, d - x.first) if is_cut and d - c < width(x) else None  # noqa: B023
                row_bytes = sample.element_size() * ((d - c) if is_cut else sample.shape[1:].numel())
                for first, last, start, senders in parts_of(old, s, a, b):
                    source = Place(old.layout.banks[s.bank].name, start, cut(s))
                    target = Place(new.layout.banks[t.bank].name, at + first - a, cut(t))
                    for r in receivers:
                        sender = r if r in senders else senders[r % len(senders)]
                        yield Cell(leaf, sender, r, last - first, row_bytes, source, target)


class Piece(NamedTuple):
    """Rows [first, last) of a cell, which travel in one round."""

    cell: Cell
    first: int
    last: int

    @property
    def num_bytes(self) -> int:
        return (self.last - self.first) * self.cell.row_bytes


def rounds_of(stream: Sequence[Cell], most_bytes: int) -> list[list[Piece]]:
    """Return the rounds of a stream, each of at most that many bytes, or of one row."""
    out: list[list[Piece]] = [[]]
    room = most_bytes
    for cell in stream:
        done = 0
        while done < cell.num_rows:
            fits = min(cell.num_rows - done, room // cell.row_bytes if cell.row_bytes else cell.num_rows)
            if fits == 0 and out[-1]:
                out, room = [*out, []], most_bytes
                continue
            fits = max(fits, 1)
            out[-1].append(Piece(cell, done, done + fits))
            done, room = done + fits, max(0, room - fits * cell.row_bytes)
    return out


def send_rows(old: Layout, leaves: Leaves, new: Layout, banks: Leaves, mesh: Mesh) -> None:
    """Write rows of all ranks' `leaves`, of the old layout, into this rank's `banks` of the new layout, in place.

    The caller owns `banks`.
    """
    me, before, after = rank_at(mesh.coordinates, mesh.axis_names, mesh.shape), side_of(old), side_of(new)
    streams: dict[tuple[int, int], list[Cell]] = {}
    for table, _ in old.shapes:
        bank = old.banks[old.shards[old.shards_of(table)[0]].bank].name
        for leaf, x in leaves[bank].items():
            for cell in cells_of(before, after, table, leaf, x[:0]):
                streams.setdefault((cell.sender, cell.receiver), []).append(cell)
    for cell in streams.pop((me, me), ()):
        put(banks, Piece(cell, 0, cell.num_rows), cell.source.of(leaves, cell.leaf, 0, cell.num_rows))
    most_bytes = _gather_rows.BLOCK_BYTES // mesh.size
    rounds = {pair: rounds_of(own, most_bytes) for pair, own in streams.items() if pair[0] != pair[1]}
    for i in range(max(map(len, rounds.values()), default=0)):
        now = lambda s, d: rounds[s, d][i] if i < len(rounds.get((s, d), ())) else []  # noqa: B023
        going, coming = [now(me, r) for r in range(mesh.size)], [now(r, me) for r in range(mesh.size)]
        here, there = ([sum(p.num_bytes for p in own) for own in way] for way in (coming, going))
        sent = [as_bytes(p.cell.source.of(leaves, p.cell.leaf, p.first, p.last)) for own in going for p in own]
        got = swap_bytes(sent, here, there, mesh)
        pieces = [p for own in coming for p in own]
        for p, x in zip(pieces, got.split([p.num_bytes for p in pieces]), strict=True):
            put(banks, p, x)


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def put(banks: Leaves, piece: Piece, rows: Tensor) -> None:
    """Write rows, or their bytes, to their places."""
    there = piece.cell.target.of(banks, piece.cell.leaf, piece.first, piece.last)
    # A number must begin at a multiple of its size, which the buffer does not guarantee. A clone does.
    there.copy_(rows.clone().view(there.dtype).reshape(there.shape) if rows.dtype != there.dtype else rows)
