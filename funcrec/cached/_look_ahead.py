"""Keeps the rows that the next batches read: Belady's rule, as far as the batches are known.

    score(row) = soon(row) · 2³³ - age,        soon: w for the next batch, ..., 1 for the w-th, 0 for none of them

Shapes: C rows in memory, w batches.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from funcrec.core import replace
from funcrec.jagged import JaggedTensor
from funcrec.kinds import Vocabulary, find

T = TypeVar("T")
AGES = 1 << 33  # more than any age


def windowed(items: Iterable[T], size: int) -> Iterator[tuple[T, list[T]]]:
    """Yield each item with the next `size` items, or as many as there are."""
    held: deque[T] = deque()
    for item in items:
        held.append(item)
        if len(held) > size:
            yield held.popleft(), list(held)
    while held:
        yield held.popleft(), list(held)


def keeping(vocabulary: Vocabulary, later: Sequence[JaggedTensor]) -> Vocabulary:
    """Return the vocabulary with a policy by which the rows of later batches leave last, those of the next one last of
    all."""
    if not later:
        return vocabulary
    parts = [x.values[: int(x.offsets[-1])] for x in later]
    sooner = [torch.full_like(x, len(parts) - i) for i, x in enumerate(parts)]
    soon = vocabulary.entries.new_zeros(vocabulary.num_embeddings)
    soon.scatter_reduce_(0, find(vocabulary, torch.cat(parts)), torch.cat(sooner), "amax")
    return replace(vocabulary, policy=lambda age, count: soon[: vocabulary.capacity] * AGES - age)
