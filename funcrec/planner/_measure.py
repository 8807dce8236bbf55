"""Measures the speeds of ranks: looks up a table, groups gradients by row, and exchanges blocks.

The slowest rank counts.

bytes per second = bytes, as `_costs` counts them, / the least of a few times;   latency = the least of a few times
"""

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from funcrec.core import sure
from funcrec.jagged import KeyedJaggedTensor
from funcrec.mesh import Mesh, Ranks, say
from funcrec.optim import rowwise_adagrad
from funcrec.planner._costs import F32_BYTES, SORT_PASSES
from funcrec.planner._hardware import CUDA_LAUNCH_S
from funcrec.tables import FeatureConfig, TableConfig, lookup, lookup_transpose

ROWS, DIM, IDS, BAGS, EXCHANGED, TURNS = 1 << 18, 64, 1 << 16, 1 << 13, 8 << 20, 15


def measured(mesh: Mesh) -> dict:
    """Return {field of `Hardware`: its value} for all fields except `name`."""
    device = torch.device("cpu" if mesh.device_mesh is None else mesh.device_mesh.device_type)
    latency, per_byte = (0.0, memory_s_per_byte(device)) if mesh.size == 1 or mesh.is_emulated else link(mesh, device)
    found = [memory_s_per_byte(device), per_byte, latency, launch_s(device)]
    if not mesh.is_emulated and mesh.size > 1:
        found = [max(of_all) for of_all in zip(*say(found, Ranks.of(mesh)), strict=True)]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size))
    return {
        "memory_bytes": _memory_bytes(device, local),
        "memory_bytes_per_s": 1 / found[0],
        "link_bytes_per_s": 1 / found[1],
        "host_bytes_per_s": 1 / found[1],  # too large if the last axis lies on one host: correct it with `replace`
        "ranks_per_host": local,
        "link_latency_s": found[2],
        "host_latency_s": found[2],
        "launch_s": found[3],
    }


def memory_s_per_byte(device: torch.device) -> float:
    """Return the seconds per byte of memory: (seconds of a lookup and a coalesce) / (bytes of both).

    It leaves out the rest of an update, which reads and writes the rows, because here an update would copy the table.
    """
    weights, ids, tables, features = _table(ROWS, IDS, BAGS, device)
    grads = lookup_transpose(lookup(weights, ids, features), ids, features, tables)["t"]
    distinct = int(grads.coalesce().count)
    spent = least_s(lambda: lookup(weights, ids, features), device) + least_s(grads.coalesce, device)
    read = IDS * (DIM * F32_BYTES + 8) + BAGS * DIM * F32_BYTES
    gathered = IDS * (DIM * F32_BYTES + SORT_PASSES * 2 * 8) + distinct * DIM * F32_BYTES
    return spent / (read + gathered)


def launch_s(device: torch.device) -> float:
    """Return the seconds of a lookup of one id, of its transpose and of an update."""
    if device.type == "cuda":
        return CUDA_LAUNCH_S
    weights, ids, tables, features = _table(2, 1, 1, device)
    sparse = rowwise_adagrad(lr=0.1)
    slots, d = sparse.init(weights), lookup(weights, ids, features)
    grads = lookup_transpose(d, ids, features, tables)
    looked = least_s(lambda: lookup(weights, ids, features), device)
    return looked + least_s(lambda: sparse.update(grads, slots, weights, step=0), device)


def _table(rows: int, num_ids: int, bags: int, device: torch.device) -> tuple:
    tables, features = (TableConfig("t", rows, DIM),), (FeatureConfig("f", table="t"),)
    drawn = torch.randint(rows, (num_ids,), generator=torch.Generator().manual_seed(0)).to(device)
    offsets = torch.arange(0, num_ids + 1, num_ids // bags, device=device)
    ids = KeyedJaggedTensor(drawn, offsets, keys=("f",))
    return {"t": torch.ones(rows, DIM, device=device)}, ids, tables, features


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


def link(mesh: Mesh, device: torch.device) -> tuple[float, float]:
    """Return (seconds to exchange one number, seconds per further byte)."""
    axis = mesh.axis_names[-1]
    n = mesh.shape[axis]

    def exchange_s(size: int) -> float:
        if n == 1:
            return least_s(lambda: torch.zeros(size, device=device).clone(), device)
        group, sent = sure(mesh.device_mesh).get_group(axis), torch.zeros(size, device=device)
        got = torch.empty_like(sent)
        return least_s(lambda: dist.all_to_all_single(got, sent, group=group), device)

    size = EXCHANGED // F32_BYTES // n * n
    latency, whole = exchange_s(n), exchange_s(size)
    return latency, max(whole - latency, 1e-9) / (size * F32_BYTES * max(n - 1, 1) / n)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory_bytes(device: torch.device, ranks: int) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
