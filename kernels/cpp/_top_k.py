"""Find the best rows of a table for each query, in C++ (csrc/top_k.h)."""

import torch
from funcrec.kernels.cpp._native import ABSENT, DTYPES, FLOATS, bounds, call, check, empty, ints, matrix
from funcrec.kernels.cpp._planned import OUT, ROWS, Plan, Slot, find, plan_of, ran
from funcrec.kernels.forms import CODE_BITS, row_bytes, score_dtype
from torch import Tensor


def top_k(
    queries: Tensor, items: Tensor, rows: Tensor | None, offsets: Tensor | None, k: int, bits: int = 0
) -> tuple[Tensor, Tensor]:
    """Return (scores f[B, k], rows i64[B, k]), the greatest inner products of each query.

    Rows with equal scores come by ascending row.
    """
    if rows is None and (out := planned_top_k(queries, items, k, bits)) is not None:
        return out
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


def planned_top_k(queries: Tensor, items: Tensor, k: int, bits: int) -> tuple[Tensor, Tensor] | None:
    """Return the `top_k` of f32 queries without rows to leave out, or None if a tensor is not as the plan expects."""
    if type(k) is not int:  # 2.0 and True are equal to numbers of a plan
        return None
    plan = find(_plans, (queries.shape, items.dtype, k, bits), _plan)
    if plan is None:
        return None
    scores = (empty if plan.is_large else torch.empty)(plan.shape, dtype=torch.float32)
    out = scores, torch.empty(plan.shape, dtype=torch.int64)
    return out if ran(plan, [queries, items, *out]) else None


_plans: list[Plan] = []


def _plan(shape: torch.Size, dtype: torch.dtype, k: int, bits: int) -> Plan | None:
    of_codes = bits in CODE_BITS and dtype == torch.uint8
    of_floats = not bits and dtype in FLOATS and dtype != torch.float64
    if len(shape) != 2 or not shape[1] or k < 0 or not (of_codes or of_floats):
        return None
    num_queries, dim = shape
    width = row_bytes(bits, dim) if of_codes else dim
    described = 0, DTYPES.get(dtype, -1), 0, dim, width * dtype.itemsize, bits
    array = [0, 0, DTYPES[torch.float32], num_queries, dim, dim, *described, *ABSENT, *ABSENT, k, 0, 0]
    slots = [Slot(1, ROWS, dim, torch.float32), Slot(6, ROWS, width, dtype)]
    slots += [Slot(len(array) - 2, OUT, k, torch.float32), Slot(len(array) - 1, OUT, k, torch.int64)]
    return plan_of((shape, dtype, k, bits), "top_k", array, slots, (num_queries, k))
