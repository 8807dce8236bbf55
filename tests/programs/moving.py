"""Training that moves to another plan or mesh half-way, on ranks and in one process."""

import pytest
import torch

import funcrec as fr
from funcrec.core._tree import map_tensors, replace
from funcrec.examples import _ranks
from funcrec.sharding.moves import _gather_rows, _send_cells
from programs import training
from programs.training import plan_of


def moved(name, stations, steps, num_bags, is_real, folder=None):
    """Return the last state, whole, after `steps` steps at each station, a pair (axes, kind). Moves use blocks of one
    or two rows. With a folder, every second move saves and loads a checkpoint."""
    _gather_rows.BLOCK_BYTES = 64
    make = fr.Mesh.distributed if is_real else fr.Mesh.emulated
    meshes = [make(**axes) for axes, _ in stations]
    state, done = None, 0
    for i, (mesh, (axes, kind)) in enumerate(zip(meshes, stations, strict=True)):
        options = {**training.optimizers(name), "mesh": mesh, "plan": plan_of(kind, axes), "exact": True}
        step = fr.train_step(training.loss_fn, **options)
        if state is None:
            state = step.init(training.params())
        else:
            there = {"mesh": mesh, "sparse": options["sparse"], "exact": True}
            if folder is not None and i % 2:
                path = fr.save(f"{folder}-{i}", state, mesh=meshes[i - 1])
                state = fr.load(path, plan=options["plan"], **there)
            else:
                state = fr.reshard(state, options["plan"], from_mesh=meshes[i - 1], **there)
        for at in range(done, done + steps):
            state, _ = step(state, fr.shard(training.batch(at, num_bags), fr.P(mesh.axis_names), mesh=mesh))
        done += steps
    return fr.gather_state(state, meshes[-1])


def carried(state, axes, kind, others, other, name):
    """Return, on ranks, a plain state laid out by one plan and gathered, and the same state moved to another plan and
    gathered."""
    _gather_rows.BLOCK_BYTES = 64
    here, there, sparse = fr.Mesh.distributed(**axes), fr.Mesh.distributed(**others), training.OPTIMIZERS[name]()
    first = fr.reshard(state, plan_of(kind, axes), mesh=here, sparse=sparse)
    second = fr.reshard(first, plan_of(other, others), mesh=there, sparse=sparse, from_mesh=here)
    return fr.gather_state(first, here), fr.gather_state(second, there)


def first_states(params, plan, mesh):
    """Return (the first state in one process, the first state from `init` of a step on the mesh, the row optimizer)."""
    sparse, dense = fr.optim.adam(lr=0.1), fr.optim.dense(torch.optim.SGD, lr=0.1)
    make = lambda **where: fr.train_step(training.loss_fn, sparse=sparse, dense=dense, **where).init(params)
    return make(), make(mesh=mesh, plan=plan), sparse


def begun(params, axes, kind):
    """Return, on ranks, the first state of a step, gathered."""
    mesh = fr.Mesh.distributed(**axes)
    return fr.gather_state(first_states(params, plan_of(kind, axes), mesh)[1], mesh)


def full_state(name, dtype):
    """Return a state whose tables and slots have unusual bits: negative zeros, NaNs with a payload, denormals."""
    params = training.params()
    odd = torch.tensor([-(2**31), 0x7FC01234, 1, -4194303], dtype=torch.int32).view(torch.float32)

    def fill(x):
        bits = torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel())).to(x.dtype)
        at = torch.arange(0, x.numel(), 3)
        return bits.flatten().index_copy(0, at, odd[at % 4].to(x.dtype)).reshape(x.shape)

    tables = map_tensors(lambda x: fill(x).to(dtype), params.tables)
    slots = map_tensors(fill, training.OPTIMIZERS[name]().init(tables))
    dense = fr.optim.dense(torch.optim.Adam, lr=0.01).init(params.dense)
    return fr.TrainState(torch.tensor(3), tables, slots, params.dense, dense, fr.key(7))


def bits(tree):
    """Return the state with floats viewed as integers, so that equal means equal bits."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return map_tensors(lambda x: x.contiguous().view(integer[x.element_size()]) if x.is_floating_point() else x, tree)


def questions(interrupted, count):
    """Return the answers of `agreed` at each of `count` steps. From step 20 on, rank `interrupted` asks to stop."""
    mesh, step = fr.Mesh.distributed(x=2), 0
    ask = fr.loop.agreed(lambda: step >= 20 and mesh.coordinates["x"] == interrupted, mesh, "cpu")
    answers = []
    for step in range(count):  # noqa: B007 (read by the function above)
        answers.append(ask())
    return answers


def own_batch(data, rows):
    """Return this rank's part of the main job's batch."""
    return _ranks.OwnRows(data, fr.Mesh.distributed(x=2)).take(rows)


def differentiated(kind):
    """Return the error of a derivative through gather_state on real ranks."""
    axes = {"x": 2}
    step = fr.train_step(
        training.loss_fn,
        **training.optimizers(next(iter(training.OPTIMIZERS))),
        mesh=fr.Mesh.distributed(**axes),
        plan=plan_of(kind, axes),
    )
    state, mesh = step.init(training.params()), fr.Mesh.distributed(**axes)
    whole = lambda banks: fr.gather_state(replace(state, tables=replace(state.tables, banks=banks)), mesh).tables
    try:
        torch.func.grad(lambda banks: sum(t.sum() for t in whole(banks).values()))(state.tables.banks)
    except TypeError as error:
        return str(error)


def sent(state, first, second, name, block):
    """Return (whether a state arrived, [(bytes sent, bytes received)]) after a move from one (axes, plan) to
    another."""
    sparse, counted = training.OPTIMIZERS[name](), []
    (here, plan), (there, other) = ((fr.Mesh.distributed(**axes), plan) for axes, plan in (first, second))

    def swap(blocks, coming, going, mesh):
        assert sum(x.numel() for x in blocks) == sum(going)
        counted.append((sum(going), sum(coming)))
        return swap_bytes(blocks, coming, going, mesh)

    swap_bytes = _send_cells.swap_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gather_rows, "BLOCK_BYTES", block)
        one = fr.reshard(state, plan, mesh=here, sparse=sparse)
        patch.setattr(_send_cells, "swap_bytes", swap)
        two = fr.reshard(one, other, mesh=there, sparse=sparse, from_mesh=here)
    again = fr.reshard(state, other, mesh=there, sparse=sparse)  # the padding after a table's rows is also zero
    same = lambda a, b: all(
        torch.equal(x, y) for x, y in zip(fr.tree.leaves(bits(a)), fr.tree.leaves(bits(b)), strict=True)
    )
    return same((two.tables.banks, two.slots), (again.tables.banks, again.slots)), counted


def members(kind, other):
    """Return whether a move of an ensemble's members by vmap on ranks gives the same as a move of each member alone."""
    mesh, sparse, axes = fr.Mesh.distributed(x=2), training.OPTIMIZERS["adam"](), {"x": 2}
    state = full_state("adam", torch.float32)
    one = fr.reshard(state, plan_of(kind, axes), mesh=mesh, sparse=sparse)
    many = map_tensors(lambda x: torch.stack([x, x.flip(0)]) if x.dim() else torch.stack([x, x]), one)
    move = lambda s: fr.reshard(s, plan_of(other, axes), mesh=mesh, sparse=sparse)
    got = torch.func.vmap(move)(many)
    pairs = [(map_tensors(lambda x: x[i], got), move(map_tensors(lambda x: x[i], many))) for i in range(2)]  # noqa: B023
    return [(bits((a.tables.banks, a.slots)), bits((b.tables.banks, b.slots))) for a, b in pairs]
