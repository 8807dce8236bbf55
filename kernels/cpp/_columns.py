"""Operations on several vocabularies, in C++ (csrc/columns.h)."""

from collections.abc import Sequence

import torch
from funcrec.kernels.cpp._native import bounds, call, check, empty, fail, ints
from funcrec.kernels.cpp._vocabulary import described
from funcrec.kernels.vocabulary import SCORED, Admission, admissions_of, columns_of, places_of, states_of
from torch import Tensor

_I64, _BOOL = (torch.int64,), (torch.bool,)


def find_columns(
    state: Sequence[Tensor], ids: Tensor, offsets: Tensor, how: Sequence[int], columns: Sequence[int]
) -> Tensor:
    """Return the ids with rows in place of the ids of the columns, i64[N]."""
    ids, offsets, state = ids.contiguous(), offsets.contiguous(), [x.contiguous() for x in state]
    if len(state) != len(how) or len(how) % 2 or len(columns) % 5:
        fail("find_columns", "the numbers do not fit.", (len(state), len(how), len(columns)), "2, 2 and 5 each", "ops")
    out, numbers = empty((ids.shape[0],), torch.int64), [len(state) // 2]
    for i in range(0, len(state), 2):
        numbers += described(state[i : i + 2], *how[i : i + 2])[0]
    numbers += (1, *ints(ids), *bounds(offsets), len(columns) // 5, *columns, out.data_ptr())
    call("find_columns", numbers)
    return out


def admit_columns(
    state: Sequence[Tensor],
    scores: Sequence[Tensor],
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor],
    how: Sequence[int],
    columns: Sequence[int],
) -> tuple[Tensor, ...]:
    """Return (rows, missed, changed, new_ids, counts, numbers), as `ops.admit_columns`."""
    state, scores = [x.contiguous() for x in state], [x.contiguous() for x in scores]
    settings, memory, places, num_ids = _settings("admit_columns", ids, how, columns)
    numbers, ids, offsets = _steps(settings, state, places, scores), *memory(ids, offsets)
    total = sum(places)
    out = empty((num_ids,), torch.int64), torch.empty(num_ids, dtype=torch.bool)
    out += tuple(empty((total,), torch.int64) for _ in range(3))
    out += (torch.empty(len(settings), 4, dtype=torch.int64),)
    numbers += (*_buffers(ids, offsets), len(columns) // 5, *columns, *(x.data_ptr() for x in out))
    call("admit_columns", numbers)
    return out


def settle_columns_(
    state: Sequence[Tensor],
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor],
    found: Sequence[Tensor],
    how: Sequence[int],
    columns: Sequence[int],
) -> None:
    """Write the changes of a step to the states, and now + 1."""
    settings, memory, places, num_ids = _settings("settle_columns", ids, how, columns)
    rows, missed, changed, new_ids, counts, told = (x.contiguous() for x in found)
    total = sum(places)
    sizes = [x.shape[0] for x in (rows, missed, changed, new_ids, counts)]
    if sizes != [num_ids, num_ids, total, total, total] or told.shape != (len(settings), 4):
        need = f"{num_ids} ids, {total} places, [{len(settings)}, 4] numbers"
        fail("settle_columns", "`found` does not fit the ids.", sizes, need, "what `admit_columns` returned")
    numbers, ids, offsets = _steps(settings, state, places, None), *memory(ids, offsets)
    numbers += (*_buffers(ids, offsets), len(columns) // 5, *columns, check(rows, 1, _I64), check(missed, 1, _BOOL))
    numbers += (*(check(x, 1, _I64) for x in (changed, new_ids, counts)), check(told, 2, _I64))
    call("settle_columns", numbers)


def _settings(name: str, ids: Sequence[Tensor], how: Sequence[int], columns: Sequence[int]):
    """Return the settings, a function that packs lists of tensors, the places of each vocabulary, and the number of
    ids."""
    sizes, settings, every = [x.shape[0] for x in ids], admissions_of(how), columns_of(columns)
    is_there = lambda c: 0 <= c.vocabulary < len(settings) and 0 <= c.buffer < len(sizes) and min(c) >= 0
    if len(how) % 6 or len(columns) % 5 or not all(map(is_there, every)):
        got = f"{columns} for {len(how)} numbers and {len(sizes)} buffers"
        fail(name, "a column does not fit.", got, "six numbers of each vocabulary, five of each column", "see ops")
    memory = lambda *lists: [[x.contiguous() for x in xs] for xs in lists]
    return settings, memory, places_of(settings, every, sizes), sum(sizes)


def _steps(
    settings: Sequence[Admission], state: Sequence[Tensor], places: Sequence[int], scores: Sequence[Tensor] | None
) -> list[int]:
    """Return the numbers that describe the vocabularies of a step. scores: None if no policy is asked."""
    need = sum(4 if x.least else 3 for x in settings)
    if len(state) != need:
        fail("call", "`state` has another number of tensors.", len(state), f"{need}", "see ops.admit_columns")
    out, ranked = [len(settings)], iter(scores or ())
    for x, own, room in zip(settings, states_of(settings, state), places, strict=True):
        tags, entries, now, *sketch = own
        (*at, _, _), sketched = described([tags, entries, *sketch], 0, 0)
        mine = next(ranked, None) if x.policy == SCORED and scores is not None else None
        if x.policy == SCORED and scores is not None and (mine is None or mine.shape != tags.shape):
            got = None if mine is None else list(mine.shape)
            fail("admit_columns", "a policy has no scores.", got, f"i64{list(tags.shape)}", "a score for each row")
        out += (*at, check(now, 0, _I64), sketched)
        out += (0 if mine is None else check(mine, 1, _I64), *x, room)
    return out


def _buffers(ids: Sequence[Tensor], offsets: Sequence[Tensor]) -> list[int]:
    if len(ids) != len(offsets):
        fail("call", "`offsets` do not fit `ids`.", f"{len(offsets)} for {len(ids)}", "one for each buffer", "see ops")
    return [len(ids), *(n for pair in zip(ids, offsets, strict=True) for n in (*ints(pair[0]), *bounds(pair[1])))]
