"""Generated problems for the planner's solver, and a search of all plans of a problem."""

import itertools
import random

import numpy as np

from funcrec.planner._packing import Cap, Item, Option, Packing

SIZES = (1.0, 2.0, 5.0, 10.0)


def packing(seed: int) -> Packing:
    """Return a random problem with up to 5 items with several options on up to 4 ranks. Loads are time, memory, a
    bank's rows, and two latencies. The greatest number of a bank's rows has a price. Each latency is paid once. In some
    problems memory is scarce, in some insufficient."""
    draw = random.Random(seed)
    num_ranks, k = draw.choice([1, 2, 2, 3, 4]), 2 + draw.choice([0, 1])
    needs = random.Random(seed + 1_000)  # a source of which options need which of the two latencies
    once = (k, k + 1)
    single = tuple((r,) for r in range(num_ranks))
    every = (tuple(range(num_ranks)),)
    items = []
    for i in range(draw.randint(0, 5 if num_ranks < 4 else 4)):
        c, m = draw.choice(SIZES) * draw.random(), draw.choice(SIZES) * draw.random() + 0.1
        own = lambda *x: x[:k]
        options = [Option("one rank", (own(c, m, draw.random()),), single)]
        if draw.random() < 0.6:
            base = own(0.1 * c, 0.0, 0.0)
            options.append(Option("all ranks", (own(c / num_ranks * 1.2, m / num_ranks, 0.0),), every, "any", base))
        if draw.random() < 0.5 and num_ranks > 1:
            options.append(Option("two ranks", (own(c * 0.6, m / 2, 0.2),) * 2, single, "apart"))
        if draw.random() < 0.3:
            options.append(Option("two parts", (own(c * 0.6, m / 2, 0.2), own(c * 0.5, m / 2, 0.1)), single))
        if draw.random() < 0.3:
            parts = tuple(own(c / (num_ranks + r) * 1.1, m / num_ranks, 0.0) for r in range(num_ranks))
            options.append(Option("a part each", parts, single, "fixed"))
        if num_ranks == 4 and draw.random() < 0.5:
            options.append(Option("a host", (own(c * 0.55, m / 2, 0.0),), ((0, 1), (2, 3))))
        items.append(Item(f"item {i}", tuple(_with_once(o, k, needs) for o in options)))
    least = sum(min(sum(s[1] for s in o.shards) for o in item.options) for item in items)
    limit = draw.choice([0.9, 1.1, 1.5, 4.0]) * max(least / num_ranks, 0.2)
    weights, factors = (1.0, 0.0, 0.7)[:k], (0.0, 1.0, 0.0)[:k]
    prices = (needs.choice([0.1, 1.0, 4.0]), needs.choice([0.1, 1.0, 4.0]))
    return Packing(tuple(items), num_ranks, (*weights, *prices), (Cap("memory", (*factors, 0.0, 0.0), limit),), once)


def _with_once(option: Option, k: int, needs: random.Random) -> Option:
    """Return the option with an added base of 1 for each latency that it needs."""
    base = (option.base or (0.0,) * k) + tuple(float(needs.random() < 0.5) for _ in range(2))
    return option._replace(shards=tuple((*s, 0.0, 0.0) for s in option.shards), base=base)


def best_of_all(packing: Packing) -> float:
    """Return the least objective of all plans within the caps, or infinity without such a plan."""
    own = [[load for o in item.options for load in _loads(packing, o)] for item in packing.items]
    best, weights = np.inf, np.array(packing.weights)
    factor = np.ones((len(weights), packing.num_ranks))
    for k in packing.timed if packing.slowness else ():
        factor[k] = packing.slowness
    for loads in itertools.product(*own):
        most = (factor * sum(loads, np.zeros(factor.shape))).max(1)
        most = [min(m, 1.0) if k in packing.once else m for k, m in enumerate(most)]
        if all(np.dot(c.factors, most) <= c.limit * (1 + 1e-12) for c in packing.caps):
            best = min(best, float(weights @ most))
    return best


def _loads(packing: Packing, option: Option) -> list[np.ndarray]:
    """Return f[K, N] for each way to place the option's shards, without duplicates."""
    places, shards = range(len(option.places)), len(option.shards)
    ways = {
        "fixed": [tuple(range(shards))],
        "apart": itertools.permutations(places, shards),
        "any": itertools.product(places, repeat=shards),
    }[option.how]
    out = {}
    for way in ways:
        load = np.zeros((len(packing.weights), packing.num_ranks))
        load += np.array(option.base or (0.0,) * len(packing.weights))[:, None]
        for shard, place in zip(option.shards, way, strict=True):
            for r in option.places[place]:
                load[:, r] += shard
        out[load.tobytes()] = load
    return list(out.values())
