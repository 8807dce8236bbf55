"""The schemas of the operations on vocabularies, the shapes of their results, and the numbers that they share.

Shapes: N ids, R rows, V vocabularies, P places of their changes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SLOTS = 128  # rows of a bucket
LRU, LFU, DISTANCE_LFU, SCORED = range(4)  # the policies
EVERYONE = 1 << 53  # `share` that admits every id

SCHEMAS = {
    "find_ids": "(Tensor tags, Tensor entries, Tensor ids, Tensor valid, int shared, int salt) -> Tensor",
    "admit_ids": "(Tensor[] state, Tensor now, Tensor ids, Tensor valid, Tensor? scores, int policy, int ttl, int "
    "least, int share, int shared, int salt) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "settle_ids": "(Tensor[] state, Tensor now, Tensor ids, Tensor rows, Tensor missed, Tensor changed, Tensor "
    "new_ids, Tensor counts, Tensor numbers, int least, int salt) -> Tensor[]",
    "settle_ids_": "(Tensor(a!)[] state, Tensor now, Tensor ids, Tensor rows, Tensor missed, Tensor changed, Tensor "
    "new_ids, Tensor counts, Tensor numbers, int least, int salt) -> ()",
    "find_columns": "(Tensor[] state, Tensor ids, Tensor offsets, int[] how, SymInt[] columns) -> Tensor",
    "admit_columns": "(Tensor[] state, Tensor[] scores, Tensor[] ids, Tensor[] offsets, int[] how, int[] columns) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "settle_columns": "(Tensor[] state, Tensor[] ids, Tensor[] offsets, Tensor[] found, int[] how, int[] columns) -> "
    "Tensor[]",
    "settle_columns_": "(Tensor(a!)[] state, Tensor[] ids, Tensor[] offsets, Tensor[] found, int[] how, int[] columns) "
    "-> ()",
}


class Column(NamedTuple):
    """Bags whose ids belong to a vocabulary.

    vocabulary, buffer: numbers of the vocabulary and of the buffer of ids.
    first_bag, num_bags: the bags are offsets[first_bag : first_bag + num_bags + 1]. max_length: the number of ids that
    count in a bag, 0 for all.
    """

    vocabulary: int
    buffer: int
    first_bag: int
    num_bags: int
    max_length: int


class Admission(NamedTuple):
    """How a vocabulary admits ids: the settings of `admit_ids`. shared: as `shared_of` has it."""

    policy: int
    ttl: int
    least: int
    share: int
    shared: int
    salt: int


def shared_of(num_shared: int, buckets: int = 0) -> int:
    """Return the number `shared` of the operations.

    buckets: of the whole vocabulary, if the state is a part of it: as many buckets as each other part has. Bucket b of
    the whole is bucket b mod (buckets of a part) of its part.
    """
    return num_shared | buckets << 32


def of_shared(shared: int) -> tuple[int, int]:
    """Return (num_shared, buckets) of `shared_of`."""
    return shared & ((1 << 32) - 1), shared >> 32


def columns_of(flat: Sequence[int]) -> list[Column]:
    return [Column(*flat[i : i + 5]) for i in range(0, len(flat), 5)]


def admissions_of(flat: Sequence[int]) -> list[Admission]:
    return [Admission(*flat[i : i + 6]) for i in range(0, len(flat), 6)]


def places_of(how: Sequence[object], columns: Sequence[Column], sizes: Sequence[int]) -> list[int]:
    """Return the most ids of each vocabulary in buffers of these sizes."""
    room = [[0] * len(sizes) for _ in how]
    for c in columns:
        room[c.vocabulary][c.buffer] += c.num_bags * c.max_length if c.max_length else sizes[c.buffer]
    return [sum(map(min, own, sizes)) for own in room]


def states_of(how: Sequence[Admission], state: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors of each vocabulary: tags, entries, now and, if `least` is not 0, a sketch."""
    each, out = iter(state), []
    for x in how:
        out.append([next(each) for _ in range(4 if x.least else 3)])
    return out


def _admit_ids(state, now, ids, *rest):
    n = ids.shape[0]
    kinds = [torch.int64] * 4 + [torch.bool, torch.int64, torch.bool]
    return *(ids.new_empty(n, dtype=kind) for kind in kinds), ids.new_empty(4, dtype=torch.int64)


def _admit_columns(state, scores, ids, offsets, how, columns):
    sizes = [x.shape[0] for x in ids]
    n, places = sum(sizes), sum(places_of(admissions_of(how), columns_of(columns), sizes))
    blank = lambda *shape, dtype=torch.int64: state[0].new_empty(shape, dtype=dtype)
    return blank(n), blank(n, dtype=torch.bool), blank(places), blank(places), blank(places), blank(len(how) // 6, 4)


def _blank(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


FAKES = {
    "find_ids": lambda tags, entries, ids, *rest: ids.new_empty(ids.shape[0], dtype=torch.int64),
    "admit_ids": _admit_ids,
    "settle_ids": lambda state, *rest: [_blank(x) for x in state],
    "find_columns": lambda state, ids, *rest: ids.new_empty(ids.shape[0], dtype=torch.int64),
    "admit_columns": _admit_columns,
    "settle_columns": lambda state, *rest: [_blank(x) for x in state],
}
