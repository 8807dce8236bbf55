"""The best rows of a table for queries, in C++ (csrc/top_k.h)."""

import torch
from funcrec.kernels.cpp._native import ABSENT, DTYPES, FLOATS, bounds, call, check, empty, ints, matrix
from funcrec.kernels.forms import score_dtype
from torch import Tensor


def top_k(
    queries: Tensor, items: Tensor, rows: Tensor | None, offsets: Tensor | None, k: int, bits: int = 0
) -> tuple[Tensor, Tensor]:
    """(scores f[B, k], rows i64[B, k]): the greatest inner products of each query, of equal ones the lower row."""
    dtype = score_dtype(queries, items, bits)
    queries, items = queries.to(dtype).contiguous(), items.contiguous()
    at = check(items, 2, (torch.uint8,) if bits else FLOATS)
    left_out = (*ABSENT, *ABSENT)
    if rows is not None and offsets is not None:
        rows, offsets = rows.contiguous(), offsets.contiguous()
        left_out = (*ints(rows), *bounds(offsets))
    num_queries, dim = queries.shape
    scores, found = empty((num_queries, k), dtype), torch.empty((num_queries, k), dtype=torch.int64)
    described = at, DTYPES.get(items.dtype, -1), items.shape[0], dim, items.shape[1] * items.itemsize, bits
    call("top_k", [*matrix(queries), *described, *left_out, k, scores.data_ptr(), found.data_ptr()])
    return scores, found
