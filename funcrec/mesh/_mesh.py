"""Mesh: ranks in a grid with named axes. The ranks are emulated in one process, or real.

    rank (i, j, ...) of a mesh n × m × ...;    axis "data": the ranks that differ in i only

Both kinds of mesh have one type, so that a function written for named axes does not depend on the kind.
"""

import atexit
import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import set_debug_level
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import DebugLevel, PrefixStore, get_debug_level, get_node_local_rank
from torch.distributed.rendezvous import rendezvous

from funcrec.core import Count, Positive, Problem, check, fail, sure, typed
from funcrec.kernels import library
from funcrec.mesh._axes import Axis
from funcrec.mesh._paper import PaperRanks, real_group

TIMEOUT_S = 300.0
LET_GO_S = 0.25
# One entry for each group of all ranks, so that no mesh takes the groups of a destroyed group of all ranks:
# {(device, sizes, timeout): the names of the axes' groups}
GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple, list[str]]] = WeakKeyDictionary()

ambient: ContextVar[tuple["Mesh", ...]] = ContextVar("funcrec_meshes", default=())
alone: ContextVar[str] = ContextVar("funcrec_alone", default="")  # the reason why no axis of real ranks may be bound


@dataclasses.dataclass(frozen=True, repr=False)
class Mesh:
    """Ranks in a grid with named axes.

    `Mesh.emulated(data=2, model=2)` lives in this process. vmap runs a mapped function for all ranks at once; the
    function takes and returns global values. `Mesh.distributed(data=2, model=2)` is this process's view of real ranks:
    each rank passes its own shard, and gets its own shard of the result. The last axis runs fastest over the ranks.
    Inside `with mesh:`, calls without a mesh use this one.

    Example:
      >>> import torch, funcrec as fr
      >>> mesh = fr.Mesh.emulated(data=2, model=3)
      >>> mesh.size, mesh.shape, mesh.is_emulated
      (6, {'data': 2, 'model': 3}, True)
      >>> with mesh:
      ...     fr.shard_map(lambda x: fr.psum(x, "data"), in_specs=fr.P("data"),
      ...         out_specs=fr.P())(torch.tensor([1., 2.]))
      tensor([3.])

    Source: jax.sharding.Mesh; torch.distributed.device_mesh.
    """

    axes: tuple[tuple[str, int], ...]
    device_mesh: DeviceMesh | None = None

    @staticmethod
    @typed
    def emulated(**axes: Count) -> "Mesh":
        """Return an emulated mesh of any size, in this process.

        Example:
          >>> import funcrec as fr
          >>> fr.Mesh.emulated(data=8)
          Mesh.emulated(data=8)
        """
        check("funcrec.Mesh.emulated", axes_problems(axes))
        return Mesh(tuple(axes.items()))

    @staticmethod
    @typed
    def distributed(
        *,
        device: Literal["cpu", "cuda"] | None = None,
        timeout_s: Positive = TIMEOUT_S,
        debug: bool = False,
        **axes: Count,
    ) -> "Mesh":
        """Return the mesh of the ranks that torchrun started.

        Every rank calls it with the same arguments.

        Args:
          device: "cpu" (gloo) or "cuda" (NCCL, with a GPU for each rank). None is "cuda" if available, else "cpu".
            After `torch.distributed.init_process_group("gloo")` ranks on "cuda" exchange by gloo, which copies tensors
            to the host and back: several ranks may share a GPU.
          timeout_s: how long a collective waits for a missing rank before the collective raises.
          debug: whether to compare the ranks' calls before every collective. An error names the rank whose collective
            or shape differs. The comparison is slow, and does not tell a sum from a maximum.

        Raises:
          ValueError: if the sizes of the axes do not multiply to the number of ranks, or if ranks of NCCL lack GPUs.

        Example:
          >>> import funcrec as fr
          >>> fr.Mesh.distributed(data=4)  # doctest: +SKIP
          Mesh.distributed(data=4) at rank 0 of 4

        Source: torch.distributed.device_mesh.init_device_mesh.
        """
        call = "funcrec.Mesh.distributed"
        check(call, axes_problems(axes), world_problems())
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        wait = timedelta(seconds=timeout_s)
        if debug:
            check(call, debug_problems())
            set_debug_level(DebugLevel.DETAIL)
        if kind == "cuda":
            check(call, gpu_problems())
            if not (dist.is_initialized() and torch.cuda.is_initialized()):
                local = get_node_local_rank(fallback_rank=dist.get_rank() if dist.is_initialized() else 0)
                torch.cuda.set_device(local % torch.cuda.device_count())
        if not dist.is_initialized():
            dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=wait, **fresh_store())
        if dist.get_world_size() != math.prod(axes.values()):
            check(call, size_problems(axes, dist.get_world_size()))
        if dist.get_backend() == "gloo":
            atexit.unregister(_let_go)
            atexit.register(_let_go)
        return Mesh(tuple(axes.items()), _grid(kind, axes, wait))

    @property
    def shape(self) -> dict[str, int]:
        """Return {axis: its number of ranks}."""
        return dict(self.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return math.prod(n for _, n in self.axes)

    @property
    def is_emulated(self) -> bool:
        return self.device_mesh is None

    @property
    def coordinates(self) -> dict[str, int]:
        """Return {axis: this rank's place on the axis}, of a real mesh."""
        if self.device_mesh is None:
            what, hint = "an emulated mesh has no rank of its own.", "fr.axis_index(name) inside shard_map"
            fail("funcrec.Mesh.coordinates", what, got=repr(self), need="Mesh.distributed(...)", hint=hint)
        return {name: self.device_mesh.get_local_rank(name) for name in self.axis_names}

    def bound_axes(self, names: Sequence[str], device: torch.device) -> list[Axis]:
        """Return these axes of a real mesh, as a function on this rank binds them."""
        if alone.get():
            fail(
                f"funcrec.jit({alone.get()})",
                "a jitted function that exchanges with other ranks is differentiated.",
                got="requires_grad, or a grad or jvp around it, on this rank",
                need="what all ranks run alike: where nothing follows the function they run its program",
                hint="fr.jit of the derivative, such as fr.jit(torch.func.grad(f)); or f without jit", kind=TypeError,
            )  # fmt: skip
        check("funcrec.Mesh", paper_problems(self.device_mesh))
        out = []
        for name in names:
            index, group = self.coordinates[name], sure(self.device_mesh).get_group(name)
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
        if self.device_mesh is None:
            return f"Mesh.emulated({text})"
        return f"Mesh.distributed({text}) at rank {self.device_mesh.get_rank()} of {self.size}"


# This is an operator, so that no compiler folds this rank's place into the code:
# all ranks must make the same exchanges in the same order.
library.define(
    "funcrec_mesh",
    "coordinate",
    "(Tensor places, int index) -> Tensor",
    lambda places, index: places[index].clone(),
    lambda places, index: places.new_empty(()),
)


def ambient_mesh() -> Mesh | None:
    """Return the mesh of the innermost `with mesh:` of this thread; None outside of any."""
    return ambient.get()[-1] if ambient.get() else None


def fresh_store() -> dict:
    """Return the keyword arguments that a restarted rank needs for `init_process_group`.

    torchrun's store still holds the addresses of the ranks before the restart, so a restarted rank uses a new prefix.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0":
        return {}
    store, rank, world_size = next(rendezvous("env://"))
    return {"store": PrefixStore(f"restart {restarts}", store), "rank": rank, "world_size": world_size}


def _grid(kind: str, axes: dict[str, int], wait: timedelta) -> DeviceMesh:
    """Return the grid of the ranks. Grids of one shape share groups.

    A group has threads that poll, and it lives as long as the ranks. Every rank makes the same meshes in the same
    order, so all ranks find, or make, the same groups.
    """
    known, sizes = GROUPS.setdefault(sure(dist.group.WORLD), {}), tuple(axes.values())
    try:
        groups = [real_group(name) for name in known[kind, sizes, wait]]
    except (KeyError, RuntimeError, ValueError):  # the groups are not made yet, or were destroyed
        own: Any = dict.fromkeys(axes, "gloo") if kind == "cuda" and dist.get_backend() == "gloo" else None
        made = init_device_mesh(kind, sizes, mesh_dim_names=tuple(axes), backend_override=own)
        known[kind, sizes, wait] = [made.get_group(name).group_name for name in axes]
    else:
        places = torch.arange(math.prod(sizes), device="cpu").reshape(sizes)
        made = DeviceMesh.from_group(groups, kind, places, mesh_dim_names=tuple(axes))
    for name in axes:
        backend = made.get_group(name)._get_backend(torch.device(kind))
        if hasattr(backend, "_set_default_timeout"):  # the backend that compares calls (`debug`) has no such method
            backend._set_default_timeout(wait)
    return made


def _let_go() -> None:
    """Wait at the end of a process until gloo's threads have released the tensors of the last call.

    To release a tensor a thread takes Python's lock. A thread that asks for the lock after Python has shut down aborts
    the process (pybind11's gil_scoped_acquire before Python 3.14).
    """
    time.sleep(LET_GO_S)


# -- validators --------------------------------------------------------------------------------------------------


def paper_problems(ranks: object) -> Iterator[Problem]:
    if isinstance(ranks, PaperRanks) and not ranks.is_open:
        need, hint = "the call of `make` that got it", "fr.Mesh.emulated(...) or fr.Mesh.distributed(...)"
        yield Problem("the mesh of a dry run exists in no process.", "a call after the dry run", need, hint)


def axes_problems(axes: Mapping[str, int]) -> Iterator[Problem]:
    if not axes:
        yield Problem("a mesh has no axes.", "no keyword", "a size for each axis", "Mesh.emulated(data=2)")


def size_problems(axes: dict[str, int], num_ranks: int) -> Iterator[Problem]:
    got = f"{' · '.join(f'{k}={n}' for k, n in axes.items())} = {math.prod(axes.values())}; {num_ranks} ranks"
    yield Problem("the axes do not multiply to the number of ranks.", got, f"a product of {num_ranks}")


def debug_problems() -> Iterator[Problem]:
    """Report `debug` after the first group is made. Torch reads the level of debugging when it makes that group."""
    if dist.is_initialized() and get_debug_level() != DebugLevel.DETAIL:
        hint = "make the mesh first, or TORCH_DISTRIBUTED_DEBUG=DETAIL"
        yield Problem("`debug` is set too late.", "a process group made without it", "no group yet", hint, RuntimeError)


def gpu_problems() -> Iterator[Problem]:
    """Report a machine without GPUs, and ranks of NCCL that would share one."""
    num_gpus, num_ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_gpus == 0:
        yield Problem("`device` is 'cuda', and this machine has no GPU.", "0 GPUs", "a GPU", 'device="cpu"')
    elif num_ranks > num_gpus and not (dist.is_initialized() and dist.get_backend() == "gloo"):
        what, got = "ranks of NCCL would share a GPU.", f"{num_ranks} ranks and {num_gpus} GPUs on this machine"
        hint = 'torch.distributed.init_process_group("gloo") before: its ranks may share GPUs'
        yield Problem(what, got, "a GPU for each rank", hint)


def world_problems() -> Iterator[Problem]:
    """Report that there are no ranks: neither an initialized process group nor torchrun's environment."""
    if not (dist.is_available() and (dist.is_initialized() or dist.is_torchelastic_launched())):
        need, hint = "one process per rank", "torchrun --nproc-per-node N ..., or Mesh.emulated(...) in one process"
        yield Problem("there are no ranks.", "no process group, and not started by torchrun", need, hint, RuntimeError)
