"""Checks that all readers share: rows must exist, labels be in [0, 1], numbers be finite, ids be in their table.

0 <= row < num_rows,   0 <= label <= 1,   |dense| < ∞,   0 <= id < V
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from funcrec.core import Count, Problem, reported, stray, unknown_problems
from funcrec.jagged import int_problems, is_concrete

Vocabularies = Mapping[str, Count] | None
Refuse = Callable[[int, str, str, str], None]  # it raises for (row of the batch, column, got, need)


def row_problems(rows: Tensor, num_rows: int, device: torch.device | None = None) -> Iterator[Problem]:
    """Yield problems of row numbers. Their values are read only if the read waits for no device."""
    is_form = not (yield from reported(int_problems(rows, "rows", device)))
    if is_form and is_concrete(rows) and (row := stray(rows, num_rows)) is not None:
        need, hint = f"0 <= row < {num_rows}, the rows of the data", "rows=None for all, or row numbers of these data"
        yield Problem("`rows` has a row that does not exist.", f"row {row}", need, hint)


def there(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor | None]:
    """Return row numbers that can be read, and a mask of the given rows that exist, or None if all exist.

    A row that could not be checked is marked as missing if the data lack it."""
    if is_concrete(rows):
        return rows, None
    inside = (rows >= 0) & (rows < num_rows)
    return torch.where(inside, rows, 0), inside


def marked(label: Tensor, inside: Tensor | None) -> Tensor:
    """Return the labels, with NaN for rows that the data lack."""
    return label if inside is None else torch.where(inside, label, torch.nan)


def vocabulary_problems(vocabularies: Vocabularies, keys: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem if `vocabularies` names a column that is not read."""
    yield from unknown_problems("`vocabularies` names columns that are not read.", vocabularies or (), keys)


def need_ids(ids: np.ndarray, size: int | None, name: str, refuse: Refuse, row: Callable[[int], int] = int) -> None:
    """Raise if an id of one column is not in [0, size). row: maps the n-th id to its row of the batch."""
    if size is None or not ids.size or (ids.min() >= 0 and ids.max() < size):
        return
    at = int(np.flatnonzero((ids < 0) | (ids >= size))[0])
    refuse(row(at), name, f"id {ids[at]}", f"0 <= id < {size}; a hash in the feature's config, or a larger table")


def need_labels(label: np.ndarray, name: str, refuse: Refuse) -> None:
    wrong = ~((label >= 0) & (label <= 1))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        refuse(at, name, f"label {label[at]}", "a number in [0, 1]")


def need_finite(dense: np.ndarray, names: Sequence[str], refuse: Refuse) -> None:
    """Raise if a number of f32[B, J] is NaN or infinite."""
    if not np.isfinite(dense).all():
        at, column = (int(i) for i in np.argwhere(~np.isfinite(dense))[0])
        refuse(at, names[column], f"{dense[at, column]}", "a finite f32")
