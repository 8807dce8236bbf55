"""Searches for a plan: takes options from the relaxed program, places the heaviest items first, then moves and solves.

    incumbent ≥ optimum ≥ bound;      gap = (incumbent - bound) / incumbent

The incumbent is the best plan found. After moves of single items, a small problem ends with one program of all items,
which proves the optimum. A larger problem ends with many programs. Each of them places a few items again: those of the
slowest rank and some others. Rounds and nodes limit the search, never seconds. Random draws use a fixed seed.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from funcrec.core import sure
from funcrec.planner._milp import place, relax
from funcrec.planner._packing import Choice, Loads, Packing, loads_of, totals, without_dominated

WHOLE = 4000  # the most choices (item, option, place) of one program for all items
PART = 800  # the most choices of the program of a neighbourhood
TIE = 1e-9


class Solution(NamedTuple):
    """choices: one for each item; None if no found plan keeps the caps. bound: no plan has a smaller objective."""

    choices: list[Choice] | None
    objective: float
    bound: float
    excess: float = 0.0

    @property
    def gap(self) -> float:
        """Return the share by which another plan can be better at most, (objective - bound) / objective."""
        return max(0.0, 1.0 - self.bound / self.objective) if self.objective > 0 else 0.0


def solve(packing: Packing, effort: int = 1) -> Solution:
    """Return the best plan that the search finds. `effort` multiplies rounds and nodes.

    Law: the same packing and effort give the same solution.
    """
    packing, numbers = without_dominated(packing)
    found = _search(packing, effort)
    if found.choices is None:
        return found
    return found._replace(
        choices=[Choice(own[c.option], c.places) for own, c in zip(numbers, found.choices, strict=True)]
    )


def _search(packing: Packing, effort: int) -> Solution:
    relaxed = relax(packing, 100 * effort)
    if relaxed.options is None and relaxed.bound == np.inf:
        return Solution(None, np.inf, np.inf)
    best: Loads | None = None
    apart = relax(packing, 100 * effort, beside=False).options  # looser options: some of them lead to better plans
    for options in _starts(packing, relaxed.options, apart):
        loads = improve(longest_first(packing, options), rounds=4 * effort)
        if best is None or (not _keeps(loads), loads.value) < (not _keeps(best), best.value):
            best = loads
    best = sure(best)
    bound, done, is_small = relaxed.bound, False, num_choices(packing) <= WHOLE * effort
    is_open = lambda best: not _keeps(best) or best.value > bound * (1 + TIE)
    if is_small and is_open(best):
        best, bound, done = whole(packing, best, bound, 200 * effort)
        if not done:  # the program of all items ends sooner with a better incumbent
            best = neighbourhoods(packing, best, bound, rounds=10 * effort)
            best, bound, done = whole(packing, best, bound, 1000 * effort)
    if not done and is_open(best):
        best = neighbourhoods(packing, best, bound, rounds=40 * effort)
    if not _keeps(best):
        return Solution(None, np.inf, bound, best.excess)
    best = lean(leaner(packing, best))
    clean = loads_of(packing, best.choices)  # loads without the rounding errors of moves
    value = float(clean.most @ clean.weights)
    return Solution(list(best.choices), value, min(bound, value))


def _keeps(loads: Loads) -> bool:
    """Return whether the loads keep all caps."""
    return loads.excess <= 1e-9


def num_choices(packing: Packing) -> int:
    return sum(len(o.places) if o.how != "fixed" else 1 for item in packing.items for o in item.options)


def _starts(packing: Packing, *relaxed: Sequence[int] | None) -> list[list[int]]:
    """Return choices of options to begin with: those of the relaxed programs, and each item's cheapest and smallest."""
    weights, sums = np.array(packing.weights), totals(packing)
    factors = np.array([c.factors for c in packing.caps]).reshape(-1, len(weights))
    cheapest = [int(np.argmin([s @ weights for s in own])) for own in sums]
    smallest = [int(np.argmin([(factors @ s).sum() for s in own])) for own in sums]
    found: list[list[int]] = []
    for more in (*relaxed, cheapest, smallest):
        if more is not None and more not in found:
            found.append(list(more))
    return found


def longest_first(packing: Packing, options: Sequence[int]) -> Loads:
    """Return the loads of all items in their given options.

    The heaviest goes first, and each goes where it costs least.
    """
    loads, sums = Loads(packing), [s[o] for s, o in zip(totals(packing), options, strict=True)]
    all_once = float(loads.weights[list(packing.once)].sum())
    loads.scale = max(float(np.sum([s @ loads.weights for s in sums])) / packing.num_ranks + all_once, 1e-300)
    weight = [float(s @ loads._pull) for s in sums]
    for i in sorted(range(len(options)), key=lambda i: (-weight[i], i)):
        loads.put(i, loads.best(i, options[i])[2])
    return loads


def leaner(packing: Packing, best: Loads) -> Loads:
    """Return the loads after moves of the items that take no time.

    Each goes to the place with the least load of capped resources, the largest item first. The objective does not
    depend on the places of these items.
    """
    bytes_of = tuple(np.sum([c.factors for c in packing.caps], 0)) if packing.caps else packing.weights
    loads, sums = loads_of(packing._replace(weights=bytes_of, caps=()), best.choices), totals(packing)
    idle = [i for i, own in enumerate(sums) if packing.caps and own[best.choices[i].option] @ best.weights == 0]
    if not idle:
        return best
    before = loads.value
    for i in idle:
        loads.take(i)
    options = {i: [o for o, s in enumerate(sums[i]) if s @ best.weights == 0] for i in idle}
    least = {i: min(float(sums[i][o] @ loads.weights) for o in options[i]) for i in idle}
    for i in sorted(idle, key=lambda i: (-least[i], i)):
        found = [loads.best(i, o) for o in options[i]]
        loads.put(i, min(found, key=lambda f: f[:2])[2])
    return loads_of(packing, loads.choices) if loads.value < before else best


def lean(loads: Loads) -> Loads:
    """Return the loads with single items moved to places with less load of capped resources.

    An item moves only if the plan does not take more time.
    """
    size = lambda: float((loads.factors @ loads.most).sum())
    for i in _by_weight(loads) if len(loads.factors) else ():
        value, least, best = loads.value, size(), loads.take(i)
        for o in range(len(loads.options[i])):
            cost, _, choice = loads.best(i, o)
            if cost > value * (1 + 1e-12):
                continue
            loads.put(i, choice)
            if size() < least * (1 - TIE):
                best, least = choice, size()
            loads.take(i)
        loads.put(i, best)
    return loads


def smooth(loads: Loads) -> float:
    """Return a measure that falls as loads become even: most · Σ over ranks of (load / most)^4, by resource price."""
    price = loads._pull
    own = (loads.load * price[:, None]).sum(0) if price.any() else loads.load.sum(0)
    top = own.max()
    return float(((own / top) ** 4).sum()) * float(top) if top > 0 else 0.0


def improve(loads: Loads, rounds: int) -> Loads:
    """Return the loads with single items moved to the option and places that cost least, as long as a move helps."""
    for _ in range(rounds):
        before = (loads.value, smooth(loads))
        order = _by_weight(loads)
        for i in order:
            _move(loads, i)
        if not _less((loads.value, smooth(loads)), before):
            break
    return loads


def _less(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Return whether a[0] is less than b[0], or equal within rounding while a[1] is less than b[1]."""
    near = TIE * max(abs(b[0]), 1e-300)
    return a[0] < b[0] - near or (a[0] <= b[0] + near and a[1] < b[1] * (1 - 1e-7))


def _by_weight(loads: Loads) -> list[int]:
    """Return the items, those on the most loaded ranks first, and of these the heavier first."""
    price = loads._pull
    own = (loads.load * price[:, None]).sum(0)

    def key(i):
        choice = loads.choices[i]
        option = loads.options[i][choice.option]
        ranks = option.ranks[list(choice.places)].ravel() if choice.places else slice(None)
        heavy = float((option.shards.sum(0) + option.base.sum(1)) @ price[option.used])
        return (-float(own[ranks].max()), -heavy, i)

    return sorted(range(len(loads.choices)), key=key)


def _move(loads: Loads, item: int) -> None:
    old, was = (loads.value, smooth(loads)), loads.take(item)
    found = [loads.best(item, o) for o in range(len(loads.options[item]))]
    least = min(f[0] for f in found)
    near = [f for f in found if f[0] <= least * (1 + TIE)]
    best, value = was, old
    for _, _, choice in near if least <= old[0] * (1 + TIE) else []:
        loads.put(item, choice)
        now = (loads.value, smooth(loads))
        if _less(now, value):
            best, value = choice, now
        loads.take(item)
    loads.put(item, best)


def whole(packing: Packing, best: Loads, bound: float, nodes: int) -> tuple[Loads, float, bool]:
    """Return (the better plan, the better bound, whether the plan is proved best), from one program of all items.

    The program searches below the incumbent.
    """
    empty, is_kept = Loads(packing), _keeps(best)
    ceiling = best.value if is_kept else sum(max((s @ empty.weights) for s in own) for own in totals(packing))
    ceiling += 0.0 if is_kept else sum(empty.weights[list(packing.once)])
    got = place(packing, empty, range(len(packing.items)), float(ceiling), nodes)
    if got.is_infeasible:
        return best, best.value if is_kept else np.inf, True
    if got.choices is not None:
        found = loads_of(packing, [got.choices[i] for i in range(len(packing.items))])
        found.scale = best.scale
        if found.value < best.value:
            best = improve(found, 1)
    bound = max(bound, min(got.bound, best.value))
    return best, bound, best.value <= bound * (1 + 1e-7)


def neighbourhoods(packing: Packing, best: Loads, bound: float, rounds: int) -> Loads:
    """Return the better loads from programs of a few items each.

    These are items of the slowest rank and some other items, on the ranks where they may lie.
    """
    draw, idle = random.Random(0), 0
    for turn in range(rounds):
        if (_keeps(best) and best.value <= bound * (1 + 1e-6)) or idle > max(12, rounds // 3):
            break
        free, ranks = _neighbours(packing, best, draw, turn)
        trial = best.copy()
        for i in free:
            trial.take(i)
        got = place(packing, trial, free, best.value, 200, ranks)
        idle += 1
        if got.choices is None:
            continue
        for i, c in got.choices.items():
            trial.put(i, c)
        if _less((trial.value, smooth(trial)), (best.value, smooth(best))):
            idle = 0 if trial.value < best.value * (1 - 1e-6) else idle
            best = improve(trial, 1)
    return best


def _neighbours(packing: Packing, loads: Loads, draw: random.Random, turn: int) -> tuple[list[int], np.ndarray]:
    """Return (the items to place again, the ranks where they may lie, bool[N]).

    These are all items of the slowest rank, some of the least loaded rank, and some of any rank.
    """
    price, num_ranks = loads._pull, packing.num_ranks
    own = (loads.load * price[:, None]).sum(0)
    if _keeps(loads) and turn % 2:
        own = loads.load[int(np.argmax(np.minimum(loads.weights, price) * loads.most))]
    order = sorted(range(num_ranks), key=lambda r: (-own[r], r))
    few = min(num_ranks, 4 + turn % 5)
    picked = {order[0], *order[-(few // 2) :], *draw.sample(range(num_ranks), min(num_ranks, few))}
    ranks = np.zeros(num_ranks, dtype=bool)
    ranks[list(picked)] = True
    spread = {}
    for i, c in enumerate(loads.choices):
        option = loads.options[i][c.option]
        spread[i] = set(option.ranks[list(c.places)].ravel().tolist()) if c.places else set(range(num_ranks))
    inside = [i for i, own_ranks in spread.items() if own_ranks <= picked or len(own_ranks) == num_ranks]
    first = [i for i in inside if order[0] in spread[i]]
    draw.shuffle(inside)
    draw.shuffle(first)
    free, size = [], 0
    for i in dict.fromkeys(first[: 4 + turn % 8] + inside):
        own_size = sum((int(ranks[o.ranks].all(-1).sum()) if len(o.ranks) else 0) + 1 for o in loads.options[i])
        if size + own_size > PART and free:
            break
        free.append(i)
        size += own_size
    return free, ranks
