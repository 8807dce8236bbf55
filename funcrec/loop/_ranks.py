"""Questions of a loop on ranks to its mesh: which process writes, which rows are its own, and whether all must end.

All ranks run the same loop. Their decisions follow from values that are equal on all of them, so that a rank waits for
another only in an exchange.
"""

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor

from funcrec.core import Device, typed
from funcrec.mesh import Mesh, P, Ranks, say, shard, unshard

STEPS_PER_QUESTION = 16  # how often ranks ask whether any was interrupted: each time costs an exchange and a wait


@typed
def is_chief(mesh: Mesh | None) -> bool:
    """Return whether this process prints and writes: it is the only one, emulates all ranks, or is the first rank.

    Example:
      >>> import funcrec as fr
      >>> fr.loop.is_chief(None), fr.loop.is_chief(fr.Mesh.emulated(data=2))
      (True, True)
    """
    return mesh is None or mesh.is_emulated or not any(mesh.coordinates.values())


@typed
def num_processes(mesh: Mesh | None) -> int:
    """Return the number of processes of a mesh; 1 for an emulated mesh, and for None.

    Example:
      >>> import funcrec as fr
      >>> fr.loop.num_processes(fr.Mesh.emulated(data=2))
      1
    """
    return 1 if mesh is None or mesh.is_emulated else mesh.size


@typed
def own_part(x: Tensor, mesh: Mesh | None) -> Tensor:
    """Return this process's rows of x[N, ...]; all of them if it is the only process.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.loop.own_part(torch.arange(4), None)
      tensor([0, 1, 2, 3])
    """
    return x if num_processes(mesh) == 1 else shard(x, P(mesh.axis_names), mesh=mesh)


@typed
def all_parts(x: Tensor, mesh: Mesh | None) -> Tensor:
    """Return x[N, ...] with all processes' rows, in the order of the ranks; each process has as many.

    Law: all_parts(own_part(x)) = x.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.loop.all_parts(torch.arange(4), None)
      tensor([0, 1, 2, 3])
    """
    return x if num_processes(mesh) == 1 else unshard(x, P(mesh.axis_names), mesh=mesh)


@typed
def agreed(stop: Callable[[], int], mesh: Mesh | None, device: Device = "cpu") -> Callable[[], int]:
    """Return `stop` of any rank, at the same call on all of them; the largest number if they differ.

    Ranks exchange their answers at every 16th call; all must make the calls, between steps.

    Example:
      >>> import funcrec as fr
      >>> fr.loop.agreed(lambda: 15, None)()
      15
    """
    answer, ask = 0, questions([stop], Ranks.of(mesh, device))

    def once() -> int:
        nonlocal answer
        answer = answer or ask()[0]
        return answer

    return stop if num_processes(mesh) == 1 else once


def questions(asked: Sequence[Callable[[], int]], ranks: Ranks) -> Callable[[], list[int]]:
    """Return a function that gives the largest answer of any rank to each question, by one `say` at every 16th call.

    At the other calls it returns zeros.
    """
    calls, every = itertools.count(1), 1 if ranks.size == 1 else STEPS_PER_QUESTION

    def ask() -> list[int]:
        if next(calls) % every:
            return [0] * len(asked)
        return [max(of_all) for of_all in zip(*say([answer() for answer in asked], ranks), strict=True)]

    return ask
