"""plan: chooses the place of each table by the cost that the table would have there.

(tables, features, mesh, batch size, hardware, constraints) ─▶ ways ─▶ packing ─▶ Solution ─▶ Plan with a report
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from funcrec.core import Count, NotNegative, Share, check, sure, typed
from funcrec.mesh import AxisName, Codec, Mesh
from funcrec.optim import RowOptimizer
from funcrec.planner import _costs as costs
from funcrec.planner._cached import all_ways, room_problems, whole_in_memory
from funcrec.planner._checks import (
    cache_problems,
    disk_problems,
    mesh_problems,
    plan_problems,
    sizes_of,
    together_problems,
)
from funcrec.planner._constraints import TableConstraint, constraint_of, given_problems
from funcrec.planner._hardware import Hardware, Known
from funcrec.planner._options import Ground, Way, packing_of, placement_of
from funcrec.planner._packing import Packing
from funcrec.planner._rated import given_plan_problems, rated
from funcrec.planner._report import report_of
from funcrec.planner._short import fail_short
from funcrec.planner._solve import Solution, solve
from funcrec.planner._uneven import evened, rank_problems
from funcrec.planner._vocabularies import followed, vocabulary_problems, vocabulary_ways
from funcrec.sharding import Placement, Plan, dedup_problems, transport_of
from funcrec.tables import FeatureConfig, TableConfig

CALL = "funcrec.plan"
RESERVE = 0.15


@typed
def plan(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    mesh: Mesh | Mapping[str, Count],
    *,
    batch_size: Count,
    hardware: Hardware | Known | Sequence[Hardware] = "h100",
    constraints: Mapping[str, TableConstraint | Mapping[str, Any]] | None = None,
    optimizer: RowOptimizer | None = None,
    exact: bool = False,
    dedup: bool = False,
    codec: Codec | None = None,
    capacity_factor: NotNegative | None = None,
    replicas: AxisName = (),
    memory_bytes: Count | None = None,
    reserve: Share = RESERVE,
    effort: Count = 1,
    placements: Plan | Mapping[str, Placement] | None = None,
) -> Plan:
    """Return the plan whose slowest rank is fastest by estimate, among all plans that fit into memory.

    Its report has a bound on all other plans. If the hardware has a disk, tables may have a part of their rows in
    memory: `plan.cached` says how many. The dense part and caches of processors are not modelled. If constraints name
    vocabularies, the plan also decides whether `plan.buckets` cuts them, by their memory, messages and admissions.

    Args:
      mesh: a Mesh, or its shape, {axis: number of ranks}, with at most 65,536 ranks. The planner runs nothing on them,
        and needs no device.
      batch_size: the number of examples of a step, on all ranks together.
      hardware: a `Hardware`, or "h100", "h200", "a100", "cpu"; or a list with one for each rank, where ranks differ. A
        slower memory makes a rank's own lookups and updates longer. Of all else the worst rank counts for all: banks
        take equal memory on all ranks, and all ranks wait at an exchange.
      constraints: {table: TableConstraint, or a dict of its fields}.
      optimizer: the optimizer of the tables. Its state takes memory. If it reads whole rows, tables cut by columns
        exchange more bytes.
      exact, dedup, codec: as for `shard_tables` or `train_step`.
      capacity_factor: the room of the blocks of an exchange, relative to the average need; None for room that always
        suffices.
      replicas: axes along which copies train apart. All copies have the same placements.
      memory_bytes: the memory of a rank, instead of `hardware.memory_bytes`.
      reserve: the share of the memory that the plan leaves for all other values.
      effort: the length of the search, in rounds and not in seconds.
      placements: a Plan, or {table: Placement}, that is rated: every table stays where it says, and plan.gap is the
        share of the time that another plan may save. On hardware with a disk, the search still chooses the rows in
        memory. A Plan also says whether `buckets` cut the vocabularies.

    Returns:
      A Plan, for `train_step(plan=...)` and `shard_tables`, with plan.gap, plan.reasons, plan.table(), plan.draw(),
      plan.to_json() and plan.digest.

    Raises:
      ValueError: if no plan fits. The error names the memory or constraint that is short, by how much, and a change
        that would suffice. If `placements` do not fit, it names the fullest ranks and their tables.

    Law: the same arguments give the same plan on every machine with the same SciPy. plan.gap bounds how much faster
      any plan can be, by these estimates.

    Example:
      >>> import funcrec as fr
      >>> tables = (fr.TableConfig("item", 1_000_000, 64), fr.TableConfig("country", 200, 64))
      >>> features = (fr.FeatureConfig("clicked", table="item"), fr.FeatureConfig("country", table="country"))
      >>> used = {"item": fr.TableConstraint(pooling_factor=20.0)}
      >>> plan = fr.plan(tables, features, {"model": 8}, batch_size=8192, constraints=used)
      >>> plan["item"].kind, plan.gap < 0.05
      ('row_wise', True)
      >>> by_hand = {"item": fr.table_wise("model", rank=0), "country": fr.replicated()}
      >>> rated = fr.plan(tables, features, {"model": 8}, batch_size=8192, constraints=used, placements=by_hand)
      >>> rated["item"].kind, rated.gap > 0.4
      ('table_wise', True)

    Source: TorchRec's EmbeddingShardingPlanner.
    """
    check(CALL, mesh_problems(mesh), plan_problems(tables, features), dedup_problems(exact, dedup))
    sizes, named = sizes_of(mesh), (replicas,) if isinstance(replicas, str) else tuple(replicas)
    reads = {t.name: [f for f in features if f.table == t.name] for t in tables}
    own_features = {n: [f.name for f in fs] for n, fs in reads.items()}
    by_table = {} if constraints is None else constraints
    check(CALL, given_problems(by_table, [t.name for t in tables], own_features))
    told = {t.name: constraint_of(by_table.get(t.name, {})) for t in tables}
    check(CALL, together_problems(tables, told, sizes, named))
    given = placements if placements is None or isinstance(placements, Plan) else Plan(placements)
    check(CALL, given_plan_problems(given, tables, told, sizes, named, optimizer))
    hardware, slowness = _hardware_of(hardware, sizes, named)
    check(CALL, disk_problems(told, hardware), cache_problems(told, features, named), vocabulary_problems(tables, told))
    sizes = {a: n for a, n in sizes.items() if a not in named}
    bags, answer = batch_size / prod(sizes_of(mesh).values()), transport_of(exact, dedup).answer
    state = _of_optimizer(optimizer, tables)
    ground = Ground(
        tuple(sizes.items()), tuple(sizes_of(mesh).items()), hardware, bags, answer, codec, capacity_factor, *state,
        slowness,
    )  # fmt: skip
    limit = max(1, int((memory_bytes or hardware.memory_bytes) * (1 - reserve)))
    uses = {t.name: use_of(t, reads[t.name], told[t.name], ground) for t in tables}
    check(CALL, room_problems(tables, told, uses))
    allowed = whole_in_memory(told, features, named)
    found = {t.name: all_ways(t, uses[t.name], allowed[t.name], ground) for t in tables}
    groups = groups_of(tables, told)
    is_cached = any(w.key[4] < 1 for own in found.values() for w in own)
    beside = vocabulary_ways(followed(tables, features, told, bags), ground, not named and not is_cached)
    if given is None:
        packing = packing_of(groups, found, ground, limit, beside)
        free = _freed(tables, uses, told, features, named, ground)
        solved = _searched(packing, effort, (groups, found, told, free, ground, limit, 1 - reserve, beside))
        made = _made(groups, packing, solved, sizes)
    else:
        own = uses, allowed, found, groups, beside, ground, limit, effort
        found, beside, packing, solved = rated(sure(placements), tables, *own)
        made = dict(given.placements)
    following = {t.name for t in tables if told[t.name].vocabulary is not None}
    return report_of(
        {t.name: made[t.name] for t in tables}, named, tables, uses, found, groups, packing, solved, ground, limit,
        sizes_of(mesh), batch_size, beside, following,
    )  # fmt: skip


def _searched(packing: Packing, effort: int, short: tuple) -> Solution:
    """Return the search's solution. short: the arguments of `fail_short` after the packing, for the error."""
    solved = solve(packing, effort) if all(i.options for i in packing.items) else None
    if solved is None or solved.choices is None:
        fail_short(CALL, packing, *short)
    return solved


def _freed(
    tables: Sequence[TableConfig], uses: Mapping[str, costs.Use], told: Mapping[str, TableConstraint],
    features: Sequence[FeatureConfig], replicas: Sequence[str], ground: Ground,
) -> Callable[[str], list[Way]]:  # fmt: skip
    """Return a function of a table's name: all ways to place it without its constraint."""
    named = {t.name: t for t in tables}
    freed = whole_in_memory(dict.fromkeys(told, TableConstraint()), features, replicas)
    return lambda name: all_ways(named[name], uses[name], freed[name], ground)


def _made(
    groups: Mapping[str, Sequence[TableConfig]], packing: Packing, solved: Solution, sizes: Mapping[str, int]
) -> dict[str, Placement]:
    """Return the placements of the search's choices."""
    out = {}
    for own, item, choice in zip(groups.values(), packing.items, sure(solved.choices), strict=False):
        made = placement_of(item.options[choice.option].label, choice.places, sizes)
        out |= {t.name: made for t in own}
    return out


def _hardware_of(
    hardware: Hardware | Known | Sequence[Hardware], mesh: Mapping[str, int], replicas: tuple[str, ...]
) -> tuple[Hardware, tuple[float, ...]]:
    """Return (the hardware of all ranks, the slowness of each rank)."""
    if isinstance(hardware, str):
        return Hardware.named(hardware), ()
    if isinstance(hardware, Hardware):
        return hardware, ()
    check(CALL, rank_problems(hardware, mesh))
    return evened(hardware, mesh, replicas)


def groups_of(tables: Sequence[TableConfig], told: Mapping[str, TableConstraint]) -> dict[str, list[TableConfig]]:
    """Return {name of the first table: tables that are placed as one}."""
    out: dict[str, list[TableConfig]] = {}
    first: dict[str, str] = {}
    for t in tables:
        together = told[t.name].together
        name = t.name if together is None else first.setdefault(together, t.name)
        out.setdefault(name, []).append(t)
    return out


def use_of(table: TableConfig, reads: Sequence[FeatureConfig], told: TableConstraint, ground: Ground) -> costs.Use:
    """Return the use of a table in a step. Features that read one column count separately."""
    ids = lambda some: ground.bags * sum(told.pooling_of(f) for f in some)
    pooled = [f for f in reads if f.pooling in ("sum", "mean")]  # maxima and sequences exchange rows
    here = ids(reads)
    weights = max((0, *(4 * (1 + (f.pooling == "mean")) for f in reads if f.weighted)))
    distinct = lambda n: min(n, costs.distinct_rows(n, table.num_embeddings, told.zipf, told.row_counts))
    all_here = distinct(here * ground.num_ranks)
    sequence = ids([f for f in reads if f not in pooled])
    return costs.Use(ground.bags * len(pooled), ids(pooled), sequence, len(pooled), weights, all_here, distinct(here))


def _of_optimizer(
    optimizer: RowOptimizer | None, tables: Sequence[TableConfig]
) -> tuple[Callable, str, bool, Callable[[str], Hashable]]:
    """Return the facts about the optimizer that the estimates need.

    That is (bytes of a row's slots by (table, width), columns of a block's gradients, whether columns must not be cut,
    labels).
    """
    if optimizer is None:
        return (lambda name, width: 0.0), "block", False, (lambda name: None)
    dtypes, known = {t.name: t.dtype for t in tables}, {}

    def slot_bytes(name: str, width: int) -> float:
        key = (optimizer.label(name), dtypes[name], width)
        if key not in known:
            made = optimizer.init({n: torch.zeros(2, width if n == name else 1, dtype=d) for n, d in dtypes.items()})
            known[key] = sum(s.nbytes for s in made.get(name, {}).values()) / 2
        return known[key]

    return slot_bytes, "block" if optimizer.is_elementwise else "row", optimizer.is_joint, optimizer.label
