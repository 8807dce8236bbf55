"""What a loop on ranks asks of its mesh: who writes, which rows are this process's, and whether all are to end.

All ranks run the same loop. What they decide follows from values that are the same on all of them, so that nobody waits
for anybody but in an exchange.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from funcrec.core import Device, typed
from funcrec.mesh import Mesh, P, pmax, shard, shard_map, unshard

STEPS_PER_QUESTION = 16  # whether anyone was interrupted: an exchange and a wait


@typed
def is_chief(mesh: Mesh | None) -> bool:
    """Whether this process prints and writes: it is alone, emulates all ranks, or is the first of them.

    Example:
      >>> import funcrec as fr
      >>> fr.loop.is_chief(None), fr.loop.is_chief(fr.Mesh.emulated(data=2))
      (True, True)
    """
    return mesh is None or mesh.is_emulated or not any(mesh.coordinates.values())


@typed
def num_processes(mesh: Mesh | None) -> int:
    """The processes of a mesh; 1 for an emulated one, and for none.

    Example:
      >>> import funcrec as fr
      >>> fr.loop.num_processes(fr.Mesh.emulated(data=2))
      1
    """
    return 1 if mesh is None or mesh.is_emulated else mesh.size


@typed
def own_part(x: Tensor, mesh: Mesh | None) -> Tensor:
    """This process's rows of x[N, ...]; all of them where it is the only one.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.loop.own_part(torch.arange(4), None)
      tensor([0, 1, 2, 3])
    """
    return x if num_processes(mesh) == 1 else shard(x, P(mesh.axis_names), mesh=mesh)


@typed
def all_parts(x: Tensor, mesh: Mesh | None) -> Tensor:
    """x[N, ...] of all processes' rows, in the order of the ranks; each has as many.

    Law: all_parts(own_part(x)) = x.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.loop.all_parts(torch.arange(4), None)
      tensor([0, 1, 2, 3])
    """
    return x if num_processes(mesh) == 1 else unshard(x, P(mesh.axis_names), mesh=mesh)


def of_any(numbers: Sequence[int], mesh: Mesh | None, device: torch.device | str = "cpu") -> list[int]:
    """The largest of the processes' numbers, each for itself, in an exchange that all must make."""
    if num_processes(mesh) == 1:
        return list(numbers)
    largest = shard_map(lambda x: pmax(x, mesh.axis_names), mesh=mesh, in_specs=P(), out_specs=P(), check=False)
    return largest(torch.tensor(list(numbers), device=device)).tolist()


@typed
def agreed(stop: Callable[[], int], mesh: Mesh | None, device: Device = "cpu") -> Callable[[], int]:
    """`stop` of any rank, at the same call on all of them; the largest number where they differ.

    Ranks ask each other at every 16th call, which all must make: between steps.

    Example:
      >>> import funcrec as fr
      >>> fr.loop.agreed(lambda: 15, None)()
      15
    """
    answer, ask = 0, questions([stop], mesh, device)

    def once() -> int:
        nonlocal answer
        answer = answer or ask()[0]
        return answer

    return stop if num_processes(mesh) == 1 else once


def questions(
    asked: Sequence[Callable[[], int]], mesh: Mesh | None, device: torch.device | str
) -> Callable[[], list[int]]:
    """What the functions say on any rank, in one exchange at every 16th call; zeros at the others."""
    calls, every = itertools.count(1), 1 if num_processes(mesh) == 1 else STEPS_PER_QUESTION
    none = [0] * len(asked)
    return lambda: none if next(calls) % every else of_any([ask() for ask in asked], mesh, device)
