"""A model of vocabularies in dicts and loops: what `fr.find`, `fr.admit` and `fr.expire` must return."""

from collections.abc import Callable, Sequence

import funcrec as fr

SLOTS, GAMMA, WORD, LOWER = 128, 0x9E3779B97F4A7C15, 2**64 - 1, 2**32 - 1


def mix(z: int) -> int:
    """Return SplitMix64's finaliser of z, as an unsigned number."""
    z &= WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


class Model:
    """The rows of a vocabulary as {bucket: {slot: [id, stamp, count]}}, and the counts of missed ids by bucket."""

    def __init__(self, like: fr.Vocabulary):
        self.num_buckets, self.policy, self.admission, self.ttl = (
            like.capacity // SLOTS,
            like.policy,
            like.admit,
            like.ttl,
        )
        self.num_shared, self.salt = like.num_shared, like.seed * GAMMA & WORD
        self.slots: dict[int, dict[int, list[int]]] = {b: {} for b in range(self.num_buckets)}
        self.sketch, self.now = {b: [0] * SLOTS for b in self.slots}, 0

    def hash(self, i: int) -> int:
        return mix(i & WORD ^ self.salt)

    def bucket(self, i: int) -> int:
        return (self.hash(i) >> 32) * self.num_buckets >> 32

    def find(self, i: int) -> int:
        for slot, entry in self.slots[self.bucket(i)].items():
            if entry[0] == i:
                return self.bucket(i) * SLOTS + slot
        return self.num_buckets * SLOTS + ((self.hash(i) & LOWER) * self.num_shared >> 32) if self.num_shared else -1

    def age(self, entry: Sequence[int]) -> int:
        return self.now - entry[1] & LOWER

    def score(self, age: int, count: int) -> float:
        if isinstance(self.policy, Callable):
            return self.policy(age, count)
        return {"lru": 0, "lfu": count, "distance_lfu": count / (age + 1)}[self.policy]

    def counters(self, i: int) -> tuple[int, int]:
        first = self.hash(i) >> 8 & 127
        return first, (first + 1 + (self.hash(i) >> 15 & 63)) & 127

    def admit(self, ids: Sequence[int], now: int | None = None) -> tuple[list, int, int]:
        """Take a step. Return (changes (row, new id, old id or None), distinct ids found, distinct ids refused)."""
        self.now = self.now + 1 if now is None else max(self.now, now)
        times = {i: ids.count(i) for i in ids}
        read = {self.find(i) for i in times if self.is_known(i)}
        candidates, missed, changes, before = {}, [i for i in times if not self.is_known(i)], [], {}
        for i in missed:
            counts, seen = self.sketch[self.bucket(i)], times[i]
            if self.least:
                seen += min(counts[c] for c in self.counters(i))
            if self.passes(i, seen):
                candidates.setdefault(self.bucket(i), []).append((-seen, self.hash(i), i))
        for b, own in sorted(candidates.items()):
            taken = sorted(range(SLOTS), key=lambda s: self.place(b, s, read))
            for (seen, _, i), slot in zip(sorted(own), taken):
                old = self.slots[b].get(slot)
                kind, score, *_ = self.place(b, slot, read)
                if kind == 3 or (kind == 2 and self.compares and self.score(0, -seen) <= score):
                    continue
                changes.append((b * SLOTS + slot, i, None if old is None else old[0]))
                before[b, slot] = [i, self.now, -seen - times[i]]
        for (b, slot), entry in before.items():
            self.slots[b][slot] = entry
        for i in times:
            if self.is_known(i):
                entry = self.slots[self.bucket(i)][self.find(i) % SLOTS]
                entry[1:] = self.now & LOWER, min(entry[2] + times[i], LOWER)
        self.count_missed(missed, times)
        return changes, len(read), len(missed) - len(changes)

    def is_known(self, i: int) -> bool:
        return 0 <= self.find(i) < self.num_buckets * SLOTS

    @property
    def least(self) -> int:
        return self.admission if isinstance(self.admission, int) and self.admission > 1 else 0

    @property
    def compares(self) -> bool:
        return self.policy in ("lfu", "distance_lfu")

    def passes(self, i: int, seen: int) -> bool:
        if isinstance(self.admission, float):
            return mix(self.hash(i) + GAMMA * (self.now + 1)) >> 11 < int(self.admission * 2**53)
        return seen >= self.least

    def place(self, b: int, slot: int, read: set[int]) -> tuple:
        """Return what slots are sorted by: free, expired, then by score; the rows that the step reads come last."""
        entry = self.slots[b].get(slot)
        if entry is None:
            return 0, 0, 0, slot
        if b * SLOTS + slot in read:
            return 3, 0, 0, slot
        age = self.age(entry)
        if self.ttl is not None and age > self.ttl:
            return 1, 0, -age, slot
        return 2, self.score(age, entry[2]), -age, slot

    def count_missed(self, missed: Sequence[int], times: dict[int, int]) -> None:
        for i in missed if self.least else ():
            for c in self.counters(i):
                counts = self.sketch[self.bucket(i)]
                counts[c] = min(counts[c] + times[i], 255)
        for b in {self.bucket(i) for i in missed} if self.least else ():
            if sum(self.sketch[b]) >= 64 * self.least:
                self.sketch[b] = [c >> 1 for c in self.sketch[b]]

    def expire(self) -> list[tuple[int, int]]:
        """Remove the ids beyond the ttl. Return their (row, id)."""
        gone = [(b, s) for b, own in self.slots.items() for s, e in own.items() if self.age(e) > self.ttl]
        return sorted((b * SLOTS + s, self.slots[b].pop(s)[0]) for b, s in gone)
