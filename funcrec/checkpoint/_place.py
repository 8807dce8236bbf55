"""Reads stored tensors: whole tensors, or the rows and columns of a state that a plan gives to this process.

    place(state, plan).tables = shard_tables(state.tables, plan)        this process reads only its own rows
Shapes: R rows, D dim.
"""

import mmap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as torch_tree
from torch import Tensor

from funcrec.checkpoint._format import Block, Stored, Want, blank, check_block, fill, grid_of, is_wanted
from funcrec.core import Problem, check, describe, fail, replace, sure
from funcrec.mesh import Codec, Mesh
from funcrec.optim import RowOptimizer
from funcrec.sharding import (
    DenseShard,
    Plan,
    Waiting,
    bank_problems,
    blank_banks,
    buckets_of,
    check_whole_rows,
    cut_dense,
    cut_state,
    cut_waiting,
    dedup_problems,
    dense_axes_problems,
    layout_of,
    leaf_problems,
    own_banks,
    placed_problems,
    places,
    rooms_of,
    steps_problems,
    transport_of,
    waiting_problems,
    whole_banks,
    with_banks,
    with_buckets,
)
from funcrec.tables import WAITING
from funcrec.train import TrainState, of_rows, steps_of

CALL = "funcrec.load"


class Target(NamedTuple):
    """The layout for the states of a checkpoint, as arguments of `train_step`."""

    plan: Plan | None
    mesh: Mesh | None
    sparse: RowOptimizer | None
    exact: bool
    codec: Codec | None
    dedup: bool
    dense_axes: tuple[str, ...]
    like: TrainState | None = None  # a state with the layout to use; only `mesh` then also counts


class Reader(NamedTuple):
    """A reader of stored tensors.

    open: (block, stored tensor) -> the file of the block. device: saved device -> the device of the tensor.
    blocks: (block, stored tensor) -> the blocks that make it up, where a block stands for several.
    """

    open: Callable[..., Any]
    device: Callable[[str], torch.device]
    maps: dict[str, mmap.mmap] | None = None  # {file name: map of the file}; None if no file is mapped
    blocks: Callable[[Block, Stored], Sequence[Block]] = lambda block, x: (block,)

    def give(self, x: Stored, wants: Sequence[Want]) -> None:
        """Fill each Want that overlaps the stored tensor x."""
        for held in x.blocks:
            for block in self.blocks(held, x) if any(is_wanted(held, w) for w in wants) else ():
                own = [w for w in wants if is_wanted(block, w)]
                if own:
                    fill(self.open(block, x), x, block, own)

    def mapped(self, x: Stored) -> Tensor:
        """Return a tensor in the memory of the file, which is read once to check the CRC.

        Writes to the tensor stay in this process.
        """
        name, count = x.blocks[0].file, prod(x.shape)
        maps = sure(self.maps)
        if name not in maps:
            maps[name] = mmap.mmap(self.open(x.blocks[0], x).fileno(), 0, access=mmap.ACCESS_COPY)
        memory = maps[name]
        out = torch.frombuffer(memory, dtype=x.dtype, count=count, offset=x.blocks[0].offset)
        at = 0
        for block in x.blocks:
            held = out[at : at + block.rows * block.columns]
            check_block(x, block, held)
            at += held.shape[0]
        return out.view(x.shape)

    def whole(self, x: Stored) -> Tensor:
        x = x._replace(blocks=tuple(block for held in x.blocks for block in self.blocks(held, x)))
        if self.maps is not None and is_run(x) and self.device(x.device).type == "cpu":
            return self.mapped(x)
        rows, columns = x.grid
        memory = blank(rows * columns * x.dtype.itemsize).view(x.dtype)
        for block in x.blocks:
            fill(self.open(block, x), x, block, [Want(0, 0, memory.view(x.grid))])
        return memory.view(x.shape).to(self.device(x.device))


def is_run(x: Stored) -> bool:
    """Return whether all rows lie in one file, in the order that they have in memory."""
    at = [b.offset + b.rows * b.columns * x.dtype.itemsize for b in x.blocks]
    follows = [b.offset == end for b, end in zip(x.blocks[1:], at, strict=False)]
    return (
        len({b.file for b in x.blocks}) == 1
        and prod(x.grid) > 0
        and x.blocks[0].offset % x.dtype.itemsize == 0
        and all(b.columns == x.grid[1] for b in x.blocks)
        and all(follows)
    )


def mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with fn applied to every state and every stored tensor. Other leaves stay."""
    own = lambda x: fn(x) if isinstance(x, TrainState | Stored) else x
    return torch_tree.tree_map(own, tree, is_leaf=lambda x: isinstance(x, TrainState | Stored))


def placed(tree: Any, target: Target, reader: Reader) -> Any:
    """Return the tree with its stored tensors read, and with its states laid out as the target says."""
    found: list[TrainState] = []

    def make(x: Any) -> Any:
        if not isinstance(x, TrainState):
            return reader.whole(x)
        found.append(x)
        return placed_state(x, target, reader)

    out = mapped(make, tree)
    if not found:
        need, hint = "a TrainState in it", "fr.load(path), which loads the file as it is"
        fail(CALL, "the checkpoint has no state to lay out.", got=describe(tree), need=need, hint=hint)
    return out


def placed_state(state: TrainState, target: Target, reader: Reader) -> TrainState:
    """Return a state with the layout of `step.init` and the stored bits.

    This process reads only its own rows of tables.
    """
    check(CALL, state_problems(state))
    mesh, sparse, like = sure(target.mesh), target.sparse, target.like
    leaves = {n: {"": t, **of_rows(state.slots[n])} for n, t in state.tables.items()}
    waits = {n: own for n, own in state.slots.items() if WAITING[0] in own}
    empty = lambda x: torch.empty(0, *x.shape[1:], dtype=x.dtype, device=reader.device(str(x.device)))
    samples = {n: {k: empty(x) for k, x in own.items()} for n, own in leaves.items()}
    shapes = {n: tuple(t.shape) for n, t in state.tables.items()}
    # without an optimizer, tables share no bank: any optimizer then sees each table by itself
    labels = {n: n if sparse is None else sparse.label(n) for n in shapes}
    if like is not None:
        check(CALL, shape_problems(shapes, like))
        layout, axes = like.tables.layout, buckets_of(like.tables)
    else:
        plan, dtypes = sure(target.plan), {n: t.dtype for n, t in state.tables.items()}
        labels = own_banks(CALL, state.tables, plan, labels)
        layout, axes = layout_of(CALL, shapes, dtypes, plan, mesh, labels), plan.buckets
    if sparse is not None:
        check_whole_rows(CALL, sparse, layout)
    check(CALL, bank_problems(layout, samples))
    rooms, whole = rooms_for(target, layout, samples, {n: own[WAITING[0]].shape[0] for n, own in waits.items()})
    banks = blank_banks(layout, samples, mesh)
    for n, own in leaves.items():
        for k, x in own.items():
            reader.give(x, list(wants_of(layout, banks, n, k, mesh)))
    for n, own in waits.items():
        held = Waiting(*(reader.whole(own[k]) for k in WAITING))
        for b, cut in cut_waiting(layout, n, held, rooms[n], whole, mesh).items():
            banks[b] |= cut
    transport = like.tables.transport if like else transport_of(target.exact, target.dedup, None, target.codec)
    tables = with_banks(state.tables, {b: own.pop("") for b, own in banks.items()}, layout, transport)
    tables = replace(tables, rest=mapped(reader.whole, tables.rest))
    tables = with_buckets(CALL, tables, axes, mesh)
    step, kept, kept_opt, key = mapped(reader.whole, (state.step, state.dense, state.dense_opt, state.key))
    if target.dense_axes:
        check(CALL, leaf_problems(kept, kept_opt))
        kept, kept_opt = cut_dense(kept, mesh, target.dense_axes), cut_state(kept_opt, kept, mesh, target.dense_axes)
    return TrainState(step, tables, banks, kept, kept_opt, key)


def rooms_for(
    target: Target, layout: Any, samples: Any, steps: dict[str, int]
) -> tuple[dict[str, int], Collection[str]]:
    """Return ({table: a rank's places for gradients that wait}, the banks whose waiting gradients have all columns)."""
    if target.like is None:
        check(CALL, sparse_problems(target.sparse, steps))
        tables = {n: own[""] for n, own in samples.items()}
        if not steps:
            return {}, ()
        sparse = sure(target.sparse)  # `sparse_problems` refuses steps without one
        return rooms_of(CALL, sparse, tables, steps), whole_banks(sparse, layout) if steps else ()
    like, banks = target.like, {n: layout.banks[layout.shards[layout.shards_of(n)[0]].bank].name for n in steps}
    now = steps_of(like, sure(target.mesh))
    check(CALL, steps_problems(steps, {n: now.get(n, 0) for n in steps}))
    width = lambda b: like.slots[b.name][WAITING[1]].shape[2] if WAITING[1] in like.slots[b.name] else b.dim
    rooms = {n: like.slots[b][WAITING[0]].shape[1] for n, b in banks.items()}
    return rooms, [b.name for b in layout.banks if width(b) > b.dim]


def axes_of(state: TrainState) -> tuple[str, ...]:
    """Return the axes over which the state's dense parameters are cut."""
    leaves = torch_tree.tree_leaves(state.dense, is_leaf=lambda x: isinstance(x, DenseShard))
    return next((x.axes for x in leaves if isinstance(x, DenseShard)), ())


def wants_of(layout: Any, banks: Any, table: str, slot: str, mesh: Mesh) -> Iterator[Want]:
    """Yield a Want for each part of a table (slot ""), or of its slot, that the banks of this process hold."""
    num_rows, dim = dict(layout.shapes)[table]
    for s, bank, here, there in places(layout, table, mesh, 0, num_rows):
        into = banks[bank][slot][there]
        is_cut = into.dim() > 1 and s.last - s.first < dim
        yield Want(here.start, s.first if is_cut else 0, into.view(grid_of(into.shape)))


def device_of(place: torch.device | None) -> Callable[[str], torch.device]:
    return lambda saved_from: place or place_of(CALL, saved_from)


def place_of(call: str, device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        got, need = f"{device!r:.60}: {str(error).splitlines()[0]:.100}", "a device of this machine"
        fail(call, "the device cannot be used.", got=got, need=need, hint='device="cpu"')
    return found


# -- validators --------------------------------------------------------------------------------------------------


def target_problems(target: Target | None, mmap: bool, **given: Any) -> Iterator[Problem]:
    """Report arguments that do not fit the target. given: the arguments that require a plan."""
    hint = 'plan=fr.Plan({"item": fr.row_wise("model")}), mesh=fr.Mesh.emulated(model=2)'
    if target is None:
        for name in (n for n, x in given.items() if x):
            yield Problem(f"`{name}` requires `plan`.", "plan=None", "plan=... and mesh=...", hint)
    elif mmap:
        yield Problem("`mmap` requires whole tensors.", "mmap=True and `plan`", "one of them", "mmap=False")
    elif target.mesh is None:
        yield Problem("`mesh` is missing.", "plan=... alone", "the mesh of the plan", "mesh=fr.Mesh.emulated(data=2)")
    else:
        yield from dedup_problems(target.exact, target.dedup)
        yield from dense_axes_problems(target.mesh, target.dense_axes)


def sparse_problems(sparse: RowOptimizer | None, steps: dict[str, int]) -> Iterator[Problem]:
    if steps and sparse is None:
        got, hint = f"sparse=None, gradients of {list(steps)} that wait", "sparse=fr.optim.accumulate(...)"
        yield Problem("`sparse` is missing.", got, "the optimizer that uses them", hint)


def shape_problems(shapes: dict[str, tuple], like: TrainState) -> Iterator[Problem]:
    """Report saved tables whose names or shapes differ from those of the state with the layout."""
    wanted = dict(like.tables.layout.shapes)
    differ = [n for n in {**wanted, **shapes} if shapes.get(n) != wanted.get(n)]
    if differ:
        listed = lambda own: ", ".join(f"{n!r} {list(own[n])}" if n in own else f"no {n!r}" for n in differ)
        hint = "the model that it had"
        yield Problem("the checkpoint has another state: its tables differ.", listed(shapes), listed(wanted), hint)


def state_problems(state: TrainState) -> Iterator[Problem]:
    """Report a state whose tables are not [R, D], or have no slots for their rows."""
    shown = lambda x: f"{x.dtype}{list(x.shape)}" if isinstance(x, Stored) else describe(x)
    for name, x, kind, need in (("tables", state.tables, Mapping, "f[R, D]"), ("slots", state.slots, dict, "{...}")):
        if not isinstance(x, kind):
            yield Problem(f"the checkpoint has a state without {name} by name.", describe(x), f"{{name: {need}}}")
            return
    yield from placed_problems(state.tables)
    for n, t in state.tables.items():
        if not isinstance(t, Stored) or len(t.shape) != 2 or not t.dtype.is_floating_point:
            yield Problem(f"table {n!r} of the checkpoint is not a table.", shown(t), "f[R, D]")
        elif not isinstance(state.slots.get(n), dict):
            yield Problem(f"table {n!r} of the checkpoint has no slots.", describe(state.slots.get(n)), "{} for none")
        else:
            for k, s in state.slots[n].items():
                if k not in WAITING and (not isinstance(s, Stored) or not s.shape or s.shape[0] != t.shape[0]):
                    what = f"slot {k!r} of {n!r} has no rows of its table."
                    yield Problem(what, shown(s), f"[{t.shape[0]}, ...]", "plan=None, which loads the file as it is")
            yield from waiting_problems(n, state.slots[n])
