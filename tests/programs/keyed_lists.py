"""The operations of KeyedJaggedTensor on plain lists: the oracle of a machine that applies them in any order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple


class Column(NamedTuple):
    """The bags of a key, and their weights or None: lists of lists of numbers."""

    bags: list
    weights: list | None

    def at(self, positions: Iterable[int]) -> "Column":
        return self.each(lambda bags: [bags[p] for p in positions])

    def each(self, fn: Callable[[list], list]) -> "Column":
        return Column(fn(self.bags), None if self.weights is None else fn(self.weights))

    def contents(self) -> list:
        """Return what makes two bags equal: the ids, and the weights if the key has some."""
        return [(*b, "of", *w) for b, w in zip(self.bags, self.weights or [()] * len(self.bags), strict=True)]


class Lists(NamedTuple):
    """A KeyedJaggedTensor's content. keys may repeat. ragged: whether it has strides. inverse: a list for each key."""

    keys: tuple[str, ...]
    columns: list[Column]
    ragged: bool = False
    inverse: list[list[int]] | None = None
    examples: int = 0  # of a value without keys, or of one with inverse indices

    @property
    def counts(self) -> list[int]:
        return [len(c.bags) for c in self.columns]

    @property
    def num_examples(self) -> int:
        return self.examples if self.inverse is not None or not self.columns else self.counts[0]

    @property
    def size(self) -> int:
        return sum(len(bag) for c in self.columns for bag in c.bags)


def take_keys(x: Lists, positions: Sequence[int]) -> Lists:
    inverse = None if x.inverse is None else [x.inverse[p] for p in positions]
    examples = x.examples if x.inverse is not None else 0 if x.ragged else x.num_examples
    return Lists(tuple(x.keys[p] for p in positions), [x.columns[p] for p in positions], x.ragged, inverse, examples)


def take_examples(x: Lists, positions: Sequence[int]) -> Lists:
    if x.inverse is not None:
        return x._replace(inverse=[[own[p] for p in positions] for own in x.inverse], examples=len(positions))
    return x._replace(columns=[c.at(positions) for c in x.columns], examples=len(positions))


def concat(parts: Sequence[Lists]) -> Lists:
    full = [p for p in parts if p.keys] or parts[:1]
    columns = [c for p in full for c in p.columns]
    counts = [len(c.bags) for c in columns]
    inverse = None if parts[0].inverse is None else [own for p in parts for own in p.inverse]
    return Lists(tuple(k for p in full for k in p.keys), columns, len(set(counts)) > 1, inverse, parts[0].examples)


def keep(x: Lists, is_kept: Callable[[int, int, int], bool]) -> Lists:
    """Return the values for which is_kept(number of the value, place of its key, value)."""
    place, columns = 0, []
    for f, c in enumerate(x.columns):
        own = []
        for bag in c.bags:
            own.append([i for i, v in enumerate(bag) if is_kept(place + i, f, v)])
            place += len(bag)
        some = lambda bags, own=own: [[bag[i] for i in at] for bag, at in zip(bags, own, strict=True)]
        columns.append(c.each(some))
    return x._replace(columns=columns)


def dedup(x: Lists, chosen: Sequence[str], num_parts: int) -> Lists:
    columns, inverse, n = [], [], x.num_examples
    for f, column in enumerate(x.columns):
        own = list(range(n)) if x.inverse is None else x.inverse[f]
        names = column.contents() if x.keys[f] in chosen else list(range(len(column.bags)))
        parts = [own[p * n // num_parts : (p + 1) * n // num_parts] for p in range(num_parts)]
        seen = [{names[b]: b for b in reversed(part)} for part in parts]  # the first bag of each name
        orders = [list(dict.fromkeys(names[b] for b in part)) for part in parts]
        most = max(map(len, orders), default=0)
        at, places = [], []
        for i, (order, first, part) in enumerate(zip(orders, seen, parts, strict=True)):
            at += [first[name] for name in order] + [None] * (most - len(order))
            places += [order.index(names[b]) + i * most for b in part]
        columns.append(column.each(lambda bags, at=at: [[] if b is None else bags[b] for b in at]))
        inverse.append(places)
    counts = [len(c.bags) for c in columns]
    return Lists(x.keys, columns, len(set(counts)) > 1, inverse, n)


def with_bags(x: Lists, counts: Sequence[int]) -> Lists:
    more = [c.each(lambda b, n=n: b + [[] for _ in range(n - len(b))]) for c, n in zip(x.columns, counts, strict=True)]
    return x._replace(columns=more, ragged=len(set(counts)) > 1)


def pooled(x: Lists, tables: Mapping[str, list], weighted: Mapping[str, bool]) -> dict[str, list[list[float]]]:
    """Return {key: the sum of each example's rows}, of the first place of each key."""
    out = {}
    for f, key in enumerate(x.keys):
        if key in out:
            continue
        c = x.columns[f]
        scale = c.weights if weighted[key] else [[1.0] * len(bag) for bag in c.bags]
        rows = tables[key]
        sums = [
            [sum(w * rows[v][d] for v, w in zip(bag, own, strict=True)) for d in range(len(rows[0]))]
            for bag, own in zip(c.bags, scale, strict=True)
        ]
        out[key] = sums if x.inverse is None else [sums[b] for b in x.inverse[f]]
    return out
