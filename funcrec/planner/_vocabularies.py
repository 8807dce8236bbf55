"""Ways to keep the vocabularies of tables on ranks: whole on every rank, or cut by buckets over all ranks.

    whole: 18 · R bytes; a rank gets the ids of all ranks, 8 · I to each other rank, and admits n · I ids
    cut: 18 · R / n bytes; 6 · 8 · I to each other rank, and I ids to admit on an average rank

A rank that has a part sends its ids in blocks with room for all of them, gets the rows, and then the new rows and ids
of all ranks. Both ways cost latencies. One choice holds for all vocabularies, because a plan has one.
Shapes: R rows of a vocabulary, I ids of its columns on a rank, n ranks of the mesh.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from funcrec.core import Problem
from funcrec.planner._constraints import TableConstraint
from funcrec.planner._options import BYTES, EXCHANGE, LOOKUP, Ground, Loads, Way, latency_s, peer_s_per_byte
from funcrec.tables import FeatureConfig, TableConfig

BUCKET = 128  # rows
ROW_BYTES = 18  # a tag, an entry, and a counter of the sketch
ID_BYTES = 8
# Bytes at the memory's speed for an id that is admitted. Measured on four gloo ranks of an AMD EPYC
# (bench/vocabulary.py --ranks 4): 17 ms for 65,536 ids at 10 GB/s; two ranks agree within 4 %. On CUDA it is not known.
ADMIT_BYTES = 2500
WHOLE, CUT = "whole", "cut"


class Followed(NamedTuple):
    """A vocabulary: its rows, and the ids of a rank's step."""

    rows: int
    ids: float


def followed(
    tables: Sequence[TableConfig], features: Sequence[FeatureConfig], told: Mapping[str, TableConstraint], bags: float
) -> list[Followed]:
    """Return the vocabularies that the constraints name. A column that several features read counts once."""
    rows = {told[t.name].vocabulary: t.num_embeddings for t in tables}
    columns: dict[str, dict[str, float]] = {n: {} for n in rows if n is not None}
    for f in features:
        name = told[f.table].vocabulary
        if name is not None:
            columns[name][f.key] = max(columns[name].get(f.key, 0.0), told[f.table].pooling_of(f))
    return [Followed(rows[n], bags * sum(own.values())) for n, own in columns.items()]


def vocabulary_ways(vocabularies: Sequence[Followed], ground: Ground, may_cut: bool) -> list[Way]:
    """Return the ways to keep all vocabularies: whole, and cut if the mesh has several ranks."""
    if not vocabularies:
        return []
    axes, n = tuple(a for a, _ in ground.mesh), prod(k for _, k in ground.mesh)
    ids, everywhere = sum(v.ids for v in vocabularies), (tuple(range(ground.num_ranks)),)
    several = n > 1
    sent = ids * ID_BYTES * peer_s_per_byte(ground.hardware, axes, ground.mesh) if several else 0.0
    latency = latency_s(ground.hardware, axes, ground.mesh) if several else 0.0
    admit_s = ids * ADMIT_BYTES / ground.hardware.memory_bytes_per_s
    part = lambda v, k: -(-v.rows // (k * BUCKET)) * BUCKET * ROW_BYTES
    room = n * ids * ID_BYTES if several else 0.0  # ids from all ranks, or blocks for all of them

    def way(key: str, over: tuple[str, ...], messages: int, admitted: float, exchanges: int, k: int) -> Way:
        base: Loads = {
            LOOKUP: admitted * admit_s,
            EXCHANGE: messages * sent + exchanges * latency,
            BYTES: sum(part(v, k) for v in vocabularies) + messages * room,
        }
        return Way((key, over, 1, (), 1.0), ({},), everywhere, "fixed", base)

    whole = way(WHOLE, (), 1, n, 2, 1)  # ids and their numbers
    return [whole, way(CUT, axes, 6, 1, 4, n)] if several and may_cut else [whole]


# -- validators --------------------------------------------------------------------------------------------------


def vocabulary_problems(tables: Sequence[TableConfig], told: Mapping[str, TableConstraint]) -> Iterator[Problem]:
    """Report tables of one vocabulary that differ in their rows, and those of which a store would have rows."""
    first: dict[str, TableConfig] = {}
    for t in tables:
        c = told[t.name]
        if c.vocabulary is None:
            continue
        other = first.setdefault(c.vocabulary, t)
        if other.num_embeddings != t.num_embeddings:
            got = f"{t.name!r} has {t.num_embeddings} rows, {other.name!r} has {other.num_embeddings}"
            what, need = f"tables of vocabulary {c.vocabulary!r} differ in their rows.", "one row for each of its ids"
            yield Problem(what, got, need, "vocabulary.num_embeddings for each")
        if c.in_memory not in (None, 1.0):
            what, need = f"table {t.name!r} follows a vocabulary, and a store has rows.", "in_memory=1"
            yield Problem(what, f"vocabulary={c.vocabulary!r}, in_memory={c.in_memory}", need, "no `vocabulary`")
