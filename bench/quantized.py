"""Measures lookups of quantised tables in one call: funcrec's and FBGEMM's int_nbit, on rows with the same bytes.

    ratio = time(FBGEMM) / time(funcrec), medians of interleaved calls, in CPU time of one thread

"fbgemm" reads a plain buffer, as FBGEMM's own tables do. "fbgemm, 2 MiB pages" reads a buffer like funcrec's.
"""

import itertools
import statistics
import time
from typing import NamedTuple

import bandwidth
import torch
from contest import OURS, Setting, Traffic
from funcrec.kernels import memory, ops
from funcrec.kernels.forms import row_bytes
from measure import digits, interleave, ratios, spread

WEIGHTS_TYPES = {8: 2, 4: 3, 2: 4}  # FBGEMM's codes for the types
HOST = 3  # FBGEMM's code for tables in host memory
ALIGNMENT = 128  # bytes, of the first row of a table


class CodesCase(NamedTuple):
    bits: int
    dim: int
    num_bags: int
    ids_per_bag: int
    ids: str = "int64"
    num_tables: int = 26
    num_rows: int = 100_000


def rows_of(case: CodesCase) -> torch.Tensor:
    """Return random codes of numbers between -0.5 and 0.5, u8[R, S]."""
    size = row_bytes(case.bits, case.dim)
    rows = torch.randint(0, 256, (case.num_rows, size), dtype=torch.uint8)
    rows[:, :4] = torch.tensor([1 / (2**case.bits - 1), -0.5], dtype=torch.float16).view(torch.uint8)
    return rows


def ours(case: CodesCase, rows: torch.Tensor):
    n, b, dim = case.num_tables, case.num_bags, case.dim
    tables = [memory.empty_table(tuple(rows.shape), dtype=torch.uint8).copy_(rows) for _ in range(n)]
    features = [ops.Feature(t, 0, t * b, 0, False, False, t * dim) for t in range(n)]
    how = features, b, [case.bits] * n, [dim] * n
    return lambda ids, offsets: ops.quantized_lookup(tables, [ids], offsets, None, *how)


def fbgemm(case: CodesCase, rows: torch.Tensor, empty):
    import fbgemm_gpu  # noqa: F401 (registers the operators)

    n, dim, kind = case.num_tables, case.dim, WEIGHTS_TYPES[case.bits]
    size = -(-rows.numel() // ALIGNMENT) * ALIGNMENT
    buffer = empty((n * size,), dtype=torch.uint8)
    buffer.view(n, size)[:, : rows.numel()] = rows.flatten()
    ints = lambda *x: torch.tensor(x, dtype=torch.int32)
    where = (buffer, buffer[:0], ints(*[HOST] * n), torch.arange(n) * size, ints(*[kind] * n).to(torch.uint8))
    most = [dim if kind == k else 0 for k in (4, 3, 2, 1, 0)]
    look = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function
    how = (*where, torch.arange(n + 1, dtype=torch.int32) * dim, n * dim, *most)
    return lambda ids, offsets: look(*how, ids, offsets, 0, None, 0, row_alignment=1)


def run(case: CodesCase, setting: Setting) -> dict:
    case = case._replace(num_rows=1000) if setting.tiny else case
    rows, dtype = rows_of(case), getattr(torch, case.ids)
    total = case.num_tables * case.num_bags
    offsets = (torch.arange(total + 1) * case.ids_per_bag).to(dtype)
    batches = [torch.randint(0, case.num_rows, (total * case.ids_per_bag,)).to(dtype) for _ in range(8)]
    calls = {OURS: ours(case, rows)}
    try:
        calls |= {"fbgemm": fbgemm(case, rows, torch.empty)}
        calls |= {"fbgemm, 2 MiB pages": fbgemm(case, rows, memory.empty_table)}
    except ImportError as error:
        return {
            "shape": case._asdict(),
            "absent": {"fbgemm": str(error).splitlines()[0]},
            "law": "red",
            "red": ["alone"],
        }
    want = calls[OURS](batches[0], offsets)
    red = [n for n, call in calls.items() if not torch.allclose(call(batches[0], offsets), want, atol=1e-4, rtol=1e-4)]
    if red:
        return {"shape": case._asdict(), "law": "red", "red": red}
    turns = {name: itertools.cycle(batches) for name in calls}
    next_of = lambda name, call: lambda: call(next(turns[name]), offsets)
    clock = time.thread_time if setting.threads == 1 else time.perf_counter
    times = interleave({n: next_of(n, c) for n, c in calls.items()}, rounds=2 * setting.rounds, clock=clock)
    traffic = Traffic(batches[0].shape[0] * rows.shape[1] + want.nbytes, rows.shape[1], torch.uint8)
    limits = bandwidth.measure(traffic.dim, traffic.dtype, setting)
    speeds = {n: digits(traffic.num_bytes / statistics.median(t) / 1e9) for n, t in times.items()}
    return {
        "shape": case._asdict(),
        "law": "green",
        "judged_by": sorted(set(calls) - {OURS}),
        "rounds": 2 * setting.rounds,
        "ms": {n: spread(t, 1e3) for n, t in times.items()},
        "ratio": {n: spread(ratios(t, times[OURS])) for n, t in times.items() if n != OURS},
        "gb_per_s": speeds,
        **limits,
        "share_of_gather": digits(speeds[OURS] / limits["gather_gb_per_s"]),
    }


SHAPES = {"d64_l1": (64, 512, 1), "d64_l20": (64, 512, 20), "d128_l1": (128, 64, 1), "d128_l20": (128, 64, 20)}
ONE_ID = {
    "d64_b1_l1": (64, 1, 1),
    "d64_b64_l1": (64, 64, 1),
    "d64_b4096_l1": (64, 4096, 1),
    "d128_b512_l1": (128, 512, 1),
}
CASES = {
    f"int{bits}_{name}{'' if ids == 'int64' else '_i32'}": CodesCase(bits, *shape, ids)
    for bits in (8, 4, 2)
    for name, shape in SHAPES.items()
    for ids in ("int64", "int32")
} | {f"int{bits}_{name}": CodesCase(bits, *shape) for bits in (8, 4) for name, shape in ONE_ID.items()}
QUICK = ("int8_d64_l20", "int4_d64_l20")
