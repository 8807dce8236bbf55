"""Plan: a placement for each table, with notes.

plan[table] is the Placement of the table;    a plan from `fr.plan` has a report: estimate, bound, reasons
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from funcrec.core import (
    Problem,
    absent_problems,
    check,
    describe,
    fail,
    html_table,
    reported,
    twice_problems,
    typed,
    unknown_problems,
)  # fmt: skip
from funcrec.mesh import AxisName, Mesh
from funcrec.sharding.placement._placement import OF_TWO_AXES, ON_ONE_PLACE, Placement, PlacementKind, axis_names
from funcrec.sharding.placement._report import Report, report_problem
from funcrec.tables import TableConfig, table_list_problems

VERSION = 1  # the version of the text's form


@dataclass(frozen=True, init=False, repr=False)
class Plan:
    """A map from tables to placements. It is static, so that it is part of the compile key.

    Args:
      placements: {table: Placement}. Along mesh axes that a placement does not name, the table has copies that all
        apply the same gradient at every step.
      replicas: axes along which copies of all tables, also of replicated tables, train apart. The ranks that share a
        place on these axes are a group. A group trains its copy on its own bags, like a job of its own, until
        `sync_replicas`. No placement may name these axes.
      buckets: axes over which the vocabularies of `dynamic_tables` are cut by their buckets of 128 rows, under any
        placements of their tables. A rank then has one of n equal parts of each vocabulary, and finds and admits only
        the ids of these buckets; the ranks send them to each other. The axes are those that cut a batch. () keeps each
        vocabulary whole on every rank, which finds and admits the ids of all ranks. The bits of training are the same.
        `cached_step` and a policy that is a function require (). `fr.plan` chooses them if constraints
        name vocabularies; to change that, `fr.Plan(dict(plan.placements), plan.replicas, plan.report, buckets=...)`.
      report: the estimates and the reasons of `fr.plan`; None for a plan made by hand.
        Plans with equal placements are equal, whatever their reports.

    Example:
      >>> import funcrec as fr
      >>> plan = fr.Plan({"item": fr.row_wise("model"), "user": fr.table_wise("model", rank=1)})
      >>> plan["user"].ranks
      (1,)
      >>> fr.Plan({"item": fr.row_wise("model")}, replicas="group").replicas
      ('group',)

    Source: TorchRec's ShardingPlan; its DMPCollection for `replicas`.
    """

    placements: tuple[tuple[str, Placement], ...]
    replicas: tuple[str, ...]
    report: Report | None = field(default=None, compare=False)
    buckets: tuple[str, ...] = ()

    @typed
    def __init__(
        self,
        placements: Mapping[str, Placement],
        replicas: AxisName = (),
        report: Report | None = None,
        *,
        buckets: AxisName = (),
    ):
        check("funcrec.Plan", plan_problems(placements, axis_names(replicas), axis_names(buckets)))
        object.__setattr__(self, "placements", tuple(placements.items()))
        object.__setattr__(self, "replicas", axis_names(replicas))
        object.__setattr__(self, "report", report)
        object.__setattr__(self, "buckets", axis_names(buckets))

    @property
    def gap(self) -> float:
        """Return the share of the estimated time that another plan can save at most, 1 - bound / estimate."""
        return self._told("gap").gap

    @property
    def reasons(self) -> dict[str, str]:
        """Return {table: the reason for its placement}."""
        return {t.table: t.reason for t in self._told("reasons").tables}

    @property
    def cached(self) -> dict[str, int]:
        """Return {table: its rows in memory} of the tables whose other rows are in stores, as `cached_tables` has them.

        The number is the `capacity` of a `CacheConfig`.
        """
        return {t.table: t.cached for t in self._told("cached").tables if t.cached is not None}

    def table(self) -> str:
        """Return a text with a line for each table and each rank: placement, bytes, time."""
        return self._told("table").text()

    def draw(self) -> Any:
        """Return a matplotlib Figure of ranks × tables."""
        return self._told("draw").draw()

    def _repr_html_(self) -> str:
        """Return the placements as HTML for a notebook, with `fr.plan`'s estimates for each table."""
        if self.report is None:
            where = lambda p: ", ".join([*p.axes, *(f"rank {r}" for r in p.ranks or ())])
            return html_table(("table", "placement", "on"), [(n, p.kind, where(p)) for n, p in self.placements])
        return self.report.html()

    def _told(self, name: str) -> Report:
        if self.report is None:
            got, need = "a plan made by hand", "a plan that fr.plan made, which keeps its report"
            fail(f"funcrec.Plan.{name}", "the plan has no estimate.", got=got, need=need, hint="fr.plan(...)")
        return self.report

    @property
    def digest(self) -> str:
        """Return a hash of the placements and replicas. It does not depend on the process or the version of Python.

        It ignores the order of tables.
        """
        own = {
            "placements": sorted((n, p.kind, p.axes, p.ranks) for n, p in self.placements),
            "replicas": self.replicas,
            **({"buckets": self.buckets} if self.buckets else {}),
        }
        return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """Return the plan and its report as JSON text.

        Law: Plan.from_json(plan.to_json()) == plan, with an equal report.
        """
        placements = {n: {"kind": p.kind, "axes": p.axes, "ranks": p.ranks} for n, p in self.placements}
        report = None if self.report is None else self.report.to_dict()
        axes = {"replicas": self.replicas, **({"buckets": self.buckets} if self.buckets else {})}
        return json.dumps({"version": VERSION, "placements": placements, **axes, "report": report}, indent=1)

    @staticmethod
    @typed
    def from_json(text: str) -> "Plan":
        """Return the plan that the text of `to_json` describes.

        Raises:
          ValueError: if the text is not such a plan.

        Example:
          >>> import funcrec as fr
          >>> plan = fr.Plan({"item": fr.row_wise("model")})
          >>> fr.Plan.from_json(plan.to_json()) == plan
          True
        """
        check("funcrec.Plan.from_json", text_problems(text))
        own = json.loads(text)
        placement = lambda p: Placement(p["kind"], tuple(p["axes"]), tuple(p["ranks"]))
        report = None if own["report"] is None else Report.from_dict(own["report"])
        placements = {n: placement(p) for n, p in own["placements"].items()}
        return Plan(placements, tuple(own["replicas"]), report, buckets=tuple(own.get("buckets", ())))

    @staticmethod
    @typed
    def uniform(
        kind: PlacementKind,
        tables: Sequence[TableConfig] | Mapping[str, Any],
        mesh: Mesh,
        *,
        replicas: AxisName = (),
        buckets: AxisName = (),
    ) -> "Plan":
        """Return a plan that places all tables alike, over all axes of the mesh except `replicas`.

        If a table lies on one place, the tables take the places in turn.

        Args:
          tables: the configs of the tables, or a mapping by table names, such as the tables themselves.
          replicas, buckets: see Plan.

        Raises:
          ValueError: if the kind needs two axes and the mesh has fewer or more besides `replicas`, or if it needs an
            axis and the mesh has none.

        Law: with T tables on n places, each place has floor(T / n) or ceil(T / n) tables.

        Example:
          >>> import funcrec as fr
          >>> tables, mesh = [fr.TableConfig("item", 9, 4), fr.TableConfig("user", 5, 4)], fr.Mesh.emulated(model=2)
          >>> plan = fr.Plan.uniform("table_wise", tables, mesh)
          >>> plan["item"].ranks, plan["user"].ranks
          ((0,), (1,))

        Source: TorchRec's planner with one ShardingType in every table's constraints.
        """
        axes = tuple(a for a in mesh.axis_names if a not in axis_names(replicas))
        names = list(tables) if isinstance(tables, Mapping) else [t.name for t in tables]
        check("funcrec.Plan.uniform", uniform_problems(kind, tables, mesh, axis_names(replicas)))
        num_places = prod(mesh.shape[a] for a in (axes[:1] if kind in OF_TWO_AXES else axes))
        ranks = lambda i: (i % num_places,) if kind in ON_ONE_PLACE else ()
        made = lambda i: Placement(kind, () if kind == "replicated" else axes, ranks(i))
        return Plan({n: made(i) for i, n in enumerate(names)}, replicas, buckets=buckets)

    def __getitem__(self, table: str) -> Placement:
        own = dict(self.placements)
        if not isinstance(table, str) or table not in own:
            hint = f"{table!r}: fr.replicated() among the placements" if isinstance(table, str) else "a table's name"
            what = "the plan has no such table."
            fail("funcrec.Plan", what, got=describe(table), need=f"one of {list(own)}", hint=hint, kind=KeyError)
        return own[table]

    def __repr__(self) -> str:
        more = "".join(f", {n}={x}" for n, x in (("replicas", self.replicas), ("buckets", self.buckets)) if x)
        return f"Plan({dict(self.placements)}{more})"

    def _brief(self) -> str:
        """Return the text of a long plan in another value's text: how many tables each kind of placement has."""
        kinds = Counter(p.kind for _, p in self.placements)
        return f"Plan({len(self.placements)} tables: {', '.join(f'{n} {kind}' for kind, n in kinds.items())})"


# -- validators --------------------------------------------------------------------------------------------------


def plan_problems(
    placements: Mapping[str, Placement], replicas: tuple[str, ...], buckets: tuple[str, ...]
) -> Iterator[Problem]:
    yield from twice_problems("`replicas` are not axes of a mesh.", replicas, need="an axis, or distinct axes")
    yield from twice_problems("`buckets` are not axes of a mesh.", buckets, need="an axis, or distinct axes")
    for name, p in placements.items():
        if both := [a for a in p.axes if a in replicas]:
            what = f"table {name!r} is cut over an axis whose copies train apart."
            yield Problem(what, f"{both}", "other axes than those of `replicas`")


def uniform_problems(kind: str, tables: Any, mesh: Mesh, replicas: tuple[str, ...]) -> Iterator[Problem]:
    if not isinstance(tables, Mapping):
        yield from table_list_problems(tables)
    yield from replica_problems(replicas, mesh)
    wanted, axes = 2 if kind in OF_TWO_AXES else int(kind != "replicated"), set(mesh.axis_names) - set(replicas)
    if len(axes) < wanted or (wanted == 2 and len(axes) > 2):
        need = "two, the outer one first" if wanted == 2 else "one at least"
        hint = "fr.Mesh.emulated(node=2, local=4)" if wanted == 2 else 'kind="replicated", or fewer `replicas`'
        yield Problem(f"{kind!r} has no such axes here.", f"{sorted(axes)} besides `replicas`", need, hint)


def replica_problems(replicas: tuple[str, ...], mesh: Mesh) -> Iterator[Problem]:
    yield from unknown_problems("`replicas` of the plan name an axis that the mesh lacks.", replicas, mesh.shape)


def fit_problems(plan: Plan, mesh: Mesh, shapes: Mapping[str, tuple[int, int]]) -> Iterator[Problem]:
    """Report tables without a placement, and placements whose axes or ranks the mesh lacks."""
    placements = dict(plan.placements)
    yield from replica_problems(plan.replicas, mesh)
    yield from unknown_problems("`buckets` of the plan name an axis that the mesh lacks.", plan.buckets, mesh.shape)
    need, hint = "a placement for each", "fr.replicated(), for a small table"
    yield from absent_problems("the plan lacks table {}.", placements, shapes, need, hint)
    yield from absent_problems("the plan places table {}, which does not exist.", shapes, placements, "one of them")
    for name, p in placements.items():
        what = f"the placement of {name!r} names an axis that the mesh lacks."
        if (yield from reported(unknown_problems(what, p.axes, mesh.axis_names))):
            continue
        ranks = [mesh.shape[a] for a in p.axes]
        most = ranks[0] if p.kind in OF_TWO_AXES else prod(ranks)
        for r in p.ranks:
            if r >= most:
                what = f"the placement of {name!r} names a rank that does not exist."
                yield Problem(what, f"{r}", f"0 to {most - 1}")


def text_problems(text: str) -> Iterator[Problem]:
    need, hint = "the text that plan.to_json() made", "fr.Plan.from_json(plan.to_json())"
    try:
        own = json.loads(text)
    except ValueError as error:
        yield Problem("`text` is not JSON.", str(error), need, hint)
        return
    if not isinstance(own, dict) or not {"version", "placements", "replicas", "report"} <= set(own):
        yield Problem("`text` is not a plan.", f"JSON of a {type(own).__name__}", need, hint)
    elif own["version"] != VERSION:
        yield Problem("`text` has another version.", f"version {own['version']!r}", f"version {VERSION}", hint)
    else:
        all_are = lambda x, kind: isinstance(x, list) and all(type(a) is kind for a in x)
        fits = lambda p: (
            isinstance(p, dict) and set(p) == {"kind", "axes", "ranks"} and type(p["kind"]) is str
            and all_are(p["axes"], str) and all_are(p["ranks"], int)
        )  # fmt: skip
        is_plan = isinstance(own["placements"], dict) and all(map(fits, own["placements"].values()))
        if not is_plan or not all_are(own["replicas"], str) or not all_are(own.get("buckets", []), str):
            yield Problem("`text` is not a plan.", "JSON with other fields", need, hint)
        elif own["report"] is not None:
            wrong = report_problem(own["report"], list(own["placements"]))
            if wrong:
                yield Problem("`text` has an invalid report.", wrong, need, hint)
