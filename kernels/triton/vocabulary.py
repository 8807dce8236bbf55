"""Rows of ids in set-associative vocabularies: a program compares some ids with all slots of their buckets.

One launch serves several vocabularies. The ids of each follow those of the one before: vocabulary v has the places from
begins[v] to begins[v + 1], and places from begins[V] on hold nothing. `reference_vocabulary` has the hash, the tags and
the entries.
Shapes: N places, V vocabularies, R rows, B bags.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from funcrec.kernels.reference_jagged import ascending
from funcrec.kernels.triton import launch as on
from funcrec.kernels.triton.device import jit, kernel, lanes, mix, of_least, upper_bound
from funcrec.kernels.vocabulary import SLOTS, Admission, Column, columns_of, of_shared
from torch import Tensor

IDS = 8  # of a program, with 128 slots each
MOST_BUCKETS = 2**30  # of all vocabularies of a call
FACTS = tl.constexpr(16)  # numbers of a vocabulary in `Vocabularies.about`, of which these are the places:
TAGS, ENTRIES, SKETCH, SCORES, NOW, ROWS, BUCKETS, SHARED, POLICY, TTL, LEAST, SHARE, SALT, SALT_32, LATER = (
    tl.constexpr(i) for i in range(15)
)


class Form(NamedTuple):
    """A vocabulary: its tensors and settings. room: the most ids. later: what is added to `now`."""

    tags: Tensor
    entries: Tensor
    how: Admission
    room: int = 0
    sketch: Tensor | None = None
    scores: Tensor | None = None
    now: Tensor | None = None
    later: int = 0


class Vocabularies(NamedTuple):
    """Vocabularies of one launch.

    bases: i64[V + 1], the number of the first bucket of each among all buckets. rooms: i64[V + 1], where its changes
    begin. about: i64[V * 16], addresses of its tensors and its settings. alive: the tensors whose addresses these are.
    """

    bases: Tensor
    rooms: Tensor
    about: Tensor
    count: int
    buckets: int
    room: int
    alive: list[Tensor | None]


class Places(NamedTuple):
    """begins: i64[V + 1], the first place of each vocabulary. at: i64[N], the place of an id among all ids."""

    begins: Tensor
    at: Tensor


def together(call: str, forms: Sequence[Form], device: torch.device) -> Vocabularies:
    rooms, bases, about, alive = [0], [0], [], []
    for f in forms:
        _check(call, f)
        tensors = [f.tags, f.entries, f.sketch, f.scores, f.now]
        shared, buckets = of_shared(f.how.shared)
        rooms.append(rooms[-1] + f.room)
        bases.append(bases[-1] + f.tags.shape[0] // SLOTS)
        about += [0 if x is None else x.data_ptr() for x in tensors]
        about += [f.tags.shape[0], buckets or f.tags.shape[0] // SLOTS, shared, f.how.policy, f.how.ttl, f.how.least]
        about += [f.how.share, f.how.salt & 0xFFFFFFFF, f.how.salt >> 32 & 0xFFFFFFFF, f.later, 0]
        alive += tensors
    if bases[-1] > MOST_BUCKETS:
        got = f"{SLOTS * bases[-1]} rows"
        on.fail("the vocabularies are too large.", got, f"at most {SLOTS * MOST_BUCKETS}", "several calls", call)
    packed, n = on.pack([*bases, *rooms, *about], device), len(forms) + 1
    return Vocabularies(packed, packed[n:], packed[2 * n :], len(forms), bases[-1], rooms[-1], alive)


def _check(call: str, f: Form) -> None:
    """Raise if the tensors are not those of a vocabulary: kernels get their addresses alone."""
    own = [x for x in (f.tags, f.entries, f.sketch, f.scores) if x is not None]
    fits = f.entries.shape == (f.tags.shape[0], 2) and f.tags.shape[0] and not f.tags.shape[0] % SLOTS
    fits = fits and all(x.shape == f.tags.shape for x in own if x is not f.entries)
    kinds = (f.tags, torch.uint8), (f.entries, torch.int64), (f.sketch, torch.uint8), (f.scores, torch.int64)
    fits = fits and all(x is None or (x.dtype == kind and x.is_contiguous()) for x, kind in kinds)
    if not fits:
        got, need = f"{[f'{x.dtype}{list(x.shape)}' for x in own]}", f"u8[R], i64[R, 2], R a multiple of {SLOTS}"
        on.fail("the state is not a vocabulary.", got, f"{need}, contiguous", "fr.vocabulary(capacity)", call)
    if f.now is not None and (f.now.dtype != torch.int64 or f.now.dim()):
        on.fail("`now` is not a step.", f"{f.now.dtype}{list(f.now.shape)}", "i64[]", "vocabulary.now", call)
    if f.how.least and f.now is not None and f.sketch is None:
        on.fail("a vocabulary has no sketch.", f"least={f.how.least}", "u8[R]", "fr.vocabulary(admit=2)", call)


def as_ids(call: str, ids: Tensor) -> Tensor:
    """Return the ids as i64[N], without gaps."""
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
        on.fail("`ids` are not ids.", f"{ids.dtype}{list(ids.shape)}", "i32 or i64[N]", "ids.long()", call)
    return ids.long().contiguous()


def whole(ids: Tensor, valid: Tensor) -> Places:
    """Return the places of one vocabulary whose ids are the first `valid` ones."""
    n = ids.shape[0]
    end = valid.reshape(1).long().clamp(0, n)
    return Places(torch.cat([end * 0, end]), torch.arange(n, device=ids.device))


# -- columns of bags ---------------------------------------------------------------------------------------------


def of_columns(call: str, count: int, ids, offsets, columns: Sequence[int], device: torch.device) -> Places:
    """Return the places of the ids in columns of bags, at most `max_length` of each bag, in the order of columns."""
    every = sorted(columns_of(columns), key=lambda c: c.vocabulary)
    _check_columns(call, every, count, ids, offsets)
    sizes, bags, bounds_at, ids_at = [x.shape[0] for x in ids], [0], [0], [0]
    for c in every:
        bags.append(bags[-1] + c.num_bags)
    for x, o in zip(ids, offsets, strict=True):
        ids_at.append(ids_at[-1] + x.shape[0])
        bounds_at.append(bounds_at[-1] + o.shape[0])
    own = [sum(c.num_bags for c in every if c.vocabulary < v) for v in range(count + 1)]
    first, longest = [bounds_at[c.buffer] + c.first_bag for c in every], [c.max_length for c in every]
    packed, size, n = on.pack([*bags, *first, *longest, *own], device), bags[-1], len(every)
    parts = [ascending(o).long().clamp(0, n) + at for o, n, at in zip(offsets, sizes, ids_at, strict=False)]
    bounds = torch.cat(parts) if parts else torch.zeros(1, dtype=torch.int64, device=device)
    starts, lengths = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(2))
    on.launch(
        _bags, (on.cdiv(size, on.BLOCK),), packed, packed[n + 1 :], packed[2 * n + 1 :], bounds, starts, lengths, size,
        n, on.steps(n), LANES=on.BLOCK,
    )  # fmt: skip
    sums = torch.zeros(size + 1, dtype=torch.int64, device=device)
    torch.cumsum(lengths, 0, out=sums[1:])
    begins = sums[packed[3 * n + 1 : 3 * n + 2 + count]].clamp(max=ids_at[-1])
    at = torch.empty(ids_at[-1], dtype=torch.int64, device=device)
    on.launch(
        _places, (on.cdiv(ids_at[-1], on.BLOCK),), sums, starts, at, ids_at[-1], size, on.steps(size), LANES=on.BLOCK
    )
    return Places(begins, at)


def _check_columns(call: str, columns: Sequence[Column], count: int, ids, offsets) -> None:
    for c in columns:
        is_there = 0 <= c.vocabulary < count and 0 <= c.buffer < len(ids) and min(c) >= 0
        if not is_there or c.first_bag + c.num_bags >= offsets[c.buffer].shape[0]:
            got = f"{c}, {count} vocabularies, {[x.shape[0] for x in offsets]} offsets"
            on.fail("a column does not fit.", got, "a vocabulary, a buffer and bags that exist", "see ops", call)


@kernel()
def _bags(bags, first, longest, bounds, starts, lengths, size, count, steps, LANES: tl.constexpr):
    """Write where each bag's ids begin, and how many count."""
    bag = lanes(LANES)
    inside = bag < size
    column = tl.maximum(upper_bound(bags, bag * 0, bag * 0 + count, bag, steps) - 1, 0)
    at = tl.load(first + column, mask=inside, other=0) + bag - tl.load(bags + column, mask=inside, other=0)
    begin = tl.load(bounds + at, mask=inside, other=0)
    length = tl.load(bounds + at + 1, mask=inside, other=0) - begin
    most = tl.load(longest + column, mask=inside, other=0)
    tl.store(starts + bag, begin, mask=inside)
    tl.store(lengths + bag, tl.where(most > 0, tl.minimum(length, most), length), mask=inside)


@kernel()
def _places(sums, starts, at, size, num_bags, steps, LANES: tl.constexpr):
    """Write the position of each place's id. Places after the last id get 0."""
    place = lanes(LANES)
    given = (place < size) & (place < tl.load(sums + num_bags))
    bag = tl.maximum(upper_bound(sums, place * 0, place * 0 + num_bags, place, steps) - 1, 0)
    position = tl.load(starts + bag, mask=given, other=0) + place - tl.load(sums + bag, mask=given, other=0)
    tl.store(at + place, position, mask=place < size)


# -- device functions --------------------------------------------------------------------------------------------


@jit
def vocabulary_at(begins, place, size, count, steps):
    """Return the vocabulary of each place, or the last one, and whether the place holds an id."""
    given = (place < size) & (place < tl.load(begins + count))
    v = upper_bound(begins, place * 0, place * 0 + count, place, steps) - 1
    return v, given


@triton.jit
def fact(about, v, NTH: tl.constexpr):
    return tl.load(about + v * FACTS + NTH)


@triton.jit
def hash_in(about, v, id):
    return mix(id ^ (fact(about, v, SALT) | (fact(about, v, SALT_32) << 32)))


@triton.jit
def bucket_in(about, v, h):
    """Return the bucket of each hashed id in its vocabulary."""
    return ((((h >> 32) & 0xFFFFFFFF) * fact(about, v, BUCKETS)) >> 32) % (fact(about, v, ROWS) // 128)


@triton.jit
def unknown_in(about, v, h):
    """Return the row that unknown ids share, or -1."""
    shared = fact(about, v, SHARED)
    return tl.where(shared > 0, fact(about, v, ROWS) + (((h & 0xFFFFFFFF) * shared) >> 32), -1)


@triton.jit
def step_in(about, v):
    """Return the number of the step in which ids are admitted."""
    return tl.load(fact(about, v, NOW).to(tl.pointer_type(tl.int64))) + fact(about, v, LATER)


@triton.jit
def tag_of(h):
    return tl.maximum(h & 255, 1)


@triton.jit
def counters_of(h):
    """Return the slots of an id's two counters in the line of its bucket."""
    first = (h >> 8) & 127
    return first, (first + 1 + ((h >> 15) & 63)) & 127


@triton.jit
def find(about, v, id, h, given, SLOTS: tl.constexpr):
    """Return the row of each id, or -1 for unknown ids and those that are not given."""
    slot = tl.arange(0, SLOTS).to(tl.int64)
    row = (bucket_in(about, v, h) * SLOTS)[:, None] + slot[None, :]
    tags = (fact(about, v, TAGS)[:, None] + row).to(tl.pointer_type(tl.uint8))
    near = given[:, None] & (tl.load(tags, mask=given[:, None], other=0).to(tl.int64) == tag_of(h)[:, None])
    entries = (fact(about, v, ENTRIES)[:, None] + 16 * row).to(tl.pointer_type(tl.int64))
    same = near & (tl.load(entries, mask=near, other=0) == id[:, None])
    none = fact(about, v, ROWS)
    found = tl.reduce(tl.where(same, row, none[:, None]), 1, of_least)
    return tl.where(found < none, found, -1)


# -- find --------------------------------------------------------------------------------------------------------


def find_ids(tags: Tensor, entries: Tensor, ids: Tensor, valid: Tensor, shared: int, salt: int) -> Tensor:
    """Return the row of each of the first `valid` ids, i64[N]; for an unknown id a shared row, or -1."""
    out = torch.full((ids.shape[0],), -1, dtype=torch.int64, device=ids.device)
    forms = [Form(tags.contiguous(), entries.contiguous(), Admission(0, 0, 0, 0, shared, salt))]
    call = "funcrec.kernels.triton.find_ids"
    _find_all(together(call, forms, ids.device), as_ids(call, ids), whole(ids, valid), out)
    return out


def find_columns(
    state: Sequence[Tensor], ids: Tensor, offsets: Tensor, how: Sequence[int], columns: Sequence[int]
) -> Tensor:
    """Return the ids with rows in place of the ids of the columns, i64[N]."""
    call, state = "funcrec.kernels.triton.find_columns", on.contiguous(state)
    ids = as_ids(call, ids)
    out = ids.clone()
    each = zip(state[::2], state[1::2], how[::2], how[1::2], strict=True)
    forms = [Form(tags, entries, Admission(0, 0, 0, 0, shared, salt)) for tags, entries, shared, salt in each]
    if forms:
        them = together(call, forms, ids.device)
        _find_all(them, ids, of_columns(call, them.count, [ids], [offsets], columns, ids.device), out)
    return out


def _find_all(them: Vocabularies, ids: Tensor, places: Places, out: Tensor) -> None:
    on.launch(
        _find, (on.cdiv(ids.shape[0], IDS),), *places, them.about, ids, out, ids.shape[0], them.count,
        on.steps(them.count), TILE_IDS=IDS, SLOTS=SLOTS, num_warps=4,
    )  # fmt: skip


@kernel()
def _find(begins, at, about, ids, out, size, count, steps, TILE_IDS: tl.constexpr, SLOTS: tl.constexpr):
    place = lanes(TILE_IDS)
    v, given = vocabulary_at(begins, place, size, count, steps)
    position = tl.load(at + place, mask=given, other=0)
    id = tl.load(ids + position, mask=given, other=0)
    h = hash_in(about, v, id)
    row = find(about, v, id, h, given, SLOTS)
    tl.store(out + position, tl.where(row >= 0, row, unknown_in(about, v, h)), mask=given)
