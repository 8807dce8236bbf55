"""Host functions that the kernels share: launching, integers on the device, tiles, errors.

A tile is `rows` × `columns` numbers that one program holds; columns is a power of two.
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)  # the setting at the decoration of this package's kernels
DTYPES = {
    torch.float32: tl.float32, torch.float64: tl.float64, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    torch.int32: tl.int32, torch.int64: tl.int64,
}  # fmt: skip
TILE = 1024  # numbers per program: 8 per thread, two loads of 16 bytes in flight
TILE_ROWS_MAX = 128
BLOCK = 512  # lanes of a program in kernels over positions
PACKED = 64  # integers per launch of `pack`, with two arguments of 4 bytes for each integer
HALF = 2**29 - 1


class Tile(NamedTuple):
    rows: int
    columns: int
    num_warps: int

    def over(self, num_rows: int) -> int:
        """Return the number of programs that cover `num_rows` rows."""
        return cdiv(num_rows, self.rows)


def tile(dim: int, *, whole_rows: bool = False) -> Tile:
    """Return a tile for rows of `dim` numbers. With `whole_rows`, one program holds all columns."""
    columns = cast(int, triton.next_power_of_2(max(dim, 1)))
    columns = columns if whole_rows else min(columns, TILE)
    return Tile(max(1, min(TILE // columns, TILE_ROWS_MAX)), columns, 4 if columns <= 2 * TILE else 8)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def steps(n: int) -> int:
    """Return the number of steps of a binary search among n elements."""
    return max(n, 0).bit_length()


def launch(kernel, grid: tuple[int, ...], *args, **options) -> None:
    """Run `kernel` on the device of its first tensor. An empty grid runs nothing.

    The compiler does not contract products and sums to fused multiply-adds, so the bits are those of plain arithmetic.
    This costs no time, because memory is the limit.
    """
    if 0 in grid:
        return
    device = next(a.device for a in args if isinstance(a, Tensor))
    if device.type == "cpu" and not INTERPRETED:
        fail("the tensors are on the CPU.", "device cpu", "tensors on a CUDA device", "TRITON_INTERPRET=1, for tests")
    place = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with place:
        kernel[grid](*args, enable_fp_fusion=False, **options)


def pack(values: Sequence[int], device: torch.device) -> Tensor:
    """Return a tensor of values in [0, 2⁵⁸), at least i64[n], on `device`.

    A copy is five times faster than a launch. A CUDA graph cannot hold a copy from the host.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return carried(values, device)
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def carried(values: Sequence[int], device: torch.device) -> Tensor:
    """Return the tensor of `pack`, whose values travel as arguments of a kernel."""
    values = [*values, *[0] * (-len(values) % PACKED)]
    out = torch.empty(len(values), dtype=torch.int64, device=device)
    for at in range(0, len(values), PACKED):
        part = values[at : at + PACKED]
        lows, highs = (tuple(4 * (v >> by & HALF) + 3 for v in part) for by in (0, 29))
        launch(_pack, (1,), out[at:], lows, highs, num_warps=1)
    return out


@triton.jit
def _pack(out, lows, highs):
    # Arguments are 4 · half + 3, because triton would recompile for each pattern of ones and of multiples of 16.
    for i in tl.static_range(len(lows)):  # pyright: ignore[reportGeneralTypeIssues]  # Triton unrolls it
        low, high = tl.full((), lows[i], tl.int64) >> 2, tl.full((), highs[i], tl.int64) >> 2
        tl.store(out + i, high << 29 | low)


def alignment(numbers: Sequence[int]) -> int:
    """Return 16 if every number (an address or a stride in bytes) is a multiple of 16, else 1. 16 allows wide loads."""
    return 16 if all(n % 16 == 0 for n in numbers) else 1


def with_rows(d: Tensor, dtype: torch.dtype) -> Tensor:
    """Return d in `dtype`, with contiguous columns."""
    d = d.to(dtype)
    return d if d.stride(1) == 1 or d.shape[1] <= 1 else d.contiguous()


def contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.contiguous() for t in tensors]


def check_tables(call: str, tables: Sequence[Tensor]) -> None:
    for i, t in enumerate(tables):
        if not t.is_contiguous():
            got = f"shape {list(t.shape)}, strides {list(t.stride())}"
            fail(f"table {i} is not contiguous.", got, "a contiguous tensor", "table.contiguous()", call)


def fail(what: str, got: str, need: str, hint: str, call: str = "funcrec.kernels.triton") -> None:
    raise ValueError(f"{call}: {what}\n  got   {got}\n  need  {need}\n  try   {hint}")
