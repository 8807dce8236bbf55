"""Placements: which ranks hold which rows and columns of a table, and the Plan that gives each table one.

    a placement cuts a table into blocks of columns;   a block's rows go, in equal parts, to the block's ranks

All placements are this one thing: table-wise is one block on one rank, row-wise one block on all ranks, column-wise a
block per rank, the others are mixtures over two axes. Along axes
that a placement does not name the table is replicated.
Shapes: R rows, D dim, n ranks on the placement's axes, numbered with the first axis as the major one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple, get_args

from funcrec.core import Count, Problem, Size, check, describe, fail, field_problems, typed
from funcrec.mesh import AxisName, Mesh
from funcrec.tables import TableConfig, table_list_problems

Kind = Literal["table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid", "replicated"]
KINDS: tuple[str, ...] = get_args(Kind)
OF_TWO_AXES = ("table_row_wise", "table_column_wise", "grid")
ON_ONE_PLACE = ("table_wise", "table_row_wise", "table_column_wise")


class Block(NamedTuple):
    """Columns [first, last) of a table, whose rows are cut over `ranks`, each with ceil(R / len(ranks)) of them."""

    first: int
    last: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Where a table lies; made by `table_wise`, `row_wise`, `column_wise`, `table_row_wise`,
    `table_column_wise`, `grid`, `replicated`.

    Args:
      kind: which of these.
      axes: the mesh axes over which the table is cut; along the others it is replicated.
      ranks: of the table, or of each column block; () for all of them.
        For placements that mix two axes, places on the first.

    Example:
      >>> import funcrec as fr
      >>> fr.row_wise("model")
      Placement(kind='row_wise', axes=('model',), ranks=())
    """

    kind: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self):
        name = self.kind if isinstance(self.kind, str) else "Placement"
        check(f"funcrec.{name}", field_problems(self))
        check(f"funcrec.{name}", placement_problems(self))

    @typed
    def blocks(self, sizes: Mapping[str, Count], dim: Count) -> list[Block]:
        """The column blocks of a table of that dim on a mesh of these sizes."""
        missing = [a for a in self.axes if a not in sizes]
        if missing:
            got, hint = f"sizes of {list(sizes)}", "mesh.shape"
            fail(
                "funcrec.Placement.blocks",
                f"`sizes` lacks {missing}.",
                got=got,
                need=f"{list(self.axes)}",
                hint=hint,
                kind=KeyError,
            )
        n = [sizes[a] for a in self.axes]
        inner = prod(n[1:]) if self.kind in OF_TWO_AXES else 1  # ranks that share a place on the first axis
        node = lambda r: tuple(range(r * inner, (r + 1) * inner))
        if self.kind in ("row_wise", "replicated"):
            return [Block(0, dim, tuple(range(prod(n))))]
        if self.kind in ("table_wise", "table_row_wise"):
            return [Block(0, dim, node(self.ranks[0]))]
        if self.kind == "table_column_wise":
            return _columns(dim, [(r,) for r in node(self.ranks[0])])
        places = self.ranks or tuple(range(prod(n) // inner))
        return _columns(dim, [node(r) for r in places])  # column_wise, grid


def _columns(dim: int, owners: Sequence[tuple[int, ...]]) -> list[Block]:
    """Blocks as equal as can be, none of them empty."""
    k = min(len(owners), dim)
    bounds = [dim * i // k for i in range(k + 1)]
    return [Block(a, b, owner) for a, b, owner in zip(bounds, bounds[1:], owners, strict=False)]


@typed
def table_wise(axis: AxisName, *, rank: Size) -> Placement:
    """The whole table on one rank of the axis.

    Example:
      >>> import funcrec as fr
      >>> fr.table_wise("model", rank=1).blocks({"model": 2}, dim=8)
      [Block(first=0, last=8, ranks=(1,))]

    Source: TorchRec's ShardingType.TABLE_WISE.
    """
    return Placement("table_wise", _names(axis), (rank,))


@typed
def row_wise(axis: AxisName) -> Placement:
    """The rows in equal parts on all ranks of the axis, or of several axes.

    Example:
      >>> import funcrec as fr
      >>> fr.row_wise("model").blocks({"model": 2}, dim=8)
      [Block(first=0, last=8, ranks=(0, 1))]

    Source: TorchRec's ShardingType.ROW_WISE.
    """
    return Placement("row_wise", _names(axis))


@typed
def column_wise(axis: AxisName, *, ranks: Sequence[Size] = ()) -> Placement:
    """The columns in equal parts on the ranks named, or on all of the
    axis. A row's optimizer state stays that of the whole row.

    Example:
      >>> import funcrec as fr
      >>> fr.column_wise("model", ranks=(2, 0)).blocks({"model": 4}, dim=8)
      [Block(first=0, last=4, ranks=(2,)), Block(first=4, last=8, ranks=(0,))]

    Source: TorchRec's ShardingType.COLUMN_WISE, which keeps a state for each column part.
    """
    return Placement("column_wise", _names(axis), tuple(ranks))


@typed
def table_row_wise(axes: tuple[str, str], *, rank: Size) -> Placement:
    """The table on one place of the first axis, its rows in equal parts over the second.

    Example:
      >>> import funcrec as fr
      >>> fr.table_row_wise(("node", "local"), rank=1).blocks({"node": 2, "local": 2}, dim=8)
      [Block(first=0, last=8, ranks=(2, 3))]

    Source: TorchRec's ShardingType.TABLE_ROW_WISE.
    """
    return Placement("table_row_wise", _names(axes), (rank,))


@typed
def table_column_wise(axes: tuple[str, str], *, rank: Size) -> Placement:
    """The table on one place of the first axis, its columns in equal parts over the second.

    Example:
      >>> import funcrec as fr
      >>> fr.table_column_wise(("node", "local"), rank=1).blocks({"node": 2, "local": 2}, dim=8)
      [Block(first=0, last=4, ranks=(2,)), Block(first=4, last=8, ranks=(3,))]

    Source: TorchRec's ShardingType.TABLE_COLUMN_WISE.
    """
    return Placement("table_column_wise", _names(axes), (rank,))


@typed
def grid(axes: tuple[str, str], *, ranks: Sequence[Size] = ()) -> Placement:
    """The columns in equal parts over places of the first axis (those named, or all), each part's rows over the second.

    Example:
      >>> import funcrec as fr
      >>> fr.grid(("node", "local")).blocks({"node": 2, "local": 2}, dim=8)
      [Block(first=0, last=4, ranks=(0, 1)), Block(first=4, last=8, ranks=(2, 3))]

    Source: TorchRec's ShardingType.GRID_SHARD.
    """
    return Placement("grid", _names(axes), tuple(ranks))


def replicated() -> Placement:
    """The whole table on every rank, each of which applies the gradients of all.

    Example:
      >>> import funcrec as fr
      >>> fr.replicated()
      Placement(kind='replicated', axes=(), ranks=())

    Source: TorchRec's ShardingType.DATA_PARALLEL.
    """
    return Placement("replicated", ())


def _names(axes: AxisName) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


@dataclass(frozen=True, init=False, repr=False)
class Plan:
    """Table -> placement; static, so that it is part of the compile key.

    Args:
      placements: {table: Placement}. Along mesh axes that a placement does not name its table has copies that apply one
        gradient at every step.
      replicas: axes along which copies of all tables, replicated ones too, train apart: the ranks that share a place on
        them are a group, which trains its copy on its own bags as if it were
        alone, until `sync_replicas`. No placement may name them.

    Example:
      >>> import funcrec as fr
      >>> plan = fr.Plan({"item": fr.row_wise("model"), "user": fr.table_wise("model", rank=1)})
      >>> plan["user"].ranks
      (1,)
      >>> fr.Plan({"item": fr.row_wise("model")}, replicas="group").replicas
      ('group',)

    Source: TorchRec's ShardingPlan; `replicas`: its DMPCollection.
    """

    placements: tuple[tuple[str, Placement], ...]
    replicas: tuple[str, ...]

    def __init__(self, placements: Mapping[str, Placement], replicas: AxisName = ()):
        check("funcrec.Plan", plan_problems(placements, replicas))
        object.__setattr__(self, "placements", tuple(placements.items()))
        object.__setattr__(self, "replicas", _names(replicas))

    @staticmethod
    @typed
    def uniform(
        kind: Kind, tables: Sequence[TableConfig] | Mapping[str, Any], mesh: Mesh, *, replicas: AxisName = ()
    ) -> "Plan":
        """All tables placed alike, over all axes of the mesh but `replicas`; those that lie on one place take turns.

        Args:
          tables: their configs, or a mapping by their names, such as the tables themselves.
          replicas: as of Plan.

        Raises: ValueError for a kind that wants two axes, or one, on a mesh that has not as many besides `replicas`.

        Law: of T tables on n places each has floor(T / n) or ceil(T / n).

        Example:
          >>> import funcrec as fr
          >>> tables, mesh = [fr.TableConfig("item", 9, 4), fr.TableConfig("user", 5, 4)], fr.Mesh.emulated(model=2)
          >>> plan = fr.Plan.uniform("table_wise", tables, mesh)
          >>> plan["item"].ranks, plan["user"].ranks
          ((0,), (1,))

        Source: TorchRec's planner with one ShardingType among the constraints of every table.
        """
        axes = tuple(a for a in mesh.axis_names if a not in _names(replicas))
        names = list(tables) if isinstance(tables, Mapping) else [t.name for t in tables]
        check("funcrec.Plan.uniform", uniform_problems(kind, tables, mesh, _names(replicas)))
        num_places = prod(mesh.shape[a] for a in (axes[:1] if kind in OF_TWO_AXES else axes))
        ranks = lambda i: (i % num_places,) if kind in ON_ONE_PLACE else ()
        made = lambda i: Placement(kind, () if kind == "replicated" else axes, ranks(i))
        return Plan({n: made(i) for i, n in enumerate(names)}, replicas)

    def __getitem__(self, table: str) -> Placement:
        own = dict(self.placements)
        if not isinstance(table, str) or table not in own:
            hint = f"{table!r}: fr.replicated() among the placements" if isinstance(table, str) else "a table's name"
            fail(
                "funcrec.Plan",
                "the plan has no such table.",
                got=describe(table),
                need=f"one of {list(own)}",
                hint=hint,
                kind=KeyError,
            )
        return own[table]

    def __repr__(self) -> str:
        return f"Plan({dict(self.placements)}{f', replicas={self.replicas}' if self.replicas else ''})"


# -- validators --------------------------------------------------------------------------------------------------


def placement_problems(p: Placement) -> Iterator[Problem]:
    if p.kind not in KINDS:
        yield Problem("`kind` is not a placement.", f"{p.kind!r}", f"one of {list(KINDS)}")
        return
    two = p.kind in OF_TWO_AXES
    if any(not isinstance(a, str) for a in p.axes) or len(set(p.axes)) < len(p.axes):
        yield Problem("the axes are not axes of a mesh.", f"{p.axes}", "distinct names", kind=TypeError)
    elif two and len(p.axes) != 2:
        yield Problem("the placement mixes two axes.", f"{p.axes}", "a pair of axes, the outer one first")
    elif not two and p.kind != "replicated" and not p.axes:
        yield Problem("the placement has no axis.", "()", "the name of an axis")
    for r in p.ranks:
        if not isinstance(r, int) or isinstance(r, bool):
            yield Problem("a rank is not a number.", describe(r), "a place on the axis", kind=TypeError)
        elif r < 0:
            yield Problem("a rank is not there.", f"{r}", "a place >= 0 on the axis")
    if p.kind == "grid" and len(set(p.ranks)) < len(p.ranks):
        yield Problem("a rank is named twice.", f"{p.ranks}", "distinct places")


def plan_problems(placements: Any, replicas: Any) -> Iterator[Problem]:
    named = replicas if isinstance(replicas, tuple) else (replicas,)
    if not all(isinstance(a, str) for a in named) or len(set(named)) < len(named):
        need = "an axis, or a tuple of distinct axes"
        yield Problem("`replicas` are not axes of a mesh.", f"{replicas!r}", need, kind=TypeError)
        return
    if not isinstance(placements, Mapping):
        yield Problem(
            "a plan is not a mapping.",
            describe(placements),
            "{table: placement}",
            '{"item": fr.row_wise("model")}',
            TypeError,
        )
        return
    for name, p in placements.items():
        if not isinstance(p, Placement):
            hint = "fr.row_wise('model')"
            yield Problem(f"table {name!r} has no placement.", describe(p), "a Placement", hint, TypeError)
        elif set(p.axes) & set(named):
            both, need = [a for a in p.axes if a in named], "other axes than those of `replicas`"
            yield Problem(f"table {name!r} is cut over an axis whose copies train apart.", f"{both}", need)


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
    unknown = [a for a in replicas if a not in mesh.shape]
    if unknown:
        need = f"among {list(mesh.axis_names)}"
        yield Problem("`replicas` of the plan name an axis that the mesh lacks.", f"{unknown}", need)


def fit_problems(plan: Plan, mesh: Mesh, shapes: Mapping[str, tuple[int, int]]) -> Iterator[Problem]:
    """Every table has a placement whose axes and ranks the mesh has."""
    placements = dict(plan.placements)
    yield from replica_problems(plan.replicas, mesh)
    for name in shapes:
        if name not in placements:
            hint = "fr.replicated(), for a small table"
            yield Problem(
                f"the plan lacks table {name!r}.", f"tables {list(placements)}", "a placement for each", hint, KeyError
            )
    for name, p in placements.items():
        if name not in shapes:
            yield Problem(
                f"the plan places table {name!r}, which is not there.",
                f"tables {list(shapes)}",
                "one of them",
                kind=KeyError,
            )
        missing = [a for a in p.axes if a not in mesh.shape]
        if missing:
            yield Problem(
                f"the placement of {name!r} names an axis that the mesh lacks.",
                f"{missing}",
                f"among {list(mesh.axis_names)}",
            )
            continue
        ranks = [mesh.shape[a] for a in p.axes]
        most = ranks[0] if p.kind in OF_TWO_AXES else prod(ranks)
        for r in p.ranks:
            if r >= most:
                yield Problem(f"the placement of {name!r} names a rank that is not there.", f"{r}", f"0 to {most - 1}")
