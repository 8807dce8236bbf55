"""Stochastic rounding of 16-bit tables: a new row is rounded up or down at random, so that the mean is exact.

    P(round up) = (x - below) / (above - below)

So small updates add up, which rounding to the nearest would lose. The bits depend only on the key, the name of the
table, the row and the column. They are the same on every device and mesh, for every plan and number of threads. On a
mesh, `RowGrads.origin` tells an optimizer from which table each row comes, and for a vocabulary, which id it has.
Shapes: M rows, D dim, T tables, S segments of rows.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from funcrec.core import is_tracked, random
from funcrec.kernels.reference_jagged import place_among
from funcrec.tables import BEHIND, PER_WORD, RowGrads, origin_of

F16_DROPPED = 0x1FFF  # the bits of f32's fraction that f16 lacks


def draws_of(key: Tensor, grads: Mapping[str, RowGrads], tables: Mapping[str, Tensor]) -> Tensor:
    """Return i64[T, S + 1, 4]. From it `ops.fused_update` computes the random bits for the rows of each table."""
    plain = [[origin_of(n, tables[n].shape[1]), BEHIND] for n in grads]
    made = torch.tensor(plain, dtype=torch.int64, device=key.device)
    if any(g.origin is not None for g in grads.values()):
        own = [x if g.origin is None else g.origin for x, g in zip(made, grads.values(), strict=True)]
        most, behind = max(map(len, own)), made[:1, 1]
        made = torch.stack([x if len(x) == most else torch.cat([x, behind.expand(most - len(x), -1)]) for x in own])
    number, words_before, *rest = (x.contiguous() for x in made.unbind(-1))
    return torch.stack([random.fold_in(key, number) + random.GAMMA * words_before, *rest], -1)


def round_stochastic(x: Tensor, dtype: torch.dtype, rows: Tensor, draws: Tensor) -> Tensor:
    """Return f32[M, D] with values that `dtype` holds. For f32 and f64, return x itself.

    Row i is rounded by the random bits of row rows[i]. `draws` is from `draws_of`, for this table. The derivative
    is 1, as torch defines it for a cast: the mean over keys is x.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return x
    x = x.to(torch.float32)
    noise = row_bits(draws, rows, x.shape[1])
    number = x.detach().view(torch.int32)
    dropped = 0xFFFF if dtype == torch.bfloat16 else F16_DROPPED
    moved = (number + (noise & dropped)) & ~dropped
    rounded = moved.view(torch.float32)
    if is_tracked(x):
        rounded = rounded.detach() + (x - x.detach())
    return torch.where(torch.isfinite(x), rounded, x).to(dtype).to(torch.float32)


def row_bits(draws: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Return i32[M, D]: 16 random bits for each element of the rows, (h >> 16 · (c mod 4)) mod 2¹⁶.

    c is the column plus the phase. h is number r · words + c // 4 of the random words of the key."""
    rows = rows.to(torch.int64)
    if draws.shape[0] == 2:  # one segment has all rows
        own = draws[:1]
    else:
        own = draws[(place_among(draws[:, 1].contiguous(), rows.contiguous()) - 1).clamp(min=0)]
    key, _, phase, words = (x[:, None] for x in own.unbind(-1))
    most = -(-(dim + PER_WORD - 1) // PER_WORD)
    counter = rows[:, None] * words + torch.arange(1, most + 1, device=rows.device)
    hashed = random.mix((counter + key * random.GAMMA_INVERSE) * random.GAMMA)  # the formula of random.bits
    parts = torch.stack([random.shift_right(hashed, 16 * k) & 0xFFFF for k in range(PER_WORD)], -1).flatten(1)
    column = (phase + torch.arange(dim, device=rows.device)).expand(rows.shape[0], dim)
    return parts.gather(1, column).to(torch.int32)
