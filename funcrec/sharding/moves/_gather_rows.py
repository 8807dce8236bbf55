"""Moves rows between the banks of a layout and whole tables, one block of rows at a time.

    rows_of(layout, banks, table, first, last) == table[first:last]        on every rank;
    move: that table into another layout's banks

Rows travel as integers: an integer sum where all terms but one are zero keeps every bit, even of a NaN or of -0.0.
Shapes: R rows, D dim.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from funcrec.core import Problem, describe, is_tracked, written
from funcrec.mesh import Mesh, bind, psum
from funcrec.sharding.placement._layout import Layout, Shard, blank, own_ranks

BLOCK_BYTES = 1 << 26  # the most bytes that a rank holds besides the two states
INTEGERS = {4: torch.int32, 8: torch.int64}  # {bytes per element: dtype}; gloo cannot sum int16

Rows = Callable[[int, int], Tensor]


def places(layout: Layout, table: str, mesh: Mesh, first: int, last: int) -> Iterator[tuple[Shard, str, slice, slice]]:
    """Yield (shard, bank, slice of these rows, slice of the bank) for rows [first, last) of a table on this process."""
    for s in (layout.shards[i] for i in layout.shards_of(table)):
        bank = layout.banks[s.bank]
        own = own_ranks(bank, mesh)
        for i, (rank, start) in enumerate(zip(s.ranks, s.starts, strict=True)):
            a, b = max(first, i * s.part), min(last, (i + 1) * s.part)
            for k in (k for k, r in enumerate(own) if r == rank and a < b):
                at = k * bank.rows + start - i * s.part
                yield s, bank.name, slice(a - first, b - first), slice(at + a, at + b)


def rows_of(layout: Layout, banks: Mapping[str, Tensor], table: str, mesh: Mesh, first: int, last: int) -> Tensor:
    """Return rows [first, last) of a table f[R, D], or of its slot, on every rank, from the banks of all ranks."""
    shards = [layout.shards[i] for i in layout.shards_of(table)]
    axes = layout.banks[shards[0].bank].axes
    old = banks[layout.banks[shards[0].bank].name]
    is_cut = len(shards) > 1 and old.dim() > 1
    width = [dict(layout.shapes)[table][1]] if is_cut else old.shape[1:]
    out = blank([last - first, *width], [banks[layout.banks[s.bank].name] for s in shards])
    for s, bank, here, there in places(layout, table, mesh, first, last):
        if is_cut:
            out = written(out, (here, slice(s.first, s.last)), banks[bank][there])
        elif s == shards[0]:  # a slot with one number per row is the same in every shard
            out = written(out, (here,), banks[bank][there])
    if mesh.is_emulated or not axes or first == last:
        return out
    with bind(mesh.bound_axes(axes, out.device)):
        return psum(out.view(INTEGERS.get(out.element_size(), torch.int8)), axes).view(out.dtype)


def blank_banks(
    layout: Layout, samples: Mapping[str, Mapping[str, Tensor]], mesh: Mesh
) -> dict[str, dict[str, Tensor]]:
    """Return {bank: {"": the bank, slot: its slot}} of zeros. samples: for each table, its leaves without rows."""
    out: dict[str, dict[str, Tensor]] = {}
    for i, bank in enumerate(layout.banks):
        rows, within = len(own_ranks(bank, mesh)) * bank.rows, [s.table for s in layout.shards if s.bank == i]
        is_cut = bank.dim < dict(layout.shapes)[within[0]][1]
        shape = lambda x: (rows, *([bank.dim] if is_cut and x.dim() > 1 else x.shape[1:]))  # noqa: B023
        out[bank.name] = {k: blank(shape(x), [samples[n][k] for n in within]) for k, x in samples[within[0]].items()}
    return out


def move(layout: Layout, banks: Mapping[str, dict[str, Tensor]], table: str, leaf: str, mesh: Mesh, read: Rows) -> None:
    """Write a table (leaf ""), or a slot of it, into `banks` in place, one block of rows at a time."""
    num_rows, dim = dict(layout.shapes)[table]
    block = max(1, BLOCK_BYTES // (8 * dim))
    for first in range(0, num_rows, block):
        last = min(first + block, num_rows)
        rows = read(first, last)
        for s, bank, here, there in places(layout, table, mesh, first, last):
            is_cut = rows.dim() > 1 and s.last - s.first < dim
            own = rows[here, s.first : s.last] if is_cut else rows[here]
            banks[bank][leaf] = written(banks[bank][leaf], (there,), own)


# -- validators --------------------------------------------------------------------------------------------------


def followed_problems(layout: Layout, leaves: Mapping[str, Mapping[str, Tensor]], is_far: bool) -> Iterator[Problem]:
    """Report leaves that a derivative tracks. Real ranks send bits of rows, which have no derivative.

    leaves: {bank: {"": the bank, slot: its slot}}. is_far: whether banks of which every rank has all rows travel, too.
    """
    need, hint = "plain tensors on real ranks", "`.detach()`, or Mesh.emulated(...)"
    for i, bank in enumerate(layout.banks):
        if (is_far or bank.axes) and any(map(is_tracked, leaves[bank.name].values())):
            what = f"table {next(s.table for s in layout.shards if s.bank == i)!r}, or a slot of it, is differentiated."
            yield Problem(what, "a tensor that autograd or torch.func follows", need, hint, TypeError)


def bank_problems(layout: Layout, samples: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Problem]:
    """Report tables of one bank with different slots, and slots that cannot be cut with the columns of their table."""
    kinds = lambda own: {k: (x.dtype, tuple(x.shape[1:])) for k, x in own.items()}
    first: dict[int, str] = {}
    for s in layout.shards:
        before, dim = first.setdefault(s.bank, s.table), dict(layout.shapes)[s.table][1]
        if kinds(samples[s.table]) != kinds(samples[before]):
            got = f"{before!r}: {list(samples[before])[1:]}, {s.table!r}: {list(samples[s.table])[1:]}"
            what = f"tables {before!r} and {s.table!r} have different slots and one label."
            yield Problem(what, got, "the row optimizer that made them", "sparse=...")
        for k, x in samples[s.table].items():
            if s.last - s.first < dim and x.dim() > 1 and tuple(x.shape[1:]) != (dim,):
                what = f"slot {k!r} of {s.table!r} cannot be cut by columns."
                yield Problem(what, describe(x), f"[R] or [R, {dim}]", "row_wise or table_wise for it")
