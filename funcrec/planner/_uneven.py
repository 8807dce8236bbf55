"""Ranks that differ in memory or speed, as one kind of hardware and a slowness of each rank.

    seconds of a rank's lookups and updates = slowness · (those of the fastest rank's memory)

All other numbers are those of the worst rank, because every rank waits at an exchange, and a bank takes the same memory
on all ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from funcrec.core import Problem
from funcrec.mesh import coordinates, rank_at
from funcrec.planner._hardware import Hardware

LEAST = ("memory_bytes", "link_bytes_per_s", "host_bytes_per_s", "disk_bytes", "disk_records_per_s")
MOST = ("link_latency_s", "host_latency_s", "launch_s")


def evened(
    ranks: Sequence[Hardware], mesh: Mapping[str, int], replicas: Sequence[str]
) -> tuple[Hardware, tuple[float, ...]]:
    """Return (hardware of all ranks, the slowness of each rank of a copy). The slowness is () for even ranks.

    Copies that train apart have one placement, so the slowest of the ranks at one place counts.
    """
    worst = {n: min(getattr(h, n) for h in ranks) for n in LEAST} | {n: max(getattr(h, n) for h in ranks) for n in MOST}
    fastest = max(h.memory_bytes_per_s for h in ranks)
    name = "+".join(dict.fromkeys(h.name for h in ranks))
    made = Hardware(name, memory_bytes_per_s=fastest, ranks_per_host=ranks[0].ranks_per_host, **worst)
    own = {a: n for a, n in mesh.items() if a not in replicas}
    slowness = [1.0] * prod(own.values())
    for r, h in enumerate(ranks):
        place = rank_at(coordinates(r, list(mesh), mesh), tuple(own), mesh)
        slowness[place] = max(slowness[place], fastest / h.memory_bytes_per_s)
    return made, tuple(slowness) if max(slowness) > 1 else ()


# -- validators --------------------------------------------------------------------------------------------------


def rank_problems(ranks: Sequence[Hardware], mesh: Mapping[str, int]) -> Iterator[Problem]:
    """Report hardware that is not one for each rank, hosts of other sizes, and a disk of some ranks only."""
    if len(ranks) != prod(mesh.values()):
        got, need = f"{len(ranks)}", f"{prod(mesh.values())}: {dict(mesh)}"
        yield Problem(
            "`hardware` has not one entry for each rank.", got, need, "hardware=[...] * ranks, or one Hardware"
        )
    for name in ("ranks_per_host", "disk_bytes", "disk_records_per_s") if ranks else ():
        own = [getattr(h, name) for h in ranks]
        if len(set(own)) > 1 and (name == "ranks_per_host" or not all(own)):
            need = "one number for all ranks" if name == "ranks_per_host" else "a disk of every rank, or of none"
            yield Problem(f"`hardware` differs in {name}.", f"{own[:8]}", need)
