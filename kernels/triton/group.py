"""Group the entries of several tables by row, for `coalesce` and the fused update.

An entry is (row, gradient), where the gradient s · d[b, column : column + dim] comes from one bag or one plain entry.
Entries are never written out. For each entry, `list_entries` writes a key (the table's first key + row; the keys of
tables follow each other), the address of d's row, and s. A stable sort of the keys puts the entries of a row side by
side, in order:

    list_entries -> sort by key -> heads and their running count -> starts[u], the first entry of distinct row u

Segments that read disjoint bags of one buffer of ids share one pass over the buffer. So F features in it cost N
entries, not F · N.

The sum of a row adds up to CHUNK entries one by one. A longer run is cut into chunks of CHUNK entries, counted from the
first entry of the run. One program sums each chunk in order, and another program adds the sums of the chunks in order.
So the bits depend on the row's own entries only, and one very frequent row does not delay the step.
Shapes: K entries, U distinct rows (known on the device only; at most K), T tables.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from funcrec.kernels.forms import Segment, capacity_of, is_padded
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.device import bag_bounds, divide, kernel, lanes, larger, pointers, upper_bound
from torch import Tensor

CHUNK = 64
FIELDS = 10  # numbers per segment in the packed tensor; even, so that each segment begins at a multiple of 16 bytes
ENTRIES, PADDED, SWEPT = 0, 1, 2  # A place is an entry, one of max_length places of a bag, or a buffer position.


class Pass(NamedTuple):
    """Segments whose entries one launch lists together, in `capacity` places."""

    kind: int
    segments: list[Segment]
    capacity: int


class Groups(NamedTuple):
    """Entries sorted by key: keys i[K] ascending, and addresses i64[K] and scales f[K] (or None) in the same order.

    segment: i32[K + 1], the number u of the row at each place.
    starts: i64[K + 2], the place at which row u begins.
    firsts: i64[T + 1], the number u of the first row of each table.
    bases: T + 1 numbers on the host, the first keys of the tables; `packed` holds the same numbers on the device.
    align: a number of bytes that divides the addresses of gradients.
    alive: the tensors to which the addresses point, which must stay alive.
    """

    keys: Tensor
    addresses: Tensor
    scales: Tensor | None
    segment: Tensor
    starts: Tensor
    firsts: Tensor
    bases: list[int]
    packed: Tensor
    align: int
    alive: list[Tensor]


def kind_of(segment: Segment, num_ids: int) -> int:
    if segment.offsets < 0:
        return ENTRIES
    return PADDED if is_padded(segment, num_ids) else SWEPT


def check_segments(parts: Sequence[Segment], d, rows: Sequence[Tensor], offsets: Sequence[Tensor], weights) -> None:
    """Raise if a segment is longer than one of its buffers."""
    for i, s in enumerate(parts):
        need = {"d": (s.num_bags, d[s.d])}
        if s.offsets >= 0:
            need["offsets"] = (s.first_bag + s.num_bags + 1, offsets[s.offsets])
        else:
            need["rows"] = (s.num_bags, rows[s.rows])
            need |= {"weights": (s.num_bags, weights[s.weights])} if s.weights >= 0 else {}
        for name, (size, x) in need.items():
            if s.num_bags and x.shape[0] < size:
                on.fail(
                    f"segment {i} is longer than its {name}.", f"{x.shape[0]} {name}", f"at least {size}", "fewer bags"
                )


def merged(parts: Sequence[Segment], rows, offsets, weights) -> list[Segment]:
    """Return the segments with one number for each distinct tensor, even if a list has the tensor several times."""

    def numbers(tensors: Sequence[Tensor]) -> dict[int, int]:
        first: dict = {}
        return {i: first.setdefault((t.data_ptr(), t.shape, t.dtype), i) for i, t in enumerate(tensors)} | {-1: -1}

    a, b, c = numbers(rows), numbers(offsets), numbers(weights)
    return [s._replace(rows=a[s.rows], offsets=b[s.offsets], weights=c[s.weights]) for s in parts]


def plan_passes(parts: Sequence[Segment], rows: Sequence[Tensor]) -> list[Pass]:
    """Return the segments, arranged in passes.

    The entries of a table keep their order: its passes ascend, and so do its bags within a pass.
    """
    passes: list[Pass] = []
    last: dict[int, int] = {}  # {table: the number of its last pass}
    for s in parts:
        num_ids = rows[s.rows].shape[0]
        kind = kind_of(s, num_ids)
        found = None
        for i in range(last.get(s.table, 0), len(passes) if kind == SWEPT else 0):
            t = passes[i].segments[-1]
            scaled = {x.weights for x in (*passes[i].segments, s)} - {-1}
            together = passes[i].kind == SWEPT and (t.rows, t.offsets) == (s.rows, s.offsets) and len(scaled) <= 1
            if together and t.first_bag + t.num_bags <= s.first_bag:
                found = i
                break
        if found is None:
            found = len(passes)
            passes.append(Pass(kind, [], capacity_of(s, num_ids)))
        passes[found].segments.append(s)
        last[s.table] = found
    return passes


def group_entries(
    parts: Sequence[Segment],
    d: Sequence[Tensor],
    rows: Sequence[Tensor],
    offsets: Sequence[Tensor],
    weights: Sequence[Tensor],
    num_rows: Sequence[int],
    dtype: torch.dtype,
) -> Groups | None:
    """Return all entries of tables with these numbers of rows, grouped, or None if there is no place for an entry.

    d is in `dtype`, with contiguous columns. Tables follow each other in the order of keys.
    """
    check_segments(parts, d, rows, offsets, weights)
    passes = plan_passes(merged(parts, rows, offsets, weights), rows)
    size, bases = sum(p.capacity for p in passes), [0]
    for n in num_rows:
        bases.append(bases[-1] + n)
    if size == 0 or bases[-1] == 0:
        return None
    if size >= 2**31 or bases[-1] >= 2**63:
        on.fail("there are too many entries.", f"{size} entries", "fewer than 2³¹", "several calls")
    device = rows[parts[0].rows].device
    key_dtype = torch.int32 if bases[-1] < 2**31 else torch.int64
    scaled = any(s.mean or s.weights >= 0 for s in parts)
    keys = torch.empty(size, dtype=key_dtype, device=device)
    addresses = torch.empty(size, dtype=torch.int64, device=device)
    scales = torch.empty(size, dtype=dtype, device=device) if scaled else None
    packed = on.pack([*bases, *([0] * (len(bases) % 2)), *_numbers(passes, d, bases, dtype)], device)
    place, at = 0, len(bases) + len(bases) % 2
    for p in passes:
        out = (keys[place:], addresses[place:], None if scales is None else scales[place:])
        list_entries(p, packed[at:], rows, offsets, weights, bases[-1], out)
        place, at = place + p.capacity, at + FIELDS * len(p.segments)
    dims = [n * dtype.itemsize for s in parts for n in (d[s.d].stride(0), s.column)]
    align = on.alignment([*dims, *(d[s.d].data_ptr() for s in parts)])
    return _sorted(keys, addresses, scales, bases, packed, align, list(d))


def _numbers(passes: Sequence[Pass], d: Sequence[Tensor], bases: Sequence[int], dtype: torch.dtype) -> list[int]:
    numbers = []
    for s in (s for p in passes for s in p.segments):
        x, base = d[s.d], bases[s.table]
        address, stride = x.data_ptr() + s.column * dtype.itemsize, x.stride(0) * dtype.itemsize
        numbers += [s.first_bag, s.num_bags, s.max_length, int(s.mean), int(s.weights >= 0), base]
        numbers += [bases[s.table + 1] - base, address, stride, 0]
    return numbers


def list_entries(p: Pass, packed: Tensor, rows, offsets, weights, nothing: int, out) -> None:
    """Write the keys, addresses and scales of one pass. A place without an entry gets the key `nothing`."""
    first, last = p.segments[0], p.segments[-1]
    ids, scaling = rows[first.rows], max(s.weights for s in p.segments)
    bounds = offsets[first.offsets] if first.offsets >= 0 else ids
    keys, addresses, scales = out
    num_ids = min(ids.shape[0], weights[scaling].shape[0]) if scaling >= 0 else ids.shape[0]
    on.launch(
        _list_entries, (on.cdiv(p.capacity, on.BLOCK),), packed, len(p.segments), ids, num_ids, bounds,
        last.first_bag + last.num_bags, weights[scaling] if scaling >= 0 else ids, keys, addresses,
        addresses if scales is None else scales, p.capacity, nothing, on.steps(bounds.shape[0]), KIND=p.kind,
        WEIGHTED=scaling >= 0, SCALED=scales is not None, FIELDS=FIELDS, LANES=on.BLOCK,
    )  # fmt: skip


@triton.jit
def locate(place, offsets, first_bag, behind_bag, num_bags, max_length, num_ids, steps, KIND: tl.constexpr):
    """Return (bag counted from first_bag, position in the buffer) of places. A place without a bag has bag -1."""
    if KIND == 0:
        return place, place
    elif KIND == 1:
        bag = place // max_length
        inside = bag < num_bags
        begin, length = bag_bounds(offsets, first_bag + bag, inside, num_ids, max_length)
        nth = place % max_length
        return tl.where(inside & (nth < length), bag, -1), begin + nth
    else:
        # This finds, among the bags [first_bag, behind_bag), the last bag that does not begin after the position.
        zero = place * 0
        bag = upper_bound(offsets, zero + first_bag, zero + behind_bag, place, steps) - 1
        inside = (bag >= first_bag) & (place < num_ids)
        begin, length = bag_bounds(offsets, bag, inside, num_ids, 0)
        return tl.where(inside & (place >= begin) & (place < begin + length), bag - first_bag, -1), place


@kernel()
def _list_entries(
    packed, num_segments, rows, num_ids, offsets, behind_bag, weights, keys, addresses, scales, capacity, nothing,
    steps,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, FIELDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    place = lanes(LANES)
    first_bag, behind = tl.load(packed), tl.load(packed + 1)
    bag, position = locate(place, offsets, first_bag, behind_bag, behind, tl.load(packed + 2), num_ids, steps, KIND)
    valid = (place < capacity) & (bag >= 0)
    which = place * 0
    for s in range(1, num_segments):
        which = tl.where(first_bag + bag >= tl.load(packed + s * FIELDS), s, which)
    field = packed + which * FIELDS
    begins, num_bags, max_length = tl.load(field), tl.load(field + 1), tl.load(field + 2)
    local = bag + first_bag - begins
    valid = valid & (local < num_bags)
    if KIND != 0:
        begin, length = bag_bounds(offsets, begins + local, valid, num_ids, max_length)
        valid = valid & (position - begin < length)
    row = tl.load(rows + position, mask=valid, other=-1).to(tl.int64)
    valid = valid & (row >= 0) & (row < tl.load(field + 6))
    stored = place < capacity
    tl.store(keys + place, tl.where(valid, tl.load(field + 5) + row, nothing), mask=stored)
    tl.store(addresses + place, tl.load(field + 7) + local * tl.load(field + 8), mask=stored)
    if SCALED:
        SCALE: tl.constexpr = scales.dtype.element_ty
        scale = tl.full((LANES,), 1, SCALE)
        if WEIGHTED:
            scale = tl.load(weights + position, mask=valid & (tl.load(field + 4) != 0), other=1).to(SCALE)
        if KIND != 0:
            scale = divide(scale, tl.where(tl.load(field + 3) != 0, tl.maximum(length, 1), 1).to(SCALE))
        tl.store(scales + place, scale, mask=stored)


def _sorted(keys, addresses, scales, bases, packed, align, alive) -> Groups:
    size, num_tables = keys.shape[0], len(bases) - 1
    keys, order = torch.sort(keys, stable=True)
    heads = torch.empty(size + 1, dtype=torch.int32, device=keys.device)
    grid = (on.cdiv(size + 1, on.BLOCK),)
    on.launch(_heads, grid, keys, heads, size, bases[-1], LANES=on.BLOCK)
    segment = torch.cumsum(heads, 0, dtype=torch.int32) - 1
    starts = torch.empty(size + 2, dtype=torch.int64, device=keys.device)
    firsts = torch.empty(num_tables + 1, dtype=torch.int64, device=keys.device)
    in_order = torch.empty_like(addresses), None if scales is None else torch.empty_like(scales)
    on.launch(
        _starts, grid, heads, segment, order, addresses, addresses if scales is None else scales, starts, in_order[0],
        in_order[0] if scales is None else in_order[1], size, SCALED=scales is not None, LANES=on.BLOCK,
    )  # fmt: skip
    on.launch(
        _firsts,
        (on.cdiv(num_tables + 1, 128),),
        packed,
        keys,
        segment,
        firsts,
        size,
        num_tables + 1,
        on.steps(size),
        LANES=128,
    )
    return Groups(keys, *in_order, segment, starts, firsts, bases, packed, align, alive)


@kernel()
def _heads(keys, heads, size, nothing, LANES: tl.constexpr):
    """Write 1 where a run of equal keys begins, and 0 elsewhere. One more run, of no row, begins after the last key."""
    i = lanes(LANES)
    key = tl.load(keys + i, mask=i < size, other=nothing)
    before = tl.load(keys + i - 1, mask=(i > 0) & (i <= size), other=-1)
    tl.store(heads + i, (key != before).to(tl.int32), mask=i <= size)


@kernel()
def _starts(
    heads, segment, order, addresses, scales, starts, sorted_addresses, sorted_scales, size, SCALED: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    i = lanes(LANES)
    head = tl.load(heads + i, mask=i <= size, other=0) != 0
    u = tl.load(segment + i, mask=i <= size, other=0)
    tl.store(starts + u, i, mask=head)
    tl.store(starts + u + 1, i, mask=i == size)  # the end of the extra run that belongs to no row
    source = tl.load(order + i, mask=i < size, other=0)
    tl.store(sorted_addresses + i, tl.load(addresses + source, mask=i < size, other=0), mask=i < size)
    if SCALED:
        tl.store(sorted_scales + i, tl.load(scales + source, mask=i < size, other=0), mask=i < size)


@kernel()
def _firsts(bases, keys, segment, firsts, size, count, steps, LANES: tl.constexpr):
    """Write the number of distinct rows before each table's first key."""
    t = lanes(LANES)
    base = tl.load(bases + t, mask=t < count, other=0)
    place = upper_bound(keys, t * 0, t * 0 + size, base - 1, steps)
    tl.store(firsts + t, tl.load(segment + place, mask=t < count, other=0).to(tl.int64), mask=t < count)


def chunk_sums(g: Groups, first_key: int, behind_key: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the sums of chunks, f[2 · ⌈K / CHUNK⌉, D], for runs longer than CHUNK of rows with keys in a range.

    At most two chunks begin in a block of CHUNK places: the first chunk of a run, stored at 2 · block + 1, and a later
    chunk, stored at 2 · block. Kernels neither write nor read other places of the result.
    """
    size = g.keys.shape[0]
    slots = 2 * on.cdiv(size, CHUNK) if size > CHUNK else 0
    out = torch.empty(slots, dim, dtype=dtype, device=g.keys.device)
    t = on.tile(dim)
    on.launch(
        _chunk_sums, (t.over(slots), on.cdiv(dim, t.columns)), g.keys, g.addresses,
        g.scales if g.scales is not None else out,
        g.segment, g.starts, out, slots, size, first_key, behind_key, SCALED=g.scales is not None, DIM=dim, CHUNK=CHUNK,
        TILE_ROWS=t.rows, TILE_COLUMNS=t.columns, ALIGN=align_of(g, dim, dtype), num_warps=t.num_warps,
    )  # fmt: skip
    return out


def align_of(g: Groups, dim: int, dtype: torch.dtype) -> int:
    """Return a number of bytes that divides the addresses of gradients and of chunk sums."""
    return on.alignment([g.align, dim * dtype.itemsize])


@kernel()
def _chunk_sums(
    keys, addresses, scales, segment, starts, out, slots, size, first_key, behind_key, SCALED: tl.constexpr,
    DIM: tl.constexpr, CHUNK: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    slot = lanes(TILE_ROWS)
    block = slot // 2 * CHUNK
    is_first = slot % 2 == 1
    place = tl.where(is_first, tl.minimum(block + CHUNK, size) - 1, block)
    used = slot < slots
    u = tl.load(segment + place, mask=used, other=0)
    start = tl.load(starts + u, mask=used, other=0)
    end = tl.load(starts + u + 1, mask=used, other=0)
    later = start + (block - start + CHUNK - 1) // CHUNK * CHUNK
    head = tl.where(is_first, start, later)
    used = used & (end - start > CHUNK) & tl.where(is_first, start >= block, (start < block) & (later < end))
    used = used & (head < block + CHUNK)
    key = tl.load(keys + head, mask=used, other=-1).to(tl.int64)
    used = used & (key >= first_key) & (key < behind_key)
    length = tl.where(used, tl.minimum(end - head, CHUNK), 0)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    sums = sum_entries(addresses, scales, out, head, length, column, SCALED, DIM, CHUNK, TILE_ROWS, TILE_COLUMNS, ALIGN)
    at = out + slot[:, None] * DIM + column[None, :]
    tl.store(at, sums, mask=used[:, None] & (column < DIM)[None, :])


@triton.jit
def sum_entries(
    addresses, scales, chunks, start, length, column, SCALED: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Return the sums of runs, added in order, f[rows, columns].

    The sum of a run longer than CHUNK adds the sums of the run's chunks.
    """
    # terms that a program loads at the same time
    AHEAD: tl.constexpr = 4  # pyright: ignore[reportAssignmentType]
    terms = tl.where(length > CHUNK, (length + CHUNK - 1) // CHUNK, length)
    longest = tl.reduce(terms, 0, larger)
    sums = tl.full((TILE_ROWS, TILE_COLUMNS), 0, chunks.dtype.element_ty)
    for group in range(0, longest // AHEAD):
        for ahead in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]  # Triton unrolls it
            k = group * AHEAD + ahead
            sums += entry(addresses, scales, chunks, start, length, terms, k, column, SCALED, DIM, CHUNK, ALIGN)
    for last in range(longest // AHEAD * AHEAD, longest):  # pyright: ignore[reportArgumentType]  # Triton's integers
        sums += entry(addresses, scales, chunks, start, length, terms, last, column, SCALED, DIM, CHUNK, ALIGN)
    return sums


@triton.jit
def entry(
    addresses, scales, chunks, start, length, terms, k, column, SCALED: tl.constexpr, DIM: tl.constexpr,
    CHUNK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Return term k of each run, f[rows, columns], with zeros after the last term of a run."""
    ACC: tl.constexpr = chunks.dtype.element_ty
    direct = k < tl.where(length > CHUNK, 0, terms)
    slot = tl.where(k == 0, start // CHUNK * 2 + 1, (start // CHUNK + k) * 2)
    size = ACC.primitive_bitwidth // 8  # pyright: ignore[reportAttributeAccessIssue]  # ACC is a dtype
    chunk = chunks.to(tl.int64) + slot * (DIM * size)
    address = tl.where(length > CHUNK, chunk, tl.load(addresses + start + k, mask=direct, other=0))
    read = (k < terms)[:, None] & (column < DIM)[None, :]
    x = tl.load(pointers(address, ACC, ALIGN) + column[None, :], mask=read, other=0)
    if SCALED:
        x = x * tl.load(scales + start + k, mask=direct, other=1)[:, None]
    return x
