"""Questions that a loop on ranks asks its mesh: which process writes, which rows are its own, whether all must end.

All ranks run the same loop. Decisions follow from values that are equal on all ranks, so that a rank waits for
another rank only in an exchange.
"""

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor

from funcrec.core import Device, sure, typed
from funcrec.mesh import Mesh, P, Ranks, say, shard, unshard

STEPS_PER_QUESTION = 16  # ranks ask at every 16th step whether a rank was interrupted


@typed
def is_chief(mesh: Mesh | None) -> bool:
    """Return whether this process prints and writes.

    A process does so if it is the only process, emulates all ranks, or is the first rank.

    Example:
      >>> import funcrec as fr
      >>> fr.loop.is_chief(None), fr.loop.is_chief(fr.Mesh.emulated(data=2))
      (True, True)
    """
    return mesh is None or mesh.is_emulated or not any(mesh.coordinates.values())


@typed
def num_processes(mesh: Mesh | None) -> int:
    """Return the number of processes of a mesh; 1 for an emulated mesh or None.

    Example:
      >>> import funcrec as fr
      >>> fr.loop.num_processes(fr.Mesh.emulated(data=2))
      1
    """
    return 1 if mesh is None or mesh.is_emulated else mesh.size


@typed
def own_part(x: Tensor, mesh: Mesh | None) -> Tensor:
    """Return the rows of x[N, ...] that belong to this process.

    The only process has all rows.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.loop.own_part(torch.arange(4), None)
      tensor([0, 1, 2, 3])
    """
    return x if num_processes(mesh) == 1 else shard(x, P(sure(mesh).axis_names), mesh=mesh)


@typed
def all_parts(x: Tensor, mesh: Mesh | None) -> Tensor:
    """Return x[N, ...] with the rows of all processes, in the order of the ranks.

    All processes have equally many rows.

    Law: all_parts(own_part(x)) = x.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.loop.all_parts(torch.arange(4), None)
      tensor([0, 1, 2, 3])
    """
    return x if num_processes(mesh) == 1 else unshard(x, P(sure(mesh).axis_names), mesh=mesh)


@typed
def agreed(stop: Callable[[], int], mesh: Mesh | None, device: Device = "cpu") -> Callable[[], int]:
    """Return a function () -> the largest answer of `stop` of any rank, at the same call on all ranks.

    Ranks exchange their answers at every 16th call. All ranks must make the calls, between steps.

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
    """Return a function () -> the largest answer of any rank to each question.

    Ranks exchange answers in one `say` at every 16th call. At other calls the function returns zeros.
    """
    calls, every = itertools.count(1), 1 if ranks.size == 1 else STEPS_PER_QUESTION

    def ask() -> list[int]:
        if next(calls) % every:
            return [0] * len(asked)
        return [max(of_all) for of_all in zip(*say([answer() for answer in asked], ranks), strict=True)]

    return ask
