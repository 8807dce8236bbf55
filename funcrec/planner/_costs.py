"""Estimates the cost of a table under a placement: bytes over bytes per second, with one function per term.

    step = max over ranks Σ lookup_s + Σ exchange_s + max over ranks Σ update_s + Σ launches

Each phase of a step ends for all ranks at an exchange, so the slowest rank of each phase counts. An exchange costs its
latency and its bytes; a bank costs a launch and its bytes. Tables that share an exchange or a bank pay for it once.
Not modelled: the dense part, costs that all plans share, how a batch differs from its averages, caches, latencies that
grow with the ranks, tables kept outside the rank's memory (cold ones), and ranks that differ in memory or speed.
Shapes: B bags on each rank, I ids of a table on each rank, n ranks on the placement's axes, of which m share a block's
rows, N all ranks, g = N / n copies, R rows, w columns of a block, D of the table, U distinct rows.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from funcrec.mesh import Codec
from funcrec.planner._hardware import Hardware

ID_BYTES = 4  # of a row number on its way, for fewer than 2³¹ rows
F32_BYTES = 4
EXCHANGES = 3  # for each lookup in a step: ids, vectors back, cotangents
SORT_PASSES = 4  # over ids and their places, to group gradients by row
POINTS = 4096  # cells into which a Zipf distribution's rows are grouped


def lookup_s(hardware: Hardware, ids: float, bags: float, width: int, element_bytes: int) -> float:
    """(ids · (w · bytes + 8) + bags · w · 4) / memory's bytes per second: reads rows and ids (8 bytes), writes sums."""
    return (ids * (width * element_bytes + 8) + bags * width * F32_BYTES) / hardware.memory_bytes_per_s


def update_s(
    hardware: Hardware,
    ids: float,
    rows: float,
    width: int,
    element_bytes: int,
    slot_bytes: float,
    grad_width: int | None = None,
) -> float:
    """(ids · (d_w · 4 + sorting) + 2 · rows · (w · bytes + slots)) / memory's bytes per second.

    It reads gradients and groups them by row, and reads and writes the touched rows and their slots. d_w: columns of
    the gradients that it reads.
    """
    read = ids * ((width if grad_width is None else grad_width) * F32_BYTES + SORT_PASSES * 2 * 8)
    return (read + 2 * rows * (width * element_bytes + slot_bytes)) / hardware.memory_bytes_per_s


def peer_s_per_byte(hardware: Hardware, group: Sequence[int]) -> float:
    """Seconds that a rank needs to send a byte to every other rank of the group.

    (l - 1) / link + (n - l) / between hosts, where l ranks are on its host.
    """
    host = group[0] // hardware.ranks_per_host
    near = sum(r // hardware.ranks_per_host == host for r in group)
    return (near - 1) / hardware.link_bytes_per_s + (len(group) - near) / hardware.host_bytes_per_s


def latency_s(hardware: Hardware, group: Sequence[int]) -> float:
    """Seconds that an exchange of the group costs however few its bytes.

    That is the latency between hosts if the group has ranks of several, else that within a host; 0 for a single rank.
    """
    hosts = {r // hardware.ranks_per_host for r in group}
    return 0.0 if len(group) == 1 else hardware.link_latency_s if len(hosts) == 1 else hardware.host_latency_s


def id_bytes(ids: float, num_ranks: int, weight_bytes: int, capacity_factor: float | None) -> float:
    """Bytes of the block that a rank sends each owner.

    It has room for all the rank's ids, or for `capacity_factor` times an owner's share.
    """
    room = ids if capacity_factor is None else min(ids, capacity_factor * ids / num_ranks)
    return room * (ID_BYTES + weight_bytes)


def vector_bytes(width: int, kind: str | None, element_bytes: int = F32_BYTES) -> float:
    """Bytes of a vector as a codec sends it: its elements; int8 adds a scale of 4 bytes."""
    if kind == "int8":
        return width + 4
    return width * (min(2, element_bytes) if kind else element_bytes)


def both_ways(width: int, codec: Codec | None, element_bytes: int = F32_BYTES, back: int | None = None) -> float:
    """Bytes of a vector and of its cotangent, which goes back."""
    there, again = (None, None) if codec is None else (codec.forward, codec.backward)
    return vector_bytes(width, there, element_bytes) + vector_bytes(width if back is None else back, again)


def copies_bytes(ids: float, bags: float, width: int, num_ranks: int) -> float:
    """n · (I · 4 + B · w · 4): bytes that a copy sends every other, the ids and d_acts of each sender."""
    return num_ranks * (ids * ID_BYTES + bags * width * F32_BYTES)


def activation_bytes(bags: float, width: int, num_ranks: int) -> float:
    """2 · n · B · w · 4: bytes of the sums that a rank sends and receives."""
    return 2 * num_ranks * bags * width * F32_BYTES


def distinct_rows(ids: float, rows: int, zipf: float = 0.0, counts: Sequence[float] | None = None) -> float:
    """Expected number of distinct rows among independent draws: Σ_r 1 - (1 - p_r)^ids.

    p_r is 1 / R, or in proportion to 1 / rank^zipf, or to measured `counts` of rows. `dedup` sends this many rows, and
    an update touches as many.
    """
    if ids <= 0:
        return 0.0
    if counts is not None:
        p = np.asarray(counts, dtype=np.float64)
        p = p[p > 0] / p.sum()
        return float(-np.expm1(ids * np.log1p(-np.minimum(p, 1 - 1e-16))).sum())
    if zipf == 0:
        return rows * -math.expm1(ids * math.log1p(-1 / rows)) if rows > 1 else 1.0
    # group the ranks into cells whose size grows with the rank, with equal p within a cell
    edges = np.unique(np.floor(np.geomspace(1, rows + 1, min(rows + 1, POINTS))))
    edges = np.append(edges, rows + 1) if edges[-1] < rows + 1 else edges
    sizes, middle = np.diff(edges), (edges[:-1] + edges[1:] - 1) / 2
    p = middle**-zipf
    p = p / (p * sizes).sum()
    return float((sizes * -np.expm1(ids * np.log1p(-np.minimum(p, 1 - 1e-16)))).sum())


class Use(NamedTuple):
    """How a step uses a table, on each rank: bags of pooled features, their ids, ids of sequences, pooled features.

    weight_bytes: bytes of an id's weight. distinct: rows that ids of all ranks name. distinct_here: rows that one
    rank's ids name.
    """

    bags: float
    ids: float
    sequence_ids: float
    num_pooled: int
    weight_bytes: int
    distinct: float
    distinct_here: float

    @property
    def all_ids(self) -> float:
        return self.ids + self.sequence_ids
