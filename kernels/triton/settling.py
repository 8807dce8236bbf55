"""Write what an admission changed to the vocabularies, in place: new ids, stamps, counts, sketches and clocks.

Programs share only integers. Each occurrence of an id adds 1 to its count. The one addition that finds the greatest
count, 2³² - 1, wraps around. Its program writes the greatest count again after all additions. The misses that a sketch
counts are sorted by bucket, and one program counts those of a bucket.
Shapes: N ids, P places of changes, V vocabularies, R rows.
"""

from collections.abc import Sequence
from typing import cast

import torch
import triton.language as tl
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.admission import forms_of, joined, runs
from funcrec.kernels.triton.device import kernel, lanes, of_sum, upper_bound
from funcrec.kernels.triton.vocabulary import (
    ENTRIES,
    LEAST,
    ROWS,
    SKETCH,
    TAGS,
    Form,
    Places,
    Vocabularies,
    as_ids,
    bucket_in,
    counters_of,
    fact,
    hash_in,
    of_columns,
    step_in,
    tag_of,
    together,
    vocabulary_at,
    whole,
)
from funcrec.kernels.vocabulary import SLOTS, Admission
from torch import Tensor

NEAR = 32  # misses of a bucket that a program reads at once
NO_BUCKET = tl.constexpr(2**31 - 1)
FULL = tl.constexpr(255)  # of a counter of the sketch


def settle_ids_(
    state: Sequence[Tensor],
    now: Tensor,
    ids: Tensor,
    rows: Tensor,
    missed: Tensor,
    changed: Tensor,
    new_ids: Tensor,
    counts: Tensor,
    numbers: Tensor,
    least: int,
    salt: int,
) -> None:
    """Write the changes of a step to the state."""
    call, (tags, entries, *sketch) = "funcrec.kernels.triton.settle_ids_", state
    how = Admission(0, 0, least, 0, 0, salt)
    form = Form(tags, entries, how, changed.shape[0], sketch[0] if least and sketch else None, None, now)
    places = whole(ids, torch.full((), ids.shape[0], dtype=torch.int64, device=ids.device))
    found = on.contiguous([rows, missed, changed, new_ids, counts, numbers])
    _settle(together(call, [form], ids.device), as_ids(call, ids), places, found, bool(least))


def settle_columns_(
    state: Sequence[Tensor],
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor],
    found: Sequence[Tensor],
    how: Sequence[int],
    columns: Sequence[int],
) -> None:
    """Write the changes of a step to the states, and now + 1."""
    call, forms = "funcrec.kernels.triton.settle_columns_", forms_of(state, ids, how, columns)
    if not forms:
        return
    device = state[0].device
    every = joined(call, ids, device)
    _check(call, found, every.shape[0], sum(f.room for f in forms), len(forms))
    places = of_columns(call, len(forms), ids, offsets, columns, device)
    least = any(f.how.least for f in forms)
    _settle(together(call, forms, device), every, places, on.contiguous(found), least)
    nows = [cast(Tensor, f.now) for f in forms]
    torch._foreach_add_(nows, 1)  # pyright: ignore[reportPrivateImportUsage]  # torch exports no other name for it


def _check(call: str, found: Sequence[Tensor], size: int, room: int, count: int) -> None:
    got, need = [list(x.shape) for x in found], [[size]] * 2 + [[room]] * 3 + [[count, 4]]
    if got != need:
        on.fail("`found` does not fit the ids.", f"{got}", f"{need}", "what `admit_columns` returned", call)


def _settle(them: Vocabularies, ids: Tensor, places: Places, found: Sequence[Tensor], has_sketch: bool) -> None:
    rows, missed, changed, new_ids, counts, numbers = found
    n, count, steps = ids.shape[0], them.count, on.steps(them.count)
    grid, size = (on.cdiv(n, on.BLOCK),), (n, count, steps)
    on.launch(
        _write, (on.cdiv(them.room, on.BLOCK),), them.rooms, them.about, changed, new_ids, counts, numbers, them.room,
        count, steps, LANES=on.BLOCK,
    )  # fmt: skip
    wrapped = torch.empty(n, dtype=torch.bool, device=ids.device)
    on.launch(_count, grid, *places, them.about, rows, wrapped, *size, LANES=on.BLOCK)
    on.launch(_saturate, grid, *places, them.about, rows, wrapped, *size, LANES=on.BLOCK)
    if not has_sketch or n == 0:
        return
    keys, heads = (torch.empty(n + k, dtype=torch.int32, device=ids.device) for k in (0, 1))
    on.launch(_misses, grid, *places, them.bases, them.about, ids, missed, keys, *size, LANES=on.BLOCK)
    keys, order = torch.sort(keys)
    on.launch(_lines, (on.cdiv(n + 1, on.BLOCK),), keys, heads, n, LANES=on.BLOCK)
    of, starts = runs(heads)
    on.launch(
        _sketch, (min(n, them.buckets),), keys, order, of, starts, places.at, ids, them.bases, them.about, *size,
        on.steps(n), NEAR=NEAR, SLOTS=SLOTS, num_warps=4,
    )  # fmt: skip


@kernel()
def _write(rooms, about, changed, new_ids, counts, numbers, size, count, steps, LANES: tl.constexpr):
    """Write the new ids with their stamps, and with the counts that they bring."""
    place = lanes(LANES)
    v = upper_bound(rooms, place * 0, place * 0 + count, place, steps) - 1
    row = tl.load(changed + place, mask=place < size, other=-1)
    is_new = (place < size) & (place - tl.load(rooms + v) < tl.load(numbers + 4 * v))
    is_new = is_new & (row >= 0) & (row < fact(about, v, ROWS))
    id = tl.load(new_ids + place, mask=is_new, other=0)
    seen = tl.minimum(tl.maximum(tl.load(counts + place, mask=is_new, other=0), 0), 0xFFFFFFFF)
    tags = (fact(about, v, TAGS) + row).to(tl.pointer_type(tl.uint8))
    tl.store(tags, tag_of(hash_in(about, v, id)).to(tl.uint8), mask=is_new)
    entries = (fact(about, v, ENTRIES) + 16 * row).to(tl.pointer_type(tl.int64))
    tl.store(entries, id, mask=is_new)
    tl.store(entries + 1, (step_in(about, v) << 32) | seen, mask=is_new)


@kernel()
def _count(begins, at, about, rows, wrapped, size, count, steps, LANES: tl.constexpr):
    """Add 1 to the count of each id's row, and stamp the row. Write whether the count wrapped around."""
    place = lanes(LANES)
    v, given = vocabulary_at(begins, place, size, count, steps)
    row = tl.load(rows + tl.load(at + place, mask=given, other=0), mask=given, other=-1)
    given = given & (row >= 0) & (row < fact(about, v, ROWS))
    halves = (fact(about, v, ENTRIES) + 16 * row + 8).to(tl.pointer_type(tl.int32))  # count, stamp
    before = tl.atomic_add(halves, tl.full((LANES,), 1, tl.int32), mask=given, sem="relaxed")
    tl.store(halves + 1, step_in(about, v).to(tl.int32), mask=given)
    tl.store(wrapped + place, given & (before == -1), mask=place < size)


@kernel()
def _saturate(begins, at, about, rows, wrapped, size, count, steps, LANES: tl.constexpr):
    place = lanes(LANES)
    v, given = vocabulary_at(begins, place, size, count, steps)
    given = given & (tl.load(wrapped + place, mask=given, other=0) != 0)
    row = tl.load(rows + tl.load(at + place, mask=given, other=0), mask=given, other=0)
    counts = (fact(about, v, ENTRIES) + 16 * row + 8).to(tl.pointer_type(tl.int32))
    tl.store(counts, tl.full((LANES,), -1, tl.int32), mask=given)


@kernel()
def _misses(begins, at, bases, about, ids, missed, keys, size, count, steps, LANES: tl.constexpr):
    """Write the bucket of each missed id of a vocabulary with a sketch, among all buckets."""
    place = lanes(LANES)
    v, given = vocabulary_at(begins, place, size, count, steps)
    position = tl.load(at + place, mask=given, other=0)
    given = given & (tl.load(missed + position, mask=given, other=0) != 0) & (fact(about, v, LEAST) > 0)
    h = hash_in(about, v, tl.load(ids + position, mask=given, other=0))
    bucket = tl.load(bases + v) + bucket_in(about, v, h)
    tl.store(keys + place, tl.where(given, bucket, NO_BUCKET).to(tl.int32), mask=place < size)


@kernel()
def _lines(keys, heads, size, LANES: tl.constexpr):
    i = lanes(LANES)
    key = tl.load(keys + i, mask=i < size, other=NO_BUCKET)
    before = tl.load(keys + i - 1, mask=(i > 0) & (i < size), other=-1)
    tl.store(heads + i, ((key != NO_BUCKET) & (key != before)).to(tl.int32), mask=i <= size)


@kernel()
def _sketch(
    keys, order, of, starts, at, ids, bases, about, size, count, steps, key_steps, NEAR: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Count the misses of a bucket in its line of the sketch, and halve the line if it is full."""
    u = tl.program_id(0).to(tl.int64)
    if u >= tl.load(of + size):
        return
    start = tl.load(starts + u)
    bucket = tl.load(keys + start).to(tl.int64)
    end = upper_bound(keys, start, start * 0 + size, bucket, key_steps)
    v = upper_bound(bases, start * 0, start * 0 + count, bucket, steps) - 1
    slot = tl.arange(0, SLOTS)
    added = slot * 0
    for near in range(start, end, NEAR):
        i = near + tl.arange(0, NEAR)
        position = tl.load(at + tl.load(order + i, mask=i < end, other=0), mask=i < end, other=0)
        first, second = counters_of(hash_in(about, v, tl.load(ids + position, mask=i < end, other=0)))
        counts = (first[None, :] == slot[:, None]) | (second[None, :] == slot[:, None])
        added += tl.reduce((counts & (i < end)[None, :]).to(tl.int32), 1, of_sum)
    line = (fact(about, v, SKETCH) + (bucket - tl.load(bases + v)) * SLOTS + slot).to(tl.pointer_type(tl.uint8))
    told = tl.minimum(tl.load(line).to(tl.int32) + added, FULL)
    is_full = tl.reduce(told, 0, of_sum).to(tl.int64) >= SLOTS // 2 * fact(about, v, LEAST)
    tl.store(line, tl.where(is_full, told >> 1, told).to(tl.uint8))
