"""The inner products of all pairs of vectors in plain torch, and the transpose of this map.

Shapes: B examples, F vectors in all parts, D dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def dot_interaction(x: Sequence[Tensor]) -> Tensor:
    whole = _joined(x)
    return lower(whole @ whole.transpose(-2, -1))


def dot_interaction_transpose(d: Tensor, x: Sequence[Tensor]) -> list[Tensor]:
    whole = _joined(x)
    d_x = symmetric(d, whole.shape[-2]) @ whole
    return list(d_x.split([part.shape[-2] for part in x], -2)) if len(x) > 1 else [d_x]


def _joined(x: Sequence[Tensor]) -> Tensor:
    return torch.cat([*x], -2) if len(x) > 1 else x[0]


def lower(square: Tensor) -> Tensor:
    """Return the lower triangle of [..., F, F], row after row, as [..., F (F - 1) / 2].

    Places are computed: torch.export allows no constant tensors in what takes an operator's place."""
    size = square.shape[-1]
    k, rows = (torch.arange(n, device=square.device) for n in (size * (size - 1) // 2, size))
    row = (k[:, None] >= rows * (rows - 1) // 2).sum(1) - 1  # row i begins at i (i - 1) / 2; row 0 has no number
    return square.flatten(-2).index_select(-1, row * size + k - row * (row - 1) // 2)


def symmetric(lower: Tensor, size: int) -> Tensor:
    """Return [..., F, F], symmetric with zeros on the diagonal, from [..., F (F - 1) / 2].

    It only reads elements, where a scatter would add to them."""
    i, j = (torch.arange(size, device=lower.device).view(s) for s in ((-1, 1), (1, -1)))
    high, low = torch.maximum(i, j), torch.minimum(i, j)
    place = torch.where(i == j, lower.shape[-1], high * (high - 1) // 2 + low)
    padded = torch.nn.functional.pad(lower, (0, 1))
    return padded.index_select(-1, place.flatten()).unflatten(-1, (size, size))
