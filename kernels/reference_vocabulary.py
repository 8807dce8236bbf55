"""Find ids in a set-associative vocabulary and admit new ones, in plain torch.

    h = mix(id ^ salt)        bucket = ⌊h₃₂ · R / W / 2³²⌋        row = W · bucket + slot

h₃₂ is the upper half of h, and W = 128. `mix` is a bijection, so h orders ids totally. A row's tag is 0 if the row is
free, else the last byte of h (1 for 0). Its entry is [id, stamp · 2³² + count]. Stamps and ages are modulo 2³².

A line of 128 counters of a bucket is its sketch: an id adds to two of them each time that it is missed. After a step
that raised the sum of a line to 64 · `least` or more, all its counters are halved.
Shapes: N ids, R rows.
"""

import torch
from funcrec.kernels.reference_quantized import GAMMA, mix, shift_right
from funcrec.kernels.vocabulary import DISTANCE_LFU, LFU, LRU, SCORED, SLOTS, of_shared
from torch import Tensor

LOWER = (1 << 32) - 1  # the lower half of a word
MOST_SEEN = 255  # of a counter of the sketch
FREE, EXPIRED, LIVE, PINNED = range(4)  # the order in which slots are taken; a pinned slot is not taken


def find_ids(tags: Tensor, entries: Tensor, ids: Tensor, valid: Tensor, shared: int, salt: int) -> Tensor:
    ids, (shared, buckets) = ids.long(), of_shared(shared)
    h, rows = mix(ids ^ salt), _find(tags, entries, ids, salt, buckets)
    rows = torch.where(rows < 0, _unknown(h, tags.shape[0], shared), rows)
    return torch.where(_given(ids, valid), rows, -1)


def admit_ids(
    state: list[Tensor],
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
    (tags, entries), (shared, buckets) = state[:2], of_shared(shared)
    n, num_rows, ids = ids.shape[0], tags.shape[0], ids.long()
    rows, given = _find(tags, entries, ids, salt, buckets), _given(ids, valid)
    hit, missed = given & (rows >= 0), given & (rows < 0)
    pinned = _times(rows, hit, num_rows) > 0
    # The distinct missed ids, ascending by h, and how often each was missed.
    h = mix(ids ^ salt)
    order = order_by(unsigned(h), ~missed)
    sorted_h, place = h[order], torch.arange(n, device=ids.device)
    is_first = missed[order] & ((sorted_h != sorted_h.roll(1)) | (place == 0))
    group = is_first.cumsum(0) - 1
    new_h, new_ids = (_put(x.new_zeros(n), group, is_first, x) for x in (sorted_h, ids[order]))
    times, is_new = _times(group, missed[order], n), place < is_first.sum()
    # The candidates by bucket; within a bucket the most frequent first, then by h.
    bucket = bucket_of(new_h, num_rows, buckets)
    seen = times if least == 0 else times + _sketched(state[2], new_h, buckets)
    drawn = shift_right(mix(new_h + GAMMA * (now + 1)), 11)
    fits = is_new & (seen >= least) & (drawn < share)
    by = order_by(-seen, bucket, ~fits)
    fits, bucket, seen = fits[by], bucket[by], seen[by]
    starts = torch.where((bucket != bucket.roll(1)) | (place == 0), place, 0).cummax(0).values
    rank = place - starts
    slot, kind, old_score = _slots(tags, entries, pinned, now, scores, policy, ttl, bucket, rank)
    wins = (
        (kind < LIVE) | (score_of(policy, torch.zeros_like(seen), seen, seen) > old_score) | (policy in (LRU, SCORED))
    )
    admitted = fits & (rank < SLOTS) & (kind < PINNED) & wins
    taken = bucket * SLOTS + slot
    # A missed id's row is the row that it got, or that of unknown ids.
    row_of = torch.where(admitted, taken, _unknown(new_h[by], num_rows, shared))
    row_of = torch.zeros_like(row_of).scatter(0, by, row_of)[group.clamp(0)]
    rows = torch.where(hit, rows, torch.where(missed, torch.zeros_like(rows).scatter(0, order, row_of), -1))
    # The admitted ids come first.
    front = order_by(~admitted)
    admitted, taken, new_ids = admitted[front], taken[front], new_ids[by][front]
    evicted = admitted & (tags[taken] != 0)
    counts = torch.where(admitted, (seen - times[by])[front], 0)
    numbers = torch.stack([admitted.sum(), evicted.sum(), pinned.sum(), is_new.sum() - admitted.sum()])
    changed, old_ids = torch.where(admitted, taken, -1), torch.where(evicted, entries[taken, 0], 0)
    return rows, changed, torch.where(admitted, new_ids, 0), old_ids, evicted, counts, missed, numbers


def settle_ids(
    state: list[Tensor],
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
    buckets: int = 0,
) -> list[Tensor]:
    tags, entries = state[:2]
    num_rows, place = tags.shape[0], torch.arange(changed.shape[0], device=changed.device)
    is_new = (place < numbers[0]) & (changed >= 0) & (changed < num_rows)
    put = lambda x, new: _put(x, changed, is_new, new)
    tags, keys = put(tags, tag_of(mix(new_ids ^ salt))), put(entries[:, 0], new_ids)
    stamp, count = halves(entries[:, 1])
    stamp, count = put(stamp, (now & LOWER).expand(changed.shape)), put(count, counts.clamp(0, LOWER))
    times = _times(rows, (rows >= 0) & (rows < num_rows), num_rows)
    stamp, count = torch.where(times > 0, now & LOWER, stamp), (count + times).clamp(max=LOWER)
    entries = torch.stack([keys, (stamp << 32) | count], 1)
    if least == 0:
        return [tags, entries]
    both = torch.cat(_counters(mix(ids.long() ^ salt), num_rows, buckets))
    added = _times(both, torch.cat([missed, missed]), num_rows)
    sketch = (state[2].long() + added).clamp(max=MOST_SEEN).view(-1, SLOTS)
    is_full = (added.view(-1, SLOTS).sum(1) > 0) & (sketch.sum(1) >= SLOTS // 2 * least)
    sketch = torch.where(is_full[:, None], sketch >> 1, sketch)
    return [tags, entries, sketch.flatten().to(torch.uint8)]


# -- parts -------------------------------------------------------------------------------------------------------


def _given(ids: Tensor, valid: Tensor) -> Tensor:
    return torch.arange(ids.shape[0], device=ids.device) < valid


def _find(tags: Tensor, entries: Tensor, ids: Tensor, salt: int, buckets: int) -> Tensor:
    """Return the row of each id, or -1."""
    h = mix(ids ^ salt)
    slots = torch.arange(SLOTS, device=ids.device)
    rows = bucket_of(h, tags.shape[0], buckets)[:, None] * SLOTS + slots
    same = (tags[rows] == tag_of(h)[:, None]) & (entries[:, 0][rows] == ids[:, None])
    return torch.where(same.any(1), torch.where(same, rows, tags.shape[0]).amin(1), -1)


def bucket_of(h: Tensor, num_rows: int, buckets: int = 0) -> Tensor:
    """Return the bucket of each hashed id, ⌊h₃₂ · R / W / 2³²⌋. buckets: as in `shared_of`."""
    own = num_rows // SLOTS
    bucket = shift_right(shift_right(h, 32) * (buckets or own), 32)
    return bucket % own if buckets else bucket


def tag_of(h: Tensor) -> Tensor:
    """Return the tag of each hashed id, u8."""
    return (h & 255).clamp(min=1).to(torch.uint8)


def _unknown(h: Tensor, num_rows: int, shared: int) -> Tensor:
    """Return the rows that unknown ids share, from R on, or -1 if they share none."""
    return num_rows + shift_right((h & LOWER) * shared, 32) if shared else torch.full_like(h, -1)


def halves(word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stamp and the count of each entry."""
    return shift_right(word, 32), word & LOWER


def _counters(h: Tensor, num_rows: int, buckets: int) -> tuple[Tensor, Tensor]:
    """Return the places of an id's two counters in the sketch."""
    line, first = bucket_of(h, num_rows, buckets) * SLOTS, shift_right(h, 8) & (SLOTS - 1)
    return line + first, line + ((first + 1 + (shift_right(h, 15) & 63)) & (SLOTS - 1))


def _sketched(sketch: Tensor, h: Tensor, buckets: int) -> Tensor:
    first, second = _counters(h, sketch.shape[0], buckets)
    return torch.minimum(sketch[first], sketch[second]).long()


def score_of(policy: int, age: Tensor, count: Tensor, scores: Tensor) -> Tensor:
    """Return the scores that a policy compares, i64. The live row with the least score goes first, among equal ones the
    oldest."""
    if policy == LRU:
        return torch.zeros_like(age)
    if policy == LFU:
        return count
    # The bits of a number >= 0 order as the number does.
    return (count.double() / (age + 1).double()).view(torch.int64) if policy == DISTANCE_LFU else scores


def _slots(tags, entries, pinned, now, scores, policy, ttl, bucket, rank) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slot at place `rank` of a bucket in the order in which slots are taken, its kind and its score."""
    rows = bucket[:, None] * SLOTS + torch.arange(SLOTS, device=bucket.device)
    stamp, count = halves(entries[:, 1][rows])
    age = (now - stamp) & LOWER
    kind = torch.where((age > ttl) & (ttl > 0), EXPIRED, LIVE)
    kind = torch.where(tags[rows] == 0, FREE, torch.where(pinned[rows], PINNED, kind))
    score = torch.where(kind == LIVE, score_of(policy, age, count, age if scores is None else scores[rows]), 0)
    order = order_by(torch.where(kind == FREE, 0, -age), score, kind)
    at = order.gather(1, rank.clamp(max=SLOTS - 1)[:, None])
    return at[:, 0], kind.gather(1, at)[:, 0], score.gather(1, at)[:, 0]


def order_by(*keys: Tensor) -> Tensor:
    """Return the stable order of the last dimension by the last key, then by the key before it, and so on."""
    order = keys[0].argsort(dim=-1, stable=True)
    for key in keys[1:]:
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    return order


def unsigned(h: Tensor) -> Tensor:
    """Return numbers that are ordered as h is without a sign."""
    return h ^ torch.iinfo(torch.int64).min


def _times(places: Tensor, counts: Tensor, size: int) -> Tensor:
    """Return how often each of `size` places occurs where `counts` is true, i64[size]."""
    at = torch.where(counts, places, size)
    return torch.zeros(size + 1, dtype=torch.int64, device=at.device).scatter_add(0, at, torch.ones_like(at))[:-1]


def _put(x: Tensor, places: Tensor, counts: Tensor, new: Tensor) -> Tensor:
    """Return x with new[i] at places[i] where counts[i] is true."""
    at = torch.where(counts, places, x.shape[0])
    return torch.cat([x, x.new_zeros(1)]).scatter(0, at, new.to(x.dtype))[:-1]
