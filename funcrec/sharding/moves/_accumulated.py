"""Converts gradients that wait on a mesh (`optim.accumulate`) to the form of one process, and back.

    cut_waiting(gather_waiting(slots)) gives every row the terms that `slots` gives it, in the same order

The entries of a row lie on the owner of the row, in the order of the global batch, under every plan. A part of a table
holds its entries sorted by row; entries of one row keep their order. With n parts of C places each, part i is places [i
· C, (i + 1) · C) of the whole table. Owners of other columns of a part have the same entries at the same places.
Shapes: k steps whose gradients wait, C places, n parts, D dim, w columns of a bank.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, value_below, written
from funcrec.mesh import Mesh, bind, psum
from funcrec.optim import RowOptimizer
from funcrec.sharding.moves._gather_rows import INTEGERS
from funcrec.sharding.placement._layout import Layout, Shard, blank, own_ranks
from funcrec.tables import WAITING

ROWS, GRADS = WAITING
NONE = torch.iinfo(torch.int64).max  # a number that sorts after every row


class Waiting(NamedTuple):
    """The gradients that wait for a table or a rank's bank. rows: i64[k, C], -1 for no entry. grads: f[k, C, D]."""

    rows: Tensor
    grads: Tensor

    def slots(self) -> dict[str, Tensor]:
        return {ROWS: self.rows, GRADS: self.grads}


def sorted_by_row(keys: Tensor, grads: Tensor, room: int) -> Waiting:
    """Return the entries whose keys are not NONE, sorted by row, in the first of `room` places."""
    order = keys.argsort(dim=1, stable=True)[:, :room]
    keys, grads = keys.gather(1, order), grads.gather(1, order[..., None].expand(*order.shape, grads.shape[2]))
    is_none = keys == NONE
    rows, grads = torch.where(is_none, -1, keys), torch.where(is_none[..., None], 0, grads)
    pad = room - order.shape[1]
    return Waiting(torch.nn.functional.pad(rows, (0, pad), value=-1), torch.nn.functional.pad(grads, (0, 0, 0, pad)))


def filled(slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the waiting gradients with zeros where there is no entry; {} for slots without waiting gradients."""
    return {GRADS: torch.where((slots[ROWS] >= 0)[..., None], slots[GRADS], 0)} if ROWS in slots else {}


# -- from banks --------------------------------------------------------------------------------------------------


def part_of(shard: Shard, i: int, bank: Waiting) -> Waiting:
    """Return part i of a shard from the waiting gradients of the part's owner, with the row numbers of the table."""
    start, (_, room, width) = shard.starts[i], bank.grads.shape
    inside = (bank.rows >= start) & (bank.rows < start + shard.part)
    own = slice(shard.first, shard.last) if width > shard.last - shard.first else slice(None)
    return sorted_by_row(torch.where(inside, bank.rows - start + i * shard.part, NONE), bank.grads[..., own], room)


def whole_shape(layout: Layout, table: str, slots: Mapping[str, Mapping[str, Tensor]], ranks: int) -> tuple[int, ...]:
    """Return the shape of a table's waiting gradients, (k, n · C, D). slots: {bank: its slots}, for this many ranks."""
    shard = layout.shards[layout.shards_of(table)[0]]
    rows = slots[layout.banks[shard.bank].name][ROWS]
    return rows.shape[0] // ranks, len(shard.ranks) * rows.shape[1], dict(layout.shapes)[table][1]


def of_rank(slots: Mapping[str, Tensor], number: int, ranks: int) -> Waiting:
    """Return the waiting gradients of one bank among those that this process holds."""
    return Waiting(*(slots[k].unflatten(0, (ranks, -1))[number] for k in WAITING))


def gather_waiting(layout: Layout, table: str, slots: Mapping[str, Mapping[str, Tensor]], mesh: Mesh) -> Waiting:
    """Return the waiting gradients of a table on every rank.

    Of several copies in this process it returns the last. slots: {bank: slots}.
    """
    shards = [layout.shards[i] for i in layout.shards_of(table)]
    banks = [layout.banks[s.bank] for s in shards]
    own = own_ranks(banks[0], mesh)
    *places, dim = whole_shape(layout, table, slots, len(own))
    rows, grads = (
        blank(shape, [slots[b.name][k] for b in banks]) for k, shape in zip(WAITING, [places, [*places, dim]])
    )
    for s, bank in zip(shards, banks, strict=True):
        for number, rank in enumerate(own):
            for i in (i for i, owner in enumerate(s.ranks) if owner == rank):
                part = part_of(s, i, of_rank(slots[bank.name], number, len(own)))
                room = part.rows.shape[1]
                at = slice(i * room, (i + 1) * room)
                grads = written(grads, (slice(None), at, slice(s.first, s.last)), part.grads)
                if s == shards[0]:
                    rows = written(rows, (slice(None), at), part.rows)
    axes = banks[0].axes
    if mesh.is_emulated or not axes:
        return Waiting(rows, grads)
    with bind(mesh.bound_axes(axes, grads.device)):
        add = lambda x: psum(x.view(INTEGERS[x.element_size()]), axes).view(x.dtype)
        return Waiting(add(rows), add(grads))


# -- into banks --------------------------------------------------------------------------------------------------


def keys_of(layout: Layout, bank: int, rank: int, table: str, rows: Tensor) -> Iterator[tuple[Shard, Tensor]]:
    """Yield, for each part of the table in a rank's bank, (shard, the row of the bank for each entry, or NONE)."""
    for s in (layout.shards[i] for i in layout.shards_of(table) if layout.shards[i].bank == bank):
        for i in (i for i, owner in enumerate(s.ranks) if owner == rank):
            inside = (rows >= i * s.part) & (rows < (i + 1) * s.part)
            yield s, torch.where(inside, rows - i * s.part + s.starts[i], NONE)


def room_of(layout: Layout, table: str, rows: Tensor) -> int:
    """Return the largest number of entries of one step that an owner gets."""
    most = 0
    for bank in {layout.shards[i].bank for i in layout.shards_of(table)}:
        for rank in range(layout.banks[bank].num_ranks):
            counts = [(k != NONE).sum(1) for _, k in keys_of(layout, bank, rank, table, rows)]
            if counts:
                most = max(most, int(value_below(torch.stack(counts).sum(0)).max()))
    return most


def cut_waiting(
    layout: Layout, table: str, held: Waiting, capacity: int, whole: Collection[str], mesh: Mesh
) -> dict[str, dict[str, Tensor]]:
    """Return {bank: {slot: the gradients that wait in it}} of a table that shares no bank with another table.

    capacity: the places of each rank. It grows if the entries of an owner need more places.
    whole: the banks whose gradients have all columns.
    """
    rows, grads = held
    room, out = max(capacity, room_of(layout, table, rows)), {}
    for bank in dict.fromkeys(layout.shards[i].bank for i in layout.shards_of(table)):
        name, parts = layout.banks[bank].name, []
        for rank in own_ranks(layout.banks[bank], mesh):
            own = list(keys_of(layout, bank, rank, table, rows))
            cut = [grads if name in whole else grads[..., s.first : s.last] for s, _ in own]
            width = (
                cut[0].shape[2] if cut else dict(layout.shapes)[table][1] if name in whole else layout.banks[bank].dim
            )
            keys = torch.cat([k for _, k in own], 1) if own else torch.full_like(rows, NONE)
            parts.append(sorted_by_row(keys, torch.cat(cut, 1) if cut else grads[..., :width], room))
        out[name] = Waiting(*map(torch.cat, zip(*parts, strict=True))).slots()
    return out


def rooms_of(
    call: str, sparse: RowOptimizer, samples: Mapping[str, Tensor], steps: Mapping[str, int]
) -> dict[str, int]:
    """Return {table: its capacity under `sparse`}.

    samples: tables without rows. steps: {table: the number of steps whose gradients wait}.
    """
    made = first_slots(sparse, samples) if steps else {}
    found = {n: made[n][ROWS].shape if ROWS in made[n] else (0, 0) for n in steps}
    check(call, steps_problems(steps, {n: every for n, (every, _) in found.items()}))
    return {n: capacity for n, (_, capacity) in found.items()}


def first_slots(sparse: RowOptimizer, samples: Mapping[str, Tensor]) -> Mapping[str, Mapping[str, Tensor]]:
    """Return the first slots of tables of one row. samples: tables without rows."""
    return sparse.init({n: x.new_zeros(1, *x.shape[1:]) for n, x in samples.items()})


# -- validators --------------------------------------------------------------------------------------------------


def steps_problems(steps: Mapping[str, int], wanted: Mapping[str, int]) -> Iterator[Problem]:
    for n, every in steps.items():
        if wanted[n] != every:
            got = f"optim.accumulate(every={wanted[n]})" if wanted[n] else "an optimizer without `accumulate`"
            need, hint = f"optim.accumulate(every={every}), of which it is", "sparse=..., of the step that made it"
            yield Problem(f"`sparse` does not use the gradients that wait for {n!r}.", got, need, hint)


def optimizer_problems(sparse: RowOptimizer, samples: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Problem]:
    """Report tables whose slots are not those that `sparse` makes. samples: {table: {"": [0, D], slot: [0, ...]}}."""
    own = {n: x for n, x in samples.items() if x[""].is_floating_point()}
    made = first_slots(sparse, {n: x[""] for n, x in own.items()}) if own else {}
    of_rows = lambda slots: {k: list(x.shape[1:]) for k, x in slots.items() if k not in (*WAITING, "")}
    for n, x in own.items():
        was, now = of_rows(x), of_rows(made.get(n, {}))
        if was != now:
            what = f"`sparse` is another optimizer than that of the slots of {n!r}."
            shown = lambda slots: ", ".join(f"{k} f{['R', *shape]}".replace("'", "") for k, shape in slots.items())
            got, need = f"an optimizer with {shown(now) or 'no slots'}", f"one with {shown(was) or 'no slots'}"
            yield Problem(what, got, need, "sparse=..., of the step that made the state")


def waiting_problems(name: str, slots: Mapping[str, Any]) -> Iterator[Problem]:
    """Report a table or bank with one of the slots of waiting gradients, or with a slot of a wrong dtype or shape."""
    if not any(k in slots for k in WAITING):
        return
    rows, grads = (cast(Any, slots.get(k)) for k in WAITING)
    is_own = all(hasattr(x, "dtype") and hasattr(x, "shape") for x in (rows, grads))
    if not is_own or rows.dtype != torch.int64 or len(rows.shape) != 2 or tuple(grads.shape[:-1]) != tuple(rows.shape):
        what = f"the gradients that wait for {name!r} (`optim.accumulate`) are not whole."
        got = ", ".join(
            f"{k}: {describe(x) if isinstance(x, Tensor | None) else x.shape}" for k, x in zip(WAITING, (rows, grads))
        )
        yield Problem(what, got, f"{ROWS} i64[k, C] and {GRADS} f[k, C, D]", "the slots that training made")
