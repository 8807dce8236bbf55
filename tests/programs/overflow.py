"""Steps on a batch that exceeds the capacity of their exchanges."""

import functools

import torch

import funcrec as fr
from funcrec.core._tree import tree_map
from funcrec.testing import assert_trees_close
from programs import training
from programs.training import plan_of


def skewed(step, num_bags):
    """Return a batch whose ids are all row 0, so that under row_wise one rank gets all ids."""
    made = training.batch(step, num_bags)
    return fr.Batch(fr.core._tree.replace(made.ids, values=torch.zeros_like(made.ids.values)), made.label)


def step_of(mesh, kind, capacity, name="adam"):
    return fr.train_step(
        training.loss_fn, **training.optimizers(name), mesh=mesh, plan=plan_of(kind, mesh.shape), exact=True,
        capacity=capacity
    )  # fmt: skip


def own(batch, mesh, capacity=64):
    mine = fr.shard(batch, fr.P(mesh.axis_names), mesh=mesh)
    return mine if mesh.is_emulated else fr.Batch(mine.ids.pad_to(capacity), mine.label)


def clone(state):
    return tree_map(torch.clone, state)


def overflown(mesh, kind, wrap=lambda f: f, name="adam"):
    """Return (the state after an ordinary step, the state after a step that overflows, the overflowing step's metrics,
    the state after the same batch with enough capacity)."""
    wide, narrow = (step_of(mesh, kind, c, name) for c in (100, 1))
    before, _ = wide(wide.init(training.params()), own(training.batch(0, 8), mesh))
    after, metrics = wrap(narrow)(clone(before), own(skewed(1, 8), mesh))
    return before, after, metrics, wide(before, own(skewed(1, 8), mesh))


def real_overflown(axes, kind, compiled):
    wrap = functools.partial(fr.jit, donate=("state",)) if compiled else lambda f: f
    return overflown(fr.Mesh.distributed(**axes), kind, wrap)


def assert_unchanged(before, after, metrics, wide, kind):
    assert_trees_close(after, before)
    if kind == "replicated":  # no ids are sent, and all ids therefore fit
        return
    assert int(metrics["overflow"]) > 0
    assert bool(metrics["loss"].isnan())
    state, whole = wide
    assert int(whole["overflow"]) == 0
    assert int(whole["needed"]) == int(metrics["needed"]) > 1
    assert int(state.step) == int(before.step) + 1
