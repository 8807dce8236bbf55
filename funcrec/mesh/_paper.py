"""A mesh of ranks that do not exist: programs for it can be staged, and never run.

    with on_paper(axes, rank, backend) as mesh:    jit(step).lower(...) is that rank's program

Its groups have names and sizes, and no process. All functions that ask for the group of a collective ask here.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, cast

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from funcrec.mesh._axes import coordinates

Backend = Literal["gloo", "nccl"]


class PaperGroup(NamedTuple):
    """The ranks of one axis: a name, how many they are, this rank's place among them, and who carries their bytes."""

    group_name: str
    num_ranks: int
    place: int
    backend: Backend

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.place


class PaperRanks(NamedTuple):
    """What a mesh asks of its DeviceMesh, for the view of one rank."""

    number: int
    groups: dict[str, PaperGroup]
    device_type: str = "cpu"

    @property
    def is_open(self) -> bool:
        """Return whether the context of `on_paper` is open, in which these groups are known."""
        return all(groups.get().get(g.group_name) is g for g in self.groups.values())

    def get_rank(self) -> int:
        return self.number

    def get_local_rank(self, axis: str) -> int:
        return self.groups[axis].place

    def get_group(self, axis: str) -> PaperGroup:
        return self.groups[axis]


groups: ContextVar[dict[str, PaperGroup]] = ContextVar("funcrec_paper", default={})  # noqa: B039 (never written to)


@contextlib.contextmanager
def on_paper(axes: Mapping[str, int], rank: int, backend: Backend) -> Iterator[PaperRanks]:
    """Return a context with the DeviceMesh of a rank of these axes. Its groups are known while the context is open."""
    at = coordinates(rank, list(axes), axes)
    made = {a: PaperGroup(f"paper {a}", n, at[a], backend) for a, n in axes.items()}
    before = groups.get()
    try:
        groups.set({g.group_name: g for g in made.values()})
        yield PaperRanks(rank, made)
    finally:
        groups.set(before)


def group_of(name: str) -> Any:
    """Return the group with this name: a process group, or one on paper."""
    found = groups.get().get(name)
    return real_group(name) if found is None else found


def real_group(name: str | None) -> dist.ProcessGroup:
    """Return the process group with this name."""
    return _resolve_process_group(cast(Any, name))


def backend_of(name: str) -> str:
    """Return who carries the bytes of the group with this name, such as "gloo"."""
    found = group_of(name)
    return found.backend if isinstance(found, PaperGroup) else dist.get_backend(found)
