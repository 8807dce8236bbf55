"""Stochastic rounding of 16-bit tables: a new row is rounded up or down at random, and right on average.

    P(round up) = (x - below) / (above - below)

Small updates, which rounding to nearest would lose, then add up. The bits depend on the key, the table's name, the row
and the column alone: the same on every device, mesh and thread count.
Shapes: M rows, D dim.
"""

import torch
from torch import Tensor

from funcrec.core import is_tracked, random
from funcrec.tables import name_number

PER_HASH = 4  # columns that share the 64 bits of one hash
F16_DROPPED = 0x1FFF  # the bits of f32's fraction that f16 has not


def table_key(key: Tensor, name: str) -> Tensor:
    """A key of the table's own, i64[]."""
    return random.fold_in(key, name_number(name))


def round_stochastic(x: Tensor, dtype: torch.dtype, rows: Tensor, key: Tensor) -> Tensor:
    """f32[M, D] whose values `dtype` holds (for f32 and f64: x
    itself); row i draws the bits of row rows[i] of its table.

    Its derivative is 1, as torch has it for a cast: that of the mean over keys, which is x.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return x
    x = x.to(torch.float32)
    noise = row_bits(key, rows, x.shape[1])
    number = x.detach().view(torch.int32)
    dropped = 0xFFFF if dtype == torch.bfloat16 else F16_DROPPED
    moved = (number + (noise & dropped)) & ~dropped
    rounded = moved.view(torch.float32)
    if is_tracked(x):
        rounded = rounded.detach() + (x - x.detach())
    return torch.where(torch.isfinite(x), rounded, x).to(dtype).to(torch.float32)


def row_bits(key: Tensor, rows: Tensor, dim: int) -> Tensor:
    """i32[M, D]: 16 random bits for each element of the rows: (h >> 16 · (c mod
    4)) mod 2¹⁶, h the (r · ⌈D / 4⌉ + c // 4)-th of the key."""
    groups = -(-dim // PER_HASH)
    counter = rows[:, None].to(torch.int64) * groups + torch.arange(1, groups + 1, device=rows.device)
    hashed = random.mix((counter + key * random.GAMMA_INVERSE) * random.GAMMA)  # as in random.bits
    parts = [random.shift_right(hashed, 16 * k) & 0xFFFF for k in range(PER_HASH)]
    return torch.stack(parts, -1).flatten(1)[:, :dim].to(torch.int32)
