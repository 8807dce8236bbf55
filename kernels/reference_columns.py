"""The operations on several vocabularies in plain torch: those of one, on the ids of each vocabulary's columns.

Shapes: N ids, C places for the ids of a vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from funcrec.kernels.reference_jagged import ascending, take_ranges
from funcrec.kernels.reference_vocabulary import admit_ids, find_ids, settle_ids
from funcrec.kernels.vocabulary import SCORED, Column, admissions_of, columns_of, of_shared, places_of, states_of
from torch import Tensor


def columns_by(find_ids: Callable) -> Callable:
    """Return `find_columns` that finds the ids of each vocabulary by `find_ids`."""

    def find_columns(state: list[Tensor], ids: Tensor, offsets: Tensor, how: list[int], columns: list[int]) -> Tensor:
        out, places = ids.long(), columns_of(columns)
        for v, (tags, entries) in enumerate(zip(state[::2], state[1::2], strict=True)):
            own = [c for c in places if c.vocabulary == v]
            at, valid = _places([ids], [offsets], own, ids.shape[0])
            rows = find_ids(tags, entries, _at(ids, at), valid, *how[2 * v : 2 * v + 2])
            out = _put(out, at, rows)
        return out

    return find_columns


find_columns = columns_by(find_ids)


def admit_columns(
    state: list[Tensor],
    scores: list[Tensor],
    ids: list[Tensor],
    offsets: list[Tensor],
    how: list[int],
    columns: list[int],
) -> tuple[Tensor, ...]:
    settings, own_scores, parts = admissions_of(how), iter(scores), []
    whole = _whole(ids, state[0])
    rows, missed = torch.full_like(whole, -1), torch.zeros_like(whole, dtype=torch.bool)
    for at, valid, x, (tags, entries, now, *sketch) in _each(state, ids, offsets, how, columns):
        ranked = next(own_scores) if x.policy == SCORED else None
        given = [tags, entries, *sketch], now + 1, _at(whole, at), valid, ranked
        own, changed, new_ids, _, _, counts, own_missed, numbers = admit_ids(*given, *x)
        rows, missed = _put(rows, at, own), _put(missed, at, own_missed)
        parts.append((changed, new_ids, counts, numbers))
    blank = whole.new_empty(0)
    *packed, numbers = (list(x) for x in zip(*parts, strict=True)) if parts else ([blank], [blank], [blank], [])
    return rows, missed, *map(torch.cat, packed), torch.stack(numbers) if settings else whole.new_empty(0, 4)


def settle_columns(
    state: list[Tensor],
    ids: list[Tensor],
    offsets: list[Tensor],
    found: list[Tensor],
    how: list[int],
    columns: list[int],
) -> list[Tensor]:
    (rows, missed, *packed, numbers), whole, begin, out = found, _whole(ids, state[0]), 0, []
    for v, (at, _, x, (tags, entries, now, *sketch)) in enumerate(_each(state, ids, offsets, how, columns)):
        end = begin + at.shape[0]
        changed, new_ids, counts = (y[begin:end] for y in packed)
        own_rows, own_missed = (torch.where(at < whole.shape[0], _at(y, at), y.new_full((), n)) for y, n in (
            (rows, -1), (missed, 0)))  # fmt: skip
        given = [tags, entries, *sketch], now + 1, _at(whole, at), own_rows, own_missed, changed, new_ids, counts
        tags, entries, *sketch = settle_ids(*given, numbers[v], x.least, x.salt, of_shared(x.shared)[1])
        out += [tags, entries, now + 1, *sketch]
        begin = end
    return out


# -- parts -------------------------------------------------------------------------------------------------------


def _each(state, ids, offsets, how, columns):
    """Yield (places of the ids i64[C], how many are ids, settings, tensors) of each vocabulary."""
    settings, every, sizes = admissions_of(how), columns_of(columns), [x.shape[0] for x in ids]
    each = zip(settings, places_of(settings, every, sizes), states_of(settings, state), strict=True)
    for v, (x, room, own) in enumerate(each):
        at, valid = _places(ids, offsets, [c for c in every if c.vocabulary == v], room)
        yield at, valid, x, own


def _whole(ids: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([x.long() for x in ids]) if ids else like.new_empty(0, dtype=torch.int64)


def _places(
    ids: Sequence[Tensor], offsets: Sequence[Tensor], columns: Sequence[Column], room: int
) -> tuple[Tensor, Tensor]:
    """Return the places of the columns' ids among those of all buffers, i64[room], and their number. Then comes N."""
    sizes = [x.shape[0] for x in ids]
    n = sum(sizes)
    starts, lengths = [offsets[0].new_empty(0, dtype=torch.int64)] * 2 if offsets else [torch.empty(0).long()] * 2
    starts, lengths = [starts], [lengths]
    for c in columns:
        bounds = ascending(offsets[c.buffer]).long().clamp(0, sizes[c.buffer])[c.first_bag :][: c.num_bags + 1]
        length = bounds.diff()
        starts.append(bounds[:-1] + sum(sizes[: c.buffer]))
        lengths.append(length.clamp(max=c.max_length) if c.max_length else length)
    every = torch.arange(n, device=starts[0].device)
    at, ends = take_ranges(every, torch.cat(starts), torch.cat(lengths), room)
    return torch.where(torch.arange(room, device=at.device) < ends[-1], at, n), ends[-1]


def _at(x: Tensor, at: Tensor) -> Tensor:
    """Return x[at], where at may be one more than the last place."""
    return torch.cat([x, x.new_zeros(1)])[at]


def _put(x: Tensor, at: Tensor, new: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1)]).scatter(0, at, new)[:-1]
