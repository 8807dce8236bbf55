"""What a loop on ranks asks of its mesh: who writes, which rows are this process's, and whether all are to end.

All ranks run the same loop. What they decide follows from values that are the same on all of them, so that nobody waits
for anybody but in an exchange.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from funcrec.mesh import Mesh, P, pmax, shard, shard_map, unshard

STEPS_PER_QUESTION = 16  # whether anyone was interrupted: an exchange and a wait


def is_chief(mesh: Mesh | None) -> bool:
    """Whether this process prints and writes: it is alone, emulates all ranks, or is the first of them.

    Example:
      >>> import funcrec as fr
      >>> fr.loop.is_chief(None), fr.loop.is_chief(fr.Mesh.emulated(data=2))
      (True, True)
    """
    return mesh is None or mesh.is_emulated or not any(mesh.coordinates.values())


def num_processes(mesh: Mesh | None) -> int:
    """The processes of a mesh; 1 for an emulated one, and for none.

    Example:
      >>> import funcrec as fr
      >>> fr.loop.num_processes(fr.Mesh.emulated(data=2))
      1
    """
    return 1 if mesh is None or mesh.is_emulated else mesh.size


def own_part(x: Tensor, mesh: Mesh | None) -> Tensor:
    """This process's rows of x[N, ...]; all of them where it is the only one.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.loop.own_part(torch.arange(4), None)
      tensor([0, 1, 2, 3])
    """
    return x if num_processes(mesh) == 1 else shard(x, P(mesh.axis_names), mesh=mesh)


def all_parts(x: Tensor, mesh: Mesh | None) -> Tensor:
    """x[N, ...] of all processes' rows, in the order of the ranks; each has as many.

    Law: all_parts(own_part(x)) = x.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.loop.all_parts(torch.arange(4), None)
      tensor([0, 1, 2, 3])
    """
    return x if num_processes(mesh) == 1 else unshard(x, P(mesh.axis_names), mesh=mesh)


def of_any(number: int, mesh: Mesh | None, device: torch.device | str = "cpu") -> int:
    """The largest of the processes' numbers, an exchange that all must make."""
    if num_processes(mesh) == 1:
        return number
    largest = shard_map(lambda x: pmax(x, mesh.axis_names), mesh=mesh, in_specs=P(), out_specs=P(), check=False)
    return int(largest(torch.tensor(int(number), device=device)))


def agreed(stop: Callable[[], int], mesh: Mesh | None, device: torch.device | str = "cpu") -> Callable[[], int]:
    """`stop` of any rank, at the same call on all of them; the largest number where they differ.

    Ranks ask each other at every 16th call, which all must make: between steps.

    Example:
      >>> import funcrec as fr
      >>> fr.loop.agreed(lambda: 15, None)()
      15
    """
    if num_processes(mesh) == 1:
        return stop
    calls, answer = 0, 0

    def ask() -> int:
        nonlocal calls, answer
        calls += 1
        if not answer and calls % STEPS_PER_QUESTION == 0:
            answer = of_any(stop(), mesh, device)
        return answer

    return ask
