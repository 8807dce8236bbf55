"""Ways to keep a part of a table's rows in memory, and the others in a store: `cached_tables`.

    way of a cached table = way of a table of the rows in memory, and what its misses cost

A miss reads a record from the disk of the rank that has it, sends the record to all ranks, and writes back the record
that leaves. Every rank has the vocabulary. The cache holds the rows that are read most; a policy that learns them
misses more.

Shapes: C rows in memory, R rows of the table, W bytes of a record, n ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from funcrec.core import Problem
from funcrec.planner import _costs as costs
from funcrec.planner._constraints import TableConstraint
from funcrec.planner._options import BYTES, DISK, EXCHANGE, Ground, Loads, Way, peer_s_per_byte, ways
from funcrec.tables import FeatureConfig, TableConfig

SHARES = (0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.003, 0.001)  # of a table's rows in memory, that the planner tries
BUCKET = 128  # rows: a cache has whole buckets
ROOM = 4  # rows in memory for each distinct id of a step
ROW_BYTES = 17  # the vocabulary's bytes of a row


def rows_in_memory(table: TableConfig, share: float) -> int:
    """Return the rows in memory of a share of the table's rows, a multiple of 128 unless it is the whole table."""
    return table.num_embeddings if share == 1 else -(-int(table.num_embeddings * share) // BUCKET) * BUCKET or BUCKET


def part_of(table: TableConfig, share: float) -> TableConfig:
    """Return the table of the rows in memory."""
    return table if share == 1 else replace(table, num_embeddings=rows_in_memory(table, share))


def all_ways(
    table: TableConfig,
    use: costs.Use,
    constraint: TableConstraint,
    ground: Ground,
    of_part: Callable[[TableConfig], list[Way]] | None = None,
) -> list[Way]:
    """Return all ways to place the table, whole or with a part of its rows in memory.

    of_part: the ways to place the rows in memory; None for all that the constraint allows.
    """
    told, out = constraint.in_memory, []
    tried = (1.0, *SHARES) if told is None else (told,)
    for share in tried if ground.hardware.disk_records_per_s else (1.0,):
        part = part_of(table, share)
        if share < 1 and told is None and part.num_embeddings < ROOM * use.distinct:
            continue
        found = ways(part, use, constraint, ground) if of_part is None else of_part(part)
        base = {} if share == 1 else misses_of(table, part, use, constraint, ground)
        more = lambda way: {k: way.base.get(k, 0.0) + base.get(k, 0.0) for k in way.base | base}  # noqa: B023
        out += [w._replace(key=(*w.key[:4], share), base=more(w)) for w in found]
    return out


def room_problems(
    tables: Sequence[TableConfig], told: Mapping[str, TableConstraint], uses: Mapping[str, costs.Use]
) -> Iterator[Problem]:
    """Report shares of rows in memory that have no room for the ids of a step."""
    for t in tables:
        share, ids = told[t.name].in_memory, uses[t.name].distinct
        if share not in (None, 1.0) and (rows := rows_in_memory(t, share)) < ids:
            got, need = f"in_memory={share}: {rows} rows", f"room for the {ids:.0f} rows that a step reads"
            hint = f"in_memory={min(1.0, ROOM * ids / t.num_embeddings):.3g}"
            yield Problem(f"table {t.name!r} has too few rows in memory.", got, need, hint)


def misses_of(
    table: TableConfig, part: TableConfig, use: costs.Use, constraint: TableConstraint, ground: Ground
) -> Loads:
    """Return what the rows that are not in memory cost on every rank."""
    ids, size = use.all_ids * ground.num_ranks, table.embedding_dim * table.dtype.itemsize
    width = size + ground.slot_bytes(table.name, table.embedding_dim)
    told = constraint.zipf, constraint.row_counts
    missed = costs.distinct_rows(ids, table.num_embeddings, *told, held=part.num_embeddings)
    on_disk = missed / ground.num_ranks / ground.hardware.disk_records_per_s
    axes = tuple(a for a, _ in ground.sizes)
    sent = 2 * missed * width / ground.num_ranks * peer_s_per_byte(ground.hardware, axes, ground.mesh)
    return {
        EXCHANGE: on_disk + sent,
        BYTES: ROW_BYTES * part.num_embeddings,
        DISK: width * table.num_embeddings / ground.num_ranks,
    }


def whole_in_memory(
    told: Mapping[str, TableConstraint], features: Sequence[FeatureConfig], replicas: Sequence[str]
) -> dict[str, TableConstraint]:
    """Return the constraints, by which tables that share a column, those of a vocabulary, and all with `replicas` are
    whole in memory unless a constraint says else: a column has one cache, and a store one row for all copies."""
    of_column: dict[str, set[str]] = {}
    for f in features:
        of_column.setdefault(f.key, set()).add(f.table)
    shared = set(told) if replicas else {n for tables in of_column.values() if len(tables) > 1 for n in tables}
    shared |= {n for n, c in told.items() if c.vocabulary is not None}
    return {n: replace(c, in_memory=1.0) if n in shared and c.in_memory is None else c for n, c in told.items()}
