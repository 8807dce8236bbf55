"""What a step cannot do with its arguments, and with a state."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Problem, describe, paths, tree_leaves
from funcrec.mesh import Mesh
from funcrec.sharding import Plan
from funcrec.tables import layout_in
from funcrec.train._state import TrainState


def sharded_problems(state: TrainState) -> Iterator[Problem]:
    if layout_in(state.tables) is None:
        need, hint = "a ShardedTables", "fr.reshard(state, plan, mesh=mesh, sparse=sparse), or step.init(params)"
        yield Problem("`state.tables` are not sharded.", describe(state.tables), need, hint, TypeError)


def place_problems(tables: Any, mesh: Mesh) -> Iterator[Problem]:
    """Report tables that lie on another mesh than the step's. A state under another plan is trained where it lies."""
    if tables.layout.mesh_shape != mesh.axes:
        need, hint = f"axes {dict(mesh.axes)}", "fr.reshard(state, plan, mesh=mesh, sparse=sparse, from_mesh=...)"
        yield Problem("`state` lies on another mesh.", f"axes {dict(tables.layout.mesh_shape)}", need, hint)


def mesh_problems(mesh: Mesh | None, plan: Plan | None, batch_axes: Sequence[str] | None) -> Iterator[Problem]:
    if (mesh is None) != (plan is None):
        missing, there = ("plan", "mesh") if plan is None else ("mesh", "plan")
        hint = 'plan=fr.Plan({"item": fr.row_wise("model")})' if plan is None else "mesh=fr.Mesh.emulated(model=2)"
        yield Problem(f"`{missing}` is missing.", f"`{there}` alone", "both, or neither", hint, TypeError)
    elif mesh is not None and [a for a in batch_axes or () if a not in mesh.axis_names]:
        yield Problem("`batch_axes` are not the mesh's.", f"{batch_axes}", f"among {list(mesh.axis_names)}")


def grad_problems(grad: Callable | None, micro_batches: int) -> Iterator[Problem]:
    if grad is not None and micro_batches > 1:
        got, hint = f"grad= and micro_batches={micro_batches}", "fr.private_grads(..., chunk_size=...)"
        yield Problem("`grad` differentiates the whole batch.", got, "micro_batches=1", hint, TypeError)


def norm_problems(max_norm: Any, plan: Plan | None) -> Iterator[Problem]:
    if max_norm is not None and plan is not None and plan.replicas:
        got, hint = f"max_norm= and replicas={plan.replicas}", "sparse=fr.optim.clip(...), dense=fr.optim.clip(...)"
        what = "groups of ranks have gradients of their own, and no common norm."
        yield Problem(what, got, "`max_norm`, or a plan without replicas", hint, TypeError)


def invariant_problems(mesh: Any, plan: Any, batch_axes: Any, dedup: bool, codec: Any, grad: Any) -> Iterator[Problem]:
    """Report what has no bits of one process on ranks."""
    if mesh is None:
        return
    if plan.replicas:
        what, need = "groups of ranks train copies of their own.", "a plan without replicas"
        yield Problem(what, f"invariant=True and replicas={plan.replicas}", need)
    if batch_axes is not None and tuple(batch_axes) != mesh.axis_names:
        what, need = "ranks read the same examples, or examples in another order.", f"batch_axes={mesh.axis_names}"
        yield Problem(what, f"invariant=True and batch_axes={tuple(batch_axes)}", need, "batch_axes=None")
    if dedup or codec is not None:
        got = f"dedup={dedup}, codec={codec}"
        yield Problem("ranks round what they send.", f"invariant=True and {got}", "dedup=False, codec=None")
    if grad is not None:
        need, hint = "invariant=False, or no mesh", "grad=None"
        yield Problem("`grad` has no fixed order on ranks.", "invariant=True, grad= and mesh=", need, hint)


def rounded_problems(dense: Any, mesh: Mesh | None, micro_batches: int) -> Iterator[Problem]:
    """Report dense parameters of 16 bits, of which each rank and each micro-batch rounds gradients of its own."""
    few = (torch.bfloat16, torch.float16)
    narrow = [(path, x) for path, x in paths(dense) if isinstance(x, Tensor) and x.dtype in few]
    if narrow and (micro_batches > 1 or (mesh is not None and mesh.size > 1)):
        path, x = narrow[0]
        what, got = "parts of the batch round gradients of 16 bits.", f"invariant=True and `dense{path}` {describe(x)}"
        yield Problem(what, got, "dense parameters of f32 or f64", "x.float(); the loss may cast it", TypeError)


def is_stats(x: Any) -> bool:
    """Return whether x holds the statistics of a batch norm.

    `init_stats` or `train_apply` made them, or they are among the buffers of a module.
    """
    ends_so = lambda k: isinstance(k, str) and k.split(".")[-1] in ("running_mean", "running_var")
    return isinstance(x, dict) and (x.keys() == {"mean", "var"} or any(map(ends_so, x)))


def merge_problems(dense: Any, merge: Any) -> Iterator[Problem]:
    """Report running statistics among the dense parameters of a step without `merge`.

    Such statistics get no gradient, so the step would never update them.
    """
    if merge is None and any(map(is_stats, tree_leaves(dense, is_leaf=is_stats))):
        yield Problem(
            "`merge` is missing: `dense` holds running statistics, which no optimizer moves.",
            "merge=None and a dict of `mean` and `var` (or `running_mean`) in `dense`",
            "merge(dense, aux) -> dense with the statistics that the loss gave",
            "has_aux=True, merge=fr.models.merge_stats; merge=lambda dense, aux: dense to keep them as they are",
        )
