"""Measures memory bandwidth in the same run. Other figures are given as shares of this bandwidth.

    copy           y[:] = x, both too large for a cache; counts bytes read and bytes written
    gather         out[i] = table[row_i], random rows of a large table; counts bytes of rows read and of out written
    gather_sorted  the gather with ascending rows, so that pages and lines come in order

The copy is the ceiling. The gathers are torch.index_select, which has the speed of a plain loop over rows. A better
loop may be faster.
"""

import statistics

import torch
from measure import digits, interleave, wait_for

SIZES = {"cpu": 2**28, "cuda": 2**31}  # bytes of a buffer
GATHERED = 2**25  # bytes of rows in one gather
TINY = 2**20
ROUNDS = 9


def measure(dim: int, dtype: torch.dtype, setting) -> dict[str, float]:
    """Return {copy_gb_per_s, gather_gb_per_s, gather_sorted_gb_per_s: medians}."""
    device = setting.device
    size = TINY if setting.tiny else SIZES[torch.device(device).type]
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    row_bytes = dim * dtype.itemsize
    table = source[: size // row_bytes * row_bytes // 4].view(dtype).view(-1, dim)
    count = min(GATHERED, size) // row_bytes
    rows = torch.randint(0, len(table), (count,), device=device)
    ordered, out = rows.sort().values, torch.empty(count, dim, dtype=dtype, device=device)
    cases = {
        "copy": lambda: target.copy_(source),
        "gather": lambda: torch.index_select(table, 0, rows, out=out),
        "gather_sorted": lambda: torch.index_select(table, 0, ordered, out=out),
    }
    moved = {"copy": 2 * size, "gather": 2 * count * row_bytes, "gather_sorted": 2 * count * row_bytes}
    times = interleave(cases, rounds=ROUNDS, wait=wait_for(device))
    return {f"{name}_gb_per_s": digits(moved[name] / statistics.median(t) / 1e9) for name, t in times.items()}


def run(dim: int, setting) -> dict:
    """Return the figures of this file's own case, the three speeds for f32 rows of `dim`."""
    return {"shape": {"dim": dim}, "law": "green", **measure(dim, torch.float32, setting)}


CASES = {f"dim{dim}": dim for dim in (16, 64, 128)}
QUICK = ("dim64",)
