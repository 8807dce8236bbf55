"""Packing: the problem of the planner. Each item takes one of several options, and its shards go to sets of ranks.

    M_k = max over ranks r of load[k, r], at most 1 for k of `once`;
    minimise Σ_k weights_k · M_k    where Σ_k a_k · M_k ≤ limit holds for every cap

A resource k is anything that loads ranks: seconds, bytes, rows of a bank. Seconds have weight 1, because the slowest
rank counts. Bytes have a cap, because every rank has its own memory. A bank has as many rows on all ranks as on the
fullest rank, so it has both a weight and a cap. Costs that are paid once, however many items need them (the latency of
an exchange), are in `once`: each item that needs such a resource has a base of 1.
Shapes: K resources, N ranks, S shards of an option, P places.
"""

import copy
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

EXCESS = 100.0  # the charge for a broken cap, in objectives, for each whole limit of excess


class Option(NamedTuple):
    """One way to place an item.

    shards: f[S, K], the loads that a shard adds on every rank of its place.
    places: the sets of ranks that a shard may lie on, all of one size.
    how: "any": a shard may lie on any place; "apart": each shard lies on a place of its own; "fixed": shard i lies on
      place i.
    base: f[K], the loads that the option adds on every rank, wherever the shards lie.
    """

    label: tuple[Any, ...]
    shards: tuple[tuple[float, ...], ...]
    places: tuple[tuple[int, ...], ...]
    how: Literal["any", "apart", "fixed"] = "any"
    base: tuple[float, ...] = ()


class Item(NamedTuple):
    """A unit of placement: a table, or tables that go together."""

    name: str
    options: tuple[Option, ...]


class Cap(NamedTuple):
    """The condition Σ_k factors_k · M_k ≤ limit."""

    name: str
    factors: tuple[float, ...]
    limit: float


class Packing(NamedTuple):
    """A problem. weights: f[K], the weights in the objective. once: resources that only bases load, by 1 or 0.

    slowness: f[N], the factors, 1 or more, of a rank's loads of the resources `timed`; () for even ranks.
    """

    items: tuple[Item, ...]
    num_ranks: int
    weights: tuple[float, ...]
    caps: tuple[Cap, ...] = ()
    once: tuple[int, ...] = ()
    slowness: tuple[float, ...] = ()
    timed: tuple[int, ...] = ()

    @property
    def pace(self) -> np.ndarray:
        """Return the factor of each resource's load on each rank, f[K, N]."""
        out = np.ones((len(self.weights), self.num_ranks))
        if self.slowness:
            out[list(self.timed)] = self.slowness
        return out

    @property
    def ceilings(self) -> np.ndarray:
        """Return an upper bound on each M_k, f[K]."""
        return np.array([1.0 if k in self.once else np.inf for k in range(len(self.weights))])


class Choice(NamedTuple):
    """The choice of an item: the number of its option, and the number of each shard's place; () for fixed places."""

    option: int
    places: tuple[int, ...]


class Arrays(NamedTuple):
    """An option in numpy, with the U resources that it loads.

    used: i[U].
    shards: f[S, U], the loads of the shards with a choice of place.
    ranks: i[P, q], the places.
    base: f[U, N] or f[U, 1], the loads that are added wherever shards go.
    """

    used: np.ndarray
    shards: np.ndarray
    ranks: np.ndarray
    base: np.ndarray
    how: str


def arrays_of(option: Option, num_resources: int, num_ranks: int, pace: np.ndarray | None = None) -> Arrays:
    """Return the option in numpy. pace: f[K, N], the factors of loads on ranks; None for 1."""
    shards = np.array(option.shards, dtype=np.float64).reshape(-1, num_resources)
    base = np.array(option.base or (0.0,) * num_resources, dtype=np.float64)[:, None]
    ranks = np.array(option.places, dtype=np.int64).reshape(len(option.places), -1)
    if option.how == "fixed" or (len(ranks) == 1 and option.how == "any"):
        base = np.repeat(base, num_ranks, 1)
        for i, shard in enumerate(shards):
            base[:, ranks[i if option.how == "fixed" else 0]] += shard[:, None]
        shards, ranks = shards[:0], ranks[:0]
    base = base if pace is None else base * pace
    used = np.flatnonzero((shards != 0).any(0) | (base != 0).any(1))
    return Arrays(used, shards[:, used], ranks, base[used], option.how)


class Loads:
    """The loads of a partial plan, which change as items are put and taken.

    `choices` is None for an item that is not placed.
    """

    def __init__(self, packing: Packing):
        self.weights = np.array(packing.weights, dtype=np.float64)
        size = len(self.weights)
        self.factors = np.array([c.factors for c in packing.caps], dtype=np.float64).reshape(-1, size)
        limits = np.array([c.limit for c in packing.caps], dtype=np.float64)
        self.factors = self.factors / np.maximum(limits, 1e-300)[:, None]  # a cap holds if factors · M is at most 1
        self.ceilings = packing.ceilings
        self.pace = packing.pace
        own = self.pace if packing.slowness else None
        self.options = [[arrays_of(o, size, packing.num_ranks, own) for o in item.options] for item in packing.items]
        self.load = np.zeros((size, packing.num_ranks))
        self.most = np.zeros(size)
        self.choices: list[Any] = [None] * len(packing.items)
        self.scale = 1.0  # the size of an objective, so that a broken cap outweighs it

    def cost(self, most: np.ndarray) -> np.ndarray:
        """Return the objective plus the charge for broken caps, f[...], for M f[..., K]."""
        excess = np.maximum(most @ self.factors.T - 1.0 - 1e-12, 0.0).sum(-1)
        return most @ self.weights + EXCESS * self.scale * excess

    def copy(self) -> "Loads":
        """Return a copy that changes apart from the original. Both share the options, which nothing changes."""
        out = copy.copy(self)
        out.load, out.most, out.choices = self.load.copy(), self.most.copy(), list(self.choices)
        return out

    @property
    def value(self) -> float:
        return float(self.cost(self.most))

    @property
    def excess(self) -> float:
        return float(np.maximum(self.factors @ self.most - 1.0 - 1e-12, 0.0).sum())

    def _most(self, used: np.ndarray) -> np.ndarray:
        return np.minimum(self.load[used].max(1), self.ceilings[used])

    def _add(self, item: int, choice: Choice, sign: float) -> None:
        own = self.options[item][choice.option]
        self.load[own.used] += sign * own.base
        for shard, place in zip(own.shards, choice.places, strict=True):
            at = own.used[:, None], own.ranks[place][None, :]
            self.load[at] += sign * shard[:, None] * self.pace[at]

    def put(self, item: int, choice: Choice) -> None:
        self._add(item, choice, 1.0)
        self.choices[item] = choice
        used = self.options[item][choice.option].used
        self.most[used] = self._most(used)

    def take(self, item: int) -> Choice:
        choice = self.choices[item]
        self._add(item, choice, -1.0)
        self.choices[item] = None
        used = self.options[item][choice.option].used
        self.load[used] = np.where(
            np.abs(self.load[used]) < 1e-13 * np.maximum(self.most[used], 1e-300)[:, None], 0, self.load[used]
        )
        self.most[used] = self._most(used)
        return choice

    def best(self, item: int, option: int) -> tuple[float, float, Choice]:
        """Return (cost, load of the ranks, choice) of the best places for an item that is not placed.

        Each shard in turn goes where it costs least. Equal shards go together if each shard has a place of its
        own.
        """
        own = self.options[item][option]
        used, most, load, pull = own.used, self.most.copy(), self.load[own.used] + own.base, self._pull
        most[used] = np.maximum(most[used], np.minimum(load.max(1), self.ceilings[used]))
        chosen: list[int] = []
        pace = self.pace[used]
        near, free = 0.0, np.ones(len(own.ranks), dtype=bool)
        while len(chosen) < len(own.shards):
            shard = own.shards[len(chosen)]
            alike = (own.shards[len(chosen) :] == shard).all(1)
            num = 1 if own.how != "apart" else len(alike) if alike.all() else int(np.argmin(alike))
            more = load[:, own.ranks] + shard[:, None, None] * pace[:, own.ranks]
            there = np.minimum(more.max(-1).T, self.ceilings[used])  # [P, U]
            costs = self._costs_with(most, used, np.maximum(there, most[used]))
            costs[~free] = np.inf
            costs = np.maximum(costs, costs.min() * (1 + 1e-12))  # costs that are equal within rounding
            pulls = there @ pull[used]
            places = (
                np.lexsort((pulls, costs))[:num]
                if num > 1
                else [np.argmin(np.where(costs <= costs.min(), pulls, np.inf))]
            )
            for place in map(int, places):
                chosen.append(place)
                load[:, own.ranks[place]] += shard[:, None] * pace[:, own.ranks[place]]
                free[place] = own.how != "apart"
            most[used] = np.maximum(most[used], there[places].max(0))
            near = max(near, float(pulls[places].max()))
        return float(self.cost(most)), near, Choice(option, tuple(chosen))

    def _costs_with(self, most: np.ndarray, used: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return the `cost` that the loads f[P, U] of the used resources would give, f[P]."""
        more = after - most[used]
        excess = np.maximum(self.factors @ most - 1.0 - 1e-12 + more @ self.factors[:, used].T, 0.0).sum(-1)
        return float(most @ self.weights) + more @ self.weights[used] + EXCESS * self.scale * excess

    @property
    def _pull(self) -> np.ndarray:
        """Return the price of each resource, f[K], to break ties among places; 0 for resources that are paid once."""
        return np.where(self.ceilings < np.inf, 0.0, self.weights + self.factors.sum(0) * self.scale + 1e-300)


def loads_of(packing: Packing, choices: Sequence[Choice]) -> Loads:
    loads = Loads(packing)
    for i, c in enumerate(choices):
        loads.put(i, c)
    return loads


def totals(packing: Packing) -> list[list[np.ndarray]]:
    """Return the load of all ranks together, f[K], for each option of each item; 0 for resources that are paid once."""
    return [[_summed(o, packing)[0] for o in item.options] for item in packing.items]


def peaks(packing: Packing) -> list[list[np.ndarray]]:
    """Return the least load that some rank must have, f[K], for each option of each item."""
    return [[_summed(o, packing)[1] for o in item.options] for item in packing.items]


def floors(packing: Packing) -> list[list[np.ndarray]]:
    """Return the least load of every rank, f[K], for each option of each item; 0 for resources that are paid once."""
    return [[_summed(o, packing)[2] for o in item.options] for item in packing.items]


def _summed(option: Option, packing: Packing) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    size, once = len(packing.weights), packing.ceilings < np.inf
    shards = np.array(option.shards, dtype=np.float64).reshape(-1, size)
    base = np.array(option.base or (0.0,) * size)
    top, low = shards.max(0) if len(shards) else np.zeros(size), np.zeros(size)
    if option.how == "fixed":
        own = np.zeros((packing.num_ranks, size))
        for shard, place in zip(shards, option.places, strict=False):
            own[list(place)] += shard
        top, low = own.max(0), own.min(0)
    elif len(option.places) == 1 and len(option.places[0]) == packing.num_ranks:
        low = shards.sum(0)
    total = shards.sum(0) * len(option.places[0]) + base * packing.num_ranks
    return np.where(once, 0.0, total), top + base, np.where(once, 0.0, low + base)


def without_dominated(packing: Packing) -> tuple[Packing, list[list[int]]]:
    """Return a packing without options that are never better than another option with the same places.

    The result is (the packing, for each item the numbers of the options that stay).
    """
    items, numbers = [], []
    for item in packing.items:
        alike: dict[tuple, list[int]] = {}
        for i, o in enumerate(item.options):
            alike.setdefault((o.how, o.places, len(o.shards)), []).append(i)
        costs = [np.array([*o.shards, o.base or (0.0,) * len(packing.weights)]) for o in item.options]
        kept = sorted(j for own in alike.values() for j in own if not any(_beats(costs, i, j) for i in own if i != j))
        items.append(Item(item.name, tuple(item.options[i] for i in kept)))
        numbers.append(kept)
    return packing._replace(items=tuple(items)), numbers


def _beats(costs: Sequence[np.ndarray], i: int, j: int) -> bool:
    """Return whether option i costs nowhere more than option j. Of two equal options the first wins."""
    return bool((costs[i] <= costs[j]).all()) and (i < j or bool((costs[i] < costs[j]).any()))
