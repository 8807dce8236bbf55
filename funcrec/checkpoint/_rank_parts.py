"""Divides a tree among the ranks that write it: one rank writes each element, however many ranks have copies.

    tables and slots: rows and columns by their layout;    cut dense parameters: elements;    cut vocabularies: rows;
    other tensors: rows, since every rank has these tensors whole

Copies share the work: if k ranks hold the same rows, each rank writes a k-th of them.
Shapes: R rows, D dim, n ranks on the axes of a bank, k copies of it.
"""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils._pytree as torch_tree
from torch import Tensor

from funcrec.checkpoint._format import grid_of
from funcrec.checkpoint._tree_json import Cut
from funcrec.core import Problem, check, describe, map_tensors, replace
from funcrec.kinds import Vocabulary, VocabularyShard
from funcrec.mesh import Mesh, Ranks, checksum, coordinates, rank_at
from funcrec.sharding import (
    DenseShard,
    Layout,
    copy_problems,
    filled,
    join_parts,
    of_rank,
    of_vocabularies,
    part_of,
    whole_shape,
)
from funcrec.tables import WAITING, layout_in
from funcrec.train import TrainState, slot_problems

CALL = "funcrec.save"
ROWS, _ = WAITING
SPLIT_BYTES = 1 << 20  # the first rank that has a smaller part writes the whole part

Parts = Iterator[tuple[int, int, int, Tensor]]


class Writers(NamedTuple):
    """The sizes of a mesh's axes, and the numbers of the ranks that this process holds."""

    sizes: dict[str, int]
    own: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.sizes.values())

    @property
    def is_emulated(self) -> bool:
        return len(self.own) == self.size

    def copy(self, rank: int, axes: tuple[str, ...]) -> tuple[int, int, int]:
        """Return (the rank's number on the axes, the number of its copy, the number of copies) of a tensor they cut."""
        at = coordinates(rank, list(self.sizes), self.sizes)
        others = [a for a in self.sizes if a not in axes]
        return rank_at(at, axes, self.sizes), rank_at(at, others, self.sizes), prod(self.sizes[a] for a in others)


def where_of(mesh: Mesh | None, seen: "Seen") -> Writers:
    """Return the ranks that divide a tree: the ranks of the mesh, or of the layouts in the tree.

    Without a mesh, tables that hold the rows of all ranks belong to an emulated mesh. If no table shows the mesh (all
    tables are replicated), the running processes are the ranks.
    """
    check(CALL, mesh_problems(mesh, seen))
    sizes = mesh.shape if mesh is not None else dict(seen.layouts[0][0].mesh_shape)
    size = prod(sizes.values())
    rank = dist.get_rank() if dist.is_initialized() and dist.get_world_size() == size else None
    if mesh is None:
        kinds = [k for layout, leaves in seen.layouts for k in held_kinds(layout, leaves["table"])]
        is_emulated = rank is None or not all("one" in k for k in kinds)
    else:
        is_emulated = mesh.is_emulated
    return Writers(sizes, tuple(range(size)) if is_emulated or rank is None else (rank,))


def ranks_of(mesh: Mesh | None) -> Ranks:
    """Return all running ranks of the default group, or this process alone.

    A call with a wrong mesh also has the default group.
    """
    return Ranks() if mesh is None or mesh.is_emulated else Ranks.of_group(None)


def is_of_ranks(_: Any = None, /, *trees: Any, mesh: Any = None, **kwargs: Any) -> bool:
    """Return whether all running ranks make this call, be it right or wrong.

    The mesh of the call shows this, or the tables in its trees.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    if mesh is not None:
        return not isinstance(mesh, Mesh) or not mesh.is_emulated
    leaves = torch_tree.tree_leaves([*trees, *kwargs.values()], is_leaf=lambda x: layout_in(x) is not None)
    kinds = [k for x in leaves if layout_in(x) is not None for k in held_kinds(x.layout, x.banks)]
    return bool(kinds) and all("one" in k for k in kinds)


def held_kinds(layout: Layout, banks: Mapping[str, Tensor]) -> Iterator[set[str]]:
    """Yield for each bank whether it has the rows of "one" rank, of "all" ranks, or both."""
    for b in layout.banks:
        rows = banks[b.name].shape[0]
        yield {k for k, n in (("one", 1), ("all", b.num_ranks * b.num_copies)) if rows == n * b.rows}


class Seen(NamedTuple):
    """The contents of a tree: layouts of tables with banks and slots, cut dense parameters, and steps of states."""

    layouts: list[tuple[Layout, dict[str, dict[str, Tensor]]]]
    shards: list[DenseShard]
    steps: list[Any]

    def see(self, node: Any) -> Any:
        """Return a node in the form of one process, with a Cut for each cut tensor, and note its contents."""
        if isinstance(node, TrainState):
            self.steps.append(node.step)
        if isinstance(node, TrainState) and layout_in(node.tables) is not None:
            check(CALL, slot_problems(node))
            return replace(node, tables=self.tables(node.tables, node.slots), slots=self.slots(node))
        if (layout := layout_in(node)) is not None:
            check(CALL, coded_problems(layout))
            return self.tables(node, {})
        if isinstance(node, DenseShard):
            self.shards.append(node)
            grid = (prod(node.shape), 1)
            cut = lambda x: Cut((x,), x.dtype, node.shape, grid, lambda where: shard_parts(node, x, where))
            return map_tensors(lambda x: cut(x) if x.dim() else x, node.flat)
        return node

    def tables(self, tables: Any, slots: Any) -> Any:
        leaves: dict[str, dict[str, Tensor]] = {"table": dict(tables.banks)}
        for n, own in slots.items():
            for k, s in (own | filled(own)).items():
                leaves.setdefault(f"slot {k!r}", {})[n] = s
        self.layouts.append((tables.layout, leaves))
        tables = replace(tables, rest=of_vocabularies(tables.rest, vocabulary_cut))
        return join_parts(tables, {n: table_cut(tables.layout, n, tables.banks) for n, _ in tables.layout.shapes})

    def slots(self, state: TrainState) -> dict[str, dict[str, Cut]]:
        layout, out = state.tables.layout, {}
        for name, _ in layout.shapes:
            banks = [layout.banks[layout.shards[i].bank].name for i in layout.shards_of(name)]
            own = {k: {b: state.slots[b][k] for b in banks} for k in state.slots[banks[0]]}
            of_rows = {k: table_cut(layout, name, held) for k, held in own.items() if k not in WAITING}
            out[name] = of_rows | {k: waiting_cut(state, name, k) for k in own if k in WAITING}
        return out


def table_cut(layout: Layout, name: str, banks: Mapping[str, Tensor]) -> Cut:
    """Return a Cut for a table in banks, or for a slot of it."""
    shards = [layout.shards[i] for i in layout.shards_of(name)]
    held = [banks[layout.banks[s.bank].name] for s in shards]
    num_rows, dim = dict(layout.shapes)[name]
    is_cut = len(shards) > 1 and held[0].dim() > 1
    shape = (num_rows, dim) if is_cut else (num_rows, *held[0].shape[1:])
    parts = lambda where: table_parts(layout, name, banks, num_rows, where)
    return Cut(tuple(held), held[0].dtype, shape, grid_of(shape), parts)


def table_parts(layout: Layout, name: str, banks: Mapping[str, Tensor], num_rows: int, where: Writers) -> Parts:
    shards = [layout.shards[i] for i in layout.shards_of(name)]
    for rank in where.own:
        for s in shards:
            bank = layout.banks[s.bank]
            x = banks[bank.name]
            if x.dim() == 1 and s != shards[0]:  # a slot with one number per row is the same in every shard
                continue
            place, copy, copies = where.copy(rank, bank.axes)
            group, _, _ = where.copy(rank, layout.replicas)
            begin = (group * bank.num_ranks + place) * bank.rows if where.is_emulated else 0
            for i, (owner, start) in enumerate(zip(s.ranks, s.starts, strict=True)):
                first, last = i * s.part, min((i + 1) * s.part, num_rows)
                if owner == place and first < last:
                    at = begin + start - first
                    first, last = share(first, last, copy, copies, x)
                    yield rank, first, s.first if len(shards) > 1 and x.dim() > 1 else 0, x[at + first : at + last]


def waiting_cut(state: TrainState, name: str, slot: str) -> Cut:
    """Return a Cut for one of the two slots of a table's waiting gradients, in the form of one process."""
    layout = state.tables.layout
    banks = [layout.banks[layout.shards[i].bank] for i in layout.shards_of(name)]
    held = [state.slots[b.name][slot] for b in banks]
    ranks = max(1, state.tables.banks[banks[0].name].shape[0] // max(1, banks[0].rows))
    every, places, dim = whole_shape(layout, name, state.slots, ranks)
    shape, grid = ((every, places), (every, places)) if slot == ROWS else ((every, places, dim), (every * places, dim))
    parts = lambda where: waiting_parts(layout, name, state.slots, slot == ROWS, ranks, where)
    return Cut(tuple(held), held[0].dtype, shape, grid, parts)


def waiting_parts(layout: Layout, name: str, slots: Any, is_rows: bool, ranks: int, where: Writers) -> Parts:
    shards = [layout.shards[i] for i in layout.shards_of(name)]
    _, places, _ = whole_shape(layout, name, slots, ranks)
    for rank in where.own:
        for s in shards[:1] if is_rows else shards:  # owners of other columns have the same entries
            bank = layout.banks[s.bank]
            place, copy, _ = where.copy(rank, bank.axes)
            group, _, _ = where.copy(rank, layout.replicas)
            for i in (i for i, owner in enumerate(s.ranks) if owner == place and copy == 0):
                number = group * bank.num_ranks + place if where.is_emulated else 0
                part = part_of(s, i, of_rank(slots[bank.name], number, ranks))
                at = i * part.rows.shape[1]
                if is_rows:
                    yield rank, 0, at, part.rows
                else:
                    yield from ((rank, k * places + at, s.first, grads) for k, grads in enumerate(part.grads))


def vocabulary_cut(v: VocabularyShard) -> Vocabulary:
    """Return the whole vocabulary, with a Cut for each tensor that has rows."""

    def cut(x: Tensor) -> Cut:
        shape = v.num_rows, *x.shape[1:]
        return Cut((x,), x.dtype, shape, grid_of(shape), lambda where: vocabulary_parts(v, x, where))

    sketch = None if v.own.sketch is None else cut(v.own.sketch)
    return replace(v.own, tags=cut(v.own.tags), entries=cut(v.own.entries), sketch=sketch)


def vocabulary_parts(v: VocabularyShard, x: Tensor, where: Writers) -> Parts:
    n = prod(where.sizes[a] for a in v.axes)
    part = x.shape[0] // n if where.is_emulated else x.shape[0]
    for rank in where.own:
        place, copy, copies = where.copy(rank, v.axes)
        begin = place * part
        first, last = share(min(begin, v.num_rows), min(begin + part, v.num_rows), copy, copies, x)
        at = 0 if where.is_emulated else -begin
        yield rank, first, 0, x[at + first : at + last]


def shard_parts(node: DenseShard, flat: Tensor, where: Writers) -> Parts:
    """Yield the parts of a dense parameter, as one-column rows of the flattened tensor."""
    size, n = prod(node.shape), prod(where.sizes[a] for a in node.axes)
    part = -(-size // n)
    for rank in where.own:
        place, copy, copies = where.copy(rank, node.axes)
        begin = place * part
        first, last = share(min(begin, size), min(begin + part, size), copy, copies, flat)
        at = 0 if where.is_emulated else -begin
        yield rank, first, 0, flat[at + first : at + last]


def whole_parts(x: Tensor, where: Writers) -> Parts:
    """Yield this process's share of the rows of a tensor that every rank has whole."""
    rows = x if x.dim() else x.reshape(1)
    for rank in where.own:
        first, last = share(0, rows.shape[0], rank, where.size, rows)
        yield rank, first, 0, rows[first:last]


def share(first: int, last: int, copy: int, copies: int, x: Tensor) -> tuple[int, int]:
    """Return the range of rows that this copy writes, of rows [first, last), which all copies have."""
    if (last - first) * prod(x.shape[1:]) * x.element_size() < SPLIT_BYTES:
        return (first, last) if copy == 0 else (first, first)
    rows = last - first
    return first + rows * copy // copies, first + rows * (copy + 1) // copies


def fingerprint(x: Tensor) -> int:
    """Return a checksum of all bits of a tensor, computed one block at a time."""
    flat = x.detach().resolve_conj().resolve_neg().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if x.is_complex() else flat
    total = 0
    for i, block in enumerate(flat.split(SPLIT_BYTES)):
        total = (total * 0x100000001B3 + int(checksum(block)) + i) % 2**63
    return total


# -- validators --------------------------------------------------------------------------------------------------


def coded_problems(layout: Layout) -> Iterator[Problem]:
    """Report quantised tables: a checkpoint joins parts by columns, and rows of codes have no columns."""
    if any(b.bits for b in layout.banks):
        got, hint = f"{[b.name for b in layout.banks if b.bits]}", "fr.save(path, fr.gather_tables(tables, mesh))"
        yield Problem("`tree` has quantised tables on a mesh.", got, "the tables whole", hint, TypeError)


def mesh_problems(mesh: Mesh | None, seen: Seen) -> Iterator[Problem]:
    """Report layouts that do not lie on the mesh, and banks with the rows of neither one rank nor all ranks."""
    shapes = list(dict.fromkeys(layout.mesh_shape for layout, _ in seen.layouts))
    if mesh is not None and shapes and shapes != [mesh.axes]:
        yield Problem("`tree` lies on another mesh.", f"{mesh!r}", f"axes {[dict(s) for s in shapes]}", "its own mesh")
    elif len(shapes) > 1:
        yield Problem("`tree` has states of several meshes.", f"{[dict(s) for s in shapes]}", "one", "a save for each")
    for layout, leaves in seen.layouts:
        kinds = list(held_kinds(layout, leaves["table"]))
        if not all(kinds) or (kinds and not set.intersection(*kinds)):
            got = ", ".join(f"{n}: {describe(t)}" for n, t in leaves["table"].items())
            need = f"the rows of one rank, or of all {prod(dict(layout.mesh_shape).values())}"
            yield Problem("the banks of `tree` have other rows than their layout.", got, need, "a step's own state")


def equal_problems(where: Writers, seen: Seen, told: list) -> Iterator[Problem]:
    """Report values of several ranks that differ between these ranks. told: each rank's description (`told_of`)."""
    for layout, leaves in seen.layouts if where.is_emulated else ():
        yield from copy_problems(layout, leaves, Mesh.emulated(**where.sizes))
    first = told[0]
    for rank, other in enumerate(told):
        if [leaf[:3] for leaf in other["leaves"]] != [leaf[:3] for leaf in first["leaves"]]:
            pairs = zip_longest(other["leaves"], first["leaves"])
            a, b = next((a, b) for a, b in pairs if (a and a[:3]) != (b and b[:3]))
            show = lambda x: f"{x[0]} {x[1]}{x[2]}" if x else "nothing"
            what = f"rank {rank} saves another tree than rank 0."
            hint = "the same tree on every rank, of sharded parts each its own"
            yield Problem(what, show(a), show(b), hint, kind=TypeError)
            return
    for i, (name, _, _, _) in enumerate(first["leaves"]):
        apart = [rank for rank, other in enumerate(told) if other["leaves"][i][3] != first["leaves"][i][3]]
        if apart:
            got, need = f"ranks {apart} differ from rank 0", "equal bits: what is not sharded is written once"
            yield Problem(f"`{name}` is not the same on all ranks.", got, need, "a tensor with a dimension for ranks")
    for i, (layout, _) in enumerate(seen.layouts):
        sums: dict[int, list] = {}  # {rank within a copy: checksums}
        for rank, other in enumerate(told if layout.replicas else ()):
            sums.setdefault(where.copy(rank, layout.replicas)[1], []).append(other["copies"][i])
        if any(x != own[0] for own in sums.values() for x in own):
            got, hint = f"{layout.num_copies} copies over {layout.replicas}", "fr.sync_replicas(state, mesh=mesh) first"
            yield Problem("the tables have copies that trained apart.", got, "copies of equal bits", hint)


def told_of(leaves: Mapping[str, Tensor | Cut], where: Writers, seen: Seen) -> dict[str, list]:
    """Return a description of this rank's tree, which the other ranks get before any work."""
    kind = lambda x: (str(x.dtype).removeprefix("torch."), list(x.shape))
    alone = where.is_emulated
    mark = lambda x: None if alone or isinstance(x, Cut) else fingerprint(x)
    sums = lambda own: [fingerprint(x) for group in own.values() for x in group.values()]
    copies = [sums(own) if layout.replicas and not alone else [] for layout, own in seen.layouts]
    return {"leaves": [[n, *kind(x), mark(x)] for n, x in leaves.items()], "copies": copies}
