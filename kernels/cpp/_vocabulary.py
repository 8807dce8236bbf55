"""Find ids in a vocabulary and admit new ones, in C++ (csrc/vocabulary.h, csrc/admission.h)."""

from collections.abc import Sequence

import torch
from funcrec.kernels.cpp._native import call, check, empty, ints
from funcrec.kernels.vocabulary import SLOTS
from torch import Tensor

_I64, _U8, _BOOL = (torch.int64,), (torch.uint8,), (torch.bool,)


def find_ids(tags: Tensor, entries: Tensor, ids: Tensor, valid: Tensor, shared: int, salt: int) -> Tensor:
    """Return the row of each id, i64[N]."""
    state, ids = [tags.contiguous(), entries.contiguous()], ids.contiguous()  # copies that outlive the call
    vocabulary, _ = described(state, shared, salt)
    rows = empty((ids.shape[0],), torch.int64)
    call("find_ids", [*vocabulary, *ints(ids), check(valid, 0, _I64), rows.data_ptr()])
    return rows


def admit_ids(
    state: Sequence[Tensor],
    now: Tensor,
    ids: Tensor,
    valid: Tensor,
    scores: Tensor | None,
    policy: int,
    ttl: int,
    least: int,
    share: int,
    shared: int,
    salt: int,
) -> tuple[Tensor, ...]:
    """Return the rows of a step's ids, and what the step changes."""
    ids, state, n = ids.contiguous(), [x.contiguous() for x in state], ids.shape[0]
    scores = None if scores is None else scores.contiguous()
    vocabulary, sketch = described(state, shared, salt)
    kinds = [torch.int64] * 4 + [torch.bool, torch.int64, torch.bool]
    out = (*(empty((n,), kind) for kind in kinds), torch.empty(4, dtype=torch.int64))
    at = 0 if scores is None else check(scores, 1, _I64)
    how = policy, ttl, least, share
    given = *vocabulary, sketch, check(now, 0, _I64), *ints(ids), check(valid, 0, _I64), at, *how
    call("admit_ids", [*given, *(x.data_ptr() for x in out)])
    return out


def settle_ids_(
    state: Sequence[Tensor],
    now: Tensor,
    ids: Tensor,
    rows: Tensor,
    missed: Tensor,
    changed: Tensor,
    new_ids: Tensor,
    counts: Tensor,
    numbers: Tensor,
    least: int,
    salt: int,
) -> None:
    """Write the changes of a step to the state."""
    vocabulary, sketch = described(state, 0, salt)
    ids, rows, missed, changed, new_ids, counts = (
        x.contiguous() for x in (ids, rows, missed, changed, new_ids, counts)
    )
    numbers = numbers.contiguous()
    each = [check(x, 1, kind) for x, kind in ((rows, _I64), (missed, _BOOL))]
    more = [check(x, 1, _I64) for x in (changed, new_ids, counts)]
    given = *vocabulary, sketch, check(now, 0, _I64), *ints(ids), *each, *more
    call("settle_ids", [*given, changed.shape[0], check(numbers, 1, _I64), least])


def described(state: Sequence[Tensor], shared: int, salt: int) -> tuple[tuple[int, ...], int]:
    """Return the description of a vocabulary, and the address of its sketch or 0."""
    tags, entries, *sketch = state
    num_rows = tags.shape[0]
    fits = entries.shape == (num_rows, 2) and num_rows and not num_rows % SLOTS
    if not fits or any(x.shape != tags.shape for x in sketch) or not all(x.is_contiguous() for x in state):
        raise ValueError(
            f"funcrec.kernels.cpp: not a vocabulary.\n  got   {[list(x.shape) for x in state]}"
            f"\n  need  u8[R], i64[R, 2], contiguous, R a multiple of {SLOTS}\n  try   fr.vocabulary(capacity)"
        )
    at = check(tags, 1, _U8), check(entries, 2, _I64)
    return (*at, num_rows, shared, salt), check(sketch[0], 1, _U8) if sketch else 0
