"""Training of tables whose replicas train apart, on ranks and in one process."""

import torch

import funcrec as fr
from funcrec.core._tree import map_tensors, replace
from programs import training


def plan_of(kind, axes, replicas):
    """Return a plan that places every table as `kind` over the axes that are not replicas."""
    return fr.Plan.uniform(kind, training.SHAPES, fr.Mesh.emulated(**axes), replicas=replicas)


def plain_loss(params, batch):
    """Return a loss without a matrix product, because the product's rounding depends on its number of rows."""
    acts = fr.lookup(params.tables, batch.ids, training.FEATURES).values
    return (acts - batch.label[:, None]).square().sum() / batch.label.shape[0]


def optimizers(name, dense_lr=0.0):
    sparse = {**training.OPTIMIZERS, "sgd": lambda: fr.optim.sgd(0.1), "counter": counter}[name]()
    return {"sparse": sparse, "dense": fr.optim.dense(torch.optim.SGD, lr=dense_lr)}


def counter():
    return fr.optim.rowwise_adagrad_counter(lr=0.1, half_life=3.0, weight_decay=0.01)


def bags_of(whole, parts):
    """Return the bags of these equal parts of a batch. parts: [(part, of how many)]."""
    pieces = [training.part(whole, r, n) for r, n in parts]
    lists = [p.ids.to_lists() for p in pieces]
    joined = {k: [bag for own in lists for bag in own[k]] for k in whole.ids.keys}
    ids = fr.KeyedJaggedTensor.from_lists(joined, dtype=torch.int64).pad_to(whole.ids.capacity)
    return fr.Batch(ids, torch.cat([p.label for p in pieces]))


def group_bags(whole, axes, replicas, copy):
    """Return the bags of one group of ranks, in the order of its own mesh."""
    n, mine = 1, []
    for size in axes.values():
        n *= size
    for rank in range(n):
        place, at = {}, rank
        for a in reversed(axes):
            place[a], at = at % axes[a], at // axes[a]
        number = 0
        for a in replicas:
            number = number * axes[a] + place[a]
        mine += [(rank, n)] if number == copy else []
    return bags_of(whole, mine)


def own(batch, mesh):
    mine = fr.shard(batch, fr.P(mesh.axis_names), mesh=mesh)
    return mine if mesh.is_emulated else fr.Batch(mine.ids.pad_to(64), mine.label)


def trained(mesh, plan, batches, options, *, loss_fn=training.loss_fn, every=0, compiled=False, **kwargs):
    """Return (state, losses) after training on these global batches. The replicas are synchronised after each
    `every` steps."""
    step = fr.train_step(loss_fn, **options, mesh=mesh, plan=plan, **kwargs)
    sync = lambda state: fr.sync_replicas(state, mesh=mesh)
    if compiled:
        step, sync, init = fr.jit(step, donate=("state",)), fr.jit(sync, donate=("state",)), step.init
    else:
        init = step.init
    state, losses = init(training.params()), []
    for i, batch in enumerate(batches):
        state, metrics = step(state, own(batch, mesh))
        losses.append(float(metrics["loss"]))
        if every and (i + 1) % every == 0:
            state = sync(state)
    return state, torch.tensor(losses)


def leaves(state):
    """Return {bank: {"": table, slot: the slot's tensor}}."""
    return {n: {"": t, **state.slots[n]} for n, t in state.tables.items()}


def whole_leaves(state, mesh):
    """Return the `leaves` of all ranks and all replicas."""
    specs = state.tables.layout.specs()
    return {
        n: {k: fr.unshard(x.clone(), specs[n], mesh=mesh) for k, x in xs.items()} for n, xs in leaves(state).items()
    }


def copy_of(whole, copy, copies):
    """Return the leaves of one replica."""
    return map_tensors(lambda x: x.unflatten(0, (copies, -1))[copy], whole)


def with_leaves(state, new):
    """Return the state with these tables and slots."""
    slots = {n: {k: x for k, x in own.items() if k} for n, own in new.items()}
    return replace(state, tables=replace(state.tables, banks={n: own[""] for n, own in new.items()}), slots=slots)


def real(axes, kind, replicas, name, steps, every, compiled=False):
    """Return, on ranks, (tables and slots of all replicas before a last synchronisation, after it, dense, losses)."""
    mesh = fr.Mesh.distributed(**axes)
    batches = [training.batch(i, 8) for i in range(steps)]
    plan = plan_of(kind, axes, replicas)
    state, losses = trained(mesh, plan, batches, optimizers(name, 0.1), every=every, compiled=compiled)
    before = whole_leaves(state, mesh)
    after = whole_leaves(fr.sync_replicas(state, mesh=mesh), mesh)
    return before, after, state.dense, losses


def real_frozen(axes, kind, replicas, name, steps, num_copies):
    """Return, on ranks, the tables and slots of all replicas after training with a dense learning rate of 0. Without
    replicas in the mesh, return those of each group alone."""
    mesh, out = fr.Mesh.distributed(**axes), []
    for copy in range(1 if replicas else num_copies):
        batches = [training.batch(i, 8) for i in range(steps)]
        if not replicas:
            batches = [training.part(b, copy, num_copies) for b in batches]
        state, _ = trained(mesh, plan_of(kind, axes, replicas), batches, optimizers(name))
        out.append(whole_leaves(state, mesh))
    return out


def real_refused(axes, replicas):
    """Gather, on ranks, replicas that differ. The gather must raise."""
    mesh = fr.Mesh.distributed(**axes)
    state, _ = trained(mesh, plan_of("row_wise", axes, replicas), [training.batch(0, 8)], optimizers("sgd"))
    return fr.gather_state(state, mesh)
