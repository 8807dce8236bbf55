"""Find the best rows of a table for each query, in plain torch.

    score[b, r] = Σ_d queries[b, d] · items[r, d]        d ascending, every product and sum rounded

`top_k` chooses rows block by block, by score and then by row number. The choice has no derivative. Then `top_k`
computes the scores of the chosen rows once more, and these scores have every derivative.
Shapes: B queries, N rows, D dim, L rows left out.
"""

import torch
from funcrec.kernels.forms import score_dtype
from funcrec.kernels.reference_jagged import ascending, place_among
from funcrec.kernels.reference_quantized import quantized_rows
from torch import Tensor

BLOCK = 4096  # rows of a block


def top_k(
    queries: Tensor, items: Tensor, rows: Tensor | None, offsets: Tensor | None, k: int, bits: int = 0
) -> tuple[Tensor, Tensor]:
    dtype = score_dtype(queries, items, bits)
    queries, (num_queries, dim) = queries.to(dtype), queries.shape
    best = queries.new_empty((num_queries, 0)).detach(), torch.empty((0,), dtype=torch.int64, device=queries.device)
    best = best[0], best[1].expand(num_queries, 0)
    for begin in range(0, items.shape[0], BLOCK):
        block = _read(items[begin : begin + BLOCK].detach(), bits, dim).to(dtype)
        scores = _inner(queries.detach()[:, None], block)
        allowed = scores > -torch.inf  # This is False for NaN, too.
        if rows is not None and offsets is not None:
            allowed = allowed & ~_left_out(rows, offsets, begin, block.shape[0])
        number = torch.arange(begin, begin + block.shape[0], device=queries.device).expand(scores.shape)
        scores = torch.cat([best[0], torch.where(allowed, scores, -torch.inf)], 1)
        number = torch.cat([best[1], torch.where(allowed, number, -1)], 1)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        best = scores[:, :k], number.gather(1, order[:, :k])
    found = torch.nn.functional.pad(best[1], (0, k - best[1].shape[1]), value=-1)
    if not items.shape[0]:
        return torch.where(found >= 0, 0, queries.nan_to_num(0, 0, 0).sum(1, keepdim=True) * 0 - torch.inf), found
    chosen = items.index_select(0, found.clamp(0).flatten())
    scores = _inner(queries[:, None], _read(chosen, bits, dim).to(dtype).unflatten(0, (num_queries, k)))
    return torch.where(found >= 0, scores, -torch.inf), found


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """Return Σ_d x[..., d] · y[..., d], added term by term, because torch's own sums may use any order."""
    out = x.new_zeros(torch.broadcast_shapes(x.shape, y.shape)[:-1])
    for d in range(x.shape[-1]):
        out = out + x[..., d] * y[..., d]
    return out


def _read(items: Tensor, bits: int, dim: int) -> Tensor:
    if not bits:
        return items
    return quantized_rows(items, torch.arange(items.shape[0], device=items.device), bits, dim)


def _left_out(rows: Tensor, offsets: Tensor, begin: int, size: int) -> Tensor:
    """Return a mask b[B, size] of the rows that each bag holds, among the `size` rows from `begin` on."""
    bounds, num_bags = ascending(offsets).clamp(0, rows.shape[0]).long(), offsets.shape[0] - 1
    bag = place_among(bounds, torch.arange(rows.shape[0], device=rows.device)) - 1
    inside = (bag >= 0) & (bag < num_bags) & (rows >= begin) & (rows < begin + size)
    place = torch.where(inside, bag.clamp(0) * size + (rows.long() - begin), num_bags * size)
    marks = torch.zeros(num_bags * size + 1, dtype=torch.int64, device=rows.device).scatter_add(
        0, place, torch.ones_like(place)
    )
    return marks[:-1].unflatten(0, (num_bags, size)) > 0
