"""Vocabularies on ranks: each rank has an equal range of the buckets, and ids travel to the rank of their bucket.

    ids ─send─▶ the ranks of their buckets ─find, admit─▶ rows ─answered─▶ the ranks of the bags

A bucket follows from the id alone. So a sender knows the rank of an id without the vocabulary, and each rank searches
and admits the ids of its own buckets only. Any range of buckets behaves as in the whole vocabulary, because an id reads
and writes one bucket.
Shapes: N ids, R rows of a vocabulary, V vocabularies, n ranks, C places for the ids of a rank.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from funcrec.core import Problem, mix, pytree, replace, tree_map
from funcrec.kernels import ops
from funcrec.kernels.reference_vocabulary import bucket_of
from funcrec.kernels.vocabulary import SLOTS, Column, places_of, shared_of
from funcrec.kinds._columns import Buffers, Seen, admission_of, timed_state_of, with_timed_state
from funcrec.kinds._renewal import NewRows
from funcrec.kinds._vocabulary import Vocabulary
from funcrec.mesh import Mesh, P, all_gather, all_to_all, axis_index, axis_size, psum, shard, unshard


@pytree(static=("num_rows", "axes"))
class VocabularyShard:
    """A vocabulary, cut by buckets over the ranks of `axes`: a plan with `buckets` makes these of vocabularies.

    Args:
      own: the rows of this rank's buckets, as a vocabulary of its own; free rows follow the last bucket. On an emulated
        mesh it has the rows of all ranks.
      num_rows: R, the rows of the whole vocabulary.
      axes: axes of the mesh; the first axis is the major one.
    """

    own: Vocabulary
    num_rows: int
    axes: tuple[str, ...]

    @property
    def capacity(self) -> int:
        return self.num_rows

    @property
    def num_shared(self) -> int:
        return self.own.num_shared

    @property
    def num_embeddings(self) -> int:
        return self.num_rows + self.num_shared

    @property
    def entries(self) -> Tensor:
        return self.own.entries

    @property
    def shared(self) -> int:
        """Return the number that tells the operations how this is a part of a vocabulary."""
        return shared_of(self.num_shared, self.num_rows // SLOTS)

    def owner(self, ids: Tensor) -> Tensor:
        """Return the rank that has the bucket of each id, i64[N]."""
        bucket = bucket_of(mix(ids ^ self.own.salt), self.num_rows)
        return torch.div(bucket, self.own.capacity // SLOTS, rounding_mode="floor")

    def as_whole(self, rows: Tensor) -> Tensor:
        """Return the numbers in the whole vocabulary of rows of this rank, i64[N]."""
        first = axis_index(self.axes) * self.own.capacity
        known, unknown = rows + first, rows - self.own.capacity + self.num_rows
        return torch.where(rows < 0, rows, torch.where(rows < self.own.capacity, known, unknown))

    def __repr__(self) -> str:
        return f"VocabularyShard({repr(self.own).partition('(')[2][:-1]} of {self.num_rows}, axes={self.axes})"


def is_shard(x: Any) -> TypeGuard[VocabularyShard]:
    return isinstance(x, VocabularyShard)


def is_cut(vocabularies: Iterable[Any]) -> TypeGuard[Sequence[VocabularyShard]]:
    """Return whether a rank has a part of each vocabulary."""
    return any(map(is_shard, vocabularies))


def here(vocabulary: Vocabulary | VocabularyShard) -> Vocabulary:
    """Return the part of a vocabulary that this rank has."""
    return vocabulary.own if isinstance(vocabulary, VocabularyShard) else vocabulary


# -- outside of a mesh -------------------------------------------------------------------------------------------


def cut_vocabulary(whole: Vocabulary, axes: tuple[str, ...], mesh: Mesh) -> VocabularyShard:
    """Return this process's part of a vocabulary."""
    n = prod(mesh.shape[a] for a in axes)
    rows = -(-whole.capacity // (n * SLOTS)) * SLOTS

    def cut(x: Tensor) -> Tensor:
        padded = torch.cat([x, x.new_zeros(n * rows - x.shape[0], *x.shape[1:])])
        return shard(padded, P(axes), mesh=mesh).clone()

    sketch = None if whole.sketch is None else cut(whole.sketch)
    own = replace(whole, tags=cut(whole.tags), entries=cut(whole.entries), sketch=sketch)
    return VocabularyShard(own, whole.capacity, axes)


def join_vocabulary(part: VocabularyShard, mesh: Mesh) -> Vocabulary:
    """Return the whole vocabulary on every rank."""
    join = lambda x: unshard(x, P(part.axes), mesh=mesh)[: part.num_rows].clone()
    sketch = None if part.own.sketch is None else join(part.own.sketch)
    return replace(part.own, tags=join(part.own.tags), entries=join(part.own.entries), sketch=sketch)


def shard_specs(part: VocabularyShard) -> VocabularyShard:
    """Return a P for each tensor."""
    own, cut = tree_map(lambda x: P(), part.own), P(part.axes)
    return replace(part, own=replace(own, tags=cut, entries=cut, sketch=None if part.own.sketch is None else cut))


# -- exchanges ---------------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """Numbers that ranks sent to each other, in V groups, with room for all of a rank's numbers in each block.

    got: i64[n · C] of each group. counts: i64[n, V], how many numbers of each block are used. places: i64[N] of each
    group, the places of this rank's numbers among those that it sent, and n · C for numbers that it did not send.
    """

    got: list[Tensor]
    counts: Tensor
    places: list[Tensor]
    axes: tuple[str, ...]

    def answered(self, answers: Sequence[Tensor]) -> list[Tensor]:
        """Return the answer to each number that this rank sent, i64[N] of each group, or -1.

        answers: i64[n · C], the answers to `got`.
        """
        n = self.counts.shape[0]
        back = all_to_all(torch.cat([x.view(n, x.shape[0] // n) for x in answers], 1), self.axes)
        each = back.split([x.shape[0] // n for x in answers], 1)
        take = lambda x, at: torch.cat([x.flatten(), x.new_full((1,), -1)])[at]
        return [take(x, at) for x, at in zip(each, self.places, strict=True)]


def send(owners: Sequence[Tensor], values: Sequence[Tensor], axes: tuple[str, ...]) -> Sent:
    """Send values i64[N] to their owners i64[N], in groups. A value whose owner is -1 is not sent."""
    n, blocks, counts, places = axis_size(axes), [], [], []
    for owner, x in zip(owners, values, strict=True):
        room = x.shape[0]
        bounds = torch.tensor([0, room], device=x.device)
        _, lengths, _, to = ops.bucketize(owner, bounds, None, n, 1)
        first = owner.clamp(min=0) * room - (lengths.cumsum(0) - lengths)[owner.clamp(min=0)]
        place = torch.where(to < 0, n * room, first + to)
        blocks.append(torch.index_put(x.new_zeros(n * room + 1), (place,), x)[:-1].view(n, room))
        counts.append(lengths)
        places.append(place)
    got = all_to_all(torch.cat([*blocks, torch.stack(counts, 1)], 1), axes)
    *each, counted = got.split([*(x.shape[1] for x in blocks), len(counts)], 1)
    return Sent([x.flatten() for x in each], counted, places, axes)


def bounds_of(sent: Sent, group: int) -> Tensor:
    """Return the boundaries of a group's blocks, i64[2n]: numbers of rank r lie in [bounds[2r], bounds[2r + 1])."""
    n = sent.counts.shape[0]
    begin = torch.arange(n, device=sent.counts.device) * (sent.got[group].shape[0] // n)
    return torch.stack([begin, begin + sent.counts[:, group]], 1).flatten()


def send_ids(shards: Sequence[VocabularyShard], given: Buffers) -> tuple[list[Tensor], Sent]:
    """Send the ids of a rank's bags to the ranks of their buckets. Return (the places of each vocabulary's ids, Sent).

    Places are those among the ids of all buffers, and N in places without an id.
    """
    whole, owners, values, places = torch.cat([x.long() for x in given.ids]), [], [], []
    for v, s in enumerate(shards):
        at = places_in(given, v)
        ids = torch.cat([whole, whole.new_zeros(1)])[at]
        owners.append(torch.where(at < whole.shape[0], s.owner(ids), -1))
        values.append(ids)
        places.append(at)
    return places, send(owners, values, shards[0].axes)


def places_in(given: Buffers, vocabulary: int) -> Tensor:
    """Return the places of a vocabulary's ids among those of all buffers, i64[C]; N where there is no id."""
    own = [c for c in given.bags if c.vocabulary == vocabulary]
    before, starts, lengths = [0, *accumulate(x.shape[0] for x in given.ids)], [], []
    for c in own:
        bounds = given.offsets[c.buffer].long()[c.first_bag :][: c.num_bags + 1]
        bounds = bounds if c.max_length else torch.cat([bounds[:1], bounds[-1:]])
        starts.append(bounds[:-1] + before[c.buffer])
        lengths.append(bounds.diff().clamp(max=c.max_length) if c.max_length else bounds.diff())
    every = torch.arange(before[-1], device=given.ids[0].device)
    (room,) = places_of([None], [c._replace(vocabulary=0) for c in own], [x.shape[0] for x in given.ids])
    at, ends = ops.take_ranges(every, torch.cat(starts), torch.cat(lengths), room)
    return torch.where(torch.arange(room, device=at.device) < ends[-1], at, before[-1])


def put_rows(places: Sequence[Tensor], rows: Sequence[Tensor], others: Tensor) -> Tensor:
    """Return i64[N] with the rows of all vocabularies in their places, and `others` elsewhere."""
    out = torch.cat([others, others.new_zeros(1)])
    for at, own in zip(places, rows, strict=True):
        out = torch.index_put(out, (at,), own)
    return out[:-1]


# -- on each rank ------------------------------------------------------------------------------------------------


def find_on_ranks(shards: Sequence[VocabularyShard], given: Buffers) -> Tensor:
    """Return the ids of a buffer with rows in place of those of its bags, i64[N], as `find_columns` of `ops` does.

    given: the one buffer of this rank. All ranks call it.
    """
    places, sent = send_ids(shards, given)
    n, ends = axis_size(sent.axes), [0, *accumulate(x.shape[0] for x in sent.got)]
    offsets = torch.cat([bounds_of(sent, v) + ends[v] for v in range(len(shards))])
    bags = [Column(v, 0, 2 * (v * n + r), 1, 0) for v in range(len(shards)) for r in range(n)]
    ids = torch.cat(sent.got)
    state, how = [x for s in shards for x in (s.own.tags, s.own.entries)], [(s.shared, s.own.salt) for s in shards]
    found = ops.find_columns(state, ids, offsets, how, bags, implementation=ops.available("find_columns", ids.device))
    each = found.split([x.shape[0] for x in sent.got])
    rows = sent.answered([s.as_whole(x) for s, x in zip(shards, each, strict=True)])
    return put_rows(places, rows, given.ids[0].long())


def admit_on_ranks(
    shards: Sequence[VocabularyShard], given: Buffers, followed: Collection[int] = ()
) -> tuple[list[VocabularyShard], NewRows, Tensor]:
    """Return what `admit_columns` returns for the ids of all ranks: the shards after the step, new rows, and numbers.

    given: the buffers of this rank. followed: vocabularies whose new rows are needed on the rank of their bucket only;
    of the others, every rank gets the new rows of all.
    """
    places, sent = send_ids(shards, given)
    n, offsets = axis_size(sent.axes), [bounds_of(sent, v) for v in range(len(shards))]
    bags = [Column(v, v, 2 * r, 1, 0) for v in range(len(shards)) for r in range(n)]
    state = [x for s in shards for x in timed_state_of(s.own)]
    how = [admission_of(s.own)._replace(shared=s.shared) for s in shards]
    choice = ops.available("admit_columns", state[0].device)
    found = ops.admit_columns(state, [], sent.got, offsets, how, bags, implementation=choice)
    settled = iter(ops.settle_columns(state, sent.got, offsets, found, how, bags, implementation=choice))
    own = [with_timed_state(s.own, [next(settled) for _ in timed_state_of(s.own)]) for s in shards]
    # the kernel's clock is that of one rank; this one is the same on all ranks
    after = [replace(s, own=replace(v, now=s.own.now + 1)) for s, v in zip(shards, own, strict=True)]
    each = found[0].split([x.shape[0] for x in sent.got])
    rows = sent.answered([s.as_whole(x) for s, x in zip(shards, each, strict=True)])
    whole = put_rows(places, rows, torch.full_like(torch.cat(given.ids), -1, dtype=torch.int64))
    entries = [s.entries for s in after]
    buckets = [s.num_rows // SLOTS for s in shards]
    got = Seen(Buffers(sent.got, offsets, bags), found[0], found[1], entries, buckets)
    seen = Seen(given, whole, None, entries, sent=got)
    new, numbers = new_rows(shards, [x.shape[0] for x in sent.got], found, followed)
    return after, new._replace(seen=seen), numbers


def new_rows(
    shards: Sequence[VocabularyShard], sizes: Sequence[int], found: Sequence[Tensor], followed: Collection[int]
) -> tuple[NewRows, Tensor]:
    """Return (the new rows that this rank needs, numbers of all ranks i64[V, 4]). found: what `admit_columns` returned.

    Each rank writes its new rows behind those of the ranks before it, into zeros, and the ranks add these up.
    """
    _, _, changed, new_ids, _, numbers = found
    axes = shards[0].axes
    every, rank = all_gather(numbers, axes), axis_index(axes)
    total, counts = every.sum(0), every[:, :, 0]
    before = torch.where((torch.arange(len(counts), device=rank.device) < rank)[:, None], counts, 0).sum(0)
    rows, ids, shared, used = [], [], [], []
    for v, s in enumerate(shards):
        begin, end = sum(sizes[:v]), sum(sizes[: v + 1])
        own = s.as_whole(changed[begin:end]), new_ids[begin:end]
        used.append(numbers[v] if v in followed else total[v])
        if v not in followed:
            place = torch.arange(end - begin, device=rank.device)
            at = torch.where(place < numbers[v, 0], place + before[v], end - begin)
            own = tuple(torch.index_put(x.new_zeros(end - begin + 1), (at,), x)[:-1] for x in own)
            shared += [(v, 0), (v, 1)]
        rows.append(own[0])
        ids.append(own[1])
    if shared:
        both = [(rows, ids)[k][v] for v, k in shared]
        summed = psum(torch.cat(both), axes).split([x.shape[0] for x in both])
        for (v, k), x in zip(shared, summed, strict=True):
            (rows, ids)[k][v] = x
    return NewRows(torch.cat(rows), torch.cat(ids), torch.stack(used).flatten(), tuple(sizes), 4), total


def ids_on_ranks(shard: VocabularyShard, rows: Tensor) -> Tensor:
    """Return the id of each row of the whole vocabulary, i64[M], from the rank of its bucket; -1 for other rows."""
    owner = torch.where((rows >= 0) & (rows < shard.num_rows), rows // shard.own.capacity, -1)
    sent = send([owner], [rows % shard.own.capacity], shard.axes)
    return sent.answered([shard.entries[:, 0][sent.got[0]]])[0]


# -- validators --------------------------------------------------------------------------------------------------


def cut_problems(name: str, whole: Vocabulary, is_cache: bool) -> Iterator[Problem]:
    """Report a vocabulary that is not cut by buckets. is_cache: whether its tables have more rows in stores."""
    if is_cache:
        what = f"cache {name!r} is not cut by buckets: each rank serves the ids of all ranks."
        yield Problem(what, f"{whole!r}", "vocabularies whose tables are in memory", "a plan without `buckets`")
    if callable(whole.policy):
        what = f"the policy of vocabulary {name!r} reads all rows, and a rank would have a part of them."
        yield Problem(what, f"policy={whole.policy!r}", "a policy by name", "a plan without `buckets`")


def batch_axes_problems(shards: Sequence[VocabularyShard], batch_axes: tuple[str, ...]) -> Iterator[Problem]:
    """Report shards over other axes than those that cut the batch."""
    for s in shards[:1]:
        if set(s.axes) != set(batch_axes):
            got, need = f"buckets over {s.axes}, bags over {batch_axes}", "the same axes"
            yield Problem("vocabularies and the batch are cut over different axes.", got, need,
                          f"fr.Plan(..., buckets={batch_axes})")  # fmt: skip
