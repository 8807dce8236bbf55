"""Operations on several vocabularies, in C++ (csrc/columns.h).

The numbers of a call that its tensors do not change are computed once. The tensors of all vocabularies are checked
together, because one by one, checks cost more than the kernels' work on a small batch.
"""

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from funcrec.kernels.cpp._native import bounds, call, check, empty, fail, ints
from funcrec.kernels.cpp._vocabulary import described
from funcrec.kernels.vocabulary import SCORED, SLOTS, admissions_of, columns_of, places_of
from torch import Tensor

_I64, _U8, _BOOL = torch.int64, torch.uint8, (torch.bool,)
_dtype, _is_cpu, _shape = map(operator.attrgetter, ("dtype", "is_cpu", "shape"))
MOST = 256  # layouts that are kept
EACH = 13  # numbers of a vocabulary in a step


def find_columns(
    state: Sequence[Tensor], ids: Tensor, offsets: Tensor, how: Sequence[int], columns: Sequence[int]
) -> Tensor:
    """Return the ids with rows in place of the ids of the columns, i64[N]."""
    ids, offsets, state = ids.contiguous(), offsets.contiguous(), [x.contiguous() for x in state]
    if len(state) != len(how) or len(how) % 2 or len(columns) % 5:
        fail("find_columns", "the numbers do not fit.", (len(state), len(how), len(columns)), "2, 2 and 5 each", "ops")
    out, count = empty((ids.shape[0],), torch.int64), len(state) // 2
    tags, entries = state[::2], state[1::2]
    numbers = [count] + [0] * (5 * count)
    numbers[1::5], numbers[2::5], numbers[3::5] = _tables(tags, entries)
    numbers[4::5], numbers[5::5] = how[::2], how[1::2]
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
    layout = _layout("admit_columns", tuple(how), tuple(columns), tuple(x.shape[0] for x in ids))
    state, scores = [x.contiguous() for x in state], [x.contiguous() for x in scores]
    numbers = _steps(layout, state, scores)
    ids, offsets = [x.contiguous() for x in ids], [x.contiguous() for x in offsets]
    out = empty((layout.num_ids,), _I64), torch.empty(layout.num_ids, dtype=torch.bool)
    out += tuple(empty((layout.num_places,), _I64) for _ in range(3))
    out += (torch.empty(layout.count, 4, dtype=_I64),)
    numbers += (*_buffers(ids, offsets), *layout.columns, *(x.data_ptr() for x in out))
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
    layout = _layout("settle_columns", tuple(how), tuple(columns), tuple(x.shape[0] for x in ids))
    rows, missed, changed, new_ids, counts, told = (x.contiguous() for x in found)
    n, m = layout.num_ids, layout.num_places
    sizes = [x.shape[0] for x in (rows, missed, changed, new_ids, counts)]
    if sizes != [n, n, m, m, m] or told.shape != (layout.count, 4):
        need = f"{n} ids, {m} places, [{layout.count}, 4] numbers"
        fail("settle_columns", "`found` does not fit the ids.", sizes, need, "what `admit_columns` returned")
    numbers = _steps(layout, state, None)
    ids, offsets = [x.contiguous() for x in ids], [x.contiguous() for x in offsets]
    numbers += (*_buffers(ids, offsets), *layout.columns, check(rows, 1, (_I64,)), check(missed, 1, _BOOL))
    numbers += (*(check(x, 1, (_I64,)) for x in (changed, new_ids, counts)), check(told, 2, (_I64,)))
    call("settle_columns", numbers)


class Layout(NamedTuple):
    """What the tensors of a step do not change.

    count: the number of vocabularies. tags, sketches: the places of these tensors in the state; an entry and `now`
    follow the tags. scored, sketched: the vocabularies with scores, and with a sketch. numbers: those of `_steps`, with
    zeros for addresses. columns: their number, and their numbers.
    """

    count: int
    num_ids: int
    num_places: int
    tags: list[int]
    sketches: list[int]
    scored: list[int]
    sketched: list[int]
    numbers: list[int]
    columns: list[int]


@functools.lru_cache(maxsize=MOST)
def _layout(name: str, how: tuple[int, ...], columns: tuple[int, ...], sizes: tuple[int, ...]) -> Layout:
    settings, every = admissions_of(how), columns_of(columns)
    is_there = lambda c: 0 <= c.vocabulary < len(settings) and 0 <= c.buffer < len(sizes) and min(c) >= 0
    if len(how) % 6 or len(columns) % 5 or not all(map(is_there, every)):
        got = f"{list(columns)} for {len(how)} numbers and {len(sizes)} buffers"
        fail(name, "a column does not fit.", got, "six numbers of each vocabulary, five of each column", "see ops")
    places, tags, sketches, numbers, at = places_of(settings, every, sizes), [], [], [len(settings)], 0
    for x, room in zip(settings, places, strict=True):
        tags.append(at)
        at += 3
        if x.least:
            sketches.append(at)
            at += 1
        numbers += (0, 0, 0, 0, 0, 0, *x, room)
    of = lambda f: [v for v, x in enumerate(settings) if f(x)]
    which = of(lambda x: x.policy == SCORED), of(lambda x: x.least)
    return Layout(len(settings), sum(sizes), sum(places), tags, sketches, *which, numbers, [len(every), *columns])


def _steps(layout: Layout, state: Sequence[Tensor], scores: Sequence[Tensor] | None) -> list[int]:
    """Return the numbers that describe the vocabularies of a step. scores: None if no policy is asked."""
    if len(state) != 3 * layout.count + len(layout.sketches):
        need = f"{3 * layout.count + len(layout.sketches)}"
        fail("call", "`state` has another number of tensors.", len(state), need, "see ops.admit_columns")
    tags, entries, now = ([state[i + k] for i in layout.tags] for k in range(3))
    numbers = layout.numbers.copy()
    numbers[1::EACH], numbers[2::EACH], numbers[3::EACH] = _tables(tags, entries)
    numbers[4::EACH] = _clocks(now)
    for v, i in zip(layout.sketched, layout.sketches, strict=True):
        numbers[EACH * v + 5] = described([tags[v], entries[v], state[i]], 0, 0)[1]
    if scores is not None:
        if len(scores) != len(layout.scored):
            fail("admit_columns", "a policy has no scores.", len(scores), f"{len(layout.scored)}", "i64[R] for each")
        for v, x in zip(layout.scored, scores, strict=True):
            if x.shape != tags[v].shape:
                fail("admit_columns", "a policy has no scores.", list(x.shape), f"{list(tags[v].shape)}", "i64[R]")
            numbers[EACH * v + 6] = check(x, 1, (_I64,))
    return numbers


def _clocks(now: Sequence[Tensor]) -> list[int]:
    """Return the addresses of the steps of several vocabularies, i64[] each."""
    at = [*map(Tensor.data_ptr, now)]
    are_good = {*map(_dtype, now)} <= {_I64} and all(map(_is_cpu, now)) and not any(map(_shape, now))
    if are_good and all(at) and not any(a % 8 for a in at):
        return at
    return [check(x, 0, (_I64,)) for x in now]  # It raises for the one that is no step.


def _tables(tags: Sequence[Tensor], entries: Sequence[Tensor]) -> tuple[list[int], list[int], list[int]]:
    """Return the addresses of tags and entries, and the numbers of rows, of several vocabularies."""
    both = [*tags, *entries]
    rows = [x[0] if len(x) == 1 else 0 for x in map(_shape, tags)]
    at = [*map(Tensor.data_ptr, tags)], [*map(Tensor.data_ptr, entries)]
    are_good = all(map(Tensor.is_contiguous, both)) and all(map(_is_cpu, both)) and all(at[0]) and all(at[1])
    are_good = are_good and {*map(_dtype, tags)} <= {_U8} and {*map(_dtype, entries)} <= {_I64}
    are_good = are_good and all(rows) and not any(n % SLOTS for n in rows) and not any(a % 8 for a in at[1])
    if not are_good or [*map(_shape, entries)] != [(n, 2) for n in rows]:
        for pair in zip(tags, entries, strict=True):
            described(pair, 0, 0)  # It raises for the one that is no vocabulary.
    return *at, rows


def _buffers(ids: Sequence[Tensor], offsets: Sequence[Tensor]) -> list[int]:
    if len(ids) != len(offsets):
        fail("call", "`offsets` do not fit `ids`.", f"{len(offsets)} for {len(ids)}", "one for each buffer", "see ops")
    return [len(ids), *(n for pair in zip(ids, offsets, strict=True) for n in (*ints(pair[0]), *bounds(pair[1])))]
