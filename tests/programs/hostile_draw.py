"""Random parts of generated calls of the C++ kernels: arbitrary sizes, numbers, ids and offsets. See hostile.py.

Shapes: B bags, N ids, R rows, D dim.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

F32, F64, F16, BF16, I32, I64 = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64
FLOATS = (F32, F64, F16, BF16)
MOVED = (*FLOATS, I32, I64, torch.bool, torch.int16, torch.uint8, torch.complex64)
DIMS = (0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 128, 130, 257)
SIZES = (0, 0, 1, 2, 3, 5, 9, 17, 63, 64, 65, 70)
EXTREMES = (-(2**63), 2**63 - 1, -(2**31), 2**31 - 1, 2**40, -(2**40), -1, -2)


class Result(NamedTuple):
    """One call. run(): the kernel's answer. want: the reference's answer, equal in every bit without sizes or bounds.

    sizes: the same sum over absolute values, for a sum of at most `terms` terms in `acc`. bounds: the allowed
    distance from `want`.
    """

    run: Callable[[], list[Tensor]]
    want: list[Tensor]
    sizes: list[Tensor | None] | None = None
    terms: int = 1
    acc: torch.dtype | None = None
    bounds: list[Tensor] | None = None


class Draw:
    """The random numbers of a call, and the place for the call's inputs."""

    def __init__(self, seed: int, place: Callable[[Tensor], Tensor]):
        self.random, self.generator, self.place = random.Random(seed), torch.Generator().manual_seed(seed), place
        self.is_large = self.random.random() < 0.02  # whether the call is large enough for several threads

    def one(self, *choices):
        return self.random.choice(choices)

    def size(self) -> int:
        return self.random.randint(3000, 9000) if self.is_large else self.one(*SIZES)

    def put(self, x: Tensor) -> Tensor:
        """Return x in a place where reads outside x are detected. Sometimes x is every second element of a larger
        tensor."""
        if x.dim() == 1 and x.numel() and self.random.random() < 0.1:
            return self.place(torch.stack([x, x.flip(0)], 1).flatten())[::2]
        return self.place(x)

    def noise(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=F64).to(dtype)

    def numbers(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return (self.noise(*shape, dtype=F64) * 50).to(dtype)

    def extremes(self, n: int, dtype: torch.dtype, *more: int) -> Tensor:
        fit = [x for x in (*EXTREMES, *more) if torch.iinfo(dtype).min <= x <= torch.iinfo(dtype).max]
        return torch.tensor([self.one(*fit) for _ in range(n)], dtype=I64)

    def mix(self, x: Tensor, share: float, *more: int) -> Tensor:
        """Return x with a share of its elements replaced by extreme values."""
        is_wild = torch.rand(x.shape[0], generator=self.generator) < share
        x = x.clone()
        x[is_wild] = self.extremes(int(is_wild.sum()), x.dtype, *more).to(x.dtype)
        return x

    def ids(self, n: int, num_rows: int) -> Tensor:
        x = torch.randint(0, max(num_rows, 1), (n,), generator=self.generator).to(self.one(I32, I64))
        return self.put(self.mix(x, self.one(0, 0.1, 0.9), num_rows, num_rows - 1))

    def offsets(self, num_bags: int, n: int) -> Tensor:
        """Return random boundaries of bags in a buffer of n. Half of the draws are valid, and half are arbitrary."""
        kind, wide = self.one("good", "good", "shifted", "unsorted", "falling", "wild"), self.one(I32, I64)
        if kind == "good":
            return self.put(torch.randint(0, n + 1, (num_bags + 1,), generator=self.generator).sort().values.to(wide))
        x = torch.randint(-n - 3, 2 * n + 4, (num_bags + 1,), generator=self.generator)
        x = x.sort(descending=kind == "falling").values if kind in ("shifted", "falling") else x
        return self.put(self.mix(x.to(wide), self.one(0.1, 0.6) if kind == "wild" else 0, n, n + 1))

    def table(self, dtypes=FLOATS, dims=DIMS) -> Tensor:
        return self.place(self.noise(self.one(0, 1, 2, 7, 50, 300), self.one(*dims), dtype=self.one(*dtypes)))


def bounds_of(offsets: Tensor, n: int) -> list[int]:
    """Return the boundaries of the bags for which the offsets stand, computed in a loop."""
    out, last = [], 0
    for x in offsets.tolist():
        last = max(last, min(x, n))
        out.append(last)
    return out


def padded_weights(draw: Draw, offsets: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return weights that are NaN outside of all bags."""
    bounds, w = bounds_of(offsets, n), draw.noise(n, dtype=dtype)
    w[: bounds[0]] = w[bounds[-1] :] = torch.nan
    return draw.put(w)


def wide(x):
    """Return x with every float converted to f64."""
    return tree_map(lambda y: y.double() if isinstance(y, Tensor) and y.is_floating_point() else y, x)


def size(x):
    return tree_map(lambda y: y.abs() if isinstance(y, Tensor) and y.is_floating_point() else y, wide(x))
