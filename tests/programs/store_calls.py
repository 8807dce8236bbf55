"""Calls of stores, and what their records have to be: the records of the store in memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

import funcrec as fr
from funcrec.testing import assert_trees_close

NUM_ROWS = 150  # more than a worker takes at once
EVERY = torch.arange(NUM_ROWS)


def is_same(a: Tensor, b: Tensor) -> None:
    assert_trees_close(a, b, rtol=0, atol=0)


def generated(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return rows that may come twice, and records."""
    g = torch.Generator().manual_seed(seed)
    start = int(torch.randint(NUM_ROWS, (), generator=g))
    rows = (start + torch.randint(2 * count + 1, (count,), generator=g)) % NUM_ROWS
    return rows, torch.randn(count, 3, generator=g)


def steps(store: fr.ColdStore) -> Iterator[int]:
    """Write and commit. Yield the step of each commit that has returned."""
    for step in range(1, 4):
        for k in range(2):
            store.write(*generated(10 * step + k, 30))
        store.commit(step)
        yield step
    store.write(*generated(99, 30))


def after(step: int) -> Tensor:
    """Return the records after the commit of a step, by a store in memory."""
    store = fr.memory_store(NUM_ROWS, 3)
    for done in steps(store) if step else ():
        if done == step:
            break
    return store.read(EVERY)
