"""Operations on quantised rows by FBGEMM's operators, for CPU tensors.

FBGEMM's quantiser writes scale and bias after the codes, and FBGEMM's lookup reads them before the codes. Codes must
fill whole bytes. The quantiser needs an even number of bytes, reads NaN as 0, and takes no key to round at random.
FBGEMM's lookup reads -1 as zeros and raises for other ids outside the table; this module leaves all such ids out.
Shapes: B bags, N ids, R rows, D dim, S bytes.
"""

from collections.abc import Sequence
from typing import cast

import torch
from funcrec.kernels.fbgemm_bags import _bags, _check_dtype, _fail, _ints32, _operators
from funcrec.kernels.forms import CODE_BITS, HEAD_BYTES, check_coded, check_tables, features_of
from funcrec.kernels.reference_jagged import ascending
from torch import Tensor

HOST, SUM, F32 = 3, 0, 0  # placement, pooling_mode, output_dtype
WEIGHTS_TYPES = {32: 0, 16: 1, 8: 2, 4: 3, 2: 4}
NAN = torch.tensor([0, 0x7E, 0, 0x7E], dtype=torch.uint8)  # the scale and bias of a row of NaN


def quantized_lookup(
    tables: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: Sequence[int],
    num_bags: int,
    bits: Sequence[int],
    dims: Sequence[int],
) -> Tensor:
    """Return the pooled rows of a lookup in quantised tables, f32[B, C]."""
    call = "funcrec.kernels.quantized_lookup"
    check_tables("quantized_lookup", tables, bits, dims)
    ops = _operators(call, *tables, *rows, offsets, weights)
    found = features_of(features)
    for f in found:
        _check_codes(call, tables[f.table], bits[f.table], dims[f.table], 8)
    out = torch.empty(num_bags, max((f.column + dims[f.table] for f in found), default=0), dtype=torch.float32)
    for f in found:
        table, b, dim = tables[f.table], bits[f.table], dims[f.table]
        bounds = ascending(offsets)[f.first_bag : f.first_bag + num_bags + 1]
        bags = _bags(ops, rows[f.rows], bounds, f.max_length, table.shape[0])
        pooled = _pooled(ops, table, b, dim, bags, bags.take(cast(Tensor, weights)) if f.weighted else None)
        out[:, f.column : f.column + dim] = bags.per_bag(pooled) if f.mean else pooled
    return out


def _pooled(ops, table: Tensor, bits: int, dim: int, bags, weights: Tensor | None) -> Tensor:
    """Return the sums of the bags, f32[B, D]."""
    if bags.offsets.shape[0] == 1 or bags.rows.shape[0] == 0 or dim == 0:
        return torch.zeros(bags.offsets.shape[0] - 1, dim)
    kind = WEIGHTS_TYPES[bits]
    most = [dim if kind == k else 0 for k in (4, 3, 2, 1, 0)]
    whole, at = table.view(torch.uint8).view(-1), torch.zeros(1, dtype=torch.int64)
    where = (whole, whole[:0], _ints32(HOST), at, torch.tensor([kind], dtype=torch.uint8), _ints32(0, dim), dim)
    look = ops.int_nbit_split_embedding_codegen_lookup_function
    return look(*where, *most, bags.rows, bags.offsets, SUM, weights, F32, row_alignment=1)


def quantized_rows(table: Tensor, rows: Tensor, bits: int, dim: int) -> Tensor:
    """Return the numbers that the rows encode, f32[N, D]."""
    call = "funcrec.kernels.quantized_rows"
    check_coded("quantized_rows", table, bits, dim)
    ops = _operators(call, table, rows)
    _check_codes(call, table, bits, dim, 8)
    inside = (rows >= 0) & (rows < table.shape[0])
    out = torch.zeros(rows.shape[0], dim)
    own = table.index_select(0, rows[inside]).roll(-HEAD_BYTES, 1)
    if own.shape[0] > 0:
        out[inside] = ops.FusedNBitRowwiseQuantizedSBHalfToFloat(own, bits)
    return out


def quantize_rows(table: Tensor, bits: int, key: Tensor | None = None) -> Tensor:
    """Return the quantised rows, u8[R, S]. Raise for a key."""
    call = "funcrec.kernels.quantize_rows"
    ops = _operators(call, table)
    _check_dtype(call, table, (torch.float32, torch.float16))
    if key is not None:
        hint = "another implementation"
        _fail(call, "FBGEMM's quantiser takes no key.", "a key", "no key: rounding to the nearest", hint)
    _check_codes(call, table, bits, table.shape[1], 16)
    x = table.contiguous() + 0  # turns -0 into +0: FBGEMM may take either as least number
    out = ops.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(x, bits).roll(HEAD_BYTES, 1)
    head = out[:, :HEAD_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float16)
    lost = ~(x.isfinite().all(1) & head.isfinite().all(1))
    out[lost] = torch.nn.functional.pad(NAN, (0, out.shape[1] - HEAD_BYTES))
    return out


def _check_codes(call: str, table: Tensor, bits: int, dim: int, multiple: int) -> None:
    """Raise if FBGEMM cannot read the table, or if the codes of a row do not fill a multiple of `multiple` bits."""
    if bits not in CODE_BITS:
        _check_dtype(call, table, (torch.float32, torch.float16))
    elif dim * bits % multiple or dim == 0:
        need = f"a dim that {multiple // bits} divides"
        _fail(call, "FBGEMM's rows have no such dim.", f"dim {dim} of {bits} bits", need, "another implementation")
    if not table.is_contiguous():
        got = f"strides {table.stride()}"
        _fail(call, "a table is not contiguous.", got, "rows end to end", "table.contiguous()")
