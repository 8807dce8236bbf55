"""Validators of the arguments of `fr.plan`."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from funcrec.core import Problem, unknown_problems
from funcrec.mesh import Mesh, axes_problems
from funcrec.planner._constraints import TableConstraint
from funcrec.planner._hardware import Hardware
from funcrec.sharding import OF_TWO_AXES
from funcrec.tables import FeatureConfig, TableConfig, feature_list_problems, table_list_problems

MOST_RANKS = 2**16  # the search takes time in proportion to the ranks: minutes for this many


def sizes_of(mesh: Mesh | Mapping[str, int]) -> dict[str, int]:
    return mesh.shape if isinstance(mesh, Mesh) else dict(mesh)


def mesh_problems(mesh: Mesh | Mapping[str, int]) -> Iterator[Problem]:
    sizes = sizes_of(mesh)
    if not isinstance(mesh, Mesh):
        yield from axes_problems(sizes)
    if prod(sizes.values()) > MOST_RANKS:
        got, hint = f"{prod(sizes.values()):,}: {sizes}", '{"model": 1024}'
        yield Problem("`mesh` has too many ranks.", got, f"at most {MOST_RANKS:,} ranks", hint)


def plan_problems(tables: Sequence[TableConfig], features: Sequence[FeatureConfig]) -> Iterator[Problem]:
    yield from table_list_problems(tables)
    yield from feature_list_problems(features)
    names = [t.name for t in tables]
    for f in features:
        if f.table not in names:
            what = f"feature {f.name!r} reads a table that does not exist."
            yield Problem(what, repr(f.table), f"one of {names[:8]}", kind=KeyError)


def disk_problems(told: Mapping[str, TableConstraint], hardware: Hardware) -> Iterator[Problem]:
    """Report tables whose rows are partly in stores, on hardware without a disk, and a disk of which one number is
    missing."""
    size, speed = hardware.disk_bytes, hardware.disk_records_per_s
    if (size == 0) != (speed == 0):
        got, need = f"disk_bytes={size}, disk_records_per_s={speed}", "both, or neither"
        yield Problem("`hardware` has half of a disk.", got, need, "disk_bytes=10**12, disk_records_per_s=1e5")
    for name, c in told.items():
        if not size and c.in_memory not in (None, 1.0):
            got, hint = f"in_memory={c.in_memory}", "fr.Hardware(..., disk_bytes=10**12, disk_records_per_s=1e5)"
            yield Problem(f"table {name!r} needs a disk.", got, "hardware with a disk, or in_memory=1", hint)


def cache_problems(
    told: Mapping[str, TableConstraint], features: Sequence[FeatureConfig], replicas: tuple[str, ...]
) -> Iterator[Problem]:
    """Report caches that `cached_step` refuses: of copies that train apart, and of a part of a column's tables."""
    for name, c in told.items():
        if replicas and c.in_memory not in (None, 1.0):
            got, need = f"in_memory={c.in_memory}, replicas={replicas}", "tables of copies whole in memory"
            yield Problem(f"table {name!r} has copies that train apart, and a store has one row.", got, need)
    of_column: dict[str, dict[str, float]] = {}
    for f in features:
        of_column.setdefault(f.key, {})[f.table] = told[f.table].in_memory or 1.0
    for column, shares in of_column.items():
        if len(set(shares.values())) > 1:
            what = f"tables of column {column!r} differ in their shares in memory, and a column has one cache."
            yield Problem(what, f"{shares}", "one share for all of them", f"in_memory={min(shares.values())}")


def together_problems(
    tables: Sequence[TableConfig],
    told: Mapping[str, TableConstraint],
    sizes: Mapping[str, int],
    replicas: tuple[str, ...],
) -> Iterator[Problem]:
    """Report places and axes that the mesh lacks, partitions wider than their table, and counts that are not one per
    row."""
    yield from unknown_problems("`replicas` name an axis that the mesh lacks.", replicas, sizes)
    own = {a: n for a, n in sizes.items() if a not in replicas}
    most = prod(own.values())
    for t in tables:
        c, path = told[t.name], f"`constraints[{t.name!r}]"
        if any(r >= most for r in c.ranks):
            need = f"places from 0 to {most - 1}"
            yield Problem(f"{path}.ranks` are not on the mesh.", f"{tuple(c.ranks)}", need, "ranks=(0,)")
        if c.min_partition > t.embedding_dim:
            need, hint = f"at most embedding_dim, {t.embedding_dim}", "min_partition=1"
            yield Problem(f"{path}.min_partition` is wider than the table.", f"{c.min_partition}", need, hint)
        if c.row_counts is not None and len(c.row_counts) != t.num_embeddings:
            need = f"one for each of {t.num_embeddings} rows"
            yield Problem(f"{path}.row_counts` are not of its rows.", f"{len(c.row_counts)} numbers", need)
        if c.kinds and not [k for k in c.kinds if k not in OF_TWO_AXES] and sum(n > 1 for n in own.values()) < 2:
            got, need = f"{list(c.kinds)} on {dict(own)}", "two axes of several ranks"
            yield Problem(f"{path}.kinds` mix two axes.", got, need, 'mesh={"node": 2, "local": 4}')
