"""Mesh: ranks in a grid with named axes, emulated in one process or real, and what a named axis is while a function runs.

    rank (i, j, ...) of a mesh n × m × ...;    axis "data": the ranks that differ in i only

Both kinds are one value, so that a function written for named axes does not know which it runs on. Which axes are bound belongs to the
thread and the call that bound them.
"""

import atexit
import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from funcrec.core import Problem, check, describe, fail
from funcrec.kernels import library

AxisName = str | tuple[str, ...]
TIMEOUT_S = 300.0
LET_GO_S = 0.25


class Axis(NamedTuple):
    """A bound axis.

    marker: i64[], this rank's place on the axis. Under emulation it is batched at the axis's own vmap level and at no other: that is
      how a collective knows the level.
    group: the process group's name and `index` this rank's place, as a number; None under emulation.
    """

    name: str
    size: int
    marker: Tensor
    group: str | None = None
    index: int | None = None


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class P:
    """How a tensor is cut over a mesh: for each dimension an axis, a tuple of axes (the first is the major one), or None.

    Dimensions that are not named are whole; `P()` is the whole tensor on every rank.

    Example:
      >>> import funcrec as fr
      >>> fr.P("data", None), fr.P(("data", "model"))
      (P('data', None), P(('data', 'model')))

    Source: jax.sharding.PartitionSpec.
    """

    dims: tuple[tuple[str, ...], ...]

    def __init__(self, *dims: AxisName | None):
        wrong = [d for d in dims if not (d is None or isinstance(d, str) or _is_names(d))]
        if wrong:
            fail(
                "funcrec.P",
                "a dimension has no axis.",
                got=f"{wrong}",
                need="axis names, tuples of them, or None",
                hint='fr.P("data", None), fr.P(("data", "model"))',
                kind=TypeError,
            )
        named = tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in dims)
        twice = sorted({a for d in named for a in d if sum(e.count(a) for e in named) > 1})
        if twice:
            fail("funcrec.P", "an axis is named twice.", got=f"{twice} in {dims}", need="an axis in one dimension only")
        object.__setattr__(self, "dims", named)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that are named."""
        return tuple(a for d in self.dims for a in d)

    def __repr__(self) -> str:
        show = lambda d: "None" if not d else repr(d[0]) if len(d) == 1 else repr(d)
        return f"P({', '.join(map(show, self.dims))})"


ambient: ContextVar[tuple["Mesh", ...]] = ContextVar("funcrec_meshes", default=())
bound: ContextVar[dict[str, Axis]] = ContextVar("funcrec_axes", default={})  # noqa: B039 (never written to)


@dataclasses.dataclass(frozen=True, repr=False)
class Mesh:
    """Ranks in a grid with named axes.

    `Mesh.emulated(data=2, model=2)` lives in this process: a mapped function is run for all ranks at once by vmap, and takes and
    gives global values. `Mesh.distributed(data=2, model=2)` is this process's view of real ranks: each passes and gets its own shard.
    The last axis runs fastest over the ranks. `with mesh:` makes it the mesh of calls that name none.

    Example:
      >>> import torch, funcrec as fr
      >>> mesh = fr.Mesh.emulated(data=2, model=3)
      >>> mesh.size, mesh.shape, mesh.is_emulated
      (6, {'data': 2, 'model': 3}, True)
      >>> with mesh:
      ...     fr.shard_map(lambda x: fr.psum(x, "data"), in_specs=fr.P("data"), out_specs=fr.P())(torch.tensor([1., 2.]))
      tensor([3.])

    Source: jax.sharding.Mesh; torch.distributed.device_mesh.
    """

    axes: tuple[tuple[str, int], ...]
    device_mesh: DeviceMesh | None = None

    @staticmethod
    def emulated(**axes: int) -> "Mesh":
        """A mesh of any size in this process.

        Example:
          >>> import funcrec as fr
          >>> fr.Mesh.emulated(data=8)
          Mesh.emulated(data=8)
        """
        check("funcrec.Mesh.emulated", axes_problems(axes))
        return Mesh(tuple(axes.items()))

    @staticmethod
    def distributed(
        *, device: str | None = None, timeout_s: float = TIMEOUT_S, debug: bool = False, **axes: int
    ) -> "Mesh":
        """The mesh of the ranks that torchrun started; every rank makes it, with the same arguments.

        Args:
          device: "cpu" (gloo) or "cuda" (NCCL); None for CUDA where there is some.
          timeout_s: how long a collective waits for a rank that does not come, before it raises.
          debug: compare what the ranks call before every collective, and name the rank that calls another one or with another shape; slow.
            A sum and a maximum are one collective to it.

        Raises: ValueError when the axes do not multiply to the number of ranks.

        Example:
          >>> import funcrec as fr
          >>> fr.Mesh.distributed(data=4)  # doctest: +SKIP
          Mesh.distributed(data=4) at rank 0 of 4

        Source: torch.distributed.device_mesh.init_device_mesh.
        """
        call = "funcrec.Mesh.distributed"
        check(call, axes_problems(axes), world_problems(axes))
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        wait = timedelta(seconds=timeout_s)
        if debug:
            check(call, debug_problems())
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        if not dist.is_initialized():
            if kind == "cuda":
                torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
            dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=wait, **fresh_store())
        if dist.get_world_size() != math.prod(axes.values()):
            check(call, size_problems(axes, dist.get_world_size()))
        if kind == "cpu":
            atexit.unregister(_let_go)
            atexit.register(_let_go)
        made = init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
        for name in axes:
            dist.distributed_c10d._set_pg_timeout(wait, made.get_group(name))
        return Mesh(tuple(axes.items()), made)

    @property
    def shape(self) -> dict[str, int]:
        """{axis: its number of ranks}."""
        return dict(self.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(n for _, n in self.axes)

    @property
    def is_emulated(self) -> bool:
        return self.device_mesh is None

    @property
    def coordinates(self) -> dict[str, int]:
        """{axis: this rank's place on it}; real meshes only."""
        if self.device_mesh is None:
            hint = "fr.axis_index(name) inside shard_map"
            fail(
                "funcrec.Mesh.coordinates",
                "an emulated mesh has no rank of its own.",
                got=repr(self),
                need="Mesh.distributed(...)",
                hint=hint,
            )
        return {name: self.device_mesh.get_local_rank(name) for name in self.axis_names}

    def bound_axes(self, names: Sequence[str], device: torch.device) -> list[Axis]:
        """The axes of a real mesh, as a function that runs on this rank sees them."""
        out = []
        for name in names:
            index, group = self.coordinates[name], self.device_mesh.get_group(name)
            marker = torch.ops.funcrec_mesh.coordinate(torch.arange(self.shape[name], device=device), index)
            out.append(Axis(name, self.shape[name], marker, group.group_name, index))
        return out

    def __enter__(self) -> "Mesh":
        ambient.set((*ambient.get(), self))
        return self

    def __exit__(self, *exc: object) -> None:
        ambient.set(ambient.get()[:-1])

    def __repr__(self) -> str:
        text = ", ".join(f"{name}={n}" for name, n in self.axes)
        if self.is_emulated:
            return f"Mesh.emulated({text})"
        return f"Mesh.distributed({text}) at rank {dist.get_rank()} of {self.size}"


# An operator, so that no compiler folds this rank's place into the code: all ranks must make the same exchanges in the same order.
library.define(
    "funcrec_mesh",
    "coordinate",
    "(Tensor places, int index) -> Tensor",
    lambda places, index: places[index].clone(),
    lambda places, index: places.new_empty(()),
)


def ambient_mesh() -> Mesh | None:
    """The mesh of the innermost `with mesh:` of this thread."""
    return ambient.get()[-1] if ambient.get() else None


@contextlib.contextmanager
def bind(axes: Sequence[Axis]) -> Iterator[None]:
    """The axes are bound while the body runs, besides those that are bound already."""
    before = bound.get()
    try:
        bound.set({**before, **{a.name: a for a in axes}})
        yield
    finally:
        bound.set(before)


def bound_names() -> tuple[str, ...]:
    """The axes that are bound here, outermost first."""
    return tuple(bound.get())


def bound_axis(call: str, name: str) -> Axis:
    """The axis of that name."""
    axes = bound.get()
    if not isinstance(name, str):
        fail(call, "`axis_name` is not a name.", got=describe(name), need="the name of an axis", kind=TypeError)
    if name not in axes:
        got = f"{name!r}; bound here: {list(axes)}"
        fail(
            call,
            "an axis is not bound.",
            got=got,
            need="an axis of the mesh of an enclosing shard_map",
            hint="shard_map(f, mesh=..., ...)",
        )
    return axes[name]


def bound_axes(call: str, names: AxisName) -> list[Axis]:
    """The axes of a name or of a tuple of names, the major one first."""
    names = (names,) if isinstance(names, str) else names
    if not _is_names(names) or not names or len(set(names)) < len(names):
        fail(
            call,
            "`axis_name` names no axes.",
            got=f"{names!r}",
            need="a name, or a tuple of distinct names",
            kind=TypeError,
        )
    return [bound_axis(call, n) for n in names]


def _is_names(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(a, str) for a in x)


def fresh_store() -> dict:
    """What a restarted rank tells `init_process_group`: in torchrun's store are the addresses of the ranks before it, too."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0":
        return {}
    store, rank, world_size = next(dist.rendezvous("env://"))
    return {"store": dist.PrefixStore(f"restart {restarts}", store), "rank": rank, "world_size": world_size}


def _let_go() -> None:
    """Time, at a process's end, for gloo's threads to let go of the last call's tensors: that takes Python's lock, and a thread that asks for
    it when Python is gone ends the process with an abort (pybind11's gil_scoped_acquire before Python 3.14)."""
    time.sleep(LET_GO_S)


# -- validators --------------------------------------------------------------------------------------------------


def axes_problems(axes: dict[str, int]) -> Iterator[Problem]:
    if not axes:
        yield Problem("a mesh has no axes.", "no keyword", "a size for each axis", "Mesh.emulated(data=2)")
    for name, n in axes.items():
        if not isinstance(n, int) or isinstance(n, bool):
            yield Problem(f"axis {name!r} has no size.", describe(n), "an int >= 1", f"{name}=2", TypeError)
        elif n < 1:
            yield Problem(f"axis {name!r} has no ranks.", f"{n}", "a size >= 1", f"{name}=2")


def size_problems(axes: dict[str, int], num_ranks: int) -> Iterator[Problem]:
    got = f"{' · '.join(f'{k}={n}' for k, n in axes.items())} = {math.prod(axes.values())}; {num_ranks} ranks"
    yield Problem("the axes do not multiply to the number of ranks.", got, f"a product of {num_ranks}")


def debug_problems() -> Iterator[Problem]:
    """The level is read when a group is made."""
    if dist.is_initialized() and dist.get_debug_level() != dist.DebugLevel.DETAIL:
        hint = "make the mesh first, or TORCH_DISTRIBUTED_DEBUG=DETAIL"
        yield Problem("`debug` comes too late.", "a process group made without it", "no group yet", hint, RuntimeError)


def world_problems(axes: dict[str, int]) -> Iterator[Problem]:
    """There must be something to make a mesh of: an initialized process group, or torchrun's environment."""
    if not (dist.is_available() and (dist.is_initialized() or dist.is_torchelastic_launched())):
        hint = "torchrun --nproc-per-node N ..., or Mesh.emulated(...) in one process"
        yield Problem(
            "there are no ranks.",
            "no process group, and not started by torchrun",
            "one process per rank",
            hint,
            RuntimeError,
        )
