"""Lists every way to place a table on a mesh, with the loads of the ranks, and turns the ways into solver options.

    (table, use of the table) × (placement, axes, number of blocks) ─▶ Way: loads of resources ─▶ Option

Parts of one width and dtype lie in a bank. A bank has as many rows on all ranks as on the fullest rank, and every rank
sends back as many columns as the rank that serves most lanes. So rows and columns of a bank are resources whose maximum
counts. A table cut by columns has banks of its own. The launches of a bank, and the latencies of the exchanges over
some axes, are paid once.
Shapes: n ranks on the placement's axes, N all ranks.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

from funcrec.mesh import Codec, coordinates, rank_at
from funcrec.planner import _costs as costs
from funcrec.planner._constraints import TableConstraint
from funcrec.planner._costs import Use
from funcrec.planner._hardware import Hardware
from funcrec.planner._packing import Cap, Item, Option, Packing
from funcrec.sharding import OF_TWO_AXES, Placement
from funcrec.tables import TableConfig

Resource = str | tuple[Any, ...]
Loads = dict[Resource, float]
# LOOKUP, UPDATE: a rank's own seconds. EXCHANGE, LAUNCH: seconds of all ranks. BYTES, DISK: bytes of every rank.
LOOKUP, UPDATE, EXCHANGE, LAUNCH, BYTES, DISK = "lookup", "update", "exchange", "launch", "bytes", "disk"
VOCABULARIES = "the vocabularies"  # the name of an item after those of the tables
ONCE = ("latency", "bank")  # ("latency", axes, kind of exchange), ("bank", axes, width, dtype, label)


class Ground(NamedTuple):
    """The values that all tables share.

    sizes: {axis: number of ranks} of one copy.
    mesh: {axis: number of ranks}, also of the axes of copies that train apart. It decides on which host a rank is.
    slot_bytes: (table, width) -> bytes of the optimizer state of a row.
    slowness: of each rank, as `Packing` has it.
    back: the columns of a block's gradients: "block" for the block's own, "row" for all columns of the row (an
      optimizer that reads whole rows).
    """

    sizes: tuple[tuple[str, int], ...]
    mesh: tuple[tuple[str, int], ...]
    hardware: Hardware
    bags: float  # bags on a rank
    answer: str
    codec: Codec | None
    capacity_factor: float | None
    slot_bytes: Callable[[str, int], float]
    back: str
    is_joint: bool
    label: Callable[[str], Hashable]
    slowness: tuple[float, ...] = ()

    @property
    def num_ranks(self) -> int:
        return prod(n for _, n in self.sizes)


class Way(NamedTuple):
    """One way to place a table, like `Option` with {resource: load}. key: (kind, axes, number of blocks, places, share
    of the rows in memory)."""

    key: tuple
    shards: tuple[Loads, ...]
    places: tuple[tuple[int, ...], ...]
    how: str
    base: Loads


def axes_of(sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return each axis with several ranks, and all these axes together."""
    real = [a for a, n in sizes.items() if n > 1] or list(sizes)[:1]
    return [(a,) for a in real] + ([tuple(real)] if len(real) > 1 else [])


def places_on(axes: Sequence[str], sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """Return for each place on the axes the ranks of the mesh at that place. The first axis is the major one."""
    return _places_on(tuple(axes), tuple(sizes.items()))


@functools.lru_cache(maxsize=256)
def _places_on(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...]) -> tuple[tuple[int, ...], ...]:
    sizes = dict(mesh)
    names, out = list(sizes), [[] for _ in range(prod(sizes[a] for a in axes))]
    for r in range(prod(sizes.values())):
        out[rank_at(coordinates(r, names, sizes), axes, sizes)].append(r)
    return tuple(map(tuple, out))


@functools.lru_cache(maxsize=1024)
def peer_s_per_byte(hardware: Hardware, axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...]) -> float:
    """Return the seconds to send a byte to every rank that shares all coordinates except those on `axes`."""
    return costs.peer_s_per_byte(hardware, [p[0] for p in places_on(axes, dict(mesh))]) if axes else 0.0


@functools.lru_cache(maxsize=1024)
def latency_s(hardware: Hardware, axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...]) -> float:
    """Return the latency of an exchange with every rank that shares all coordinates except those on `axes`."""
    return costs.latency_s(hardware, [p[0] for p in places_on(axes, dict(mesh))]) if axes else 0.0


def ways(table: TableConfig, use: Use, constraint: TableConstraint, ground: Ground) -> list[Way]:
    """Return all ways to place the table that the mesh, the optimizer and the constraint allow."""
    sizes, out = dict(ground.sizes), []
    pairs = list(combinations([a for a, n in sizes.items() if n > 1], 2))
    for axes in axes_of(sizes):
        out += _of_axes("table_wise", axes, table, use, constraint, ground)
        out += _of_axes("row_wise", axes, table, use, constraint, ground)
        out += _of_axes("column_wise", axes, table, use, constraint, ground)
    for axes in pairs:
        for kind in OF_TWO_AXES:
            out += _of_axes(kind, axes, table, use, constraint, ground)
    out += _of_axes("replicated", (), table, use, constraint, ground)
    return out


def num_blocks_of(kind: str, num_places: int, dim: int, constraint: TableConstraint) -> list[int]:
    """Return the numbers of column blocks to try: powers of two, and the number of places."""
    if kind in ("table_wise", "row_wise", "table_row_wise", "replicated"):
        return [1]
    most = min(num_places, dim // constraint.min_partition)
    if kind == "table_column_wise":
        return [min(num_places, dim)] if most == min(num_places, dim) else []
    counts = {2**i for i in range(1, 20) if 2**i <= most} | ({num_places} if most == num_places else set())
    return sorted(k for k in counts if k > 1)


def _of_axes(
    kind: str, axes: tuple[str, ...], table: TableConfig, use: Use, constraint: TableConstraint, ground: Ground
) -> list[Way]:
    if constraint.kinds and kind not in constraint.kinds:
        return []
    sizes = dict(ground.sizes)
    is_two = kind in OF_TWO_AXES
    places = places_on(axes[:1] if is_two else axes, sizes)
    inner = sizes[axes[1]] if is_two else 1
    if constraint.ranks and kind in ("row_wise", "replicated"):
        return []
    allowed = [i for i in range(len(places)) if not constraint.ranks or i in constraint.ranks]
    if not allowed:  # all allowed ranks are on other axes
        return []
    out = []
    for k in num_blocks_of(
        kind, inner if kind == "table_column_wise" else len(allowed), table.embedding_dim, constraint
    ):
        if ground.is_joint and k > 1:
            continue
        out.append(one_way(kind, axes, k, [places[i] for i in allowed], allowed, table, use, ground))
    return out


def one_way(
    kind: str, axes: tuple[str, ...], k: int, places: Sequence[tuple[int, ...]], numbers: Sequence[int],
    table: TableConfig, use: Use, ground: Ground,
) -> Way:  # fmt: skip
    """Return the way to place a table in k blocks of columns on some places. numbers: of the places on the axes."""
    sizes = dict(ground.sizes)
    n = prod(sizes[a] for a in axes)
    inner = sizes[axes[1]] if kind in ("table_row_wise", "grid") else 1
    num_parts = n if kind == "row_wise" else inner  # ranks that share the rows of one block
    dim = table.embedding_dim
    widths = [dim * (i + 1) // k - dim * i // k for i in range(k)]
    blocks = [Block(axes, n, num_parts, w, -(-table.num_embeddings // num_parts)) for w in widths]
    base: Loads = {}
    for block in blocks:
        alone = alone_bytes(block.n, block.width, use, table, ground)
        _add(base, {EXCHANGE: _exchange_s(block, use, table, ground), BYTES: alone})
    _add(base, latencies(axes, n, use, ground))
    work = [_work(block, use, table, ground) for block in blocks]
    launch = ground.hardware.launch_s if use.all_ids else 0.0
    if k > 1:  # the table has its own banks, one for each width, on every rank
        for w in sorted(set(widths)):
            rows, columns = _bank(blocks[widths.index(w)], use, table, ground)
            _add(base, {BYTES: rows[1] + columns[1], EXCHANGE: columns[2], LAUNCH: launch})
    else:
        rows, columns = _bank(blocks[0], use, table, ground)
        bank = (axes, dim, table.dtype, ground.label(table.name))
        _add(base, {("bank", *bank): 1.0} if launch else {})
        work = [{**work[0], ("rows", *bank): rows[0], ("columns", *bank): columns[0]}]
    everywhere = (tuple(range(ground.num_ranks)),)
    if kind in ("row_wise", "replicated"):
        return Way((kind, axes, k, (), 1.0), tuple(work), everywhere, "fixed", base)
    if kind == "table_column_wise":  # one place has all blocks, and each rank of the place has one block
        most = {key: max(x[key] for x in work) for key in work[0]}
        return Way((kind, axes, k, tuple(numbers), 1.0), (most,), tuple(places), "any", base)
    how = "apart" if k > 1 else "any"
    return Way((kind, axes, k, tuple(numbers), 1.0), tuple(work), tuple(places), how, base)


def latencies(axes: tuple[str, ...], n: int, use: Use, ground: Ground) -> Loads:
    """Return {resource: 1} for the latencies of the exchanges that a table needs.

    Over the axes of the table these are the exchanges of a lookup, separately for pooled features and for sequences.
    Over all other axes there is one exchange, of gradients.
    """
    others = tuple(a for a, _ in ground.sizes if a not in axes)
    kinds = [kind for kind, is_read in (("pooled", use.num_pooled), ("sequences", use.sequence_ids)) if is_read]
    needed = [(axes, kind) for kind in kinds if n > 1]
    needed += [(others, "copies")] if kinds and ground.num_ranks > n else []
    return {("latency", *x): 1.0 for x in needed if latency_s(ground.hardware, x[0], ground.mesh)}


class Block(NamedTuple):
    """A block of columns with n ranks on its axes.

    Its rows are cut over num_parts of these ranks, with `part` rows on each.
    """

    axes: tuple[str, ...]
    n: int
    num_parts: int
    width: int
    part: int


def _work(block: Block, use: Use, table: TableConfig, ground: Ground) -> Loads:
    """Return the seconds of a rank that holds a part of the block."""
    copies, size = ground.num_ranks / block.n, table.dtype.itemsize
    ids = (block.n * (use.distinct_here if ground.answer == "distinct" else use.all_ids)) / block.num_parts
    back = table.embedding_dim if ground.back == "row" else block.width
    slots = ground.slot_bytes(table.name, block.width)
    looked = costs.lookup_s(ground.hardware, ids, block.n * use.bags, block.width, size)
    updated = costs.update_s(
        ground.hardware, ids * copies, use.distinct / block.num_parts, block.width, size, slots, back
    )
    return {LOOKUP: looked, UPDATE: updated}


def _exchange_s(block: Block, use: Use, table: TableConfig, ground: Ground) -> float:
    """Return the seconds that a block costs every rank, wherever the block lies.

    They cover ids, single rows, and gradients that travel to copies.
    """
    sizes = dict(ground.sizes)
    per_byte = peer_s_per_byte(ground.hardware, block.axes, ground.mesh) if block.n > 1 else 0.0
    back = table.embedding_dim if ground.back == "row" else block.width
    ids, rows = _alone(block.n, use, ground)
    out = (ids + rows * costs.both_ways(block.width, ground.codec, table.dtype.itemsize, back)) * per_byte
    others = tuple(a for a in sizes if a not in block.axes)
    if ground.num_ranks > block.n:
        told = costs.copies_bytes(use.all_ids, use.bags, block.width, block.n)
        out += told * peer_s_per_byte(ground.hardware, others, ground.mesh)
    return out


def _alone(n: int, use: Use, ground: Ground) -> tuple[float, float]:
    """Return (bytes of a block's ids for one owner, number of rows of the block that travel as single rows)."""
    factor = ground.capacity_factor
    if ground.answer == "distinct":
        room = use.all_ids if factor is None else min(use.all_ids, factor * use.distinct_here / max(n, 1))
        return room * costs.ID_BYTES, room
    share = 1.0 if factor is None else min(1.0, factor / max(n, 1))
    rows = use.all_ids if ground.answer == "rows" else use.sequence_ids
    return costs.id_bytes(use.all_ids, n, use.weight_bytes, factor), rows * share


def alone_bytes(n: int, width: int, use: Use, table: TableConfig, ground: Ground) -> float:
    """Return the bytes of a block's ids and single rows, as sent and as received, 2 · n · (ids + rows · w · bytes).

    On one rank these are the rows of sequences, which are looked up and passed on.
    """
    ids, rows = _alone(n, use, ground) if n > 1 else (0.0, use.sequence_ids)
    return 2 * n * (ids + rows * width * table.dtype.itemsize)


def _bank(
    block: Block, use: Use, table: TableConfig, ground: Ground
) -> tuple[tuple[float, float], tuple[float, float, float]]:
    """Return ((rows, bytes of rows), (lanes, bytes of lanes, seconds of lanes)) of a rank's part in a bank."""
    size = block.width * table.dtype.itemsize + ground.slot_bytes(table.name, block.width)
    lanes = float(use.num_pooled)
    memory, seconds = lane_costs(block.axes, block.width, table, ground)
    return (float(block.part), block.part * size), (lanes, lanes * memory, lanes * seconds)


def lane_costs(axes: tuple[str, ...], width: int, table: TableConfig, ground: Ground) -> tuple[float, float]:
    """Return (bytes, seconds) of a lane of this width on every rank, which sends sums and gets cotangents."""
    n = prod(dict(ground.sizes)[a] for a in axes)
    memory = costs.activation_bytes(ground.bags, width, n)
    if n == 1 or ground.answer != "sums":
        return memory, 0.0
    back = table.embedding_dim if ground.back == "row" else width
    sent = ground.bags * costs.both_ways(width, ground.codec, costs.F32_BYTES, back)
    return memory, sent * peer_s_per_byte(ground.hardware, axes, ground.mesh)


def _add(loads: Loads, more: Loads) -> None:
    for k, x in more.items():
        loads[k] = loads.get(k, 0.0) + x


# -- to the solver -----------------------------------------------------------------------------------------------


def packing_of(
    groups: Mapping[str, Sequence[TableConfig]],
    own: Mapping[str, list[Way]],
    ground: Ground,
    limit: float,
    beside: Sequence[Way] = (),
) -> Packing:
    """Return the solver's packing. groups: tables placed as one. own: {table: its ways}. limit: bytes of a rank.

    beside: the ways of one more item after the tables, the vocabularies.
    """
    merged = {name: _merged([own[t.name] for t in tables]) for name, tables in groups.items()}
    keys: dict[Resource, int] = {k: i for i, k in enumerate((LOOKUP, UPDATE, EXCHANGE, LAUNCH, BYTES, DISK))}
    for way in (w for found in (*merged.values(), beside) for w in found):
        for loads in (*way.shards, way.base):
            for k in loads:
                keys.setdefault(k, len(keys))
    some = {(t.embedding_dim, t.dtype, ground.label(t.name)): t for tables in groups.values() for t in tables}
    weights, factors = zip(*(_price(k, some, ground) for k in keys), strict=True)
    once = tuple(i for k, i in keys.items() if k[0] in ONCE)
    vector = lambda loads: tuple(loads.get(k, 0.0) for k in keys)
    option = lambda w: Option(w.key, tuple(map(vector, w.shards)), w.places, w.how, vector(w.base))
    every = {**merged, **({VOCABULARIES: beside} if beside else {})}
    items = tuple(Item(name, tuple(map(option, found))) for name, found in every.items())
    caps = [Cap("memory", factors, limit)]
    if ground.hardware.disk_bytes:
        caps.append(Cap("disk", tuple(float(k == DISK) for k in keys), ground.hardware.disk_bytes))
    return Packing(items, ground.num_ranks, weights, tuple(caps), once, ground.slowness, (keys[LOOKUP], keys[UPDATE]))


def _price(key: Resource, some: Mapping[tuple, TableConfig], ground: Ground) -> tuple[float, float]:
    """Return (seconds, bytes) of a unit of a resource. some: {(width, dtype, label): a table in such banks}."""
    if isinstance(key, str):
        return (0.0, 1.0) if key == BYTES else (0.0, 0.0) if key == DISK else (1.0, 0.0)
    what, axes, *bank = key
    if what == "latency":
        return (1 if bank == ["copies"] else costs.EXCHANGES) * latency_s(ground.hardware, axes, ground.mesh), 0.0
    if what == "bank":
        return ground.hardware.launch_s, 0.0
    table, width = some[tuple(bank)], bank[0]
    memory, seconds = lane_costs(axes, width, table, ground)
    row = width * table.dtype.itemsize + ground.slot_bytes(table.name, width)
    return (seconds, memory) if what == "columns" else (0.0, row)


def _merged(own: Sequence[list[Way]]) -> list[Way]:
    """Return the ways that all tables of a group have, with their loads added shard by shard."""
    if len(own) == 1:
        return own[0]
    by_key = [{w.key: w for w in ways} for ways in own]
    out = []
    for key, first in by_key[0].items():
        alike = [found[key] for found in by_key if key in found and len(found[key].shards) == len(first.shards)]
        if len(alike) < len(own):
            continue
        shards: list[Loads] = [{} for _ in first.shards]
        base: Loads = {}
        for way in alike:
            _add(base, {k: x for k, x in way.base.items() if not (k in base and k[0] in ONCE)})
            for sum_, shard in zip(shards, way.shards, strict=True):
                _add(sum_, shard)
        out.append(first._replace(shards=tuple(shards), base=base))
    return out


def placement_of(key: tuple, places: Sequence[int], sizes: Mapping[str, int]) -> Placement:
    """Return the placement for the solver's choice."""
    kind, axes, _, numbers, _ = key
    if kind in ("row_wise", "replicated"):
        return Placement(kind, axes)
    if kind in ("table_wise", "table_row_wise", "table_column_wise"):
        return Placement(kind, axes, (numbers[places[0]] if places else numbers[0],))
    return Placement(kind, axes, tuple(numbers[p] for p in places))
