"""Placements that put the tables of each tower on one node.

tower g on node g mod N;   table j of a tower on rank j mod L of the node, for L ranks of a node

So the j-th tables of towers on different nodes lie on ranks with the same number, and equal towers look up alike.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Literal

from funcrec.core import Problem, check, reported, typed, unknown_problems
from funcrec.mesh import Mesh
from funcrec.sharding.by_node._towers import Tower
from funcrec.sharding.placement._placement import Placement

CALL = "funcrec.tower_placements"


@typed
def tower_placements(
    towers: Mapping[str, Tower],
    mesh: Mesh,
    *,
    axis: str = "node",
    kind: Literal["table_wise", "table_row_wise", "table_column_wise"] = "table_wise",
) -> dict[str, Placement]:
    """Return a placement for each table of the towers: the tables of a tower lie on one node.

    Args:
      axis: the axis of the mesh whose places are nodes. The other axes number the ranks within a node.
      kind: "table_wise" puts each table on one rank of the node, in turn. The other kinds cut it over all ranks of the
        node; the mesh then has two axes.

    Returns:
      {table: Placement}. Towers that share a table are on one node. Each group of such towers takes the node with the
      fewest towers.

    Raises:
      ValueError: if the mesh lacks the axis, or if the kind needs two axes and the mesh has another number.

    Example:
      >>> import funcrec as fr
      >>> layer = fr.nn.linear(8, 2)
      >>> towers = {n: fr.Tower([fr.FeatureConfig(n, table=n)], layer) for n in ("user", "item")}
      >>> places = fr.tower_placements(towers, fr.Mesh.emulated(node=2, local=4))
      >>> places["item"].ranks
      (4,)
      >>> plan = fr.Plan({**places, "country": fr.replicated()})
    """
    check(CALL, axis_problems(mesh, axis, kind))
    inner = tuple(a for a in mesh.axis_names if a != axis)
    size = prod(mesh.shape[a] for a in inner)
    tables = {n: list(dict.fromkeys(f.table for f in t.features)) for n, t in towers.items()}
    counts, out = [0] * mesh.shape[axis], {}
    for group in groups_of(tables):
        node = counts.index(min(counts))
        counts[node] += len(group)
        for n in group:
            for j, table in enumerate(tables[n]):
                whole = Placement("table_wise", (axis, *inner), (node * size + j % size,))
                out.setdefault(table, whole if kind == "table_wise" else Placement(kind, (axis, *inner), (node,)))
    return out


def groups_of(tables: Mapping[str, list[str]]) -> list[list[str]]:
    """Return the towers in groups that share no table, in the order of each group's first tower."""
    groups: list[list[str]] = []
    for name, own in tables.items():
        linked = [g for g in groups if any(set(own) & set(tables[n]) for n in g)]
        joined = [n for g in linked for n in g] + [name]
        at = groups.index(linked[0]) if linked else len(groups)
        groups = [g for g in groups[:at] if g not in linked] + [joined] + [g for g in groups[at:] if g not in linked]
    return groups


# -- validators --------------------------------------------------------------------------------------------------


def axis_problems(mesh: Mesh, axis: str, kind: str) -> Iterator[Problem]:
    what = "`axis` is not an axis of the mesh."
    if (yield from reported(unknown_problems(what, [axis], mesh.axis_names, 'axis="data", for example'))):
        return
    if kind != "table_wise" and len(mesh.axis_names) != 2:
        need, hint = "two, that of the nodes and that of a node's ranks", 'kind="table_wise"'
        yield Problem(f"{kind!r} has no such axes here.", f"axes {list(mesh.axis_names)}", need, hint)
