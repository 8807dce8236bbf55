"""Rates placements made by hand: their time and memory, the bound on all plans, and why they do not fit.

given placement ─▶ Way whose shards lie on the given places ─▶ the packing of all plans, with this choice

The choice stays the given one. The search only decides which share of the rows of a table is in memory, if the hardware
has a disk, and whether vocabularies are cut, if the placements are not a Plan, which says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NoReturn

import numpy as np

from funcrec.core import Problem, fail, sure
from funcrec.mesh import Mesh
from funcrec.optim import RowOptimizer
from funcrec.planner._cached import all_ways
from funcrec.planner._constraints import TableConstraint
from funcrec.planner._costs import Use
from funcrec.planner._options import VOCABULARIES, Ground, Way, one_way, packing_of, places_on
from funcrec.planner._packing import Choice, Loads, Packing, loads_of
from funcrec.planner._short import NoPlanError, size_text
from funcrec.planner._solve import Solution, solve
from funcrec.sharding import OF_TWO_AXES, Placement, Plan, fit_problems
from funcrec.tables import TableConfig

MOST_TOLD = 8  # ranks, and tables of a rank, that an error names


def given_way(table: TableConfig, placement: Placement, use: Use, ground: Ground) -> Way:
    """Return the way of a table whose parts lie where the placement says. The number of its blocks is any number."""
    sizes, kind, axes, dim = dict(ground.sizes), placement.kind, placement.axes, table.embedding_dim
    is_two = kind in OF_TWO_AXES
    places = places_on(axes[:1] if is_two else axes, sizes)
    numbers = tuple(placement.ranks or range(len(places)))
    count = 1
    if kind == "table_column_wise":
        count = min(sizes[axes[1]], dim)
    elif kind in ("column_wise", "grid"):
        count = min(len(numbers), dim)
        numbers = numbers[:count]
    way = one_way(kind, axes, count, [places[i] for i in numbers], numbers, table, use, ground)
    return way if way.how == "fixed" else way._replace(how="fixed")


def rated(
    given: Plan | Mapping[str, Placement],
    tables: Sequence[TableConfig],
    uses: Mapping[str, Use],
    allowed: Mapping[str, TableConstraint],
    found: Mapping[str, list[Way]],
    groups: Mapping[str, Sequence[TableConfig]],
    beside: Sequence[Way],
    ground: Ground,
    limit: int,
    effort: int,
) -> tuple[dict[str, list[Way]], list[Way], Packing, Solution]:
    """Return (all ways with the given ones, the ways of the vocabularies, the packing of both, the given choices).

    found: {table: the ways of the search}. Raise NoPlanError if the placements do not fit.
    """
    at = given.placements if isinstance(given, Plan) else given.items()
    of_part = {n: lambda part, n=n, p=p: [given_way(part, p, uses[n], ground)] for n, p in at}
    own = {t.name: all_ways(t, uses[t.name], allowed[t.name], ground, of_part[t.name]) for t in tables}
    keys = {n: {w.key for w in ways} for n, ways in own.items()}
    every = {n: [*ways, *(w for w in found[n] if w.key not in keys[n])] for n, ways in own.items()}
    kept = [w for w in beside if not isinstance(given, Plan) or w.key[1] == given.buckets]
    packing = packing_of(groups, every, ground, limit, kept)
    names = {name: [t.name for t in some] for name, some in groups.items()}
    return every, kept, packing, rate(packing, {name: keys[name] for name in groups}, names, effort)


def rate(packing: Packing, keys: Mapping[str, set[tuple]], names: Mapping[str, Sequence[str]], effort: int) -> Solution:
    """Return the given choices as a Solution. Its bound is one on all plans of the packing.

    names: {item: its tables}. Raise NoPlanError if the given choices do not fit.
    """
    fits = lambda item, label: item.name not in keys or label in keys[item.name]
    numbers = [[i for i, o in enumerate(t.options) if fits(t, o.label)] for t in packing.items]
    narrow = packing._replace(
        items=tuple(t._replace(options=tuple(t.options[i] for i in n)) for t, n in zip(packing.items, numbers))
    )
    solved = solve(narrow, effort)
    if solved.choices is None:
        _fail_short(narrow, names)
    choices = [Choice(n[c.option], c.places) for n, c in zip(numbers, solved.choices, strict=True)]
    return Solution(choices, solved.objective, min(solve(packing, effort).bound, solved.objective))


def _fail_short(narrow: Packing, names: Mapping[str, Sequence[str]]) -> NoReturn:
    """Raise the error of placements that do not fit, with the tables of the ranks that have most."""
    for cap in narrow.caps:
        leanest = solve(narrow._replace(weights=cap.factors, caps=()))
        if leanest.objective > cap.limit:
            break
    loads = loads_of(narrow._replace(caps=()), sure(leanest.choices))
    what = f"the placements do not fit {'into memory' if cap.name == 'memory' else 'on the disk'}."
    got = f"{size_text(leanest.objective)} on every rank, because its banks are as large as on the fullest rank. "
    need = f"at most {size_text(cap.limit)} on a rank: {size_text(leanest.objective - cap.limit)} less"
    fail("funcrec.plan", what, got=got + _fullest(loads, np.array(cap.factors), narrow, names), need=need,
        hint="the same without `placements`", kind=NoPlanError)  # fmt: skip


def _fullest(loads: Loads, factors: np.ndarray, narrow: Packing, names: Mapping[str, Sequence[str]]) -> str:
    """Return a text with the bytes of the fullest ranks, and of their largest tables."""
    own: dict[str, np.ndarray] = {}
    for i, (item, c) in enumerate(zip(narrow.items, loads.choices, strict=True)):
        arrays = loads.options[i][c.option]
        name = item.name if item.name == VOCABULARIES else "+".join(names[item.name])
        own[name] = np.broadcast_to(factors[arrays.used] @ arrays.base, narrow.num_ranks)
    total = np.sum(list(own.values()), 0)
    order = sorted(range(narrow.num_ranks), key=lambda r: (-total[r], r))
    lines: dict[str, list[int]] = {}
    for r in order:
        tables = sorted((n for n in own if own[n][r] > 0), key=lambda n: -own[n][r])[:MOST_TOLD]
        text = f"{size_text(total[r])}: " + ", ".join(f"{n!r} {size_text(own[n][r])}" for n in tables)
        if text not in lines and len(lines) == MOST_TOLD:
            break
        lines.setdefault(text, []).append(r)
    return "; ".join(f"{_who(ranks)} {text}" for text, ranks in lines.items())


def _who(ranks: Sequence[int]) -> str:
    more = ", .." if len(ranks) > MOST_TOLD else ""
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:MOST_TOLD]))}{more} have"


# -- validators --------------------------------------------------------------------------------------------------


def given_plan_problems(
    given: Plan | None, tables: Sequence[TableConfig], told: Mapping[str, TableConstraint], mesh: Mapping[str, int],
    replicas: tuple[str, ...], optimizer: RowOptimizer | None,
) -> Iterator[Problem]:  # fmt: skip
    """Report placements that the mesh, the optimizer or the constraints do not allow."""
    if given is None:
        return
    if given.replicas and given.replicas != replicas:
        got = f"{replicas or 'none'}; the plan has {given.replicas}"
        yield Problem("`replicas` are not those of `placements`.", got, "the same", f"replicas={given.replicas}")
    problems = list(fit_problems(given, Mesh.emulated(**mesh), {t.name: t.shape for t in tables}))
    for n, p in given.placements:
        if crossed := [a for a in p.axes if a in replicas]:
            what = f"the placement of {n!r} cuts it over an axis whose copies train apart."
            problems.append(Problem(what, f"{crossed}", "other axes than those of `replicas`"))
    yield from problems
    if problems:
        return
    own = {a: n for a, n in mesh.items() if a not in replicas}
    for t in tables:
        p, c, path = given[t.name], told[t.name], f"the placement of {t.name!r}"
        widths = [b.last - b.first for b in p.blocks(own, t.embedding_dim)]
        yield from _constraint_problems(path, p, c, min(widths), own)
        if optimizer is not None and optimizer.is_joint and len(widths) > 1:
            yield Problem(f"{path} cuts columns that the optimizer reads together.", p.kind, "whole rows")
    first: dict[str, TableConfig] = {}
    for t in tables:
        together = told[t.name].together
        other = t if together is None else first.setdefault(together, t)
        mine, theirs = (given[x.name].blocks(own, x.embedding_dim) for x in (t, other))
        pair = f"tables {other.name!r} and {t.name!r} go together, and"
        if given[t.name] != given[other.name]:
            yield Problem(f"{pair} their placements differ.", f"{given[t.name]}", f"{given[other.name]}")
        elif len(mine) != len(theirs):
            got, need = f"{len(theirs)} and {len(mine)} of columns", "whole rows, or tables of one width"
            yield Problem(f"{pair} have other numbers of blocks.", got, need)


def _constraint_problems(
    path: str, p: Placement, c: TableConstraint, width: int, sizes: Mapping[str, int]
) -> Iterator[Problem]:
    if c.kinds and p.kind not in c.kinds:
        yield Problem(f"{path} is not of its constraint's kinds.", p.kind, f"one of {list(c.kinds)}")
    if width < c.min_partition:
        what, need = f"{path} has a block narrower than its constraint's `min_partition`.", f"{c.min_partition} or more"
        yield Problem(what, f"{width} columns", need)
    most = prod(sizes[a] for a in (p.axes[:1] if p.kind in OF_TWO_AXES else p.axes))
    outside = sorted({*(p.ranks or range(most))} - {*c.ranks}) if c.ranks else []
    if outside:
        yield Problem(f"{path} is on ranks outside its constraint's `ranks`.", f"{outside}", f"{tuple(c.ranks)}")
