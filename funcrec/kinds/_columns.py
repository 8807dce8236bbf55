"""The ids of several vocabularies in the columns of a batch: all of them found, or admitted, in one call.

    rows = find_columns(vocabularies, ids)      vocabularies', new rows = admit_columns(vocabularies, ids)

Shapes: N ids, V vocabularies, P places of their changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import mix, sure
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor
from funcrec.kernels import ops
from funcrec.kernels.reference_vocabulary import bucket_of
from funcrec.kernels.vocabulary import EVERYONE, SCORED, Admission, Column, places_of
from funcrec.kinds._admission import scores_of, state_of, with_state
from funcrec.kinds._renewal import NewRows
from funcrec.kinds._vocabulary import POLICIES, Vocabulary, least_of
from funcrec.tables import FeatureConfig

Columns = Mapping[str, int | None]  # {column: the most ids of a bag, or None}


def columns_of(features: Sequence[FeatureConfig]) -> dict[str, int | None]:
    """Return {column: the most ids of a bag that one of the features reads, or None}."""
    out: dict[str, int | None] = {}
    for f in features:
        before = out.get(f.key, 0)
        out[f.key] = None if before is None or f.max_length is None else max(before, f.max_length)
    return out


def bags_in(ids: KeyedJaggedTensor, columns: Columns, vocabulary: int, buffer: int = 0) -> list[Column]:
    """Return the bags of the columns, as the kernels take them."""
    of = lambda column: (ids.bag_range(column)[0], ids.bags_of(column))
    return [Column(vocabulary, buffer, *of(c), most or 0) for c, most in columns.items()]


def find_columns(vocabularies: Sequence[Vocabulary], ids: KeyedJaggedTensor, columns: Sequence[Columns]) -> Tensor:
    """Return the values of the ids with rows in place of the ids of each vocabulary's columns, i64[N]."""
    if (rows := known_rows(vocabularies, ids, columns)) is not None:
        return rows
    state = [x for v in vocabularies for x in (v.tags, v.entries)]
    how = [(v.num_shared, v.salt) for v in vocabularies]
    bags = [bag for i, own in enumerate(columns) for bag in bags_in(ids, own, i)]
    choice = ops.available("find_columns", ids.values.device)
    return ops.find_columns(state, ids.values, ids.offsets, how, bags, implementation=choice)


class Buffers(NamedTuple):
    """Buffers of ids i[N_k] with the boundaries of their bags, and the bags of each vocabulary."""

    ids: list[Tensor]
    offsets: list[Tensor]
    bags: list[Column]


def buffers_of(batch: Sequence[KeyedJaggedTensor], columns: Sequence[Columns]) -> Buffers:
    """Return the columns of each vocabulary in a batch, whose ids need not have all of them."""
    used = [x for x in batch if any(c in x.keys for own in columns for c in own)]
    present = lambda x, own: {c: n for c, n in own.items() if c in x.keys}
    bags = [b for k, x in enumerate(used) for v, own in enumerate(columns) for b in bags_in(x, present(x, own), v, k)]
    return Buffers([x.values for x in used], [x.offsets for x in used], bags)


def buffers_of_bags(bags: Sequence[JaggedTensor]) -> Buffers:
    """Return one bag of ids for each vocabulary as buffers."""
    every = [Column(v, v, 0, 1, 0) for v in range(len(bags))]
    return Buffers([x.values for x in bags], [x.offsets for x in bags], every)


def joined(values: Sequence[Tensor], counts: Sequence[Tensor]) -> JaggedTensor:
    """Return one bag of the first counts[k][r] ids of each block r of values[k], i64[n · C] with counts i64[n]."""
    if len(values) == 1 and counts[0].shape[0] == 1:
        return JaggedTensor(values[0], torch.cat([counts[0] * 0, counts[0]]))
    before = [0, *accumulate(x.shape[0] for x in values)]
    blocks = lambda x, n: torch.arange(n.shape[0], device=x.device) * (x.shape[0] // n.shape[0])
    starts = torch.cat([blocks(x, n) + at for x, n, at in zip(values, counts, before, strict=False)])
    packed, ends = ops.take_ranges(torch.cat(list(values)), starts, torch.cat(list(counts)), before[-1])
    return JaggedTensor(packed, torch.stack([ends[0], ends[-1]]))


def admit_columns(vocabularies: Sequence[Vocabulary], given: Buffers) -> tuple[list[Vocabulary], NewRows, Tensor]:
    """Return the vocabularies after a step, its new rows, and numbers i64[V, 4] of distinct ids: admitted, evicted,
    found, refused."""
    how, state = [admission_of(v) for v in vocabularies], [x for v in vocabularies for x in timed_state_of(v)]
    scores = [sure(scores_of(v, v.now + 1)) for v in vocabularies if callable(v.policy)]
    choice = ops.available("admit_columns", vocabularies[0].tags.device)
    found = ops.admit_columns(state, scores, *given[:2], how, given.bags, implementation=choice)
    after = iter(ops.settle_columns(state, *given[:2], found, how, given.bags, implementation=choice))
    new = [with_timed_state(v, [next(after) for _ in timed_state_of(v)]) for v in vocabularies]
    rows, missed, changed, new_ids, _, numbers = found
    places = places_of(how, given.bags, [x.shape[0] for x in given.ids])
    seen = Seen(given, rows, missed, [v.entries for v in new])
    return new, NewRows(changed, new_ids, numbers.flatten(), tuple(places), numbers.shape[1], seen), numbers


class Seen(NamedTuple):
    """The ids of a step, the row of each, i64[N], and whether it is a miss that a sketch counts, b[N].

    entries: those of each vocabulary after the step. buckets: of each whole vocabulary, if the rank has a part of it.
    sent: on ranks with parts of vocabularies, the ids that all ranks sent to this one, with their rows in its parts;
    the ids themselves are then those of this rank's bags, with rows of whole vocabularies.
    """

    given: Buffers
    rows: Tensor
    missed: Tensor | None
    entries: list[Tensor]
    buckets: Sequence[int] = ()
    sent: Any = None


KNOWN: ContextVar[Seen | None] = ContextVar("KNOWN", default=None)  # the ids that the running step has admitted


@contextmanager
def known(seen: Seen | None) -> Iterator[None]:
    """Keep the rows of a step's ids for its lookups, which then do not search them again."""
    before = KNOWN.set(seen)
    try:
        yield
    finally:
        KNOWN.reset(before)


def known_rows(vocabularies: Sequence[Any], ids: KeyedJaggedTensor, columns: Sequence[Columns]) -> Tensor | None:
    """Return what `find_columns` returns, if the running step admitted these very ids to these vocabularies."""
    seen = KNOWN.get()
    if seen is None:
        return None
    place_in = lambda xs, x: next((i for i, y in enumerate(xs) if y is x), None)
    buffer, numbers = place_in(seen.given.ids, ids.values), [place_in(seen.entries, v.entries) for v in vocabularies]
    if buffer is None or seen.given.offsets[buffer] is not ids.offsets or None in numbers:
        return None
    read = [c for v, own in zip(numbers, columns, strict=True) for c in bags_in(ids, own, sure(v), buffer)]
    if not {*seen.given.bags}.issuperset(read):
        return None
    begin = sum(map(len, seen.given.ids[:buffer]))
    rows, offsets = seen.rows[begin : begin + len(ids.values)], ids.offsets.long()
    place = torch.arange(len(rows), device=rows.device)
    for first, last in gaps([c for c in seen.given.bags if c.buffer == buffer], len(offsets) - 1):
        rows = torch.where((place >= offsets[first]) & (place < offsets[last]), ids.values.long(), rows)
    return rows


def gaps(bags: Sequence[Column], num_bags: int) -> list[tuple[int, int]]:
    """Return the ranges of bags that no column has."""
    ends = sorted((c.first_bag, c.first_bag + c.num_bags) for c in bags)
    pairs = zip([0, *accumulate((b for _, b in ends), max)], [*(a for a, _ in ends), num_bags], strict=True)
    return [(a, b) for a, b in pairs if a < b]


def changed_slots(vocabularies: Sequence[Vocabulary], seen: Seen) -> list[tuple[Tensor, Tensor | None]]:
    """Return for each vocabulary (the rows whose entries a step changes, i64[N], the buckets whose sketch it changes,
    i64[N] or None). A row may come several times. Other places have -1, or the row of unknown ids.

    vocabularies: those of this rank, if it has parts of vocabularies.
    """
    seen = seen if seen.sent is None else seen.sent
    ids = torch.cat([x.long() for x in seen.given.ids])
    place, begin = torch.arange(ids.shape[0], device=ids.device), [0, *accumulate(map(len, seen.given.ids))]
    out: list[tuple[Tensor, Tensor | None]] = []
    for i, v in enumerate(vocabularies):
        is_own = torch.zeros_like(place, dtype=torch.bool)
        for c in (c for c in seen.given.bags if c.vocabulary == i):
            bounds = seen.given.offsets[c.buffer].long() + begin[c.buffer]
            is_own = is_own | ((place >= bounds[c.first_bag]) & (place < bounds[c.first_bag + c.num_bags]))
        buckets = None
        if v.sketch is not None:
            of_all = seen.buckets[i] if seen.buckets else 0
            buckets = torch.where(is_own & sure(seen.missed), bucket_of(mix(ids ^ v.salt), v.capacity, of_all), -1)
        out.append((torch.where(is_own, seen.rows, -1), buckets))
    return out


def admission_of(vocabulary: Vocabulary) -> Admission:
    """Return the settings of a vocabulary's admission."""
    share = int(vocabulary.admit * EVERYONE) if isinstance(vocabulary.admit, float) else EVERYONE
    policy = POLICIES.get(vocabulary.policy, SCORED)
    how = policy, vocabulary.ttl or 0, least_of(vocabulary.admit), share
    return Admission(*how, vocabulary.num_shared, vocabulary.salt)


def timed_state_of(vocabulary: Vocabulary) -> list[Tensor]:
    tags, entries, *sketch = state_of(vocabulary)
    return [tags, entries, vocabulary.now, *(sketch if least_of(vocabulary.admit) else [])]


def with_timed_state(vocabulary: Vocabulary, state: Sequence[Tensor]) -> Vocabulary:
    tags, entries, now, *sketch = state
    return with_state(vocabulary, [tags, entries, *sketch], now)
