"""The planner's relaxed program: what every rank has is beside the largest shard on its rank."""

import random

import pytest

from funcrec.planner._packing import Item, Option, Packing
from funcrec.planner._solve import solve

SINGLE = tuple((r,) for r in range(128))
HOSTS = tuple(tuple(range(h, h + 8)) for h in range(0, 128, 8))


def packing(seed: int, num: int) -> Packing:
    """Tables on a rank, on one of 16 hosts, or on every rank, of times drawn over two decades."""
    draw, items = random.Random(seed), []
    for i in range(num):
        host = 10 ** draw.uniform(-2, 0)
        every = Option("every rank", ((10 ** draw.uniform(-2, 1) * host,),), (tuple(range(128)),))
        options = (Option("a rank", ((6 * host,),), SINGLE), Option("a host", ((host,),), HOSTS), every)
        items.append(Item(f"t{i}", options))
    return Packing(tuple(items), 128, (1.0,))


@pytest.mark.parametrize("seed, num", [(3, 30), (8, 30), (9, 30), (34, 60)])
def test_the_bound_counts_what_every_rank_has(seed, num):
    """A plan is proved the best where the largest shard lies on a rank that has its part of the tables on all ranks,
    too."""
    assert solve(packing(seed, num)).gap < 1e-6
