"""Initial rows of tables, in C++ (csrc/draws.h)."""

import functools
from collections.abc import Sequence

import torch
from funcrec.kernels.cpp._native import DTYPES, call, check, empty, fail, ints, matrix, real, table, tables
from funcrec.kernels.draws import CONSTANT, FIELDS, GIVEN
from torch import Tensor

_I64 = (torch.int64,)


def initial_rows(key: Tensor, starts: Tensor, dim: int, kind: int, scale: float, dtype: torch.dtype) -> Tensor:
    """Return rows of the elements from `starts` on, [M, D] in `dtype`."""
    if not 0 <= kind < GIVEN or dim < 0:
        fail("initial_rows", "there are no such rows.", (kind, dim), f"a kind in [0, {GIVEN}), and dim >= 0", "see ops")
    starts = starts.contiguous()
    out = empty((starts.shape[0], dim), dtype)
    call("initial_rows", [*table(out), *ints(starts), check(key, 0, _I64), kind, real(scale)])
    return out


def draw_rows_(
    tables_: Sequence[Tensor],
    given: Sequence[Tensor],
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    keys: Tensor,
    fresh: Sequence[int],
    scales: Sequence[float],
) -> None:
    """Write the new rows of each entry of `fresh` to its table. Rows outside of the table are left out."""
    rows, ids, counts, keys = (x.contiguous() for x in (rows, ids, counts, keys))
    given = [_matrix_of(x) for x in given]
    entries = _entries(tuple(fresh), tuple(scales), keys.shape[0]).copy()
    first = check(keys, 1, _I64) if keys.shape[0] else 0
    entries[FIELDS - 1 :: FIELDS + 1] = [first + at for at in entries[FIELDS - 1 :: FIELDS + 1]]
    described = len(tables_), *tables(tables_), len(given), *(n for x in given for n in matrix(x))
    counts_at = check(counts, 1, _I64), DTYPES[torch.int64], counts.shape[0]
    call("draw_rows", [*described, *ints(rows), *ints(ids), *counts_at, len(scales), *entries])


@functools.lru_cache(maxsize=256)
def _entries(fresh: tuple[int, ...], scales: tuple[float, ...], num_keys: int) -> list[int]:
    """Return the numbers of the entries, with the place of each key among the keys, in bytes, for its address."""
    if len(fresh) != FIELDS * len(scales):
        got = f"{len(fresh)} and {len(scales)} numbers"
        fail("draw_rows_", "`fresh` does not fit `scales`.", got, f"{FIELDS} and one for each entry", "see ops")
    out = []
    for i, scale in enumerate(scales):
        *own, key = fresh[FIELDS * i : FIELDS * (i + 1)]
        is_drawn = own[1] < CONSTANT
        if not 0 <= own[1] <= GIVEN or (is_drawn and not 0 <= key < num_keys):
            fail("draw_rows_", f"entry {i} does not fit.", [*own, key], f"what is there: {num_keys} keys", "see ops")
        out += (*own, 8 * key if is_drawn else 0, real(scale))
    return out


def _matrix_of(x: Tensor) -> Tensor:
    if x.dtype not in (torch.float32, torch.float64):
        x = x.to(torch.float32)
    return x.contiguous()
