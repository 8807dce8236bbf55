"""Operations on quantised rows in C++ (csrc/quantized.h, csrc/codes.h)."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from funcrec.kernels.cpp._lookup import F32, INTS_PER_FEATURE, feature_width, pool
from funcrec.kernels.cpp._native import ABSENT, _dtype, _is_cpu, call, check, empty, fail, ints, matrix, table
from funcrec.kernels.cpp._planned import INTS, OUT, ROWS, Plan, Slot, find, plan_of, ran
from funcrec.kernels.forms import CODE_BITS, check_coded, check_tables, row_bytes
from funcrec.kernels.memory import empty_table
from torch import Tensor

CODES = {8: 6, 4: 7, 2: 8}  # {bits of a code: DType of csrc/abi.h}
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
    """Return the `pooled_lookup` of the numbers that the rows encode, f32[B, C]."""
    if weights is None:
        out = planned_lookup(tables, rows, offsets, features, num_bags, bits, dims)
        if out is not None:
            return out
    return pool("quantized_lookup", _described(tables, bits, dims), rows, offsets, weights, features, num_bags)


def planned_lookup(
    tables: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Tensor,
    features: Sequence,
    num_bags: int,
    bits: Sequence[int],
    dims: Sequence[int],
) -> Tensor | None:
    """Return the `quantized_lookup` for features without weights, in tables of codes only.

    Return None if a tensor is not as the plan expects. features: records, or the seven numbers of each record, end to
    end.
    """
    if type(num_bags) is not int:  # 2.0 and True are equal to numbers of a plan
        return None
    plan = find(_plans, (len(tables), len(rows), num_bags, features, bits, dims), _plan)
    if plan is None:
        return None
    out = (empty if plan.is_large else torch.empty)(plan.shape, dtype=torch.float32)
    return out if ran(plan, [*tables, *rows, offsets, out]) else None


_plans: list[Plan] = []


def _plan(
    num_tables: int, num_buffers: int, num_bags: int, features: Sequence, bits: Sequence[int], dims: Sequence[int]
) -> Plan | None:
    dtypes, widths = _forms(tuple(bits), tuple(dims))
    if num_bags < 0 or len(dtypes) != num_tables:
        return None
    flat = [int(n) for f in features for n in (f if isinstance(f, tuple) else (f,))]
    if any(flat[5::INTS_PER_FEATURE]):
        return None
    try:
        width = feature_width(tuple(flat), tuple(dims), num_buffers)
    except ValueError:
        return None
    array, slots = [0, num_tables], []
    for dtype, dim, size in zip(dtypes, dims, widths, strict=True):
        slots.append(Slot(len(array), ROWS, size))
        array += 0, dtype, 0, dim
    array.append(num_buffers)
    for _ in range(num_buffers):
        slots.append(Slot(len(array), INTS, 0))
        array += 0, 0, 0
    array += len(flat) // INTS_PER_FEATURE, *flat
    slots.append(Slot(len(array), INTS, max(flat[2::INTS_PER_FEATURE]) + num_bags + 1 if flat else 1))
    array += 0, 0, 0, *ABSENT, num_bags, width, F32
    slots.append(Slot(len(array), OUT, width, torch.float32))
    array.append(0)
    own = [x if type(x) is tuple else [*x] for x in (features, bits, dims)]  # copies: a caller may change its list
    return plan_of((num_tables, num_buffers, num_bags, *own), "quantized_lookup", array, slots, (num_bags, width))


def quantized_rows(table_: Tensor, rows: Tensor, bits: int, dim: int) -> Tensor:
    """Return the numbers that the rows encode, f32[N, D], with zeros for rows outside the table."""
    check_coded("cpp.quantized_rows", table_, bits, dim)
    rows = rows.contiguous()
    out = empty((rows.shape[0], dim), torch.float32)
    call("quantized_rows", [*_one(table_, bits, dim), *matrix(out), *ints(rows)])
    return out


def quantize_rows(table_: Tensor, bits: int, key: Tensor | None = None) -> Tensor:
    """Return the quantised rows, u8[R, S]: the scale, the bias and the codes of each row."""
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
    out = empty_table((table_.shape[0], row_bytes(bits, table_.shape[1])), dtype=torch.uint8)
    call("quantize_rows", [*table(table_), bits, 0 if key is None else key.data_ptr(), out.data_ptr()])
    return out


def _described(tables: list[Tensor], bits: list[int], dims: list[int]) -> list[int]:
    """Return the descriptions of tables that `_one` makes, filled in by columns if all tables hold codes."""
    numbers, widths = _forms(tuple(bits), tuple(dims))
    if numbers and len(tables) == len(numbers) and all(map(_is_cpu, tables)) and all(map(Tensor.is_contiguous, tables)):
        shapes = [x.shape for x in tables]
        if {*map(_dtype, tables)} == {torch.uint8} and {*map(len, shapes)} == {2}:
            num_rows, found = zip(*shapes)
            addresses: list[Any]
            if found == widths and all(addresses := [*map(Tensor.data_ptr, tables)]):
                out = [0] * (4 * len(tables))
                out[::4], out[1::4], out[2::4], out[3::4] = addresses, numbers, num_rows, dims
                return out
    check_tables("cpp.quantized_lookup", tables, bits, dims)
    return [n for x, b, dim in zip(tables, bits, dims, strict=True) for n in _one(x, b, dim)]


@functools.lru_cache(maxsize=1024)
def _forms(bits: tuple[int, ...], dims: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (dtypes, bytes of a row) of tables that all hold codes, or two empty tuples for other tables."""
    if len(bits) != len(dims) or not {*bits} <= {*CODES} or min(dims, default=-1) < 0:
        return (), ()
    return tuple(CODES[b] for b in bits), tuple(map(row_bytes, bits, dims))


def _one(x: Tensor, bits: int, dim: int) -> tuple[int, ...]:
    """Return the description of a table of codes or floats: pointer, dtype, R, D."""
    if bits not in CODE_BITS:
        return table(x)
    if not x.is_contiguous():
        fail("quantized_lookup", "a table is not contiguous.", x.stride(), "rows end to end", "table.contiguous()")
    return check(x, 2, BYTES), CODES[bits], x.shape[0], dim
