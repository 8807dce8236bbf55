"""Twins: process groups of the same ranks, for exchanges of another thread.

Collectives of a group pair by their order, so one group's must all come from one thread: what a second thread exchanges
goes over groups of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from funcrec.mesh._mesh import Mesh


class Twins(NamedTuple):
    """names: {an axis's group: its twin's name}. world: all ranks, on their hosts."""

    names: dict[str, str]
    world: dist.ProcessGroup


def twins_of(mesh: Mesh) -> Twins:
    """Made by all ranks in one order: axis by axis, then all of them; kept for as long as the process."""
    names = {}
    for axis in mesh.axis_names:
        group = mesh.device_mesh.get_group(axis)
        names[group.group_name] = _twin(group, dist.get_backend(group)).group_name
    return Twins(names, _twin(dist.group.WORLD, "gloo"))


def _twin(group: dist.ProcessGroup, backend: str) -> dist.ProcessGroup:
    kind = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    wait = group._get_backend(kind).options._timeout
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=wait, backend=backend, use_local_synchronization=True)


def tell(world: dist.ProcessGroup, own: Sequence[int]) -> list[list[int]]:
    """What each rank tells: some numbers, as many on all of them."""
    mine = torch.tensor(own, dtype=torch.int64)
    got = [torch.empty_like(mine) for _ in range(dist.get_world_size(world))]
    dist.all_gather(got, mine, group=world)
    return [x.tolist() for x in got]
