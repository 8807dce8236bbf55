"""A step's exchanges, counted where it really runs: on gloo ranks, as they are called, and on an emulated mesh."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import funcrec as fr
from funcrec.core import fast_flatten, leaf_paths
from funcrec.mesh import _exchange, group_of
from programs import training

BAGS, ROOM = 2, 64


def step_of(mesh, plan, how):
    return fr.train_step(training.loss_fn, **training.optimizers("adam"), mesh=mesh, plan=plan, **how)


def batch_of(num_ranks):
    """Return the batch of all ranks, and a batch of the form that each rank has."""
    whole = training.batch(0, BAGS * num_ranks)
    return whole, fr.Batch(whole.ids[:BAGS].unpad().pad_to(ROOM), whole.label[:BAGS])


class Counted(TorchDispatchMode):
    """Notes (operator, bytes for other ranks) of every collective that a rank calls."""

    def __init__(self, place):
        super().__init__()
        self.place, self.found = place, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2]
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            x, *how, group = args
            n = group_of(group).size()
            if name == "all_to_all_single":  # gloo sends every rank the rows that the splits say
                rows = sum(many for r, many in enumerate(how[1]) if r != self.place[group])
                sent = rows * (x.nbytes // max(1, x.shape[0]))
            else:
                assert name == "all_reduce"
                sent = 2 * x.nbytes * (n - 1) // n
            self.found.append((name, group, sent))
        return func(*args, **(kwargs or {}))


def counted_on_ranks(axes, plan, how):
    """Return [(operator, axis, bytes that leave this rank)] of a step's program, as it runs on gloo."""
    mesh = fr.Mesh.distributed(**axes)
    state = step_of(mesh, plan, how).init(training.params())
    mine = fr.shard(batch_of(mesh.size)[0], fr.P(mesh.axis_names), mesh=mesh)
    mine = fr.Batch(mine.ids.unpad().pad_to(ROOM), mine.label)
    program = fr.jit(step_of(mesh, plan, how), donate=("state",)).lower(state, mine)
    leaves, structure = fast_flatten((state, mine))
    paths = leaf_paths(structure, ("state", "batch"))
    named = {paths[i][1]: x for i, x in enumerate(leaves) if i in paths}
    places = program.graph.graph.find_nodes(op="placeholder")
    given = [named[path] for path, _ in zip(program.reads, places, strict=False)]
    axis_of = {a.group: a for a in mesh.bound_axes(mesh.axis_names, torch.device("cpu"))}
    with Counted({name: a.index for name, a in axis_of.items()}) as seen:
        torch.fx.Interpreter(program.graph).run(*given)
    return [(kind, axis_of[group].name, sent) for kind, group, sent in seen.found]


def counted_in_emulation(axes, plan, how):
    """Return [(kind of collective, ranks on its axis, bytes of a rank's operand)] of a step, staged for all ranks."""
    mesh, found, emulated = fr.Mesh.emulated(**axes), [], _exchange._emulated

    def noted(call, size, xs, dims):
        # other axes may lie before and after a rank's operand: their vmap levels are inside or outside of this one
        found.extend(
            (call.kind, size, (x if d is None else x.select(d, 0)).nbytes) for x, d in zip(xs, dims, strict=True)
        )
        return emulated(call, size, xs, dims)

    step = step_of(mesh, plan, how)
    whole = fr.Batch(*(getattr(batch_of(mesh.size)[0], k) for k in ("ids", "label")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_exchange, "_emulated", noted)
        fr.jit(step).lower(step.init(training.params()), fr.Batch(whole.ids.unpad().pad_to(ROOM), whole.label))
    return found
