"""Placements: which ranks hold which rows and columns of a table.

    a placement cuts a table into blocks of columns;   a block's rows go, in equal parts, to the block's ranks

All placements have this form. Table-wise is one block on one rank, row-wise is one block on all ranks, and column-wise
is a block per rank. The other placements mix these over two axes. The table is replicated along axes that a placement
does not name. Shapes: R rows, D dim, n ranks on the placement's axes, numbered with the first axis as the major one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from funcrec.core import Count, Problem, Size, check, fail, field_problems, reported, twice_problems, typed
from funcrec.mesh import AxisName

PlacementKind = Literal[
    "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid", "replicated"
]
OF_TWO_AXES = ("table_row_wise", "table_column_wise", "grid")
ON_ONE_PLACE = ("table_wise", "table_row_wise", "table_column_wise")


class Block(NamedTuple):
    """Columns [first, last) of a table, with rows cut over `ranks`. Each rank has ceil(R / len(ranks)) rows."""

    first: int
    last: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """The place of a table on a mesh.

    These functions make it: `table_wise`, `row_wise`, `column_wise`, `table_row_wise`, `table_column_wise`, `grid` and
    `replicated`.

    Args:
      kind: the name of one of these functions.
      axes: the mesh axes over which the table is cut. Along other axes the table is replicated.
      ranks: the rank of the table, or of each column block; () for all ranks.
        For placements that mix two axes, these are places on the first axis.

    Example:
      >>> import funcrec as fr
      >>> fr.row_wise("model")
      Placement(kind='row_wise', axes=('model',), ranks=())
    """

    kind: PlacementKind
    axes: tuple[str, ...]
    ranks: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        name = self.kind if isinstance(self.kind, str) else "Placement"
        check(f"funcrec.{name}", field_problems(self))
        check(f"funcrec.{name}", placement_problems(self))

    @typed
    def blocks(self, sizes: Mapping[str, Count], dim: Count) -> list[Block]:
        """Return the column blocks of a table with this dim, on a mesh of these sizes."""
        missing = [a for a in self.axes if a not in sizes]
        if missing:
            got, need, hint = f"sizes of {list(sizes)}", f"{list(self.axes)}", "mesh.shape"
            fail("funcrec.Placement.blocks", f"`sizes` lacks {missing}.", got=got, need=need, hint=hint, kind=KeyError)
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
    """Return blocks of columns of nearly equal size. No block is empty."""
    k = min(len(owners), dim)
    bounds = [dim * i // k for i in range(k + 1)]
    return [Block(a, b, owner) for a, b, owner in zip(bounds, bounds[1:], owners, strict=False)]


@typed
def table_wise(axis: AxisName, *, rank: Size) -> Placement:
    """Return a placement that puts the whole table on one rank of the axis.

    Example:
      >>> import funcrec as fr
      >>> fr.table_wise("model", rank=1).blocks({"model": 2}, dim=8)
      [Block(first=0, last=8, ranks=(1,))]

    Source: TorchRec's ShardingType.TABLE_WISE.
    """
    return Placement("table_wise", axis_names(axis), (rank,))


@typed
def row_wise(axis: AxisName) -> Placement:
    """Return a placement that cuts the rows into equal parts over all ranks of the axis, or of several axes.

    Example:
      >>> import funcrec as fr
      >>> fr.row_wise("model").blocks({"model": 2}, dim=8)
      [Block(first=0, last=8, ranks=(0, 1))]

    Source: TorchRec's ShardingType.ROW_WISE.
    """
    return Placement("row_wise", axis_names(axis))


@typed
def column_wise(axis: AxisName, *, ranks: Sequence[Size] = ()) -> Placement:
    """Return a placement that cuts the columns into equal parts over `ranks`, or over all ranks of the axis.

    A row keeps one optimizer state for the whole row.

    Example:
      >>> import funcrec as fr
      >>> fr.column_wise("model", ranks=(2, 0)).blocks({"model": 4}, dim=8)
      [Block(first=0, last=4, ranks=(2,)), Block(first=4, last=8, ranks=(0,))]

    Source: TorchRec's ShardingType.COLUMN_WISE, which keeps a state for each column part.
    """
    return Placement("column_wise", axis_names(axis), tuple(ranks))


@typed
def table_row_wise(axes: tuple[str, str], *, rank: Size) -> Placement:
    """Return a placement on one place of the first axis, with the rows in equal parts over the second axis.

    Example:
      >>> import funcrec as fr
      >>> fr.table_row_wise(("node", "local"), rank=1).blocks({"node": 2, "local": 2}, dim=8)
      [Block(first=0, last=8, ranks=(2, 3))]

    Source: TorchRec's ShardingType.TABLE_ROW_WISE.
    """
    return Placement("table_row_wise", axis_names(axes), (rank,))


@typed
def table_column_wise(axes: tuple[str, str], *, rank: Size) -> Placement:
    """Return a placement on one place of the first axis, with the columns in equal parts over the second axis.

    Example:
      >>> import funcrec as fr
      >>> fr.table_column_wise(("node", "local"), rank=1).blocks({"node": 2, "local": 2}, dim=8)
      [Block(first=0, last=4, ranks=(2,)), Block(first=4, last=8, ranks=(3,))]

    Source: TorchRec's ShardingType.TABLE_COLUMN_WISE.
    """
    return Placement("table_column_wise", axis_names(axes), (rank,))


@typed
def grid(axes: tuple[str, str], *, ranks: Sequence[Size] = ()) -> Placement:
    """Return a placement that cuts the columns over places of the first axis, and the rows over the second axis.

    ranks: the places of the first axis; () for all of them.

    Example:
      >>> import funcrec as fr
      >>> fr.grid(("node", "local")).blocks({"node": 2, "local": 2}, dim=8)
      [Block(first=0, last=4, ranks=(0, 1)), Block(first=4, last=8, ranks=(2, 3))]

    Source: TorchRec's ShardingType.GRID_SHARD.
    """
    return Placement("grid", axis_names(axes), tuple(ranks))


def replicated() -> Placement:
    """Return a placement that puts the whole table on every rank.

    Each rank applies the gradients of all ranks.

    Example:
      >>> import funcrec as fr
      >>> fr.replicated()
      Placement(kind='replicated', axes=(), ranks=())

    Source: TorchRec's ShardingType.DATA_PARALLEL.
    """
    return Placement("replicated", ())


def axis_names(axes: AxisName) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


# -- validators --------------------------------------------------------------------------------------------------


def placement_problems(p: Placement) -> Iterator[Problem]:
    two = p.kind in OF_TWO_AXES
    if (yield from reported(twice_problems("the axes are not axes of a mesh.", p.axes))):
        return
    if two and len(p.axes) != 2:
        yield Problem("the placement mixes two axes.", f"{p.axes}", "a pair of axes, the outer one first")
    elif not two and p.kind != "replicated" and not p.axes:
        yield Problem("the placement has no axis.", "()", "the name of an axis")
    if p.kind == "grid":
        yield from twice_problems("a rank is named twice.", p.ranks, need="distinct places")
