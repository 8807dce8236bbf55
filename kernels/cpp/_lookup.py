"""Pooled lookups, their gradient by weights, and plain rows, in C++ (csrc/lookup.h)."""

import torch
from funcrec.kernels.cpp._native import DTYPES, call, empty, matrix, table, vector
from funcrec.kernels.cpp._native import tables as described_tables
from funcrec.kernels.forms import in_blocks
from torch import Tensor

INTS_PER_FEATURE = 7
F32, F64 = DTYPES[torch.float32], DTYPES[torch.float64]


def pooled_lookup(
    tables: list[Tensor],
    rows: list[Tensor],
    offsets: Tensor,
    weights: Tensor | None,
    features: list[int],
    num_bags: int,
    blocks: int = 1,
) -> Tensor:
    """f32|f64[n · B, C / n]; `features` are seven numbers each: see `forms.Feature`."""
    rows, offsets = [r.contiguous() for r in rows], offsets.contiguous()
    described, of_table, columns = described_tables(tables), features[::INTS_PER_FEATURE], features[6::INTS_PER_FEATURE]
    dtypes, dims = described[1::4], described[3::4]
    width = max([c + dims[t] for t, c in zip(of_table, columns)], default=0)
    numbers = _features(described, rows, offsets, in_blocks(features, num_bags, width, blocks), num_bags)
    wide = F64 in dtypes and any(dtypes[t] == F64 for t in of_table)
    width = width // blocks
    out = empty((blocks * num_bags, width), torch.float64 if wide else torch.float32)
    weights = _multipliers(weights)
    numbers += (*vector(offsets), *vector(weights), num_bags, width, F64 if wide else F32, out.data_ptr())
    call("pooled_lookup", numbers)
    return out


def pooled_lookup_weights(
    d_out: Tensor, tables: list[Tensor], rows: list[Tensor], offsets: Tensor, weights: Tensor, features: list[int]
) -> Tensor:
    """f[N], the gradient of the weights: <table[row], d_out[b]> summed over the weighted features that read the id."""
    rows, offsets, d_out = [r.contiguous() for r in rows], offsets.contiguous(), _with_rows(d_out)
    numbers = _features(described_tables(tables), rows, offsets, features, d_out.shape[0])
    d_weights = torch.empty(weights.shape, dtype=torch.float64 if weights.dtype == torch.float64 else torch.float32)
    numbers += (*vector(offsets), *vector(d_weights), *matrix(d_out))
    call("pooled_lookup_weights", numbers)
    return d_weights.to(weights.dtype)


def gather_rows(table_: Tensor, rows: Tensor) -> Tensor:
    """f32|f64[K, D]: table[rows], zeros for rows outside the table."""
    return gather_block([table_], rows)[0]


def scatter_rows_(table_: Tensor, rows: Tensor, count: Tensor, new: Tensor) -> None:
    """table[rows[i]] = new[i], rounded to the nearest, for i < count; the rows are distinct."""
    scatter_block_([table_], rows, count, [new])


def gather_block(tables: list[Tensor], rows: Tensor) -> list[Tensor]:
    """`gather_rows` of several tables by the same rows."""
    rows, out, numbers = rows.contiguous(), [], [len(tables)]
    for x in tables:
        out.append(empty((rows.shape[0], x.shape[1]), torch.float64 if x.dtype == torch.float64 else torch.float32))
        numbers += table(x)
        numbers += matrix(out[-1])
    call("gather_block", [*numbers, *vector(rows)])
    return out


def scatter_block_(tables: list[Tensor], rows: Tensor, count: Tensor, new: list[Tensor]) -> None:
    """`scatter_rows_` of several tables by the same rows."""
    rows, new, numbers = rows.contiguous(), [_with_rows(x) for x in new], [len(tables)]
    for x, y in zip(tables, new, strict=True):
        numbers += table(x)
        numbers += matrix(y)
    call("scatter_block", [*numbers, *vector(rows), count.data_ptr()])


def _features(
    described: list[int], rows: list[Tensor], offsets: Tensor, features: list[int], num_bags: int
) -> list[int]:
    """All the numbers that both lookups begin with; `described` are the tables, four each."""
    need = max(features[2::INTS_PER_FEATURE], default=0) + num_bags
    if features and need >= offsets.shape[0]:
        raise ValueError(
            f"funcrec.kernels.cpp: `offsets` has too few boundaries.\n  got   {offsets.shape[0]}\n"
            f"  need  {need + 1}, one more than the last feature's last bag"
        )
    numbers = [len(described) // 4, *described, len(rows)]
    for r in rows:
        numbers += vector(r)
    numbers.append(len(features) // INTS_PER_FEATURE)
    numbers += features
    return numbers


def _multipliers(weights: Tensor | None) -> Tensor | None:
    """Weights as contiguous f32, f64 for f64."""
    if weights is None:
        return None
    return weights.to(torch.float64 if weights.dtype == torch.float64 else torch.float32).contiguous()


def _with_rows(x: Tensor) -> Tensor:
    """x [M, C] in f32, f64 for f64, with contiguous rows; any stride from row to row stays."""
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
