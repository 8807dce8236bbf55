"""Moves states between plans: gathers a state on every rank, or sends rows from bank to bank, one block at a time.

    gather_state(reshard(state, plan)) == state        bit for bit

Shapes: R rows, D dim.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from funcrec.core import Problem, check, describe, is_wrapped, sure, tree_leaves, typed
from funcrec.mesh import Codec, Mesh, Ranks, is_readable, together
from funcrec.optim import RowOptimizer
from funcrec.sharding import (
    Layout,
    Plan,
    Rows,
    Waiting,
    bank_problems,
    blank_banks,
    check_whole_rows,
    copy_problems,
    cut_dense,
    cut_state,
    cut_waiting,
    dedup_problems,
    dense_axes_problems,
    filled,
    followed_problems,
    gather_waiting,
    join_dense,
    join_parts,
    layout_of,
    leaf_problems,
    move,
    optimizer_problems,
    own_banks,
    own_ranks,
    placed_problems,
    rooms_of,
    rows_of,
    send_rows,
    transport_of,
    waiting_problems,
    whole_banks,
    with_banks,
    with_buckets,
    with_whole_rest,
)
from funcrec.tables import WAITING, layout_in, table_tensor_problems
from funcrec.train._state import TrainState


@typed
def gather_state(state: TrainState, mesh: Mesh) -> TrainState:
    """Return on every rank a sharded state in the form of one process.

    Tables are {name: f[R, D]}, slots {name: {slot: f[R, ...]}}. The result depends on no plan, and checkpoints hold
    this form. Gradients that wait (`optim.accumulate`) are sorted by row. If n owners have C entries each, the
    gradients lie in buffers of n · C entries, which the optimizer takes unchanged.

    Args:
      state: made by a `train_step` with this mesh. Every rank passes its own state.

    Raises:
      TypeError: if the state is not sharded.
      ValueError: if the state was made on another mesh, or copies that trained apart differ: call `sync_replicas`
        first.

    Law: gather_state(reshard(state, plan, mesh=mesh, sparse=sparse), mesh) has the bits of `state`.

    Example:
      >>> import torch, funcrec as fr
      >>> mesh, plan = fr.Mesh.emulated(model=2), fr.Plan({"item": fr.row_wise("model")})
      >>> opts = {"sparse": fr.optim.adagrad(lr=0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
      >>> step = fr.train_step(lambda params, batch: params.dense.sum(), **opts, mesh=mesh, plan=plan)
      >>> state = step.init(fr.Params({"item": torch.ones(3, 2)}, torch.ones(1)))
      >>> state.tables, fr.gather_state(state, mesh).tables
      (ShardedTables({item: f32[4, 2]}), {'item': tensor([[1., 1.],
              [1., 1.],
              [1., 1.]])})

    Source: TorchRec's state_dict, whose shards a checkpoint joins.
    """
    call = "funcrec.gather_state"
    check_on_ranks(call, "gather a state", state, mesh)
    rows, reads = dict(state.tables.layout.shapes), readers(state, mesh)
    whole = {n: {k: read(0, rows[n][0]) for k, read in own.items()} for n, own in reads.items()}
    tables = join_parts(with_whole_rest(state.tables, mesh), {n: own.pop("") for n, own in whole.items()})
    for n, held in waiting_in(state, mesh):
        whole[n] |= held.slots()
    return TrainState(
        state.step, tables, whole, join_dense(state.dense, mesh), join_dense(state.dense_opt, mesh), state.key
    )


@typed
def reshard(
    state: TrainState,
    plan: Plan,
    *,
    mesh: Mesh,
    sparse: RowOptimizer,
    from_mesh: Mesh | None = None,
    exact: bool = False,
    codec: Codec | None = None,
    dedup: bool = False,
    dense_axes: Sequence[str] = (),
) -> TrainState:
    """Return a state, laid out as a plan says.

    The given state is plain (as `gather_state` returns), or sharded under another plan.

    Args:
      state: a plain state, the same on every rank, or each rank's own sharded state. For a Logged pass its `state`: the
        new step's `init` begins a log with the result.
      plan, mesh, sparse, exact, codec, dedup, dense_axes: the arguments of the `train_step` that continues. Tables that
        `sparse` updates differently share no bank.
      from_mesh: the mesh of a sharded state, if that mesh is not `mesh`.

    Returns:
      TrainState with ShardedTables. All parts except tables and slots come from the old state.

    Raises:
      ValueError: if the state was made on another mesh, copies have trained apart, or its slots are not those of
        `sparse`. Also the errors that `train_step(...).init` raises.

    Law: `reshard` keeps every bit. Training then goes on as it would have without it, except for what the plan rounds.

    Cost: each rank that needs a row gets it once, from a rank that has it. No rank sends or gets more than 64 MiB at a
      time. Memory holds these bytes besides the two states. Gradients that wait are first gathered on every rank, one
      table at a time.

    Example: a table moves from rows on two ranks to columns on three ranks.
      >>> import torch, funcrec as fr
      >>> two, three, sparse = fr.Mesh.emulated(x=2), fr.Mesh.emulated(y=3), fr.optim.adagrad(lr=0.1)
      >>> zero = torch.tensor(0)
      >>> state = fr.TrainState(zero, {"item": torch.eye(3)}, sparse.init({"item": torch.eye(3)}), {}, {}, fr.key(0))
      >>> by_rows = fr.reshard(state, fr.Plan({"item": fr.row_wise("x")}), mesh=two, sparse=sparse)
      >>> fr.reshard(by_rows, fr.Plan({"item": fr.column_wise("y")}), mesh=three, sparse=sparse, from_mesh=two).tables
      ShardedTables({item[0:1]: f32[9, 1]})

    Source: TorchRec's dynamic sharding, `DMP.reshard`.
    """
    call = "funcrec.reshard"
    source = mesh if from_mesh is None else from_mesh
    check(call, dedup_problems(exact, dedup), dense_axes_problems(mesh, dense_axes))
    old_layout = layout_in(state.tables)
    is_far = old_layout is not None and not source.is_emulated and not mesh.is_emulated
    if old_layout is not None:
        check_on_ranks(call, "reshard a state", state, source, is_far)
        shapes = dict(old_layout.shapes)
    else:
        check(call, placed_problems(state.tables))
        check(call, table_tensor_problems(state.tables))
        check(call, slot_problems(state))
        shapes = {n: tuple(t.shape) for n, t in state.tables.items()}
    reads = readers(state, source)
    samples = {n: {k: read(0, 0) for k, read in own.items()} for n, own in reads.items()}
    labels = own_banks(call, state.tables, plan, {n: sparse.label(n) for n in shapes})
    layout = layout_of(call, shapes, {n: own[""].dtype for n, own in samples.items()}, plan, mesh, labels)
    check_whole_rows(call, sparse, layout)
    check(call, bank_problems(layout, samples))
    check(call, optimizer_problems(sparse, samples))
    rooms = rooms_of(call, sparse, {n: own[""] for n, own in samples.items()}, steps_of(state, source))
    banks = blank_banks(layout, samples, mesh)
    old = {b: {"": t} | of_rows(state.slots[b]) for b, t in state.tables.items()} if is_far else {}
    if old and not any(is_wrapped(x) for own in old.values() for x in own.values()):
        send_rows(sure(old_layout), old, layout, banks, mesh)
    else:  # all rows are here, or come here; under vmap the rows of all members
        for name, own in reads.items():
            for k, read in own.items():
                move(layout, banks, name, k, mesh, read)
    for n, held in waiting_in(state, source):
        for b, own in cut_waiting(layout, n, held, rooms[n], whole_banks(sparse, layout), mesh).items():
            banks[b] |= own
    transport = transport_of(exact, dedup, codec=codec)
    old_tables = state.tables if old_layout is None else with_whole_rest(state.tables, source)
    tables = with_banks(old_tables, {b: own.pop("") for b, own in banks.items()}, layout, transport)
    tables = with_buckets(call, tables, plan.buckets, mesh)
    kept, kept_opt = join_dense(state.dense, source), join_dense(state.dense_opt, source)
    if dense_axes:
        axes = tuple(dense_axes)
        check(call, leaf_problems(kept, kept_opt))
        kept, kept_opt = cut_dense(kept, mesh, axes), cut_state(kept_opt, kept, mesh, axes)
    return TrainState(state.step, tables, banks, kept, kept_opt, state.key)


def readers(state: TrainState, mesh: Mesh) -> dict[str, dict[str, Rows]]:
    """Return {table: {"": rows of the table, slot: rows of the slot}}, with functions (first, last) -> rows.

    Every rank calls them in the same order.
    """
    tables = state.tables
    layout = layout_in(tables)
    if layout is None:
        cut = lambda x: lambda first, last: x[first:last]
        return {n: {"": cut(t)} | {k: cut(s) for k, s in of_rows(state.slots[n]).items()} for n, t in tables.items()}
    out = {}
    for name, _ in layout.shapes:
        own = [layout.banks[layout.shards[i].bank].name for i in layout.shards_of(name)]
        leaves = {"": tables} | {k: {b: state.slots[b][k] for b in own} for k in of_rows(state.slots[own[0]])}
        read = lambda x, n=name: lambda first, last: rows_of(layout, x, n, mesh, first, last)
        out[name] = {k: read(x) for k, x in leaves.items()}
    return out


def banks_of(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """Return {bank: {"": the bank, slot: its slot}} of a sharded state."""
    return {b: {"": t} | dict(state.slots[b]) for b, t in state.tables.items()}


def of_rows(slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all slots except the slots of waiting gradients."""
    return {k: s for k, s in slots.items() if k not in WAITING}


def waiting_in(state: TrainState, mesh: Mesh) -> Iterator[tuple[str, Waiting]]:
    """Yield (table, all its waiting gradients) for each table with such gradients, one table at a time."""
    layout = layout_in(state.tables)
    for name in steps_of(state, mesh):
        if layout is None:
            yield name, Waiting(*(state.slots[name][k] for k in WAITING))
        else:
            yield name, gather_waiting(layout, name, state.slots, mesh)


def steps_of(state: TrainState, mesh: Mesh) -> dict[str, int]:
    """Return {table: the number of steps whose gradients may wait}, for tables whose gradients wait."""
    layout = layout_in(state.tables)
    if layout is None:
        return {n: own[WAITING[0]].shape[0] for n, own in state.slots.items() if WAITING[0] in own}
    banks = {n: layout.banks[layout.shards[layout.shards_of(n)[0]].bank] for n, _ in layout.shapes}
    has = {n: state.slots[b.name] for n, b in banks.items() if WAITING[0] in state.slots[b.name]}
    return {n: own[WAITING[0]].shape[0] // len(own_ranks(banks[n], mesh)) for n, own in has.items()}


def leaves_of(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """Return {"table" or a slot's name: {bank: its tensor}}. Places of waiting gradients without an entry are zeros."""
    out: dict[str, dict[str, Tensor]] = {"table": dict(state.tables)}
    for n, own in state.slots.items():
        for k, s in (own | filled(own)).items():
            out.setdefault(f"slot {k!r}", {})[n] = s
    return out


# -- validators --------------------------------------------------------------------------------------------------


def check_on_ranks(call: str, doing: str, state: TrainState, mesh: Mesh, is_far: bool = False) -> None:
    """Check that a state is sharded on this mesh, before its ranks exchange rows.

    If values can be read here, an error on one rank, or another call of it, is an error on every rank.
    """

    def checks() -> None:
        check(call, sharded_problems(state))
        layout = state.tables.layout
        check(call, mesh_problems(layout, mesh), slot_problems(state))
        check(call, () if mesh.is_emulated else followed_problems(layout, banks_of(state), is_far))

    is_read = all(is_readable(x) for x in tree_leaves(state) if isinstance(x, Tensor))
    together(Ranks.of(mesh) if is_read else Ranks(), call, doing, checks)
    check(call, copy_problems(state.tables.layout, leaves_of(state), mesh))


def sharded_problems(state: TrainState) -> Iterator[Problem]:
    if layout_in(state.tables) is None:
        yield Problem("`state` is not sharded.", repr(state), "ShardedTables in it", "fr.reshard", TypeError)


def mesh_problems(layout: Layout, mesh: Mesh) -> Iterator[Problem]:
    if layout.mesh_shape != mesh.axes:
        hint = "from_mesh=..., of `reshard`"
        yield Problem("`state` lies on another mesh.", f"{mesh!r}", f"axes {dict(layout.mesh_shape)}", hint)


def slot_problems(state: TrainState) -> Iterator[Problem]:
    """Report tables or banks without slots, and slots without one entry per row, except slots of waiting gradients."""
    for n, t in state.tables.items():
        if not isinstance(state.slots, Mapping) or n not in state.slots:
            yield Problem(f"{n!r} has no slots.", describe(state.slots), f"{n!r} in `state.slots`, {{}} for none")
            continue
        for k, s in state.slots[n].items():
            if k not in WAITING and (not isinstance(s, Tensor) or s.dim() == 0 or s.shape[0] != t.shape[0]):
                yield Problem(f"slot {k!r} of {n!r} has no rows of its table.", describe(s), f"[{t.shape[0]}, ...]")
        yield from waiting_problems(n, state.slots[n])
