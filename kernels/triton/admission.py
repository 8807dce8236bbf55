"""Admit a step's new ids to vocabularies.

Two sorts make each step's work local. The first, of hashes, puts the occurrences of an id side by side: a group. Groups
are in the order of hashes, so the groups of a bucket are, too. The second sorts groups by (bucket, class, -seen), and
is stable:

    search -> sort by hash -> groups -> sort by bucket -> a program for each bucket with candidates -> rows, changes

So the candidates of a bucket are in the order in which they choose, and the ids that pin its slots come next. The
program counts for each slot how many slots are taken before it, which is the number of the candidate that it gets.
No float is compared but as bits, and counters that programs share are integers.
Cost: the two sorts; 2 KB for each bucket that has candidates. Nothing depends on the number of rows.
Shapes: N ids, P places of changes, V vocabularies, G groups (known on the device only; at most N).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.device import GAMMA, kernel, lanes, mix, of_greatest, of_sum, upper_bound
from funcrec.kernels.triton.vocabulary import (
    ENTRIES,
    LEAST,
    POLICY,
    SCORES,
    SHARE,
    SKETCH,
    TAGS,
    TTL,
    Form,
    Places,
    as_ids,
    bucket_in,
    counters_of,
    fact,
    find,
    hash_in,
    of_columns,
    step_in,
    together,
    unknown_in,
    vocabulary_at,
    whole,
)
from funcrec.kernels.vocabulary import (
    DISTANCE_LFU,
    LFU,
    SCORED,
    SLOTS,
    Admission,
    admissions_of,
    columns_of,
    places_of,
    states_of,
)
from torch import Tensor

IDS = 8  # of a program, with 128 slots each
NEAR = 32  # hits of a bucket that a program reads at once
MOST_IDS = 2**31 - 256  # a group's place in the second sort has 31 bits for what was seen
SIGN, NOTHING = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)
SEEN = tl.constexpr(2**31 - 1)
CANDIDATE, HIT, LEFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the classes of groups
FREE, EXPIRED, LIVE, PINNED = (tl.constexpr(i) for i in range(4))  # the order in which slots are taken
BY_COUNT, BY_DISTANCE, BY_SCORE = tl.constexpr(LFU), tl.constexpr(DISTANCE_LFU), tl.constexpr(SCORED)


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
    call, how = "funcrec.kernels.triton.admit_ids", Admission(policy, ttl, least, share, shared, salt)
    tags, entries, *sketch = on.contiguous(state)
    own = None if scores is None else scores.contiguous()
    form = Form(tags, entries, how, ids.shape[0], sketch[0] if least and sketch else None, own, now)
    out = _admit(call, [form], as_ids(call, ids), whole(ids, valid))
    rows, missed, changed, new_ids, counts, numbers, old_ids, evicted = out
    return rows, changed, new_ids, old_ids, evicted, counts, missed, numbers.flatten()


def admit_columns(
    state: Sequence[Tensor],
    scores: Sequence[Tensor],
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor],
    how: Sequence[int],
    columns: Sequence[int],
) -> tuple[Tensor, ...]:
    """Return (rows, missed, changed, new_ids, counts, numbers), as `ops.admit_columns`."""
    call, device = "funcrec.kernels.triton.admit_columns", (state[0] if state else ids[0]).device
    forms = forms_of(on.contiguous(state), ids, how, columns, on.contiguous(scores))
    every = joined(call, ids, device)
    places = of_columns(call, len(forms), ids, offsets, columns, device)
    return _admit(call, forms, every, places)[:6]


def forms_of(state, ids: Sequence[Tensor], how: Sequence[int], columns: Sequence[int], scores=()) -> list[Form]:
    """Return the vocabularies of a step, which is the one after their `now`."""
    settings, each = admissions_of(how), iter(scores)
    rooms = places_of(settings, columns_of(columns), [x.shape[0] for x in ids])
    out = []
    for x, room, (tags, entries, now, *sketch) in zip(settings, rooms, states_of(settings, state), strict=True):
        own = next(each) if scores and x.policy == SCORED else None
        out.append(Form(tags, entries, x, room, sketch[0] if sketch else None, own, now, 1))
    return out


def _admit(call: str, forms: Sequence[Form], ids: Tensor, places: Places) -> tuple[Tensor, ...]:
    """Return rows i64[N] and missed b[N] of all ids; changed, new_ids, counts i64[P]; numbers i64[V, 4]; old_ids
    i64[P], evicted b[P]."""
    _check(call, forms)
    them = together(call, forms, ids.device)
    n, count, room, device = ids.shape[0], them.count, them.room, ids.device
    if n > MOST_IDS:
        on.fail("there are too many ids.", f"{n}", f"at most {MOST_IDS}", "several calls", call)
    new = lambda *shape, dtype=torch.int64: torch.empty(shape, dtype=dtype, device=device)
    out, missed = torch.full_like(ids, -1), torch.zeros_like(ids, dtype=torch.bool)
    zeros = lambda *shape, dtype=torch.int64: torch.zeros(shape, dtype=dtype, device=device)
    changed, new_ids, counts, numbers = zeros(room) - 1, zeros(room), zeros(room), zeros(count, 4)
    old_ids, evicted = zeros(room), zeros(room, dtype=torch.bool)
    told = out, missed, changed, new_ids, counts, numbers, old_ids, evicted
    if n == 0 or count == 0:
        return told
    # The place of each id's row, and the groups.
    found, keys, grid, size = new(n), new(n), (on.cdiv(n + 1, on.BLOCK),), (n, count, on.steps(count))
    on.launch(
        _search, (on.cdiv(n, IDS),), *places, them.about, ids, found, keys, *size, TILE_IDS=IDS, SLOTS=SLOTS,
        num_warps=4,
    )  # fmt: skip
    keys, order = _by_hash(keys, places.begins, count)
    heads = new(n + 1, dtype=torch.int32)
    on.launch(_heads, grid, keys, places.begins, heads, *size, LANES=on.BLOCK)
    of, starts = runs(heads)
    # The groups by bucket, with the candidates of a bucket first.
    by, rows, kinds = new(n), new(n), new(n)
    groups = of, starts, order, places.begins
    on.launch(_groups, grid, *groups, keys, found, them.bases, them.about, by, rows, kinds, *size, LANES=on.BLOCK)
    by, of_group = torch.sort(by, stable=True)
    buckets, taken = new(n + 1, dtype=torch.int32), new(n)
    on.launch(_firsts, grid, by, buckets, taken, n, LANES=on.BLOCK)
    bucket_of, bucket_starts = runs(buckets)
    on.launch(
        _take, (min(n, them.buckets),), by, of_group, rows, bucket_of, bucket_starts, them.bases, them.about, taken,
        numbers, *size, on.steps(n), NEAR=NEAR, SLOTS=SLOTS, num_warps=8,
    )  # fmt: skip
    # What changed, in the order of candidates, and the rows of all ids.
    place, before = (taken >= 0).cumsum(0), numbers[:, 0].cumsum(0) - numbers[:, 0]
    on.launch(
        _changes, grid, by, of_group, taken, place, before.contiguous(), *groups, places.at, ids, them.rooms,
        them.about, rows, changed, new_ids, counts, old_ids, evicted, *size, LANES=on.BLOCK,
    )  # fmt: skip
    on.launch(_spread, grid, *groups, keys, places.at, found, rows, them.about, out, missed, *size, LANES=on.BLOCK)
    sums = zeros(n + 1)
    torch.cumsum(kinds, 0, out=sums[1:])
    on.launch(_totals, (on.cdiv(count, 64),), places.begins, of, sums, numbers, count, LANES=64)
    return told


def joined(call: str, ids: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([as_ids(call, x) for x in ids]) if ids else torch.empty(0, dtype=torch.int64, device=device)


def _check(call: str, forms: Sequence[Form]) -> None:
    for f in forms:
        if f.how.policy == SCORED and f.scores is None:
            on.fail("a policy has no scores.", "scores=None", f"i64[{f.tags.shape[0]}]", "LRU, or scores", call)


def _by_hash(keys: Tensor, begins: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the keys, sorted within each vocabulary, and the places that they come from."""
    sorted_keys, order = torch.sort(keys, stable=True)
    if count == 1:
        return sorted_keys, order
    which = torch.bucketize(order, begins[1:], right=True, out_int32=True)
    which, again = torch.sort(which.to(torch.uint8 if count < 255 else torch.int32), stable=True)
    return sorted_keys[again], order[again]


def runs(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of heads up to each place, i32[N + 1], and the place of head u, i64[N + 2], for u from 0."""
    of, n = heads.cumsum(0, dtype=torch.int32), heads.shape[0]
    starts = torch.empty(n + 1, dtype=torch.int64, device=heads.device)
    on.launch(_starts, (on.cdiv(n, on.BLOCK),), heads, of, starts, n, LANES=on.BLOCK)
    return of, starts


@kernel()
def _starts(heads, of, starts, size, LANES: tl.constexpr):
    i = lanes(LANES)
    head = tl.load(heads + i, mask=i < size, other=0) != 0
    tl.store(starts + tl.load(of + i, mask=i < size, other=1) - 1, i, mask=head)


@kernel()
def _search(begins, at, about, ids, found, keys, size, count, steps, TILE_IDS: tl.constexpr, SLOTS: tl.constexpr):
    """Write the row of each id, or -1, and a key that orders ids by their hash without a sign."""
    place = lanes(TILE_IDS)
    v, given = vocabulary_at(begins, place, size, count, steps)
    id = tl.load(ids + tl.load(at + place, mask=given, other=0), mask=given, other=0)
    h = hash_in(about, v, id)
    tl.store(found + place, find(about, v, id, h, given, SLOTS), mask=place < size)
    tl.store(keys + place, tl.where(given, h ^ SIGN, NOTHING), mask=place < size)


@kernel()
def _heads(keys, begins, heads, size, count, steps, LANES: tl.constexpr):
    """Write 1 where a group begins, and after the last id; 0 elsewhere."""
    i = lanes(LANES)
    v, given = vocabulary_at(begins, i, size, count, steps)
    key = tl.load(keys + i, mask=given, other=0)
    before = tl.load(keys + i - 1, mask=given & (i > 0), other=0)
    is_new = (i == tl.load(begins + v)) | (key != before)
    tl.store(heads + i, ((given & is_new) | (i == tl.load(begins + count))).to(tl.int32), mask=i <= size)


@triton.jit
def group_at(of, starts, order, begins, group, size, count, steps):
    """Return (whether the group exists, its vocabulary, its first place in the order of hashes, the next one's)."""
    alive = (group < size) & (group < tl.load(of + tl.load(begins + count)) - 1)
    start = tl.load(starts + group, mask=alive, other=0)
    end = tl.load(starts + group + 1, mask=alive, other=0)
    v, _ = vocabulary_at(begins, start, size, count, steps)
    return alive, v, start, end


@kernel()
def _groups(
    of, starts, order, begins, keys, found, bases, about, by, rows, kinds, size, count, steps, LANES: tl.constexpr
):  # fmt: skip
    """Write the row of each group, or -1; its key in the second sort; and 1 for a hit, 2³² for an id that is new."""
    group = lanes(LANES)
    alive, v, start, end = group_at(of, starts, order, begins, group, size, count, steps)
    row = tl.load(found + tl.load(order + start, mask=alive, other=0), mask=alive, other=-1)
    h = tl.load(keys + start, mask=alive, other=0) ^ SIGN
    bucket, missed, least = bucket_in(about, v, h), alive & (row < 0), fact(about, v, LEAST)
    first, second = counters_of(h)
    line, counted = fact(about, v, SKETCH) + bucket * 128, missed & (least > 0)
    a = tl.load((line + first).to(tl.pointer_type(tl.uint8)), mask=counted, other=0).to(tl.int64)
    b = tl.load((line + second).to(tl.pointer_type(tl.uint8)), mask=counted, other=0).to(tl.int64)
    seen = end - start + tl.minimum(a, b)
    drawn = (mix(h + GAMMA * (step_in(about, v) + 1)) >> 11) & 0x1FFFFFFFFFFFFF
    fits = missed & (seen >= least) & (drawn < fact(about, v, SHARE))
    last = tl.where(fits, seen ^ SEEN, tl.where(missed, LEFT, HIT).to(tl.int64) << 31)
    key = ((tl.load(bases + v) + bucket) << 33) | last
    tl.store(by + group, tl.where(alive, key, NOTHING), mask=group < size)
    tl.store(rows + group, row, mask=group < size)
    kind = tl.where(alive, tl.where(missed, 4294967296, 1), 0)
    tl.store(kinds + group, kind, mask=group < size)


@triton.jit
def is_candidate(key):
    return (key != NOTHING) & (((key >> 31) & 3) == CANDIDATE)


@kernel()
def _firsts(by, buckets, taken, size, LANES: tl.constexpr):
    """Write 1 at the first candidate of each bucket, and -1 as the row that each group takes."""
    i = lanes(LANES)
    key = tl.load(by + i, mask=i < size, other=NOTHING)
    before = tl.load(by + i - 1, mask=(i > 0) & (i < size), other=-1)
    tl.store(buckets + i, (is_candidate(key) & ((key >> 33) != (before >> 33))).to(tl.int32), mask=i <= size)
    tl.store(taken + i, tl.full((LANES,), -1, tl.int64), mask=i < size)


@triton.jit
def bits_of(count, age):
    """Return the bits of count / (age + 1), which order as the number does."""
    return (count.to(tl.float64) / (age + 1).to(tl.float64)).to(tl.int64, bitcast=True)


@triton.jit
def pinned_slots(of_group, rows, by, begin, end, first_row, slot, NEAR: tl.constexpr):
    """Return 1 for the slots whose rows the step reads: those of the groups from begin to end."""
    out = (slot * 0).to(tl.int32)
    for at in range(begin, end, NEAR):
        i = at + tl.arange(0, NEAR)
        group = tl.load(of_group + i, mask=i < end, other=0)
        own = tl.load(rows + group, mask=i < end, other=-1) - first_row
        out = out | tl.reduce((own[None, :] == slot[:, None]).to(tl.int32), 1, of_greatest)
    return out


@triton.jit
def slots_of(about, v, first_row, slot, pinned):
    """Return the order in which slots are taken, (kind, then age and slot), and the score between the two."""
    row = first_row + slot
    tag = tl.load((fact(about, v, TAGS) + row).to(tl.pointer_type(tl.uint8)))
    word = tl.load((fact(about, v, ENTRIES) + 16 * row + 8).to(tl.pointer_type(tl.int64)))
    count, ttl, policy = word & 0xFFFFFFFF, fact(about, v, TTL), fact(about, v, POLICY)
    age = (step_in(about, v) - (word >> 32)) & 0xFFFFFFFF
    kind = tl.where((ttl > 0) & (age > ttl), EXPIRED, LIVE)
    kind = tl.where(tag == 0, FREE, tl.where(pinned != 0, PINNED, kind)).to(tl.int64)
    scored = (kind == LIVE) & (policy == BY_SCORE)
    score = tl.load((fact(about, v, SCORES) + 8 * row).to(tl.pointer_type(tl.int64)), mask=scored, other=0)
    score = tl.where(policy == BY_COUNT, count, tl.where(policy == BY_DISTANCE, bits_of(count, age), score))
    score = tl.where(kind == LIVE, score, 0)
    last = (kind << 40) | (tl.where(kind == FREE, 0, 0xFFFFFFFF - age) << 8) | slot
    return kind, score, last


@kernel()
def _take(
    by, of_group, rows, bucket_of, bucket_starts, bases, about, taken, numbers, size, count, steps, group_steps,
    NEAR: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the row that each candidate of a bucket takes."""
    u = tl.program_id(0).to(tl.int64)
    if u >= tl.load(bucket_of + size):
        return
    start = tl.load(bucket_starts + u)
    bucket = tl.load(by + start) >> 33
    candidates = upper_bound(by, start, start * 0 + size, (bucket << 33) | SEEN, group_steps)
    hits = upper_bound(by, candidates, start * 0 + size, (bucket << 33) | (1 << 31), group_steps)
    v = upper_bound(bases, start * 0, start * 0 + count, bucket, steps) - 1
    first_row = (bucket - tl.load(bases + v)) * SLOTS
    slot = tl.arange(0, SLOTS).to(tl.int64)
    pinned = pinned_slots(of_group, rows, by, candidates, hits, first_row, slot, NEAR)
    kind, score, last = slots_of(about, v, first_row, slot, pinned)
    # Column j comes before row i.
    same = kind[None, :] == kind[:, None]
    less = (score[None, :] < score[:, None]) | ((score[None, :] == score[:, None]) & (last[None, :] < last[:, None]))
    earlier = (kind[None, :] < kind[:, None]) | (same & less)
    at = start + tl.reduce(earlier.to(tl.int32), 1, of_sum)
    key = tl.load(by + at, mask=at < candidates, other=0)
    seen, policy = (key & SEEN) ^ SEEN, fact(about, v, POLICY)
    compared = (policy == BY_COUNT) | (policy == BY_DISTANCE)
    own = tl.where(policy == BY_COUNT, seen, bits_of(seen, seen * 0))
    wins = (at < candidates) & (kind < PINNED) & ((kind < LIVE) | (compared == 0) | (own > score))
    tl.store(taken + at, first_row + slot, mask=wins)
    tl.atomic_add(numbers + 4 * v, tl.reduce(wins.to(tl.int64), 0, of_sum), sem="relaxed")
    tl.atomic_add(numbers + 4 * v + 1, tl.reduce((wins & (kind != FREE)).to(tl.int64), 0, of_sum), sem="relaxed")


@kernel()
def _changes(
    by, of_group, taken, nth, before, of, starts, order, begins, at, ids, rooms, about, rows, changed, new_ids, counts,
    old_ids, evicted, size, count, steps, LANES: tl.constexpr,
):  # fmt: skip
    """Write the changes, each vocabulary's from its own place on, and the rows of admitted groups."""
    i = lanes(LANES)
    row = tl.load(taken + i, mask=i < size, other=-1)
    group = tl.load(of_group + i, mask=i < size, other=0)
    alive, v, start, end = group_at(of, starts, order, begins, group, size, count, steps)
    won = (i < size) & alive & (row >= 0)
    place = tl.load(rooms + v) + tl.load(nth + i, mask=won, other=1) - 1 - tl.load(before + v)
    position = tl.load(at + tl.load(order + start, mask=won, other=0), mask=won, other=0)
    seen = (tl.load(by + i, mask=won, other=0) & SEEN) ^ SEEN
    tag = tl.load((fact(about, v, TAGS) + row).to(tl.pointer_type(tl.uint8)), mask=won, other=0)
    old = tl.load((fact(about, v, ENTRIES) + 16 * row).to(tl.pointer_type(tl.int64)), mask=won & (tag != 0), other=0)
    tl.store(rows + group, row, mask=won)
    written = won & (place < tl.load(rooms + v + 1))
    tl.store(changed + place, row, mask=written)
    tl.store(new_ids + place, tl.load(ids + position, mask=won, other=0), mask=written)
    tl.store(counts + place, seen - (end - start), mask=written)
    tl.store(old_ids + place, old, mask=written)
    tl.store(evicted + place, tag != 0, mask=written)


@kernel()
def _spread(
    of, starts, order, begins, keys, at, found, rows, about, out, missed, size, count, steps, LANES: tl.constexpr
):  # fmt: skip
    """Write the row of each id: where it was, else its group's, else that of unknown ids."""
    i = lanes(LANES)
    v, given = vocabulary_at(begins, i, size, count, steps)
    group = tl.load(of + i, mask=given, other=1) - 1
    place = tl.load(order + i, mask=given, other=0)
    position = tl.load(at + place, mask=given, other=0)
    row = tl.load(rows + group, mask=given, other=0)
    h = tl.load(keys + i, mask=given, other=0) ^ SIGN
    tl.store(out + position, tl.where(row >= 0, row, unknown_in(about, v, h)), mask=given)
    tl.store(missed + position, tl.load(found + place, mask=given, other=0) < 0, mask=given)


@kernel()
def _totals(begins, of, sums, numbers, count, LANES: tl.constexpr):
    """Write how many distinct ids of each vocabulary were found, and how many were refused."""
    v = lanes(LANES)
    inside = v < count
    first = tl.load(of + tl.load(begins + v, mask=inside, other=0), mask=inside, other=1) - 1
    last = tl.load(of + tl.load(begins + v + 1, mask=inside, other=0), mask=inside, other=1) - 1
    told = tl.load(sums + last, mask=inside, other=0) - tl.load(sums + first, mask=inside, other=0)
    tl.store(numbers + 4 * v + 2, told & 0xFFFFFFFF, mask=inside)
    admitted = tl.load(numbers + 4 * v, mask=inside, other=0)
    tl.store(numbers + 4 * v + 3, (told >> 32) - admitted, mask=inside)
