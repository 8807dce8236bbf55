"""Writes the packing as two mixed-integer programs for HiGHS: the whole, and the choice of options, which bounds it.

    whole:    y[i, o] ∈ {0, 1}, Σ_o y = 1;   x[i, o, shard, place] ∈ {0, 1}, Σ_place x = y;   M_k ≥ load[k, rank]
    options:  without places: N · M_k ≥ Σ_ranks load, M_k ≥ the largest shard + the load that all ranks have of other
      items; for uneven ranks, N is Σ_r 1 / slowness_r
    for k of `once`, in both: M_k ≥ Σ_o base · y[i, o] for each item i

Every plan solves the second program, so its bound holds for all plans. The programs count equal shards of an option,
and do not distinguish them. Solvers stop after a number of nodes, never by a clock: the same input gives the same plan.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from funcrec.core import fail
from funcrec.planner._packing import Choice, Loads, Packing, floors, peaks, totals

NEAR_TOP = 64  # the number of items whose largest shard the bound reads, for each resource
SCALE = 1000.0  # the factor of the objective: HiGHS treats a gap of 1e-6 as zero


class Program(NamedTuple):
    """The program to minimise cost · x with low ≤ Σ values · x ≤ high for each row.

    x lies in [0, upper], and is an integer where `whole` is set.
    """

    rows: list[int]
    columns: list[int]
    values: list[float]
    low: list[float]
    high: list[float]
    cost: list[float]
    upper: list[float]
    whole: list[int]

    def variable(self, upper: float, whole: int, cost: float = 0.0) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def row(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        for column, value in terms:
            self.rows.append(len(self.low))
            self.columns.append(column)
            self.values.append(value)
        self.low.append(low)
        self.high.append(high)


class Answer(NamedTuple):
    """x: f[variables], or None. bound: a lower bound on the objective. is_infeasible: whether this is proved."""

    x: np.ndarray | None
    bound: float
    is_infeasible: bool


def scipy_optimize() -> Any:
    try:
        import scipy.optimize
        import scipy.sparse
    except ImportError:
        got, hint = "no module scipy", "pip install 'funcrec[plan]'"
        fail("funcrec.plan", "a plan requires SciPy.", got=got, need="scipy >= 1.9", hint=hint, kind=ImportError)
    return scipy


def solve(program: Program, nodes: int, gap: float = 0.0) -> Answer:
    """Return the answer of HiGHS, which stops after so many nodes of its tree, or at the gap."""
    scipy = scipy_optimize()
    shape = (len(program.low), len(program.cost))
    matrix = scipy.sparse.csr_array((program.values, (program.rows, program.columns)), shape=shape)
    got = scipy.optimize.milp(
        np.array(program.cost),
        integrality=np.array(program.whole),
        bounds=scipy.optimize.Bounds(0, np.array(program.upper)),
        constraints=scipy.optimize.LinearConstraint(matrix, program.low, program.high),
        options={"node_limit": nodes, "mip_rel_gap": gap, "presolve": True},
    )
    bound = getattr(got, "mip_dual_bound", None)
    bound = -np.inf if bound is None or not np.isfinite(bound) else float(bound)
    return Answer(got.x, bound, got.status == 2)


def _resources(program: Program, packing: Packing, units: np.ndarray, scale: float, below: float | None) -> list[int]:
    """Return the variables M_k, in units of the resources, after their caps and a cap on the objective are added."""
    costs = np.array(packing.weights) * units * scale
    most = [program.variable(np.inf, 0, float(c)) for c in costs]
    for cap in packing.caps:
        terms = [(most[k], f * units[k] / cap.limit) for k, f in enumerate(cap.factors) if f]
        program.row(terms, -np.inf, 1.0)
    if below is not None:
        program.row([(most[k], float(c)) for k, c in enumerate(costs) if c], -np.inf, below)
    return most


def _units(packing: Packing, floor: np.ndarray) -> np.ndarray:
    """Return a unit for each resource, which makes numbers about 1: the largest load that an option puts on a rank."""
    top = np.zeros(len(packing.weights))
    for own in peaks(packing):
        top = np.maximum(top, np.min(own, 0) if len(own) == 1 else np.max(own, 0))
    return np.where(np.maximum(top, floor) > 0, np.maximum(top, floor), 1.0)


class Relaxed(NamedTuple):
    """options: the number of each item's option; None if no choice fits. bound: a lower bound on the objective."""

    options: list[int] | None
    bound: float


def relax(packing: Packing, nodes: int, beside: bool = True) -> Relaxed:
    """Return the best choice of options, for sums over ranks and single shards only, and the bound that this proves.

    beside: whether a shard's rank also has the loads that every rank has.
    """
    sums, tops, lows, size = totals(packing), peaks(packing), floors(packing), len(packing.weights)
    pace = packing.pace
    room, slowest = (1 / pace).sum(1), pace.max(1)  # load that the ranks take together, for each unit of M
    least = np.sum([np.min(own, 0) for own in sums], 0) / room if sums else np.zeros(size)
    units = _units(packing, least)
    guess = float(np.dot(packing.weights, units)) or 1.0
    program = Program([], [], [], [], [], [], [], [])
    most = _resources(program, packing, units, SCALE / guess, None)
    chosen = [[program.variable(1, 1) for _ in item.options] for item in packing.items]
    for own in chosen:
        program.row([(v, 1.0) for v in own], 1.0, 1.0)
    for k in range(size):
        if k in packing.once:
            users = [[v for v, t in zip(own, ts) if t[k]] for own, ts in zip(chosen, tops)]
            _once(program, most[k], users, 1 / units[k])
            continue
        terms = [(v, -s[k] / room[k] / units[k]) for own, ss in zip(chosen, sums) for v, s in zip(own, ss) if s[k]]
        if terms:
            program.row([(most[k], 1.0), *terms], 0.0, np.inf)
        _tallest(program, most[k], chosen, [[t[k] / units[k] for t in own] for own in tops],
            [[x[k] / units[k] if beside else 0.0 for x in own] for own in lows], slowest[k])  # fmt: skip
    got = solve(program, nodes, 1e-5)
    bound = max(got.bound, 0.0) * guess / SCALE
    if got.x is None:
        return Relaxed(None, np.inf if got.is_infeasible else bound)
    return Relaxed([int(np.argmax([got.x[v] for v in own])) for own in chosen], bound)


def _tallest(
    program: Program, most: int, chosen: Sequence, tops: Sequence, lows: Sequence, slowest: float = 1.0
) -> None:
    """Add M ≥ L + Σ_o (top - low) · y[i, o] for each item i whose top may be the largest, and M ≥ slowest · L.

    L = Σ low · y is the load that every rank has, also the slowest.
    """
    every = program.variable(np.inf, 0)
    program.row([(every, 1.0), *((v, -x) for own, xs in zip(chosen, lows) for v, x in zip(own, xs) if x)], 0.0, np.inf)
    if slowest > 1:
        program.row([(most, 1.0), (every, -slowest)], 0.0, np.inf)
    for i in sorted(range(len(chosen)), key=lambda i: -max(tops[i]))[:NEAR_TOP]:
        terms = [(v, x - t) for v, t, x in zip(chosen[i], tops[i], lows[i]) if t != x]
        program.row([(most, 1.0), (every, -1.0), *terms], 0.0, np.inf)


def _once(program: Program, most: int, users: Sequence[Sequence[int]], amount: float) -> None:
    """Add M ≥ amount · Σ_o y[i, o] for the first items i that may need it.

    One row covers all other items by their mean, which is also below the M of every plan.
    """
    users = [own for own in users if own]
    for own in users[:NEAR_TOP]:
        program.row([(most, 1.0), *((v, -amount) for v in own)], 0.0, np.inf)
    rest = users[NEAR_TOP:]
    if rest:
        program.row([(most, 1.0), *((v, -amount / len(rest)) for own in rest for v in own)], 0.0, np.inf)


class Exact(NamedTuple):
    """choices: {item: choice} of the free items; None if the program found no plan below the objective."""

    choices: dict[int, Choice] | None
    bound: float
    is_infeasible: bool


def place(
    packing: Packing, loads: Loads, free: Sequence[int], below: float, nodes: int, ranks: np.ndarray | None = None
) -> Exact:
    """Return the best choices of the free items. All other items lie as in `loads`.

    ranks: bool[N], the ranks that the shards of free items may use; None for all. A place with any other rank is left
      out.
    """
    units = _units(packing, loads.most)
    scale = SCALE / (below or 1.0)
    program = Program([], [], [], [], [], [], [], [])
    most = _resources(program, packing, units, scale, SCALE * (1 + 1e-9))
    on_rank: dict[tuple[int, int], list[tuple[int, float]]] = {}  # (resource, rank) -> terms of the load
    variables, needs = {}, {k: [] for k in packing.once}
    for i in free:
        variables[i] = _item(program, loads, i, units, on_rank, ranks)
        if not variables[i]:
            return Exact(None, -np.inf, True)
        program.row([(y, 1.0) for y, _ in variables[i].values()], 1.0, 1.0)
        for k, own in needs.items():
            own.append([y for o, (y, _) in variables[i].items() if k in loads.options[i][o].used])
    for k, users in needs.items():
        program.row([(most[k], 1.0)], loads.most[k] / units[k], np.inf)
        for own in users if loads.most[k] == 0 else ():
            program.row([(most[k], 1.0), *((y, -1 / units[k]) for y in own)], 0.0, np.inf)
    for k in (k for k in range(len(units)) if k not in needs):
        touched = {r for (j, r) in on_rank if j == k}
        rest = [r for r in range(packing.num_ranks) if r not in touched]
        if rest:
            program.row([(most[k], 1.0)], float(loads.load[k, rest].max()) / units[k], np.inf)
    for (k, r), terms in on_rank.items():
        program.row([(most[k], 1.0), *((v, -x) for v, x in terms)], loads.load[k, r] / units[k], np.inf)
    got = solve(program, nodes)
    bound = got.bound / scale
    if got.x is None:
        return Exact(None, bound, got.is_infeasible)
    return Exact({i: _choice(got.x, own) for i, own in variables.items()}, bound, False)


def _item(
    program: Program, loads: Loads, item: int, units: np.ndarray, on_rank: dict, allowed: np.ndarray | None
) -> dict:
    """Return {option: (y, [(the numbers of equal shards, {place: x})])}, and add the loads to `on_rank`."""
    out: dict[int, tuple[int, list]] = {}
    for o, own in enumerate(loads.options[item]):
        fits = [p for p, r in enumerate(own.ranks) if allowed is None or allowed[r].all()]
        if len(own.shards) and len(fits) < (len(own.shards) if own.how == "apart" else 1):
            continue
        y, groups = program.variable(1, 1), []
        add = lambda k, r, x, amount: on_rank.setdefault((int(k), int(r)), []).append((x, float(amount)))
        is_once = loads.ceilings[own.used] < np.inf
        for k, amounts in zip(own.used[~is_once], (own.base / units[own.used][:, None])[~is_once], strict=True):
            for r, amount in enumerate(np.broadcast_to(amounts, loads.load.shape[1:])) if amounts.any() else ():
                add(k, r, y, amount)
        alike: dict[tuple, list[int]] = {}
        for s, shard in enumerate(own.shards):
            alike.setdefault(tuple(shard.tolist()), []).append(s)
        for numbers in alike.values():
            xs = {p: program.variable(1 if own.how == "apart" else len(numbers), 1) for p in fits}
            program.row([*((x, 1.0) for x in xs.values()), (y, -float(len(numbers)))], 0.0, 0.0)
            for k, amount in zip(own.used, own.shards[numbers[0]] / units[own.used], strict=True):
                for p, x in xs.items() if amount else ():
                    for r in own.ranks[p]:
                        add(k, r, x, amount * loads.pace[k, r])
            groups.append((numbers, xs))
        if own.how == "apart":
            for p in fits:
                program.row([*((xs[p], 1.0) for _, xs in groups), (y, -1.0)], -np.inf, 0.0)
        out[o] = (y, groups)
    return out


def _choice(x: np.ndarray, own: dict) -> Choice:
    option = max(own, key=lambda o: x[own[o][0]])
    places: dict[int, int] = {}
    for numbers, xs in own[option][1]:
        each = [p for p, v in xs.items() for _ in range(round(float(x[v])))]
        places |= dict(zip(numbers, each, strict=True))
    return Choice(option, tuple(places[s] for s in sorted(places)))
