"""Twins: process groups of the same ranks, for the exchanges of another thread.

Collectives of a group pair by their order, so all collectives of a group must come from one thread. A second thread
exchanges values over groups of its own.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from funcrec.core import sure
from funcrec.mesh._mesh import Mesh
from funcrec.mesh.processes._together import Ranks


class Twins(NamedTuple):
    """names: {group of an axis: the name of its twin}. ranks: all ranks over a gloo group, for bytes on the host."""

    names: dict[str, str]
    ranks: Ranks


def twins_of(mesh: Mesh) -> Twins:
    """Return new twins of the groups of a mesh, which live as long as the process.

    All ranks make them in one order: by axis, then `world`.
    """
    names = {}
    for axis in mesh.axis_names:
        group = sure(mesh.device_mesh).get_group(axis)
        names[group.group_name] = _twin(group, dist.get_backend(group)).group_name
    return Twins(names, Ranks.of_group(_twin(sure(dist.group.WORLD), "gloo")))


def _twin(group: dist.ProcessGroup, backend: str) -> dist.ProcessGroup:
    kind = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    wait = group._get_backend(kind).options._timeout
    ranks = dist.get_process_group_ranks(group)
    return cast(Any, dist.new_group(ranks, timeout=wait, backend=backend, use_local_synchronization=True))
