"""How fast the ranks at hand are: rows gathered, blocks exchanged; each number the slowest rank's.

bytes per second = bytes / the least of a few times
"""

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from funcrec.mesh import Mesh

ROWS, DIM, IDS, EXCHANGED, TURNS = 1 << 18, 64, 1 << 16, 8 << 20, 3


def measured(mesh: Mesh) -> dict:
    """The fields of `Hardware`, but its name."""
    device = torch.device("cpu" if mesh.is_emulated else mesh.device_mesh.device_type)
    table = torch.zeros(ROWS, DIM, device=device)
    ids = torch.randint(ROWS, (IDS,), generator=torch.Generator().manual_seed(0)).to(device)
    gather = IDS * DIM * 4 * 2 / least_s(lambda: table.index_select(0, ids), device)
    exchange = gather if mesh.is_emulated else _exchange_bytes_per_s(mesh, device)
    found = [gather, exchange]
    if not mesh.is_emulated and mesh.size > 1:
        slowest = torch.tensor(found, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MIN)
        found = slowest.tolist()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size))
    return {
        "memory_bytes": _memory_bytes(device, local),
        "memory_bytes_per_s": found[0],
        "link_bytes_per_s": found[1],
        "host_bytes_per_s": found[1],  # too much where the last axis lies on one host: `replace` corrects it
        "ranks_per_host": local,
    }


def least_s(call: Callable[[], object], device: torch.device) -> float:
    call()
    times = []
    for _ in range(TURNS):
        _wait(device)
        began = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - began)
    return max(min(times), 1e-9)


def _exchange_bytes_per_s(mesh: Mesh, device: torch.device) -> float:
    axis = mesh.axis_names[-1]
    n = mesh.shape[axis]
    if n == 1:
        return EXCHANGED / least_s(lambda: torch.zeros(EXCHANGED // 4, device=device).clone(), device)
    group = mesh.device_mesh.get_group(axis)
    sent = torch.zeros(EXCHANGED // 4 // n * n, device=device)
    got = torch.empty_like(sent)
    return sent.nbytes * (n - 1) / n / least_s(lambda: dist.all_to_all_single(got, sent, group=group), device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory_bytes(device: torch.device, ranks: int) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
