"""The layout of a state that is at hand, for the states of a checkpoint.

load(path, like=state) is laid out as `state` is, whatever plan saved it
"""

from collections.abc import Iterator
from typing import Any

import torch.utils._pytree as torch_tree

from funcrec.checkpoint._place import Target, axes_of
from funcrec.core import Problem
from funcrec.mesh import Mesh
from funcrec.sharding import ShardedTables
from funcrec.train import TrainState


def sharded_in(tree: Any) -> TrainState | None:
    """Return the first TrainState of a tree whose tables are sharded, or None."""
    leaves = torch_tree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, TrainState))
    return next((x for x in leaves if isinstance(x, TrainState) and isinstance(x.tables, ShardedTables)), None)


def emulated_mesh_of(state: TrainState) -> Mesh | None:
    """Return the emulated mesh of a state whose banks have the rows of all ranks; None if they have those of one."""
    layout, banks = state.tables.layout, state.tables.banks
    is_whole = all(banks[b.name].shape[0] == b.rows * b.num_ranks * b.num_copies for b in layout.banks)
    return Mesh.emulated(**dict(layout.mesh_shape)) if is_whole else None


def target_like(state: TrainState, mesh: Mesh) -> Target:
    """Return the layout of a sharded state."""
    return Target(None, mesh, None, False, None, False, axes_of(state), like=state)


# -- validators --------------------------------------------------------------------------------------------------


def layout_problems(state: TrainState, mesh: Mesh | None, mmap: bool) -> Iterator[Problem]:
    """Report a mesh that is not that of the state, and memory of a file, which has no parts."""
    shape = state.tables.layout.mesh_shape
    if mesh is None:
        got, hint = "a state of real ranks in `like`, mesh=None", "mesh=mesh, that of the step"
        yield Problem("`mesh` is missing.", got, "the mesh of the state", hint)
    elif mesh.axes != shape:
        hint = "plan=..., for another layout than that of `like`"
        yield Problem("`mesh` is not that of `like`.", f"{dict(mesh.axes)}", f"{dict(shape)}", hint)
    if mmap:
        yield Problem("`mmap` requires whole tensors.", "mmap=True, a sharded `like`", "one of them", "mmap=False")
