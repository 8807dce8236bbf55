"""Quantised rows in C++ (csrc/quantized.h, csrc/codes.h)."""

import torch
from funcrec.kernels.cpp._lookup import _features, _multipliers, _width
from funcrec.kernels.cpp._native import DTYPES, bounds, call, check, empty, fail, ints, matrix, reals, table
from funcrec.kernels.forms import CODE_BITS, check_coded, check_tables, row_bytes
from torch import Tensor

CODES = {8: 6, 4: 7, 2: 8}  # DType of csrc/abi.h
BYTES = (torch.uint8,)


def quantized_lookup(
    tables: list[Tensor],
    rows: list[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: list[int],
    num_bags: int,
    bits: list[int],
    dims: list[int],
) -> Tensor:
    """f32[B, C]: `pooled_lookup` of what the rows stand for."""
    check_tables("cpp.quantized_lookup", tables, bits, dims)
    rows, offsets = [r.contiguous() for r in rows], offsets.contiguous()
    described = [n for x, b, dim in zip(tables, bits, dims, strict=True) for n in _described(x, b, dim)]
    width = _width(tuple(features), tuple(dims), len(rows))
    numbers = _features(described, rows, offsets, features, num_bags)
    out = empty((num_bags, width), torch.float32)
    weights = _multipliers("quantized_lookup", weights, rows, features)
    numbers += (*bounds(offsets), *reals(weights), num_bags, width, DTYPES[torch.float32], out.data_ptr())
    call("quantized_lookup", numbers)
    return out


def quantized_rows(table_: Tensor, rows: Tensor, bits: int, dim: int) -> Tensor:
    """f32[N, D], zeros for rows outside the table."""
    check_coded("cpp.quantized_rows", table_, bits, dim)
    rows = rows.contiguous()
    out = empty((rows.shape[0], dim), torch.float32)
    call("quantized_rows", [*_described(table_, bits, dim), *matrix(out), *ints(rows)])
    return out


def quantize_rows(table_: Tensor, bits: int, key: Tensor | None = None) -> Tensor:
    """u8[R, S]."""
    if bits not in CODE_BITS:
        fail("quantize_rows", "there are no such codes.", f"bits={bits}", f"bits in {CODE_BITS}", "bits=8")
    if key is not None and (key.dtype, key.dim(), key.is_cpu) != (torch.int64, 0, True):
        fail(
            "quantize_rows",
            "`key` is not a key.",
            f"{key.dtype}{list(key.shape)}",
            "i64[] on cpu",
            "key=None",
            TypeError,
        )
    table_ = table_.contiguous()
    out = empty((table_.shape[0], row_bytes(bits, table_.shape[1])), torch.uint8)
    call("quantize_rows", [*table(table_), bits, 0 if key is None else key.data_ptr(), out.data_ptr()])
    return out


def _described(x: Tensor, bits: int, dim: int) -> tuple[int, int, int, int]:
    """A table, of codes or floats: pointer, dtype, R, D."""
    if bits not in CODE_BITS:
        return table(x)
    if not x.is_contiguous():
        fail("quantized_lookup", "a table is not contiguous.", x.stride(), "rows end to end", "table.contiguous()")
    return check(x, 2, BYTES), CODES[bits], x.shape[0], dim
