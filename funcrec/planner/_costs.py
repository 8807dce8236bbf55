"""What a table costs under a placement: bytes over bytes per second, each term a function of its own.

    step = max over ranks Σ lookup_s + Σ exchange_s + max over ranks Σ update_s + Σ launches

A step's phases end together, at its exchanges: so the slowest rank of each counts. An exchange costs its latency and
its bytes, a bank a launch and its bytes; tables that share an exchange or a bank pay for it once. Not modelled: the
dense part, what all plans cost alike, what a batch draws unlike its averages, caches, latencies that grow with the
ranks, tables kept in another memory than the rank's (cold ones), and ranks that differ in memory or speed.
Shapes: B bags on each rank, I ids of a table on each rank, n ranks on the placement's axes, of which m share a block's
rows, N all ranks, g = N / n copies, R rows, w columns of a block, D of the table, U distinct rows.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from funcrec.mesh import Codec
from funcrec.planner._hardware import Hardware

ID_BYTES = 4  # of a row's number as it travels, below 2³¹ rows
F32_BYTES = 4
EXCHANGES = 3  # of a lookup in a step: ids there, vectors back, cotangents there
SORT_PASSES = 4  # over ids and their places, to bring a row's gradients together
POINTS = 4096  # at which a Zipf's rows are looked at


def lookup_s(hardware: Hardware, ids: float, bags: float, width: int, element_bytes: int) -> float:
    """(ids · (w · bytes + an id) + bags · w · 4) / memory's bytes per second: rows read, sums written."""
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
    """(ids · (d_w · 4 + sorting) + 2 · rows · (w · bytes + slots)) / memory's bytes per second: gradients read and
    brought together, touched rows and their slots read and written. d_w: columns of the gradients that are read."""
    read = ids * ((width if grad_width is None else grad_width) * F32_BYTES + SORT_PASSES * 2 * 8)
    return (read + 2 * rows * (width * element_bytes + slot_bytes)) / hardware.memory_bytes_per_s


def peer_s_per_byte(hardware: Hardware, group: Sequence[int]) -> float:
    """Seconds that a rank needs to send a byte to every other of the group: (l - 1) / link + (n - l) / between
    hosts, l of them on its host."""
    host = group[0] // hardware.ranks_per_host
    near = sum(r // hardware.ranks_per_host == host for r in group)
    return (near - 1) / hardware.link_bytes_per_s + (len(group) - near) / hardware.host_bytes_per_s


def latency_s(hardware: Hardware, group: Sequence[int]) -> float:
    """What an exchange of the group costs however few its bytes: that between hosts, if it has ranks of several; that
    in a host; nothing for a rank alone."""
    hosts = {r // hardware.ranks_per_host for r in group}
    return 0.0 if len(group) == 1 else hardware.link_latency_s if len(hosts) == 1 else hardware.host_latency_s


def id_bytes(ids: float, num_ranks: int, weight_bytes: int, capacity_factor: float | None) -> float:
    """Of the block that a rank sends each owner: room for all its ids, or for `capacity_factor` times an owner's
    share."""
    room = ids if capacity_factor is None else min(ids, capacity_factor * ids / num_ranks)
    return room * (ID_BYTES + weight_bytes)


def vector_bytes(width: int, kind: str | None, element_bytes: int = F32_BYTES) -> float:
    """Of a vector as a codec sends it: its elements, int8 with a scale of 4 bytes."""
    if kind == "int8":
        return width + 4
    return width * (min(2, element_bytes) if kind else element_bytes)


def both_ways(width: int, codec: Codec | None, element_bytes: int = F32_BYTES, back: int | None = None) -> float:
    """Bytes of a vector there and its cotangent back."""
    there, again = (None, None) if codec is None else (codec.forward, codec.backward)
    return vector_bytes(width, there, element_bytes) + vector_bytes(width if back is None else back, again)


def copies_bytes(ids: float, bags: float, width: int, num_ranks: int) -> float:
    """Of the gradients that a copy tells every other: for each sender its ids and d_acts, n · (I · 4 + B · w · 4)."""
    return num_ranks * (ids * ID_BYTES + bags * width * F32_BYTES)


def activation_bytes(bags: float, width: int, num_ranks: int) -> float:
    """2 · n · B · w · 4: sums as they are sent and as they come."""
    return 2 * num_ranks * bags * width * F32_BYTES


def distinct_rows(ids: float, rows: int, zipf: float = 0.0, counts: Sequence[float] | None = None) -> float:
    """Expected number of distinct rows among ids drawn apart: Σ_r 1 - (1 - p_r)^ids.

    p_r is 1 / R, or in proportion to 1 / rank^zipf, or to `counts` of rows where those were measured.
    What `dedup` sends and an update touches.
    """
    if ids <= 0:
        return 0.0
    if counts is not None:
        p = np.asarray(counts, dtype=np.float64)
        p = p[p > 0] / p.sum()
        return float(-np.expm1(ids * np.log1p(-np.minimum(p, 1 - 1e-16))).sum())
    if zipf == 0:
        return rows * -math.expm1(ids * math.log1p(-1 / rows)) if rows > 1 else 1.0
    # ranks in cells that grow with them, each cell's rows alike
    edges = np.unique(np.floor(np.geomspace(1, rows + 1, min(rows + 1, POINTS))))
    edges = np.append(edges, rows + 1) if edges[-1] < rows + 1 else edges
    sizes, middle = np.diff(edges), (edges[:-1] + edges[1:] - 1) / 2
    p = middle**-zipf
    p = p / (p * sizes).sum()
    return float((sizes * -np.expm1(ids * np.log1p(-np.minimum(p, 1 - 1e-16)))).sum())


class Use(NamedTuple):
    """How a step uses a table: of each rank bags of pooled features and their ids, ids of sequences; num_pooled
    features.

    weight_bytes: of an id's weight. distinct: rows that all ranks together name, distinct_here: that one rank names."""

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
