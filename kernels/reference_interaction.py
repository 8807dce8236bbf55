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
    """Return the lower triangle of [..., F, F], row after row, as [..., F (F - 1) / 2]."""
    size = square.shape[-1]
    places = [i * size + j for i in range(size) for j in range(i)]
    return square.flatten(-2).index_select(-1, torch.tensor(places, dtype=torch.int64, device=square.device))


def symmetric(lower: Tensor, size: int) -> Tensor:
    """Return [..., F, F], symmetric with zeros on the diagonal, from [..., F (F - 1) / 2].

    It only reads elements, where a scatter would add to them."""
    place = lambda i, j: max(i, j) * (max(i, j) - 1) // 2 + min(i, j)
    places = [place(i, j) if i != j else lower.shape[-1] for i in range(size) for j in range(size)]
    padded = torch.nn.functional.pad(lower, (0, 1))
    index = torch.tensor(places, dtype=torch.int64, device=lower.device)
    return padded.index_select(-1, index).unflatten(-1, (size, size))
