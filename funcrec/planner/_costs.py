"""Estimates the cost of a table under a placement: bytes / bytes per second, with one function per term.

    step = max over ranks Σ lookup_s + Σ exchange_s + max over ranks Σ update_s + Σ launches

Each phase of a step ends for all ranks at an exchange, so the slowest rank of each phase counts. An exchange costs its
latency and its bytes. A bank costs a launch and its bytes. Tables that share an exchange or a bank pay for it once.
The model leaves out the dense part, costs that all plans share, differences of a batch from the averages, caches
and latencies that grow with the ranks. Shapes: B bags on each rank, I ids of a
table on each rank, n ranks on the placement's axes, of which m share a block's rows, N all ranks, g = N / n copies,
R rows, w columns of a block, D of the table, U distinct rows.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from funcrec.mesh import Codec
from funcrec.planner._hardware import Hardware

ID_BYTES = 4  # the bytes of a row number that travels, for fewer than 2³¹ rows
F32_BYTES = 4
EXCHANGES = 3  # a step exchanges ids, vectors and cotangents for each lookup
SORT_PASSES = 4  # passes over ids and their places that group gradients by row
POINTS = 4096  # cells that group the rows of a Zipf distribution
ALONE = 512  # the rows that are drawn most, each in a cell of its own


def lookup_s(hardware: Hardware, ids: float, bags: float, width: int, element_bytes: int) -> float:
    """Return the seconds of a lookup, (ids · (w · bytes + 8) + bags · w · 4) / memory's bytes per second.

    A lookup reads rows and ids (8 bytes), and writes sums.
    """
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
    """Return the seconds of an update: bytes / memory's bytes per second.

    The bytes are ids · (d_w · 4 + sorting) + 2 · rows · (w · bytes + slots). An update reads gradients and groups them
    by row, and reads and writes the touched rows and their slots. d_w is the number of columns of the gradients.
    """
    read = ids * ((width if grad_width is None else grad_width) * F32_BYTES + SORT_PASSES * 2 * 8)
    return (read + 2 * rows * (width * element_bytes + slot_bytes)) / hardware.memory_bytes_per_s


def peer_s_per_byte(hardware: Hardware, group: Sequence[int]) -> float:
    """Return the seconds that a rank needs to send a byte to every other rank of the group.

    With l of the n ranks on its host these are (l - 1) / (link's bytes per s) + (n - l) / (bytes per s between hosts).
    """
    host = group[0] // hardware.ranks_per_host
    near = sum(r // hardware.ranks_per_host == host for r in group)
    return (near - 1) / hardware.link_bytes_per_s + (len(group) - near) / hardware.host_bytes_per_s


def latency_s(hardware: Hardware, group: Sequence[int]) -> float:
    """Return the latency of an exchange of the group, in seconds: its cost without bytes.

    It is the latency between hosts if the group has ranks of several hosts, else the latency within a host. For a
    single rank it is 0.
    """
    hosts = {r // hardware.ranks_per_host for r in group}
    return 0.0 if len(group) == 1 else hardware.link_latency_s if len(hosts) == 1 else hardware.host_latency_s


def id_bytes(ids: float, num_ranks: int, weight_bytes: int, capacity_factor: float | None) -> float:
    """Return the bytes of the block that a rank sends to each owner.

    The block has room for all ids of the rank, or for `capacity_factor` times the share of an owner.
    """
    room = ids if capacity_factor is None else min(ids, capacity_factor * ids / num_ranks)
    return room * (ID_BYTES + weight_bytes)


def vector_bytes(width: int, kind: str | None, element_bytes: int = F32_BYTES) -> float:
    """Return the bytes of a vector as a codec sends it: of its elements, and for int8 4 bytes of the scale."""
    if kind == "int8":
        return width + 4
    return width * (min(2, element_bytes) if kind else element_bytes)


def both_ways(width: int, codec: Codec | None, element_bytes: int = F32_BYTES, back: int | None = None) -> float:
    """Return the bytes of a vector and of its cotangent, as they travel."""
    there, again = (None, None) if codec is None else (codec.forward, codec.backward)
    return vector_bytes(width, there, element_bytes) + vector_bytes(width if back is None else back, again)


def copies_bytes(ids: float, bags: float, width: int, num_ranks: int) -> float:
    """Return the bytes of ids and d_acts that a copy sends to each other copy, n · (I · 4 + B · w · 4)."""
    return num_ranks * (ids * ID_BYTES + bags * width * F32_BYTES)


def activation_bytes(bags: float, width: int, num_ranks: int) -> float:
    """Return the bytes of the sums that a rank sends and receives, 2 · n · B · w · 4."""
    return 2 * num_ranks * bags * width * F32_BYTES


def distinct_rows(
    ids: float, rows: int, zipf: float = 0.0, counts: Sequence[float] | None = None, held: int = 0
) -> float:
    """Return the expected number of distinct rows among independent draws, Σ_r 1 - (1 - p_r)^ids.

    p_r is 1 / R, or in proportion to 1 / r^zipf, or in proportion to measured `counts` of rows. `dedup` sends this many
    rows, and an update touches as many rows. The `held` rows that are drawn most do not count: they are in memory.
    """
    if ids <= 0:
        return 0.0
    if counts is not None:
        p = np.asarray(counts, dtype=np.float64)
        p = np.sort(p[p > 0] / p.sum())[::-1][held:]
        return float(-np.expm1(ids * np.log1p(-np.minimum(p, 1 - 1e-16))).sum())
    if zipf == 0:
        return (rows - held) * -math.expm1(ids * math.log1p(-1 / rows)) if rows > 1 else 1.0
    # Group the rows into cells whose size grows with r. All rows of a cell have one p.
    first, rest = np.arange(1.0, min(rows, ALONE) + 2), np.floor(np.geomspace(1, rows + 1, min(rows + 1, POINTS)))
    edges = np.unique(np.concatenate([first, rest, [held + 1.0]]))
    edges = np.append(edges, rows + 1) if edges[-1] < rows + 1 else edges
    sizes, middle = np.diff(edges), (edges[:-1] + edges[1:] - 1) / 2
    p = middle**-zipf
    p, sizes = p / (p * sizes).sum(), np.where(edges[:-1] > held, sizes, 0.0)
    return float((sizes * -np.expm1(ids * np.log1p(-np.minimum(p, 1 - 1e-16)))).sum())


class Use(NamedTuple):
    """A step's use of a table, on each rank: bags of pooled features, their ids, ids of sequences, pooled features.

    weight_bytes: bytes of the weight of an id. distinct: the number of rows that ids of all ranks name. distinct_here:
      the number of rows that one
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
