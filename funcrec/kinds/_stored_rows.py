"""Columns of rows of codes, where each row has its scale and bias. Tables are cut by columns, and joined again.

joined([cut(t, 0, k), cut(t, k, D)]) == t        bit for bit
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from funcrec.kernels.forms import CODE_BITS, HEAD_BYTES, row_bytes
from funcrec.kernels.reference_quantized import codes_of, packed


def stored_width(bits: int, dim: int) -> int:
    """Return the number of elements in a stored row of `dim` numbers. For a table of floats, bits is 0."""
    return row_bytes(bits, dim) if bits in CODE_BITS else dim


def cut_columns(t: Tensor, bits: int, dim: int, first: int, last: int) -> Tensor:
    """Return columns [first, last) of a stored table that has `dim` columns."""
    if bits not in CODE_BITS:
        return t[:, first:last]
    if (first, last) == (0, dim):
        return t
    return torch.cat([t[:, :HEAD_BYTES], packed(codes_of(t, bits, dim)[:, first:last].to(torch.int32), bits)], 1)


def join_columns(parts: Sequence[Tensor], bits: int, dims: Sequence[int]) -> Tensor:
    """Return the stored table whose blocks of columns are `parts`, in order."""
    if bits not in CODE_BITS or len(parts) == 1:
        return torch.cat(list(parts), 1)
    codes = torch.cat([codes_of(t, bits, dim) for t, dim in zip(parts, dims, strict=True)], 1)
    return torch.cat([parts[0][:, :HEAD_BYTES], packed(codes.to(torch.int32), bits)], 1)
