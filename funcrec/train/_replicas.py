"""Makes the copies of tables that groups train separately equal again. The ranks form two dimensions: groups × ranks of
a group.

    sync_replicas(state).tables[c] = 1/C Σ_c' state.tables[c']        with the same bits on every copy c

Between two calls each group of ranks trains its copy like a job of its own. So the bytes that leave a group per step do
not grow with the number of groups.
Shapes: C copies.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from funcrec.core import Problem, check, is_tracked, ravel, replace, typed
from funcrec.kernels import ops
from funcrec.mesh import Mesh, part_by_part, shard_map
from funcrec.train._reshard import mesh_problems, of_rows, sharded_problems
from funcrec.train._state import TrainState

BUCKET = 1 << 25  # elements that travel at once; a call needs room for these besides the states


@typed
def sync_replicas(
    state: TrainState, *, mesh: Mesh, slots: bool = True, greatest: Collection[str] = ("last",)
) -> TrainState:
    """Return the state with the mean of all copies in each copy of its tables.

        x'[c] = x[0] where all copies of the element are equal, else (x[0] + ... + x[C - 1]) / C

    The function is not part of the step: the training loop calls it every k steps. `fr.jit` compiles it, and may
    donate the state.

    Args:
      state: made by a `train_step` whose plan has `replicas`. Every rank passes its own state.
      slots: whether slots also become equal. If not, each copy keeps its own slots, and the state cannot be
        gathered. Gradients that wait (`optim.accumulate`) belong to the batches of a copy, and stay with that copy.
      greatest: slots that take the maximum instead of the mean, like all integer slots. Pass step numbers, such as
        `last` of `rowwise_adagrad_counter`.

    Returns:
      TrainState. All parts except tables and slots come from the old state, since these parts are equal on all ranks.

    Raises:
      TypeError: if the state is not sharded.
      ValueError: if the state was made on another mesh, or its plan has no replicas.

    Law: all copies have the same bits, on emulated and on real ranks. Rows that no copy trained keep every bit. A
      second call changes no bit. Under plain SGD with a call after every step, the tables equal, up to rounding, the
      tables of one copy that trains on all ranks.

    Cost: for each dtype two exchanges over the replica axes for every 2^25 elements of each rank's rows (and two more
      for slots of `greatest`). They send as many bytes as a ring's all-reduce. Sums use the dtype in which rows are
      summed (f32 for 16 bits). Memory holds the old tables and the new tables, and one table twice.

    Example: two copies train, each on its own batch.
      >>> import torch, funcrec as fr
      >>> mesh, plan = fr.Mesh.emulated(copy=2), fr.Plan({"item": fr.replicated()}, replicas="copy")
      >>> loss_fn = lambda p, ids: -fr.lookup(p.tables, ids, [fr.FeatureConfig("k", table="item")]).values.sum()
      >>> kind = {"sparse": fr.optim.sgd(1.0), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
      >>> step = fr.train_step(loss_fn, **kind, mesh=mesh, plan=plan)
      >>> state = step.init(fr.Params({"item": torch.zeros(3, 1)}, {}))
      >>> state, _ = step(state, fr.KeyedJaggedTensor.from_lists({"k": [[0, 2], [2]]}))
      >>> state.tables["item"].view(2, 3)
      tensor([[1., 0., 1.],
              [0., 0., 1.]])
      >>> state = fr.sync_replicas(state, mesh=mesh)
      >>> state.tables["item"].view(2, 3)
      tensor([[0.5000, 0.0000, 1.0000],
              [0.5000, 0.0000, 1.0000]])

    Source: TorchRec's DMPCollection.sync.
    """
    call = "funcrec.sync_replicas"
    check(call, sharded_problems(state))
    check(call, mesh_problems(state.tables.layout, mesh), replica_problems(state))
    axes, specs = state.tables.layout.replicas, state.tables.layout.specs()
    leaves = {("", n): (t, specs[n]) for n, t in state.tables.items()}
    if slots:
        leaves |= {(k, n): (s, specs[n]) for n, own in state.slots.items() for k, s in of_rows(own).items()}
    is_greatest = [k in greatest for k, _ in leaves]
    own_specs = [spec for _, spec in leaves.values()]
    one_rank = lambda xs: unite(xs, is_greatest, axes)
    made = shard_map(one_rank, mesh=mesh, in_specs=(own_specs,), out_specs=own_specs)([x for x, _ in leaves.values()])
    new = dict(zip(leaves, made, strict=True))
    tables = replace(state.tables, banks={n: new["", n] for n in state.tables})
    own_slots = {n: {k: new.get((k, n), s) for k, s in own.items()} for n, own in state.slots.items()}
    return replace(state, tables=tables, slots=own_slots)


def unite(xs: list[Tensor], is_greatest: list[bool], axes: tuple[str, ...]) -> list[Tensor]:
    """Return every tensor, made equal on all copies.

    Each rank folds a part of every bucket, and then all ranks gather the parts.
    """
    parts: list[list[Tensor]] = [[] for _ in xs]
    kinds = [(x.dtype, most or not x.is_floating_point()) for x, most in zip(xs, is_greatest, strict=True)]
    for kind in dict.fromkeys(kinds):
        fold = (lambda copies: copies.amax(0)) if kind[1] else mean_of
        for bucket in buckets([i for i, k in enumerate(kinds) if k == kind], xs):
            (flat,), unravel = ravel([xs[i].flatten()[at] for i, at in bucket])
            for (i, _), x in zip(bucket, unravel([part_by_part(fold, flat, axes)]), strict=True):
                parts[i].append(x)
    return [torch.cat(own).reshape(x.shape) if own else x for own, x in zip(parts, xs, strict=True)]


def buckets(at: Sequence[int], xs: Sequence[Tensor]) -> Iterator[list[tuple[int, slice]]]:
    """Yield lists of (i, slice of xs[i]) of at most BUCKET elements, which cover xs[i] for all i of `at` in turn."""
    bucket: list[tuple[int, slice]] = []
    room = BUCKET
    for i in at:
        start, size = 0, xs[i].numel()
        while start < size:
            stop = min(size, start + room)
            bucket.append((i, slice(start, stop)))
            room, start = room - (stop - start), stop
            if room == 0:
                yield bucket
                bucket, room = [], BUCKET
    if bucket:
        yield bucket


def mean_of(copies: Tensor) -> Tensor:
    """Return the mean of f[C, N], added in the order of the copies.

    Elements that are equal in all copies keep their bits.

    Where all copies are equal, each of them is the maximum. The function takes `amax` there, because it has the
    derivative of the mean.
    """
    wide = copies.to(ops.accumulation_dtype(copies.dtype))
    first, *others = wide.unbind(0)
    total, is_same = first, torch.ones_like(first, dtype=torch.bool)
    for x in others:
        total, is_same = total + x, is_same & (x == first)
    same = wide.amax(0) if is_tracked(wide) else first
    return torch.where(is_same, same, total / copies.shape[0]).to(copies.dtype)


# -- validators --------------------------------------------------------------------------------------------------


def replica_problems(state: TrainState) -> Iterator[Problem]:
    if not state.tables.layout.replicas:
        need, hint = "a plan with some", "fr.Plan(..., replicas='group')"
        yield Problem("the tables have no copies that train apart.", "a plan without `replicas`", need, hint)
