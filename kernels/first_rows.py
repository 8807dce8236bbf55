"""The contracts of the operations on initial rows, as in `ops`. reference_draws.py has their equations.

Shapes: M rows, R rows of a table, D dim.
"""

from collections.abc import Sequence

import torch
from funcrec.kernels.choice import operation
from funcrec.kernels.draws import Fresh
from funcrec.kernels.forms import flatten
from torch import Tensor


def initial_rows(
    key: Tensor,
    starts: Tensor,
    dim: int,
    kind: int,
    scale: float,
    dtype: torch.dtype,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Return rows [M, D] in `dtype`: row i has the elements starts[i], starts[i] + 1, ... of the key's sequence.

    Args:
      key: i64[]. starts: i[M]; numbers beyond 2⁶³ wrap.
      kind, scale: UNIFORM between -scale and scale, NORMAL with the standard deviation `scale`, or CONSTANT `scale`.
        Numbers are drawn in f32, and rounded once to `dtype`.
    """
    return operation("initial_rows", implementation, key, bare=[starts])(key, starts, dim, kind, scale, dtype)


def draw_rows(
    tables: Sequence[Tensor],
    given: Sequence[Tensor],
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    keys: Tensor,
    fresh: Sequence[Fresh],
    scales: Sequence[float],
    *,
    implementation: str | None = None,
) -> list[Tensor]:
    """Return the tables f[R, D] with new numbers in the rows rows[f.rows + j] for j < counts[f.number], for each f.

    Args:
      given: f[1, D] or f[places, D] each, for entries of the kind GIVEN.
      rows: i[...], the places of all entries. Those of one table must be distinct. A row outside its table is left out.
      ids: i[...], whose row of `initial_rows` a new row is. counts: i64[...]. keys: i64[...].
      fresh, scales: one for each entry.
    """
    call = operation("draw_rows", implementation, *tables, *given)
    return call(list(tables), list(given), rows, ids, counts, keys, flatten(fresh), list(scales))
