"""A DLRM whose training has one state on any ranks, under any plan, in any micro-batches; and sums over ranks."""

import torch

import funcrec as fr

KEYS, BATCH, STEPS = ("user", "item", "tag"), 1024, 3
SHAPES = {"user": (60, 8), "item": (40, 8), "tag": (30, 8)}
FEATURES = (
    fr.FeatureConfig("user", table="user"),
    fr.FeatureConfig("item", table="item"),
    fr.FeatureConfig("seen", table="item", column="user", hash=fr.modulo()),  # two features of one table
    fr.FeatureConfig("tag", table="tag", pooling="mean"),
)
OPTIMIZERS = {
    "sgd": lambda: fr.optim.sgd(0.1),
    "rowwise_adagrad": lambda: fr.optim.rowwise_adagrad(0.1),
    "adam": lambda: fr.optim.adam(0.01),
}


def model_of(dtype=torch.float32):
    tables = [fr.TableConfig(n, *s, dtype=dtype) for n, s in SHAPES.items()]
    return fr.models.dlrm(tables, FEATURES, num_dense=5, bottom=(16, 8), sizes=(24,))


def batch_of(step, size=BATCH):
    """Return bags of 0 to 3 ids, some outside their tables, with labels, numbers and weights."""
    g = torch.Generator().manual_seed(step)
    draw = lambda: [
        torch.randint(-1, 30, (int(n),), generator=g).tolist() for n in torch.randint(0, 4, (size,), generator=g)
    ]
    ids = fr.KeyedJaggedTensor.from_lists({k: draw() for k in KEYS}, dtype=torch.int64)
    label, weight = torch.randint(0, 2, (size,), generator=g).float(), torch.rand(size, generator=g)
    return fr.Batch(ids, label, torch.randn(size, 5, generator=g), weight)


def mesh_of(axes, is_real):
    return (fr.Mesh.distributed if is_real else fr.Mesh.emulated)(**axes)


def step_on(mesh, kind, name, dtype=torch.float32, **options):
    """Return the step on a mesh, whose tables have one placement."""
    plan = None if mesh is None else fr.Plan.uniform(kind, SHAPES, mesh)
    how = {"sparse": OPTIMIZERS[name](), "dense": fr.optim.dense(torch.optim.Adam, lr=0.01)}
    return fr.train_step(model_of(dtype), **how, mesh=mesh, plan=plan, invariant=True, **options)


def own_batch(mesh, i, size=BATCH):
    batch = batch_of(i, size)
    return batch if mesh is None else fr.shard(batch, fr.P(mesh.axis_names), mesh=mesh)


def steps_from(step, state, mesh, numbers):
    """Return the state after the steps with these numbers."""
    for i in numbers:
        state, _ = step(state, own_batch(mesh, i))
    return state


def trained(name, axes=None, kind=None, *, is_real=False, compiled=False, size=BATCH, dtype=torch.float32, **options):
    """Return (the whole state, the losses) of three steps."""
    mesh = None if axes is None else mesh_of(axes, is_real)
    step = step_on(mesh, kind, name, dtype, **options)
    state, losses = step.init(model_of(dtype).init(fr.key(0)), fr.key(1)), []
    run = fr.jit(step, donate=("state",)) if compiled else step
    for i in range(STEPS):
        state, metrics = run(state, own_batch(mesh, i, size))
        losses.append(metrics["loss"])
    return (state if mesh is None else fr.gather_state(state, mesh)), torch.stack(losses)


def fitted(folder, epochs, axes=None, kind=None):
    """Return the whole state of a run of two batches an epoch, which resumes from the folder's last checkpoint."""
    mesh = None if axes is None else mesh_of(axes, is_real=True)
    inside = lambda x: x if x.is_floating_point() else x.clamp(min=0)  # fit refuses ids outside their tables
    step, batches = step_on(mesh, kind, "adam"), [fr.tree.map(inside, own_batch(mesh, i)) for i in range(2)]
    state = step.init(model_of().init(fr.key(0)), fr.key(1))
    done = fr.fit(step, state, batches, epochs=epochs, checkpoint=folder, keep=1, resume="auto", mesh=mesh)
    return done.state if mesh is None else fr.gather_state(done.state, mesh)


def terms(axes, size, dtype):
    """Return numbers of very different sizes for each rank, f[n, size]."""
    g = torch.Generator().manual_seed(0)
    n = fr.Mesh.emulated(**axes).size
    return (torch.randn(n, size, generator=g) * 10 ** torch.randint(-3, 4, (n, size), generator=g)).to(dtype)


def sums(axes, size, dtype, is_real=False):
    """Return what each collective that adds gives to the ranks; sums that all ranks share, and rank 0's part."""
    names = tuple(axes)

    def one_rank(x):
        x = x[0]
        n = fr.axis_size(names)
        parts = torch.stack([x * (r + 1) for r in range(n)])
        gathered = torch.func.grad(lambda x: (fr.all_gather(x, names).float() * weights_of(n)).sum())(x)
        by_rank = (fr.psum_scatter(parts, names), gathered)
        return fr.psum(x, names), fr.pmean(x, names), fr.all_gather(by_rank, names)

    mesh, x = mesh_of(axes, is_real), terms(axes, size, dtype)
    run = fr.shard_map(fr.invariant(one_rank), mesh=mesh, in_specs=fr.P(names), out_specs=fr.P())
    return run(fr.shard(x, fr.P(names), mesh=mesh))


def weights_of(n):
    return torch.arange(1.0, n + 1)[:, None] / 3


def sums_by_hand(axes, size, dtype):
    """Return the results of `sums`, from trees of neighbours that are written out. 16 bits are rounded once an axis."""
    x = terms(axes, size, dtype)
    n, wide = x.shape[0], torch.promote_types(dtype, torch.float32)

    def tree(xs):
        a, b, *others = [y.to(wide) for y in xs]
        if len(others) == 1:
            return ((a + b) + others[0]).to(dtype)
        left, right = ((y + z).to(dtype).to(wide) for y, z in ((a, b), others))
        return (left + right).to(dtype)

    total = tree(x)
    scattered = torch.stack([tree(x * (r + 1)) for r in range(n)])
    gathered = torch.stack([tree([(w.expand(size)).to(dtype)] * n) for w in weights_of(n)])
    return total, total / n, (scattered, gathered)
