"""The report of a plan: the memory and time of each rank, the cost of each table, and the reason for its placement.

reason of a table = the change of a step's time if only that table took the next best placement
"""

from collections.abc import Mapping, Sequence, Set
from math import prod

import numpy as np

from funcrec.core import sure
from funcrec.mesh import Mesh
from funcrec.planner._cached import ROW_BYTES, part_of
from funcrec.planner._costs import Use, activation_bytes
from funcrec.planner._options import BYTES, EXCHANGE, LAUNCH, LOOKUP, UPDATE, Ground, Way, alone_bytes, places_on
from funcrec.planner._packing import Loads, Packing, loads_of
from funcrec.planner._solve import Solution
from funcrec.sharding import Placement, Plan, RankLine, Report, TableLine, layout_of
from funcrec.tables import TableConfig

MS = 1e3


def report_of(
    placements: Mapping[str, Placement],
    replicas: tuple[str, ...],
    tables: Sequence[TableConfig],
    uses: Mapping[str, Use],
    found: Mapping[str, list[Way]],
    groups: Mapping[str, list[TableConfig]],
    packing: Packing,
    solved: Solution,
    ground: Ground,
    limit: int,
    mesh: Mapping[str, int],
    batch_size: int,
    beside: Sequence[Way] = (),
    following: Set[str] = frozenset(),
) -> Plan:
    """Return the plan with its report. beside: the ways of the vocabularies. following: the tables that follow one."""
    choices = sure(solved.choices)
    loads = loads_of(packing, choices)
    loads.scale = max(solved.objective, 1e-300)
    sizes = dict(ground.sizes)
    chosen = {
        t.name: packing.items[i].options[c.option].label
        for (i, c), own in zip(enumerate(choices), groups.values())
        for t in own
    }
    parts = {t.name: part_of(t, chosen[t.name][4]) for t in tables}
    memory, num_banks = rank_bytes(placements, list(parts.values()), uses, ground)
    memory += sum(ROW_BYTES * parts[t.name].num_embeddings for t in tables if chosen[t.name][4] < 1)
    kept = beside[choices[-1].option] if beside else None
    memory += kept.base[BYTES] if kept else 0.0
    launches = ground.hardware.launch_s * num_banks  # a bank has one launch for its lookup and its update together
    exchange = float(loads.most @ loads.weights) - loads.most[0] - loads.most[1] - launches
    line = lambda r: RankLine(
        int(memory), float(loads.load[0, r]), max(0.0, float(exchange)), float(loads.load[1, r]) + launches
    )
    reasons = {t.name: why for i, own in enumerate(groups.values()) for why in [reason(packing, loads, i)] for t in own}
    if kept:
        why = f"its vocabulary {_name(kept.key)}: {reason(packing, loads, len(groups))}"
        reasons |= {n: f"{reasons[n]}; {why}" for n in following}
    lines = []
    for t in tables:
        way = next(w for w in found[t.name] if w.key == chosen[t.name])
        lines.append(_table_line(parts[t.name], placements[t.name], way, reasons[t.name], ground, sizes))
    seconds = solved.objective
    report = Report(
        tuple(mesh.items()), ground.hardware.name, batch_size, limit, seconds, solved.bound, tuple(lines),
        tuple(map(line, range(ground.num_ranks))),
    )  # fmt: skip
    return Plan(placements, replicas, report, buckets=kept.key[1] if kept else ())


def rank_bytes(
    placements: Mapping[str, Placement], tables: Sequence[TableConfig], uses: Mapping[str, Use], ground: Ground
) -> tuple[float, int]:
    """Return (bytes that these placements take on every rank, the number of banks that a step reads).

    The bytes are those of banks, of slots, and of the ids, rows and sums in the exchanges of a step.
    """
    if not tables:
        return 0.0, 0
    shapes, dtypes = {t.name: t.shape for t in tables}, {t.name: t.dtype for t in tables}
    labels = {t.name: ground.label(t.name) for t in tables}
    layout = layout_of(
        "funcrec.plan", shapes, dtypes, Plan(placements), Mesh.emulated(**(dict(ground.sizes) or {"alone": 1})), labels
    )
    own: dict[int, list] = {}
    for s in layout.shards:
        own.setdefault(s.bank, []).append(s)
    out, sizes = 0.0, dict(ground.sizes)
    for t in tables:
        n = prod(sizes[a] for a in placements[t.name].axes)
        for b in placements[t.name].blocks(sizes, t.embedding_dim):
            out += alone_bytes(n, b.last - b.first, uses[t.name], t, ground)
    for i, bank in enumerate(layout.banks):
        slots = ground.slot_bytes(own[i][0].table, bank.dim)
        lanes = [0] * bank.num_ranks
        for s in own[i]:
            for r in s.ranks:
                lanes[r] += uses[s.table].num_pooled
        out += bank.rows * (bank.dim * bank.dtype.itemsize + slots)
        out += max(lanes) * activation_bytes(ground.bags, bank.dim, bank.num_ranks)
    return out, sum(any(uses[s.table].all_ids for s in shards) for shards in own.values())


def _table_line(
    table: TableConfig, placement: Placement, way: Way, why: str, ground: Ground, sizes: Mapping[str, int]
) -> TableLine:  # fmt: skip
    blocks = placement.blocks(sizes, table.embedding_dim)
    n = prod(sizes[a] for a in placement.axes)
    copies = ground.num_ranks // n
    held = sorted({r for b in blocks for r in b.ranks}) if placement.axes else []
    ranks = (
        sorted({r for p in held for r in places_on(placement.axes, sizes)[p]})
        if placement.axes
        else range(ground.num_ranks)
    )
    shapes = tuple((-(-table.num_embeddings // len(b.ranks)), b.last - b.first) for b in blocks)
    size = sum(
        rows * (w * table.dtype.itemsize + ground.slot_bytes(table.name, w)) * len(b.ranks)
        for (rows, w), b in zip(shapes, blocks)
    )
    work = max(s[LOOKUP] + s[UPDATE] for s in way.shards)
    work *= max((ground.slowness[r] for r in ranks), default=1.0) if ground.slowness else 1.0
    seconds = work + way.base.get(EXCHANGE, 0.0) + way.base.get(LAUNCH, 0.0)
    rows = None if way.key[4] == 1 else table.num_embeddings
    return TableLine(table.name, placement.kind, tuple(ranks), shapes, int(size * copies), float(seconds), why, rows)


def reason(packing: Packing, loads: Loads, item: int) -> str:
    """Return the reason for the place of an item, given the places of all other items."""
    options = packing.items[item].options
    if len(options) == 1:
        return "the only placement that is allowed"
    chosen, before = loads.choices[item], loads.value
    loads.take(item)
    best: dict[str, tuple[float, float]] = {}
    named = lambda label: (*label[:3], label[4])
    for i, o in enumerate(options):
        if i == chosen.option or named(o.label) == named(options[chosen.option].label):
            continue
        _, _, other = loads.best(item, i)
        loads.put(item, other)
        name = _name(o.label)
        tried = (loads.excess, float(loads.most @ loads.weights))
        best[name] = min(best.get(name, (np.inf, np.inf)), tried)
        loads.take(item)
    loads.put(item, chosen)
    fits = {n: s for n, (e, s) in best.items() if e <= 1e-9}
    if not best:
        return "the only kind of placement that is allowed"
    if not fits:
        name = min(best, key=lambda n: (best[n], n))
        return f"no other fits: {name} would need {best[name][0]:.0%} more memory than a rank may use"
    name = min(fits, key=lambda n: (fits[n], n))
    more = fits[name] - before
    if abs(more) > 1e-6 * before:  # `more` is negative if the search missed a better plan: plan.gap bounds it
        return f"{name} instead: {more * MS:+.3g} ms"
    return f"{name} instead would cost as much"


def _name(label: tuple) -> str:
    kind, axes, k, _, share = label
    parts = f" in {k}" if k > 1 else ""
    held = f" with {share:.0%} in memory" if share < 1 else ""
    return f"{kind}{parts}({', '.join(axes)}){held}" if axes else f"{kind}{held}"
